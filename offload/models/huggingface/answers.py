"""A transformers model that answers: a folder of a model, of a run, or of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from offload.errors import UserError
from offload.models.huggingface.generation import Generator, TextStream, home_of
from offload.models.protocol import Sampling, SavedRuns
from offload.paths import expanded


class HuggingFaceAnswerer:
    """A :class:`offload.models.protocol.Answerer`: a folder of a model, of a run, or of a checkpoint.

    Args:
        model: the section of that name.
        make_tokenizer: of the folder that has the model's own files.
        sampling: how tokens are chosen.
        base: of an adapter; None for where its training had it.
        saved: finds a run's newest checkpoint.
        device: where the model goes.
        dtype: of its parameters.
        tell: called with each line for the user.

    Raises:
        UserError: for a folder that holds no model.
    """

    def __init__(
        self,
        model: DictConfig,
        make_tokenizer: Callable[[Path | None], Any],
        *,
        sampling: Sampling,
        base: Path | None,
        saved: SavedRuns,
        device: torch.device,
        dtype: torch.dtype,
        tell: Callable[[str], object],
    ) -> None:
        folder = expanded(str(model.path), "model.path").absolute()
        if not folder.is_dir():
            raise UserError(
                f"model.path: there is no folder {folder}: give a model's, a run's output_dir or one of its checkpoints"
            )
        newest = saved.newest(folder)
        if newest is not None:
            tell(f"newest checkpoint in {folder}: {newest.name}")
            folder = newest
        home = home_of(folder, base)
        if home != folder:
            tell(f"{folder.name} is an adapter of {home}")
        if not (home / "config.json").is_file():
            raise UserError(
                f"model.path: {home} has no config.json, so it is no model, and no step_<n> of a run: a run saves at "
                "the end of each epoch, or every save_every_n_steps"
            )
        self._tokenizer = make_tokenizer(home)
        options: dict[str, Any] = {str(k): v for k, v in model.items() if k not in ("_component_", "path")}
        self._generator = Generator(
            home,
            folder,
            device=device,
            dtype=dtype,
            sampling=sampling,
            stop=self._tokenizer.stop_tokens,
            **options,
        )
        tell(f"sampling: {self._generator.described}")
        self.context = self._generator.max_seq_len

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer.has_template:
            prompt: list[int] = tokenizer.encode_prompt(list(messages))
            return prompt
        text = "\n\n".join(message["content"] for message in messages)
        prompt = tokenizer.encode_completion(text, "")[0]
        return prompt[:-1] if prompt and prompt[-1] == tokenizer.eos_id else prompt

    def reserve(self, tokens: int) -> None:
        return None  # its cache grows

    def answer(
        self,
        prompt: Sequence[int],
        show: Callable[[str], None],
        *,
        max_new_tokens: int,
        seed: int | None,
        use_cache: bool,
    ) -> list[int]:
        stream = TextStream(self._tokenizer.decode, show)
        answer = self._generator.answer(
            prompt, max_new_tokens=max_new_tokens, seed=seed, use_cache=use_cache, on_token=stream.put
        )
        stream.end()
        return answer

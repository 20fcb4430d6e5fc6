"""Answers of a transformers model: a folder of a model, of a run, or of an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.errors import UserError
from offload.models.huggingface.loading import from_pretrained


def home_of(folder: Path, base: Path | None) -> Path:
    """Where the model's own files (weights, tokenizer) are: ``folder``, or the base of the adapter in it.

    Args:
        folder: of a model, or a checkpoint of a run: with the model's weights, or with an adapter alone.
        base: where the base model of an adapter is; None for where its training had it.

    Raises:
        UserError: where the base of an adapter is not there.
    """
    config = folder / "adapter" / "adapter_config.json"
    if any(folder.glob("*.safetensors")) or not config.is_file():
        return folder
    if base is None:
        try:
            named = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"model.path: cannot read {config}: {error}") from error
        base = Path(str(named)).expanduser()
    if not base.is_dir():
        raise UserError(
            f"base_checkpoint_dir: {folder} holds an adapter alone, and its base model is no longer in {base}: give "
            "the folder where it is now"
        )
    return base


class Generator:
    """A model that answers.

    Args:
        home: where the model's files are.
        folder: the same, or a checkpoint with an adapter for it.
        device: where the model goes.
        dtype: of its parameters.
        options: further arguments of :func:`offload.models.huggingface.from_pretrained`.

    Raises:
        UserError: for a folder that holds no model.
    """

    def __init__(self, home: Path, folder: Path, *, device: torch.device, dtype: torch.dtype, **options: Any) -> None:
        self._model = from_pretrained(home, device=device, dtype=dtype, **options)
        if folder != home:
            from peft import PeftModel

            self._model.module = PeftModel.from_pretrained(self._model.module, str(folder / "adapter"))
        self._model.module.eval()
        self._device = device
        self.max_seq_len = self._model.max_seq_len

    @torch.inference_mode()
    def answer(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        seed: int | None,
        stop: Sequence[int],
        use_cache: bool,
        on_token: Callable[[int], None],
    ) -> list[int]:
        """The token ids of an answer, without the one that ends it.

        Args:
            prompt: token ids.
            max_new_tokens: length at most.
            temperature: 0 for the likeliest token each time.
            top_k: choose among so many; None for all.
            seed: of the choice; None for another one each time.
            stop: tokens that end an answer.
            use_cache: keep what was computed for earlier tokens.
            on_token: told each token as it is made.
        """
        module: Any = self._model.module
        tokens = torch.tensor([list(prompt)], device=self._device)
        if seed is not None:
            torch.manual_seed(seed)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
        made = module.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(stop) or None,
            pad_token_id=next(iter(stop), 0),
            use_cache=use_cache,
            streamer=_Streamer(len(prompt), set(stop), on_token),
            **sampling,
        )
        answer: list[int] = made[0, len(prompt) :].tolist()
        return answer[:-1] if answer and answer[-1] in stop else answer


class _Streamer:
    """What ``generate`` hands tokens to: first the prompt's, then each that is made."""

    def __init__(self, prompt: int, stop: set[int], on_token: Callable[[int], None]) -> None:
        self._left, self._stop, self._on_token = prompt, stop, on_token

    def put(self, value: torch.Tensor) -> None:
        for token in value.flatten().tolist():
            if self._left:
                self._left -= 1
            elif token not in self._stop:
                self._on_token(token)

    def end(self) -> None:
        return None

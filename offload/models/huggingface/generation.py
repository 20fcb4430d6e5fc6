"""Answers of a transformers model: a folder of a model, of a run, or of an adapter."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.errors import UserError
from offload.models.huggingface.adapter import wrapping
from offload.models.huggingface.loading import from_pretrained
from offload.models.protocol import Sampling

# What a GenerationConfig may have set that means nothing where the likeliest token is taken.
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


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
        sampling: how tokens are chosen.
        stop: tokens that end an answer, beside those of the model's ``generation_config.json``.
        options: further arguments of :func:`offload.models.huggingface.from_pretrained`.

    Attributes:
        max_seq_len: tokens of a prompt and its answer at most; None where nothing limits them.
        stop: all tokens that end an answer.
        described: how tokens are chosen, for people.

    Raises:
        UserError: for a folder that holds no model.
    """

    def __init__(
        self,
        home: Path,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        sampling: Sampling,
        stop: Sequence[int],
        **options: Any,
    ) -> None:
        self._model = from_pretrained(home, device=device, dtype=dtype, **options)
        config: Any = copy.deepcopy(self._model.module.generation_config)
        if folder != home:
            from peft import PeftModel

            with wrapping():
                self._model.module = PeftModel.from_pretrained(self._model.module, str(folder / "adapter"))
        self._model.module.eval()
        self._device = device
        self.max_seq_len = self._model.max_seq_len
        own = config.eos_token_id
        self.stop = sorted({*stop, *(own if isinstance(own, list) else [] if own is None else [own])})
        config.update(eos_token_id=self.stop or None, pad_token_id=next(iter(self.stop), 0), max_length=None)
        self.described = _choose(config, sampling)
        self._config = config

    @torch.inference_mode()
    def answer(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        seed: int | None,
        use_cache: bool,
        on_token: Callable[[int], None],
    ) -> list[int]:
        """The token ids of an answer, without the one that ends it.

        Args:
            prompt: token ids.
            max_new_tokens: length at most.
            seed: of the choice; None for another one each time.
            use_cache: keep what was computed for earlier tokens.
            on_token: told each token as it is made, but the one that ends the answer.
        """
        module: Any = self._model.module
        tokens = torch.tensor([list(prompt)], device=self._device)
        if seed is not None:
            torch.manual_seed(seed)
        config = copy.deepcopy(self._config)
        config.update(max_new_tokens=max_new_tokens, use_cache=use_cache)
        made = module.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=config,
            streamer=_Streamer(len(prompt), set(self.stop), on_token),
        )
        answer: list[int] = made[0, len(prompt) :].tolist()
        return answer[:-1] if answer and answer[-1] in self.stop else answer


def _choose(config: Any, sampling: Sampling) -> str:
    """Set how tokens are chosen in a ``GenerationConfig``; returns it in words."""
    wanted = {name: value for name, value in dataclasses.asdict(sampling).items() if value is not None}
    if sampling.temperature == 0 or (sampling.temperature is None and not config.do_sample):
        config.update(do_sample=False, **dict.fromkeys(_OF_SAMPLING))
        return "the likeliest token each time"
    config.update(do_sample=True, **wanted)
    values = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    return ", ".join(f"{name} {value:g}" for name, value in values.items() if value is not None)


class TextStream:
    """Text of tokens that come one after the other.

    Args:
        decode: text of token ids.
        show: told each new part of it.
    """

    def __init__(self, decode: Callable[[list[int]], str], show: Callable[[str], None]) -> None:
        self._decode, self._show = decode, show
        self._tokens: list[int] = []
        # Decoded are the new tokens and those of the part shown last: what a token looks like depends on the one before
        # it, and decoding all of a long answer for each of its tokens takes longer and longer.
        self._start = self._shown = 0

    def put(self, token: int) -> None:
        """The next token."""
        self._tokens.append(token)
        text = self._new()
        # Half of a character that takes several tokens is not text yet.
        if text and not text.endswith("\ufffd"):
            self._show(text)
            self._start, self._shown = self._shown, len(self._tokens)

    def end(self) -> None:
        """No token follows."""
        if text := self._new():
            self._show(text)

    def _new(self) -> str:
        before = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(before) :]


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

"""Answers of a torchtune model: a folder of a model, of a run, or of a checkpoint."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from offload.component import resolve
from offload.errors import UserError
from offload.models.protocol import Sampling, SavedRuns
from offload.models.torchtune.base_checkpoint import BaseCheckpoint
from offload.models.torchtune.building import build_as_the_base, load_weights
from offload.models.torchtune.checkpoint import TorchtuneFormat
from offload.paths import expanded


class TorchtuneAnswerer:
    """A :class:`offload.models.protocol.Answerer`.

    Args:
        model: the section of that name, without adapters: those of a checkpoint are merged.
        checkpointer: the section of that name.
        make_tokenizer: told nothing: the configuration says which.
        sampling: how tokens are chosen.
        base: of a checkpoint that is an adapter alone; None: where its training had it.
        saved: reads what training runs left.
        device: where the model goes.
        dtype: of its parameters.
        tell: called with each line for the user.

    Raises:
        UserError: no checkpoint there, a damaged one, or an adapter whose base cannot be found.
    """

    def __init__(
        self,
        model: DictConfig,
        checkpointer: DictConfig,
        make_tokenizer: Callable[[Path | None], Any],
        *,
        sampling: Sampling,
        base: Path | None,
        saved: SavedRuns,
        device: torch.device,
        dtype: torch.dtype,
        tell: Callable[[str], object],
    ) -> None:
        if sampling.top_p is not None:
            raise UserError("top_p: torchtune's generation does not know it; leave it out, or set top_k")
        self._sampling = sampling
        self._tokenizer = make_tokenizer(None)
        weights, source, described = load_checkpoint(checkpointer, base, saved, tell)
        decoder: Any = build_as_the_base(model, described, self._tokenizer, device=device, dtype=dtype, tell=tell)
        load_weights(decoder, weights, source=str(source))
        self._model = decoder.eval()
        self.context: int | None = decoder.max_seq_len
        self._device, self._dtype = device, dtype
        self._room: int | None = None

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        from torchtune.data import Message

        turns = [Message(role=message["role"], content=message["content"]) for message in messages]
        # An empty answer makes the template open the assistant's turn.
        turns.append(Message(role="assistant", content=""))
        tokens: list[int] = self._tokenizer({"messages": turns}, inference=True)["tokens"]
        return tokens

    def reserve(self, tokens: int) -> None:
        self._room = tokens if self.context is None else min(tokens, self.context)

    @torch.inference_mode()
    def answer(
        self,
        prompt: Sequence[int],
        show: Callable[[str], None],
        *,
        max_new_tokens: int,
        seed: int | None,
        use_cache: bool,
    ) -> list[int]:
        from torchtune.generation import generate

        if use_cache:
            self._clear_cache(len(prompt) + max_new_tokens)
        # torch.multinomial's stand-in in torchtune divides by the temperature: 0 means the likeliest token.
        temperature = self._sampling.temperature or 0.0
        greedy = temperature == 0
        rng = None if seed is None else torch.Generator(self._device).manual_seed(seed)
        tokens, _ = generate(
            self._model,
            torch.tensor(prompt, device=self._device),
            max_generated_tokens=max_new_tokens,
            pad_id=self._tokenizer.pad_id,
            temperature=1.0 if greedy else temperature,
            top_k=1 if greedy else self._sampling.top_k or None,
            stop_tokens=self._tokenizer.stop_tokens,
            rng=rng,
        )
        answer: list[int] = tokens[0, len(prompt) :].tolist()
        stop = next((i for i, token in enumerate(answer) if token in self._tokenizer.stop_tokens), len(answer))
        show(self._tokenizer.decode(answer[:stop]))
        return answer[:stop]

    def _clear_cache(self, tokens: int) -> None:
        if self._model.caches_are_setup():
            self._model.reset_caches()
            return
        with self._device:
            self._model.setup_caches(batch_size=1, dtype=self._dtype, decoder_max_seq_len=max(tokens, self._room or 0))


def load_checkpoint(
    section: DictConfig, base: Path | None, saved: SavedRuns, tell: Callable[[str], object]
) -> tuple[dict[str, Tensor], Path, BaseCheckpoint]:
    """The weights that ``checkpointer`` names, under torchtune's names, adapters merged.

    Args:
        section: the config's ``checkpointer``.
        base: of a checkpoint that is an adapter alone; None: where its training had it.
        saved: reads what training runs left.
        tell: called with each line for the user.

    Returns:
        (weights on the CPU, the folder that they come from, the checkpoint whose config.json describes them)

    Raises:
        UserError: no checkpoint there, a damaged one, or an adapter whose base cannot be found.
    """
    folder = expanded(str(section.checkpoint_dir), "checkpointer.checkpoint_dir").absolute()
    if not folder.is_dir():
        raise UserError(
            f"checkpointer.checkpoint_dir: there is no folder {folder}: give a training run's output_dir, "
            "one of its step_<n> folders, or a downloaded checkpoint"
        )
    newest = saved.newest(folder)
    if newest is not None:
        tell(f"newest checkpoint in {folder}: {newest.name}")
        folder = newest
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    training = None if has_weights else saved.config(folder)
    if training is None:
        weights, described = _read(_with_folder(section, folder))
        return weights, folder, described.base
    home = expanded(base or training["checkpointer"]["checkpoint_dir"], "base_checkpoint_dir").absolute()
    if not home.is_dir():
        raise UserError(
            f"base_checkpoint_dir: {folder} holds an adapter alone, and its base model is no longer "
            f"in {home}: give the folder where it is now"
        )
    tell(f"{folder.name} is an adapter: merging it into {home}")
    weights, described = _read(_with_folder(section, home))
    adapter = saved.adapter(folder, described)
    assert adapter is not None
    return merge(weights, adapter, training["model"]), folder, described.base


def _read(section: DictConfig) -> tuple[dict[str, Tensor], TorchtuneFormat]:
    format = TorchtuneFormat(section)
    # What loads checkpoints also wants a place to save them.
    with tempfile.TemporaryDirectory() as nowhere:
        format.prepare(Path(nowhere))
        return format.load_base(), format


def merge(base: dict[str, Tensor], adapter: Mapping[str, Tensor], model: Mapping[str, Any]) -> dict[str, Tensor]:
    """``base`` with a LoRA or DoRA adapter added into its weights: fp32 arithmetic, the base's dtype.

    Args:
        base: torchtune's names, e.g. ``layers.0.attn.q_proj.weight`` [out, in].
        adapter: torchtune's names, e.g. ``layers.0.attn.q_proj.lora_a.weight`` [rank, in].
        model: the model component that was trained, for its ``lora_alpha``.
    """
    from torchtune.modules.peft import get_merged_lora_ckpt

    alpha = model.get("lora_alpha")
    if alpha is None:
        builder = resolve(str(model["_component_"]), key="model._component_")
        alpha = inspect.signature(builder).parameters["lora_alpha"].default
    merged = dict(base)
    for name, lora_a in adapter.items():
        if not name.endswith(".lora_a.weight"):
            continue
        module = name.removesuffix(".lora_a.weight")
        # One module at a time: a whole model in fp32 would not fit where it fits in bf16.
        parts = {f"{module}.weight": base[f"{module}.weight"].float()}
        parts |= {part: tensor.float() for part, tensor in adapter.items() if part.startswith(f"{module}.")}
        weight = get_merged_lora_ckpt(parts, rank=lora_a.shape[0], alpha=alpha)[f"{module}.weight"]
        merged[f"{module}.weight"] = weight.to(base[f"{module}.weight"].dtype)
    return merged


def _with_folder(section: DictConfig, folder: Path) -> DictConfig:
    """``section`` pointed at ``folder``; files that were listed for another folder are found anew."""
    changed = copy.deepcopy(section)
    if folder != Path(str(section.checkpoint_dir)).expanduser().absolute():
        changed.pop("checkpoint_files", None)
    changed.checkpoint_dir = str(folder)
    return changed

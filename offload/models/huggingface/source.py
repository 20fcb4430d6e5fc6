"""Where a run's model comes from: a folder that transformers opens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from offload.config.loading import instantiate
from offload.errors import UserError
from offload.models.huggingface import shares
from offload.models.huggingface.adapter import AdaptedModel, begins_with_weights
from offload.models.huggingface.attention import check_attention
from offload.models.huggingface.checkpoint import HuggingFaceFormat
from offload.models.huggingface.model import HuggingFaceModel
from offload.models.huggingface.quantized import IN_4BIT, check_stored, stored_format
from offload.models.protocol import AdaptedLM, CausalLM
from offload.models.size import num_elements
from offload.models.vocabulary import check_vocabulary, end_warning
from offload.paths import expanded

_META = torch.device("meta")


def check_section(section: DictConfig, device: torch.device, dtype: torch.dtype, *, adapts: bool) -> None:
    """Refuse what no folder makes good.

    Args:
        section: the model's.
        device: trains.
        dtype: of the parameters.
        adapts: an adapter trains, and not the whole model.

    Raises:
        UserError: names the key.
    """
    if section.get("load_in_4bit") and not adapts:
        raise UserError(
            "model.load_in_4bit=True: weights in 4 bits cannot be trained: use the recipe lora_finetune_single_device "
            "with an adapter, or leave it out"
        )
    folder = expanded(str(section.get("path")), "model.path")
    try:
        check_stored(folder, load_in_4bit=bool(section.get("load_in_4bit")), adapts=adapts)
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError, AttributeError):
        pass  # what is wrong is told when it is opened
    if "attn_implementation" in section:
        check_attention(section.attn_implementation, device, dtype)


def is_told_by_its_files(section: DictConfig) -> bool:
    """Whether a model's folder tells its sizes: it neither brings code of its own nor has weights packed in 4 bits."""
    return not section.get("trust_remote_code") and is_plain_in_files(section)


def is_plain_in_files(section: DictConfig) -> bool:
    """Whether a model's folder has no weights packed in 4 bits that stay so."""
    try:
        return stored_format(Path(str(section.get("path"))).expanduser()) != IN_4BIT
    except (OSError, RuntimeError, ValueError, AttributeError):
        return True  # what is wrong is told when it is opened


class HuggingFaceSource:
    """Models of transformers, from a folder.

    Args:
        model: the section of that name.
        adapter: the section of that name: one of peft's configurations.
        tokenizer: the run's; its vocabulary has to fit.
        device: where the model goes.
        dtype: of its parameters.
        tell: called with each line for the user.
    """

    masks_documents = False

    def __init__(
        self,
        model: DictConfig,
        adapter: DictConfig | None,
        tokenizer: Any,
        device: torch.device,
        dtype: torch.dtype,
        tell: Callable[[str], object],
    ) -> None:
        self.format = HuggingFaceFormat(expanded(str(model.path), "model.path").absolute())
        self._section, self._adapter, self._tokenizer = model, adapter, tokenizer
        self._device, self._dtype, self._tell = device, dtype, tell

    def outline(self, *, adapts: bool) -> CausalLM:
        config = self._adapter_config() if adapts else None
        model = self._open(None, _META)
        return model if config is None else AdaptedModel(model, config)

    def _open(self, folder: Path | None, device: torch.device) -> HuggingFaceModel:
        section = self._section.copy()
        if folder is not None:
            section.path = str(folder)
        model: HuggingFaceModel = instantiate(section, device=device, dtype=self._dtype)
        check_vocabulary(self._tokenizer, model.num_embeddings, checkpoint=self.format.key)
        return model

    def _adapter_config(self) -> Any:
        if self._adapter is None:
            raise UserError(
                "adapter is missing: give one of peft's configurations, such as adapter._component_=peft.LoraConfig "
                "adapter.r=16 adapter.target_modules=all-linear, or use the recipe full_finetune_single_device"
            )
        return instantiate(self._adapter)

    def _load(self, folder: Path | None, device: torch.device) -> HuggingFaceModel:
        model = self._open(folder, device)
        if (warning := end_warning(self._tokenizer, model.module.config)) is not None:
            self._tell(f"warning: {warning}")
        if model.dequantized is not None:
            self._tell(
                f"model: the {model.dequantized} weights of {self.format.directory} are dequantised: "
                f"{self._dtype.itemsize} bytes per parameter, in memory and in checkpoints"
            )
        if self._section.get("load_in_4bit") or model.is_in_4bit:
            sizes = [(num_elements(p), p.dtype == torch.uint8) for p in model.module.parameters()]
            share = sum(size for size, is_packed in sizes if is_packed) / sum(size for size, _ in sizes)
            self._tell(f"model: {share:.0%} of its weights are in 4-bit NF4")
        if model.frozen:
            self._tell(f"model: {', '.join(model.frozen)} are no part of the language model: they stay as they are")
        if not model.has_separate_head:
            self._tell(
                f"model: {type(model.module).__name__} changes its logits in a way that is not known here: all of them "
                "are held at once, and the loss is not fused with the head"
            )
        self.format.model = model
        return model

    def full(self, saved: Mapping[str, Tensor] | None, folder: Path | None) -> CausalLM:
        return self._load(folder, self._device)

    def can_fill(self, *, adapts: bool) -> bool:
        folder = self.format.directory
        is_packed = self._section.get("load_in_4bit") or (folder.is_dir() and stored_format(folder) is not None)
        return not is_packed and not (adapts and begins_with_weights(self._adapter_config()))

    def empty(self) -> CausalLM:
        return self._load(None, _META)

    def empty_adapted(self, adapter: Mapping[str, Tensor] | None, folder: Path | None) -> AdaptedLM:
        return self._adapt(self._load(None, _META), adapter, folder, draws=True)

    def fill(self, model: CausalLM, folder: Path | None, device: torch.device) -> None:
        assert isinstance(model, HuggingFaceModel)
        path = folder or self.format.directory
        shares.fill(model.module, model.in_checkpoints, path, lambda: self._open(folder, _META).module, device)

    def adapted(self, adapter: Mapping[str, Tensor] | None, folder: Path | None) -> AdaptedLM:
        return self._adapt(self._load(None, self._device), adapter, folder)

    def _adapt(
        self, base: HuggingFaceModel, adapter: Mapping[str, Tensor] | None, folder: Path | None, *, draws: bool = False
    ) -> AdaptedModel:
        model = AdaptedModel(base, self._adapter_config(), draws=draws)
        if model.left_out:
            self._tell(
                f"adapter.target_modules=all-linear: without {', '.join(model.left_out)}, whose output is more than a "
                "product"
            )
        self.format.model = model
        if folder is not None:
            model.load_adapter(adapter)
        return model

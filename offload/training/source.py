"""Where a recipe's model comes from: torchtune's builders, or a folder that transformers opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from offload.component import resolve
from offload.config.loading import instantiate
from offload.errors import UserError
from offload.metrics.lines import say
from offload.models.huggingface import AdaptedModel, HuggingFaceModel, from_pretrained
from offload.models.huggingface.checkpoint import HuggingFaceFormat
from offload.models.protocol import AdaptedLM, CausalLM, ModelFormat
from offload.models.size import num_elements
from offload.models.torchtune import AdaptedTorchtuneModel, TorchtuneModel, architecture, lora
from offload.models.torchtune.building import build_as_the_base, load_weights
from offload.models.torchtune.checkpoint import TorchtuneFormat
from offload.models.vocabulary import check_vocabulary, end_warning
from offload.paths import expanded
from offload.training.settings import TrainSettings

_META = torch.device("meta")


class ModelSource(Protocol):
    """Makes the model of a run, with the weights that it begins with."""

    masks_documents: bool
    """The model tells the documents of a pack by a mask; otherwise by their positions."""

    @property
    def format(self) -> ModelFormat:
        """How its weights are read and written."""

    def outline(self, *, adapts: bool) -> CausalLM:
        """The model that trains, on the meta device: names, shapes and what is frozen. No weight is read.

        Args:
            adapts: an adapter trains, and not the whole model.

        Raises:
            UserError: as :meth:`full` or :meth:`adapted`, but for what only the weights tell.
        """

    def full(self, saved: Mapping[str, Tensor] | None, folder: Path | None) -> CausalLM:
        """The model to train whole.

        Args:
            saved: the weights of the checkpoint to go on from, where :attr:`format` reads them.
            folder: of that checkpoint; None to begin with the base model.
        """

    def adapted(self, adapter: Mapping[str, Tensor] | None, folder: Path | None) -> AdaptedLM:
        """The base model with an adapter to train.

        Args:
            adapter: of the checkpoint to go on from; None where it has none.
            folder: of that checkpoint; None to begin with an adapter that changes nothing.
        """


def names_transformers(model: DictConfig) -> bool:
    """Whether a ``model`` section is of a folder that transformers opens."""
    return resolve(str(model["_component_"]), key="model._component_") is from_pretrained


def find_source(settings: TrainSettings, tokenizer: Any, device: torch.device, dtype: torch.dtype) -> ModelSource:
    """The source that the ``model`` section names.

    Raises:
        UserError: where ``model`` and ``checkpointer`` do not go together.
    """
    if names_transformers(settings.model):
        if settings.checkpointer is not None:
            raise UserError(
                "checkpointer: a model of transformers reads and writes its own format; remove the section, and give "
                "the folder as model.path"
            )
        return HuggingFaceSource(settings.model, getattr(settings, "adapter", None), tokenizer, device, dtype)
    if settings.checkpointer is None:
        raise UserError(
            "checkpointer is missing: a torchtune model needs checkpointer._component_="
            "torchtune.training.FullModelHFCheckpointer, checkpointer.checkpoint_dir and checkpointer.model_type"
        )
    if getattr(settings, "adapter", None) is not None:
        raise UserError(
            "adapter: is for models of transformers; torchtune's lora_* builders take lora_rank, lora_alpha and "
            "lora_attn_modules in model: remove the section"
        )
    return TorchtuneSource(settings.model, settings.checkpointer, tokenizer, device, dtype)


class TorchtuneSource:
    """Models of torchtune's builders, held against their base checkpoint's ``config.json``.

    Args:
        model: the section of that name.
        checkpointer: the section of that name.
        tokenizer: the run's; its vocabulary has to fit.
        device: where the model goes.
        dtype: of its parameters.
    """

    masks_documents = True

    def __init__(
        self, model: DictConfig, checkpointer: DictConfig, tokenizer: Any, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.format = TorchtuneFormat(checkpointer)
        self._section, self._tokenizer, self._device, self._dtype = model, tokenizer, device, dtype
        self._origin = str(checkpointer.checkpoint_dir)

    def outline(self, *, adapts: bool) -> CausalLM:
        section = self._section.copy()  # the run fills it in, and says with what
        model = build_as_the_base(
            section, self.format.base, self._tokenizer, device=_META, dtype=self._dtype, tell=lambda note: None
        )
        if adapts:
            lora.prepare_adapter(model)
        return TorchtuneModel(model)

    def _build(self) -> nn.Module:
        """The model, without weights yet; what config.json of the base checkpoint says of it holds."""
        base = self.format.base
        model = build_as_the_base(
            self._section, base, self._tokenizer, device=self._device, dtype=self._dtype, tell=say
        )
        for note in architecture.context_notes(base, getattr(self._tokenizer, "max_seq_len", None)):
            say(f"note: {note}")
        return model

    def full(self, saved: Mapping[str, Tensor] | None, folder: Path | None) -> CausalLM:
        model = self._build()
        load_weights(model, self.format.load_base() if saved is None else saved, source=self._origin)
        return TorchtuneModel(model)

    def adapted(self, adapter: Mapping[str, Tensor] | None, folder: Path | None) -> AdaptedLM:
        model = self._build()
        lora.prepare_adapter(model)
        lora.load_base_weights(model, self.format.load_base(), source=self._origin)
        if folder is not None:
            lora.load_adapter(model, adapter)
        return AdaptedTorchtuneModel(model)


class HuggingFaceSource:
    """Models of transformers, from a folder.

    Args:
        model: the section of that name.
        adapter: the section of that name: one of peft's configurations.
        tokenizer: the run's; its vocabulary has to fit.
        device: where the model goes.
        dtype: of its parameters.
    """

    masks_documents = False

    def __init__(
        self, model: DictConfig, adapter: DictConfig | None, tokenizer: Any, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.format = HuggingFaceFormat(expanded(str(model.path), "model.path").absolute())
        self._section, self._adapter, self._tokenizer = model, adapter, tokenizer
        self._device, self._dtype = device, dtype

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

    def _load(self, folder: Path | None) -> HuggingFaceModel:
        model = self._open(folder, self._device)
        if (warning := end_warning(self._tokenizer, model.module.config)) is not None:
            say(f"warning: {warning}")
        if model.dequantized is not None:
            say(
                f"model: the {model.dequantized} weights of {self.format.directory} are dequantised: "
                f"{self._dtype.itemsize} bytes per parameter, in memory and in checkpoints"
            )
        if self._section.get("load_in_4bit") or model.is_in_4bit:
            sizes = [(num_elements(p), p.dtype == torch.uint8) for p in model.module.parameters()]
            share = sum(size for size, is_packed in sizes if is_packed) / sum(size for size, _ in sizes)
            say(f"model: {share:.0%} of its weights are in 4-bit NF4")
        if model.frozen:
            say(f"model: {', '.join(model.frozen)} are no part of the language model: they stay as they are")
        if not model.has_separate_head:
            say(
                f"model: {type(model.module).__name__} changes its logits in a way that is not known here: all of them "
                "are held at once, and the loss is not fused with the head"
            )
        self.format.model = model
        return model

    def full(self, saved: Mapping[str, Tensor] | None, folder: Path | None) -> CausalLM:
        model = self._load(folder)
        if model.is_in_4bit:
            raise UserError(
                f"model.path: the weights in {self.format.directory} are in 4 bits, which cannot be trained: use the "
                "recipe lora_finetune_single_device with an adapter, or give the folder of the original model"
            )
        return model

    def adapted(self, adapter: Mapping[str, Tensor] | None, folder: Path | None) -> AdaptedLM:
        config = self._adapter_config()
        model = AdaptedModel(self._load(None), config)
        self.format.model = model
        if folder is not None:
            if adapter is None:
                raise UserError(
                    "resume_from_checkpoint: the checkpoint holds a full model and no adapter; resume it with "
                    "full_finetune_single_device, or give this run an output_dir of its own"
                )
            model.load_adapter(adapter)
        return model

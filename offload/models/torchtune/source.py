"""Where a run's model comes from: torchtune's builders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from offload.models.protocol import AdaptedLM, CausalLM
from offload.models.torchtune import architecture, lora
from offload.models.torchtune.building import build_as_the_base, build_model, fill_share, load_weights
from offload.models.torchtune.checkpoint import TorchtuneFormat
from offload.models.torchtune.model import AdaptedTorchtuneModel, TorchtuneModel

_META = torch.device("meta")


def empty_model(section: DictConfig, dtype: torch.dtype, *, adapts: bool) -> torch.nn.Module:
    """The ``model`` component on the meta device.

    Args:
        section: the component, with all that it needs.
        dtype: of the parameters.
        adapts: an adapter trains, and not the whole model.

    Raises:
        UserError: it cannot be trained so.
    """
    model = build_model(section, device=_META, dtype=dtype)
    if adapts:
        lora.prepare_adapter(model)
    return model


class TorchtuneSource:
    """Models of torchtune's builders, held against their base checkpoint's ``config.json``.

    Args:
        model: the section of that name.
        checkpointer: the section of that name.
        tokenizer: the run's; its vocabulary has to fit.
        device: where the model goes.
        dtype: of its parameters.
        tell: called with each line for the user.
    """

    masks_documents = True

    def __init__(
        self,
        model: DictConfig,
        checkpointer: DictConfig,
        tokenizer: Any,
        device: torch.device,
        dtype: torch.dtype,
        tell: Callable[[str], object],
    ) -> None:
        self.format = TorchtuneFormat(checkpointer)
        self._section, self._tokenizer, self._device, self._dtype, self._tell = model, tokenizer, device, dtype, tell
        self._origin = str(checkpointer.checkpoint_dir)

    def outline(self, *, adapts: bool) -> CausalLM:
        section = self._section.copy()  # the run fills it in, and says with what
        model = build_as_the_base(
            section, self.format.base, self._tokenizer, device=_META, dtype=self._dtype, tell=lambda note: None
        )
        if adapts:
            lora.prepare_adapter(model)
        return TorchtuneModel(model)

    def _build(self, device: torch.device) -> torch.nn.Module:
        """The model, without weights yet; what config.json of the base checkpoint says of it holds."""
        base = self.format.base
        model = build_as_the_base(
            self._section, base, self._tokenizer, device=device, dtype=self._dtype, tell=self._tell
        )
        for note in architecture.context_notes(base, getattr(self._tokenizer, "max_seq_len", None)):
            self._tell(f"note: {note}")
        return model

    def full(self, saved: Mapping[str, Tensor] | None, folder: Path | None) -> CausalLM:
        model = self._build(self._device)
        load_weights(model, self.format.load_base() if saved is None else saved, source=self._origin)
        return TorchtuneModel(model)

    def can_fill(self, *, adapts: bool) -> bool:
        return not (self._section.get("quantize_base") or (adapts and self._section.get("use_dora")))

    def empty(self) -> CausalLM:
        return TorchtuneModel(self._build(_META))

    def empty_adapted(self, adapter: Mapping[str, Tensor] | None, folder: Path | None) -> AdaptedLM:
        model = self._build(_META)
        lora.prepare_adapter(model)
        lora.draw_adapter(model)
        if folder is not None:
            lora.load_adapter(model, adapter)
        return AdaptedTorchtuneModel(model)

    def fill(self, model: CausalLM, folder: Path | None, device: torch.device) -> None:
        base = self.format.base
        if folder is None:
            files = [base.directory / name for name in base.files]
        else:
            files = sorted(folder.glob("*.safetensors"))
        source = self._origin if folder is None else str(folder)
        fill_share(model.module, base, files, device=device, dtype=self._dtype, source=source)

    def adapted(self, adapter: Mapping[str, Tensor] | None, folder: Path | None) -> AdaptedLM:
        model = self._build(self._device)
        lora.prepare_adapter(model)
        lora.draw_adapter(model)
        lora.load_base_weights(model, self.format.load_base(), source=self._origin)
        if folder is not None:
            lora.load_adapter(model, adapter)
        return AdaptedTorchtuneModel(model)

"""A model of torchtune by its builder's arguments alone."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from offload.models.protocol import NF4_BYTES, Packed
from offload.models.torchtune.building import build_model
from offload.models.torchtune.lora import prepare_adapter
from offload.models.torchtune.model import AdaptedTorchtuneModel, TorchtuneModel


def describe(section: DictConfig, dtype: torch.dtype, *, adapts: bool) -> tuple[TorchtuneModel, Packed]:
    """The model on the meta device, and those of its weights that ``quantize_base`` rounds to 4 bits.

    Args:
        section: the component, with all that it needs.
        dtype: of the parameters.
        adapts: an adapter trains, and not the whole model.

    Raises:
        UserError: it cannot be built, or has no adapter.
    """
    section = section.copy()
    rounds = bool(section.pop("quantize_base", False))
    if "qlora" in str(section["_component_"]):  # the same builder with quantize_base=True
        section["_component_"] = str(section["_component_"]).replace("qlora", "lora")
        rounds = True
    decoder: Any = build_model(section, device=torch.device("meta"), dtype=dtype)
    _build_caches(decoder)
    if adapts:
        prepare_adapter(decoder)
    rounded = [
        param
        for name, param in decoder.named_parameters()
        if rounds and param.dim() == 2 and name.startswith("layers.") and not param.requires_grad
    ]
    return (AdaptedTorchtuneModel if adapts else TorchtuneModel)(decoder), Packed(rounded, NF4_BYTES)


def _build_caches(decoder: nn.Module) -> None:
    """The rotations of Llama 3.1, which torchtune leaves out on the meta device because their values need memory."""
    with torch.device("meta"):
        for module in decoder.modules():
            if getattr(module, "is_cache_built", True) is False:
                rotary: Any = module
                rotary.register_buffer("theta", torch.empty(rotary.dim // 2), persistent=False)
                rotary.build_rope_cache(rotary.max_seq_len)
                rotary.is_cache_built = True

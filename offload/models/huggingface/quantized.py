"""Weights in fewer bits: folders that store them so, and a frozen base in 4 bits for LoRA."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from offload.errors import UserError
from offload.models.protocol import NF4_BYTES, Packed

DEQUANTIZED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Formats in which models are published, and transformers' class for each: their weights become plain ones."""

IN_4BIT = "bitsandbytes 4-bit"
"""A format that stays as it is, frozen under an adapter."""


def stored_format(folder: Path) -> str | None:
    """How the weights in a model's folder are quantised, by ``config.json``; None where they are not."""
    section = _stored_section(folder)
    if isinstance(section, dict) and section:
        is_4bit = section.get("load_in_4bit") and section.get("quant_method", "bitsandbytes") == "bitsandbytes"
        return IN_4BIT if is_4bit else str(section.get("quant_method", "an unnamed method"))
    return str(section) if section else None


def _stored_section(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sections = (
        part.get("quantization_config") for part in (config, config.get("text_config")) if isinstance(part, dict)
    )
    return next(filter(None, sections), None)


def check_stored(folder: Path, *, load_in_4bit: bool, adapts: bool) -> str | None:
    """How the weights in a folder are quantised, where they can be trained so; None where they are not.

    Args:
        folder: of the model.
        load_in_4bit: the weights of linear layers are rounded to NF4.
        adapts: an adapter trains, and not the whole model.

    Raises:
        UserError: for a format that is for inference, or one that only an adapter goes with; where bitsandbytes is not
            installed.
    """
    stored = stored_format(folder)
    if stored is not None and stored not in DEQUANTIZED and stored != IN_4BIT:
        raise UserError(
            f"model.path: the weights in {folder} are quantised ({stored}) and cannot be trained: give the folder of "
            f"the original model; of quantised ones only {', '.join(DEQUANTIZED)} (read as plain weights) and "
            "bitsandbytes 4-bit (for LoRA) are read"
        )
    if stored in DEQUANTIZED and load_in_4bit:
        raise UserError(
            f"model.load_in_4bit=True: the weights in {folder} are {stored} already, which is read as plain "
            "weights: leave load_in_4bit out, or give a folder in bf16 or in bitsandbytes 4-bit"
        )
    if stored == IN_4BIT and not adapts:
        raise UserError(
            f"model.path: the weights in {folder} are in 4 bits, which cannot be trained: use the recipe "
            "lora_finetune_single_device with an adapter, or give the folder of the original model"
        )
    if stored in DEQUANTIZED or (stored is None and not load_in_4bit):
        return stored
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"{'model.path' if stored else 'model.load_in_4bit'}: weights in 4 bits need bitsandbytes: pip install "
            "bitsandbytes (Linux, Windows)"
        )
    return stored


def loading_arguments(folder: Path, dtype: torch.dtype, *, load_in_4bit: bool) -> dict[str, Any]:
    """What ``from_pretrained`` has to be told, so that the weights can be trained, or stay frozen in 4 bits.

    Args:
        folder: of the model.
        dtype: of arithmetic.
        load_in_4bit: the weights of linear layers are rounded to NF4.

    Raises:
        UserError: for a format that is for inference; where bitsandbytes is not installed.
    """
    import transformers

    stored = check_stored(folder, load_in_4bit=load_in_4bit, adapts=True)
    if stored in DEQUANTIZED:
        return {"quantization_config": getattr(transformers, DEQUANTIZED[stored])(dequantize=True)}
    if stored is not None or not load_in_4bit:
        return {}
    nf4 = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": nf4}


def packed_weights(model: Any, folder: Path, *, load_in_4bit: bool) -> Packed:
    """The weights of a model that are in 4 bits when it is loaded.

    Args:
        model: of transformers, with plain weights, on the meta device.
        folder: of its files; its ``config.json`` need not be there.
        load_in_4bit: the weights of linear layers are rounded to NF4.
    """
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    stored = stored_format(folder) if (folder / "config.json").is_file() else None
    if stored != IN_4BIT and not load_in_4bit:
        return Packed(dequantized=stored or "")
    section = _stored_section(folder) if stored == IN_4BIT else {}
    skipped = HfQuantizer.get_modules_to_not_convert(
        model, section.get("llm_int8_skip_modules"), model._keep_in_fp32_modules
    )
    weights = [
        cast(nn.Parameter, each.weight)
        for name, each in model.named_modules()
        if type(each) is nn.Linear and should_convert_module(name, skipped)
    ]
    # Of a folder's own, scales of fp32 for 64 weights; or of 8 bits, with one of fp32 for 256 of them.
    is_double = section.get("bnb_4bit_use_double_quant", not section)
    return Packed(weights, NF4_BYTES if is_double else 0.5 + 4 / 64)


def check_rounded(model: Any) -> None:
    """Refuse a model whose layers bitsandbytes leaves as they are, or turns into others.

    Args:
        model: as transformers loads it when it is asked for 4 bits.

    Raises:
        UserError: names its class.
    """
    from transformers.pytorch_utils import Conv1D

    kinds = {getattr(module, "source_cls", nn.Linear) for module in model.modules() if is_in_4bit(module)}
    leave_out = "leave it out, and use the config hf_lora"
    if not kinds:
        raise UserError(
            f"model.load_in_4bit=True: {type(model).__name__} has no linear layers that bitsandbytes rounds: "
            f"{leave_out}"
        )
    if Conv1D in kinds:
        raise UserError(
            f"model.load_in_4bit=True: the transposed layers (Conv1D) of {type(model).__name__} could not be saved "
            f"again: {leave_out}"
        )


def is_in_4bit(module: nn.Module) -> bool:
    """Whether a module's own weight is in 4 bits, by bitsandbytes."""
    return getattr(getattr(module, "weight", None), "quant_state", None) is not None


def settle_4bit(model: nn.Module, dtype: torch.dtype) -> None:
    """Let 4-bit layers compute in ``dtype``, and stay as they are.

    On some CPUs bitsandbytes repacks a layer for good in its first evaluation, with scales rounded to bf16; training
    would go on with other weights, and a resumed run with others again.
    """
    for module in model.modules():
        if is_in_4bit(module):
            module.compute_dtype, module.compute_type_is_set = dtype, True  # type: ignore[assignment]
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            module.weight.quant_state.dtype = dtype  # type: ignore[union-attr]


def plain(tensor: Tensor) -> Tensor:
    """A weight as it is computed with: dequantised where it is in 4 bits."""
    state: Any = getattr(tensor, "quant_state", None)
    if state is None:
        return tensor.detach()
    from bitsandbytes.functional import dequantize_4bit

    values: Tensor = dequantize_4bit(tensor.detach(), state)
    return values

"""Building a model of torchtune: precision and weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from offload.config.loading import instantiate
from offload.engine.units import clean_name
from offload.errors import UserError, first_line, raise_shortage
from offload.models.shares import materialize, read_share
from offload.models.torchtune.architecture import cap_logits, check_architecture, fill_from_base
from offload.models.torchtune.base_checkpoint import BaseCheckpoint
from offload.models.torchtune.conversion import to_torchtune
from offload.models.vocabulary import check_vocabulary
from offload.models.weight_files import WeightFiles

# torchao's NF4 has blocks of 64 weights, and blocks of 256 of their scales.
_NF4_BLOCK = 64 * 256


def build_model(section: DictConfig, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The ``model`` component on ``device``, its parameters in ``dtype``, randomly initialised.

    Raises:
        UserError: for arguments that the component refuses, among them weights that 4 bits cannot hold.
    """
    from torchtune.training import set_default_dtype

    # Its RMSNorm computes in fp32 with weights of ``dtype``, as it means to.
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
    try:
        with set_default_dtype(dtype), device:
            return instantiate(section)
    except AssertionError as error:
        # torchao tells neither which weight it cannot quantise nor what would do.
        name = _not_quantisable(section) if section.get("quantize_base") else None
        if name is None:
            raise
        raise UserError(
            f"model.quantize_base: NF4 takes weights whose number of elements is divisible by {_NF4_BLOCK}, and {name} "
            "is not; set model.quantize_base=False for a model this small"
        ) from error


def build_as_the_base(
    section: DictConfig,
    base: BaseCheckpoint,
    tokenizer: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tell: Callable[[str], object],
) -> nn.Module:
    """The model that the base checkpoint's ``config.json`` describes, randomly initialised.

    Args:
        section: the ``model`` component; what it leaves out is taken from there.
        base: the base checkpoint.
        tokenizer: its vocabulary has to fit.
        device: where the model goes.
        dtype: of its parameters.
        tell: called with a line about each value that was taken.

    Raises:
        UserError: for a section, or a tokenizer, that is of another model.
    """
    for note in fill_from_base(section, base):
        tell(note)
    model = build_model(section, device=device, dtype=dtype)
    check_architecture(model, section, base)
    rows = getattr(getattr(model, "tok_embeddings", None), "num_embeddings", None)
    check_vocabulary(tokenizer, rows, checkpoint="checkpointer.checkpoint_dir")
    cap_logits(model)
    return model


def _not_quantisable(section: DictConfig) -> str | None:
    """The first weight of a layer that NF4 cannot hold, as ``name [out, in]``."""
    plain = OmegaConf.merge(section, {"quantize_base": False})
    assert isinstance(plain, DictConfig)
    with torch.device("meta"):
        model: nn.Module = instantiate(plain)
    for name, param in model.named_parameters():
        is_adapter = ".lora_a." in name or ".lora_b." in name
        if param.dim() == 2 and name.startswith("layers.") and not is_adapter and param.numel() % _NF4_BLOCK:
            return f"{name} {list(param.shape)}"
    return None


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, source: str) -> None:
    """Copy ``weights`` into ``model``, converting to its dtype.

    Args:
        model: takes the weights.
        weights: tensors by torchtune's names.
        source: where they come from, for messages.

    Raises:
        UserError: where names or shapes of weights and model differ.
    """
    # Not state_dict(): it would turn 4-bit weights into 16-bit ones to show their shapes.
    check_fit(dict(model.named_parameters()), weights, source=source)
    model.load_state_dict(dict(weights))


def check_fit(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, source: str) -> None:
    """UserError where names or shapes of ``weights``, which come from ``source``, are not the ``expected`` ones."""
    missing = [name for name in expected if name not in weights]
    unknown = [name for name in weights if name not in expected]
    shapes = [
        f"{name} is {list(weights[name].shape)}, the model has {list(expected[name].shape)}"
        for name in weights
        if name in expected and weights[name].shape != expected[name].shape
    ]
    differences = [*shapes]
    if missing:
        differences.append(f"{len(missing)} are missing ({missing[0]}, …)")
    if unknown:
        differences.append(f"{len(unknown)} are unknown to the model ({unknown[0]}, …)")
    if differences:
        more = f" and {len(differences) - 1} more differences" if len(differences) > 1 else ""
        raise UserError(
            f"model: the weights in {source} do not fit it: {differences[0]}{more}; choose the model component and "
            "checkpointer.model_type that belong to this checkpoint"
        )


def fill_share(
    model: nn.Module,
    base: BaseCheckpoint,
    files: Sequence[Path],
    *,
    device: torch.device,
    dtype: torch.dtype,
    source: str,
) -> None:
    """Give a model of which each rank has a part its memory and its weights.

    Args:
        model: its parameters DTensors on the meta device, but for those that have their values already.
        base: the base checkpoint, whose names and shapes the files have.
        files: with the weights.
        device: where the model goes.
        dtype: of its parameters.
        source: where the weights come from, for messages.

    Raises:
        UserError: for files that cannot be read, and weights that do not fit the model.
    """
    from torchtune.training import set_default_dtype

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return to_torchtune(tensors, base.model_type, base.config)

    made = materialize(model, device)
    with set_default_dtype(dtype), device:
        for module in model.modules():
            if (init := getattr(module, "rope_init", None)) is not None:
                init()
    expected = {clean_name(name): param for name, param in model.named_parameters() if param in made}
    try:
        with WeightFiles(files) as opened:
            check_fit(expected, convert(dict(opened.empty)), source=source)
            read_share(expected, opened, convert)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise_shortage(error)
        raise UserError(
            f"cannot read the weights in {source} as checkpointer.model_type={base.model_type}: {first_line(error)} "
            "(check model_type and config.json, or download the files again)"
        ) from error

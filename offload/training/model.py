"""Building the model: precision, weights, activation checkpointing and offloading, compilation."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from offload.errors import UserError
from offload.training.config import instantiate


def build_model(section: DictConfig, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The ``model`` component on ``device``, its parameters in ``dtype``, randomly initialised."""
    from torchtune.training import set_default_dtype

    with set_default_dtype(dtype), device:
        return instantiate(section)


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, source: str, strict: bool = True) -> None:
    """Copy ``weights`` into ``model``, converting to its dtype.

    Args:
        model: takes the weights.
        weights: tensors by torchtune's names; those of the adapter may be missing if not ``strict``.
        source: where they come from, for messages.
        strict: require every parameter.

    Raises:
        UserError: where names or shapes of weights and model differ.
    """
    # Not state_dict(): it would turn 4-bit weights into 16-bit ones to show their shapes.
    expected = dict(model.named_parameters())
    missing = [name for name in expected if name not in weights] if strict else []
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
    model.load_state_dict(dict(weights), strict=strict)


def prepare_activations(
    model: nn.Module, *, checkpointing: bool, offloading: bool, device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """Apply activation checkpointing; returns the context in which forward must run for offloading.

    Raises:
        UserError: for offloading on the CPU, or without checkpointing (it would move every activation, far
            more than the link to the host carries).
    """
    from torchtune.modules import TransformerSelfAttentionLayer
    from torchtune.training import get_act_offloading_ctx_manager, set_activation_checkpointing

    if offloading and device.type == "cpu":
        raise UserError(
            "enable_activation_offloading: activations are in host memory already on device=cpu; set it to False"
        )
    if offloading and not checkpointing:
        raise UserError(
            "enable_activation_offloading: needs enable_activation_checkpointing=True, or every activation would "
            "cross the link; set both or neither"
        )
    if checkpointing:
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    return get_act_offloading_ctx_manager(model, offloading)


def compile_layers(model: nn.Module) -> None:
    """Compile each transformer layer in place; the first step pays for it."""
    from torchtune.training import compile_model

    compile_model(model, verbose=False)


def num_parameters(model: nn.Module) -> tuple[int, int]:
    """Numbers of ``(all, trainable)`` parameters, 4-bit ones by their logical shape."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)

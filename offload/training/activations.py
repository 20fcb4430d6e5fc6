"""What a layer keeps for backward: recomputed, or in host memory meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from offload.errors import UserError
from offload.models.protocol import CausalLM


def check_activations(*, checkpointing: bool, offloading: bool, device: torch.device) -> None:
    """Refuse to offload activations on the CPU, or without checkpointing (it would move every activation, far more than
    the link to the host carries).

    Raises:
        UserError: names the keys.
    """
    if offloading and device.type == "cpu":
        raise UserError(
            "enable_activation_offloading: activations are in host memory already on device=cpu; set it to False"
        )
    if offloading and not checkpointing:
        raise UserError(
            "enable_activation_offloading: needs enable_activation_checkpointing=True, or every activation would "
            "cross the link; set both or neither"
        )


def prepare_activations(
    model: CausalLM,
    *,
    checkpointing: bool,
    offloading: bool,
    device: torch.device,
    divide: Callable[[], None] = lambda: None,
) -> contextlib.AbstractContextManager[Any]:
    """Apply activation checkpointing; returns the context in which forward must run for offloading.

    Args:
        model: on the CPU or on ``device``; where it trains once ``divide`` is done.
        checkpointing: keep each layer's input alone.
        offloading: keep it in host memory.
        device: that trains.
        divide: divides the model among processes: after its layers were wrapped, and before what depends on where it
            is.

    Raises:
        UserError: as :func:`check_activations`.
    """
    check_activations(checkpointing=checkpointing, offloading=offloading, device=device)
    if checkpointing:
        model.checkpoint_activations()
    divide()
    return model.offload_activations() if offloading else contextlib.nullcontext()

"""Checkpoints of a model that is divided among processes: the main one gathers it and writes, each reads all of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.checkpoints.manager import CheckpointManager
from offload.distributed.world import World
from offload.models.tensors import whole

LOADED_ON = torch.device("cpu")
"""Where each process reads the whole model to, before it keeps its part on its own device."""


def save(
    checkpoints: CheckpointManager,
    world: World,
    step: int,
    *,
    model: Mapping[str, Tensor] | None,
    recipe_state: Mapping[str, Any],
    adapter: Mapping[str, Tensor] | None = None,
    adapter_config: Mapping[str, Any] | None = None,
) -> Path:
    """As :meth:`offload.checkpoints.manager.CheckpointManager.save`, of tensors that may be divided.

    Every process has to call it; the main one's host needs room for all of them.

    Raises:
        UserError: on all processes, where the main one cannot write.
    """
    whole_model = None if model is None else gathered(model, world)
    whole_adapter = None if adapter is None else gathered(adapter, world)
    state = gathered(recipe_state, world)
    return world.from_main(
        lambda: checkpoints.save(
            step, model=whole_model, recipe_state=state, adapter=whole_adapter, adapter_config=adapter_config
        )
    )


def gathered(value: Any, world: World) -> Any:
    """The same with whole tensors on the host, in the main process; the others get None in their places.

    Args:
        value: nested mappings, lists and tuples; each process has the same divided tensors in the same order.
        world: all of its processes call it.
    """
    known: dict[Tensor, Tensor | None] = {}

    def once(tensor: Tensor) -> Tensor | None:
        if not hasattr(tensor, "full_tensor"):
            return tensor if world.is_main else None
        if tensor not in known:  # a tied weight has two names
            full = whole(tensor.detach())
            known[tensor] = full.cpu() if world.is_main else None
        return known[tensor]

    def copy(item: Any) -> Any:
        if isinstance(item, Tensor):
            return once(item)
        if isinstance(item, Mapping):
            return {key: copy(item[key]) for key in item}
        if isinstance(item, (list, tuple)):
            return type(item)([copy(each) for each in item])
        return item

    return copy(value)

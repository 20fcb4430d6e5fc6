"""FSDP2's side of asynchronous updates: an all-gather waits for the updates of the shards that it reads.

FSDP gathers a group's parameters before the module's own forward, in the backward, and ahead of both where it was told
to prefetch; it reads the shards on a stream of its own, which waits for the caller's at the start of the forward only.
All of these go through one method of the group, which is watched here.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.units import Unit


def groups_of(model: nn.Module) -> Iterator[Any]:
    """The groups of parameters of a model that ``fully_shard`` gathers together; each once."""
    states = []
    for module in model.modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        if state_of is not None and (state := state_of()) not in states:
            states.append(state)
            # Until torch 2.12 a state had one group.
            groups = getattr(state, "_fsdp_param_groups", None)
            yield from [group for group in ([state._fsdp_param_group] if groups is None else groups) if group]


def is_offloaded(group: Any) -> bool:
    """Whether a group has a CPUOffloadPolicy."""
    return any(getattr(param, "offload_to_cpu", False) for param in getattr(group, "fsdp_params", ()))


def is_in_ddp(params: Iterable[Tensor]) -> bool:
    """Whether one of the parameters belongs to a model in DistributedDataParallel, which may be any object there is."""
    parallel = sys.modules.get("torch.nn.parallel")
    if parallel is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    mine = set(map(id, params))
    wrappers = [each for each in gc.get_objects() if issubclass(type(each), parallel.DistributedDataParallel)]
    return any(id(param) in mine for wrapper in wrappers for param in wrapper.parameters())


class AllGatherWaits:
    """Makes each all-gather wait for the units that it reads.

    Args:
        model: the model with modules that ``fully_shard`` was applied to.
        wait: makes the current stream wait for a unit.
    """

    def __init__(self, model: nn.Module, wait: Callable[[Unit], None]) -> None:
        self._wait = wait
        self._groups = list(groups_of(model))
        self._units: dict[int, list[Unit]] = {}
        self._before = {id(group): vars(group).get("unshard") for group in self._groups}  # another optimizer's
        self._watches = {id(group): self._watched(group, group.unshard) for group in self._groups}
        for group in self._groups:
            group.unshard = self._watches[id(group)]

    @staticmethod
    def can_watch(model: nn.Module) -> bool:
        """Whether all groups are as torch 2.11 to 2.13 make them."""
        needed = ("unshard", "fsdp_params", "device_handle", "comm_ctx", "_training_state")
        return all(
            all(hasattr(group, name) for name in needed) and hasattr(group.comm_ctx, "get_all_gather_streams")
            for group in groups_of(model)
        )

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._groups)

    def cover(self, units: Sequence[Unit]) -> None:
        """Wait for ``units``, and for no others."""
        unit_by_param = {param: unit for unit in units for param in unit.params}
        for group in self._groups:
            sharded = [param.sharded_param for param in group.fsdp_params]
            known = dict.fromkeys(unit_by_param[param] for param in sharded if param in unit_by_param)
            self._units[id(group)] = list(known)

    def _watched(self, group: Any, unshard: Callable[[bool], None]) -> Callable[[bool], None]:
        @functools.wraps(unshard)
        def wait_and_unshard(async_op: bool = False) -> None:
            with _reading(group, async_op):
                for unit in self._units.get(id(group), ()):
                    self._wait(unit)
            unshard(async_op)

        return wait_and_unshard

    def remove(self) -> None:
        """Leave the groups as they were; where another optimizer watches them since, wait for nothing any more."""
        self._units.clear()
        for group in self._groups:
            if vars(group).get("unshard") is not self._watches[id(group)]:
                continue
            del group.unshard
            if (before := self._before[id(group)]) is not None:
                group.unshard = before


def _reading(group: Any, async_op: bool) -> AbstractContextManager[Any]:
    """Inside, the stream is current on which a group's shards are read."""
    is_gathered = getattr(group.mesh_info, "shard_mesh_size", 1) > 1  # else copied when it is needed
    if not is_gathered or not hasattr(group.comm_ctx, "all_gather_copy_in_stream"):  # the latter: before any forward
        return nullcontext()
    stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
    context: AbstractContextManager[Any] = group.device_handle.stream(stream)
    return context

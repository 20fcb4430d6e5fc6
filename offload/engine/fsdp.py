"""FSDP2's side of asynchronous updates: an all-gather waits for the updates of the shards that it reads.

FSDP gathers a group's parameters before the module's own forward, in the backward, and ahead of both where it was told
to prefetch; it reads the shards on a stream of its own, which waits for the caller's at the start of the forward only.
All of these go through one method of the group, which is watched here.
"""

from __future__ import annotations

import functools
import gc
import inspect
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


def wrapper_of(params: Iterable[Tensor]) -> str:
    """``DistributedDataParallel`` or ``FullyShardedDataParallel``, if a model in one of them has one of the parameters;
    it may be any object there is."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ""
    modules = ("torch.nn.parallel.distributed", "torch.distributed.fsdp.fully_sharded_data_parallel")
    names = ("DistributedDataParallel", "FullyShardedDataParallel")
    known = {getattr(sys.modules.get(module), name, None): name for module, name in zip(modules, names, strict=True)}
    kinds = tuple(kind for kind in known if kind is not None)
    # By exact type: there are half a million objects, and issubclass() of each takes half a second.
    types = {kind for parent in kinds for kind in _with_subclasses(parent)}
    mine = set(map(id, params))
    for wrapper in [each for each in gc.get_objects() if type(each) in types]:
        if any(id(param) in mine for param in wrapper.parameters()):
            return next(known[kind] for kind in kinds if isinstance(wrapper, kind))
    return ""


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)


VERSIONS = "2.11 to 2.14"
"""Of torch, whose FSDP2 has been read."""

GATHERS, GATHER = "unshard", "foreach_all_gather"
"""The method of a group through which all all-gathers go, and what that calls."""


def difference(model: nn.Module) -> str:
    """What of FSDP2, whose private parts are used here, is other than in :data:`VERSIONS`; empty if nothing."""
    for group in groups_of(model):
        for name in (GATHERS, "fsdp_params", "device_handle", "comm_ctx", "mesh_info", "_training_state", "__dict__"):
            if not hasattr(group, name):
                return f"{type(group).__name__} has no {name}"
        if any(not hasattr(param, "sharded_param") for param in group.fsdp_params):
            return "parameters have no sharded_param"
        streams = getattr(group.comm_ctx, "get_all_gather_streams", None)
        if streams is None or _takes(streams) != ["async_op", "training_state"]:
            return f"{type(group.comm_ctx).__name__} does not tell get_all_gather_streams(async_op, training_state)"
        if _takes(group.unshard) != ["async_op"]:
            return f"{GATHERS} does not take async_op"
        kind: Any = type(group)
        calls = _calls(kind)
        if [name for name, called in calls.items() if GATHER in called] != [GATHERS]:
            return f"all-gathers do not go through {type(group).__name__}.{GATHERS}"
        for name in ("pre_forward", "pre_backward", "_prefetch_unshard"):
            if GATHERS not in calls.get(name, ()):
                return f"{type(group).__name__}.{name} does not call {GATHERS}"
    return ""


def _takes(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@functools.cache
def _calls(kind: type) -> dict[str, tuple[str, ...]]:
    """The names that each method of a class uses."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in dir(kind) if callable(getattr(kind, name))}
    return {name: method.__code__.co_names for name, method in methods.items() if hasattr(method, "__code__")}


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

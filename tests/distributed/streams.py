"""FSDP2 on the simulated accelerator: its streams are the simulator's, and what they do is ordered or a race."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group, _fsdp_state
from torch.utils._python_dispatch import _disable_current_modes

from offload.simulation.accelerator import SimulatedAccelerator
from offload.simulation.touched import tensors_in

STREAMS = ("gather copy", "gather", "reduce", "all-reduce")
"""In the order in which FSDP2 makes them."""

COLLECTIVES = [
    name
    for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
    if hasattr(torch.distributed, name)
] + ["all_reduce"]
"""Those of FSDP2, by the names that they have in some version of torch, with what they write first."""


class Event:
    def __init__(self, simulator: SimulatedAccelerator, stream: str | None = None) -> None:
        self._simulator = simulator
        self.point = simulator.record(stream) if stream is not None else None

    def record(self) -> None:
        self.point = self._simulator.record()


class Stream:
    def __init__(self, simulator: SimulatedAccelerator, name: str) -> None:
        self._simulator, self.name = simulator, name

    def wait_event(self, event: Event) -> None:
        with self._simulator.on(self.name):
            assert event.point is not None
            self._simulator.wait(event.point)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        return Event(self._simulator, self.name)


class Device:
    """What FSDP2 asks of ``torch.cuda``, and for the rest of ``torch.cpu``."""

    def __init__(self, simulator: SimulatedAccelerator) -> None:
        self._simulator = simulator
        self._streams = {name: Stream(simulator, name) for name in STREAMS}
        self._names = itertools.cycle(STREAMS)

    def Stream(self, priority: int = 0) -> Stream:
        return self._streams[next(self._names)]

    def Event(self) -> Event:
        return Event(self._simulator)

    def current_stream(self) -> Stream:
        name = str(self._simulator.stream())
        return self._streams.setdefault(name, Stream(self._simulator, name))

    def stream(self, stream: Stream) -> AbstractContextManager[None]:
        return self._simulator.on(stream.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def play_streams(patch: pytest.MonkeyPatch, simulator: SimulatedAccelerator) -> None:
    """Make what ``fully_shard`` is applied to from now on use the simulator's streams."""
    device = Device(simulator)
    for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
        patch.setattr(module, "_get_device_handle", lambda kind: device)
    for name in COLLECTIVES:
        patch.setattr(torch.distributed, name, _on_the_current_stream(getattr(torch.distributed, name), 0))
    copy_in = torch.ops.fsdp.all_gather_copy_in
    patch.setattr(torch.ops.fsdp, "all_gather_copy_in", _on_the_current_stream(copy_in, 1), raising=False)


def _on_the_current_stream(operation: Any, written: int) -> Any:
    """An operation whose schema does not tell what it writes, as one that reads and writes on the current stream,
    whatever gloo does instead. ``written``: of its arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            result = operation(*args, **kwargs)
        arguments = [*args, *kwargs.values()]
        with torch.no_grad():
            for tensor in tensors_in(arguments):
                tensor.sum()
            arguments[written].mul_(1)
        return result

    return call

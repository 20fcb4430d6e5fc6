"""FSDP2 on the simulated accelerator.

Its streams are the simulator's, so that what they do is ordered or a race; the memory that it gives back is used again;
what its collectives take is told by whoever plays them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.utils._python_dispatch import _disable_current_modes

from offload.simulation.accelerator import SimulatedAccelerator
from offload.simulation.sharing import COLLECTIVE
from offload.simulation.touched import tensors_in

STREAMS = ("gather copy", "gather", "reduce", "all-reduce")
"""In the order in which FSDP2 makes them."""

COLLECTIVES = [
    name
    for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
    if hasattr(torch.distributed, name)
] + ["all_reduce"]
"""Those of FSDP2, by the names that they have in some version of torch, with what they write first."""

Cost = Callable[[str, int], float]
"""Seconds at full speed of a collective: its name, of COLLECTIVES, and the bytes of the whole unsharded tensor."""


class PlayedEvent:
    """An event of a device's module, such as ``torch.cuda.Event``."""

    def __init__(self, simulator: SimulatedAccelerator, stream: str | None = None) -> None:
        self._simulator = simulator
        self.point = simulator.record(stream) if stream is not None else None

    def record(self) -> None:
        self.point = self._simulator.record()


class PlayedStream:
    """A stream of a device's module."""

    def __init__(self, simulator: SimulatedAccelerator, name: str) -> None:
        self._simulator, self.name = simulator, name

    def wait_event(self, event: PlayedEvent) -> None:
        with self._simulator.on(self.name):
            assert event.point is not None
            self._simulator.wait(event.point)

    def wait_stream(self, other: PlayedStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> PlayedEvent:
        return PlayedEvent(self._simulator, self.name)


class Device:
    """What FSDP2 asks of ``torch.cuda``, and for the rest of ``torch.cpu``."""

    def __init__(self, simulator: SimulatedAccelerator) -> None:
        self._simulator = simulator
        self._streams = {name: PlayedStream(simulator, name) for name in STREAMS}
        self._names = itertools.cycle(STREAMS)

    def Stream(self, priority: int = 0) -> PlayedStream:
        return self._streams[next(self._names)]

    def Event(self) -> PlayedEvent:
        return PlayedEvent(self._simulator)

    def current_stream(self) -> PlayedStream:
        name = str(self._simulator.stream())
        return self._streams.setdefault(name, PlayedStream(self._simulator, name))

    def stream(self, stream: PlayedStream) -> AbstractContextManager[None]:
        return self._simulator.on(stream.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@contextmanager
def played_streams(simulator: SimulatedAccelerator, cost: Cost | None = None) -> Iterator[None]:
    """Inside, what ``fully_shard`` is applied to, and trained, uses the simulator's streams.

    Args:
        cost: of collectives, beside what they read and write; None for no time. With it the copies into and out of
            their buffers take the time of device memory, wherever they run.
    """
    with ExitStack() as stack:
        for where, name, value in replacements(simulator, cost):
            stack.enter_context(mock.patch.object(where, name, value, create=True))
        yield


def replacements(simulator: SimulatedAccelerator, cost: Cost | None = None) -> Iterator[tuple[Any, str, Any]]:
    """Object, name and new value of all that has to be replaced."""
    device = Device(simulator)
    for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
        yield module, "_get_device_handle", lambda kind: device
    yield torch.accelerator, "current_stream", lambda *_: device.current_stream()
    for module in (_fsdp_param, _fsdp_param_group):
        yield module, "alloc_storage", lambda tensor: simulator.resize(tensor, tensor.nbytes)
    yield _fsdp_param, "free_storage", lambda tensor: simulator.resize(tensor, 0)
    allocate = _fsdp_collectives.DefaultAllocMixin.allocate
    yield _fsdp_collectives.DefaultAllocMixin, "allocate", _loose(simulator, allocate)
    for name in COLLECTIVES:
        operation = getattr(torch.distributed, name)
        yield torch.distributed, name, _collective(simulator, operation, name, cost)
    copies = torch.ops.fsdp
    yield copies, "all_gather_copy_in", _copying(simulator, copies.all_gather_copy_in, lambda args: args[1])
    if cost is not None:
        for name in ("split_with_sizes_copy", "chunk_cat"):
            yield copies, name, _copying(simulator, getattr(copies, name))


def _loose(simulator: SimulatedAccelerator, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """FSDP2 orders its streams before it allocates the buffers of its collectives, not before it frees them."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        with simulator.loose_memory():
            return allocate(*args, **kwargs)

    return call


def _collective(simulator: SimulatedAccelerator, operation: Any, name: str, cost: Cost | None) -> Any:
    """A collective as one operation that reads and writes on the current stream, whatever its backend does instead; of
    tensors of the host, as one that its caller waits for."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            result = operation(*args, **kwargs)
        written, *others = [*args, *kwargs.values()]
        if all(simulator.is_on_host(tensor) for tensor in tensors_in([written])):
            return result
        tensors = list(tensors_in([written, *others]))
        nbytes = round(max(tensor.nbytes for tensor in tensors) * simulator.scale)
        seconds = 0.0 if cost is None else cost(name, nbytes)
        simulator.transfer(seconds, name.replace("_", " "), COLLECTIVE, reads=tensors, writes=[written])
        return result

    return call


def _copying(simulator: SimulatedAccelerator, operation: Any, written: Callable[[Any], Any] | None = None) -> Any:
    """A copy that takes the time of device memory, on the computing stream too.

    Args:
        written: of its arguments; by default ``out``.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            result = operation(*args, **kwargs)
        writes = list(tensors_in([kwargs["out"] if written is None else written(args)]))
        reads = list(tensors_in([args[0]]))
        copied = reads if written else writes  # of what is gathered, only this rank's part
        nbytes = simulator.scale * sum(tensor.nbytes for tensor in (*reads, *copied))
        simulator.transfer(nbytes / simulator.rates.device, "copy", "", reads=reads, writes=writes)
        return result

    return call

"""The one place where the engine touches streams, events and asynchronous copies.

Everything above this file is written against :class:`Runtime`; an implementation decides whether a
copy is queued on a stream (:class:`AcceleratorRuntime`) or done at once (:class:`HostRuntime`).
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

Direction = Literal["down", "up"]
"""``down``: device to host. ``up``: host to device. Each direction has a copy stream of its own."""


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the calling thread until the work before this point is done."""


class Runtime(Protocol):
    """What the engine needs of a machine."""

    shares_memory: bool
    """True where device and host are one memory: a host copy then aliases the device tensor."""

    def copy(self, dst: Tensor, src: Tensor, direction: Direction) -> Event:
        """Queue ``dst.copy_(src)`` behind everything the compute stream has queued so far.

        ``src`` and ``dst`` may be freed by the caller afterwards, but not written before the event.
        """

    def compute_wait(self, event: Event) -> None:
        """Make the compute stream's later work wait for ``event``, without blocking the thread."""

    def synchronize(self) -> None:
        """Block until every queued copy is done."""

    def empty_pinned(self, nbytes: int) -> Tensor:
        """A page-locked host buffer of ``nbytes`` (uint8). Raises RuntimeError where it cannot be had."""


class _Done:
    """The event of work that is already complete."""

    def synchronize(self) -> None:
        return None


_DONE = _Done()


class HostRuntime:
    """CPU parameters: one memory, everything immediate, nothing pinned."""

    shares_memory = True

    def copy(self, dst: Tensor, src: Tensor, direction: Direction) -> Event:
        dst.copy_(src)
        return _DONE

    def compute_wait(self, event: Event) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def empty_pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class AcceleratorRuntime:
    """A device with streams (CUDA, ROCm, XPU) through torch's device-neutral API.

    The two copy streams live as long as the runtime: PyTorch's caching allocator ties freed blocks to
    the streams that used them, so streams made per step would grow the reserved memory.
    """

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {"down": torch.Stream(device=device), "up": torch.Stream(device=device)}

    def copy(self, dst: Tensor, src: Tensor, direction: Direction) -> Event:
        stream = self._streams[direction]
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            dst.copy_(src, non_blocking=True)
        device_side = src if direction == "down" else dst
        device_side.record_stream(stream)
        return stream.record_event()

    def compute_wait(self, event: Event) -> None:
        torch.accelerator.current_stream(self._device).wait_event(event)  # type: ignore[arg-type]

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def empty_pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def runtime_for(device: torch.device) -> Runtime:
    """The runtime that serves parameters on ``device``."""
    if device.type == "cpu":
        return HostRuntime()
    return AcceleratorRuntime(device)

"""The one place where the engine touches streams, events, copies and threads.

Everything above this file is written against :class:`Runtime`. :class:`AcceleratorRuntime` queues work on a
device's streams, :class:`HostRuntime` does everything at once, and
:class:`offload.simulation.accelerator.SimulatedAccelerator` plays a device on the CPU and finds missing waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Literal, Protocol

import torch
from torch import Tensor

Direction = Literal["down", "up"]
"""``down``: device to host. ``up``: host to device. Each direction has a copy stream of its own."""


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the calling thread until the work before this point is done."""

    def is_done(self) -> bool:
        """Whether the work before this point is done, without blocking."""


class Signal(Protocol):
    """A condition variable with its lock (``with signal:``), as :class:`threading.Condition`."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> object: ...

    def wait(self) -> object:
        """Release the lock, block until :meth:`notify_all`, take the lock again."""

    def notify_all(self) -> None:
        """Wake every thread that waits."""


class Thread(Protocol):
    """A thread that was started."""

    def join(self) -> None:
        """Block until it has ended."""


class Runtime(Protocol):
    """What the engine needs of a machine.

    The *current stream* of a thread is the caller's compute stream, and the update stream inside
    :meth:`updating`. Copies run on two streams of their own, one for each direction, each in order.
    """

    shares_memory: bool
    """True where device and host are one memory: a host copy then aliases the device tensor."""

    def copy(
        self, dst: Tensor, src: Tensor, direction: Direction, after: Sequence[Event] = (), name: str = ""
    ) -> Event:
        """Queue ``dst.copy_(src)`` behind the events ``after`` and earlier copies of that direction, nothing else.

        ``src`` and ``dst`` may be freed by the caller afterwards, but not written before the event.
        ``name`` is what traces call the copy.
        """

    def record(self) -> Event:
        """The point that the current stream's queued work has reached."""

    def wait(self, event: Event) -> None:
        """Make the current stream's later work wait for ``event``, without blocking the thread."""

    def updating(self, name: str = "") -> AbstractContextManager[None]:
        """Inside, torch operations of this thread go to the update stream; ``name`` is for traces."""

    def working(self, name: str) -> AbstractContextManager[object]:
        """Inside, this thread does the host's share of an update; ``name`` is for traces."""

    def borrow(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that the current stream uses and another one allocated: once they are freed, their memory is not
        reused before the current stream's queued work is done. Those in host memory are left alone."""

    def empty_pinned(self, nbytes: int) -> Tensor:
        """A page-locked host buffer of ``nbytes`` (uint8). Raises RuntimeError where it cannot be had."""

    def empty_device(self, nbytes: int) -> Tensor:
        """A device buffer of ``nbytes`` (uint8), for any stream."""

    def signal(self) -> Signal:
        """A new condition variable."""

    def start(self, work: Callable[[], None], name: str) -> Thread:
        """Run ``work`` on a thread of its own, which does not keep the process alive."""


class _Done:
    """The event of work that is already complete."""

    def synchronize(self) -> None:
        return None

    def is_done(self) -> bool:
        return True


DONE = _Done()


class _Threads:
    """Real threads, for the runtimes on real machines."""

    def working(self, name: str) -> AbstractContextManager[object]:
        return torch.profiler.record_function(f"offload: {name}")

    def signal(self) -> Signal:
        return threading.Condition()

    def start(self, work: Callable[[], None], name: str) -> Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread


class HostRuntime(_Threads):
    """CPU parameters: one memory, everything immediate, nothing pinned."""

    shares_memory = True

    def copy(
        self, dst: Tensor, src: Tensor, direction: Direction, after: Sequence[Event] = (), name: str = ""
    ) -> Event:
        dst.copy_(src)
        return DONE

    def record(self) -> Event:
        return DONE

    def wait(self, event: Event) -> None:
        return None

    def updating(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def borrow(self, tensors: Iterable[Tensor]) -> None:
        return None

    def empty_pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty_device(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class _StreamEvent:
    """A recorded :class:`torch.Event`."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def synchronize(self) -> None:
        self.event.synchronize()

    def is_done(self) -> bool:
        return self.event.query()


class AcceleratorRuntime(_Threads):
    """A device with streams (CUDA, ROCm, XPU) through torch's device-neutral API.

    The streams live as long as the runtime: PyTorch's caching allocator ties freed blocks to the streams
    that used them, so streams made per step would grow the reserved memory.
    """

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = {"down": torch.Stream(device=device), "up": torch.Stream(device=device)}
        self._update = torch.Stream(device=device)

    def copy(
        self, dst: Tensor, src: Tensor, direction: Direction, after: Sequence[Event] = (), name: str = ""
    ) -> Event:
        stream = self._copies[direction]
        for event in after:
            self._wait(stream, event)
        with stream, torch.profiler.record_function(f"offload: {name or direction}"):
            dst.copy_(src, non_blocking=True)
        (src if direction == "down" else dst).record_stream(stream)
        return _StreamEvent(stream.record_event())

    def record(self) -> Event:
        return _StreamEvent(torch.accelerator.current_stream(self._device).record_event())

    def wait(self, event: Event) -> None:
        self._wait(torch.accelerator.current_stream(self._device), event)

    def _wait(self, stream: torch.Stream, event: Event) -> None:
        if isinstance(event, _StreamEvent):
            stream.wait_event(event.event)

    @contextmanager
    def updating(self, name: str = "") -> Iterator[None]:
        with self._update, torch.profiler.record_function(f"offload: {name or 'update'}"):
            yield

    def borrow(self, tensors: Iterable[Tensor]) -> None:
        stream = torch.accelerator.current_stream(self._device)
        for tensor in tensors:
            if tensor.device.type == self._device.type:
                tensor.record_stream(stream)

    def empty_pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def empty_device(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def runtime_for(device: torch.device) -> Runtime:
    """The runtime that serves parameters on ``device``."""
    if device.type == "cpu":
        return HostRuntime()
    return AcceleratorRuntime(device)

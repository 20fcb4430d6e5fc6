"""The one place where the engine touches streams, events, copies and threads.

Everything above this file is written against :class:`Runtime`. :class:`AcceleratorRuntime` queues work on a
device's streams, :class:`HostRuntime` does everything at once, and
:class:`offload.simulation.accelerator.SimulatedAccelerator` plays a device on the CPU and finds missing waits.

A tensor that another stream uses has to be held until that stream's event is done (:mod:`offload.engine.in_flight`
does). ``record_stream`` would hold its memory too, but leave it in limbo until the allocator looks again, and not every
backend has it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from offload.engine.marks import PREFIX

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

        Until the event is done the caller holds on to ``src`` and ``dst`` and leaves them as they are. ``name`` is what
        traces call the copy.
        """

    def stream(self) -> Hashable:
        """The current stream."""

    def record(self, stream: Hashable = None) -> Event:
        """The point that a stream's queued work has reached; by default the current stream's."""

    def wait(self, event: Event) -> None:
        """Make the current stream's later work wait for ``event``, without blocking the thread."""

    def updating(self, name: str = "", *, on_default: bool = False) -> AbstractContextManager[object]:
        """Inside, torch operations of this thread go to the update stream; ``name`` is for traces.

        ``on_default``: to the device's default stream instead, where kernels that know no streams run.
        """

    def working(self, name: str) -> AbstractContextManager[object]:
        """Inside, this thread does the host's share of an update; ``name`` is for traces."""

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in host memory."""

    def empty_pinned(self, nbytes: int) -> Tensor:
        """A page-locked host buffer of ``nbytes`` (uint8). Raises RuntimeError where it cannot be had."""

    def empty_device(self, nbytes: int) -> Tensor:
        """A device buffer of ``nbytes`` (uint8), for any stream."""

    def memory_left(self) -> tuple[int, int] | None:
        """Bytes of device memory that this process could have had beyond the most that it held, and all that there are
        for it; None where that is not known."""

    def retries(self) -> int:
        """Times that cached device memory was given back to serve an allocation: there is too little for all."""

    def now(self) -> float:
        """Seconds of a clock."""

    def drain(self) -> None:
        """Block until everything is done that was queued on this object's own streams."""

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


class _OwnThread(threading.Thread):
    """May be joined by itself: the garbage collector closes an optimizer on whichever thread it happens to run."""

    def join(self, timeout: float | None = None) -> None:
        if threading.current_thread() is not self:
            super().join(timeout)


class _Threads:
    """Real threads, for the runtimes on real machines."""

    def working(self, name: str) -> AbstractContextManager[object]:
        return traced(name)

    def now(self) -> float:
        return time.perf_counter()

    def signal(self) -> Signal:
        return threading.Condition()

    def start(self, work: Callable[[], None], name: str) -> Thread:
        thread = _OwnThread(target=work, name=name, daemon=True)
        thread.start()
        return thread


_UNSEEN = nullcontext()


def traced(name: str) -> AbstractContextManager[object]:
    """A range in the profiler's trace; nothing where no profiler runs, since a range costs more than a launch.

    ``name``: see :mod:`offload.engine.marks`.
    """
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
        return torch.profiler.record_function(PREFIX + name)
    return _UNSEEN


class HostRuntime(_Threads):
    """CPU parameters: one memory, everything immediate, nothing pinned."""

    shares_memory = True

    def copy(
        self, dst: Tensor, src: Tensor, direction: Direction, after: Sequence[Event] = (), name: str = ""
    ) -> Event:
        with traced(name or direction):
            dst.copy_(src)
        return DONE

    def stream(self) -> Hashable:
        return None

    def record(self, stream: Hashable = None) -> Event:
        return DONE

    def wait(self, event: Event) -> None:
        return None

    def updating(self, name: str = "", *, on_default: bool = False) -> AbstractContextManager[object]:
        return traced(name or "update")

    def is_on_host(self, tensor: Tensor) -> bool:
        return True

    def empty_pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty_device(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def memory_left(self) -> tuple[int, int] | None:
        return None

    def retries(self) -> int:
        return 0

    def drain(self) -> None:
        return None


POLL_SECONDS = 5e-5
"""A fiftieth of what a piece of a 7B model takes on its way over the link."""


class _StreamEvent:
    """A recorded :class:`torch.Event`. Waiting for it sleeps: ``torch.Event.synchronize`` spins on CUDA, whatever its
    ``blocking`` says, and would take a core from updates on the CPU."""

    def __init__(self, stream: torch.Stream) -> None:
        self.event = torch.Event(device=stream.device)
        self.event.record(stream)

    def synchronize(self) -> None:
        while not self.event.query():
            time.sleep(POLL_SECONDS)

    def is_done(self) -> bool:
        return self.event.query()


class AcceleratorRuntime(_Threads):
    """A device with streams (CUDA, ROCm, XPU) through torch's device-neutral API.

    The streams live as long as the runtime: PyTorch's caching allocator ties freed blocks to the streams
    that used them, so streams made per step would grow the reserved memory. They are made current by
    ``torch.accelerator.set_stream`` and never entered as contexts: a ``torch.Stream`` keeps what it has to
    restore in the object itself, so two threads cannot be inside one.
    """

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {name: torch.Stream(device=device) for name in ("down", "up", "update")}
        # As handed out for the device's default stream, whichever stream is current now.
        made = self._streams["update"]
        self._default = torch.Stream(stream_id=0, device_index=made.device_index, device_type=made.device_type)

    @contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        """Inside, ``stream`` is this thread's current stream, and its device the current one."""
        device = torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            if device != before.device.index:
                torch.accelerator.set_device_index(device)

    def copy(
        self, dst: Tensor, src: Tensor, direction: Direction, after: Sequence[Event] = (), name: str = ""
    ) -> Event:
        stream = self._streams[direction]
        for event in after:
            self._wait(stream, event)
        with self._on(stream), traced(name or direction):
            dst.copy_(src, non_blocking=True)
        return _StreamEvent(stream)

    def stream(self) -> Hashable:
        # Each call makes another object for the same stream.
        current = torch.accelerator.current_stream(self._device)
        return current.stream_id, current.device_index, current.device_type

    def record(self, stream: Hashable = None) -> Event:
        if stream is None:
            return _StreamEvent(torch.accelerator.current_stream(self._device))
        made: Any = stream
        stream_id, device_index, device_type = made
        return _StreamEvent(torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))

    def wait(self, event: Event) -> None:
        self._wait(torch.accelerator.current_stream(self._device), event)

    def _wait(self, stream: torch.Stream, event: Event) -> None:
        if isinstance(event, _StreamEvent):
            stream.wait_event(event.event)

    @contextmanager
    def updating(self, name: str = "", *, on_default: bool = False) -> Iterator[None]:
        with self._on(self._default if on_default else self._streams["update"]), traced(name or "update"):
            yield

    def is_on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def empty_pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def empty_device(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def memory_left(self) -> tuple[int, int] | None:
        module = torch.get_device_module(self._device)
        if not hasattr(module, "mem_get_info"):
            return None
        free, total = module.mem_get_info(self._device)
        reserved = module.memory_reserved(self._device)
        share = getattr(module, "get_per_process_memory_fraction", lambda _: 1.0)(self._device)
        total = int(share * total)
        can_have = min(free + reserved, total)
        return can_have - max(reserved, module.max_memory_reserved(self._device)), total

    def retries(self) -> int:
        module = torch.get_device_module(self._device)
        return module.memory_stats(self._device).get("num_alloc_retries", 0) if hasattr(module, "memory_stats") else 0

    def drain(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def runtime_for(device: torch.device) -> Runtime:
    """The runtime that serves parameters on ``device``."""
    if device.type == "cpu":
        return HostRuntime()
    return AcceleratorRuntime(device)


def free_pinned() -> None:
    """Give page-locked memory that nothing uses any more back to the system; torch would keep it for later."""
    if torch.accelerator.is_available():
        # Torch 2.11 has it for CUDA alone.
        empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()

"""A device played on the CPU: finds missing waits, and tells how long a schedule would take and what memory it needs.

:class:`SimulatedAccelerator` is a :class:`offload.engine.runtime.Runtime` with the streams ``compute``, ``update``,
``up`` and ``down``. Four things make it stricter than a device:

- A copy runs only when somebody waits for it, so that a missing wait shows as a stale value.
- Each access to memory is checked against earlier ones by vector clocks, so that a missing wait is an error even
  where the value happens to be right.
- Memory that is freed while a stream may still be using it is an error, whether or not it is used again. That of a
  library which orders streams before it allocates (see :meth:`~SimulatedAccelerator.loose_memory`) is one when it may
  be used again, at the next allocation for its stream.
- Threads take turns, in an order that can be chosen to be unkind, and the same each time.

Time is virtual: with :class:`Rates`, every copy, update, host operation, launch and page-lock has a duration, and
:attr:`SimulatedAccelerator.trace` shows who was busy when. Device memory is counted as PyTorch's caching allocator
hands it out, and may be limited. :attr:`SimulatedAccelerator.host_waits` tells where threads waited for the device.

    sim = SimulatedAccelerator(order="late")
    with sim:  # torch operations inside are watched
        event = sim.copy(host, device, "down", after=[sim.record()], name="layers.0: gradient")
        event.synchronize()

Memory from :meth:`~SimulatedAccelerator.empty_pinned`, what is computed from it, and 0-dim tensors made by
``torch.tensor`` are host memory; all other memory is the device's.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from offload.engine.runtime import Direction, Event, Thread
from offload.simulation.ledger import STREAMS, Ledger, Memory, RaceError
from offload.simulation.memory import CachingAllocator
from offload.simulation.sharing import Sharing
from offload.simulation.streams import LAUNCH_QUEUE, Point, Rates, Stream, Streams
from offload.simulation.threads import Block, DeadlockError, Order, Signal, SimulatedThread, Threads
from offload.simulation.timeline import Span, draw, write_chrome_trace
from offload.simulation.touched import Touch, place_of_caller, plain_tensors, touched_by, touched_bytes
from offload.simulation.vector_clock import Agent
from offload.simulation.watch import Watch, host_needs_result, is_view

__all__ = ["DeadlockError", "Pin", "RaceError", "Rates", "SimulatedAccelerator", "Span", "draw", "write_chrome_trace"]

POISON = 0xFF
"""Fills new buffers: NaN in every floating-point type, so that reading what nobody wrote shows."""


@dataclass(frozen=True)
class Pin:
    """``thread`` page-locked ``nbytes`` of host memory, and was done with it at virtual ``time``."""

    thread: str
    nbytes: int
    time: float


class SimulatedAccelerator:
    """A :class:`~offload.engine.runtime.Runtime` on the CPU with streams, memory, virtual time and race detection.

    Args:
        rates: what work costs; None: no time.
        order: which thread goes on where several could. ``late``: a started thread runs only while the main
            thread is blocked, and an event is done once its work had to run. ``early``: started threads go first.
            ``time``: the thread that is behind in virtual time goes first. A number: chosen at random from that
            seed, and so are the answers of ``is_done``. In ``early`` and ``time`` an event is done when its
            work's end is not after the asking thread's time.
        scale: counts bytes as if tensors were this many times larger, for the timeline and the memory of a large
            model played with a small one. Tensors without dimensions stay as small as they are.
        memory: bytes of the device, which ``scale`` does not change; None for a device without limit.
        launch_queue: launches that a stream holds and that have not begun, where launches take time
            (:attr:`Rates.launch`); a thread waits before it adds another.
        streams: names of further streams, which a library has made (see :meth:`on`).
        sharing: what copies (kinds ``up`` and ``down``), work on started threads (``host``) and :meth:`transfer` use
            together; None where each has its own.
        lockable: bytes of host memory that can be page-locked; None for any number.
        spare: bytes that :meth:`memory_left` tells, whatever was taken; None for what ``memory`` leaves.
        is_checked: accesses are recorded and checked, and copies move data. Otherwise only time is told, in a third of
            the time; memory that a copy alone still holds is not counted.

    Attributes:
        memory: the device's memory: what is allocated, what was at most, and :meth:`~CachingAllocator.reset_peak`.
            What was there before the ``with`` block counts from its first use.
        trace: who was busy when.
        pins: what was page-locked, in bytes times ``scale``.
        copied_bytes: by direction; not scaled.
        host_waits: (thread, place in the source) of every call that made a thread wait for the device: an event's
            ``synchronize`` before its work was done, an operation whose result the host needs, a copy to or from the
            host that is not ``non_blocking``.

    Raises (inside ``with``): RaceError, DeadlockError, torch.OutOfMemoryError, and in the main thread whatever ended a
    started thread.
    """

    shares_memory = False

    def __init__(
        self,
        rates: Rates | None = None,
        *,
        order: Order = "late",
        scale: float = 1.0,
        memory: int | None = None,
        launch_queue: int = LAUNCH_QUEUE,
        streams: Sequence[str] = (),
        sharing: Sharing | None = None,
        spare: int | None = None,
        lockable: int | None = None,
        is_checked: bool = True,
    ) -> None:
        self.rates = rates or Rates()
        self._spare, self._lockable = spare, lockable
        self.scale = scale
        self.memory = CachingAllocator(memory)
        self.pins: list[Pin] = []
        self.copied_bytes: dict[str, int] = {"down": 0, "up": 0}
        self._threads = Threads(order, lambda thread: Watch(thread, self._operation))
        self._streams = Streams((*STREAMS, *streams), self._threads, self.rates, launch_queue, sharing)
        self.trace: list[Span] = self._streams.trace
        self.host_waits: list[tuple[str, str]] = self._streams.host_waits
        self._is_checked = is_checked
        self._ledger = Ledger(self._made, self._freed, records=is_checked)
        self._loose: dict[str, list[Memory]] = defaultdict(list)
        self._copies: list[tuple[Point, str, dict[torch.UntypedStorage, int]]] = []
        self._watch = Watch(self._threads.main, self._operation)

    @property
    def order(self) -> Order:
        """May be changed on the way."""
        return self._threads.order

    @order.setter
    def order(self, order: Order) -> None:
        self._threads.order = order

    # ---- entering and leaving

    def __enter__(self) -> SimulatedAccelerator:
        if self._threads.enter():
            self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._threads.leave():
            return
        self._watch.__exit__(kind, value, traceback)
        stuck = self._threads.end()
        self._copies.clear()
        if kind is None:
            if self._threads.errors:
                raise self._threads.errors.pop(0)
            if stuck:
                raise RuntimeError(f"threads did not end when the simulator was left: {', '.join(stuck)}")

    # ---- the runtime's interface

    def copy(
        self, dst: Tensor, src: Tensor, direction: Direction, after: Sequence[Event] = (), name: str = ""
    ) -> Event:
        thread = self._threads.point()
        self._check_copies()
        stream = self._streams[direction]
        name = name or f"{direction} copy"
        before = [event for event in after if isinstance(event, Point)]
        run, own = self._movement(thread, dst, src) if self._is_checked else (None, {})
        torch.autograd.graph.increment_version(dst)  # as on a device: seen when queued
        for event in before:
            self._streams.follow(stream, event)
        stream.clock.join(thread.clock)
        stream.clock.tick(stream.name)
        place = self._place()
        with self._refusing([src, dst], stream):
            for tensor, writes in [(src, False), (dst, True)]:
                for plain in plain_tensors(tensor):
                    self._add(plain, writes, stream, f"copy {name!r}", place)
        self.copied_bytes[direction] += src.nbytes
        seconds = src.nbytes * self.scale / (self.rates.up if direction == "up" else self.rates.down)
        self._streams.work(stream, thread, seconds, name, kind=direction)
        point = self._streams.mark(stream, thread, before, run)
        if self._is_checked:
            self._copies.append((point, f"copy {name!r} ({place})", own))
        return point

    def _movement(
        self, thread: SimulatedThread, dst: Tensor, src: Tensor
    ) -> tuple[Callable[[], None], dict[torch.UntypedStorage, int]]:
        """What moves a copy's data, and its own references to each storage."""
        with _silence(thread):
            storages = [plain.untyped_storage() for tensor in (dst, src) for plain in plain_tensors(tensor)]
            callers = {storage: _references(storage) for storage in storages if storage.nbytes()}
            target, source = dst.detach(), src.detach().expand(dst.shape)  # raises here, not when it runs
            own = {storage: _references(storage) - count for storage, count in callers.items()}

        def run() -> None:
            with _silence(self._threads.current()), torch.no_grad():
                target.data.copy_(source.data)

        return run, own

    def stream(self) -> Hashable:
        return self._stream_of(self._threads.current()).name

    def record(self, stream: Hashable = None) -> Event:
        thread = self._threads.point()
        self._check_copies()
        return self._streams.mark(self._stream_of(thread) if stream is None else self._streams[str(stream)], thread)

    def wait(self, event: Event) -> None:
        if self._threads.are_left:
            return
        thread = self._threads.point()
        stream = self._stream_of(thread)
        stream.clock.join(thread.clock)
        if isinstance(event, Point):
            self._streams.force(event)
            self._streams.follow(stream, event)

    @contextmanager
    def updating(self, name: str = "", *, on_default: bool = False) -> Iterator[None]:
        thread = self._threads.point()
        thread.updating.append(Block(name or "update", "compute" if on_default else "update"))
        try:
            yield
        finally:
            thread.updating.pop()

    @contextmanager
    def working(self, name: str) -> Iterator[None]:
        thread = self._threads.current()
        thread.working = Block(name)
        try:
            yield
        finally:
            thread.working = None

    def is_on_host(self, tensor: Tensor) -> bool:
        return self._ledger.on_host(tensor)

    def empty_pinned(self, nbytes: int) -> Tensor:
        locked = sum(pin.nbytes for pin in self.pins)
        if self._lockable is not None and locked + nbytes * self.scale > self._lockable:
            raise RuntimeError("simulated host: no more memory can be page-locked")
        thread = self._threads.point()
        buffer = self._buffer(thread, nbytes)
        self._ledger.memory(buffer, on_host=True)
        if self.rates.pin != math.inf:
            self._streams.charge(thread, thread, nbytes * self.scale / self.rates.pin, "page-lock")
        self.pins.append(Pin(thread.name, round(nbytes * self.scale), thread.now))
        return buffer

    def empty_device(self, nbytes: int) -> Tensor:
        thread = self._threads.point()
        buffer = self._buffer(thread, nbytes)
        # The allocator hands out what the current stream may still be using.
        stream = self._stream_of(thread)
        if self._ledger.memory(buffer, stream=stream.name, purpose=self._purpose(thread, "empty_device")) is not None:
            stream.clock.join(thread.clock)
            stream.clock.tick(stream.name)
            self._add(buffer, True, stream, "empty_device", self._place())
        return buffer

    def signal(self) -> Signal:
        self._threads.current()
        return Signal(self._threads)

    def start(self, work: Callable[[], None], name: str) -> Thread:
        return self._threads.start(work, name)

    def memory_left(self) -> tuple[int, int] | None:
        left = self.memory.left() if self._spare is None else (self._spare, 0)
        return None if left is None else (int(left[0] / self.scale), int(left[1] / self.scale))

    def retries(self) -> int:
        return self.memory.retries

    def drain(self) -> None:
        if not self._threads.are_left:
            thread = self._threads.point()
            self._check_copies()
            for name in ("update", "up", "down"):
                self._streams.drain(thread, self._streams[name])

    # ---- what tests and timelines ask for

    def compute(self, seconds: float, name: str, launches: int = 1) -> None:
        """Keep the compute stream busy, as a layer's forward or backward would with so many kernels."""
        thread = self._threads.point()
        stream = self._streams["compute"]
        stream.open_span = None
        self._streams.work(stream, thread, seconds, name, launches=launches)

    def transfer(
        self, seconds: float, name: str, kind: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Work of a library on the current stream, such as a collective.

        Args:
            seconds: at full speed.
            name: what traces call it.
            kind: of what is shared.
            reads: tensors that it reads.
            writes: and those that it writes.
        """
        thread = self._threads.point()
        stream = self._stream_of(thread)
        stream.open_span = None
        stream.clock.join(thread.clock)
        stream.clock.tick(stream.name)
        place = self._place()
        with self._ledger.working(), self._refusing([*reads, *writes], stream):
            for tensors, are_written in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self._add(tensor, are_written, stream, name, place)
        self._streams.work(stream, thread, seconds, name, kind=kind)

    def resize(self, tensor: Tensor, nbytes: int) -> None:
        """Give a tensor's storage other memory, for the current stream, or none, as a library does that keeps the
        storage."""
        thread = self._threads.point()
        if tensor.untyped_storage().nbytes() == nbytes:
            return
        with _silence(thread):
            self._ledger.forget(tensor)
            tensor.untyped_storage().resize_(nbytes)
        purpose = self._purpose(thread, "resize")
        if nbytes:
            self._ledger.memory(tensor, stream=self._stream_of(thread).name, purpose=purpose)
        self._threads.fail(thread)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Inside, a stream is this thread's current one."""
        thread = self._threads.point()
        self._streams[stream]  # KeyError for none
        thread.updating.append(Block(stream, stream))
        try:
            yield
        finally:
            thread.updating.pop()

    @contextmanager
    def launching_on(self, stream: str) -> Iterator[None]:
        """Inside, this thread's operations go to a stream whatever stream is current, as those of a library do that
        launches its kernels on the default stream. Memory is still allocated for the current stream, and events are
        still recorded there."""
        thread = self._threads.current()
        self._streams[stream]  # KeyError for none
        thread.foreign.append(stream)
        try:
            yield
        finally:
            thread.foreign.pop()

    @contextmanager
    def purpose(self, name: str) -> Iterator[None]:
        """Inside, device memory that this thread allocates is counted under a name; otherwise under the operation's."""
        thread = self._threads.current()
        thread.purposes.append(name)
        try:
            yield
        finally:
            thread.purposes.pop()

    @contextmanager
    def loose_memory(self) -> Iterator[None]:
        """Inside, device memory that this thread allocates may be freed before streams are done with it, as long as
        they are when memory is allocated for the same stream again."""
        thread = self._threads.current()
        before, thread.is_loose = thread.is_loose, True
        try:
            yield
        finally:
            thread.is_loose = before

    def now(self, agent: str | None = None) -> float:
        """A thread's virtual time, by default the current one's, or when a stream has finished what is queued. Raises
        KeyError for no agent."""
        if agent is None:
            return self._threads.current().now
        return self._streams[agent].now if agent in self._streams else self._threads[agent].now

    def finish(self) -> float:
        """Run everything that is queued; the time when all streams are done, which the calling thread waits for."""
        thread = self._threads.point()
        self._check_copies()
        self._streams.drain_all(thread)
        return self._streams.end

    # ---- torch operations

    def _operation(
        self, thread: SimulatedThread, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Attribute an operation that has just run, check its accesses, and charge for them."""
        self._threads.fail(thread)
        if is_view(func):
            return
        operation = func.overloadpacket.__name__
        touched, inputs = touched_by(func, args, kwargs, result)
        if operation == "lift_fresh" and result.dim() == 0:
            # torch.tensor(0.0), an optimizer's step count: on a real machine it rests on the host.
            touched = [Touch(result, False, True, True)]
        if not touched:
            return
        with self._ledger.working():
            self._attribute(thread, func, operation, args, kwargs, touched, inputs)
        self._threads.fail(thread)

    def _attribute(
        self,
        thread: SimulatedThread,
        func: Any,
        operation: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        touched: Sequence[Touch],
        inputs: Sequence[Tensor],
    ) -> None:
        ledger = self._ledger
        blocks = host_needs_result(func, args)
        current = self._stream_of(thread)
        agent: Agent = self._streams[thread.foreign[-1]] if thread.foreign else current
        block = thread.updating[-1] if thread.updating else None
        if operation == "copy_" and ledger.on_host(args[0]) != ledger.on_host(args[1]):
            # Between host and device: on the current stream, which the thread waits for unless told otherwise.
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if thread is not self._threads.main and block is None:
                agent = thread
        elif operation == "lift_fresh" or self._is_host_work(thread, inputs):
            agent = thread
        agent.clock.join(thread.clock)
        agent.clock.tick(agent.name)
        place = self._place()
        name = f"{operation} in {block.name!r}" if block is not None and agent is not thread else operation
        purpose = self._purpose(thread, operation)
        with self._refusing([touch.tensor for touch in touched], agent):
            for tensor, reads, writes, is_new in touched:
                if is_new:
                    ledger.memory(tensor, stream=current.name, on_host=agent is thread, purpose=purpose)
                    if agent is not thread and agent is not current:
                        # The allocator hands out what the current stream may still be using.
                        current.clock.join(thread.clock)
                        current.clock.tick(current.name)
                        self._add(tensor, True, current, f"the allocation for {name}", place)
                elif reads and not writes:
                    # A host scalar is an argument of the kernel, read when that is queued.
                    is_argument = tensor.dim() == 0 and ledger.on_host(tensor)
                    if is_argument:
                        thread.clock.tick(thread.name)
                    self._add(tensor, False, thread if is_argument else agent, name, place)
            for tensor, _, writes, _ in touched:
                if writes:
                    self._add(tensor, True, agent, name, place)
        nbytes = self.scale * sum(touched_bytes(touch.tensor) * (touch.reads + touch.writes) for touch in touched)
        launches = not operation.removeprefix("new_").startswith("empty")
        if not launches:
            nbytes = 0.0
        if isinstance(agent, Stream):
            if launches and block is not None:
                self._streams.work(agent, thread, nbytes / self.rates.device, block.name, block)
            elif launches and self.rates.launch:
                self._streams.work(agent, thread, 0.0, name)
            if blocks:
                self.host_waits.append((thread.name, place))
                self._streams.drain(thread, agent)
        elif thread is not self._threads.main:
            name, key = (operation, thread) if thread.working is None else (thread.working.name, thread.working)
            self._streams.charge(thread, thread, nbytes / self.rates.host, name, key, "host")

    def _is_host_work(self, thread: SimulatedThread, inputs: Sequence[Tensor]) -> bool:
        """Whether a thread does an operation itself. As on a device, a 0-dim host tensor may join device tensors."""
        if thread is not self._threads.main and not thread.updating and not thread.foreign:
            return True
        sized = [tensor for tensor in inputs if tensor.dim()]
        if sized:
            return any(self._ledger.on_host(tensor) for tensor in sized)
        return bool(inputs) and all(self._ledger.on_host(tensor) for tensor in inputs)

    def _stream_of(self, thread: SimulatedThread) -> Stream:
        """The thread's current stream."""
        return self._streams[thread.updating[-1].stream if thread.updating else "compute"]

    # ---- memory

    def _add(self, tensor: Tensor, writes: bool, agent: Agent, name: str, place: str) -> None:
        self._ledger.add(tensor, writes=writes, agent=agent.name, clock=agent.clock, name=name, place=place)

    def _place(self) -> str:
        return place_of_caller() if self._is_checked else ""

    @contextmanager
    def _refusing(self, tensors: Sequence[Tensor], agent: Agent) -> Iterator[None]:
        """An access that is refused inside is an error once, and not again when its memory is freed."""
        try:
            yield
        except RaceError:
            for tensor in tensors:
                self._ledger.used_until(tensor, agent.clock)
            raise

    def _buffer(self, thread: SimulatedThread, nbytes: int) -> Tensor:
        with _silence(thread):
            return torch.full((nbytes,), POISON, dtype=torch.uint8)

    @staticmethod
    def _purpose(thread: SimulatedThread, operation: str) -> str:
        return thread.purposes[-1] if thread.purposes else operation

    def _check_copies(self) -> None:
        """Copies that have not run hold their memory here; on a device whoever queued them has to."""
        if not self._is_checked:
            return
        self._copies = [entry for entry in self._copies if not entry[0].done]
        mine: Counter[torch.UntypedStorage] = Counter()
        for _, _, own in self._copies:
            mine.update(own)
        for _, name, own in self._copies:
            for storage in own:
                # One more is the storage's own object.
                if _references(storage) <= mine[storage] + 1:
                    self._copies.clear()
                    raise RaceError(f"memory was freed while {name} still uses it: hold it until the copy's event")

    def _made(self, memory: Memory) -> None:
        """Memory was allocated, or is seen for the first time."""
        if memory.on_host:
            return
        thread = self._threads.current()
        memory.is_loose = thread.is_loose
        for freed in self._loose.pop(memory.stream, ()):
            self._check_freed(freed, thread, "was freed, and may be in use again,")
        nbytes = memory.nbytes if memory.is_scalar else round(memory.nbytes * self.scale)
        retries = self.memory.retries
        try:
            memory.block = self.memory.allocate(nbytes, memory.stream, memory.purpose)
        finally:
            if self.memory.retries > retries:
                # Giving segments back (cudaFree) waits for the device.
                thread.now = max(thread.now, self._streams.end)

    def _freed(self, memory: Memory, ident: int) -> None:
        """A thread let go of memory."""
        if memory.block is not None:
            self.memory.free(memory.block)
        if memory.is_loose:
            self._loose[memory.stream].append(memory)
        else:
            self._check_freed(memory, self._threads.by_ident(ident), "was freed")

    def _check_freed(self, memory: Memory, thread: SimulatedThread, what: str) -> None:
        """Make it an error of a thread if a stream may not be done with memory."""
        if self._threads.is_closing or not self._is_checked:
            return
        # What any thread has seen to be done is done, whichever thread drops the last reference.
        known = self._threads.clocks()
        if not memory.on_host:
            known.append(self._streams[memory.stream].clock)
        access = memory.still_used(*known, streams=self._streams)
        if access is not None and thread.failure is None:
            thread.failure = RaceError(
                f"memory {what} while `{access.agent}` still uses it: keep it until an event that is recorded "
                f"after\n  {access}"
            )


def _references(storage: torch.UntypedStorage) -> int:
    """Of tensors and others to a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


@contextmanager
def _silence(thread: SimulatedThread) -> Iterator[None]:
    """Inside, the thread's torch operations are the simulator's own."""
    before, thread.silent = thread.silent, True
    try:
        yield
    finally:
        thread.silent = before

"""A device played on the CPU: finds missing waits, and tells how long a schedule would take.

:class:`SimulatedAccelerator` is a :class:`offload.engine.runtime.Runtime` with the streams ``compute``, ``update``,
``up`` and ``down``. Three things make it stricter than a device:

- A copy runs only when somebody waits for it, so that a missing wait shows as a stale value.
- Each access to memory is checked against earlier ones by vector clocks, so that a missing wait is an error even
  where the value happens to be right.
- Threads take turns, in an order that can be chosen to be unkind, and the same each time.

Time is virtual: with :class:`Rates`, every copy, update and host operation has a duration, and
:attr:`SimulatedAccelerator.trace` shows who was busy when. :attr:`SimulatedAccelerator.host_waits` tells where threads
waited for the device.

    sim = SimulatedAccelerator(order="late")
    with sim:  # torch operations inside are watched
        event = sim.copy(host, device, "down", after=[sim.record()], name="layers.0: gradient")
        event.synchronize()

Memory from :meth:`~SimulatedAccelerator.empty_pinned`, what is computed from it, and 0-dim tensors made by
``torch.tensor`` are host memory; all other memory is the device's.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.engine.runtime import Direction, Event, Signal, Thread
from offload.simulation.timeline import Span, draw, write_chrome_trace
from offload.simulation.vector_clock import (
    Clock,
    Ledger,
    RaceError,
    address_of,
    place_of_caller,
    plain_tensors,
    touched_by,
    touched_bytes,
)

__all__ = ["DeadlockError", "RaceError", "Rates", "SimulatedAccelerator", "Span", "draw", "write_chrome_trace"]

Order = Literal["time", "late", "early"] | int

PATIENCE = 120.0
"""Real seconds that a thread may hold the baton while another waits, before that is taken for a hang."""

POISON = 0xFF
"""Fills new buffers: NaN in every floating-point type, so that reading what nobody wrote shows."""


class DeadlockError(AssertionError):
    """Every thread waits for another."""


class _Closed(BaseException):
    """Ends a thread that still runs when the simulator is left."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second of a machine; what is left out takes no time.

    Attributes:
        up: the link from host to device.
        down: the link from device to host.
        device: device memory, read and written by updates on the device.
        host: host memory, read and written by work on started threads.
    """

    up: float = math.inf
    down: float = math.inf
    device: float = math.inf
    host: float = math.inf


class _Agent:
    """Does things one after another, at most one at a time.

    Attributes:
        now: virtual time; a stream has finished its queued work by then.
        open_span: what the next operation's span may be merged with: the owner's key and the place in the trace.
    """

    def __init__(self, name: str, clock: Clock, now: float) -> None:
        self.name = name
        self.clock = clock
        self.now = now
        self.open_span: tuple[object, int] | None = None


class _Stream(_Agent):
    last: _Point | None = None


class _Thread(_Agent):
    """A thread and what it waits for.

    Attributes:
        turn: released to hand this thread the baton.
        ready: says whether the thread may go on; None where it does not wait.
        since: the virtual time from which it may go on, once it is ready.
        place: where it waits, for messages.
        failure: raised in this thread as soon as it has the baton.
        contexts: the ``updating`` blocks it is in, by name.
        work: the ``working`` block it is in.
    """

    def __init__(self, name: str, clock: Clock, now: float) -> None:
        super().__init__(name, clock, now)
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None
        self.since: Callable[[], float] | None = None
        self.place = ""
        self.failure: BaseException | None = None
        self.ended = False
        self.contexts: list[_Context] = []
        self.work: _Context | None = None
        self.silent = False
        self.real: threading.Thread | None = None


@dataclass(eq=False)
class _Context:
    """One ``with updating(name)``; an identity that spans are merged by."""

    name: str


class _Point:
    """An event: a point in a stream's work, whose work may not have run yet."""

    def __init__(
        self,
        simulator: SimulatedAccelerator,
        clock: Clock,
        end: float,
        before: Sequence[_Point],
        run: Callable[[], None] | None = None,
    ) -> None:
        self._simulator = simulator
        self.clock = clock
        self.end = end
        self.before = before
        self.run = run
        self.done = False  # the work has run
        self.seen = False  # a thread knows that it has

    def synchronize(self) -> None:
        self._simulator._synchronize(self)

    def is_done(self) -> bool:
        return self._simulator._is_done(self)


class _Signal:
    """A condition variable with a re-entrant lock."""

    def __init__(self, simulator: SimulatedAccelerator) -> None:
        self._simulator = simulator
        self._clock = Clock()
        self._released = 0.0
        self._owner: _Thread | None = None
        self._depth = 0
        self._sleepers: set[_Thread] = set()

    def __enter__(self) -> _Signal:
        if self._simulator._left:
            return self
        thread = self._simulator._point()
        if self._owner is not thread:
            if self._owner is not None:
                self._simulator._block(
                    thread, lambda: self._owner is None, lambda: self._released, "for a Signal's lock"
                )
            self._take(thread)
        self._depth += 1
        return self

    def __exit__(self, *exception: object) -> None:
        if self._simulator._left:
            return
        failed = bool(exception) and exception[0] is not None
        thread = self._simulator._current()
        if self._owner is not thread:
            # An exception came out of wait(), which had given the lock away.
            if not failed:
                raise RuntimeError("cannot release a Signal that this thread does not hold")
            return
        self._depth -= 1
        if not self._depth:
            self._give(thread)
        if not failed:
            self._simulator._switch(thread)

    def wait(self) -> None:
        thread = self._held()
        depth, self._depth = self._depth, 0
        self._sleepers.add(thread)
        self._give(thread)
        try:
            self._simulator._block(
                thread,
                lambda: thread not in self._sleepers and self._owner is None,
                lambda: self._released,
                "in Signal.wait",
            )
        finally:
            self._sleepers.discard(thread)
        self._take(thread)
        self._depth = depth

    def notify_all(self) -> None:
        if self._simulator._left:
            return
        self._held()
        self._sleepers.clear()  # they go on when the lock is released, and not before then in virtual time either

    def _held(self) -> _Thread:
        thread = self._simulator._current()
        if self._owner is not thread:
            raise RuntimeError("cannot wait on or notify a Signal that this thread does not hold")
        return thread

    def _take(self, thread: _Thread) -> None:
        self._owner = thread
        thread.clock.join(self._clock)
        thread.now = max(thread.now, self._released)

    def _give(self, thread: _Thread) -> None:
        self._owner = None
        self._clock.join(thread.clock)
        self._released = max(self._released, thread.now)


class _Started:
    """What ``start`` returns."""

    def __init__(self, simulator: SimulatedAccelerator, thread: _Thread) -> None:
        self._simulator = simulator
        self._thread = thread

    def join(self) -> None:
        if self._simulator._left:
            return
        caller = self._simulator._point()
        if not self._thread.ended:
            where = f"for the end of {self._thread.name!r}"
            self._simulator._block(caller, lambda: self._thread.ended, lambda: self._thread.now, where)
        caller.clock.join(self._thread.clock)
        caller.now = max(caller.now, self._thread.now)


class _Watch(TorchDispatchMode):
    """Tells the simulator of every torch operation of one thread."""

    def __init__(self, simulator: SimulatedAccelerator, thread: _Thread) -> None:
        super().__init__()
        self._simulator = simulator
        self._thread = thread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A subclass goes first, and what it does with its inner tensors comes back here.
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._thread.silent:
            self._simulator._operation(self._thread, func, args, kwargs, result)
        return result


class SimulatedAccelerator:
    """A :class:`~offload.engine.runtime.Runtime` on the CPU with streams, virtual time and race detection.

    Args:
        rates: what work costs; None: no time.
        order: which thread goes on where several could. ``late``: a started thread runs only while the main
            thread is blocked, and an event is done once its work had to run. ``early``: started threads go first.
            ``time``: the thread that is behind in virtual time goes first. A number: chosen at random from that
            seed, and so are the answers of ``is_done``. In ``early`` and ``time`` an event is done when its
            work's end is not after the asking thread's time.
        scale: counts bytes as if tensors were this many times larger, for the timeline of a large model drawn
            with a small one.

    Attributes:
        trace: who was busy when.
        copied_bytes: bytes that :meth:`copy` was given, by direction.
        host_waits: (thread, place in the source) of every call that made a thread wait for the device: an event's
            ``synchronize`` before its work was done, an operation whose result the host needs, a copy to or from the
            host that is not ``non_blocking``.

    Raises (inside ``with``): RaceError, DeadlockError, and in the main thread whatever ended a started thread.
    """

    shares_memory = False

    def __init__(self, rates: Rates | None = None, *, order: Order = "late", scale: float = 1.0) -> None:
        if order not in ("time", "late", "early") and not isinstance(order, int):
            raise ValueError(f"order={order!r} is none of 'time', 'late', 'early' or a seed")
        self.rates = rates or Rates()
        self.order = order
        self.scale = scale
        self.trace: list[Span] = []
        self.copied_bytes: dict[str, int] = {"down": 0, "up": 0}
        self.host_waits: list[tuple[str, str]] = []
        self._random = random.Random(order if isinstance(order, int) else 0)
        self._ledger = Ledger()
        self._streams = {name: _Stream(name, Clock(), 0.0) for name in ("compute", "update", "up", "down")}
        self._agents: dict[str, _Agent] = dict(self._streams)
        self._main = _Thread("main", Clock(), 0.0)
        self._agents["main"] = self._main
        self._alive = [self._main]
        self._by_ident: dict[int, _Thread] = {}
        self._errors: list[BaseException] = []
        self._depth = 0
        self._closing = False
        self._watch = _Watch(self, self._main)

    # ---- entering and leaving

    def __enter__(self) -> SimulatedAccelerator:
        if self._closing:
            raise RuntimeError("this SimulatedAccelerator was left; make a new one")
        if not self._depth:
            self._by_ident[threading.get_ident()] = self._main
            self._watch.__enter__()
        elif self._current() is not self._main:
            raise RuntimeError("only the thread that entered a SimulatedAccelerator may enter it again")
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._closing = True
        self._watch.__exit__(kind, value, traceback)
        stuck = []
        for thread in [thread for thread in self._alive if thread.real is not None]:
            assert thread.real is not None
            thread.turn.release()
            thread.real.join(10.0)
            if thread.real.is_alive():
                stuck.append(thread.name)
        self._by_ident.clear()
        if kind is None:
            if self._errors:
                raise self._errors.pop(0)
            if stuck:
                raise RuntimeError(f"threads did not end when the simulator was left: {', '.join(stuck)}")

    @property
    def _left(self) -> bool:
        """The ``with`` block is over and every thread has ended: an owner that tidies up later has nothing to do."""
        return self._closing and not self._by_ident

    # ---- the runtime's interface

    def copy(
        self, dst: Tensor, src: Tensor, direction: Direction, after: Sequence[Event] = (), name: str = ""
    ) -> Event:
        thread = self._point()
        stream = self._streams[direction]
        name = name or f"{direction} copy"
        before = [event for event in after if isinstance(event, _Point)]
        with _silence(thread):
            target, source = dst.detach(), src.detach().expand(dst.shape)  # raises here, not when it runs
            torch.autograd.graph.increment_version(dst)  # as on a device: seen when queued
        for event in before:
            self._follow(stream, event)
        stream.clock.join(thread.clock)
        stream.clock.tick(stream.name)
        place = place_of_caller()
        for tensor, writes in [(src, False), (dst, True)]:
            for plain in plain_tensors(tensor):
                self._add(plain, writes, stream, f"copy {name!r}", place)
        self.copied_bytes[direction] += src.nbytes
        seconds = src.nbytes * self.scale / (self.rates.up if direction == "up" else self.rates.down)
        self._charge(stream, thread, seconds, name)

        def run() -> None:
            with _silence(self._current()), torch.no_grad():
                target.data.copy_(source.data)

        return self._mark(stream, thread, before, run)

    def record(self) -> Event:
        thread = self._point()
        return self._mark(self._stream_of(thread), thread)

    def wait(self, event: Event) -> None:
        if self._left:
            return
        thread = self._point()
        stream = self._stream_of(thread)
        stream.clock.join(thread.clock)
        if isinstance(event, _Point):
            self._force(event)
            self._follow(stream, event)

    @contextmanager
    def updating(self, name: str = "") -> Iterator[None]:
        thread = self._point()
        thread.contexts.append(_Context(name or "update"))
        try:
            yield
        finally:
            thread.contexts.pop()

    @contextmanager
    def working(self, name: str) -> Iterator[None]:
        thread = self._current()
        thread.work = _Context(name)
        try:
            yield
        finally:
            thread.work = None

    def borrow(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do: memory that was touched is never used again here, so a missing call does not show."""
        self._current()

    def empty_pinned(self, nbytes: int) -> Tensor:
        return self._empty(nbytes, on_host=True)

    def empty_device(self, nbytes: int) -> Tensor:
        return self._empty(nbytes, on_host=False)

    def signal(self) -> Signal:
        self._current()
        return _Signal(self)

    def start(self, work: Callable[[], None], name: str) -> Thread:
        parent = self._point()
        unique, number = name, 1
        while unique in self._agents:
            number += 1
            unique = f"{name}#{number}"
        thread = _Thread(unique, Clock(parent.clock), parent.now)
        self._agents[unique] = thread
        self._alive.append(thread)
        thread.real = threading.Thread(target=self._run, args=(thread, work), name=unique, daemon=True)
        thread.real.start()
        self._switch(parent)
        return _Started(self, thread)

    # ---- what tests and timelines ask for

    def compute(self, seconds: float, name: str) -> None:
        """Keep the compute stream busy, as a layer's forward or backward would."""
        thread = self._point()
        stream = self._streams["compute"]
        stream.open_span = None
        self._charge(stream, thread, seconds, name)

    def now(self, agent: str) -> float:
        """A thread's virtual time, or when a stream has finished what is queued. Raises KeyError for no agent."""
        return self._agents[agent].now

    def finish(self) -> float:
        """Run everything that is queued; the time when all streams are done, which the calling thread waits for."""
        thread = self._point()
        for stream in self._streams.values():
            self._drain(thread, stream)
        return max(stream.now for stream in self._streams.values())

    # ---- work on streams

    def _stream_of(self, thread: _Thread) -> _Stream:
        """The thread's current stream."""
        return self._streams["update" if thread.contexts else "compute"]

    def _mark(
        self, stream: _Stream, thread: _Thread, after: Sequence[_Point] = (), run: Callable[[], None] | None = None
    ) -> _Point:
        """The point that a stream has reached."""
        clock = Clock(stream.clock)
        clock.join(thread.clock)
        before = [*after, stream.last] if stream.last is not None else list(after)
        stream.last = _Point(self, clock, max(stream.now, thread.now), before, run)
        return stream.last

    def _follow(self, stream: _Stream, event: _Point) -> None:
        """Put a stream's later work behind an event."""
        stream.clock.join(event.clock)
        stream.now = max(stream.now, event.end)

    def _force(self, point: _Point) -> None:
        """Run the work before a point; a loop, since chains are longer than Python's stack."""
        stack = [point]
        while stack:
            top = stack[-1]
            waiting = [] if top.done else [other for other in top.before if not other.done]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if not top.done:
                top.done = True
                top.before = ()
                run, top.run = top.run, None
                if run is not None:
                    run()

    def _reach(self, thread: _Thread, point: _Point) -> None:
        """A thread comes to know that a point is passed."""
        self._force(point)
        point.seen = True
        thread.clock.join(point.clock)
        thread.now = max(thread.now, point.end)

    def _drain(self, thread: _Thread, stream: _Stream) -> None:
        """A thread waits for everything on a stream."""
        if stream.last is not None:
            self._reach(thread, stream.last)
        thread.clock.join(stream.clock)
        thread.now = max(thread.now, stream.now)

    def _synchronize(self, point: _Point) -> None:
        thread = self._point()
        is_over = point.end <= thread.now if self.order in ("time", "early") else point.done
        if not is_over:
            self.host_waits.append((thread.name, place_of_caller()))
        self._reach(thread, point)
        self._switch(thread)

    def _is_done(self, point: _Point) -> bool:
        thread = self._point()
        if isinstance(self.order, int):
            done = point.seen or self._random.random() < 0.5
        elif self.order == "late":
            done = point.done
        else:
            done = point.end <= thread.now
        if done:
            self._reach(thread, point)
        return done

    def _charge(self, agent: _Agent, thread: _Thread, seconds: float, name: str, key: object = None) -> None:
        """Keep an agent busy. Work with the same ``key`` and no pause in between becomes one span."""
        start = max(agent.now, thread.now)
        agent.now = start + seconds
        if key is None:
            self.trace.append(Span(agent.name, name, start, agent.now))
        elif seconds:
            if agent.open_span is not None and agent.open_span[0] is key:
                place = agent.open_span[1]
                old = self.trace[place]
                if old.end == start:
                    merged = name if isinstance(key, _Context) else "cpu update"
                    self.trace[place] = Span(agent.name, merged, old.start, agent.now)
                    return
            agent.open_span = (key, len(self.trace))
            self.trace.append(Span(agent.name, name, start, agent.now))

    # ---- torch operations

    def _operation(
        self, thread: _Thread, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Attribute an operation that has just run, check its accesses, and charge for them."""
        operation = func.overloadpacket.__name__
        touched = touched_by(func, args, kwargs, result)
        if operation == "lift_fresh" and result.dim() == 0:
            # torch.tensor(0.0), an optimizer's step count: on a real machine it rests on the host.
            touched = [(result, False, True)]
        if not touched:
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        blocks = _host_needs_result(func, args)
        agent: _Agent = self._stream_of(thread)
        context = thread.contexts[-1] if thread.contexts else None
        if operation == "copy_" and self._ledger.on_host(args[0]) != self._ledger.on_host(args[1]):
            # Between host and device: on the current stream, which the thread waits for unless told otherwise.
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if thread is not self._main and context is None:
                agent = thread
        elif operation == "lift_fresh" or self._is_host_work(thread, inputs):
            agent = thread
        agent.clock.join(thread.clock)
        agent.clock.tick(agent.name)
        place = place_of_caller()
        name = f"{operation} in {context.name!r}" if context is not None and agent is not thread else operation
        for tensor, reads, writes in touched:
            if reads and not writes:
                # A host scalar is an argument of the kernel, read when that is queued.
                is_argument = tensor.dim() == 0 and self._ledger.on_host(tensor)
                if is_argument:
                    thread.clock.tick(thread.name)
                self._add(tensor, False, thread if is_argument else agent, name, place)
        for tensor, _, writes in touched:
            if writes:
                self._add(tensor, True, agent, name, place)
        known = {address_of(tensor) for tensor in inputs}
        if agent is thread:
            for tensor, _, writes in touched:
                memory = self._ledger.memory(tensor)
                if writes and memory is not None and (address_of(tensor) not in known or operation == "lift_fresh"):
                    memory.on_host = True
        nbytes = self.scale * sum(touched_bytes(tensor) * (reads + writes) for tensor, reads, writes in touched)
        if operation.removeprefix("new_").startswith("empty"):
            nbytes = 0.0
        if agent is self._streams["update"]:
            assert context is not None
            self._charge(agent, thread, nbytes / self.rates.device, context.name, context)
        elif agent is thread and thread is not self._main:
            name, key = (operation, thread) if thread.work is None else (thread.work.name, thread.work)
            self._charge(thread, thread, nbytes / self.rates.host, name, key)
        if blocks and isinstance(agent, _Stream):
            self.host_waits.append((thread.name, place))
            self._drain(thread, agent)

    def _is_host_work(self, thread: _Thread, inputs: Sequence[Tensor]) -> bool:
        """Whether a thread does an operation itself. As on a device, a 0-dim host tensor may join device tensors."""
        if thread is not self._main and not thread.contexts:
            return True
        sized = [tensor for tensor in inputs if tensor.dim()]
        if sized:
            return any(self._ledger.on_host(tensor) for tensor in sized)
        return bool(inputs) and all(self._ledger.on_host(tensor) for tensor in inputs)

    def _add(self, tensor: Tensor, writes: bool, agent: _Agent, name: str, place: str) -> None:
        self._ledger.add(tensor, writes=writes, agent=agent.name, clock=agent.clock, name=name, place=place)

    def _empty(self, nbytes: int, *, on_host: bool) -> Tensor:
        thread = self._point()
        with _silence(thread):
            buffer = torch.full((nbytes,), POISON, dtype=torch.uint8)
        memory = self._ledger.memory(buffer)
        if memory is not None:
            memory.on_host = on_host
            if not on_host:
                # The allocator hands out what the current stream may still be using.
                stream = self._stream_of(thread)
                stream.clock.join(thread.clock)
                stream.clock.tick(stream.name)
                self._add(buffer, True, stream, "empty_device", place_of_caller())
        return buffer

    # ---- threads: one at a time has the baton

    def _run(self, thread: _Thread, work: Callable[[], None]) -> None:
        """The body of a started thread."""
        self._by_ident[threading.get_ident()] = thread
        thread.turn.acquire()
        try:
            if not self._closing:
                with _Watch(self, thread):
                    work()
        except (_Closed, DeadlockError):
            pass  # the main thread has its own
        except BaseException as error:
            self._errors.append(error)
        finally:
            thread.ended = True
            self._alive.remove(thread)
            self._by_ident.pop(threading.get_ident(), None)
            if not self._closing:
                self._choose().turn.release()

    def _current(self) -> _Thread:
        """The calling thread, if it may call."""
        if not self._depth and not self._closing:
            raise RuntimeError("use the SimulatedAccelerator inside its `with` block")
        thread = self._by_ident.get(threading.get_ident())
        if thread is None:
            if self._closing:
                raise RuntimeError("the SimulatedAccelerator's `with` block was left")
            raise RuntimeError("this thread was not started by the SimulatedAccelerator's start()")
        return thread

    def _point(self) -> _Thread:
        """A scheduling point at the beginning of a call; the calling thread."""
        thread = self._current()
        thread.open_span = None
        self._switch(thread)
        return thread

    def _block(self, thread: _Thread, ready: Callable[[], bool], since: Callable[[], float], what: str) -> None:
        """Return when ``ready``, with the baton; not before ``since`` in virtual time."""
        thread.ready, thread.since, thread.place = ready, since, f"{what} at {place_of_caller()}"
        try:
            self._switch(thread)
        finally:
            thread.ready = thread.since = None

    def _switch(self, thread: _Thread) -> None:
        """Let others go first, if the order says so. Raises what is to be raised in this thread."""
        if not self._closing:
            chosen = self._choose()
            if chosen is not thread:
                chosen.turn.release()
                if not thread.turn.acquire(timeout=PATIENCE):
                    raise RuntimeError(f"{chosen.name!r} has called nothing of the simulator for {PATIENCE:.0f} s")
        if self._closing:
            raise _Closed
        if thread.failure is not None:
            failure, thread.failure = thread.failure, None
            raise failure
        if thread is self._main and self._errors:
            raise self._errors.pop(0)

    def _choose(self) -> _Thread:
        """Who has the baton next."""
        runnable = [thread for thread in self._alive if self._is_runnable(thread)]
        if not runnable:
            waits = "; ".join(f"{thread.name!r} waits {thread.place}" for thread in self._alive)
            for thread in self._alive:
                thread.failure = DeadlockError(f"every thread is blocked: {waits}")
            runnable = list(self._alive)
        if isinstance(self.order, int):
            return self._random.choice(runnable)
        if self.order == "time":
            # The first of equals: the main thread.
            return min(runnable, key=lambda thread: max(thread.now, thread.since() if thread.since else 0.0))
        if self.order == "late" and self._main in runnable:
            return self._main
        started = [thread for thread in runnable if thread is not self._main]
        return started[0] if started else self._main

    def _is_runnable(self, thread: _Thread) -> bool:
        if thread.ready is None or thread.failure is not None or thread.ready():
            return True
        return thread is self._main and bool(self._errors)


_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _host_needs_result(func: Any, args: Sequence[Any]) -> bool:
    """Whether the host needs an operation's result, a value or a shape: a device's stream is waited for."""
    operation = func.overloadpacket.__name__
    if operation == "index":
        # Positions tell the result's shape, a mask has to be counted.
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return operation == "is_nonzero" or not _WAITING_TAGS.isdisjoint(func.tags)


@contextmanager
def _silence(thread: _Thread) -> Iterator[None]:
    """Inside, the thread's torch operations are the simulator's own."""
    before, thread.silent = thread.silent, True
    try:
        yield
    finally:
        thread.silent = before

"""Simulated threads: real ones that take turns, in an order that can be chosen and is the same each time.

One thread at a time has the *baton*. It hands the baton on at scheduling points, which are calls of the simulator.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from offload.simulation.touched import place_of_caller
from offload.simulation.vector_clock import Agent, Clock

Order = Literal["time", "late", "early"] | int

PATIENCE = 120.0
"""Real seconds that a thread may hold the baton while another waits, before that is taken for a hang."""


class DeadlockError(AssertionError):
    """Every thread waits for another."""


class Closed(BaseException):
    """Ends a thread that still runs when the simulator is left."""


@dataclass(eq=False)
class Block:
    """One ``with updating(name)`` or ``with working(name)``; an identity that spans are merged by.

    Attributes:
        name: what it is about.
        stream: the stream that it makes current; empty where it makes none.
    """

    name: str
    stream: str = ""


class SimulatedThread(Agent):
    """A thread, what it waits for and which blocks it is in.

    Attributes:
        turn: released to hand this thread the baton.
        ready: says whether the thread may go on; None where it does not wait.
        since: the virtual time from which it may go on, once it is ready.
        place: where it waits, for messages.
        failure: raised in this thread by what it does next.
        body: what it is going to run.
        updating: the ``updating`` blocks it is in, by name and stream.
        foreign: the streams to which its operations go whatever is current, the last one first.
        working: the ``working`` block it is in.
        purposes: what it allocates device memory for, the last one first.
        is_loose: what it allocates may be freed early, see ``SimulatedAccelerator.loose_memory``.
        silent: its torch operations are the simulator's own.
    """

    def __init__(self, name: str, clock: Clock, now: float) -> None:
        super().__init__(name, clock, now)
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None
        self.since: Callable[[], float] | None = None
        self.place = ""
        self.failure: BaseException | None = None
        self.ended = False
        self.body: Callable[[], None] | None = None
        self.real: threading.Thread | None = None
        self.updating: list[Block] = []
        self.foreign: list[str] = []
        self.working: Block | None = None
        self.purposes: list[str] = []
        self.is_loose = False
        self.silent = False


class Threads:
    """All threads, of which one has the baton.

    Args:
        order: which thread goes on where several could; see ``SimulatedAccelerator``.
        around: entered by each started thread around what it runs.

    Attributes:
        main: the thread that entered.
        random: makes the choices of an order that is a seed.
        errors: what ended started threads; raised in the main thread.
        is_closing: the simulator is being left, or was.
    """

    def __init__(self, order: Order, around: Callable[[SimulatedThread], AbstractContextManager[Any]]) -> None:
        if order not in ("time", "late", "early") and not isinstance(order, int):
            raise ValueError(f"order={order!r} is none of 'time', 'late', 'early' or a seed")
        self.order = order
        self.random = random.Random(order if isinstance(order, int) else 0)
        self.main = SimulatedThread("main", Clock(), 0.0)
        self.errors: list[BaseException] = []
        self._around = around
        self._all = {"main": self.main}
        self._alive = [self.main]
        self._by_ident: dict[int, SimulatedThread] = {}
        self._depth = 0
        self.is_closing = False

    # ---- entering and leaving

    def enter(self) -> bool:
        """The calling thread becomes the main thread; False where it is already. Raises RuntimeError."""
        if self.is_closing:
            raise RuntimeError("this SimulatedAccelerator was left; make a new one")
        if not self._depth:
            self._by_ident[threading.get_ident()] = self.main
        elif self.current() is not self.main:
            raise RuntimeError("only the thread that entered a SimulatedAccelerator may enter it again")
        self._depth += 1
        return self._depth == 1

    def leave(self) -> bool:
        """Undo one ``enter``; True for the last, after which nothing is simulated any more."""
        self._depth -= 1
        self.is_closing = not self._depth
        return self.is_closing

    def end(self) -> list[str]:
        """End the threads that still run; returns the names of those that do not."""
        stuck = []
        for thread in [thread for thread in self._alive if thread.real is not None]:
            assert thread.real is not None
            thread.turn.release()
            thread.real.join(10.0)
            if thread.real.is_alive():
                stuck.append(thread.name)
        if self.main.failure is not None:
            self.errors.append(self.main.failure)
        self._by_ident.clear()
        return stuck

    @property
    def are_left(self) -> bool:
        """Everything is over and every thread has ended: an owner that tidies up later has nothing to do."""
        return self.is_closing and not self._by_ident

    # ---- threads

    def __getitem__(self, name: str) -> SimulatedThread:
        return self._all[name]

    def current(self) -> SimulatedThread:
        """The calling thread, if it may call. Raises RuntimeError."""
        if not self._depth and not self.is_closing:
            raise RuntimeError("use the SimulatedAccelerator inside its `with` block")
        thread = self._by_ident.get(threading.get_ident())
        if thread is None:
            if self.is_closing:
                raise RuntimeError("the SimulatedAccelerator's `with` block was left")
            raise RuntimeError("this thread was not started by the SimulatedAccelerator's start()")
        return thread

    def clocks(self) -> list[Clock]:
        """What each thread, those that have ended included, knows to be done."""
        return [thread.clock for thread in self._all.values()]

    def by_ident(self, ident: int) -> SimulatedThread:
        """A thread by its number; for one that is not simulated, the main thread."""
        return self._by_ident.get(ident, self.main)

    def start(self, work: Callable[[], None], name: str) -> Started:
        """Run ``work`` on a new thread."""
        parent = self.point()
        unique, number = name, 1
        while unique in self._all:
            number += 1
            unique = f"{name}#{number}"
        thread = SimulatedThread(unique, Clock(parent.clock), parent.now)
        thread.body = work
        self._all[unique] = thread
        self._alive.append(thread)
        thread.real = threading.Thread(target=self._run, args=(thread,), name=unique, daemon=True)
        thread.real.start()
        self.switch(parent)
        return Started(self, thread)

    def _run(self, thread: SimulatedThread) -> None:
        """The body of a started thread."""
        self._by_ident[threading.get_ident()] = thread
        thread.turn.acquire()
        try:
            if not self.is_closing:
                assert thread.body is not None
                with self._around(thread):
                    thread.body()
        except (Closed, DeadlockError):
            pass  # the main thread has its own
        except BaseException as error:
            self.errors.append(error)
        finally:
            thread.body = None  # while it has the baton, since memory may be freed with it
            if thread.failure is not None:
                self.errors.append(thread.failure)
            thread.ended = True
            self._alive.remove(thread)
            self._by_ident.pop(threading.get_ident(), None)
            if not self.is_closing:
                self._choose().turn.release()

    # ---- the baton

    def point(self) -> SimulatedThread:
        """A scheduling point at the beginning of a call; the calling thread."""
        thread = self.current()
        thread.open_span = None
        self.switch(thread)
        return thread

    def block(self, thread: SimulatedThread, ready: Callable[[], bool], since: Callable[[], float], what: str) -> None:
        """Return when ``ready``, with the baton; not before ``since`` in virtual time."""
        thread.ready, thread.since, thread.place = ready, since, f"{what} at {place_of_caller()}"
        try:
            self.switch(thread)
        finally:
            thread.ready = thread.since = None

    def switch(self, thread: SimulatedThread) -> None:
        """Let others go first, if the order says so. Raises what is to be raised in this thread."""
        if not self.is_closing:
            chosen = self._choose()
            if chosen is not thread:
                chosen.turn.release()
                if not thread.turn.acquire(timeout=PATIENCE):
                    raise RuntimeError(f"{chosen.name!r} has called nothing of the simulator for {PATIENCE:.0f} s")
        if self.is_closing:
            raise Closed
        self.fail(thread)
        if thread is self.main and self.errors:
            raise self.errors.pop(0)

    def fail(self, thread: SimulatedThread) -> None:
        """Raise what is to be raised in a thread."""
        if thread.failure is not None:
            failure, thread.failure = thread.failure, None
            raise failure

    def _choose(self) -> SimulatedThread:
        """Who has the baton next."""
        runnable = [thread for thread in self._alive if self._is_runnable(thread)]
        if not runnable:
            waits = "; ".join(f"{thread.name!r} waits {thread.place}" for thread in self._alive)
            for thread in self._alive:
                thread.failure = DeadlockError(f"every thread is blocked: {waits}")
            runnable = list(self._alive)
        if isinstance(self.order, int):
            return self.random.choice(runnable)
        if self.order == "time":
            # The first of equals: the main thread.
            return min(runnable, key=lambda thread: max(thread.now, thread.since() if thread.since else 0.0))
        if self.order == "late" and self.main in runnable:
            return self.main
        started = [thread for thread in runnable if thread is not self.main]
        return started[0] if started else self.main

    def _is_runnable(self, thread: SimulatedThread) -> bool:
        if thread.ready is None or thread.failure is not None or thread.ready():
            return True
        return thread is self.main and bool(self.errors)


class Started:
    """What ``start`` returns."""

    def __init__(self, threads: Threads, thread: SimulatedThread) -> None:
        self._threads = threads
        self._thread = thread

    def join(self) -> None:
        if self._threads.are_left:
            return
        caller = self._threads.point()
        if not self._thread.ended:
            where = f"for the end of {self._thread.name!r}"
            self._threads.block(caller, lambda: self._thread.ended, lambda: self._thread.now, where)
        caller.clock.join(self._thread.clock)
        caller.now = max(caller.now, self._thread.now)


class Signal:
    """A condition variable with a re-entrant lock."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._clock = Clock()
        self._released = 0.0
        self._owner: SimulatedThread | None = None
        self._depth = 0
        self._sleepers: set[SimulatedThread] = set()

    def __enter__(self) -> Signal:
        if self._threads.are_left:
            return self
        thread = self._threads.point()
        if self._owner is not thread:
            if self._owner is not None:
                self._threads.block(thread, lambda: self._owner is None, lambda: self._released, "for a Signal's lock")
            self._take(thread)
        self._depth += 1
        return self

    def __exit__(self, *exception: object) -> None:
        if self._threads.are_left:
            return
        failed = bool(exception) and exception[0] is not None
        thread = self._threads.current()
        if self._owner is not thread:
            # An exception came out of wait(), which had given the lock away.
            if not failed:
                raise RuntimeError("cannot release a Signal that this thread does not hold")
            return
        self._depth -= 1
        if not self._depth:
            self._give(thread)
        if not failed:
            self._threads.switch(thread)

    def wait(self) -> None:
        thread = self._held()
        depth, self._depth = self._depth, 0
        self._sleepers.add(thread)
        self._give(thread)
        try:
            self._threads.block(
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
        if self._threads.are_left:
            return
        self._held()
        self._sleepers.clear()  # they go on when the lock is released, and not before then in virtual time either

    def _held(self) -> SimulatedThread:
        thread = self._threads.current()
        if self._owner is not thread:
            raise RuntimeError("cannot wait on or notify a Signal that this thread does not hold")
        return thread

    def _take(self, thread: SimulatedThread) -> None:
        self._owner = thread
        thread.clock.join(self._clock)
        thread.now = max(thread.now, self._released)

    def _give(self, thread: SimulatedThread) -> None:
        self._owner = None
        self._clock.join(thread.clock)
        self._released = max(self._released, thread.now)

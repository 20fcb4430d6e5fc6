"""Simulated streams: work that is queued and done in order, and how long it takes.

Work is done, in fact, when somebody waits for it, and as late as that; when it would be done on a device is told by
virtual time, which is computed when it is queued.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.simulation.sharing import Sharing
from offload.simulation.threads import Block, SimulatedThread, Threads
from offload.simulation.timeline import Span
from offload.simulation.touched import place_of_caller
from offload.simulation.vector_clock import Agent, Clock

LAUNCH_QUEUE = 1024
"""Launches that a stream holds before the next one blocks. CUDA documents no number; about a thousand was measured for
each stream: https://forums.developer.nvidia.com/t/cuda-stream-are-blocked-when-luanch-lots-of-kernels-1000/68937"""


@dataclass(frozen=True)
class Rates:
    """What work costs on a machine, in bytes per second if not said otherwise; what is left out takes no time.

    Attributes:
        up: the link from host to device.
        down: the link from device to host.
        device: device memory, read and written by updates on the device.
        host: host memory, read and written by work on started threads.
        pin: page-locking of host memory.
        launch: seconds of the calling thread for each operation that it queues on a stream.
    """

    up: float = math.inf
    down: float = math.inf
    device: float = math.inf
    host: float = math.inf
    pin: float = math.inf
    launch: float = 0.0


class Stream(Agent):
    """A stream.

    Attributes:
        last: the point that it has reached.
        begins: when each of the launches begins that had not begun when last looked at.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, Clock(), 0.0)
        self.last: Point | None = None
        self.begins: deque[float] = deque()


class Point:
    """An event: a point in a stream's work, whose work may not have run yet.

    Attributes:
        clock: what happened before it.
        end: when it is reached.
        before: points that are passed before it.
        run: the work that leads to it.
        done: the work has run.
        seen: somebody was told so.
    """

    def __init__(
        self,
        streams: Streams,
        clock: Clock,
        end: float,
        before: Sequence[Point],
        run: Callable[[], None] | None = None,
    ) -> None:
        self._streams = streams
        self.clock = clock
        self.end = end
        self.before = before
        self.run = run
        self.done = False
        self.seen = False

    def synchronize(self) -> None:
        self._streams.synchronize(self)

    def is_done(self) -> bool:
        return self._streams.is_done(self)


class Streams:
    """The streams of a device.

    Args:
        names: of the streams.
        threads: who queues work and waits for it.
        rates: what work costs.
        launch_queue: launches that a stream holds and that have not begun; a thread waits before it adds another.
        sharing: what kinds of work use together; None where nothing is shared.

    Attributes:
        trace: who was busy when.
        host_waits: (thread, place in the source) of every call that made a thread wait for the device.
    """

    def __init__(
        self,
        names: Sequence[str],
        threads: Threads,
        rates: Rates,
        launch_queue: int,
        sharing: Sharing | None = None,
    ) -> None:
        self._all = {name: Stream(name) for name in names}
        self._threads = threads
        self._rates = rates
        self._launch_queue = launch_queue
        self._sharing = sharing
        self.trace: list[Span] = []
        self.host_waits: list[tuple[str, str]] = []

    def __getitem__(self, name: str) -> Stream:
        return self._all[name]

    def __contains__(self, name: object) -> bool:
        return name in self._all

    @property
    def end(self) -> float:
        """When everything that is queued is done."""
        return max(stream.now for stream in self._all.values())

    # ---- points

    def mark(
        self,
        stream: Stream,
        thread: SimulatedThread,
        after: Sequence[Point] = (),
        run: Callable[[], None] | None = None,
    ) -> Point:
        """The point that a stream has reached."""
        clock = Clock(stream.clock)
        clock.join(thread.clock)
        before = [*after, stream.last] if stream.last is not None else list(after)
        stream.last = Point(self, clock, max(stream.now, thread.now), before, run)
        return stream.last

    def follow(self, stream: Stream, point: Point) -> None:
        """Put a stream's later work behind a point."""
        stream.clock.join(point.clock)
        stream.now = max(stream.now, point.end)

    def force(self, point: Point) -> None:
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

    def reach(self, thread: SimulatedThread, point: Point) -> None:
        """A thread comes to know that a point is passed."""
        self.force(point)
        point.seen = True
        thread.clock.join(point.clock)
        thread.now = max(thread.now, point.end)

    def drain(self, thread: SimulatedThread, stream: Stream) -> None:
        """A thread waits for everything on a stream."""
        if stream.last is not None:
            self.reach(thread, stream.last)
        thread.clock.join(stream.clock)
        thread.now = max(thread.now, stream.now)

    def drain_all(self, thread: SimulatedThread) -> None:
        """A thread waits for everything."""
        for stream in self._all.values():
            self.drain(thread, stream)

    def synchronize(self, point: Point) -> None:
        thread = self._threads.point()
        is_over = point.end <= thread.now if self._threads.order in ("time", "early") else point.done
        if not is_over:
            self.host_waits.append((thread.name, place_of_caller()))
        self.reach(thread, point)
        self._threads.switch(thread)

    def is_done(self, point: Point) -> bool:
        thread = self._threads.point()
        done = self.is_passed(point, thread)
        if done:
            self.reach(thread, point)
        return done

    def is_passed(self, point: Point, thread: SimulatedThread) -> bool:
        """What a device answers when asked whether a point is passed; the thread learns nothing by it."""
        order = self._threads.order
        if isinstance(order, int):
            return point.seen or self._threads.random.random() < 0.5
        if order == "late":
            return point.done
        return point.end <= thread.now

    # ---- time

    def work(
        self,
        stream: Stream,
        thread: SimulatedThread,
        seconds: float,
        name: str,
        key: object = None,
        launches: int = 1,
        kind: str = "",
    ) -> None:
        """Keep a stream busy with work that a thread queues as so many equal operations.

        The thread waits while the stream holds all the launches that it can. ``kind``: of what is shared.
        """
        if not self._rates.launch:
            self.charge(stream, thread, seconds, name, key, kind)
            return
        key = key or Block(name)
        for _ in range(launches):
            thread.now += self._rates.launch
            begins = stream.begins
            while begins and begins[0] <= thread.now:
                begins.popleft()
            if len(begins) >= self._launch_queue:
                thread.now = begins.popleft()
            begins.append(max(stream.now, thread.now))
            self.charge(stream, thread, seconds / launches, name, key, kind)

    def charge(
        self, agent: Agent, thread: SimulatedThread, seconds: float, name: str, key: object = None, kind: str = ""
    ) -> None:
        """Keep an agent busy, for longer than ``seconds`` where others use what it needs. Work with the same ``key``
        and no pause in between becomes one span."""
        start = max(agent.now, thread.now)
        agent.now = start + seconds if self._sharing is None else self._sharing.run(kind, start, seconds)
        if key is None:
            self.trace.append(Span(agent.name, name, start, agent.now))
        elif seconds:
            if agent.open_span is not None and agent.open_span[0] is key:
                place = agent.open_span[1]
                old = self.trace[place]
                if old.end == start:
                    merged = name if isinstance(key, Block) else "cpu update"
                    self.trace[place] = Span(agent.name, merged, old.start, agent.now)
                    return
            agent.open_span = (key, len(self.trace))
            self.trace.append(Span(agent.name, name, start, agent.now))

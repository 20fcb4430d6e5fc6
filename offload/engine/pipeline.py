"""The worker that carries out updates beside the caller's thread, and how the caller waits for them.

Backward (or ``step``) submits one job per piece; the worker takes, of the jobs whose gradients have arrived,
the one that the next forward needs first. Arrival order would leave exactly the first layers for last.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from offload.engine.base import Hyperparameters
from offload.engine.in_flight import InFlight
from offload.engine.marks import mark
from offload.engine.runtime import DONE, Event, Runtime, traced
from offload.engine.units import Piece, Slice, Unit
from offload.engine.worker import Worker


@dataclass
class Gradient:
    """A parameter's gradient where it rests.

    Attributes:
        values: in the parameter's shape; contiguous.
        on_host: it rests in host memory, and is complete there once ``arrived()`` returned and its event is done.
        arrived: blocks until all additions on the host are done; returns the event of the last copy.
        users: submitted jobs that it is part of.
    """

    values: Tensor
    on_host: bool = False
    arrived: Callable[[], Event] = lambda: DONE
    users: int = 0


@dataclass(eq=False)
class Job:
    """The update of one piece.

    Attributes:
        piece: what is updated; of it, only the slices whose parameters are in ``gradients``.
        gradients: by parameter.
        ready: after it, the gradients are complete on the device and nothing queued reads the parameters.
        groups: hyperparameters.
        scale: 0-dim factor for the gradients, or None.
        read: after these, tensors among ``groups`` and ``scale`` that were brought to the host are there.
    """

    piece: Piece
    gradients: dict[nn.Parameter, Gradient]
    ready: Event
    groups: Hyperparameters
    scale: Tensor | None
    read: Sequence[Event] = ()

    def __post_init__(self) -> None:
        for gradient in self.gradients.values():
            gradient.users += 1

    def options(self) -> list[Tensor]:
        """The tensors that an update on the device reads beside parameters, gradients and states."""
        options = [value for group in self.groups for value in group.values() if isinstance(value, Tensor)]
        return options + ([] if self.scale is None else [self.scale])

    def finished_gradients(self) -> list[Tensor]:
        """Let go of the gradients; returns those on the device that no other job uses."""
        for gradient in self.gradients.values():
            gradient.users -= 1
        finished = [g.values for g in self.gradients.values() if not g.users and not g.on_host]
        self.gradients.clear()
        return finished

    @property
    def slices(self) -> list[Slice]:
        return [part for part in self.piece.slices if part.param in self.gradients]


class Jobs:
    """Submitted jobs. Each is asked whether it is ready until it is, in order of submission, which is the order in
    which the device gets there: hundreds of jobs cost little."""

    def __init__(self) -> None:
        self._all: dict[Job, None] = {}
        self._of: dict[Piece, deque[Job]] = {}
        self._waiting: deque[Job] = deque()
        self._ready: list[tuple[int, int, Job]] = []  # a heap; may hold jobs that were removed
        self._added = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._all)

    def add(self, job: Job) -> None:
        """Put a job in; jobs of one piece stay in order."""
        self._all[job] = None
        self._of.setdefault(job.piece, deque()).append(job)
        self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """Take a job out."""
        del self._all[job]
        self._of[job.piece].remove(job)

    def of(self, piece: Piece) -> Job | None:
        """The first job of a piece."""
        jobs = self._of.get(piece)
        return jobs[0] if jobs else None

    def best(self) -> Job | None:
        """Of the jobs that are ready, the one needed first; else the one that will be ready first."""
        while self._waiting and (self._waiting[0] not in self._all or self._waiting[0].ready.is_done()):
            job = self._waiting.popleft()
            if job in self._all:
                heapq.heappush(self._ready, (job.piece.rank, self._added, job))
                self._added += 1
        while self._ready and self._ready[0][2] not in self._all:
            heapq.heappop(self._ready)
        return self._ready[0][2] if self._ready else next(iter(self._all), None)


class Pipeline(Worker):
    """Jobs in, updated units out. Subclasses say what the worker does with a job.

    Args:
        runtime: streams of the device.
        in_flight: holds the device tensors that queued work uses.
    """

    def __init__(self, runtime: Runtime, in_flight: InFlight) -> None:
        super().__init__(runtime)
        self._in_flight = in_flight
        self._queue = Jobs()
        self._open: Counter[Unit] = Counter()
        self._updated: dict[Unit, Event] = {}
        self._last_update: Event = DONE

    # The caller's side

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue updates; returns at once."""
        with self._signal:
            self._raise_error()
            for job in jobs:
                self._add(job)
                self._open[job.piece.unit] += 1
            if self._has_jobs():
                self._start()
            self._signal.notify_all()

    def _add(self, job: Job) -> None:
        """Queue a job, with the signal held."""
        self._queue.add(job)

    def _has_jobs(self) -> bool:
        return bool(self._queue)

    def expect(self, pieces: Sequence[Piece]) -> None:
        """The order in which the next step's updates will be submitted."""

    def wait(self, unit: Unit, *, keep: bool = False) -> None:
        """Make the current stream wait for a unit's update; blocks the thread until that is queued.

        ``keep``: another stream will wait for the same update.
        """
        with self._signal:
            if self._open[unit]:
                with traced(mark("wait", unit.name)):
                    while self._open[unit] and self._error is None:
                        self._signal.wait()
            self._raise_error()
            event = self._updated.get(unit) if keep else self._updated.pop(unit, None)
        if event is not None:
            with traced(mark("wait", unit.name)):
                self._runtime.wait(event)

    def settle(self) -> None:
        """Block the thread until every update is done, and states and gradients lie where they rest."""
        with self._signal:
            while self._is_busy() and self._error is None:
                self._signal.wait()
            self._raise_error()
        self._last_update.synchronize()

    def _is_busy(self) -> bool:
        """Whether updates remain to be queued."""
        return any(self._open.values())

    # The worker's side

    def _give_up(self) -> None:
        self._queue = Jobs()
        self._in_flight.give_up()

    def _choose(self) -> Job | None:
        """The job to work on next."""
        return self._queue.best()

    def _finish(self, job: Job, updated: Event) -> None:
        """Tell the caller that a piece's update is queued and done after ``updated``."""
        unit = job.piece.unit
        with self._signal:
            self._last_update = self._updated[unit] = updated
            self._open[unit] -= 1
            if not self._open[unit]:
                self._signal.notify_all()

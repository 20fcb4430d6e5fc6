"""The worker that carries out updates beside the caller's thread, and how the caller waits for them.

Backward (or ``step``) submits one job per piece; the worker takes, of the jobs whose gradients have arrived,
the one that the next forward needs first. Arrival order would leave exactly the first layers for last.
"""

from __future__ import annotations

import heapq
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offload.engine.base import Hyperparameters
from offload.engine.runtime import DONE, Event, Runtime, Thread
from offload.engine.units import Piece, Slice, Unit


@dataclass
class Gradient:
    """A parameter's gradient where it rests.

    Attributes:
        values: in the parameter's shape; contiguous.
        on_host: it rests in host memory, and is complete there once ``arrived()`` returned and its event is done.
        arrived: blocks until all additions on the host are done; returns the event of the last copy.
    """

    values: Tensor
    on_host: bool = False
    arrived: Callable[[], Event] = lambda: DONE


@dataclass(eq=False)
class Job:
    """The update of one piece.

    Attributes:
        piece: what is updated; of it, only the slices whose parameters are in ``gradients``.
        gradients: by parameter.
        ready: after it, the gradients are complete on the device and nothing queued reads the parameters.
        groups: hyperparameters.
        scale: 0-dim factor for the gradients, or None.
    """

    piece: Piece
    gradients: dict[nn.Parameter, Gradient]
    ready: Event
    groups: Hyperparameters
    scale: Tensor | None

    def tensors(self) -> list[Tensor]:
        """The device tensors that an update on the device reads beside parameters and states."""
        gradients = [gradient.values for gradient in self.gradients.values() if not gradient.on_host]
        options = [value for group in self.groups for value in group.values() if isinstance(value, Tensor)]
        return gradients + options + ([] if self.scale is None else [self.scale])

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


class Pipeline:
    """Jobs in, updated units out. Subclasses say what the worker does with a job.

    The worker starts with the first job. An error there is raised again by whatever the caller does next.
    """

    name = "offload"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._signal = runtime.signal()
        self._queue = Jobs()
        self._open: Counter[Unit] = Counter()
        self._updated: dict[Unit, Event] = {}
        self._last_update: Event = DONE
        self._error: BaseException | None = None
        self._error_is_known = False
        self._stopping = False
        self._thread: Thread | None = None

    # The caller's side

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue updates; returns at once."""
        with self._signal:
            self._raise_error()
            for job in jobs:
                self._queue.add(job)
                self._open[job.piece.unit] += 1
            if self._thread is None and self._queue:
                self._thread = self._runtime.start(self._work, self.name)
            self._signal.notify_all()

    def wait(self, unit: Unit) -> None:
        """Make the current stream wait for a unit's update; blocks the thread until that is queued."""
        with self._signal:
            while self._open[unit] and self._error is None:
                self._signal.wait()
            self._raise_error()
            event = self._updated.pop(unit, None)
        if event is not None:
            self._runtime.wait(event)

    def wait_for_jobs(self) -> None:
        """Block the thread until every submitted update is queued on the device."""
        with self._signal:
            while any(self._open.values()) and self._error is None:
                self._signal.wait()
            self._raise_error()

    def settle(self) -> None:
        """Block the thread until every update is done, and states and gradients lie where they rest."""
        self.wait_for_jobs()
        self._last_update.synchronize()

    def limit(self, jobs: int) -> None:
        """Block the thread while more than ``jobs`` wait for their turn."""
        with self._signal:
            while len(self._queue) > jobs and self._error is None:
                self._signal.wait()

    def close(self) -> None:
        """Finish what was submitted and end the worker."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._signal:
            self._stopping = True
            self._signal.notify_all()
        thread.join()
        self._runtime.wait(self._last_update)
        if self._error is not None and not self._error_is_known:
            warnings.warn(f"updates were lost: {type(self._error).__name__}: {self._error}", stacklevel=2)

    def _raise_error(self) -> None:
        if self._error is not None:
            self._error_is_known = True
            raise self._error

    # The worker's side

    def _work(self) -> None:
        try:
            with torch.no_grad():
                self._prepare_thread()
                while self._work_once():
                    pass
        except BaseException as error:
            with self._signal:
                self._error = error
                self._queue = Jobs()
                self._signal.notify_all()

    def _prepare_thread(self) -> None:
        return None

    def _work_once(self) -> bool:
        """Do one thing; False to end the worker."""
        raise NotImplementedError

    def _choose(self) -> Job | None:
        """The job to work on next."""
        return self._queue.best()

    def _finish(self, job: Job, updated: Event) -> None:
        """Tell the caller that a piece's update is queued and done after ``updated``."""
        with self._signal:
            self._last_update = self._updated[job.piece.unit] = updated
            self._open[job.piece.unit] -= 1
            self._signal.notify_all()


@dataclass
class Slot:
    """A buffer that tensors pass through.

    Attributes:
        buffer: uint8, as large as the largest piece so far.
        gradients: the same, for gradients that come beside states.
        made: after it, the memory of the buffers is theirs.
        filled: after it, what was copied in is there.
        freed: after it, nothing reads the buffer any more.
    """

    buffer: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    gradients: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    made: Event = DONE
    filled: Event = DONE
    freed: Event = DONE

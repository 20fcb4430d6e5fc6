"""Where a run's time goes and how fast it is: seconds per phase, tokens per second.

Nothing here waits for the device while a step is queued. An interval ends with a mark in the device's own order of
work (:meth:`StepTimer.cut`) and is read later, when the device has passed it (:meth:`StepTimer.read`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offload.distributed.world import World


class Marks(Protocol):
    """Points in the work of whoever is timed."""

    def mark(self) -> Any:
        """The point that has been reached, or on a device will be, behind what is queued."""

    def wait(self, mark: Any) -> None:
        """Block until a point has been passed."""

    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two points that have been passed."""


class HostMarks:
    """Points in time on the host's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.mark = clock

    def wait(self, mark: float) -> None:
        return None

    def between(self, begin: float, end: float) -> float:
        return end - begin


class EventMarks:
    """Points in the device's own order of work, as events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.Event) -> None:
        mark.synchronize()

    def between(self, begin: torch.Event, end: torch.Event) -> float:
        return begin.elapsed_time(end) / 1e3  # milliseconds


def marks_for(device: torch.device, clock: Callable[[], float]) -> Marks:
    """What times work on ``device``."""
    return HostMarks(clock) if device.type == "cpu" else EventMarks(device)


@dataclass
class Lap:
    """An interval of training that has ended, if not yet on the device.

    Attributes:
        begin: the end of the interval before.
        end: its own.
        phases: (phase, begin, end) of everything that was timed in between.
    """

    begin: Any
    end: Any
    phases: list[tuple[str, Any, Any]]


class StepTimer:
    """Where the wall time of a run goes: seconds per phase since the last log.

    ::

        timer = StepTimer(device)
        while ...:
            with timer("data"): batch = next(batches)
            with timer("forward_backward"): loss(batch).backward()
            with timer("optimizer"): optimizer.step()
            if log_now:
                laps.append(timer.cut())                # waits for nothing
            if laps and the next step is queued:
                times = timer.read(laps.pop())          # {"time/data": ..., "time/checkpoint": ..., ...}
                rates = tokens.rates(timer.training_seconds)

    A phase inside a phase stops the clock of the outer one. Time outside every phase is in the wall time
    only.

    On the CPU a phase is the time between its entry and its exit. On an accelerator the host runs ahead of
    the device, so a phase lasts from the moment the device reaches the work queued before it to the moment it
    is done with the work queued in it, taken with events on the current stream: data loading that the device
    did not have to wait for counts 0, an optimizer that the device waits for counts in full (exposed time).
    An interval likewise lasts from the moment the device was done with the one before to the moment it is done
    with this one, so that it does not matter when it is read.

    Args:
        device: the device that trains.
        clock: seconds, monotonic; for tests.
    """

    PHASES = ("data", "forward_backward", "optimizer", "checkpoint", "evaluation")
    # Of a run that is profiled; told where it took time.
    OCCASIONAL = ("profile",)
    # Not training: excluded from the time that tokens per second are taken over.
    EXCLUDED = ("checkpoint", "evaluation", "profile")

    def __init__(self, device: torch.device | str = "cpu", *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._marks = marks_for(torch.device(device), clock)
        self.totals: dict[str, float] = dict.fromkeys(self.PHASES, 0.0)
        """Seconds per phase since construction, in what was read."""
        self.training_seconds = 0.0
        """Wall time of the interval that was read last, without what is :attr:`EXCLUDED`."""
        self._open: list[tuple[str, Any]] = []
        self._phases: list[tuple[str, Any, Any]] = []
        self._begin = self._marks.mark()

    def restart(self) -> None:
        """Forgets the time since the last interval: call it when training begins, after the set-up."""
        assert not self._open, f"inside phase {self._open[-1][0]!r}"
        self._phases = []
        self._begin = self._marks.mark()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Charges the time of the ``with`` block to ``phase`` (one of :attr:`PHASES` or :attr:`OCCASIONAL`)."""
        phases = (*self.PHASES, *self.OCCASIONAL)
        assert phase in phases, f"unknown phase {phase!r}; phases are {', '.join(phases)}"
        now = self._marks.mark()
        if self._open:
            outer, since = self._open[-1]
            self._phases.append((outer, since, now))
        self._open.append((phase, now))
        try:
            yield
        finally:
            now = self._marks.mark()
            _, since = self._open.pop()
            self._phases.append((phase, since, now))
            if self._open:
                self._open[-1] = (self._open[-1][0], now)

    def cut(self) -> Lap:
        """Ends the interval here, behind all work that is queued, and begins the next; waits for nothing."""
        now = self._marks.mark()
        if self._open:
            phase, since = self._open[-1]
            self._phases.append((phase, since, now))
            self._open[-1] = (phase, now)
        lap = Lap(self._begin, now, self._phases)
        self._begin, self._phases = now, []
        return lap

    def read(self, lap: Lap) -> dict[str, float]:
        """``{"time/<phase>": seconds}`` of an interval, each of :attr:`PHASES` and what else took time; waits until the
        device has come to its end.

        :attr:`training_seconds` holds the interval's wall time without what is :attr:`EXCLUDED` afterwards.
        """
        self._marks.wait(lap.end)
        seconds = dict.fromkeys(self.PHASES, 0.0)
        for phase, begin, end in lap.phases:
            seconds[phase] = seconds.get(phase, 0.0) + self._marks.between(begin, end)
        for phase, spent in seconds.items():
            self.totals[phase] = self.totals.get(phase, 0.0) + spent
        wall = self._marks.between(lap.begin, lap.end)
        self.training_seconds = max(0.0, wall - sum(seconds.get(phase, 0.0) for phase in self.EXCLUDED))
        return {f"time/{phase}": spent for phase, spent in seconds.items()}


@dataclass(frozen=True)
class TokenCount:
    """Tokens of an interval.

    Attributes:
        tokens: those that are not padding.
        trained: labels that count in the loss.
        seen: the first kind, over the whole run until the interval's end.
    """

    tokens: int
    trained: int
    seen: int

    def rates(self, seconds: float) -> dict[str, float]:
        """The metrics of an interval of so many seconds (:attr:`StepTimer.training_seconds`).

        ``tokens_per_second`` counts every token that is not padding, ``trained_tokens_per_second`` the labels
        that count in the loss; both over the wall time from the end of the last logged step to the end of this
        one, without checkpoints and evaluations. ``tokens_seen`` counts the first kind over the whole run.
        """
        return {
            "tokens_per_second": self.tokens / seconds if seconds > 0 else 0.0,
            "trained_tokens_per_second": self.trained / seconds if seconds > 0 else 0.0,
            "tokens_seen": self.seen,
        }


class Throughput:
    """Counts tokens.

    Args:
        tokens_seen: what an earlier part of the run had seen (from its checkpoint).
        world: the processes whose tokens are counted together, when they ask.
    """

    def __init__(self, tokens_seen: int = 0, world: World | None = None) -> None:
        self._seen = int(tokens_seen)
        self._world = World() if world is None else world
        self._tokens = 0
        self._trained = 0

    def add(self, tokens: int, trained_tokens: int) -> None:
        """Counts a batch: its tokens that are not padding, and its labels that count in the loss."""
        self._tokens += int(tokens)
        self._trained += int(trained_tokens)

    def tokens_seen(self) -> int:
        """Tokens over the whole run."""
        return self._seen + int(self._world.total([self._tokens])[0])

    def cut(self) -> TokenCount:
        """What was counted since the last call."""
        tokens, trained = map(int, self._world.total([self._tokens, self._trained]))
        self._seen += tokens
        self._tokens = self._trained = 0
        return TokenCount(tokens, trained, self._seen)

"""Clocks and rates are right, on the host and on a device that works behind it."""

from __future__ import annotations

import pytest
import torch

from offload.metrics.timing import StepTimer, Throughput


class Clock:
    """Seconds that pass only when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_phases_are_timed_and_checkpoints_and_evaluations_are_no_training_time() -> None:
    clock = Clock()
    timer = StepTimer("cpu", clock=clock)
    clock.sleep(50)  # set-up
    timer.restart()
    for _ in range(2):
        with timer("data"):
            clock.sleep(1)
        with timer("forward_backward"):
            clock.sleep(4)
        with timer("optimizer"):
            clock.sleep(2)
        clock.sleep(0.5)  # outside every phase
    with timer("evaluation"):
        clock.sleep(30)
    with timer("checkpoint"):
        clock.sleep(70)
    assert timer.read(timer.cut()) == {
        "time/data": 2.0,
        "time/forward_backward": 8.0,
        "time/optimizer": 4.0,
        "time/checkpoint": 70.0,
        "time/evaluation": 30.0,
    }
    assert timer.training_seconds == 15.0

    with timer("data"):
        clock.sleep(3)
    times = timer.read(timer.cut())
    assert times["time/data"] == 3.0 and times["time/checkpoint"] == 0.0
    assert timer.training_seconds == 3.0
    assert timer.totals == {
        "data": 5.0,
        "forward_backward": 8.0,
        "optimizer": 4.0,
        "checkpoint": 70.0,
        "evaluation": 30.0,
    }


def test_a_trace_that_is_written_is_no_training_time_and_told_only_where_it_was() -> None:
    clock = Clock()
    timer = StepTimer("cpu", clock=clock)
    for wrote in (False, True):
        with timer("forward_backward"):
            clock.sleep(4)
        if wrote:
            with timer("profile"):
                clock.sleep(60)
        times = timer.read(timer.cut())
        assert times.get("time/profile") == (60.0 if wrote else None) and timer.training_seconds == 4.0
    assert timer.totals["profile"] == 60.0


def test_an_inner_phase_stops_the_clock_of_the_outer_one_also_when_it_raises() -> None:
    clock = Clock()
    timer = StepTimer("cpu", clock=clock)
    with pytest.raises(RuntimeError), timer("forward_backward"):
        clock.sleep(1)
        with timer("optimizer"):
            clock.sleep(10)
        clock.sleep(2)
        with timer("optimizer"):
            clock.sleep(20)
            raise RuntimeError
    times = timer.read(timer.cut())
    assert times["time/forward_backward"] == 3.0 and times["time/optimizer"] == 30.0


def test_reading_inside_a_phase_charges_what_has_passed() -> None:
    clock = Clock()
    timer = StepTimer("cpu", clock=clock)
    with timer("checkpoint"):
        clock.sleep(5)
        assert timer.read(timer.cut())["time/checkpoint"] == 5.0
        clock.sleep(7)
    assert timer.read(timer.cut())["time/checkpoint"] == 7.0


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(AssertionError, match="unknown phase 'dta'"), StepTimer()("dta"):
        pass


class PlayedDevice:
    """Works off what is queued, on the clock of the host that queues it; as marks of a timer."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.busy_until = 0.0  # the moment at which everything queued so far is done
        self.waited_for: list[float] = []

    def queue(self, seconds: float) -> None:
        self.busy_until = self.mark() + seconds

    def mark(self) -> float:
        return max(self.busy_until, self.clock.now)

    def wait(self, mark: float) -> None:
        self.waited_for.append(mark)
        self.clock.now = max(self.clock.now, mark)

    def between(self, begin: float, end: float) -> float:
        assert self.clock.now >= end, "read before the device has come to it"
        return end - begin


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedDevice:
    device = PlayedDevice(Clock())
    monkeypatch.setattr("offload.metrics.timing.marks_for", lambda *_: device)
    return device


def test_on_an_accelerator_phases_follow_the_device_and_nothing_waits_before_they_are_read(
    played: PlayedDevice,
) -> None:
    """The host queues a step in no time; the device needs 4 s for the forward and 2 s for the update."""
    timer = StepTimer("cuda:0")
    for _ in range(3):
        with timer("data"):
            played.clock.sleep(1)
        with timer("forward_backward"):
            played.queue(4)
        with timer("optimizer"):
            played.queue(2)
    lap = timer.cut()
    assert played.waited_for == []
    times = timer.read(lap)
    assert played.waited_for == [119.0]
    assert times["time/forward_backward"] == 12.0 and times["time/optimizer"] == 6.0
    assert times["time/data"] == 1.0, "only the first batch was waited for"
    assert timer.training_seconds == 19.0


def test_an_interval_is_the_same_whenever_it_is_read(played: PlayedDevice) -> None:
    """Read a step late: the host is ahead, and an evaluation and a checkpoint in between are no training time."""
    timer = StepTimer("cuda:0")
    laps = []
    for step in range(4):
        with timer("forward_backward"):
            played.queue(6)
        if step == 1:
            with timer("evaluation"):
                played.queue(30)
                played.wait(played.mark())
        laps.append(timer.cut())
        if step == 2:
            with timer("checkpoint"):
                played.wait(played.mark())
                played.clock.sleep(70)
    read = []
    for lap in laps:
        times = timer.read(lap)
        read.append((timer.training_seconds, times["time/evaluation"], times["time/checkpoint"]))
    assert read == [(6.0, 0.0, 0.0), (6.0, 30.0, 0.0), (6.0, 0.0, 0.0), (6.0, 0.0, 70.0)]
    assert timer.totals["forward_backward"] == 24.0


def test_the_device_clock_is_events_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, waited = [], []

    class Event:
        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            assert device == torch.device("cuda:0") and enable_timing

        def record(self) -> None:
            recorded.append(self)

        def synchronize(self) -> None:
            waited.append(self)

        def elapsed_time(self, end: Event) -> float:
            return 250.0 * (recorded.index(end) - recorded.index(self))

    monkeypatch.setattr(torch, "Event", Event)
    timer = StepTimer("cuda:0")
    with timer("optimizer"):
        pass
    lap = timer.cut()
    assert waited == []
    assert timer.read(lap)["time/optimizer"] == 0.25
    assert waited == [recorded[-1]]
    assert timer.training_seconds == 0.75


def test_rates_are_tokens_over_training_time_and_tokens_seen_goes_on() -> None:
    throughput = Throughput(tokens_seen=1000)
    throughput.add(300, 100)
    throughput.add(500, 60)
    first = throughput.cut()
    throughput.add(10, 10)
    second = throughput.cut()
    assert first.rates(4.0) == {
        "tokens_per_second": 200.0,
        "trained_tokens_per_second": 40.0,
        "tokens_seen": 1800,
    }
    assert second.rates(1.0) == {
        "tokens_per_second": 10.0,
        "trained_tokens_per_second": 10.0,
        "tokens_seen": 1810,
    }
    assert second.rates(0.0)["tokens_per_second"] == 0.0

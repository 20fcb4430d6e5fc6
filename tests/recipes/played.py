"""A recipe whose device is played: the simulated accelerator in the optimizer, in the timer and behind the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from torch import Tensor

from offload.data.batches import Batch, Batches
from offload.engine.runtime import Direction, Event
from offload.simulation.accelerator import SimulatedAccelerator, _silence


class PlayedMarks:
    """Events of the simulated accelerator, which know their time."""

    def __init__(self, simulator: SimulatedAccelerator) -> None:
        self._simulator = simulator

    def mark(self) -> Any:
        return self._simulator.record()

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def between(self, begin: Any, end: Any) -> float:
        return end.end - begin.end


class StreamOfItsOwn:
    """The runtime of who only copies values down. The simulated accelerator has one stream for each direction, which is
    the optimizer's; what a stream of its own would do, the compute stream does in no time."""

    shares_memory = False

    def __init__(self, simulator: SimulatedAccelerator) -> None:
        self._simulator = simulator
        self.empty_pinned, self.record = simulator.empty_pinned, simulator.record

    def copy(
        self, dst: Tensor, src: Tensor, direction: Direction, after: Sequence[Event] = (), name: str = ""
    ) -> Event:
        for event in after:
            self._simulator.wait(event)
        dst.copy_(src, non_blocking=True)
        return self._simulator.record()


def play_reporting(monkeypatch: pytest.MonkeyPatch, simulator: SimulatedAccelerator, runtime: Any = None) -> None:
    """Makes a recipe's reporter treat the CPU as a device that works behind the host.

    Args:
        runtime: what copies the values; None for the simulator.
    """
    monkeypatch.setattr("offload.metrics.late.runtime_for", lambda device: runtime or simulator)
    monkeypatch.setattr("offload.metrics.timing.marks_for", lambda device, clock: PlayedMarks(simulator))


def play_batches(
    monkeypatch: pytest.MonkeyPatch, simulator: SimulatedAccelerator, on_batch: Callable[[], None]
) -> None:
    """Loads batches on the host, which the simulator would take for device work.

    Args:
        on_batch: called before each batch.
    """
    epoch = Batches.epoch

    def played(self: Batches, *args: Any, **options: Any) -> Iterator[Batch]:
        batches = epoch(self, *args, **options)
        while True:
            on_batch()
            with _silence(simulator._threads.main):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    monkeypatch.setattr(Batches, "epoch", played)

"""The reporter on a played device: lines a step late and of their own step, and what it asks of whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from offload.data.batches import Batch
from offload.metrics.log import read_metrics
from offload.simulation.accelerator import SimulatedAccelerator
from offload.training.reporting import Reporter
from tests.recipes.played import play_reporting


class Reported(torch.optim.SGD):
    """Counts how often it is asked for its memory."""

    asked = 0

    def memory_report(self) -> dict[str, dict[str, int]]:
        self.asked += 1
        return {"pinned_host": {"optimizer_state": 2**30 * self.asked, "staging": 2**29}}


BATCH = Batch({}, torch.zeros(1), num_tokens=100, num_labels=30, sample_length=50.0)


def reporter(output_dir: Path, optimizer: torch.optim.Optimizer) -> Reporter:
    return Reporter(
        OmegaConf.create({}), None, output_dir=output_dir, device=torch.device("cpu"), size=None,
        optimizer=optimizer, total_steps=100, resume_step=None, tokens_seen=0,
    )  # fmt: skip


def optimizer(lr: float | Tensor = 0.1) -> Reported:
    return Reported(nn.Linear(1, 1).parameters(), lr=lr)


def steps(output_dir: Path) -> list[int]:
    return [row["step"] for row in read_metrics(output_dir)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedAccelerator]:
    with SimulatedAccelerator() as simulator:
        play_reporting(monkeypatch, simulator)
        yield simulator


def test_a_line_is_written_when_the_next_step_is_queued(tmp_path: Path, device: SimulatedAccelerator) -> None:
    made = reporter(tmp_path, optimizer())
    for step in (1, 2):
        made.count([BATCH], torch.ones(()), 0.1)
        made.log(step, {})
        assert steps(tmp_path) == list(range(1, step))
    made.count([BATCH], torch.ones(()), 0.1)
    made.advance(3)
    assert steps(tmp_path) == [1, 2], "a step that is not logged is one that is queued"
    made.count([BATCH], torch.ones(()), 0.1)
    made.log(4, {})
    assert steps(tmp_path) == [1, 2]
    made.flush()
    assert steps(tmp_path) == [1, 2, 4]
    made.close(0, None)


def test_on_the_cpu_a_line_is_written_at_once(tmp_path: Path) -> None:
    made = reporter(tmp_path, optimizer())
    made.count([BATCH], torch.ones(()), 0.1)
    made.log(1, {})
    assert steps(tmp_path) == [1]
    made.close(0, None)


def test_a_line_has_the_values_of_its_own_step(tmp_path: Path, device: SimulatedAccelerator) -> None:
    """Whatever the host counts and the scheduler does before it is written."""
    trained = optimizer(torch.tensor(0.5))
    lr: Any = trained.param_groups[0]["lr"]
    made = reporter(tmp_path, trained)
    for step in range(1, 7):
        batches = [BATCH] * step
        made.count(batches, torch.full((), float(step)), lr)
        lr.mul_(0.5)  # as a scheduler does
        if step % 2:
            made.advance(step)
        else:
            made.log(step, {"grad_norm": torch.full((), step * 10.0)})
    made.close(0, None)
    rows = read_metrics(tmp_path)
    assert [row["loss"] for row in rows] == [1.5, 3.5, 5.5]
    assert [row["lr"] for row in rows] == [0.5**2, 0.5**4, 0.5**6]
    assert [row["grad_norm"] for row in rows] == [20.0, 40.0, 60.0]
    assert [row["tokens_seen"] for row in rows] == [300, 1000, 2100]


def test_a_line_tells_where_auto_has_put_states(tmp_path: Path) -> None:
    made = optimizer()
    placed = {"resident": {"bytes": 3 * 2**30, "units": 2.5}, "host": {"bytes": 2**29, "units": 1.0}}
    made.auto = SimpleNamespace(placed=lambda: placed)  # type: ignore[attr-defined]
    report = reporter(tmp_path, made)
    report.count([BATCH], torch.ones(()), 0.1)
    report.log(1, {})
    report.close(0, None)
    line = read_metrics(tmp_path)[0]
    assert {key: line[key] for key in line if key.startswith("states/")} == {
        "states/resident_gib": 3.0,
        "states/resident_units": 2.5,
        "states/host_gib": 0.5,
        "states/host_units": 1.0,
    }


def test_the_optimizer_s_memory_is_asked_for_rarely(tmp_path: Path, device: SimulatedAccelerator) -> None:
    trained = optimizer()
    made = reporter(tmp_path, trained)
    for step in range(1, 21):
        made.count([BATCH], torch.ones(()), 0.1)
        made.log(step, {})
    made.close(0, None)
    # At lines 1, 2, 4, 8 and 16.
    expected = [1.5, *[2.5] * 2, *[3.5] * 4, *[4.5] * 8, *[5.5] * 5]
    assert [row["memory/host_pinned_gib"] for row in read_metrics(tmp_path)] == expected


def test_after_a_failure_what_cannot_be_read_is_left_out(
    tmp_path: Path, device: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reporter(tmp_path, optimizer())
    for step in (1, 2):
        made.count([BATCH], torch.ones(()), 0.1)
        made.log(step, {})

    def fail(self: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("offload.metrics.late.LateValues.read", fail)
    made.close(1, None)
    assert steps(tmp_path) == [1]

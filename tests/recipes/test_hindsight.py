"""The end of a run tells what the planner would have said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.metrics.run_record import read_run
from tests.recipes.conftest import Workspace


def told(out: str) -> list[str]:
    return [line.split("  ", 1)[1].strip() for line in out.splitlines() if line.startswith("predicted")]


def test_planned_and_measured(workspace: Workspace, tmp_path: Path) -> None:
    result = workspace.run(tmp_path / "run", "compare_with_plan=True", "max_steps_per_epoch=2")
    assert result.status == 0
    (line,) = told(result.out)
    summary = read_run(result.output_dir)["summary"]
    planned, measured = summary["predicted_host_rss_peak_gib"], summary["host_rss_peak_gib"]
    assert line.startswith(f"{planned:.2f} GiB of the host, measured {measured:.2f} ({planned / measured - 1:+.0%})")
    assert planned == pytest.approx(measured, rel=0.3)


def test_short_runs_are_compared_only_where_it_is_asked_for(workspace: Workspace, tmp_path: Path) -> None:
    result = workspace.run(tmp_path / "run", "max_steps_per_epoch=1")
    assert result.status == 0
    assert not told(result.out)


def test_a_run_that_cannot_be_planned_ends_well(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such trace")

    monkeypatch.setattr("offload.training.budgeting.Planner.plan", broken)
    result = workspace.run(tmp_path / "run", "compare_with_plan=True", "max_steps_per_epoch=1")
    assert result.status == 0
    assert told(result.out) == ["nothing, since RuntimeError('no such trace')"]
    assert "predicted_host_rss_peak_gib" not in read_run(result.output_dir)["summary"]

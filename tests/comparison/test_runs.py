"""What runs left, as it is read for a comparison."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.comparison.runs import Run, read_runs
from offload.errors import UserError


def test_a_value_of_zero_is_one_and_a_missing_one_is_none() -> None:
    rows: list[dict[str, Any]] = [{"step": 1, "loss": 0.0}, {"step": 2}, {"step": 3, "loss": None}, {"loss": 1.0}]
    assert Run(Path("run"), rows, "run").column("loss") == ([1], [0.0])


def test_training_time_is_what_tokens_took_and_starts_anew_after_a_resume() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "tokens_seen": 100, "tokens_per_second": 50.0},
        {"step": 2, "tokens_seen": 400, "tokens_per_second": 100.0},
        {"step": 3, "tokens_seen": 500},
    ]
    run = Run(Path("run"), rows, "run")
    assert run.training_seconds == [2.0, 5.0, 5.0]
    assert run.places("training_seconds") == [2.0, 5.0, 5.0] and run.places("tokens_seen") == [100, 400, 500]


def test_runs_of_one_label_are_told_apart_by_their_folders(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [write("a", "AdamW", [2, 1]), write("b", "AdamW", [2, 1]), write("c", "packed", [2, 1])]
    monkeypatch.chdir(folders[0].parent)
    assert [run.label for run in read_runs(folders)] == ["AdamW (a)", "AdamW (b)", "packed"]
    (folders[0] / "beside").mkdir()
    monkeypatch.chdir(folders[0] / "beside")  # from where they are not below: as they were given
    assert [run.label for run in read_runs(folders[:2])] == [f"AdamW ({folder})" for folder in folders[:2]]


def test_a_run_that_logged_no_step_is_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"message": "set up"}) + "\n")
    with pytest.raises(UserError, match="nothing was logged yet"):
        read_runs([tmp_path])

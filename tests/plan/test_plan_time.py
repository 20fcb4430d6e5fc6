"""The script that compares predicted steps with measured ones: what its table says, and that docs have it."""

from __future__ import annotations

import json
from pathlib import Path

import plan_time
import pytest

ROOT = Path(__file__).parents[2]


def test_the_table_counts_what_is_within_each_bound() -> None:
    record = {"runs": [{"off_percent": off} for off in (-4.0, 5.0, -9.9, 14.0, 30.0)]}
    assert plan_time.table(record).splitlines()[2] == "| 5 | 2 | 3 | 4 | 4 | 9.9 % | 30.0 % |"


def test_the_page_has_the_recorded_table() -> None:
    text = ""
    if plan_time.RECORD.exists():
        text = plan_time.table(json.loads(plan_time.RECORD.read_text(encoding="utf-8")))
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert plan_time.BEGIN + text + plan_time.END in page


def test_thirty_recorded_steps_are_within_15_percent() -> None:
    rows = json.loads(plan_time.RECORD.read_text(encoding="utf-8"))["runs"]
    assert len(rows) == len(plan_time.RUNS) == 30
    for row, (config, overrides) in zip(rows, plan_time.RUNS, strict=True):
        assert (row["config"], row["overrides"]) == (config, overrides.split())
        expected = sum(row["predicted_ms"]) / 2
        assert abs(expected / row["measured_ms"] - 1) <= 0.15, row


def test_a_row_of_the_grid_is_predicted() -> None:
    costs = {"products": 1e-9, "attention": 0.0, "moved": 0.0, "launches": 0.0}
    rates = {"training": {"fp32": costs}, "cpu_adamw": {"torch fused": 1e12}, "host_copy": 1e15}
    planned = plan_time.Planned(0, Path("no small model"))
    assert planned.dtype == "fp32"
    assert planned.seconds(rates) > 1.0


def test_logits_of_a_whole_micro_batch_get_new_pages_in_each_step() -> None:
    """64 MiB of them, their log-probabilities, and the gradients of both."""
    costs = {"products": 0.0, "attention": 0.0, "moved": 0.0, "launches": 0.0}
    rates = {"training": {"fp32": costs}, "cpu_adamw": {"torch fused": 1e15}, "host_copy": 1e15, "host_faults": 2**20}
    rows = [words for _, words in plan_time.RUNS]
    full = rows.index("batch_size=32 loss=torch.nn.CrossEntropyLoss")
    chunked = rows.index("batch_size=32")
    seconds = {index: plan_time.Planned(index, Path("no small model")).seconds(rates) for index in (full, chunked)}
    assert seconds[full] - seconds[chunked] == pytest.approx(4 * 64, rel=0.3)


def test_a_row_holds_a_run_to_the_mean_of_the_predictions_before_and_after_it() -> None:
    row = plan_time.row(0, [0.9, 1.3], 1.0)
    assert (row["predicted_ms"], row["measured_ms"], row["off_percent"]) == ([900.0, 1300.0], 1000.0, 10.0)

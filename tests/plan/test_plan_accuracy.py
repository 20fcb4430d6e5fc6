"""Recorded host peaks beside their plans: that they are near, and that docs tell how near."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import plan_accuracy
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows() -> Any:
    return json.loads(plan_accuracy.RECORD.read_text(encoding="utf-8"))["runs"]


def test_thirty_recorded_peaks_are_within_5_percent(rows: Any) -> None:
    assert len(rows) == len(plan_accuracy.RUNS) == 30
    for row, (config, overrides) in zip(rows, plan_accuracy.RUNS, strict=True):
        assert (row["config"], row["overrides"]) == (config, overrides.split())
        assert row["measured_gib"] == statistics.median(row["runs_gib"]) and len(row["runs_gib"]) == plan_accuracy.TIMES
        assert abs(row["planned_gib"] / row["measured_gib"] - 1) <= 0.05, row


def test_the_page_has_the_recorded_range(rows: Any) -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    told = re.search(
        r"([\d.]+) to ([\d.]+) GiB \| measured ([\d.]+) to ([\d.]+) GiB .*?the farthest ([\d.]+) % too (low|high)", page
    )
    assert told is not None
    planned, measured = ([row[key] for row in rows] for key in ("planned_gib", "measured_gib"))
    wanted = [min(planned), max(planned), min(measured), max(measured)]
    assert [float(number) for number in told.groups()[:4]] == pytest.approx(wanted, abs=0.0051)
    farthest = max((row["off_percent"] for row in rows), key=abs)
    assert (float(told[5]), told[6]) == (abs(farthest), "low" if farthest < 0 else "high")

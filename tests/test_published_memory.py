"""What others have published of their runs' memory is what the planner says of them, and what the page says of both."""

from __future__ import annotations

import json
from pathlib import Path

import published_memory
import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "planning.md").read_text(encoding="utf-8")
RECORD = json.loads(published_memory.RECORD.read_text(encoding="utf-8"))["runs"]


@pytest.mark.slow
def test_the_planner_says_what_is_recorded() -> None:
    assert [row["planned_gib"] for row in published_memory.rows()] == [
        pytest.approx(row["planned_gib"], abs=0.02) for row in RECORD
    ]


def test_published_runs_are_reproduced() -> None:
    off = [row["off_percent"] for row in RECORD]
    assert len(off) == len(published_memory.RUNS) and max(map(abs, off)) < 8
    assert abs(off[0]) < 1 and abs(off[3]) < 1


@pytest.mark.parametrize("row", RECORD, ids=lambda row: row["what"])
def test_the_page_has_the_numbers(row: dict) -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row['what']} |"))
    assert f"| {row['planned_gib']:.1f} GiB | {row['published_gib']:g} GiB |" in line
    assert row["source"] in line and f"{row['off_percent']:+.1f} %" in line

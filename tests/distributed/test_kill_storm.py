"""Distributed runs of which single processes are killed end as if nothing had happened: a few kills here, more when
asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.conftest import ROOT

RECORD = ROOT / "scripts" / "results" / "kill_storm_distributed.json"


def storm(out: Path, *options: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "kill_storm_distributed.py"), "--out", str(out), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(out.read_text())


def test_a_short_storm(tmp_path: Path) -> None:
    result = storm(tmp_path / "result.json", "--kills", "2", "--setups", "3", "--seed", "1")
    assert not result["failures"] and result["total"]["kills"] == 2 and result["total"]["runs_that_ended"] >= 1


@pytest.mark.slow
def test_a_long_storm(tmp_path: Path) -> None:
    result = storm(tmp_path / "result.json", "--kills", "50", "--seed", "2")
    assert not result["failures"] and result["total"]["kills"] == 50


def test_the_record_is_of_this_storm() -> None:
    from kill_storm_distributed import BOUND, SETUPS  # type: ignore[import-not-found]

    record = json.loads(RECORD.read_text())
    total = record["total"]
    assert list(record["setups"]) == list(SETUPS) and not record["failures"]
    assert total["kills"] == sum(one["kills"] for one in record["setups"].values()) >= 100
    assert total["while_a_checkpoint_was_written"] > 0 and total["on_another_number"] > 0
    assert total["most_seconds_to_leave"] < BOUND

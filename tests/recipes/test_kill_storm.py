"""Runs that are killed at random moments end as if nothing had happened: a few kills here, a thousand when asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "scripts" / "results" / "kill_storm.json"


def storm(workspace: Any, out: Path, *options: str) -> dict[str, Any]:
    configs = [str(workspace.config(name)) for name in ("full_finetune_single_device", "lora_finetune_single_device")]
    command = [sys.executable, str(ROOT / "scripts" / "kill_storm.py"), "--config", *configs, "--out", str(out)]
    result = subprocess.run(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(out.read_text())


def test_a_short_storm(workspace: Any, tmp_path: Path) -> None:
    result = storm(workspace, tmp_path / "result.json", "--kills", "5", "--setups", "1", "5")
    assert not result["failures"]
    assert result["total"]["kills"] == 5 and result["total"]["runs_that_ended"] >= 2
    assert result["total"]["checkpoints_checked"] >= 5


@pytest.mark.slow
def test_a_long_storm(workspace: Any, tmp_path: Path) -> None:
    result = storm(workspace, tmp_path / "result.json", "--kills", "1000", "--seed", "1")
    assert not result["failures"] and len(result["setups"]) == 6 and result["total"]["kills"] == 1000


def test_the_record_is_of_this_storm() -> None:
    """What is recorded is what the script makes, and nothing failed."""
    from kill_storm import SETUPS  # type: ignore[import-not-found]

    record = json.loads(RECORD.read_text())
    assert list(record["setups"]) == list(SETUPS) and not record["failures"]
    beside = record["setups"]["checkpoints beside training, states streamed"]
    assert beside["kills"] >= 300 and beside["while_a_checkpoint_was_written"] >= 200
    assert record["total"]["kills"] == sum(one["kills"] for one in record["setups"].values()) >= 100

"""A run on a machine that page-locks less than it wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import play_device  # type: ignore[import-not-found]
from tests.engine.test_memory import Pinning  # type: ignore[import-not-found]
from tests.recipes.conftest import Workspace  # type: ignore[import-not-found]


def test_a_run_tells_it_in_one_line(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_device(monkeypatch, Pinning(limit=2**16))
    result = workspace.run(tmp_path / "run", "optimizer.strategy=stream", "max_steps_per_epoch=1")
    assert result.status == 0, result.err
    (line,) = [line for line in result.err.splitlines() if "page-lock" in line]
    assert (
        line.startswith("warning: ") and "of the optimizer's host memory could be page-locked (CUDA error: out" in line
    )

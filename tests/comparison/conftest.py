"""A run on disk for the tests of comparisons."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """``write(name, label, losses)``: a run in a folder of that name."""
    return lambda name, *args, **record: write_run(tmp_path / name, *args, **record)


def write_run(folder: Path, label: str | None, losses: list[float], rate: float = 50.0, **record: Any) -> Path:
    """A run of 100 tokens a step at ``rate * step`` tokens per second, evaluated every other step."""
    folder.mkdir()
    rows = [
        {
            "step": step, "loss": loss, "tokens_seen": 100 * step, "tokens_per_second": rate * step,
            "time/data": 0.01, "time/forward_backward": 0.4 / step, "time/optimizer": 0.1 / step,
            "memory/host_rss_peak_gib": 0.5, "memory/device_peak_allocated_gib": 0.0,
            **({"evaluation/loss": loss + 0.1} if step % 2 == 0 else {}),
        }
        for step, loss in enumerate(losses, 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if label is not None:
        (folder / "run.json").write_text(json.dumps({"label": label, **record}))
    return folder

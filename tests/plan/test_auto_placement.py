"""Strategy ``auto`` on simulated machines: never slower than the best strategy alone, and never above its budget."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import auto_placement
import pytest

from offload.plan.replay import Result, replay, speeds_of

ROOT = Path(__file__).parents[2]

SLOWER = 1.002
"""Of a step, what no two replays agree about."""


def check(row: dict[str, Any]) -> float:
    """How many times faster than the best strategy alone."""
    best, auto = auto_placement.best(row), row["step_ms"]["auto"]
    if best is None:
        return 1.0
    assert auto is not None, f"{row}: runs out of memory"
    assert auto <= SLOWER * best[1], row
    assert row["peak_gib"]["auto"] <= row["memory_gib"], row
    return best[1] / auto


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads(auto_placement.RECORD.read_text())


def test_the_table_is_the_record(record: dict[str, Any]) -> None:
    text = auto_placement.BEGIN + auto_placement.table(record) + auto_placement.END
    assert text in auto_placement.STRATEGIES.read_text(encoding="utf-8")


def test_what_is_recorded(record: dict[str, Any]) -> None:
    rows = record["rows"]
    assert len({row["machine"] for row in rows}) >= 5
    assert min(row["memory_gib"] for row in rows) < 8 and max(row["memory_gib"] for row in rows) > 70
    gains = list(map(check, rows))
    assert sum(gain > 1.05 for gain in gains) >= len(gains) / 3


def test_a_small_card() -> None:
    """What is left of a laptop's 8 GB holds most states; the link streams the others beside."""
    assert check(auto_placement.row("RTX 4060 laptop, DDR5-4800", "1.2 B", 1024, True)) > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("case", list(auto_placement.cases(None)), ids=str)
def test_every_machine(case: tuple[str, str, int, bool]) -> None:
    check(auto_placement.row(*case))


def test_link_and_cpu_work_at_once() -> None:
    """On a device with no memory left over."""
    machine, _ = auto_placement.machine("A100 40 GB, 8 x DDR4-3200")
    load = dataclasses.replace(auto_placement.MODELS["1.2 B"], layers=10, tokens=512).coarse(3)
    options = {**auto_placement.OPTIMIZER, "update_in_backward": True, "shares_host_memory": True}
    stream = replay(machine, load, strategy="stream", steps=(3, 2), **options)
    host = replay(machine, load, strategy="host", steps=(3, 2), **options)
    memory = int(1.02 * stream.first.joined(stream.steady).reserved)
    speeds = speeds_of(machine, load, cpu_bytes=auto_placement.CPU_BYTES)
    auto: Result = replay(machine, load, memory=memory, strategy="auto", steps=(14, 2), speeds=speeds, **options)
    assert not auto.out_of_memory
    assert auto.step < 0.97 * min(stream.step, host.step)
    assert auto.busy["offload-host"] > 0.2 * auto.step and auto.busy["up"] > host.busy["up"]
    assert auto.pinned_late == 0

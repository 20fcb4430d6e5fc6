"""Strategy ``auto`` on simulated machines: never slower than the best strategy alone, and never above its budget."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import auto_placement
import pytest

from offload.plan.prediction import Settings, predict
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


STEP_BOUND, SHARE_BOUND = 0.01, 0.01
"""Of a step, and of all states, how far a plan may be from what `auto` comes to."""


def check_plan(row: dict[str, Any]) -> None:
    """A plan of what `auto` did: the same step and the same placement, within the bounds."""
    if row["predicted_ms"] is None or row["step_ms"]["auto"] is None:
        return
    assert row["predicted_ms"] == pytest.approx(row["step_ms"]["auto"], rel=STEP_BOUND), row
    for way in ("resident", "stream", "host"):
        assert abs(row["predicted_placed"].get(way, 0.0) - row["placed"].get(way, 0.0)) <= SHARE_BOUND, row


def test_a_plan_is_what_auto_comes_to(record: dict[str, Any]) -> None:
    rows = record["rows"]
    list(map(check_plan, rows))
    assert sum(row["predicted_ms"] is not None for row in rows) > len(rows) / 2
    assert any(row["placed"].get("host") for row in rows)


def test_what_is_recorded(record: dict[str, Any]) -> None:
    rows = record["rows"]
    assert len({row["machine"] for row in rows}) >= 5
    assert min(row["memory_gib"] for row in rows) < 8 and max(row["memory_gib"] for row in rows) > 70
    gains = list(map(check, rows))
    assert sum(gain > 1.05 for gain in gains) >= len(gains) / 3


def test_a_small_card() -> None:
    """What is left of a laptop's 8 GB holds most states; the link streams the others beside."""
    row = auto_placement.row("RTX 4060 laptop, DDR5-4800", "1.2 B", 1024, True)
    assert check(row) > 1.2
    check_plan(row)


def test_where_no_step_waits_for_the_link_a_plan_places_states_as_auto_does() -> None:
    """`auto` never tries the CPU then, but lets what the CPU could update be the last that comes to the device."""
    case = "RTX 4060 laptop, DDR5-4800", "1.2 B", 4096, True
    auto, plan = auto_placement.measured(*case, "auto"), auto_placement.predicted(*case)
    assert plan.placed == pytest.approx(auto.placed, abs=0.001)
    assert plan.step_seconds == pytest.approx(auto.step, rel=STEP_BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(auto_placement.cases(None)), ids=str)
def test_every_machine(case: tuple[str, str, int, bool]) -> None:
    row = auto_placement.row(*case)
    check(row)
    check_plan(row)


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
    # A plan knows that nothing is left over, and finds the same share for the CPU.
    settings = Settings("auto", auto_placement.STATE_BYTES, update_in_backward=True, cpu_may_help=True)
    found = predict(load, machine, settings)
    assert found.step_seconds == pytest.approx(auto.step, rel=STEP_BOUND)
    assert found.placed.keys() == {"stream", "host"} and found.reserved >= found.placed["host"]
    assert found.placed["host"] == pytest.approx(auto.placed["host"], abs=SHARE_BOUND)

"""The planner beside what the GPU suite measured of the recipes, from a made-up record."""

from __future__ import annotations

from typing import Any

import pytest
from gpu import planned
from gpu.measure import GIB
from gpu.parts import SIZE_ON_A_GPU, large_recipes

RATES = {
    "matmul": 700e12,
    "up": 12e9,
    "down": 12e9,
    "each_of_both": 10e9,
    "device_copy": 2600e9,
    "host_copy": 100e9,
    "cpu_adamw": {"torch fused": 4e9, "packed int8 split": 4e9},
    "page_locking": {"seconds_per_gib": 0.2},
}


def record(**recipes: dict[str, Any]) -> dict[str, Any]:
    """Of one run on an H100, after one on a CPU."""
    facts = {"card": "NVIDIA H100 80GB HBM3", "device_memory_bytes": 79 * GIB, "host_memory_bytes": 128 * GIB}
    runs = [{"environment": {"cpu": "x"}}, {"environment": facts, "doctor": {"rates": RATES}}]
    usual = {"run": 1, "status": "ok", "tokens": 1000, "step_seconds": 2.5, "memory/device_peak_reserved_gib": 14.5}
    return {"runs": runs, "recipes": [{"name": name.replace("_", "-"), **usual, **r} for name, r in recipes.items()]}


def test_a_plan_of_a_recipe_is_that_of_its_setting_on_the_measured_rates() -> None:
    """Against sums of one line: weights, what is in flight and a little; and the states' way over a slow link."""
    (row,) = planned.compare(record(full_7b_16gb={}))
    assert (row["name"], row["memory_gib"], row["tokens"]) == ("full-7b-16gb", 16, 1000)
    memory, step = row["device_gib"], row["step_seconds"]
    assert memory["measured"] == 14.5 and 12.55 + 1 < memory["planned"] < 15.25
    parameters = 6.738e9
    assert step["planned"] == pytest.approx(4.03 * parameters / 10e9, rel=0.1)
    for each in (memory, step):
        assert each["off"] == pytest.approx(each["planned"] / each["measured"] - 1)


def test_what_there_is_no_comparison_for_is_left_out() -> None:
    assert planned.compare(record(full_7b={"status": "error"}, lora_7b={"run": 0})) == []
    without_rates = record(full_7b={})
    del without_rates["runs"][1]["doctor"]
    assert planned.compare(without_rates) == []


def test_the_table_has_a_row_for_every_recipe_and_counts_what_is_near() -> None:
    text = planned.table([])
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(large_recipes(SIZE_ON_A_GPU)) and "No GPU has been measured yet" in text
    assert all(line.count(planned.NOTHING) == 5 for line in rows[1:]) and len(planned.HEADS) <= 7

    def row(name: str, memory: float, step: float) -> dict[str, Any]:
        numbers = {"device_gib": (15.0, memory), "step_seconds": (1.0, step)}
        compared = {key: {"planned": p, "measured": p / (1 + off), "off": off} for key, (p, off) in numbers.items()}
        return {"name": name, "card": "H100", "memory_gib": None, "tokens": 8100.0, **compared}

    text = planned.table([row("full-7b", 0.049, -0.101), row("lora-7b", -0.06, 0.02)])
    assert "| full, streamed in backward | whole | 8,100 | 15.0, 14.3 | +5 % | 1.00, 1.11 | -10 % |" in text
    assert "Of 2, 1 are within 5 % in memory and 1 within 10 % in time." in text
    assert text.count(planned.NOTHING) == 5 * (len(large_recipes(SIZE_ON_A_GPU)) - 2)

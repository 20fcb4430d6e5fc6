"""What the planner says of the recipes that were measured, beside what they took: device memory, and a step's time.

The rates are those that `tune doctor` measured on the card, so nothing here needs the card: the comparison is made from
the record, with the planner as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pages import PLANNING, write_table

from gpu.measure import GIB, visible_bytes
from gpu.parts import SIZE_ON_A_GPU, large_recipes
from gpu.recipes import RecipeRun
from gpu.record import latest

BEGIN, END = "<!-- scripts/gpu_suite.py writes this table -->\n", "<!-- end of the table of a GPU -->\n"
NOTHING = "not measured"

WITHIN = {"device_gib": 0.05, "step_seconds": 0.10}
"""How near a prediction is to be: of peak device memory, and of a step."""

HEADS = ("7B, bf16", "card", "tokens per step", "GPU GiB: planned, measured", "off", "step s: planned, measured", "off")

Entry = dict[str, Any]


def compare(content: Mapping[str, Any]) -> list[Entry]:
    """One row for each recipe on a 7B model that was measured on a card whose rates are known.

    Returns:
        list: of ``name``, ``card``, ``memory_gib``, ``tokens``, and for ``device_gib`` and ``step_seconds`` each a dict
        of what was ``planned``, what was ``measured``, and the difference as a share of that, ``off``.
    """
    rows = []
    for run in large_recipes(SIZE_ON_A_GPU):
        entry = latest(content, run.name)
        if entry is None or entry["status"] != "ok" or "step_seconds" not in entry:
            continue
        environment = content["runs"][entry["run"]]["environment"]
        rates = rates_of(content, environment["card"])
        if rates is None:
            continue
        limit = environment["device_memory_bytes"] if run.memory_gib is None else visible_bytes(run.memory_gib)
        planned = plan_of(run, environment["card"], rates, limit, environment["host_memory_bytes"], entry["tokens"])
        measured = {
            "device_gib": entry["memory/device_peak_reserved_gib"],
            "step_seconds": entry["step_seconds"],
        }
        row: Entry = {"name": run.name, "card": environment["card"], "memory_gib": run.memory_gib}
        row["tokens"] = entry["tokens"]
        for key, value in measured.items():
            row[key] = {"planned": planned[key], "measured": value, "off": planned[key] / value - 1}
        rows.append(row)
    return rows


def rates_of(content: Mapping[str, Any], card: str) -> Mapping[str, Any] | None:
    """What `tune doctor` measured on a card, the last time."""
    found = [
        run["doctor"]["rates"]
        for run in content["runs"]
        if run["environment"].get("card") == card and "rates" in run.get("doctor", {})
    ]
    return found[-1] if found else None


def plan_of(
    run: RecipeRun, card: str, rates: Mapping[str, Any], device: int, host: int, tokens: float
) -> dict[str, float]:
    """What `tune plan` says of a recipe.

    Args:
        run: the recipe.
        card: its name as torch tells it.
        rates: of the machine.
        device: bytes of the card, or of the one that was played.
        host: bytes of the host.
        tokens: of a step, as they were: time follows them, memory follows the longest sequence.

    Returns:
        dict: ``device_gib``, the peak of what PyTorch's allocator holds; ``step_seconds``.
    """
    from offload.cli import registry
    from offload.cli.planned_run import PlannedRun
    from offload.device import DTYPES
    from offload.distributed.world import World
    from offload.plan.budget import CONTEXT
    from offload.plan.machines import card_named, machine_of_rates
    from offload.training.placement import Room, placed

    words = [f"{key}={value}" for key, value in run.overrides.items()]
    planned = PlannedRun(registry.find_recipe(run.recipe), registry.our_configs()[run.config], words, World())
    planned.device(elsewhere=True)
    settings, dtype = planned.settings, DTYPES[planned.settings.dtype]
    whole = planned.plan(())
    sequences = settings.batch_size * settings.gradient_accumulation_steps
    as_it_was = dataclasses.replace(whole, length=max(1, min(whole.length, round(tokens / sequences))))
    machine = machine_of_rates(card, rates, card_named(card))
    found = planned.predictor.predict(settings, as_it_was, machine, dtype, Room(device, host))
    budget = placed(whole, found, settings.optimizer, dtype.itemsize).budget
    return {"device_gib": (budget.device - CONTEXT) / GIB, "step_seconds": found.step_seconds}


def table(rows: list[Entry]) -> str:
    """As Markdown, with a row for each recipe of the plan; and how many are as near as they are to be."""
    found = {row["name"]: row for row in rows}
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    for run in large_recipes(SIZE_ON_A_GPU):
        card = "whole" if run.memory_gib is None else f"{run.memory_gib:g} GB"
        row = found.get(run.name)
        cells = [NOTHING] * 5
        if row is not None:
            memory, step = row["device_gib"], row["step_seconds"]
            cells = [
                f"{row['tokens']:,.0f}",
                f"{memory['planned']:.1f}, {memory['measured']:.1f}",
                f"{100 * memory['off']:+.0f} %",
                f"{step['planned']:.2f}, {step['measured']:.2f}",
                f"{100 * step['off']:+.0f} %",
            ]
        lines.append(f"| {run.title} | {card} | {' | '.join(cells)} |")
    near = {key: sum(abs(row[key]["off"]) <= bound for row in rows) for key, bound in WITHIN.items()}
    counts = (
        f"Of {len(rows)}, {near['device_gib']} are within {WITHIN['device_gib']:.0%} in memory and "
        f"{near['step_seconds']} within {WITHIN['step_seconds']:.0%} in time."
        if rows
        else "No GPU has been measured yet."
    )
    return "\n".join([*lines, "", counts.replace("%", " %")]) + "\n"


def write_into_page(rows: list[Entry]) -> None:
    """Replace what is between the markers; ValueError where they are not."""
    write_table(table(rows), BEGIN, END, PLANNING)

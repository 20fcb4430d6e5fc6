"""Whether `tune plan`'s list has the best setting: beside every setting of a grid, for configs on machines.

    python scripts/plan_ranking.py    # some minutes on one core; records it, writes a table into docs/planning.md

A grid is every combination of micro-batch, activation checkpointing, chunks of the loss, and the optimizer's strategy,
update in backward, offloaded gradients, memory in flight and formats. Memory is planned and a step predicted as `tune
plan` does it, so that what differs is what the list leaves out, and not what a prediction misses. More chunks, less in
flight and offloaded gradients make no step faster: they are tried where a setting does not fit without them. Of what
fits, a setting is replayed if its compute, and its closed form less 15 %, would leave it faster than the best.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pages import PLANNING, write_table

from offload.cli.plan import SHOWN
from offload.cli.planned_run import Limits, PlannedRun, Rates
from offload.cli.registry import find_config, find_recipe, recipe_of_config
from offload.distributed.world import World
from offload.errors import UserError
from offload.plan.budget import OS_SHARE
from offload.plan.cards import find_card
from offload.plan.machines import machine_of_card
from offload.plan.prediction import compute_seconds
from offload.training.placement import Room
from offload.training.ranking import Choice, applied

RECORD = Path(__file__).parent / "results" / "plan_ranking.json"
BEGIN, END = "<!-- scripts/plan_ranking.py writes this table -->\n", "<!-- end of the ranking -->\n"
GIB = 2**30

CONFIGS = ("qwen3_0_6b_offload", "llama3_2_3b_offload", "llama2_7b_offload", "qwen3_8b_offload", "phi4_offload",
           "qwen3_8b_lora")  # fmt: skip
MACHINES = {
    "RTX 4070 Ti SUPER, 32 GB": ("RTX 4070 Ti SUPER", 32),
    "RTX 4090, 64 GB": ("RTX 4090", 64),
    "L40S, 128 GB": ("L40S", 128),
    "H100, 128 GB": ("H100", 128),
}
BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
ALIKE = 0.02
"""Speeds that are no closer than this differ."""

SLOWER = 0.85
"""A replayed step is no shorter than this part of its closed form."""
STRATEGIES = ("resident", "stream", "host", "auto")
FORMATS = (("int8", "split"), ("int8", "split24"), ("int8", "stochastic"), ("bf16", "split"))


def shapes(settings: Any) -> Iterator[tuple[str, ...]]:
    """Micro-batches, checkpointing and chunks of the loss."""
    chunks = settings.loss.get("num_output_chunks")
    words = [f"loss.num_output_chunks={times * int(chunks)}" for times in (1, 4)] if chunks else []
    for batch, recompute, more in itertools.product(reversed(BATCHES), (True, False), words or ("",)):
        yield (f"batch_size={batch}", f"enable_activation_checkpointing={recompute}", *((more,) if more else ()))


def optimizers(settings: Any) -> Iterator[tuple[str, ...]]:
    """Strategies, schedules and formats; nothing for another optimizer."""
    section = settings.optimizer
    if str(section["_component_"]).rpartition(".")[2] != "OffloadOptimizer":
        yield ()
        return
    own = str(section.get("state_dtype", "int8")), str(section.get("master", "split"))
    for (states, master), strategy, early, offloads, gib in itertools.product(
        dict.fromkeys((own, *FORMATS)), STRATEGIES, (True, False), (False, True), (1.0, 0.25)
    ):
        if (early and offloads) or (strategy == "resident" and (offloads or gib != 1.0)):
            continue
        if early and settings.clip_grad_norm is not None:
            continue
        yield (
            f"optimizer.strategy={strategy}", f"optimizer.update_in_backward={early}",
            f"optimizer.offload_gradients={offloads}", f"optimizer.in_flight_gib={gib}",
            f"optimizer.state_dtype={states}", f"optimizer.master={master}",
        )  # fmt: skip


MEMORY = ("loss.num_output_chunks=", "optimizer.in_flight_gib=", "optimizer.offload_gradients=")
"""Keys that leave more memory and make no step faster, in whose order the grid has what takes most memory first."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Of a grid.

    Attributes:
        changes: overrides.
        settings: with them.
        least: their memory without activations.
        is_own: the optimizer's formats are the config's.
    """

    changes: tuple[str, ...]
    settings: Any
    least: Any
    is_own: bool


class Grid:
    """Every setting of a config; what was planned for one machine is not planned for the next.

    Args:
        run: of the config.
    """

    def __init__(self, run: PlannedRun) -> None:
        self._run, self._planned = run, dict[tuple[str, ...], Any]()
        self._settings = list(self._all())

    def _all(self) -> Iterator[Setting]:
        run = self._run
        own = [f"optimizer.{key}={run.settings.optimizer.get(key)}" for key in ("state_dtype", "master")]
        for optimizer in optimizers(run.settings):
            changed = applied(run.settings, optimizer)
            least = run.planner.least(changed, run._device, torch.bfloat16)
            is_own = not optimizer or all(word in optimizer for word in own)
            for shape in shapes(run.settings):
                settings = applied(changed, shape)
                sized = dataclasses.replace(least, batch=settings.batch_size)
                yield Setting((*shape, *optimizer), settings, sized, is_own)

    def _plan(self, each: Setting) -> Any:
        if each.changes not in self._planned:
            try:
                plan = self._run.planner.plan(each.settings, self._run._device, torch.bfloat16)
            except UserError:
                plan = None
            self._planned[each.changes] = plan
        return self._planned[each.changes]

    def best(
        self, machine: Any, limits: Limits, *, own: bool, known: tuple[float, str]
    ) -> tuple[tuple[float, str], int]:
        """The fastest setting that fits and is allowed, in tokens per second, and how many were replayed.

        Args:
            machine: rates.
            limits: of memory.
            own: only those with the config's own formats.
            known: a setting of the grid or of the list, and its speed: others are replayed if they may be faster by
                :data:`ALIKE`.
        """
        bounds = []
        room = Room(limits.device, limits.host)
        for each in self._settings:
            if (each.is_own or not own) and each.least.budget.fits(limits.device, limits.host):
                bounds.append((self._most(each, machine, room), each))
        (best, found), replayed = known, 0
        fitting: set[tuple[str, ...]] = set()
        for bound, each in sorted(bounds, key=lambda pair: -pair[0]):
            if bound <= (1 + ALIKE) * best:
                break
            kind = tuple(word for word in each.changes if not word.startswith(MEMORY))
            if kind in fitting:
                continue
            plan = self._plan(each)
            if plan is None or not plan.budget.fits(limits.device, limits.host):
                continue
            fitting.add(kind)
            speed = self._run.predictor.predict(each.settings, plan, machine, torch.bfloat16, room).tokens_per_second
            replayed += 1
            if speed > best and self._run._is_allowed(each.changes):
                best, found = speed, " ".join(each.changes)
        return (best, found), replayed

    def _most(self, each: Setting, machine: Any, room: Room) -> float:
        """Tokens per second that the setting cannot be faster than."""
        predictor, dtype = self._run.predictor, torch.bfloat16
        load = predictor.workload(each.settings, each.least, machine, dtype)
        seconds = each.settings.gradient_accumulation_steps * compute_seconds(load, machine)
        tokens = each.least.batch * each.least.length * each.settings.gradient_accumulation_steps
        estimated = predictor.estimate(each.settings, each.least, machine, dtype, room)
        return float(min(tokens / seconds, estimated / SLOWER))


def of_config(name: str, machines: dict[str, tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """A row for each machine."""
    config = find_config(name)
    of_all: Grid | None = None
    for title, (card_name, ram) in machines.items():
        card = find_card(card_name)
        machine = machine_of_card(card)
        limits = Limits(card.memory, int(ram * GIB * (1 - OS_SHARE)), {})
        # As the command has it: a planner that has traced nothing else.
        run = PlannedRun(find_recipe(recipe_of_config(name)), config.path, [], World(0, 1, 0, 1))
        run.device(elsewhere=True)
        started = time.process_time()
        listed = run.best(limits, Rates(machine, torch.bfloat16, "", card), SHOWN)
        row: dict[str, Any] = {"config": name, "machine": title, "cpu_seconds": round(time.process_time() - started, 1)}
        row["problems"] = [problem for choice in listed for problem in wrong_with(choice, name, limits)]
        of_all = of_all or Grid(run)
        known = 0.0, ""
        for kind, mine in (("own formats", [c for c in listed if not c.rounds_otherwise]), ("any format", listed)):
            top = max(mine, key=lambda choice: choice.speed, default=None)
            if top is not None:
                known = max(known, (top.speed, "the list's"))
            known, replayed = of_all.best(machine, limits, own=kind == "own formats", known=known)
            speed, line = known
            row[kind] = {
                "best": round(speed),
                "by": line,
                "listed": 0 if top is None else round(top.speed),
                "listed_by": "" if top is None else " ".join(top.changes),
                "replayed": replayed,
            }
        yield row


def wrong_with(choice: Choice, name: str, limits: Limits) -> list[str]:
    """What a line of the list does not hold to when it is planned by itself."""
    config = find_config(name)
    line = " ".join(choice.changes)
    run = PlannedRun(find_recipe(recipe_of_config(name)), config.path, list(choice.changes), World(0, 1, 0, 1))
    run.device(elsewhere=True)
    try:
        run.check(())
    except UserError as error:
        return [f"{line}: refused: {error}"]
    if not run.plan(()).budget.fits(limits.device, limits.host):
        return [f"{line}: does not fit when it is planned by itself"]
    return []


def short(row: dict[str, Any], kind: str) -> float | None:
    """How much slower the list's fastest is than the grid's; None where nothing fits."""
    found = row[kind]
    return None if not found["best"] else 1 - found["listed"] / found["best"]


def percent(share: float | None) -> str:
    return "–" if share is None else f"{round(100 * share)} %"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: how much slower than the grid's best the list's fastest line is, by config and machine."""
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    lines = [
        "| behind the best: with its own formats / any | " + " | ".join(machines) + " |",
        "|---" * (len(machines) + 1) + "|",
    ]
    for name in dict.fromkeys(row["config"] for row in rows):
        cells = []
        for title in machines:
            row = next(each for each in rows if (each["config"], each["machine"]) == (name, title))
            cells.append(" / ".join(map(percent, (short(row, kind) for kind in ("own formats", "any format")))))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CONFIG", help="these alone; the others are as recorded")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.names or CONFIGS
    rows = [] if not arguments.names else json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    for name in names:
        rows = [row for row in rows if row["config"] != name]
        for row in of_config(name, MACHINES):
            rows.append(row)
            print(json.dumps(row, indent=1), flush=True)
        rows.sort(key=lambda row: CONFIGS.index(row["config"]))
        record = {"command": "python scripts/plan_ranking.py", "torch": torch.__version__, "rows": rows}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        write_table(table(rows), BEGIN, END, PLANNING)
    print(table(rows))


if __name__ == "__main__":
    main()

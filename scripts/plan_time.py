"""How far predicted steps on the CPU are from those of small runs: predicts each of a grid, runs it, and records both.

    python scripts/plan_time.py               # a quarter of an hour on an idle machine; updates docs
    python scripts/plan_time.py --cpu-time    # of the processor, not the clock: on a machine that others use
    python scripts/plan_time.py 3 17          # these alone; the others are as recorded

The grid is that of scripts/plan_accuracy.py. What training costs on this CPU is measured before and after each run, as
`tune doctor` does, because a machine's speed drifts within minutes: a setting's prediction is the mean of what both
say. Each run is a process of its own with one thread, and its step the median of those after the first two, by the
phases that metrics.jsonl has.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from pages import write_table
from plan_accuracy import RECIPES, RUNS, make_small

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "scripts" / "results" / "plan_time.json"
PAGE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- scripts/plan_time.py writes this table -->\n", "<!-- end of the table of steps -->\n"

SKIPPED = 2
"""Steps that are not counted: the first makes states and loads kernels."""

COMMON = ("device=cpu", "max_steps_per_epoch=8", "evaluation=null", "metric_logger=null", "lr_scheduler=null",
          "+dataset.train_on_input=True")  # fmt: skip
"""Every token has a label: those without one cost the head nothing, which no plan knows before it has seen the data."""

PHASES = ("time/data", "time/forward_backward", "time/optimizer")


def rates(dtypes: Iterable[str], clock: Any) -> dict[str, Any]:
    """What predictions on a CPU rest on, for runs in these dtypes, as `tune doctor` keeps it."""
    from offload.device import DTYPES
    from offload.plan.calibration import training_costs
    from offload.plan.rates import cpu_adamw_rates, host_memory_rates

    training = {name: dataclasses.asdict(training_costs(DTYPES[name], clock=clock)) for name in dtypes}
    return {"training": training, "cpu_adamw": cpu_adamw_rates(2**24), **host_memory_rates(2**27)}


def words_of(index: int, small: Path) -> list[str]:
    """All overrides of a row of the grid."""
    return [*COMMON, *RUNS[index][1].replace("{small}", str(small)).split()]


class Planned:
    """A row of the grid as `tune plan` sees it.

    Args:
        index: of the row.
        small: folder of the small model.

    Attributes:
        dtype: of its parameters.
    """

    def __init__(self, index: int, small: Path) -> None:
        from offload.cli import registry
        from offload.cli.planned_run import PlannedRun
        from offload.distributed.world import World

        name = RUNS[index][0]
        config = registry.our_configs()[name]
        self._run = PlannedRun(registry.find_recipe(RECIPES[name]), config, words_of(index, small), World())
        self._run.device(elsewhere=False)
        self._plan = self._run.plan(())
        self.dtype: str = self._run.settings.dtype

    def seconds(self, measured: dict[str, Any]) -> float:
        """Of a step, as rates predict it."""
        from offload.device import DTYPES

        run, dtype = self._run, DTYPES[self.dtype]
        seconds: float = run.predictor.predict_on_cpu(run.settings, self._plan, measured, dtype).step_seconds
        return seconds


def taken(index: int, small: Path, *, cpu_time: bool) -> float:
    """Seconds of a step of a row's run itself."""
    name, words = RUNS[index][0], words_of(index, small)
    clock = "import time; time.perf_counter = time.process_time\n" if cpu_time else ""
    with tempfile.TemporaryDirectory() as folder:
        command = ["run", RECIPES[name], "--config", name, *words, f"output_dir={folder}/run"]
        code = f"{clock}import sys\nfrom offload.cli.main import main\nsys.exit(main({command!r}))"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
        )
        if done.returncode:
            raise SystemExit(f"tune {' '.join(command)}: {done.stderr}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return statistics.median(sum(step[phase] for phase in PHASES) for step in steps[SKIPPED:] if PHASES[1] in step)


def row(index: int, expected: Sequence[float], found: float) -> dict[str, Any]:
    """Of the record: seconds of a step as the rates before and after the run predict it, and as it took."""
    name, overrides = RUNS[index]
    return {
        "config": name,
        "overrides": overrides.split(),
        "predicted_ms": [round(1e3 * seconds, 1) for seconds in expected],
        "measured_ms": round(1e3 * found, 1),
        "off_percent": round(100 * (statistics.mean(expected) / found - 1), 1),
    }


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table: how many settings are within which difference."""
    off = sorted(abs(row["off_percent"]) for row in record["runs"])
    within = {bound: sum(value <= bound for value in off) for bound in (5, 10, 15, 25)}
    return (
        "| settings | within 5 % | within 10 % | within 15 % | within 25 % | median | largest |\n"
        "|---|---|---|---|---|---|---|\n"
        f"| {len(off)} | {' | '.join(str(count) for count in within.values())} | {statistics.median(off):.1f} % | "
        f"{off[-1]:.1f} % |\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", type=int, help="of the grid; default: all")
    parser.add_argument("--cpu-time", action="store_true", help="count the processor's time, not the clock's")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    rows: list[Any] = json.loads(RECORD.read_text(encoding="utf-8"))["runs"] if arguments.rows else [{}] * len(RUNS)
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small"
        make_small(small)
        planned = {index: Planned(index, small) for index in arguments.rows or range(len(RUNS))}
        order = list(planned)
        before = rates({planned[order[0]].dtype}, clock)
        for index, following in itertools.zip_longest(order, order[1:]):
            found = taken(index, small, cpu_time=arguments.cpu_time)
            after = rates({planned[each].dtype for each in (index, following) if each is not None}, clock)
            rows[index] = row(index, [planned[index].seconds(measured) for measured in (before, after)], found)
            print(index, rows[index], flush=True)
            before = after
    record = {
        "command": f"python scripts/plan_time.py{' --cpu-time' if arguments.cpu_time else ''}",
        "clock": "processor time" if arguments.cpu_time else "wall time",
        "runs": rows,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_table(table(record), BEGIN, END, PAGE)


if __name__ == "__main__":
    main()

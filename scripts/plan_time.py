"""How far predicted steps on the CPU are from those of small runs: predicts each of a grid, runs it, and records both.

    python scripts/plan_time.py               # under eight minutes on an idle machine; updates docs
    python scripts/plan_time.py --cpu-time    # of the processor, not the clock: on a machine that others use
    python scripts/plan_time.py 3 17          # these alone; the others are as recorded

The grid is that of scripts/plan_accuracy.py. What training costs on this CPU is measured first, as `tune doctor` does;
each run is a process of its own with one thread, and its step the median of those after the first two, by the phases
that metrics.jsonl has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
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


def rates(clock: Any) -> dict[str, Any]:
    """What predictions on a CPU rest on, as `tune doctor` keeps it."""
    from offload.plan.calibration import training_costs
    from offload.plan.rates import cpu_adamw_rates, host_memory_rates

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    training = {name: dataclasses.asdict(training_costs(dtype, clock=clock)) for name, dtype in dtypes.items()}
    return {"training": training, "cpu_adamw": cpu_adamw_rates(2**24), **host_memory_rates(2**27)}


def predicted(name: str, words: list[str], measured: dict[str, Any]) -> float:
    """Seconds of a step, as `tune plan` predicts it."""
    from offload.cli import registry
    from offload.cli.planned_run import PlannedRun
    from offload.device import DTYPES
    from offload.distributed.world import World

    run = PlannedRun(registry.find_recipe(RECIPES[name]), registry.our_configs()[name], words, World())
    run.device(elsewhere=False)
    plan = run.plan(())
    return run.predictor.predict_on_cpu(run.settings, plan, measured, DTYPES[run.settings.dtype]).step_seconds


def taken(name: str, words: list[str], *, cpu_time: bool) -> float:
    """Seconds of a step of the run itself."""
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


def measure(index: int, measured: dict[str, Any], small: Path, *, cpu_time: bool) -> dict[str, Any]:
    """One row of the grid."""
    name, overrides = RUNS[index]
    words = [*COMMON, *overrides.replace("{small}", str(small)).split()]
    expected, found = predicted(name, words, measured), taken(name, words, cpu_time=cpu_time)
    return {
        "config": name,
        "overrides": overrides.split(),
        "predicted_ms": round(1e3 * expected, 1),
        "measured_ms": round(1e3 * found, 1),
        "off_percent": round(100 * (expected / found - 1), 1),
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
    measured = rates(time.process_time if arguments.cpu_time else time.perf_counter)
    rows: list[Any] = json.loads(RECORD.read_text(encoding="utf-8"))["runs"] if arguments.rows else [{}] * len(RUNS)
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small"
        make_small(small)
        for index in arguments.rows or range(len(RUNS)):
            rows[index] = measure(index, measured, small, cpu_time=arguments.cpu_time)
            print(index, rows[index], flush=True)
    record = {
        "command": f"python scripts/plan_time.py{' --cpu-time' if arguments.cpu_time else ''}",
        "clock": "processor time" if arguments.cpu_time else "wall time",
        "costs": measured["training"],
        "runs": rows,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_table(table(record), BEGIN, END, PAGE)


if __name__ == "__main__":
    main()

"""How fast the `tune` command answers, beside `python -c "import argparse, yaml"`, in turn; and `tune plan`, once for
every config that trains, each in a process of its own on one core.

python scripts/bench_cli.py --out scripts/results/cli.json
python scripts/bench_cli.py --plans --out scripts/results/cli.json  # keeps the others, and writes docs/planning.md's
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from pages import PLANNING, ROOT, write_table

from offload.cli import registry

BEGIN, END = "<!-- scripts/bench_cli.py writes this sentence -->\n", "<!-- end of the sentence -->\n"
CARD = ("--gpu", "RTX 4070 Ti SUPER", "--ram", "32GiB")
CARDS = ("--nproc_per_node", "4", "--gpu", "RTX 4090", "--ram", "256GiB")

TUNE = Path(sys.executable).with_name("tune")
COMMANDS = {
    "python -c 'import argparse, yaml'": [sys.executable, "-c", "import argparse, yaml"],
    "tune --help": [str(TUNE), "--help"],
    "tune ls": [str(TUNE), "ls"],
    "tune cat llama2_7b_offload": [str(TUNE), "cat", "llama2_7b_offload"],
    "tune cp llama2_7b_offload": [str(TUNE), "cp", "llama2_7b_offload", os.devnull],
}


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - started


def plan_seconds(name: str) -> dict[str, float]:
    """Of the clock, and of the processor, for one config's plan.

    Raises:
        RuntimeError: it made no plan.
    """
    machine = CARDS if name.endswith(registry.DISTRIBUTED) else CARD
    command = [sys.executable, "-m", "offload", "plan", "--config", name, *machine]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{name}: {done.stderr.strip()}")
    worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(wall, 2), "cpu_seconds": round(worked, 2)}


def sentence(plans: dict[str, dict[str, float]]) -> str:
    """What docs/planning.md says of them."""
    times = sorted(row["seconds"] for row in plans.values())
    slowest = max(plans, key=lambda name: plans[name]["seconds"])
    return (
        f"A plan takes {times[0]:.1f} to {times[-1]:.1f} s on one core of the machine that this was written on, for "
        f"half of the\n{len(times)} configs at most {statistics.median(times):.1f} s, and longest for `{slowest}`\n"
        "([recorded](../scripts/results/cli.json), `python scripts/bench_cli.py --plans`).\n"
    )


def time_plans(out: Path | None) -> None:
    """Each config once, after one that is not counted; into the record and the page."""
    names = [name for name in registry.our_configs() if registry.recipe_of_config(name) != "generate"]
    names = [name for name in names if not name.startswith("hf_")]  # of no model until model.path is given
    plan_seconds(names[0])
    plans = {}
    for name in names:
        plans[name] = plan_seconds(name)
        print(
            f"{name:36} {plans[name]['seconds']:6.2f} s, {plans[name]['cpu_seconds']:6.2f} of the processor", flush=True
        )
    if out:
        record = json.loads(out.read_text()) if out.is_file() else {}
        record["plans"] = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "configs": plans}
        out.write_text(json.dumps(record, indent=1) + "\n")
        write_table(sentence(plans), BEGIN, END, PLANNING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plans", action="store_true", help="time `tune plan` for every config instead")
    arguments = parser.parse_args()
    if arguments.plans:
        time_plans(arguments.out)
        return
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for command in COMMANDS.values():
        seconds(command)
    for _ in range(arguments.rounds):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    baseline, *_ = times.values()
    table = {
        name: {
            "median_seconds": statistics.median(values),
            "median_ratio": statistics.median(a / b for a, b in zip(values, baseline, strict=True)),
        }
        for name, values in times.items()
    }
    for name, row in table.items():
        print(f"{name:36} {row['median_seconds'] * 1e3:7.0f} ms  {row['median_ratio']:5.2f} x")
    if arguments.out:
        record = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
        record |= {
            "benchmark": "the tune command's answers",
            "command": f"python scripts/bench_cli.py --rounds {arguments.rounds}",
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "results": table,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

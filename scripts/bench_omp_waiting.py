"""How OpenMP's threads should wait for each other: CPU training on cores that are shared, and on idle ones.

    python scripts/bench_omp_waiting.py --out scripts/results/omp_waiting.json

Trains the tiny config in turn with threads that spin for long (the default of GNU's OpenMP), spin shortly and then
sleep (what `tune run` sets), and sleep at once; on an idle machine and beside a process that keeps one core busy.
Compares the median tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from offload.metrics.log import read_metrics

ROOT = Path(__file__).parents[1]


WAITING = {
    "spin (default)": {},
    "spin shortly": {"GOMP_SPINCOUNT": "1000"},
    "sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
}


def rate(settings: dict[str, str], steps: int) -> float:
    """Median tokens per second of a run of the tiny config in a process of its own."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {key: value for key, value in os.environ.items() if key not in names} | settings
    with tempfile.TemporaryDirectory() as folder:
        recipe, config = (
            ROOT / "recipes" / "full_finetune_single_device.py",
            ROOT / "configs" / "tiny_llama_offload.yaml",
        )
        command = [sys.executable, str(recipe), "--config", str(config), f"output_dir={folder}", "evaluation=null"]
        command += ["metric_logger=null", "epochs=1", f"max_steps_per_epoch={steps}"]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        return statistics.median(row["tokens_per_second"] for row in read_metrics(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    median: dict[str, dict[str, float]] = {}
    for machine in ("idle", "one core busy"):
        busy = None if machine == "idle" else subprocess.Popen([sys.executable, "-c", "while True: pass"])
        rounds: dict[str, list[float]] = {name: [] for name in WAITING}
        try:
            for _ in range(arguments.rounds):
                for name, settings in WAITING.items():
                    rounds[name].append(rate(settings, arguments.steps))
        finally:
            if busy is not None:
                busy.kill()
        median[machine] = {name: statistics.median(rates) for name, rates in rounds.items()}
        print(machine, {name: f"{value:,.0f} tok/s" for name, value in median[machine].items()})
    if arguments.out:
        record = {
            "benchmark": "how OpenMP threads wait, tiny_llama_offload on the CPU",
            "command": f"python scripts/bench_omp_waiting.py --rounds {arguments.rounds} --steps {arguments.steps}",
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "unit": "median tokens per second",
            "median": median,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

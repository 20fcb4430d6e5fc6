"""What OMP_WAIT_POLICY does to CPU training on cores that are shared, and on cores that are not.

    python scripts/bench_wait_policy.py --out scripts/results/omp_wait_policy.json

Trains the tiny config in turn with spinning (the default of GNU's OpenMP) and sleeping threads, once on an idle
machine and once beside one process that keeps one core busy; compares the median tokens per second.
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

from offload.training.metrics import read_metrics

ROOT = Path(__file__).parents[1]


def rate(policy: str | None, steps: int) -> float:
    """Median tokens per second of a run of the tiny config in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    if policy is not None:
        environment["OMP_WAIT_POLICY"] = policy
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
        rounds: dict[str, list[float]] = {"spinning": [], "sleeping": []}
        try:
            for _ in range(arguments.rounds):
                rounds["spinning"].append(rate(None, arguments.steps))
                rounds["sleeping"].append(rate("PASSIVE", arguments.steps))
        finally:
            if busy is not None:
                busy.kill()
        median[machine] = {name: statistics.median(rates) for name, rates in rounds.items()}
        print(machine, {name: f"{value:,.0f} tok/s" for name, value in median[machine].items()})
    if arguments.out:
        record = {
            "benchmark": "OMP_WAIT_POLICY, tiny_llama_offload on the CPU",
            "command": f"python scripts/bench_wait_policy.py --rounds {arguments.rounds} --steps {arguments.steps}",
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

"""How fast the `tune` command answers, beside `python -c "import argparse, yaml"`, in turn.

python scripts/bench_cli.py --out scripts/results/cli.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
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
        record = {
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

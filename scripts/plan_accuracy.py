"""How far `tune plan` is from what small runs on the CPU take: plans each, runs it, and records both.

    python scripts/plan_accuracy.py

Each run is a process of its own, whose largest resident set is what metrics.jsonl has as memory/host_rss_peak_gib.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "scripts" / "results" / "plan_memory.json"

COMMON = ("device=cpu", "max_steps_per_epoch=2", "evaluation=null", "metric_logger=null")
RUNS = (
    ("tiny_llama_offload", "batch_size=4"),
    ("tiny_llama_offload", "batch_size=32"),
    ("tiny_llama_offload", "batch_size=32", "enable_activation_checkpointing=True"),
    ("tiny_llama_offload", "batch_size=32", "loss=torch.nn.CrossEntropyLoss"),
    ("tiny_llama_offload", "batch_size=16", "optimizer.update_in_backward=True", "clip_grad_norm=null"),
)


def tune(*words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "offload", *words], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"tune {' '.join(words)}: {done.stderr}")
    return done.stdout


def measure(name: str, *overrides: str) -> dict[str, Any]:
    """A run's host memory in GiB, planned and measured."""
    planned = re.search(r"^host in all.*?: ([\d.]+) GiB", tune("plan", "--config", name, *COMMON, *overrides), re.M)
    assert planned is not None
    with tempfile.TemporaryDirectory() as folder:
        tune("run", "full_finetune_single_device", "--config", name, *COMMON, *overrides, f"output_dir={folder}/run")
        last = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    measured = json.loads(last)["memory/host_rss_peak_gib"]
    return {
        "config": name,
        "overrides": list(overrides),
        "planned_gib": float(planned[1]),
        "measured_gib": round(measured, 3),
        "off_percent": round(100 * (float(planned[1]) / measured - 1), 1),
    }


def main() -> None:
    rows = []
    for run in RUNS:
        rows.append(measure(*run))
        print(rows[-1], flush=True)
    record = {"command": "python scripts/plan_accuracy.py", "runs": rows}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

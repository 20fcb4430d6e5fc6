"""The exposed time of each unit of the tiny model, from the traces of real runs on this machine.

    python scripts/exposed_time.py            # half a minute; scripts/results/exposed_time.json and .png

Two runs update in backward with streamed states, by PyTorch's AdamW and by the packed one. Without an accelerator
updates run on the thread that trains: what is exposed is the update itself, and nothing is copied.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from offload.comparison import profiles, table
from offload.comparison.picture import draw_exposed
from offload.comparison.runs import read_runs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results"
RUN = ["full_finetune_single_device", "--config", "tiny_llama_offload", "profiler.enabled=True", "metric_logger=null",
       "evaluation=null", "max_steps_per_epoch=20", "optimizer.strategy=stream", "optimizer.update_in_backward=True",
       "clip_grad_norm=null"]  # fmt: skip
RUNS = {
    "torch": [],
    "packed": ["optimizer.optimizer_class=offload.optim.AdamW", "~optimizer.fused"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "exposed_time", help="without suffix")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in RUNS.items():
            command = [sys.executable, "-m", "offload", "run", *RUN, *overrides, f"output_dir={folder}/{name}"]
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        runs = read_runs([Path(folder) / name for name in RUNS])
        accounts, notes = profiles.accounts(runs)
        assert not notes, notes
        draw_exposed(runs, accounts, arguments.output.with_suffix(".png"))
        told = json.loads(table.as_json(profiles.lines(accounts), runs), parse_float=lambda text: round(float(text), 4))
    record = {
        "command": "python scripts/exposed_time.py",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
        "run": " ".join(RUN),
        **{key: value for key, value in told.items() if key != "runs"},
        "labels": [run.label for run in runs],
    }
    text = json.dumps(record, indent=1)
    arguments.output.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

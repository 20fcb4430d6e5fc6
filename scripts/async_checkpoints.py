"""What checkpoints cost that are written at once, and beside training: whole runs of the recipe, in turns.

Trains a Llama of random weights on the CPU by the full recipe in processes of their own, with AdamW and its states, and
saves every few steps; compares the seconds of training and saving together, and the most memory that a process held.

python scripts/async_checkpoints.py --gib 0.3 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_loading import make_checkpoint
from pages import ROOT
from study import RESULTS, description, rounded, save

RECORD = RESULTS / "async_checkpoints.json"
ROOM = 0.25
"""GiB for what is updated before it was written."""

STEPS, EVERY = 12, 3
OVERRIDES = [
    "~checkpointer", "metric_logger=null", "evaluation=null", "lr_scheduler=null", "dtype=bf16", "batch_size=1",
    "tokenizer.max_seq_len=64", "optimizer.strategy=stream", f"max_steps_per_epoch={STEPS}",
    f"save_every_n_steps={EVERY}", "keep_last_n=1", f"async_checkpoint_gib={ROOM}",
]  # fmt: skip


def train(base: Path, out: Path, *, beside: bool) -> dict[str, float]:
    """One run: seconds of training with its updates, and of saving that training waited for; peak GiB."""
    model = f"model={{_component_: offload.models.huggingface.from_pretrained, path: {base}}}"
    command = [sys.executable, "-m", "offload", "run", "full_finetune_single_device", "--config", "tiny_llama_offload"]
    subprocess.run(
        [*command, *OVERRIDES, model, f"output_dir={out}", f"enable_async_checkpointing={beside}"],
        check=True,
        cwd=out.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    phases = {key for line in lines for key in line if key.startswith("time/")}
    totals = {phase.removeprefix("time/"): sum(line.get(phase, 0.0) for line in lines) for phase in sorted(phases)}
    return {**totals, "peak_gib": max(line["memory/host_rss_peak_gib"] for line in lines)}


def measure(gib: float, rounds: int) -> dict[str, Any]:
    """Runs of both ways, in turns."""
    runs: dict[str, list[dict[str, float]]] = {"at_once": [], "beside": []}
    with tempfile.TemporaryDirectory() as folder:
        size = make_checkpoint(Path(folder) / "base", gib)
        for turn in range(rounds):
            for way in sorted(runs, reverse=bool(turn % 2)):
                out = Path(folder) / f"{way}_{turn}"
                runs[way].append(train(Path(folder) / "base", out, beside=way == "beside"))
                print(way, runs[way][-1], flush=True)
    seconds = {way: [sum(v for k, v in run.items() if k != "peak_gib") for run in runs[way]] for way in runs}
    ratios = [beside / at_once for at_once, beside in zip(seconds["at_once"], seconds["beside"], strict=True)]
    peaks = {way: max(run["peak_gib"] for run in runs[way]) for way in runs}
    command = f"python scripts/async_checkpoints.py --gib {gib} --rounds {rounds}"
    return {
        **description("checkpoints written beside training", command),
        "what": f"{STEPS} steps with a checkpoint every {EVERY}, written beside training, over the same at once",
        "bytes_of_weights": size["bytes"],
        "room_gib": ROOM,
        "seconds_ratio": statistics.median(ratios),
        "seconds_ratios": ratios,
        "peak_gib": peaks,
        "runs": runs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.3, help="of weights")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way")
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args()
    record = measure(args.gib, args.rounds)
    save(rounded(record), args.out, line="checkpoint")
    print(f"{record['seconds_ratio']:.3f} of the time, {record['peak_gib']} GiB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())

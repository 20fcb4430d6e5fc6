"""Draws a run's loss, speed and memory from its metrics.jsonl.

python scripts/plot_run.py outputs/quickstart                    # writes outputs/quickstart/run.png
python scripts/plot_run.py outputs/quickstart --out docs/run.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from offload.training.metrics import read_metrics


def column(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    known = [row for row in rows if row.get(key) is not None]
    return [row["step"] for row in known], [row[key] for row in known]


def draw(rows: list[dict[str, Any]], out: Path, title: str) -> None:
    """Three panels over optimizer steps: loss, tokens per second, peak memory in GiB."""
    figure, (loss, speed, memory) = plt.subplots(3, 1, sharex=True, figsize=(8, 7.5), height_ratios=(2, 1, 1))
    loss.plot(*column(rows, "loss"), color="tab:blue", linewidth=1, label="training loss")
    loss.plot(*column(rows, "evaluation/loss"), "o-", color="tab:orange", markersize=4, label="held-out loss")
    loss.set_ylabel("loss (nats per label)")
    loss.legend()
    speed.plot(*column(rows, "tokens_per_second"), color="tab:green", linewidth=1)
    speed.set_ylabel("tokens per second")
    speed.set_ylim(bottom=0)
    on_device = any(row.get("memory/device_peak_allocated_gib") for row in rows)
    shown = {"memory/host_rss_peak_gib": "host, resident"}
    if on_device:
        shown["memory/device_peak_allocated_gib"] = "device, allocated"
        shown["memory/host_pinned_gib"] = "host, page-locked"
    for key, label in shown.items():
        memory.plot(*column(rows, key), linewidth=1.5, label=label)
    memory.set_ylabel("peak memory (GiB)")
    memory.set_ylim(0, 1.15 * memory.get_ylim()[1])
    memory.legend()
    memory.set_xlabel("optimizer step")
    for axes in (loss, speed, memory):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run's output_dir or its metrics.jsonl")
    parser.add_argument("--out", type=Path, help="PNG to write; default: run.png beside the metrics")
    parser.add_argument("--title", help="default: the name of the run's folder")
    arguments = parser.parse_args()
    folder = arguments.run if arguments.run.is_dir() else arguments.run.parent
    out = arguments.out or folder / "run.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(read_metrics(arguments.run), out, arguments.title or folder.name)
    print(out)


if __name__ == "__main__":
    main()

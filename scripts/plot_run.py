"""Draws a run's loss, speed and memory from its metrics.jsonl, or several runs on top of each other.

python scripts/plot_run.py outputs/quickstart                       # writes outputs/quickstart/run.png
python scripts/plot_run.py outputs/quickstart --out docs/run.png
python scripts/plot_run.py outputs/a outputs/b outputs/c            # writes outputs/compared.png

Runs are named by the label in their run.json (the optimizer), and by their folder where two have the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.metrics.log import METRICS_FILE, read_metrics
from offload.metrics.run_record import read_run
from offload.metrics.run_summary import summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEMORY = {
    "memory/device_peak_allocated_gib": "device, allocated",
    "memory/host_rss_peak_gib": "host, resident",
    "memory/host_pinned_gib": "host, page-locked",
}


@dataclass
class Run:
    """What is drawn of a run.

    Attributes:
        folder: its output_dir.
        rows: the lines of its metrics.jsonl.
        label: its name in the picture.
    """

    folder: Path
    rows: list[dict[str, Any]]
    label: str

    def column(self, key: str, over: str = "step") -> tuple[list[float], list[float]]:
        """The values of ``key`` and where they are over ``step``, ``tokens_seen`` or ``training_seconds``."""
        places = self.training_seconds() if over == "training_seconds" else [row.get(over) for row in self.rows]
        pairs = zip(places, self.rows, strict=True)
        known = [(x, row[key]) for x, row in pairs if x is not None and row.get(key) is not None]
        return [x for x, _ in known], [y for _, y in known]

    def training_seconds(self) -> list[float]:
        """Until each line, without set-up, checkpoints, evaluations, and the time between a kill and a resume."""
        seen = [row.get("tokens_seen", 0) for row in self.rows]
        steps = zip(seen, [0, *seen], self.rows, strict=False)
        return list(accumulate((now - before) / row["tokens_per_second"] if row.get("tokens_per_second") else 0.0
                               for now, before, row in steps))  # fmt: skip


def read(paths: list[Path]) -> list[Run]:
    """The runs in these folders (or of these metrics files), with labels that tell them apart.

    Raises:
        FileNotFoundError, ValueError: a folder holds no run, or a file is damaged.
    """
    folders = [path if path.is_dir() else path.parent for path in paths]
    labels = [read_run(folder).get("label") or folder.resolve().name for folder in folders]
    times = Counter(labels)
    names = [
        label if times[label] == 1 else f"{label} ({os.path.relpath(folder)})"
        for label, folder in zip(labels, folders, strict=True)
    ]
    return [Run(*each) for each in zip(folders, map(read_metrics, paths), names, strict=True)]


def draw(run: Run, out: Path, title: str) -> None:
    """Three panels over optimizer steps: loss, tokens per second, peak memory in GiB."""
    import matplotlib.pyplot as plt

    figure, (loss, speed, memory) = plt.subplots(3, 1, sharex=True, figsize=(8, 7.5), height_ratios=(2, 1, 1))
    loss.plot(*run.column("loss"), color="tab:blue", linewidth=1, label="training loss")
    loss.plot(*run.column("evaluation/loss"), "o-", color="tab:orange", markersize=4, label="held-out loss")
    loss.set_ylabel("loss (nats per label)")
    loss.legend()
    speed.plot(*run.column("tokens_per_second"), color="tab:green", linewidth=1)
    speed.set_ylabel("tokens per second")
    speed.set_ylim(bottom=0)
    on_device = any(row.get("memory/device_peak_allocated_gib") for row in run.rows)
    for key, label in MEMORY.items():
        if on_device or key == "memory/host_rss_peak_gib":
            memory.plot(*run.column(key), linewidth=1.5, label=label)
    memory.set_ylabel("peak memory (GiB)")
    memory.set_ylim(0, 1.15 * memory.get_ylim()[1])
    memory.legend()
    memory.set_xlabel("optimizer step")
    for axes in (loss, speed, memory):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def compare(runs: list[Run], out: Path, title: str | None) -> None:
    """Four panels: loss over tokens and over training time, tokens per second, peak memory in GiB."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    figure, ((by_tokens, by_time), (speed, memory)) = plt.subplots(
        2, 2, figsize=(11, 7.5), height_ratios=(3, 2), layout="constrained"
    )
    colors = plt.get_cmap("tab10").colors
    by_time.sharey(by_tokens)
    for index, run in enumerate(runs):
        color = colors[index % len(colors)]
        for axes, over in ((by_tokens, "tokens_seen"), (by_time, "training_seconds")):
            _curve(axes, *run.column("loss", over), color, run.label)
            axes.plot(*run.column("evaluation/loss", over), "o--", color=color, markersize=5, markeredgecolor="white")
        _curve(speed, *run.column("tokens_per_second", "tokens_seen"), color, run.label)
        speed.axhline(summarise(run.rows).get("tokens_per_second", 0.0), color=color, linestyle=":", linewidth=1)
    by_tokens.set(xlabel="tokens", ylabel="loss (nats per label); dots: held out")
    by_time.set(xlabel="training time (s), without evaluations and checkpoints")
    by_time.tick_params(labelleft=False)
    speed.set(xlabel="tokens", ylabel="tokens per second; dotted: median")
    speed.set_ylim(bottom=0)
    for axis in (by_tokens.xaxis, speed.xaxis, speed.yaxis):
        axis.set_major_formatter(EngFormatter(sep=""))
    _bars(memory, runs, colors)
    for axes in (by_tokens, by_time, speed, memory):
        axes.grid(alpha=0.3)
    handles, labels = by_tokens.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(2, len(runs)), frameon=False)
    if title:
        figure.suptitle(title)
    figure.savefig(out, dpi=110)


def _curve(axes: Axes, x: list[float], y: list[float], color: Any, label: str) -> None:
    """The values faintly, and their mean over a fiftieth of the run, which tells noisy runs apart."""
    axes.plot(x, y, color=color, linewidth=0.7, alpha=0.3)
    half = len(y) // 100
    means = [sum(part) / len(part) for part in (y[max(0, i - half) : i + half + 1] for i in range(len(y)))]
    axes.plot(x, means, color=color, linewidth=1.5, label=label)


def _bars(axes: Axes, runs: list[Run], colors: Any) -> None:
    """Peak memory by kind, a bar for each run."""
    peaks = [summarise(run.rows) for run in runs]
    kinds = [key for key in MEMORY if any(key.removeprefix("memory/") in peak for peak in peaks)]
    height = 0.7 / len(runs)
    for index, peak in enumerate(peaks):
        for place, key in enumerate(kinds):
            value = peak.get(key.removeprefix("memory/"), 0.0)
            at = place + (index - (len(runs) - 1) / 2) * height
            axes.barh(at, value, 0.9 * height, color=colors[index % len(colors)])
            axes.text(value, at, f" {value:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(kinds)), [MEMORY[key] for key in kinds], rotation=90, va="center")
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.margins(x=0.15)
    axes.set_xlabel("peak memory (GiB)")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="a run's output_dir or its metrics.jsonl")
    parser.add_argument("--out", type=Path, help="PNG to write; default: run.png in the folder of one run, "
                        "compared.png beside the first of several")  # fmt: skip
    parser.add_argument("--title", help="default: the name of the folder of one run, none for several")
    arguments = parser.parse_args(argv)
    try:
        import matplotlib
    except ImportError:
        print("error: pictures need matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    matplotlib.use("Agg")
    try:
        runs = read(arguments.runs)
    except FileNotFoundError as error:
        print(f"error: {error.filename}: there is no run; give its output_dir or {METRICS_FILE}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    empty = [str(run.folder) for run in runs if not run.rows]
    if empty:
        print(f"error: {', '.join(empty)}: nothing was logged yet", file=sys.stderr)
        return 2
    is_one = len(runs) == 1
    first = runs[0].folder
    out = arguments.out or (first / "run.png" if is_one else first.resolve().parent / "compared.png")
    out.parent.mkdir(parents=True, exist_ok=True)
    if is_one:
        draw(runs[0], out, arguments.title or first.resolve().name)
    else:
        compare(runs, out, arguments.title)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

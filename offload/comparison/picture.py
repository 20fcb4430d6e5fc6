"""Pictures of runs as PNG files; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.comparison.exposed import Account, UnitTime
from offload.comparison.profiles import WORDS
from offload.comparison.runs import AXES, Run
from offload.comparison.table import PEAKS, PHASES, letter_of, step_times, unit_of_time
from offload.metrics.run_summary import summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWN = ("device_peak_allocated_gib", "host_rss_peak_gib", "host_pinned_gib")
MEMORY = {f"memory/{name}": PEAKS[name] for name in DRAWN}


def draw_one(run: Run, out: Path, title: str) -> None:
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


COLOURS = {"exposed": "tab:red", "update": "#ff9f40", "up": "#4c8cd6", "down": "#8fb8e8"}
"""Of the times of a unit."""


def draw_several(
    runs: Sequence[Run], out: Path, title: str | None = None, accounts: Sequence[Account | None] = ()
) -> None:
    """Loss over steps, tokens and training time; tokens per second, time of a step by phase, peak memory in GiB; of
    runs with a trace, the exposed time of each unit."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    curves, bars = 4.5 + 0.12 * len(runs), max(3.0, 0.85 * len(runs))  # inches: room for the legend, and for numbers
    known = {index: each for index, each in enumerate(accounts) if each is not None}
    heights = [curves, bars, *([4.0] if known else [])]
    figure = plt.figure(figsize=(15, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
    losses, (speed, steps, memory) = ([figure.add_subplot(grid[row, column]) for column in range(3)] for row in (0, 1))
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for over, axes in zip(AXES, losses, strict=True):
        for index, run in enumerate(runs):
            color = colors[index % len(colors)]
            label = f"{letter_of(index)}  {run.label}" if known and len(runs) > 1 else run.label
            _curve(axes, *run.column("loss", over), color, label)
            axes.plot(*run.column("evaluation/loss", over), "o--", color=color, markersize=5, markeredgecolor="white")
        axes.set_xlabel(AXES[over])
        if over != "training_seconds":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if axes is not losses[0]:
            axes.sharey(losses[0])
            axes.tick_params(labelleft=False)
    losses[0].set_ylabel("loss (nats per label); dots: held out")
    for index, run in enumerate(runs):
        color = colors[index % len(colors)]
        _curve(speed, *run.column("tokens_per_second", "tokens_seen"), color, run.label)
        speed.axhline(summarise(run.rows).get("tokens_per_second", 0.0), color=color, linestyle=":", linewidth=1)
    speed.set(xlabel=AXES["tokens_seen"], ylabel="tokens per second; dotted: median")
    speed.set_ylim(bottom=0)
    for axis in (speed.xaxis, speed.yaxis):
        axis.set_major_formatter(EngFormatter(sep=""))
    phases = {words: [1000 * step_times(run).get(phase, 0.0) for run in runs] for phase, words in PHASES.items()}
    _bars(steps, phases, colors)
    steps.set_xlabel("time of a step (ms)")
    peaks = [summarise(run.rows) for run in runs]
    kinds = {key.removeprefix("memory/"): words for key, words in MEMORY.items()}
    in_use = {words: [peak.get(key, 0.0) for peak in peaks] for key, words in kinds.items()}
    _bars(memory, {words: values for words, values in in_use.items() if any(values)}, colors)
    memory.set_xlabel("peak memory (GiB)")
    for axes in (*losses, speed, steps, memory):
        axes.grid(alpha=0.3)
    if known:
        _units(figure.add_subplot(grid[2, :]), known)
    handles, labels = losses[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(2, len(runs)), frameon=False)
    if title:
        figure.suptitle(title)
    figure.savefig(out, dpi=110)


def draw_exposed(runs: Sequence[Run], accounts: Sequence[Account | None], out: Path) -> None:
    """The exposed time of each unit alone."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
    _units(axes, {index: each for index, each in enumerate(accounts) if each is not None})
    figure.suptitle("\n".join(f"{letter_of(index)}  {run.label}" for index, run in enumerate(runs)), fontsize=10)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _units(axes: Axes, known: dict[int, Account]) -> None:
    """For each unit a group of bars, one for each run: what was exposed, and on top of it the work."""
    names = list(dict.fromkeys(name for each in known.values() for name in each.units))
    unit, factor = unit_of_time(max(each.step for each in known.values()))
    width = 0.8 / len(known)
    for place, (index, each) in enumerate(known.items()):
        at = [position + (place - (len(known) - 1) / 2) * width for position in range(len(names))]
        bottom = [0.0] * len(names)
        for kind, words in WORDS.items():
            heights = [factor * getattr(each.units.get(name, UnitTime()), kind) for name in names]
            axes.bar(at, heights, 0.92 * width, bottom=bottom, color=COLOURS[kind], label=words if not place else None)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        if len(known) > 1 and len(names) * len(known) <= 120:
            for x, y in [place for place in zip(at, bottom, strict=True) if place[1]]:
                axes.annotate(letter_of(index), (x, y), (0, 1), textcoords="offset points", ha="center", fontsize=6)
    every = -(-len(names) // 60)
    is_crowded = sum(map(len, names)) > 150
    axes.set_xticks(range(0, len(names), every), names[::every], rotation=90 if is_crowded else 0, fontsize=8)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylabel(f"time per unit and step ({unit})")
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3, axis="y")
    totals = (f"{letter_of(index)} {each.exposed * factor:.3g} {unit} ({each.share:.1%} of a step)"
              for index, each in known.items())  # fmt: skip
    axes.set_title(f"exposed time: {', '.join(totals)}", fontsize=10)
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])  # room for letters and legend
    axes.legend(fontsize=8, ncols=len(WORDS))


def _curve(axes: Axes, x: list[float], y: list[float], color: Any, label: str) -> None:
    """The values faintly, and their mean over a fiftieth of the run, which tells noisy runs apart."""
    axes.plot(x, y, color=color, linewidth=0.7, alpha=0.3)
    half = len(y) // 100
    means = [sum(part) / len(part) for part in (y[max(0, i - half) : i + half + 1] for i in range(len(y)))]
    axes.plot(x, means, color=color, linewidth=1.5, label=label)


def _bars(axes: Axes, kinds: dict[str, list[float]], colors: Any) -> None:
    """A group of bars for each kind, a bar for each run."""
    for place, values in enumerate(kinds.values()):
        height = 0.7 / len(values)
        for index, value in enumerate(values):
            at = place + (index - (len(values) - 1) / 2) * height
            axes.barh(at, value, 0.9 * height, color=colors[index % len(colors)])
            axes.text(value, at, f" {value:.3g}" if value < 1000 else f" {value:,.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(kinds)), [kind.replace(", ", ",\n") for kind in kinds])
    axes.set_ylim(max(len(kinds), 1) - 0.5, -0.5)
    axes.margins(x=0.15)

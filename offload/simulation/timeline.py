"""What a simulated machine did when: spans, and two ways to look at them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.engine.marks import parse

FIRST = ("main", "compute", "update", "up", "down")
"""The order of rows; other agents (worker threads) follow in order of appearance."""


@dataclass(frozen=True)
class Span:
    """``agent`` was busy with ``name`` from ``start`` to ``end``, in seconds."""

    agent: str
    name: str
    start: float
    end: float


def agents(trace: Sequence[Span]) -> list[str]:
    """The agents of a trace, in the order of their rows."""
    seen = dict.fromkeys(span.agent for span in trace)
    return [agent for agent in FIRST if agent in seen] + [agent for agent in seen if agent not in FIRST]


def unit_of(span: Span) -> str:
    """The unit that a span is about: a mark's, else the text before the colon in its name."""
    found = parse(span.name)
    return span.name.partition(":")[0].strip() if found is None else found.unit


def write_chrome_trace(trace: Sequence[Span], path: str | Path) -> None:
    """Write JSON for chrome://tracing or https://ui.perfetto.dev: one row per agent, times in microseconds."""
    rows = {agent: row for row, agent in enumerate(agents(trace))}
    events: list[dict[str, object]] = []
    for agent, row in rows.items():
        events.append({"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": agent}})
        events.append({"ph": "M", "pid": 0, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}})
    for span in trace:
        begin, length = span.start * 1e6, (span.end - span.start) * 1e6
        events.append({"ph": "X", "pid": 0, "tid": rows[span.agent], "name": span.name, "ts": begin, "dur": length})
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def draw(trace: Sequence[Span], path: str | Path, title: str) -> None:
    """Draw a PNG with one row per agent; spans of one unit share a colour."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    rows = agents(trace)
    by_time = sorted(trace, key=lambda span: (span.agent != "compute", span.start))
    units = list(dict.fromkeys(unit_of(span) for span in by_time))
    if len(units) <= 20:
        colours = list(colormaps["tab20"].colors)  # type: ignore[attr-defined]
    else:
        # In order of appearance, so that a layer and its neighbours look alike.
        colours = [colormaps["turbo"](number / (len(units) - 1)) for number in range(len(units))]
    colour = dict(zip(units, colours, strict=False))
    edge = "white" if len(trace) < 200 else "none"
    end = max((span.end for span in trace), default=0.0)
    factor, unit_of_time = (1e3, "ms") if end < 1 else (1.0, "s")

    figure = Figure(figsize=(12, 1.2 + 0.55 * len(rows)))
    axes = figure.subplots()
    for span in trace:
        row = rows.index(span.agent)
        width = span.end - span.start
        axes.barh(row, width * factor, left=span.start * factor, color=colour[unit_of(span)], edgecolor=edge)
        # About 130 characters fit across the figure.
        if end and width / end * 130 > len(span.name):
            middle = (span.start + span.end) / 2 * factor
            axes.text(middle, row, span.name, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlim(0, end * factor or 1)
    axes.set_xlabel(f"simulated time ({unit_of_time})")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110, format="png")

"""A comparison as one HTML file that needs nothing else: no network, no server, no account.

The curves are drawn by uPlot 1.6.32 (https://github.com/leeoniya/uPlot, MIT), which lies in ``uplot/`` and is written
into the page. A policy in the page's head forbids it any request.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import astuple
from importlib import resources
from typing import Any

from offload.comparison.exposed import Account, UnitTime
from offload.comparison.profiles import WORDS
from offload.comparison.runs import AXES, Run
from offload.comparison.table import Line, letter_of, unit_of_time

# More points than any screen has columns.
MAX_POINTS = 4000


def render_page(runs: Sequence[Run], table: Sequence[Line], title: str, accounts: Sequence[Account | None] = ()) -> str:
    """The page: what the runs are, their curves over steps, tokens or time, and the table.

    Args:
        runs: at least one.
        table: the lines of :func:`offload.comparison.table.lines` and ``differences``.
        title: of the page.
        accounts: of the runs' traces.
    """
    files = resources.files("offload.comparison")

    def text(name: str) -> str:
        return files.joinpath(name).read_text(encoding="utf-8")

    data = json.dumps(_data(runs), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(title),
        "UPLOT_CSS": text("uplot/uPlot.min.css"),
        "UPLOT_JS": text("uplot/uPlot.iife.min.js"),
        "UPLOT_LICENSE": text("uplot/LICENSE"),
        "DATA": data,
        "TABLE": _table(runs, table),
        "UNITS": _units(accounts),
    }
    # In one pass: what is put in is not looked through again.
    return re.sub(r"\{\{([A-Z_]+)\}\}", lambda mark: parts[mark[1]], text("page.html"))


def _data(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page draws: the names of the axes, and each run's columns, ``null`` where a line has no value."""
    content = []
    for index, run in enumerate(runs):
        kept = _kept(run)
        rows = [run.rows[each] for each in kept]
        keys = [key for key in dict.fromkeys(key for row in rows for key in row) if _is_curve(key)]
        columns = {key: [_number(row.get(key)) for row in rows] for key in keys}
        for over in AXES:
            places = run.places(over)
            columns[over] = [_number(places[each]) for each in kept]
        content.append({"name": letter_of(index), "label": run.label, "columns": columns})
    return {"axes": AXES, "runs": content}


def _kept(run: Run) -> list[int]:
    """Which lines are drawn: all, or of each stretch those with the least and the greatest loss, so that no spike is
    lost; and all evaluations."""
    count = len(run.rows)
    if count <= MAX_POINTS:
        return list(range(count))
    stretch = math.ceil(2 * count / MAX_POINTS)
    kept = {0, count - 1}
    kept.update(index for index, row in enumerate(run.rows) if row.get("evaluation/loss") is not None)
    for begin in range(0, count, stretch):
        losses = {index: row["loss"] for index, row in enumerate(run.rows[begin : begin + stretch], begin)
                  if isinstance(row.get("loss"), int | float)}  # fmt: skip
        kept.update((min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)) if losses else (begin,))
    return sorted(kept)


def _is_curve(key: str) -> bool:
    return key not in (*AXES, "time", "nonfinite")


def _number(value: Any) -> float | int | None:
    """Six digits, which is more than a screen shows."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _units(accounts: Sequence[Account | None]) -> str:
    """For each unit a row, and in it for each run with a trace a bar of what was exposed, and of the work."""
    known = {index: each for index, each in enumerate(accounts) if each is not None}
    if not known:
        return ""
    names = list(dict.fromkeys(name for each in known.values() for name in each.units))
    longest = max(sum(astuple(time)) for each in known.values() for time in each.units.values()) or 1.0
    unit, factor = unit_of_time(max(each.step for each in known.values()))
    legend = "".join(f'<span><i class="{kind}"></i>{words}</span>' for kind, words in WORDS.items())
    totals = "; ".join(
        f"{letter_of(index)}: {each.exposed * factor:.2f} {unit} exposed, {each.share:.1%} of a step"
        for index, each in known.items()
    )
    rows = []
    for name in names:
        bars = []
        for index, each in known.items():
            time = each.units.get(name, UnitTime())
            parts = "".join(
                f'<i class="{kind}" style="width:{100 * getattr(time, kind) / longest:.3f}%" '
                f'title="{words}: {getattr(time, kind) * factor:.3f} {unit}"></i>'
                for kind, words in WORDS.items()
            )
            value = f"{time.exposed * factor:.2f}"
            bars.append(
                f'<div class="bar" data-run="{letter_of(index)}" data-exposed="{value}"><b>{letter_of(index)}</b>'
                f"<div>{parts}</div><span>{value}</span></div>"
            )
        label = html.escape(name)
        rows.append(f'<div class="unit" data-unit="{label}"><span>{label}</span><div>{"".join(bars)}</div></div>')
    return (
        f'<section class="units"><h2>Exposed time per unit and step ({unit})</h2><p class="legend">{legend}</p>'
        f"<p>{totals}. Numbers: what was exposed; copies and updates beside training are hidden behind it.</p>"
        f"{''.join(rows)}</section>"
    )


def _table(runs: Sequence[Run], table: Sequence[Line]) -> str:
    rows = []
    section = None
    for line in table:
        if line.section != section:
            section = line.section
            heads = "".join(f"<th>{letter_of(index)}</th>" for index in range(len(runs)))
            rows.append(f'<tr class="section"><th>{html.escape(section)}</th>{heads}</tr>')
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in line.cells())
        inner = ' class="inner"' if line.name.startswith(" ") else ""
        rows.append(f"<tr><th{inner}>{html.escape(line.name.strip())}</th>{cells}</tr>")
    return "\n".join(rows)

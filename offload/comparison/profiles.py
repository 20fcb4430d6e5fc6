"""The traces that profiled runs left, beside each other: exposed time per unit, as lines of the table."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from offload.comparison.exposed import Account, account
from offload.comparison.runs import Run
from offload.comparison.table import Line, Value, unit_of_time
from offload.comparison.trace import TraceError, read_trace

UNITS_SHOWN = 10
"""In the terminal; page and picture have all."""

WORDS = {"exposed": "exposed", "update": "update", "up": "copies up", "down": "copies down"}
"""What each time of a unit is called."""


def accounts(runs: Sequence[Run]) -> tuple[list[Account | None], list[str]]:
    """What each run's trace tells, None where it has none; and a line about each that cannot be read."""
    found: list[Account | None] = []
    notes = []
    for run in runs:
        path = trace_of(run)
        found.append(None)
        if path is None:
            continue
        try:
            found[-1] = account(read_trace(path))
        except TraceError as error:
            notes.append(f"{path}: {error}; exposed time is left out")
    return found, notes


def trace_of(run: Run) -> Path | None:
    """The newest trace in the run's ``profiler.output_dir``, of its first process; None where there is none."""
    folder = _profiles(run)
    found = [] if folder is None else [*folder.glob("*/*trace*.json"), *folder.glob("*/*trace*.json.gz")]
    if not found:
        return None
    newest = max(found, key=lambda path: (path.stat().st_mtime, path.parent.name)).parent
    return min((path for path in found if path.parent == newest), key=lambda path: (len(path.name), path.name))


def _profiles(run: Run) -> Path | None:
    """Where the run's profiler wrote to, wherever the run's folder has gone since."""
    config: dict[str, Any] = run.record.get("config") or {}
    section: dict[str, Any] = config.get("profiler") or {}
    if section and not section.get("enabled"):
        return None
    named = section.get("output_dir")
    if not isinstance(named, str):
        return run.folder / "profiles"
    output_dir = config.get("output_dir")
    if isinstance(output_dir, str) and Path(named).is_relative_to(output_dir):
        return run.folder / Path(named).relative_to(output_dir)
    return Path(os.path.expanduser(named))


def lines(found: Sequence[Account | None]) -> list[Line]:
    """Of the units with the most exposed time a line each, with a value for each run; none where no run has a trace."""
    known = [each for each in found if each is not None]
    if not known:
        return []
    unit, factor = unit_of_time(max(each.step for each in known))
    exposed, work = f"exposed time per step ({unit})", f"optimizer's work per step ({unit})"

    def of_each(value: Callable[[Account], float]) -> list[Value]:
        return [None if each is None else value(each) for each in found]

    def times(key: str, names: Collection[str]) -> list[Value]:
        return of_each(
            lambda each: factor * sum(getattr(each.units[name], key) for name in names if name in each.units)
        )

    def of_unit(name: str) -> list[Value]:
        return [
            value if each and name in each.units else None
            for each, value in zip(found, times("exposed", [name]), strict=True)
        ]

    names = by_exposure(known)
    rows = [
        Line(exposed, "total", times("exposed", names), _text, ratio=True),
        Line(exposed, "  share of the step", of_each(lambda each: each.share), lambda value: f"{value:.1%}"),
    ]
    rows += [Line(exposed, f"  {name}", of_unit(name), _text) for name in names[:UNITS_SHOWN]]
    if rest := names[UNITS_SHOWN:]:
        rows.append(Line(exposed, f"  {len(rest)} other units", times("exposed", rest), _text))
    for key in ("update", "up", "down"):
        if any(times(key, names)):
            rows.append(Line(work, WORDS[key], times(key, names), _text, ratio=True))
    rows.append(Line(work, "steps in the trace", of_each(lambda each: each.steps)))
    return rows


def _text(value: float) -> str:
    return f"{value:.2f}"


def by_exposure(known: Sequence[Account]) -> list[str]:
    """The units, those first that expose most in any run."""
    most: dict[str, float] = {}
    for each in known:
        for name, time in each.units.items():
            most[name] = max(most.get(name, 0.0), time.exposed)
    return sorted(most, key=lambda name: -most[name])

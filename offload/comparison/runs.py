"""What a run left, read for a comparison: the lines of its ``metrics.jsonl`` and its ``run.json``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from offload.errors import UserError
from offload.metrics.log import METRICS_FILE, read_metrics
from offload.metrics.run_record import RUN_FILE, read_run
from offload.paths import with_home

# What curves are drawn over, with what a reader calls it.
AXES = {"step": "optimizer step", "tokens_seen": "tokens", "training_seconds": "training time (s)"}


@dataclass
class Run:
    """A run as its files tell it.

    Attributes:
        folder: its output_dir.
        rows: the lines of its metrics.jsonl, at least one.
        label: its name in a comparison, which no other run there has.
        record: its run.json, empty where there is none.
    """

    folder: Path
    rows: list[dict[str, Any]]
    label: str
    record: dict[str, Any] = field(default_factory=dict)

    def column(self, key: str, over: str = "step") -> tuple[list[float], list[float]]:
        """The values of ``key`` and where they are over one of :data:`AXES`."""
        known = [(x, row[key]) for x, row in zip(self.places(over), self.rows, strict=True)
                 if x is not None and row.get(key) is not None]  # fmt: skip
        return [x for x, _ in known], [y for _, y in known]

    def places(self, over: str) -> list[float | None]:
        """Where each line is over one of :data:`AXES`; None where that is not known."""
        return list(self.training_seconds) if over == "training_seconds" else [row.get(over) for row in self.rows]

    @cached_property
    def training_seconds(self) -> list[float]:
        """Until each line, without set-up, checkpoints, evaluations, and the time between a kill and a resume."""
        seen = [row.get("tokens_seen", 0) for row in self.rows]
        steps = zip(seen, [0, *seen], self.rows, strict=False)
        return list(accumulate((now - before) / row["tokens_per_second"] if row.get("tokens_per_second") else 0.0
                               for now, before, row in steps))  # fmt: skip


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these folders, or of these metrics files (``metrics.1.jsonl`` of an earlier run with its
    ``run.1.json``), with labels that tell them apart.

    Raises:
        UserError: a folder holds no run, nothing was logged yet, or a file is damaged.
    """
    files = [
        path / METRICS_FILE if path.is_dir() else path for path in (Path(with_home(each, "a run")) for each in paths)
    ]
    read = [_read(path) for path in files]
    labels = [record.get("label") or path.resolve().parent.name for path, (_, record) in zip(files, read, strict=True)]
    times = Counter(labels)
    names = [label if times[label] == 1 else f"{label} ({_short(path)})"
             for label, path in zip(labels, files, strict=True)]  # fmt: skip
    return [Run(path.parent, rows, name, record)
            for path, (rows, record), name in zip(files, read, names, strict=True)]  # fmt: skip


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    record = path.name.replace("metrics", "run", 1).replace(".jsonl", ".json")
    try:
        rows = read_metrics(path)
        content = read_run(path.parent, record if record.startswith("run.") else RUN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        where = path.parent if path.name == METRICS_FILE else path
        raise UserError(f"{where}: there is no run; give its output_dir or {METRICS_FILE}{_nearby(where)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(str(error)) from None
    if not any("step" in row for row in rows):
        raise UserError(f"{path.parent}: nothing was logged yet")
    return rows, content


def _nearby(folder: Path) -> str:
    """``; did you mean outputs/a or outputs/b?`` where runs lie in the folder or beside it."""
    for place in (folder, folder.parent):
        found = sorted(path.parent for path in place.glob(f"*/{METRICS_FILE}"))
        if found:
            more = f" ({len(found) - 3} more)" if len(found) > 3 else ""
            return f"; did you mean {' '.join(str(each) for each in found[:3])}?{more}"
    return ""


def _short(path: Path) -> str:
    """A run's folder as one would type it, with its file where that is an earlier run's."""
    named = path.parent if path.name == METRICS_FILE else path
    below = os.path.relpath(named)
    return str(named) if below.startswith(os.pardir) else below

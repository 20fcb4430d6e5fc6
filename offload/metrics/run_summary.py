"""What remains of a run when it is compared with others: a few numbers made from the lines of ``metrics.jsonl``.

=========================================== =====================================================================
key                                         meaning
=========================================== =====================================================================
``steps``, ``tokens``                       of the whole run, those before a resume included
``loss_first``, ``loss_final``, ``_best``   training loss: first, last and least of the lines (nats per label)
``evaluation_loss_…``                       the same of the held-out data, where there is any, and ``_best_step``
``tokens_per_second``                       median of the lines, the first one left out: it holds compilation,
                                            growth of the allocator and cold caches
``trained_tokens_per_second``, ``mfu``      likewise
``device_peak_active_gib``, …               peaks in GiB, under the names of :mod:`offload.metrics.memory`;
                                            those of a device that the run did not have are left out
``seconds_data``, ``seconds_…``             by phase (:attr:`offload.metrics.timing.StepTimer.PHASES`)
=========================================== =====================================================================

What the lines do not tell is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_LOSSES = {"loss": "loss", "evaluation_loss": "evaluation/loss"}
_RATES = ("tokens_per_second", "trained_tokens_per_second", "mfu")
_PEAKS = (
    "device_peak_active_gib",
    "device_peak_allocated_gib",
    "device_peak_reserved_gib",
    "host_rss_peak_gib",
    "host_pinned_gib",
)


def summarise(rows: Sequence[Mapping[str, Any]], since: Mapping[str, float] | None = None) -> dict[str, float]:
    """The numbers of the table above.

    Args:
        rows: the lines of a ``metrics.jsonl``, in order (:func:`offload.metrics.log.read_metrics`).
        since: the times after the last line, which no line tells (the final checkpoint), under the lines' names.
    """

    def column(name: str) -> list[float]:
        return [row[name] for row in rows if isinstance(row.get(name), int | float)]

    values: dict[str, float] = {}
    if rows:
        values["steps"] = rows[-1]["step"]
    if seen := column("tokens_seen"):
        values["tokens"] = int(seen[-1])
    for name, key in _LOSSES.items():
        if losses := column(key):
            values |= {f"{name}_first": losses[0], f"{name}_final": losses[-1], f"{name}_best": min(losses)}
    judged = [row for row in rows if row.get("evaluation/loss") is not None]
    if judged:
        values["evaluation_loss_best_step"] = min(judged, key=lambda row: row["evaluation/loss"])["step"]
    for name in _RATES:
        rates = column(name)
        if rates:
            values[name] = statistics.median(rates[1:] if len(rates) > 1 else rates)
    for name in _PEAKS:
        if peak := max(column(f"memory/{name}"), default=0.0):
            values[name] = peak
    for key in sorted({key for row in (*rows, since or {}) for key in row if key.startswith("time/")}):
        values[f"seconds_{key.removeprefix('time/')}"] = sum(column(key)) + (since or {}).get(key, 0.0)
    return values

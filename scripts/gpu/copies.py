"""Copies and update kernels of one step, from torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

DIRECTIONS = {"HtoD": "up", "DtoH": "down"}

LARGE = 1 << 20
"""Bytes from which on a pageable copy is worth telling."""

UPDATE_KERNELS = ("_update", "FusedAdam")
"""How the names of update kernels begin or what they contain: the packed AdamW's, and torch's fused ones."""


def trace_copies(step: Callable[[], None], settle: Callable[[], None]) -> dict[str, Any]:
    """Trace one step on the device and sum it up, see :func:`summary`; the reason where there is no profiler."""
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            settle()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
    except Exception as error:  # whatever a machine's profiler raises, times are measured already
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return summary(events)


def summary(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of a Chrome trace's events.

    Returns:
        dict: ``up`` and ``down``, each with ``bytes``, ``seconds`` in which at least one copy of that direction ran,
        and ``bytes_per_second``; ``pageable_bytes`` of large copies that were not page-locked; ``update``, the
        ``seconds`` and the number of ``launches`` of update kernels.
    """
    events = [event for event in events if "dur" in event]
    found: dict[str, Any] = {"pageable_bytes": 0}
    for word, direction in DIRECTIONS.items():
        copies = [e for e in events if e.get("cat") == "gpu_memcpy" and word in e.get("name", "")]
        total = sum(int(e["args"].get("bytes", 0)) for e in copies)
        seconds = covered([(e["ts"], e["ts"] + e["dur"]) for e in copies]) / 1e6
        found[direction] = {"bytes": total, "seconds": seconds, "copies": len(copies)}
        if seconds > 0:
            found[direction]["bytes_per_second"] = total / seconds
        pageable = [int(e["args"].get("bytes", 0)) for e in copies if "Pageable" in e["name"]]
        found["pageable_bytes"] += sum(nbytes for nbytes in pageable if nbytes >= LARGE)
    kernels = [e for e in events if e.get("cat") == "kernel" and is_update(e.get("name", ""))]
    found["update"] = {"seconds": sum(e["dur"] for e in kernels) / 1e6, "launches": len(kernels)}
    return found


def is_update(name: str) -> bool:
    """Whether a kernel of that name updates parameters."""
    return name.startswith(UPDATE_KERNELS[0]) or UPDATE_KERNELS[1] in name


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def write_trace(step: Callable[[], None], settle: Callable[[], None], path: Path, on_gpu: bool) -> None:
    """A Chrome trace of three steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(3):
            step()
        settle()
    profiler.export_chrome_trace(str(path))

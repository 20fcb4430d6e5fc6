"""A trace of torch's profiler, read event by event: the engine's marks, and what a device did for them.

The format is Kineto's (https://github.com/pytorch/kineto): one JSON object, often compressed, with an event for each
operation. A range on a thread has ``cat`` ``user_annotation``; a call that queues work on a device ``cuda_runtime`` or
``cuda_driver`` (``xpu_runtime``); the work itself ``kernel``, ``gpu_memcpy`` or ``gpu_memset``, with the same
``args.correlation`` as the call, and the ``args["External id"]`` of the operation that made it. Times are microseconds.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from offload.engine.marks import ALL, PREFIX, Mark, parse

LARGEST = 2**30
"""Characters of a trace that are read: half a minute's work."""

_CHUNK = 2**20
_LONGEST_EVENT = 16 * _CHUNK

Thread = tuple[Any, Any]
"""Process and thread."""

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
STEP = "ProfilerStep#"
BACKWARD = "autograd::engine::evaluate_function"
PLAIN_UPDATE = "Optimizer.step#"
"""PyTorch's own range around the step of an optimizer."""


class TraceError(Exception):
    """Why a trace cannot be read, in one line without its name."""


@dataclass(frozen=True)
class Range:
    """What a thread was in: a mark, or a step (None)."""

    thread: Thread
    begin: float
    end: float
    mark: Mark | None = None


@dataclass(frozen=True)
class Work:
    """What a device did.

    Attributes:
        stream: where.
        is_kernel: a kernel that computes, neither a copy nor a collective.
        call: thread and moment of the call that queued it; None where the trace does not tell.
    """

    stream: Any
    begin: float
    end: float
    is_kernel: bool
    call: tuple[Thread, float] | None


@dataclass
class Trace:
    """Of a trace what an account of exposed time needs; ranges in order of their begin.

    Attributes:
        steps: of the recipe.
        marks: of the engine; of a plain optimizer, its steps as updates of all units.
        backward: thread and moment of each of autograd's operations.
        work: of the device; empty for a run on the CPU.
        begin: of the first operation on a thread.
        end: of the last one.
    """

    steps: list[Range] = field(default_factory=list)
    marks: list[Range] = field(default_factory=list)
    backward: list[tuple[Thread, float]] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    begin: float = math.inf
    end: float = -math.inf


def read_trace(path: Path) -> Trace:
    """The trace in a file.

    Raises:
        TraceError: it cannot be read, is cut short, is no trace or is too large.
    """
    trace = Trace()
    calls: dict[Any, tuple[Thread, float]] = {}
    operations: dict[Any, tuple[Thread, float]] = {}
    work: list[dict[str, Any]] = []
    plain: list[Range] = []
    for event in _events(path):
        if event.get("ph") != "X":
            continue
        try:
            _sort(event, trace, calls, operations, work, plain)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise TraceError("it is no trace of torch's profiler") from None
    for event in work:
        args = event.get("args") or {}
        is_collective = str(event["name"]).startswith("nccl")
        call = calls.get(args.get("correlation")) or operations.get(args.get("External id"))
        begin = float(event["ts"])
        trace.work.append(
            Work(
                (args.get("device"), args.get("stream", event.get("tid"))),
                begin,
                begin + float(event.get("dur", 0)),
                event["cat"] == "kernel" and not is_collective,
                call,
            )
        )
    trace.marks = trace.marks or plain
    for ranges in (trace.steps, trace.marks, trace.work):
        ranges.sort(key=lambda each: each.begin)
    trace.backward.sort(key=lambda each: each[1])
    return trace


def _sort(
    event: dict[str, Any],
    trace: Trace,
    calls: dict[Any, tuple[Thread, float]],
    operations: dict[Any, tuple[Thread, float]],
    work: list[dict[str, Any]],
    plain: list[Range],
) -> None:
    """Put an event where it belongs."""
    kind, name = event.get("cat", ""), event["name"]
    if kind in ON_DEVICE:
        work.append(event)
        return
    thread, begin = (event.get("pid"), event.get("tid")), float(event["ts"])
    if kind.endswith(("_runtime", "_driver")):
        calls[event["args"].get("correlation")] = thread, begin
        return
    if kind not in ("user_annotation", "cpu_op"):
        return
    operations[event.get("args", {}).get("External id")] = thread, begin
    trace.begin, trace.end = min(trace.begin, begin), max(trace.end, begin + float(event.get("dur", 0)))
    if kind == "cpu_op":
        if name.startswith(BACKWARD):
            trace.backward.append((thread, begin))
    elif name.startswith(STEP):
        trace.steps.append(Range(thread, begin, begin + float(event["dur"])))
    elif name.startswith(PLAIN_UPDATE):
        plain.append(Range(thread, begin, begin + float(event["dur"]), Mark("update", ALL)))
    elif name.startswith(PREFIX) and (mark := parse(name)) is not None:
        trace.marks.append(Range(thread, begin, begin + float(event["dur"]), mark))


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a trace one by one: all of them would take ten times the file's size."""
    try:
        with open(path, "rb") as file:
            is_compressed = file.read(2) == b"\x1f\x8b"
        opener: Any = gzip.open if is_compressed else open
        with opener(path, "rt", encoding="utf-8") as text:
            yield from _decoded(text)
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError):
        raise TraceError("it is damaged or cut short") from None
    except OSError as error:
        raise TraceError(error.strerror or str(error)) from None


def _decoded(file: TextIO) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    text, place, count = "", 0, 0

    def more() -> bool:
        nonlocal text, place, count
        chunk = file.read(_CHUNK)
        text, place, count = text[place:] + chunk, 0, count + len(chunk)
        if count > LARGEST:
            raise TraceError(f"it has more than {LARGEST // 2**20} MiB of text; record fewer steps (active_steps)")
        return bool(chunk)

    while (place := text.find('"traceEvents"')) < 0 or (place := text.find("[", place)) < 0:
        place = 0
        if len(text) > _LONGEST_EVENT or not more():
            raise TraceError("it is no trace of torch's profiler")
    place += 1
    while True:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        if text.startswith("]", place):
            return
        try:
            event, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            if len(text) - place > _LONGEST_EVENT or not more():
                raise TraceError("it is damaged or cut short") from None
        else:
            if not isinstance(event, dict):
                raise TraceError("it is no trace of torch's profiler")
            yield event

"""Of a profiled run, what training waited for in each unit, and how long the unit's copies and update took.

On a run without an accelerator the training threads' own time tells: a range of the engine there is time in which
nothing else was done, be it a wait, or an update that runs on the thread itself. What helper threads do is hidden.

On an accelerator threads run far ahead, and exposed is the time in which the stream that computes is idle, or updates:

- up to a kernel's launch, what the launching threads spent in waits;
- from there to the kernel's begin, what the stream waited for: the units whose waits were queued since the kernel
  before, until the end of each one's update (of its copy up, where the CPU updates). A unit whose update was queued
  before the trace began gets the whole gap.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

from offload.comparison.trace import Range, Thread, Trace, TraceError, Work
from offload.engine.marks import WAITS, Kind, Mark

MICRO = 1e-6


@dataclass
class UnitTime:
    """Seconds of one step.

    Attributes:
        exposed: training waited for the unit.
        update: the base optimizer's call, or its kernels.
        up: copies to the device, gradients included.
        down: copies from it.
    """

    exposed: float = 0.0
    update: float = 0.0
    up: float = 0.0
    down: float = 0.0


FIELDS: dict[Kind, str] = {
    "update": "update",
    "copy up": "up",
    "gradient up": "up",
    "copy down": "down",
    "gradient down": "down",
}


@dataclass(frozen=True)
class Account:
    """Medians over the profiled steps, in seconds.

    Attributes:
        steps: how many.
        step: from one to the next.
        units: those that were updated, copied or waited for, in the order of their layers.
        of_device: it is an accelerator's time.
    """

    steps: int
    step: float
    units: dict[str, UnitTime]
    of_device: bool

    @property
    def exposed(self) -> float:
        """Of a step, over all units."""
        return sum(unit.exposed for unit in self.units.values())

    @property
    def share(self) -> float:
        """Of the step that is exposed."""
        return self.exposed / self.step if self.step else 0.0


def account(trace: Trace) -> Account:
    """What a trace tells.

    Raises:
        TraceError: it names no unit.
    """
    if not trace.marks:
        raise TraceError("no update is named in it; profiler.cpu=True records the names")
    steps = _Steps(trace)
    by_step: list[dict[str, UnitTime]] = [defaultdict(UnitTime) for _ in range(len(steps))]
    compute = _compute_stream(trace)
    if compute is None:
        _on_cpu(trace, steps, by_step)
        lengths = steps.lengths
    else:
        lengths = _on_device(trace, steps, by_step, compute)
    names = sorted({name for units in by_step for name in units}, key=_natural)
    return Account(
        steps=len(steps),
        step=statistics.median(lengths),
        units={name: _median([units[name] for units in by_step]) for name in names},
        of_device=compute is not None,
    )


def _median(times: Sequence[UnitTime]) -> UnitTime:
    values = {each.name: statistics.median(getattr(time, each.name) for time in times) for each in fields(UnitTime)}
    return UnitTime(**values)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts ``layers.2`` before ``layers.10``."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


class _Steps:
    """The steps in which something was trained: a profiler that stops opens one more. Where there are none, as with a
    profiler that nobody steps, the whole trace is one.

    Attributes:
        lengths: in seconds.
    """

    def __init__(self, trace: Trace) -> None:
        moments = [moment for _, moment in trace.backward]
        steps = [each for each in trace.steps
                 if not moments or bisect_left(moments, each.begin) < bisect_right(moments, each.end)]  # fmt: skip
        steps = steps or [Range((None, None), trace.begin, trace.end)]
        self._begins = [step.begin for step in steps]
        self._end = steps[-1].end
        self.lengths = [(step.end - step.begin) * MICRO for step in steps]

    def __len__(self) -> int:
        return len(self._begins)

    def at(self, moment: float) -> int | None:
        """The step that a moment is in."""
        return None if moment > self._end or moment < self._begins[0] else bisect_right(self._begins, moment) - 1


class _Nested:
    """The ranges of one thread, which lie in each other or apart."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.ranges = sorted(ranges, key=lambda each: (each.begin, -each.end))
        self._begins = [each.begin for each in self.ranges]
        self._outer: list[int] = []
        stack: list[int] = []
        for index, each in enumerate(self.ranges):
            while stack and self.ranges[stack[-1]].end <= each.begin:
                stack.pop()
            self._outer.append(stack[-1] if stack else -1)
            stack.append(index)

    def outermost(self) -> list[Range]:
        return [each for each, outer in zip(self.ranges, self._outer, strict=True) if outer < 0]

    def innermost(self, moment: float) -> Range | None:
        index = bisect_right(self._begins, moment) - 1
        while index >= 0 and self.ranges[index].end < moment:
            index = self._outer[index]
        return self.ranges[index] if index >= 0 else None


def _by_thread(marks: Iterable[Range]) -> dict[Thread, _Nested]:
    threads: dict[Thread, list[Range]] = defaultdict(list)
    for each in marks:
        threads[each.thread].append(each)
    return {thread: _Nested(ranges) for thread, ranges in threads.items()}


def _mark(each: Range) -> Mark:
    assert each.mark is not None
    return each.mark


def _add_time(unit: UnitTime, kind: Kind, seconds: float) -> None:
    if kind in FIELDS:
        setattr(unit, FIELDS[kind], getattr(unit, FIELDS[kind]) + seconds)


def _training_threads(trace: Trace) -> set[Thread]:
    """Those that step, go backward or wait; the engine's helpers do neither."""
    waiting = {each.thread for each in trace.marks if _mark(each).kind in WAITS}
    return {each.thread for each in trace.steps} | {thread for thread, _ in trace.backward} | waiting


def _on_cpu(trace: Trace, steps: _Steps, by_step: list[dict[str, UnitTime]]) -> None:
    training = _training_threads(trace)
    for thread, marks in _by_thread(trace.marks).items():
        for each in marks.ranges:
            step = steps.at(each.begin)
            if step is not None:
                _add_time(by_step[step][_mark(each).unit], _mark(each).kind, (each.end - each.begin) * MICRO)
        for each in marks.outermost() if thread in training else ():
            step = steps.at(each.begin)
            if step is not None:
                by_step[step][_mark(each).unit].exposed += (each.end - each.begin) * MICRO


def _compute_stream(trace: Trace) -> object | None:
    """The stream on which most kernels run that are none of the engine's; None for a run on the CPU."""
    marks = _by_thread(trace.marks)
    busy: dict[object, float] = defaultdict(float)
    for each in trace.work:
        if each.is_kernel and _range_of(each, marks) is None:
            busy[each.stream] += each.end - each.begin
    return max(busy, key=busy.__getitem__, default=None)


def _range_of(work: Work, marks: dict[Thread, _Nested]) -> Range | None:
    """What the engine was in when it queued the work."""
    if work.call is None or work.call[0] not in marks:
        return None
    return marks[work.call[0]].innermost(work.call[1])


def _on_device(trace: Trace, steps: _Steps, by_step: list[dict[str, UnitTime]], compute: object) -> list[float]:
    """Fills in ``by_step``; returns the seconds of each step by the device's clock."""
    marks = _by_thread(trace.marks)
    queued: set[Range] = set()
    ends = _Ends()
    on_compute: list[tuple[Work, Mark | None]] = []
    for work in trace.work:
        found = _range_of(work, marks)
        mark = None if found is None else found.mark
        if work.stream == compute:
            on_compute.append((work, mark))
        if found is None or mark is None or work.call is None:
            continue
        queued.add(found)
        ends.add(mark, work)
        step = steps.at(work.call[1])
        if step is not None:
            _add_time(by_step[step][mark.unit], mark.kind, (work.end - work.begin) * MICRO)
    for each in trace.marks:
        # Work of the CPU's own: an update there.
        step = steps.at(each.begin)
        if each not in queued and step is not None and _mark(each).kind == "update":
            _add_time(by_step[step][_mark(each).unit], "update", (each.end - each.begin) * MICRO)
    waits = [each for each in trace.marks if _mark(each).kind in WAITS]
    return _gaps(on_compute, waits, steps, by_step, ends)


class _Ends:
    """When the updates of each unit were done."""

    def __init__(self) -> None:
        self._all: dict[Kind, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))

    def add(self, mark: Mark, work: Work) -> None:
        assert work.call is not None
        self._all[mark.kind][mark.unit].append((work.call[1], work.end))

    def before(self, unit: str, moment: float) -> float | None:
        """Of what was queued for a unit by then, the end; None where nothing was."""
        found = self._all["update"].get(unit) or self._all["copy up"].get(unit) or []
        return max((end for called, end in found if called <= moment), default=None)


def _gaps(
    on_compute: Sequence[tuple[Work, Mark | None]],
    waits: Sequence[Range],
    steps: _Steps,
    by_step: list[dict[str, UnitTime]],
    ends: _Ends,
) -> list[float]:
    """Looks at each pause of the stream that computes."""
    begins: list[float | None] = [None] * len(steps)
    reached = last_call = float("-inf")
    waited = queued = 0  # of the waits, those that were over when the pause began, and were queued before its kernel
    for work, mark in on_compute:
        if work.call is None:
            reached = max(reached, work.end)
            continue
        call = work.call[1]
        step = steps.at(call)
        if step is not None and begins[step] is None:
            begins[step] = work.begin
        exposed = _adder(by_step, step)
        while waited < len(waits) and waits[waited].end <= reached:
            waited += 1
        while queued < len(waits) and waits[queued].begin <= last_call:
            queued += 1
        if reached < work.begin and reached > float("-inf"):
            launched = min(call, work.begin)
            for index in range(waited, len(waits)):
                each = waits[index]
                if each.begin >= launched:
                    break
                exposed(_mark(each).unit, max(each.begin, reached), min(each.end, launched))
            candidates = []
            for index in range(queued, len(waits)):
                each = waits[index]
                if each.begin > call:
                    break
                if _mark(each).kind == "wait":
                    candidates.append((_mark(each).unit, ends.before(_mark(each).unit, each.end)))
            _share(candidates, max(reached, call), work.begin, exposed)
        if mark is not None and mark.kind not in WAITS:
            exposed(mark.unit, work.begin, work.end)
        reached, last_call = max(reached, work.end), max(last_call, call)
    known = [each for each in begins if each is not None]
    last = [work.end for work, _ in on_compute if work.call is not None and steps.at(work.call[1]) == len(steps) - 1]
    bounds = [*known, max(last, default=reached)]
    return [(after - before) * MICRO for before, after in zip(bounds, bounds[1:], strict=False)] or steps.lengths


def _adder(by_step: list[dict[str, UnitTime]], step: int | None) -> Callable[[str, float, float], None]:
    def exposed(unit: str, begin: float, end: float) -> None:
        if step is not None and end > begin:
            by_step[step][unit].exposed += (end - begin) * MICRO

    return exposed


def _share(
    candidates: Sequence[tuple[str, float | None]],
    begin: float,
    end: float,
    exposed: Callable[[str, float, float], None],
) -> None:
    """Divide a pause among the units that were waited for in it."""
    late = sorted((done, unit) for unit, done in candidates if done is not None and done > begin)
    for done, unit in late:
        exposed(unit, begin, min(done, end))
        begin = max(begin, min(done, end))
    if not late:
        unknown = next((unit for unit, done in candidates if done is None), None)
        if unknown is not None:
            exposed(unknown, begin, end)

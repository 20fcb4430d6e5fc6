"""What a run reports: ``metrics.jsonl`` and its mirrors.

``metrics.jsonl`` is the truth: one JSON object per log, written and flushed as one line, so that a killed
run loses no line that was written. On an accelerator a line is written once the next step is queued
(:class:`offload.training.reporting.Reporter`), so a killed run lacks at most the last line. Mirrors (wandb,
tensorboard, ...) receive the same values on threads of their own; one that fails or hangs costs the run a warning
and nothing else.

The form of a line::

    {"step": 20, "time": 1767225600.123, "loss": 2.31, "lr": 1e-05, ...}

``step`` counts optimizer steps from 1 and is the one that the values belong to, ``time`` is seconds since 1970,
when the line was written. A value that JSON has no number for
(NaN, infinities) is ``null``, so that every JSON reader takes the line, and its name is kept in an extra
member, which only such lines have: ``"nonfinite": {"loss": "nan"}``. A value that is not known (``None``)
is ``null`` too.
"""

from __future__ import annotations

import inspect
import io
import json
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from offload.durable import sync
from offload.errors import UserError
from offload.metrics.lines import say
from offload.metrics.run_record import RUN_FILE

METRICS_FILE = "metrics.jsonl"

Number = float | int


class Mirror(Protocol):
    """Somewhere that the metrics are copied to: torchtune's ``MetricLoggerInterface``, as far as it is used.

    Everything is called on one thread that belongs to this mirror, in order; ``close`` may take an
    ``exit_code`` (0: the run ended well). A mirror that has them is also told ``log_facts(facts)``, what runs are
    grouped by, and ``log_summary(values)``, what the whole run comes to. If ``close`` does not return in time,
    ``abandon()`` is called, where there is one, on the thread of the caller of :meth:`MetricLog.close`.
    """

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None: ...

    def log_config(self, config: Any) -> None: ...

    def close(self) -> None: ...


class MetricLog:
    """``output_dir/metrics.jsonl`` and its mirrors.

    A fresh run into a folder that holds an earlier run's file renames that to ``metrics.<n>.jsonl``, and its
    ``run.json`` to ``run.<n>.json``. A run that resumes from step ``resume_step`` keeps the lines up to that step and
    drops those after it, which it is about to write again (also a last line torn by a kill).

    Args:
        output_dir: created if need be.
        mirrors: objects with ``log_dict``, ``log_config`` and ``close``; see :class:`Mirror`.
        resume_step: the step that the loaded checkpoint was saved at; None for a fresh run.
        mirror_patience: seconds that :meth:`close` waits for each mirror to finish its work.
    """

    def __init__(
        self,
        output_dir: str | Path,
        mirrors: Sequence[Mirror] = (),
        *,
        resume_step: int | None = None,
        mirror_patience: float = 30.0,
    ) -> None:
        self.path = Path(output_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            _set_aside(self.path, self.path.with_name(RUN_FILE))
        else:
            _keep_lines_up_to(self.path, resume_step)
        self._file = self._open()
        self._unwritten: deque[bytes] = deque()
        self._told_of_failure = False
        self._mirrors = [_MirrorThread(mirror) for mirror in mirrors]
        self._mirror_patience = mirror_patience

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Writes one line and hands the values to the mirrors.

        A line that cannot be written (a full disk) costs one warning: it is kept and written, in its place, once
        there is room.

        Args:
            values: numbers by name; a one-element tensor is read (which waits for its device), None is
                written as ``null`` and left out of the mirrors.
            step: number of optimizer steps done, from 1.

        Raises:
            TypeError: a value is not a number.
            ValueError: the log is closed.
        """
        numbers = {name: _as_number(name, value) for name, value in values.items()}
        if self._file.closed:
            raise ValueError(f"{self.path} is closed")
        self._unwritten.append(_line(numbers, step=step, now=time.time()))
        self._write_all()
        known = {name: number for name, number in numbers.items() if number is not None}
        for mirror in self._mirrors:
            mirror.put("log_dict", known, step)

    def log_config(self, config: Any) -> None:
        """Hands the run's configuration to the mirrors; the file holds numbers only."""
        for mirror in self._mirrors:
            mirror.put("log_config", config)

    def log_facts(self, facts: Mapping[str, Any]) -> None:
        """Hands what runs are grouped by to the mirrors that take it."""
        for mirror in self._mirrors:
            if mirror.takes("log_facts"):
                mirror.put("log_facts", facts)

    def log_summary(self, values: Mapping[str, Any]) -> None:
        """Hands what the whole run comes to, to the mirrors that take it."""
        for mirror in self._mirrors:
            if mirror.takes("log_summary"):
                mirror.put("log_summary", values)

    def close(self, exit_code: int = 0) -> None:
        """Closes the file and waits, for a bounded time, until the mirrors are done. May be called twice.

        Args:
            exit_code: 0 if the run ended well; mirrors that take it mark the run as failed otherwise.
        """
        if not self._file.closed:
            self._write_all()
            if self._unwritten:
                _warn(f"{self.path} lacks the last {len(self._unwritten)} lines: they could not be written")
            self._file.close()
        mirrors, self._mirrors = self._mirrors, []
        for mirror in mirrors:
            mirror.put("close", exit_code)
        patience = self._mirror_patience
        for mirror in mirrors:
            try:
                mirror.join(patience)
            except KeyboardInterrupt:  # all that matters is saved: whoever waits need not
                patience = 0.0
                mirror.join(patience)

    def restore(self) -> None:
        """Writes what is to be written yet; all of it, with a warning, if the file was deleted or moved away."""
        self._write_all()

    def _follow(self) -> None:
        there = os.fstat(self._file.fileno())
        try:
            now = os.stat(self.path)
        except OSError:
            now = None
        if now is not None and os.path.samestat(now, there):
            return
        content = os.pread(self._file.fileno(), there.st_size, 0)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before, self._file = self._file, self._open()
        before.close()
        if now is None and content:  # else an editor put another file in its place, with what is to be kept
            self._unwritten.appendleft(content)
            _warn(f"{self.path} was deleted during the run: it is written again with all its lines")

    def _open(self) -> io.FileIO:
        return open(self.path, "a+b", buffering=0)

    def _write_all(self) -> None:
        """Writes the lines that are still to be written, in order, as far as that is possible."""
        try:
            self._follow()
            while self._unwritten:
                self._append(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            if not self._told_of_failure:
                self._told_of_failure = True
                _warn(
                    f"{self.path}: {error.strerror or error}: training goes on, and lines are kept until they can be "
                    "written"
                )

    def _append(self, line: bytes) -> None:
        # One unbuffered write: the line reaches the kernel whole, and a kill cannot lose it. Only a full
        # disk makes it shorter than asked; then the next line must not be glued to the torn one.
        start = os.fstat(self._file.fileno()).st_size
        written = self._file.write(line)
        if written != len(line):
            self._file.truncate(start)
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes could be written: is the disk full?")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl`` in order. A last line torn by a kill is left out.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        ValueError: a line that is not the last one is no JSON object.
    """
    path = Path(path)
    if path.is_dir():
        path = path / METRICS_FILE
    rows = []
    for number, (line, whole) in enumerate(_lines(path.read_bytes()), start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif whole:
            raise ValueError(f"{path}:{number}: not a JSON object: {line[:80]!r}")
    return rows


def _lines(content: bytes) -> Iterator[tuple[bytes, bool]]:
    """The lines of a file, each with whether it ends in a line break."""
    for line in content.splitlines(keepends=True):
        yield line, line.endswith(b"\n")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step", 0), int) else None


def _line(numbers: Mapping[str, Number | None], *, step: int, now: float) -> bytes:
    row: dict[str, Any] = {"step": int(step), "time": round(now, 3)}
    nonfinite = {}
    for name, number in numbers.items():
        if number is not None and not math.isfinite(number):
            nonfinite[name] = str(number)
            number = None
        row[name] = number
    if nonfinite:
        row["nonfinite"] = nonfinite
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _as_number(name: str, value: Any) -> Number | None:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, torch.Tensor) or hasattr(value, "item"):  # numpy scalars have item() too
        value = value.item()
        if isinstance(value, int | float):
            return value
    raise TypeError(f"metric {name!r} is {value!r} ({type(value).__name__}), expected a number")


def _set_aside(metrics: Path, *others: Path) -> None:
    """Renames an earlier run's file to ``metrics.<n>.jsonl`` with the first free n, and what belongs to it likewise."""
    if not metrics.exists() or metrics.stat().st_size == 0:
        return
    paths = (metrics, *others)
    n = 1
    while any(_numbered(path, n).exists() for path in paths):
        n += 1
    for path in paths:
        if path.exists():
            path.rename(_numbered(path, n))


def _numbered(path: Path, n: int) -> Path:
    return path.with_name(f"{path.stem}.{n}{path.suffix}")


def _keep_lines_up_to(path: Path, step: int) -> None:
    """Rewrites the file with its lines up to ``step``, whole or not at all (temporary name and rename)."""
    for leftover in path.parent.glob(f".{path.name}.tmp-*"):  # of a process that was killed here
        leftover.unlink(missing_ok=True)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    except IsADirectoryError as error:
        raise UserError(
            f"output_dir: {path} is a folder, and metrics go to a file of that name: move it, or choose another "
            "output_dir"
        ) from error
    kept = bytearray()
    for line, whole in _lines(content):
        row = _parse(line)
        if row is not None and whole and row.get("step", 0) <= step:
            kept += line
    if kept == content:
        return
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(kept)
        file.flush()
        sync(file.fileno())
    temporary.replace(path)


class _MirrorThread:
    """Calls one mirror from a thread of its own, so that the mirror can neither stop nor stall training.

    The first exception is told in one warning and ends the mirror. When the mirror lags so far behind that
    the queue is full (it hangs, or its server does), values are dropped, with one warning.
    """

    # Far more than a mirror that works ever lags behind; at 1 KiB a line, 10 MiB.
    CAPACITY = 10_000

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._name = type(mirror).__name__
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(maxsize=self.CAPACITY)
        self._failed = threading.Event()
        self._told_of_drops = False
        # Not Thread.join: where Ctrl-C interrupts that, Python before 3.13 takes the thread for ended.
        self._is_done = threading.Event()
        # A daemon: a mirror that hangs for good does not keep the interpreter from exiting.
        threading.Thread(target=self._run, name=f"mirror-{self._name}", daemon=True).start()

    def takes(self, method: str) -> bool:
        return hasattr(self._mirror, method)

    def put(self, method: str, *arguments: Any) -> None:
        """Queues one call; returns at once."""
        if self._failed.is_set():
            return
        try:
            self._queue.put_nowait((method, arguments))
        except queue.Full:
            if method == "close":  # join() tells that the mirror did not finish
                self._failed.set()
            elif not self._told_of_drops:
                self._told_of_drops = True
                _warn(
                    f"{self._name} does not keep up ({self.CAPACITY} logs behind): values are dropped there. "
                    f"{METRICS_FILE} has all of them."
                )

    def join(self, seconds: float) -> None:
        """Waits for the queued calls, at most ``seconds``; tells if they were not done by then."""
        if not self._is_done.wait(0 if self._failed.is_set() else seconds):
            _warn(f"{self._name} did not finish within {seconds:g} s and is left behind; {METRICS_FILE} is complete.")
            abandon = getattr(self._mirror, "abandon", None)
            if abandon is not None:
                abandon()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._is_done.set()

    def _serve(self) -> None:
        while True:
            method, arguments = self._queue.get()
            try:
                if method == "close":
                    _call_close(self._mirror.close, *arguments)
                else:
                    getattr(self._mirror, method)(*arguments)
            except BaseException as error:  # whatever a mirror does, training goes on
                self._failed.set()
                told = f"{type(error).__name__}: {' '.join(str(error).split())}"
                _warn(
                    f"{self._name}.{method} failed and is switched off: {told.rstrip('.')}. "
                    f"{METRICS_FILE} has all values."
                )
                return
            if method == "close":
                return


def _call_close(close: Callable[..., None], exit_code: int) -> None:
    """Calls ``close`` with the exit code if it takes one (torchtune's loggers do not)."""
    if "exit_code" in inspect.signature(close).parameters:
        close(exit_code=exit_code)
    else:
        close()


def _warn(message: str) -> None:
    say(f"warning: {message}", stream=sys.stderr)

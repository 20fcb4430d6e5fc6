"""Tests on the accelerator, side by side in processes of their own.

Each process takes its share and tells each test's start and end, so that what a killed or crashed process was at is
known. A test that hangs, or breaks the device for its process, fails; the process's other tests run in another one.
What passed is not run again.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.machine import ROOT
from gpu.processes import OUT_OF_TIME, environment, last_words, run_child

RESTARTS = 5
"""Of one process, after tests that ended it."""

PATIENCE = 90.0
"""Seconds for one test."""

NOTHING_TO_RUN = "ended with status 5"
"""How pytest ends without tests."""


@dataclass(frozen=True)
class Selection:
    """Some tests.

    Attributes:
        name: what ``--only`` matches, and the record calls them.
        files: paths from the checkout's root.
        marker, keyword: pytest's ``-m`` and ``-k``.
        sanitize: under torch's CUDA sanitizer, which checks every kernel's accesses for races between streams.
        processes: side by side.
        needs: packages without which they are left out.
    """

    name: str
    files: tuple[str, ...]
    marker: str = "gpu"
    keyword: str = ""
    sanitize: bool = False
    processes: int = 1
    needs: tuple[str, ...] = ()

    def command(self) -> list[str]:
        keyword = ["-k", self.keyword] if self.keyword else []
        options = ["-q", "-ra", "-p", "gpu.plugin", "-p", "no:cacheprovider", "-p", "no:randomly"]
        return [sys.executable, "-m", "pytest", *options, "-m", self.marker, *keyword, *self.files]

    def shown_command(self) -> str:
        """For people: without what the suite needs."""
        keyword = ["-k", self.keyword] if self.keyword else []
        prefix = "TORCH_CUDA_SANITIZER=1 " if self.sanitize else ""
        return prefix + shlex.join(["python", "-m", "pytest", "-m", self.marker, *keyword, *self.files])


def run_tests(
    selection: Selection, known: dict[str, Any], seconds: float | None, save: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Run the tests that ``known`` has not.

    Args:
        selection: which.
        known: outcomes by test id, ``{"outcome", "seconds", "error"}``; those that passed or were skipped are not run
            again, and new ones are put in as they come.
        seconds: that there are.
        save: called now and then, when outcomes were put in.

    Returns:
        dict: ``command``; the number of tests by ``outcomes``; ``left_out``, the number that time did not suffice for;
        ``problems``, if there are any: why tests could not be run, or of which files there are none to run.
    """
    deadline = None if seconds is None else time.perf_counter() + seconds
    lock = threading.Lock()
    left: set[str] = set()
    problems: list[str] = []

    def run_share(index: int) -> None:
        finished = {test for test, facts in known.items() if facts["outcome"] in ("passed", "skipped")}
        for _ in range(RESTARTS + 1):
            remaining = None if deadline is None else deadline - time.perf_counter()
            if remaining is not None and remaining <= 0:
                return
            lines, why, said = _run_once(selection, finished, index, remaining)
            collected, outcomes, running, files = read_lines(lines)
            if running is not None and why is not None and why != OUT_OF_TIME:
                error = f"the process {why} within this test\n{last_words(said)}"
                outcomes[running] = {"outcome": "failed", "seconds": 0.0, "error": error}
            with lock:
                known.update(outcomes)
                left.difference_update(outcomes)
                left.update(collected - outcomes.keys())
                if not collected and not outcomes and why not in (None, NOTHING_TO_RUN, OUT_OF_TIME):
                    problems.append(f"{why}\n{said}"[-3000:])
                elif index == 0 and files is not None and (empty := without_tests(selection, files)):
                    problems.append(f"no test in {', '.join(empty)}\n{said}"[-3000:])
                save()
            finished |= outcomes.keys()
            if why == OUT_OF_TIME or not outcomes or not collected - outcomes.keys():
                return

    threads = [threading.Thread(target=run_share, args=(index,)) for index in range(selection.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result: dict[str, Any] = {
        "command": selection.shown_command(),
        "outcomes": dict(Counter(facts["outcome"] for facts in known.values())),
        "left_out": len(left),
    }
    return {**result, "problems": problems} if problems else result


def _run_once(
    selection: Selection, finished: Iterable[str], index: int, seconds: float | None
) -> tuple[list[str], str | None, str]:
    """One process with one share; its lines, why it ended, and the end of what it said."""
    with tempfile.TemporaryDirectory() as name:
        lines, done = Path(name) / "lines", Path(name) / "done"
        lines.touch()
        done.write_text("\n".join(finished))
        variables = {
            "GPU_SUITE_LINES": str(lines),
            "GPU_SUITE_DONE": str(done),
            "GPU_SUITE_SHARD": f"{index}/{selection.processes}",
            "GPU_SUITE_PATIENCE": str(PATIENCE),
            **({"TORCH_CUDA_SANITIZER": "1"} if selection.sanitize else {}),
        }
        _, why, said = run_child(selection.command(), seconds, environment(**variables))
        return lines.read_text().splitlines(), why, said


def without_tests(selection: Selection, files: Collection[str]) -> list[str]:
    """Of a selection's files, those without a test, as one has that is skipped as a whole; of a choice of tests, all
    files or none.

    Args:
        selection: which.
        files: that have tests, by their whole paths.
    """
    empty = [file for file in selection.files if str((ROOT / file).resolve()) not in files]
    return empty if not selection.keyword or len(empty) == len(selection.files) else []


def read_lines(lines: Iterable[str]) -> tuple[set[str], dict[str, Any], str | None, list[str] | None]:
    """What a process told: the tests it collected, outcomes of those that ended, the one that was running, and the
    files that have tests; None where it did not come to that."""
    collected: set[str] = set()
    files: list[str] | None = None
    outcomes: dict[str, Any] = {}
    running: str | None = None
    for line in lines:
        try:
            told = json.loads(line)
        except json.JSONDecodeError:  # cut off when the process was killed
            continue
        if "files" in told:
            files = told["files"]
        elif "collected" in told:
            collected = set(told["collected"])
        elif "started" in told:
            running = told["started"]
        else:
            test = told.pop("ended")
            if outcomes.get(test, {}).get("outcome") != "failed":  # a failed teardown comes second
                outcomes[test] = told
            running = None
    return collected, outcomes, running, files

"""Processes with a time limit, whose results are kept whatever becomes of them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from gpu.machine import ROOT

MARK = "RESULT "
LOG_CHARACTERS = 20_000
OUT_OF_TIME = "out of time"

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_OTHER_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def environment(allocator: str = "", **more: str) -> dict[str, str]:
    """Of a child: the same allocator and algorithms for every one, whatever this shell has; output as it comes.

    Packages are found where this process finds them, whatever folder a child's own children are in.
    """
    kept = {key: value for key, value in os.environ.items() if key not in (*_OTHER_NAMES, ALLOCATOR)}
    paths = [os.path.abspath(path) for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path]
    kept |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts"), *paths]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **({ALLOCATOR: allocator} if allocator else {}),
    }
    return kept | more


def apart() -> dict[str, Any]:
    """Arguments of a process that is ended with all that it started, and stays in this session: who ends that, as those
    who lend a machine for a time do, ends everything."""
    alone: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
    return {"stdin": subprocess.DEVNULL, **alone}


def run_child(
    command: Sequence[str], seconds: float | None, env: dict[str, str]
) -> tuple[list[dict[str, Any]], str | None, str]:
    """Run a process that prints its results as marked lines.

    Args:
        command: the program.
        seconds: after which it is killed with all that it started; None for no limit.
        env: its environment.

    Returns:
        tuple: results; why it ended, if not by itself; and the end of what else it said.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        cwd=ROOT,
        **apart(),
    )
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        abort(process)

    timer = None if seconds is None else threading.Timer(max(seconds, 0.0), stop)
    if timer is not None:
        timer.daemon = True
        timer.start()
    results, said = [], []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(MARK):
                results.append(json.loads(line[len(MARK) :]))
            else:
                said.append(line)
        code = process.wait()
    finally:
        if timer is not None:
            timer.cancel()
        kill(process)
    why = None
    if code != 0:
        hint = " (killed: host memory may have run out)" if code == -signal.SIGKILL else ""
        why = OUT_OF_TIME if stopped.is_set() else f"ended with status {code}{hint}"
    return results, why, "".join(said)[-LOG_CHARACTERS:]


def last_words(said: str, *, before: int = 0) -> str:
    """Where a process was when it died: what Python's fault handler said, and so many characters before it; else the
    end of all."""
    begin = max(said.rfind("Fatal Python error"), said.rfind("Timeout ("))
    if begin < 0:
        return said[-3000:]
    return said[max(0, begin - before) : begin + 3000]


TO_WRITE = 2.0
"""Seconds for a process to write where it is."""


def abort(process: subprocess.Popen[str]) -> None:
    """End a process as :func:`kill` does, after Python's fault handler has written where each of its threads is."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + TO_WRITE
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    kill(process)


def leave_no_cores() -> None:
    """Of processes that are aborted, tens of GiB of memory are not to be written to disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def kill(process: subprocess.Popen[str]) -> None:
    """End a process that was started with :func:`apart`, and whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

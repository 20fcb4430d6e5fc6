"""One run at a time in an output_dir, and never one that is dead."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from offload.checkpoints.output_lock import OutputLock
from offload.errors import UserError

# Forks a child that outlives it, as a worker of a data loader does for seconds.
HOLDER = """
import os, sys, time
from pathlib import Path
from offload.checkpoints.output_lock import OutputLock
lock = OutputLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    time.sleep(20)
    os._exit(0)
print(child, flush=True)
time.sleep(20)
"""


def test_the_second_of_two_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    first = OutputLock(tmp_path / "run")
    with pytest.raises(UserError, match=f"^output_dir: another run .*process {os.getpid()} on .*, since 20"):
        OutputLock(tmp_path / "run")
    other = OutputLock(tmp_path / "other")
    first.release()
    first.release()
    again = OutputLock(tmp_path / "run")
    for lock in (again, other):
        lock.release()
    assert not [*(tmp_path / "run").iterdir(), *(tmp_path / "other").iterdir()]


def test_a_killed_run_holds_nothing_although_its_worker_lives(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    worker = int(holder.stdout.readline())
    try:
        with pytest.raises(UserError, match=f"process {holder.pid} on"):
            OutputLock(tmp_path)
        holder.kill()
        holder.wait()
        os.kill(worker, 0)
        OutputLock(tmp_path).release()
        assert not list(tmp_path.iterdir())
    finally:
        os.kill(worker, signal.SIGKILL)
        holder.stdout.close()


def test_a_lock_that_is_removed_while_another_run_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A opens the file, B (its holder) removes it and ends, and a third makes a new one: A must not hold the old."""
    real, holder = fcntl.flock, OutputLock(tmp_path)
    third: list[OutputLock] = []

    def late(descriptor: int, operation: int) -> None:
        if not third:
            monkeypatch.setattr(fcntl, "flock", real)
            holder.release()
            third.append(OutputLock(tmp_path))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UserError, match="another run"):
        OutputLock(tmp_path)
    third[0].release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING):
        lock = OutputLock(tmp_path)
    assert len(caplog.messages) == 1 and "cannot lock" in caplog.messages[0]
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="output_dir: cannot write to .*: choose another output_dir"):
        OutputLock(tmp_path / "file" / "run")


def test_many_that_start_at_once_hold_it_one_after_the_other(tmp_path: Path) -> None:
    """Children take the lock over and over; each writes who it is while it holds it, and sees no other."""
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            status = 0
            end = time.monotonic() + 0.5
            while time.monotonic() < end and status == 0:
                try:
                    lock = OutputLock(tmp_path / "run")
                except UserError:
                    continue
                try:
                    os.mkdir(tmp_path / "held")
                    os.rmdir(tmp_path / "held")
                except OSError:
                    status = 1
                lock.release()
            os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0, 0]

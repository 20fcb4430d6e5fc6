"""One run at a time in an ``output_dir``.

The lock is ``flock``'s: the kernel gives it back when its process ends, however it ends, so that a killed run
never stands in the way of its successor. The file ``.lock`` tells who holds it, and is removed at the end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import time
import weakref
from pathlib import Path

from offload.errors import UserError

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"

# Seconds. A worker that was forked the moment its run was killed holds the lock until it gets to close it.
_PATIENCE = 10.0
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class OutputLock:
    """Holds ``folder`` for this process, from its construction to :meth:`release`.

    On a file system without ``flock`` it holds nothing, and one warning says so.

    Args:
        folder: the run's ``output_dir``; created if need be.

    Raises:
        UserError: if another run holds it, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except OSError as error:
            raise UserError(
                f"output_dir: cannot write to {folder}: {error.strerror or error}: choose another output_dir"
            ) from error
        _held.add(self)

    def _acquire(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.read(descriptor, 200).decode(errors="replace").strip()
                os.close(descriptor)
                if error.errno in _HELD and _is_dead(holder) and time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                if error.errno in _HELD:
                    raise UserError(
                        f"output_dir: another run is at work in {self.path.parent} ({holder or 'unknown'}): wait for "
                        "its end, stop it, or choose another output_dir"
                    ) from None
                logger.warning(
                    "%s: this file system cannot lock (%s): see to it that no other run uses the same output_dir",
                    self.path.parent,
                    error.strerror,
                )
                with contextlib.suppress(OSError):
                    self.path.unlink()
                return
            # The run before may have removed the file between the two calls: then the lock is one on a file that
            # nobody else will open.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.path), os.fstat(descriptor)):
                    break
            os.close(descriptor)
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())

    def release(self) -> None:
        """Gives the folder back and removes the file; may be called twice."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def is_left(folder: Path) -> bool:
    """Whether the run that last held a folder is known to have ended without giving it back: it was killed."""
    try:
        return _is_dead((folder / LOCK_NAME).read_text(errors="replace").strip())
    except OSError:
        return False


def _is_dead(holder: str) -> bool:
    """Whether the process that wrote ``holder`` is known to be gone."""
    match = re.match(r"process (\d+) on ([^,]+),", holder)
    if match is None or match[2] != socket.gethostname():
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


_held: weakref.WeakSet[OutputLock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A worker of a data loader outlives its killed parent by seconds, and with the descriptor it would hold the lock.
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_after_fork_in_child)

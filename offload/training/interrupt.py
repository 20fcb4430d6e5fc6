"""Stopping a run in good order on Ctrl-C (SIGINT), SIGTERM, or when its terminal is closed (SIGHUP).

The first signal only sets a flag: the recipe reads it at the end of each step, saves and leaves. The second
one ends the process at once, even while the main thread is inside a long call into C++.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from offload.distributed.world import World

_FLUSH_SECONDS = 1.0
_ECHO_SECONDS = 1.0


class Interrupt:
    """Context manager which turns SIGINT, SIGTERM and SIGHUP into a flag.

    .. code-block:: python

        with Interrupt() as interrupt:
            for batch in loader:
                train_step(batch)
                if interrupt.signum is not None:
                    save()
                    break
        sys.exit(interrupt.exit_code)

    The first signal sets :attr:`signum` and prints one line to standard error; the second one flushes the
    standard streams and ends the process with status ``128 + signum``, without cleaning up. Earlier handlers
    come back when the block is left. A terminal that is closed sends SIGHUP, and the shell in it another one: it is
    never the second signal, and ignored from then on. A signal that the process was started to ignore (``nohup``, a
    background job of a script) stays ignored.

    Only the main thread can install handlers; in any other thread the block does nothing. Processes forked
    inside the block (workers of a data loader) ignore SIGINT and SIGHUP, because a terminal sends them to
    these too and the step could not be finished without them, and end on SIGTERM as usual.

    Args:
        signals: the signals to take over.
        world: the processes that stop together. The main one prints the line. Where there are several, a signal that
            comes again within a second is a copy of the first.
    """

    def __init__(
        self,
        signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
        *,
        world: World | None = None,
    ) -> None:
        self.signals = tuple(signals)
        self._world = World() if world is None else world
        self.signum: int | None = None
        # Slurm signals the processes of a job as well as what launched them, which passes it on.
        self._echo = _ECHO_SECONDS if self._world.size > 1 else 0.0
        self._agreed: int | None = None
        self._previous: dict[int, Any] = {}
        self._previous_wakeup = -1
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None
        self._watcher: threading.Thread | None = None

    def came(self) -> bool:
        """Whether a signal came to any process of the world; the same on all of them, which have to ask together."""
        (signum,) = self._world.greatest([self.signum or 0])
        self._agreed = int(signum) or None
        return self._agreed is not None

    @property
    def exit_code(self) -> int:
        """The status to leave with: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP, 0 if there was no signal."""
        signum = self._agreed or self.signum
        return 0 if signum is None else 128 + signum

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is not threading.main_thread():
            return self
        taken = [number for number in self.signals if signal.getsignal(number) is not signal.SIG_IGN]
        if not taken:
            return self
        # Python runs a handler only once the main thread is back in Python code, which a long kernel or a
        # synchronisation delays. The interpreter's C handler writes each signal's number to the wake-up file
        # descriptor at once, so a thread that reads it can act on the second signal without that delay.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in taken:
            self._previous[number] = signal.signal(number, self._on_signal)
        self._watcher = threading.Thread(target=self._watch, name="interrupt", daemon=True)
        self._watcher.start()
        _active.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._reader is None or self._writer is None:
            return
        _active.discard(self)
        for number, handler in self._previous.items():
            if number == signal.SIGHUP == self.signum:
                handler = signal.SIG_IGN
            # None stands for a handler that was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        # The watcher reads what is left, then an end of file, and returns. Closing is not enough for that: workers
        # of a data loader that still live have the descriptor too.
        self._writer.shutdown(socket.SHUT_RDWR)
        self._writer.close()
        if self._watcher is not None:
            self._watcher.join()
        self._previous.clear()
        self._reader.close()
        self._reader = self._writer = self._watcher = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum = number

    def _watch(self) -> None:
        assert self._reader is not None
        seen, last, at = 0, 0, 0.0
        while numbers := self._reader.recv(64):
            if self._previous_wakeup >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._previous_wakeup, numbers)
            for number in numbers:
                before, last = last, number
                since, at = time.monotonic() - at, time.monotonic()
                is_copy = number == before and since < self._echo
                if number not in self._previous or is_copy or (seen and number == signal.SIGHUP):
                    continue
                seen += 1
                if seen > 1:
                    _exit_now(number)
                name = signal.Signals(number).name
                # Torchrun sends it to those that are left when one has died: that is told elsewhere.
                if self._world.is_main and not self._world.is_broken():
                    _write_line(f"{name}: finishing the step and saving; once more to exit at once without saving")


def _write_line(line: str) -> None:
    # Straight to the descriptor: the main thread may hold the lock of sys.stderr.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{line}\n".encode())


def _exit_now(number: int) -> None:
    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    # In a thread of its own, because a flush waits for ever for a main thread that is stuck in a write.
    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    flusher.join(_FLUSH_SECONDS)
    os._exit(128 + number)


_active: weakref.WeakSet[Interrupt] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    if not _active:
        return
    for interrupt in list(_active):
        for number in interrupt._previous:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    # The wake-up socket is shared with the parent, which would take the child's signals for its own.
    signal.set_wakeup_fd(-1)
    _active.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

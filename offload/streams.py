"""Standard streams that cannot end a run: a reader that leaves (``| head -5``), a terminal that is gone, ``>&-``."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# After these nobody will read what is written here; after others (a full disk) a later line may get through.
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ESHUTDOWN, errno.ECONNRESET)


class Unbreakable:
    """A text stream that drops what cannot be written, and says once, on standard error, that its reader is gone.

    Args:
        stream: what it writes to; everything else is asked of it too.
        name: what the line calls it.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream_beneath = stream
        self._name = name
        self._is_gone = False

    def write(self, text: str) -> int:
        self._try("write", text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try("flush")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream_beneath, name)

    def _try(self, method: str, *arguments: str) -> None:
        try:
            getattr(self._stream_beneath, method)(*arguments)
        except UnicodeError:
            raise
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if method == "flush" and self._stream_beneath.closed:
                return
            if isinstance(error, OSError) and error.errno not in _GONE:
                return
            self._leave()

    def _leave(self) -> None:
        """Sends the descriptor's output to nowhere, which spares other writers to it, and Python's end, the error."""
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._stream_beneath.fileno())
        if not self._is_gone:
            self._is_gone = True
            if sys.stderr is not self:
                print(f"{self._name} has no reader any more: the run goes on and saves as usual", file=sys.stderr)


def write_anything() -> None:
    """Lets standard output escape what its encoding lacks, as standard error does: a folder's name may be no text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def open_missing() -> None:
    """Opens those of the three standard descriptors that the process was started without (``>&-``).

    Otherwise the next file that is opened would get the number, and what is meant for the terminal would land in it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - lives as long as the process


@contextlib.contextmanager
def unbreakable() -> Iterator[None]:
    """Makes ``sys.stdout`` and ``sys.stderr`` :class:`Unbreakable` for the block."""
    open_missing()
    before = {"stdout": sys.stdout, "stderr": sys.stderr}
    wrapped: dict[str, Any] = {
        "stdout": Unbreakable(sys.stdout, "standard output"),
        "stderr": Unbreakable(sys.stderr, "standard error"),
    }
    for name, stream in wrapped.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in wrapped.items():
            stream.flush()
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])

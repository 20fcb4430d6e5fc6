"""The exception for mistakes that a user can mend."""

from __future__ import annotations

import errno
import re


class UserError(ValueError):
    """A mistake in what the user gave: a configuration key, a path, a name, a setting of the machine.

    ``str(error)`` is what the user reads, in place of a traceback. It holds one line per problem, and
    each line says what is wrong (naming the key or the file), what was expected, the nearest valid name
    where there is one, and what to do. The programs print it as ``error: <line>`` and exit with status 2.
    """

    @property
    def lines(self) -> list[str]:
        """The problems, one per entry."""
        return str(self).splitlines()


def first_line(error: BaseException) -> str:
    """What an exception says, as far as it fits into a message of ours."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".")[:300] if text else type(error).__name__


def one_line(error: BaseException) -> str:
    """All that an exception says, its lines joined."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


class NotFiniteError(UserError):
    """A loss, gradient or weight that is no number any more: the state of the run is not worth saving."""


def is_short_of_host_memory(error: BaseException) -> bool:
    """Whether it says that the host's memory ran out, in the words of Python, the kernel, PyTorch or safetensors."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return re.search(r"can't allocate memory|Cannot allocate memory", str(error)) is not None


def raise_shortage(error: BaseException) -> None:
    """Raise MemoryError where an error is want of host memory, or came of it: no file or setting is wrong then."""
    seen: BaseException | None = error
    while seen is not None:
        if is_short_of_host_memory(seen):
            raise MemoryError(first_line(seen)) from error
        seen = seen.__cause__

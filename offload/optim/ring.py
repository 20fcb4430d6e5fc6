"""Space that the CPU writes and queued work reads later: :class:`Ring`."""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Event(Protocol):
    """A point in the work that was queued on a device."""

    def synchronize(self) -> object:
        """Return when the device has reached it."""


class Ring:
    """Ranges of a space, handed out round and round; none again before the work that reads it is done.

    The CPU runs ahead of the device by as many ranges as fit. Not safe for several threads at a time.

    Args:
        size: of the space, in any unit.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._next = 0
        self._read: deque[tuple[int, int, Event]] = deque()
        """``(start, stop, event)`` of ranges that work was queued for, oldest first."""

    def take(self, size: int) -> int:
        """The start of ``size`` units, free to be written; waits for the work that reads them.

        Raises:
            ValueError: for more than there is.
        """
        if size > self.size:
            raise ValueError(f"{size} units of a ring of {self.size}")
        if self._next + size > self.size:
            # The rest stays empty. What is still read there is older than what is read at the start.
            self._wait(self._next, self.size)
            self._next = 0
        start, self._next = self._next, self._next + size
        self._wait(start, self._next)
        return start

    def _wait(self, start: int, stop: int) -> None:
        while self._read and self._read[0][0] < stop and self._read[0][1] > start:
            self._read.popleft()[2].synchronize()

    def read_until(self, event: Event, start: int, size: int) -> None:
        """Say when the range that :meth:`take` gave last has been read."""
        self._read.append((start, start + size, event))

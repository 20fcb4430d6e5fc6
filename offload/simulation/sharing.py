"""Bandwidth that several agents use at the same time: a link that copies and collectives share, a host's memory that
all of a machine's cards and cores share."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

COLLECTIVE = "collective"
"""The kind of work that a collective is."""

LEAST = 1e-6
"""Of a resource; what is left over below this is nothing."""


@dataclass(frozen=True)
class Work:
    """What was done, for accounts.

    Attributes:
        start: seconds.
        seconds: by resource, for how long it would have kept it busy with nothing else there.
    """

    start: float
    seconds: dict[str, float]


class Sharing:
    """Resources, each used up to all of it, by any number at once.

    Work is placed when it is queued, as virtual time is: it gets of each resource what earlier placed work leaves over
    at each moment, and slows none of that down. So no resource does more than it can, and which of two that meet there
    goes first is decided by who queued first, where hardware would let both go on more slowly.

    Args:
        uses: by kind of work, what share of each resource it uses at full speed. A share above one means that the
            resource is what limits it.

    Attributes:
        log: all work, in the order in which it was queued.
    """

    def __init__(self, uses: Mapping[str, Mapping[str, float]]) -> None:
        self.uses = {kind: dict(shares) for kind, shares in uses.items()}
        self._used = {name: _Profile() for shares in uses.values() for name in shares}
        self.log: list[Work] = []

    def run(self, kind: str, start: float, seconds: float) -> float:
        """When work is done that begins at ``start`` at the earliest and takes ``seconds`` at full speed.

        Work of a kind that uses nothing shared is done after ``seconds``.
        """
        shares = {name: share for name, share in self.uses.get(kind, {}).items() if share > 0}
        if not shares or seconds <= 0:
            return start + max(seconds, 0.0)
        self.log.append(Work(start, {name: share * seconds for name, share in shares.items()}))
        now, left = start, seconds
        while left > 0:
            speed, free, until = 1.0, 1.0, math.inf
            for name, share in shares.items():
                used, change = self._used[name].at(now)
                free, until = min(free, 1.0 - used), min(until, change)
                speed = min(speed, (1.0 - used) / share)
            if free < LEAST:
                now = until
                continue
            end = min(until, now + left / speed)
            for name, share in shares.items():
                self._used[name].add(now, end, share * speed)
            left = 0.0 if end < until or math.isinf(until) else left - (end - now) * speed
            if left < LEAST * seconds:
                left = 0.0
            now = end
        return now

    def forget(self, before: float) -> None:
        """Nothing will be queued to begin before this."""
        for profile in self._used.values():
            profile.forget(before)

    def seconds(self, begin: float, end: float) -> dict[str, float]:
        """By resource, the seconds of work that was queued to start in a time."""
        total = dict.fromkeys(self._used, 0.0)
        for work in self.log:
            if begin <= work.start < end:
                for name, seconds in work.seconds.items():
                    total[name] += seconds
        return total


class _Profile:
    """How much of a resource is used over time: ``levels[i]`` from ``times[i]`` on."""

    def __init__(self) -> None:
        self.times = [-math.inf]
        self.levels = [0.0]

    def at(self, time: float) -> tuple[float, float]:
        """What is used at a time, and when that changes next."""
        index = bisect_right(self.times, time) - 1
        return self.levels[index], self.times[index + 1] if index + 1 < len(self.times) else math.inf

    def add(self, begin: float, end: float, share: float) -> None:
        first, last = self._cut(begin), self._cut(end)
        for index in range(first, last):
            self.levels[index] += share

    def _cut(self, time: float) -> int:
        """The index of what begins at a time."""
        index = bisect_right(self.times, time) - 1
        if self.times[index] != time:
            index += 1
            self.times.insert(index, time)
            self.levels.insert(index, self.levels[index - 1])
        return index

    def forget(self, before: float) -> None:
        index = bisect_right(self.times, before) - 1
        if index > 0:
            self.times[:index] = [-math.inf]
            self.levels[:index] = [0.0]

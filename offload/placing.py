"""Where states rest and who updates them, for the least time: what strategy ``auto`` decides by, as plain arithmetic.

Three things can carry a step's updates at once: device memory that is left over holds states that then need no link,
the link streams others, and the CPU updates the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

WORTH = 0.03
"""Of the time that copies and updates take, what the CPU's help has to save to be tried."""

SHARES = 100

FIRST_SHARE = 0.15
"""Of all parameters, those of the units that the next forward needs first, which the CPU does not update: their
gradients come last, and there is nothing left beside which to do it."""


@dataclass(frozen=True)
class Speeds:
    """What carries updates, per second.

    Attributes:
        up: bytes from page-locked memory to the device, while as many go down.
        down: bytes from the device.
        cpu: parameters that the base optimizer updates on the CPU.
        host: bytes of host memory, read and written by whatever does; infinite where that is not known.
    """

    up: float
    down: float
    cpu: float
    host: float = math.inf

    @property
    def link(self) -> float:
        """Bytes each way, of states that go both ways."""
        return min(self.up, self.down)


def host_share(states: float, weights: float, speeds: Speeds) -> float:
    """Of parameters whose states rest on the host, how many the CPU updates so that all is done soonest; 0 where that
    saves too little.

    Args:
        states: bytes of one parameter's states.
        weights: bytes of the parameter, and of its gradient.
        speeds: of this machine.
    """

    def seconds(share: float) -> float:
        link = (1 - share) * states + share * weights
        # A gradient comes down and is read, a weight is read, written and read on its way up.
        memory = 2 * states + share * 5 * weights
        return max(link / speeds.link, share / speeds.cpu, memory / speeds.host)

    best = min((step / SHARES for step in range(SHARES + 1)), key=lambda share: (seconds(share), share))
    return best if seconds(best) < (1 - WORTH) * seconds(0.0) else 0.0


Thing = TypeVar("Thing", bound=Hashable)


def spread(things: Iterable[Thing], size: Callable[[Thing], float], wanted: float) -> list[Thing]:
    """Things of the size ``wanted`` together, at most, taken evenly from a sequence and beginning with its first: what
    carries the rest is loaded evenly all through backward."""
    order = list(things)
    total = sum(map(size, order))
    taken: list[Thing] = []
    if not total or wanted <= 0:
        return taken
    due, room = 0.0, wanted
    for thing in order:
        mine = size(thing)
        due += mine * min(1.0, wanted / total)
        # Half of one is taken at once: the first of them is among those that are.
        if mine <= room and due >= min(mine, mine * wanted / total) * (1 - 1e-9):
            taken.append(thing)
            due -= mine
            room -= mine
    return taken


def first(things: Iterable[Thing], size: Callable[[Thing], float], wanted: float) -> list[Thing]:
    """Things of the size ``wanted`` together, at most, the first that fit: what the next forward needs first is there
    at once, and all the rest has the longer to come."""
    taken: list[Thing] = []
    for thing in things:
        if size(thing) <= wanted:
            taken.append(thing)
            wanted -= size(thing)
    return taken


def for_cpu(things: Sequence[Thing], size: Callable[[Thing], float], share: float) -> list[Thing]:
    """Things that the CPU updates, of a sequence in the order of the forward: spread over those that are needed late,
    where its time is hidden best; or all, where that is about as much."""
    total = sum(map(size, things))
    if share > 1 - FIRST_SHARE:
        return list(things)
    before, late = 0.0, []
    for thing in things:
        if before >= FIRST_SHARE * total:
            late.append(thing)
        before += size(thing)
    return spread(reversed(late), size, share * total)

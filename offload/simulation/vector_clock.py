"""Vector clocks: what happened before what.

An *agent* does things one after another: a stream or a thread. Its clock holds, for every agent, how much of that
agent's work happened before its own next step. An access is ordered after an earlier one if its clock has reached
the earlier one's epoch (C. Fidge, "Timestamps in message-passing systems", 1988).
"""

from __future__ import annotations


class Clock(dict[str, int]):
    """How much of each agent's work happened before: agent to epoch."""

    def join(self, other: Clock) -> None:
        """Come after everything that ``other`` comes after."""
        for agent, epoch in other.items():
            if epoch > self.get(agent, 0):
                self[agent] = epoch

    def tick(self, agent: str) -> int:
        """Begin the next step of ``agent`` and return its epoch."""
        self[agent] = self.get(agent, 0) + 1
        return self[agent]


class Agent:
    """Does things one after another, at most one at a time: a stream or a thread.

    Attributes:
        now: virtual time; a stream has finished its queued work by then.
        open_span: what the next operation's span may be merged with: the owner's key and the place in the trace.
    """

    def __init__(self, name: str, clock: Clock, now: float) -> None:
        self.name = name
        self.clock = clock
        self.now = now
        self.open_span: tuple[object, int] | None = None

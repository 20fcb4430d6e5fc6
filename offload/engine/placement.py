"""Which optimizer states rest where: ordered rules over state paths ``<state>/<parameter name>``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from offload.errors import UserError

MEMORY_KINDS = ("device", "pinned_host", "host")
"""Where a state can rest between steps. ``host`` is pageable memory, whose copies are about half as fast."""

KEY = "optimizer.offload_states"


class Placement:
    """The rules of ``offload_states``: the last rule whose pattern matches a whole state path decides.

    Args:
        rules: a regular expression (everything it matches rests in pinned_host memory), or a list of
            ``{"pattern": regex, "memory": kind}`` and regular expressions. What nothing matches stays on
            the device.

    Raises:
        UserError: for a rule that cannot be read.
    """

    def __init__(self, rules: str | Sequence[Any]) -> None:
        self.rules: list[tuple[re.Pattern[str], str]] = []
        self._known: dict[tuple[str, str], str | None] = {}
        entries: Sequence[Any] = [rules] if isinstance(rules, str) else rules
        if not isinstance(entries, (list, tuple)):
            raise UserError(f"{KEY}: expected a regular expression or a list of rules, got {rules!r}")
        for index, entry in enumerate(entries):
            where = KEY if isinstance(rules, str) else f"{KEY}[{index}]"
            self.rules.append(_rule(entry, where))

    def memory(self, state: str, name: str) -> str:
        """The memory kind of one state of one parameter."""
        return self.rule(state, name) or "device"

    def rule(self, state: str, name: str) -> str | None:
        """The memory kind that the rules say; None where none matches."""
        if (state, name) not in self._known:
            path = f"{state}/{name}"
            matching = [memory for pattern, memory in self.rules if pattern.fullmatch(path)]
            self._known[state, name] = matching[-1] if matching else None
        return self._known[state, name]

    def check(self, paths: Iterable[str]) -> None:
        """Refuse patterns that match none of the paths that there are.

        Raises:
            UserError: names the pattern and the paths nearest to it.
        """
        known = list(paths)
        for pattern, _ in self.rules:
            if not any(pattern.fullmatch(path) for path in known):
                near = difflib.get_close_matches(pattern.pattern, known, n=3, cutoff=0.0)
                raise UserError(
                    f"{KEY}: {pattern.pattern!r} matches no state; patterns match a whole path "
                    f"<state>/<parameter>, such as {' or '.join(near)}; use `.*` in place of a part that varies"
                )


def _rule(entry: Any, where: str) -> tuple[re.Pattern[str], str]:
    if isinstance(entry, str):
        entry = {"pattern": entry, "memory": "pinned_host"}
    if not isinstance(entry, Mapping) or set(entry) != {"pattern", "memory"}:
        raise UserError(f"{where}: expected a regular expression or {{pattern: ..., memory: ...}}, got {entry!r}")
    if entry["memory"] not in MEMORY_KINDS:
        near = difflib.get_close_matches(str(entry["memory"]), MEMORY_KINDS, n=1, cutoff=0.0)[0]
        raise UserError(
            f"{where}.memory: got {entry['memory']!r}, expected one of {', '.join(MEMORY_KINDS)}; did you mean {near}?"
        )
    try:
        return re.compile(entry["pattern"]), entry["memory"]
    except (re.error, TypeError) as error:
        raise UserError(f"{where}.pattern: {entry['pattern']!r} is not a regular expression: {error}") from error

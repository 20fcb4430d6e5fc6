"""What would save most of the memory that a run ran out of, computed for that very run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.config.loading import load_and_check
from offload.device import DTYPES, total_memory
from offload.distributed.world import World
from offload.errors import UserError
from offload.host_memory import allowance, use_of_this_process
from offload.plan.budget import DEVICE, HOST, LOCKED, Budget, readable
from offload.training.budgeting import Planner
from offload.training.changes import cheaper, cost, keys_of
from offload.training.dividing import least
from offload.training.settings import TrainSettings

TOLD = 3
"""Overrides that are told."""

LEAST = 0.01
"""Share of what a run takes that is worth an override."""

OF_DEVICE, OF_HOST = 0.05, 0.1
"""Shares by which plans can be too low, docs/planning.md. What is enough leaves so much of the room, and so much of
what did not fit, however little that was planned to be."""


@dataclass(frozen=True)
class Saving:
    """A change of a run.

    Attributes:
        changes: overrides.
        saved: bytes of the memory that ran out.
        budget: of the run with them.
    """

    changes: tuple[str, ...]
    saved: int
    budget: Budget


class Advisor:
    """Plans a run, and what could be changed of it.

    Args:
        recipe: its class.
        path: of its config.
        overrides: of its command line.
        processes: that train one model together.
    """

    def __init__(self, recipe: Any, path: Path, overrides: Sequence[str], *, processes: int = 1) -> None:
        self._recipe, self._path, self._overrides = recipe, path, list(overrides)
        self._world = World(size=processes, local_size=processes)

    def lines(self, device: torch.device, *, of_device: bool, used: int, room: int | None) -> list[str]:
        """The run's budget, what would save most, and what would be enough.

        Args:
            device: where it trains.
            of_device: the accelerator's memory ran out, and not the host's.
            used: bytes of the host that the process takes before its model.
            room: bytes that there are of what ran out; None where nobody knows.

        Raises:
            UserError: the run cannot be planned.
        """
        settings = self._settings(())
        planner = Planner(used, adapts=self._recipe.adapts)
        places = (DEVICE,) if of_device else (LOCKED, HOST)

        def budget(changes: Sequence[str]) -> Budget:
            changed = self._settings(changes)
            return planner.plan(changed, device, DTYPES[changed.dtype], sharding=least(changed, self._world)).budget

        whole = budget(())
        total = whole.of(*places)
        kind = "device" if of_device else "host"
        title = f"this run takes {readable(total)} of the {kind}'s memory at its fullest moment"
        lines = [f"{title}, where it can have {readable(room)}:" if room is not None else f"{title}:", *whole.lines()]
        savings = self._savings(settings, budget, total, places)
        best = self._best(savings)
        told = best[:TOLD]
        if not told:
            return [*lines, "no setting saves any of it: take a smaller model, or more memory"]
        lines.append("what saves most, one by one:")
        width = max(len(" ".join(each.changes)) for each in told)
        lines += [
            f"  {readable(each.saved):>11}  {' '.join(each.changes):<{width}}  {cost(each.changes)}" for each in told
        ]
        margin = OF_DEVICE if of_device else OF_HOST
        goal = None if room is None else int((1 - margin) * min(room, total))
        enough = None if goal is None else self._enough(savings, best, budget, goal, places)
        if enough is not None:
            lines.append(f"enough, with {readable(enough.budget.of(*places))}: {' '.join(enough.changes)}")
        elif room is not None:
            lines.append("no combination of them is enough: take a smaller model, or more memory")
        return lines

    def _settings(self, changes: Sequence[str]) -> TrainSettings:
        settings: TrainSettings
        _, settings = load_and_check(self._path, [*self._overrides, *changes], self._recipe.Settings, [])
        return settings

    def _is_valid(self, changes: Sequence[str]) -> bool:
        try:
            self._recipe.check(self._settings(changes), notes=[])
        except UserError:
            return False
        return True

    def _savings(self, settings: TrainSettings, budget: Any, total: int, places: tuple[str, ...]) -> list[Saving]:
        """Of changes that are worth it, what saves most first."""
        found = []
        for changes in cheaper(settings):
            with contextlib.suppress(UserError):
                changed = budget(changes)
                found.append(Saving(tuple(changes), total - changed.of(*places), changed))
        return sorted((each for each in found if each.saved > LEAST * total), key=lambda saving: -saving.saved)

    def _best(self, savings: list[Saving]) -> list[Saving]:
        """Those that a run accepts, each of other keys."""
        best: dict[frozenset[str], Saving] = {}
        for saving in savings:
            keys = frozenset(keys_of(saving.changes))
            if keys not in best and self._is_valid(saving.changes):
                best[keys] = saving
        return list(best.values())

    def _enough(
        self, savings: list[Saving], best: list[Saving], budget: Any, room: int, places: tuple[str, ...]
    ) -> Saving | None:
        """What leaves the run within its room: one that saves no more than it must, or else several of the best."""
        for saving in reversed(savings):
            if saving.budget.of(*places) <= room and self._is_valid(saving.changes):
                return saving
        words: list[str] = []
        taken = 0
        for saving in best:
            more = [*words, *(word for word in saving.changes if word not in words)]
            if len(set(keys_of(more))) < len(more) or not self._is_valid(more):
                continue
            changed = budget(more)
            if not words or changed.of(*places) < taken:
                words, taken = more, changed.of(*places)
            if taken <= room:
                return Saving(tuple(words), 0, changed)
        return None


def room(device: torch.device, *, of_device: bool) -> int:
    """Bytes that a run may have in all of the accelerator's memory or of the host's; asked while it still has its own.

    Args:
        device: where it trains.
        of_device: the accelerator's memory is meant.
    """
    if of_device and device.type != "cpu":
        return total_memory(device)
    return allowance(use_of_this_process())

"""What would save most of the memory that a run ran out of, computed for that very run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.config.loading import load_and_check
from offload.device import DTYPES, total_memory
from offload.distributed import network
from offload.distributed.world import World
from offload.errors import UserError
from offload.host_memory import allowance, use_of_this_process
from offload.plan.budget import DEVICE, HOST, LOCKED, Budget, Sharding, readable
from offload.plan.collectives import system_of
from offload.plan.machines import card_named
from offload.plan.prediction import Prediction
from offload.plan.workload import Machine
from offload.training.budgeting import Plan, Planner
from offload.training.changes import cheaper, cost, keys_of
from offload.training.dividing import Division, divisions, least
from offload.training.placement import Room
from offload.training.predicting import Predictor
from offload.training.ranking import applied
from offload.training.settings import TrainSettings

TOLD = 3
"""Overrides that are told."""

LEAST, LEAST_OF_HOST = 0.01, 0.03
"""Shares of what a run takes that are worth an override. On the CPU equal settings can differ by as much as the second:
by where small objects come to lie in the C library's heap."""

NO_TIME = 0.005
"""Share of a step that is not worth telling."""

OF_DEVICE, OF_HOST = 0.05, 0.1
"""Shares by which plans can be too low, docs/planning.md. What is enough leaves so much of the room, and so much of
what did not fit, however little that was planned to be."""


ALONE = World()


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


@dataclass(frozen=True)
class Less:
    """Overrides that leave less to page-lock.

    Attributes:
        changes: overrides.
        locked: bytes that are, with them.
    """

    changes: tuple[str, ...]
    locked: int


def settings_of_file(recipe: Any, path: Path, overrides: Sequence[str]) -> Callable[[Sequence[str]], TrainSettings]:
    """Settings for an :class:`Advisor`.

    Args:
        recipe: its class.
        path: of its config.
        overrides: of its command line.
    """

    def load(changes: Sequence[str]) -> TrainSettings:
        settings: TrainSettings
        _, settings = load_and_check(path, [*overrides, *changes], recipe.Settings, [])
        return settings

    return load


class Advisor:
    """Plans a run, and what could be changed of it.

    Args:
        recipe: its class.
        settings: the run's, with more overrides.
        world: of the processes that train one model together.
        division: of the model among them, where the settings leave it open and the run has chosen.

    Attributes:
        dtype: of the parameters.
        cards: that the host's processes train on.
    """

    def __init__(
        self,
        recipe: Any,
        settings: Callable[[Sequence[str]], TrainSettings],
        *,
        world: World = ALONE,
        division: Division | None = None,
    ) -> None:
        self._recipe, self._settings = recipe, settings
        self.dtype = DTYPES[settings(()).dtype]
        self._world, self._division = world, division
        self.cards = world.local_size

    def lines(self, device: torch.device, *, of_device: bool, used: int, room: int | None) -> list[str]:
        """The run's budget, what would save most, and what would be enough.

        Args:
            device: where it trains.
            of_device: the accelerator's memory ran out, and not the host's.
            used: bytes of the host that the process takes before its model.
            room: bytes that there are of what ran out for this process; None where nobody knows.

        Raises:
            UserError: the run cannot be planned.
        """
        settings = self._settings(())
        plans = self._plans(device, used)
        places = (DEVICE,) if of_device else (LOCKED, HOST)

        def budget(changes: Sequence[str]) -> Budget:
            return plans(changes).budget

        whole = budget(())
        total = whole.of(*places)
        lines = [f"{self._title(total, room, of_device=of_device)}:", *whole.lines()]
        if self._world.size > 1:
            world = dataclasses.replace(self._world, size=2 * self._world.size)
            less = self._plan(device, settings, least(settings, world)).budget.of(*places)
            lines.append(f"on twice as many hosts each process takes {readable(less)} of it")
        savings = self._savings(settings, budget, total, places, LEAST_OF_HOST if device.type == "cpu" else LEAST)
        best = self._best(savings)
        told = best[:TOLD]
        if not told:
            return [*lines, "no setting saves any of it: take a smaller model, or more memory"]
        lines.append("what saves most, one by one:")
        width = max(len(" ".join(each.changes)) for each in told)
        time = self._times(device, plans)
        lines += [
            f"  {readable(each.saved):>11}  {' '.join(each.changes):<{width}}  {cost(each.changes, time(each.changes))}"
            for each in told
        ]
        margin = OF_DEVICE if of_device else OF_HOST
        goal = None if room is None else int((1 - margin) * min(room, total))
        enough = None if goal is None else self._enough(savings, best, budget, goal, places)
        if enough is not None:
            taken = time(enough.changes)
            beside = "" if taken is None else f" and {taken}"
            lines.append(f"enough, with {readable(enough.budget.of(*places))}{beside}: {' '.join(enough.changes)}")
        elif room is not None:
            lines.append("no combination of them is enough: take a smaller model, or more memory")
        return lines

    def _title(self, total: int, room: int | None, *, of_device: bool) -> str:
        """What the run takes; of the host, what all of its processes there take."""
        kind, beside = "device" if of_device else "host", self._world.local_size
        who = "this run" if self._world.size == 1 else f"each of {self._world.size} processes"
        line = f"{who} takes {readable(total)} of the {kind}'s memory at its fullest moment"
        if room is not None:
            line += f", where it can have {readable(room)}"
        if beside == 1 or of_device:
            return line
        of_all = "" if room is None else f" of {readable(beside * room)}"
        return f"{line} ({readable(beside * total)}{of_all} for the {beside} of a host)"

    def _sharding(self, changed: TrainSettings) -> Sharding:
        if self._division is not None and self._division in divisions(changed, self._world):
            return self._division.sharding(changed, self._world)
        return least(changed, self._world)

    def _plan(self, device: torch.device, settings: TrainSettings, sharding: Sharding) -> Plan:
        return self._planner.plan(settings, device, DTYPES[settings.dtype], sharding=sharding)

    def _plans(self, device: torch.device, used: int) -> Callable[[Sequence[str]], Plan]:
        """Plans the run with overrides; arguments as of :meth:`lines`."""
        self._planner = Planner(used, adapts=self._recipe.adapts)

        @functools.cache
        def plan(changes: tuple[str, ...]) -> Plan:
            changed = self._settings(changes)
            return self._plan(device, changed, self._sharding(changed))

        return lambda changes: plan(tuple(changes))

    def _times(
        self, device: torch.device, plans: Callable[[Sequence[str]], Plan]
    ) -> Callable[[Sequence[str]], str | None]:
        """Tells what overrides cost in time: of as many tokens as the run's step has, on this machine. None where that
        cannot be predicted."""
        predictor = Predictor(self._planner)

        @functools.cache
        def predicted(changes: tuple[str, ...]) -> Prediction | None:
            try:
                changed = self._settings(changes)
                room = Room() if device.type == "cpu" else Room(total_memory(device))
                plan, dtype = plans(changes), DTYPES[changed.dtype]
                if self._world.size == 1:
                    found = predictor.predict_here(changed, plan, device, dtype, room)
                else:
                    found = predictor.predict_ranks_here(
                        changed,
                        plan,
                        device,
                        self._sharding(changed),
                        dtype,
                        room,
                        processes=self._world.size,
                        hosts=self._world.hosts,
                    )
            except Exception:  # the memory that is short, or a part that cannot be traced
                return None
            return found and found[0]

        def time(changes: Sequence[str]) -> str | None:
            before, after = predicted(()), predicted(tuple(changes))
            if before is None or after is None:
                return None
            share = before.tokens_per_second / after.tokens_per_second - 1
            if abs(share) < NO_TIME:
                return "no time"
            return f"{1000 * share * before.step_seconds:+,.0f} ms a step ({share:+.0%})"

        return time

    def less_to_lock(self, device: torch.device, *, used: int, room: int) -> Less | None:
        """The overrides with which no more than ``room`` bytes of the host are page-locked, or else the one that saves
        most of them; None where none saves any. Arguments as of :meth:`lines`; raises as that does."""
        plans, places = self._plans(device, used), (LOCKED,)

        def budget(changes: Sequence[str]) -> Budget:
            return plans(changes).budget

        savings = self._savings(self._settings(()), budget, budget(()).of(*places), places, LEAST)
        best = self._best(savings)
        found = self._enough(savings, best, budget, room, places) or next(iter(best), None)
        return None if found is None else Less(found.changes, found.budget.of(*places))

    def step_seconds(self, device: torch.device, machine: Machine, *, used: int, room: Room) -> float:
        """The run's predicted step; of several hosts whose network nobody knows, as if that took no time.

        Args:
            device: where it trains, an accelerator.
            machine: rates.
            used: as of :meth:`lines`.
            room: of the machine.
        """
        settings, plan = self._settings(()), self._plans(device, used)(())
        predictor = Predictor(self._planner)
        if self._world.size == 1:
            return predictor.predict(settings, plan, machine, self.dtype, room).step_seconds
        between = network.speed() or math.inf
        system = system_of(machine, card_named(machine.name), hosts=self._world.hosts, network=between)
        sharding, processes = self._sharding(settings), self._world.size
        found = predictor.predict_ranks(settings, plan, system, sharding, self.dtype, room, processes=processes)
        return found.step_seconds

    def _is_valid(self, changes: Sequence[str]) -> bool:
        try:
            self._recipe.check(self._settings(changes), notes=[])
        except UserError:
            return False
        return True

    def _savings(
        self, settings: TrainSettings, budget: Any, total: int, places: tuple[str, ...], least_share: float
    ) -> list[Saving]:
        """Of changes that save more than a share of ``total``, what saves most first."""
        found = []
        for changes in cheaper(settings):
            with contextlib.suppress(UserError):
                changed = budget(changes)
                found.append(Saving(tuple(changes), total - changed.of(*places), changed))
        return sorted((each for each in found if each.saved > least_share * total), key=lambda saving: -saving.saved)

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


def advisor_of(recipe: Any, settings: Callable[[Sequence[str]], TrainSettings]) -> Advisor:
    """Of a run that has begun.

    Args:
        recipe: a :class:`offload.training.finetune.FinetuneRecipe`.
        settings: its own, with more overrides.
    """
    return Advisor(type(recipe), settings, world=recipe.world, division=getattr(recipe, "division", None))


def of_host_memory(recipe: Any) -> list[str]:
    """What a run takes of the host's memory and what would save most, before it begins; nothing where it cannot be
    planned.

    Args:
        recipe: a :class:`offload.training.finetune.FinetuneRecipe` that knows its device.
    """
    there_is = room(recipe.device, recipe.world, of_device=False)
    try:
        advisor = advisor_of(recipe, functools.partial(applied, recipe.settings))
        return advisor.lines(recipe.device, of_device=False, used=recipe.memory_before, room=there_is)
    except Exception:
        return []


def room(device: torch.device, world: World, *, of_device: bool) -> int:
    """Bytes that a process may have in all of the accelerator's memory or of the host's; asked while it still has its
    own.

    Args:
        device: where it trains.
        world: of its processes. Those of a host, which all take the same, share what the host or the control group has
            left for them.
        of_device: the accelerator's memory is meant.
    """
    if of_device and device.type != "cpu":
        return total_memory(device)
    return allowance(use_of_this_process(), processes=max(1, world.local_size))

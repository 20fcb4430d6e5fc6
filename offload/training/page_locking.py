"""Host memory that could not be page-locked: how much, what that costs, and what takes less."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from offload.device import total_memory
from offload.engine.memory import PageLockWarning
from offload.host_memory import host_memory, why_not_locked
from offload.metrics.lines import say
from offload.metrics.this_machine import machine_here, pageable_share
from offload.plan.budget import readable
from offload.plan.workload import Machine
from offload.training.advice import Advisor, advisor_of
from offload.training.placement import Room
from offload.training.ranking import applied


class PageLocking:
    """Page-locking of a run: what is refused is told once, in one line, with what it costs.

    Args:
        recipe: a :class:`offload.training.finetune.FinetuneRecipe`, which has its optimizer when this tells of it.
    """

    def __init__(self, recipe: Any) -> None:
        self._recipe = recipe
        self._refused: list[PageLockWarning] = []
        self._is_told = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, refused page-locking is noted in place of a warning; it is told afterwards, or by :meth:`tell`."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", PageLockWarning)
            show = warnings.showwarning

            def note(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
                if isinstance(message, PageLockWarning):
                    self._refused.append(message)
                else:
                    show(message, category, *rest, **options)

            warnings.showwarning = note
            yield
        self.tell()

    def tell(self) -> None:
        """Of what was refused until here: not in a hook, where it is refused, since a plan takes seconds."""
        if not self._refused or self._is_told:
            return
        self._is_told = True
        recipe = self._recipe
        advisor = advisor_of(recipe, functools.partial(applied, recipe.settings))
        report = recipe.optimizer.memory_report()
        line = told(self._refused[0], report, advisor, recipe.device, used=recipe.memory_before)
        say(f"warning: {line}", stream=sys.stderr)


def told(
    refusal: PageLockWarning,
    report: dict[str, dict[str, int]],
    advisor: Advisor,
    device: torch.device,
    *,
    used: int,
) -> str:
    """A line about page-locking that was refused.

    Args:
        refusal: the first.
        report: :meth:`offload.OffloadOptimizer.memory_report`.
        advisor: of the run.
        device: where it trains.
        used: bytes of the host that the process takes before its model.
    """
    locked, pageable = (sum(report.get(kind, {}).values()) for kind in ("pinned_host", "host"))
    line = (
        f"{readable(locked)} of {readable(locked + pageable)} of the optimizer's host memory could be page-locked "
        f"({refusal.reason}): copies of the rest block, and are about half as fast"
    )
    with contextlib.suppress(Exception):  # what cannot be planned here is told as far as it can
        before, after = _steps(advisor, device, used, locked / (locked + pageable))
        line += f"; a step takes {after:.2f} s instead of {before:.2f} s (predicted)"
    line += f". {why_not_locked(host_memory(), pageable)}"
    with contextlib.suppress(Exception):
        less = advisor.less_to_lock(device, used=used, room=locked)
        if less is not None:
            line += f". Less to lock: {' '.join(less.changes)} ({readable(less.locked)})"
    return line


def _steps(advisor: Advisor, device: torch.device, used: int, share: float) -> tuple[float, float]:
    """Seconds of a step where all is page-locked, and where a share is."""
    here = machine_here(device, fp32=advisor.dtype == torch.float32, cards=advisor.cards)
    if here is None:
        raise LookupError(device)
    machine = here[0]
    room = Room(total_memory(device))
    steps = [advisor.step_seconds(device, each, used=used, room=room)
             for each in (machine, slowed(machine, share, pageable_share(device)))]  # fmt: skip
    return steps[0], steps[1]


def slowed(machine: Machine, locked: float, pageable: float) -> Machine:
    """A machine with a part of its copies from and to pageable memory.

    Args:
        machine: rates.
        locked: share of the bytes whose memory is page-locked.
        pageable: share of the link's rate that copies of others reach.
    """
    slower = locked + (1 - locked) / pageable
    return dataclasses.replace(machine, up=machine.up / slower, down=machine.down / slower)

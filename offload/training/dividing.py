"""How the processes of a run divide its model, where that is left to the machine: of what fits, what moves least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from offload.device import DTYPES, total_memory
from offload.distributed.world import World
from offload.host_memory import host_memory
from offload.plan.budget import Budget, Sharding

GIB = 2**30

AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True)
class Division:
    """A model among processes.

    Attributes:
        replicate: replicas of it, each divided among an equal part of the processes.
        resharding: as ``reshard_after_forward``.
    """

    replicate: int
    resharding: bool | int

    def sharding(self, settings: Any, world: World) -> Sharding:
        """What one process's memory follows from.

        Args:
            settings: of a distributed recipe.
            world: of all processes.
        """
        itemsize = DTYPES[settings.dtype].itemsize
        reduced = itemsize if settings.reduce_dtype is None else DTYPES[settings.reduce_dtype].itemsize
        ranks = max(1, world.size // self.replicate)
        return Sharding(ranks, self.resharding, reduce_itemsize=reduced, itemsize=itemsize)

    def __str__(self) -> str:
        kept = "gathered again for backward"
        if self.resharding is False:
            kept = "kept from forward to backward"
        elif self.resharding is not True:
            kept = f"kept divided among {self.resharding} from forward to backward"
        replicas = f", {self.replicate} replicas" if self.replicate > 1 else ""
        return f"weights {kept}{replicas}"


def divisions(settings: Any, world: World) -> list[Division]:
    """Those that the settings allow, least traffic first.

    Between hosts a replica each moves gradients alone, once; within one, weights that are kept are gathered once where
    others are gathered twice. Weights that are kept divided among a host's processes are gathered again within it.
    """
    hosts = world.hosts
    replicas = [hosts, 1] if hosts > 1 else [1]
    if settings.data_parallel_replicate_dim != AUTO:
        replicas = [settings.data_parallel_replicate_dim]
    found = []
    for replicate in replicas:
        ranks = world.size // replicate
        within = [world.local_size] if 1 < world.local_size < ranks and ranks % world.local_size == 0 else []
        kinds = [False, *within, True] if settings.reshard_after_forward == AUTO else [settings.reshard_after_forward]
        found += [Division(replicate, kind) for kind in kinds]
    return found


def choose(
    settings: Any, world: World, planned: Callable[[Sharding], Budget], *, device: int | None, host: int | None
) -> tuple[Division, str]:
    """The first division that fits, and why; where none does, the last, which takes least.

    Args:
        settings: of a distributed recipe.
        world: of all processes.
        planned: the memory of one of them.
        device: bytes of one's device; None where that is not known, which anything fits in.
        host: bytes of the host for one.
    """
    budgets: Iterator[tuple[Division, Budget]] = (
        (division, planned(division.sharding(settings, world))) for division in divisions(settings, world)
    )
    before: list[tuple[Division, Budget]] = []
    for division, budget in budgets:
        if budget.fits(device, host):
            break
        before.append((division, budget))
    else:
        return division, f"{division}: nothing fits"
    needs = f"{_gib(budget.device or budget.host)} of {_gib(device if budget.device else host)} GiB"
    refused = "".join(f"; {other} would take {_gib(each.device or each.host)}" for other, each in before[-1:])
    return division, f"{division}: {needs}{refused}"


def least(settings: Any, world: World) -> Sharding:
    """What takes least of the divisions that the settings allow; of any recipe's settings."""
    if world.size == 1 or not hasattr(settings, "reshard_after_forward"):
        return Sharding(1)
    return divisions(settings, world)[-1].sharding(settings, world)


def _gib(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes / GIB:.1f}"


def room(device: torch.device, world: World) -> tuple[int | None, int | None]:
    """Bytes of the device and of the host that this process can have."""
    usable = host_memory().usable // max(1, world.local_size)
    if device.type == "cpu":
        return None, usable
    return total_memory(device), usable

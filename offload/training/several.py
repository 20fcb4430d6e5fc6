"""Settings of several processes, ranked as those of one are: the memory of one of them, and the speed of all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from offload.distributed.world import World
from offload.plan.collectives import System
from offload.plan.prediction import Prediction
from offload.plan.work import Work
from offload.plan.workload import Machine
from offload.training.budgeting import Plan, Planner
from offload.training.dividing import AUTO, least
from offload.training.placement import Room
from offload.training.predicting import Predictor
from offload.training.ranking import Changes


class PlannerOfRanks:
    """Plans one of several processes, divided as its settings say; methods as of :class:`Planner`.

    Args:
        planner: of their settings.
        world: of all processes.
    """

    def __init__(self, planner: Planner, world: World) -> None:
        self._planner, self._world = planner, world

    def plan(self, settings: Any, device: torch.device, dtype: torch.dtype) -> Plan:
        return self._planner.plan(settings, device, dtype, sharding=least(settings, self._world))

    def least(self, settings: Any, device: torch.device, dtype: torch.dtype) -> Plan:
        return self._planner.least(settings, device, dtype, sharding=least(settings, self._world))


class PredictorOfRanks:
    """Predicts several processes; methods as of :class:`Predictor`.

    Args:
        predictor: of their settings.
        system: their cards.
        world: of all processes.
    """

    def __init__(self, predictor: Predictor, system: System, world: World) -> None:
        self._predictor, self._system, self._world = predictor, system, world

    def predict(self, settings: Any, plan: Plan, machine: Machine, dtype: torch.dtype, room: Room) -> Prediction:
        sharding = least(settings, self._world)
        size = self._world.size
        return self._predictor.predict_ranks(settings, plan, self._system, sharding, dtype, room, processes=size)

    def estimate(self, settings: Any, plan: Plan, machine: Machine, dtype: torch.dtype, room: Room) -> float:
        return self.predict(settings, plan, machine, dtype, room).tokens_per_second

    def work(self, settings: Any, plan: Plan, dtype: torch.dtype, *, on_gpu: bool) -> Work:
        return self._predictor.work(settings, plan, dtype, on_gpu=on_gpu)


def exchanges(settings: Any, world: World) -> Iterator[Changes]:
    """What processes may exchange otherwise, a run's own first: weights that are kept for backward or gathered again,
    gradients that are summed in fewer bytes, and of several hosts a replica in each. What a run leaves open is told.

    Args:
        settings: of a distributed recipe.
        world: of all processes.
    """
    kept = () if settings.reshard_after_forward is False else ("reshard_after_forward=False",)
    again = () if settings.reshard_after_forward is True else ("reshard_after_forward=True",)
    narrow = () if settings.reduce_dtype == "bf16" or settings.dtype != "bf16" else ("reduce_dtype=bf16",)
    is_open = settings.reshard_after_forward == AUTO
    own, hosts = settings.data_parallel_replicate_dim, world.hosts
    replicas: list[Changes] = [()] if own != AUTO else []
    replicas += [(f"data_parallel_replicate_dim={each}",) for each in dict.fromkeys((1, hosts)) if each != own]
    for replicated in replicas if hosts > 1 else [()]:
        seen: set[Changes] = set() if not is_open else {(), narrow}
        for changes in ((), kept, again, narrow, (*kept, *narrow), (*again, *narrow)):
            if changes not in seen:
                seen.add(changes)
                yield (*replicated, *changes)

"""What the recipes for several processes share: how the model is divided, and how a checkpoint is made whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from omegaconf import DictConfig

from offload.checkpoints.manager import Loaded
from offload.config.loading import Above, AtLeast
from offload.device import DTYPES
from offload.distributed.sharding import check_shape, find_mesh, keep_gathered, reshard, shard
from offload.distributed.world import current
from offload.errors import UserError
from offload.host_memory import use_of_this_process
from offload.metrics.lines import say
from offload.models.source import check_divisible
from offload.plan.budget import Budget, Sharding
from offload.training.budgeting import Planner
from offload.training.dividing import AUTO, Division, choose, divisions, least, room
from offload.training.finetune import FinetuneRecipe
from offload.training.settings import TrainSettings


@dataclass(kw_only=True)
class DistributedSettings(TrainSettings):
    """What both recipes for several processes read beside the others' keys."""

    reshard_after_forward: bool | int | Literal["auto"] = True
    """give each layer's gathered weights back after its forward and gather them again in backward (True); keep them
    for all micro-batches of a step (False: a third less traffic, or less, the whole model on each device); or keep them
    divided among so many processes; auto: what moves least of what fits, told when the run begins"""
    data_parallel_replicate_dim: Annotated[int, AtLeast(1)] | Literal["auto"] = 1
    """so many replicas of the model, each divided among an equal part of the processes: the number of hosts keeps the
    traffic of weights within each; auto: that where it fits, else 1"""
    reduce_dtype: Literal["fp32", "bf16"] | None = "fp32"
    """in which processes sum gradients; null: in dtype. bf16 moves half the bytes"""
    collective_timeout_minutes: Annotated[float, Above(0)] = 30.0
    """how long processes wait for one that does not move before the run ends and names it; one that is stopped, or
    whose host is gone, is found within two minutes"""


class DistributedFinetuneRecipe(FinetuneRecipe):
    """A model divided among the processes of :attr:`world`, each with a part of every micro-batch."""

    is_distributed: ClassVar[bool] = True
    settings: DistributedSettings
    division: Division | None = None
    """of the model among the processes, once it is divided"""

    @classmethod
    def check(cls, settings: TrainSettings, *, notes: list[str] | None = None) -> tuple[torch.device, torch.dtype, str]:
        assert isinstance(settings, DistributedSettings)
        check_shape(
            current(),
            replicate=settings.data_parallel_replicate_dim,
            reshard_after_forward=settings.reshard_after_forward,
        )
        if current().size > 1:
            check_divisible(settings.model)
        return super().check(settings, notes=notes)

    def setup_run(self) -> Loaded | None:
        if self.world.size == 1:
            say("one process: tune run --nproc_per_node N divides the model among N")
        return super().setup_run()

    @property
    def reads_parts(self) -> bool:
        """Whether each process reads its part of the weights from the files, once the model is divided."""
        return self.world.size > 1 and self.source.can_fill(adapts=self.adapts)

    def __init__(self, settings: DistributedSettings, cfg: DictConfig) -> None:
        super().__init__(settings, cfg)
        self.world.limit_waiting(60 * settings.collective_timeout_minutes)

    @property
    def loading_device(self) -> torch.device:
        """Where a model is put that is whole: one device need not have room for it."""
        return self.device if self.world.size == 1 else torch.device("cpu")

    def keep_weights(self, is_last: bool) -> None:
        """Before a micro-batch: weights that are not given back after forward stay for the next one, if one comes."""
        keep_gathered(self.model, not is_last)

    @property
    def sharding(self) -> Sharding:
        if self.division is None:
            return least(self.settings, self.world)
        return self.division.sharding(self.settings, self.world)

    def divide(self) -> None:
        """Leave each process its part of the model's parameters, on its device; with their values, if it has none."""
        if self.world.size == 1:
            return
        settings, self.division = self.settings, (division := self._division())
        mesh = find_mesh(self.world, self.device, replicate=division.replicate)
        try:
            shard(
                self.model,
                self.parts.blocks(),
                mesh,
                reshard_after_forward=division.resharding,
                reduce_dtype=None if settings.reduce_dtype is None else DTYPES[settings.reduce_dtype],
            )
        except (NotImplementedError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"model: {type(self.model).__name__} cannot be divided among processes by FSDP2: "
                f"{' '.join(str(error).split())}; use a *_single_device recipe"
            ) from error
        if self.reads_parts:
            with self.world.together():
                self.source.fill(self.parts, None if self.adapts else self.resumed_from, self.device)
            self.parts.settle()
            reshard(self.model)

    def _division(self) -> Division:
        """As the settings say; what they leave open, the main process finds out for all."""
        settings = self.settings
        if AUTO not in (settings.reshard_after_forward, settings.data_parallel_replicate_dim):
            return divisions(settings, self.world)[0]
        device, host = room(self.device, self.world)
        least_device, least_host = (
            None if None in rooms else min(rooms) for rooms in zip(*self.world.gathered((device, host)), strict=True)
        )

        def planned(sharding: Sharding) -> Budget:
            return planner.plan(settings, self.device, DTYPES[settings.dtype], sharding=sharding).budget

        planner = Planner(use_of_this_process().resident, adapts=self.adapts)
        division, why = self.world.from_main(
            lambda: choose(settings, self.world, planned, device=least_device, host=least_host)
        )
        say(f"auto: {why}")
        return division

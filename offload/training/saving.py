"""The checkpoints that a run saves: when, at once or beside training, and the last one before a failed run stops."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload.checkpoints import disk_space
from offload.checkpoints.beside import Beside
from offload.checkpoints.manager import CheckpointManager
from offload.checkpoints.manifest import read as read_manifest
from offload.checkpoints.manifest import whole_checkpoints
from offload.config.loading import instantiate
from offload.distributed.world import World
from offload.metrics.lines import say
from offload.models.size import num_elements
from offload.training.optimizer import reserve_snapshot, snapshot_of
from offload.training.settings import TrainSettings

TOLD_AFTER, TOLD_EVERY = 1.0, 15.0
"""Seconds of waiting for a checkpoint after which it is told how far it is, first and then."""


class Saving:
    """Saves the checkpoints of a run, one at a time.

    Args:
        manager: keeps them in the run's folder.
        settings: of the run.
        world: the processes, which save together.
        adapts: an adapter trains, and not the whole model.

    Attributes:
        newest: the last checkpoint that this process saved and that is whole.
        newest_step: optimizer steps that the newest checkpoint of the run holds, one that it began with included.
    """

    def __init__(self, manager: CheckpointManager, settings: TrainSettings, world: World, *, adapts: bool) -> None:
        self._manager = manager
        self._settings = settings
        self._world = world
        self._adapts = adapts
        self._under_way: tuple[Beside, int] | None = None  # what is written beside training, and the steps it holds
        self.newest: Path | None = None
        self.newest_step = 0

    # ---- before training

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """What saving beside training needs before the first step."""
        if not self._settings.enable_async_checkpointing:
            return
        self._apart = self._world.apart()
        if not self._adapts:
            reserve_snapshot(optimizer, self._settings.async_checkpoint_gib)

    def plan_disk(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype,
        *,
        done_steps: int,
        total_steps: int,
        epochs_left: int,
    ) -> None:
        """Say what disk the run will need; UserError where not even one checkpoint fits."""
        settings = self._settings
        only_trained = getattr(settings, "save_adapter_weights_only", False)
        weights = sum(num_elements(p) for p in model.parameters() if p.requires_grad or not only_trained)
        is_foreseeable = str(settings.optimizer["_component_"]).startswith(disk_space.FORESEEABLE)
        states = (
            disk_space.state_bytes(optimizer, lambda named: instantiate(settings.optimizer, named))
            if is_foreseeable
            else None
        )
        count = disk_space.num_saves(
            every=settings.save_every_n_steps, total_steps=total_steps, done_steps=done_steps, epochs_left=epochs_left
        )
        keep = settings.keep_last_n
        if settings.evaluation is not None and settings.evaluation.keep_best:
            count += total_steps // settings.evaluation.every_n_steps  # at most: were each the best so far
            keep = None if keep is None else keep + 1
        present = [sum(read_manifest(path).sizes.values()) for path in whole_checkpoints(self._manager.output_dir)]
        for line in disk_space.plan(
            self._manager.output_dir,
            weights=weights * dtype.itemsize,
            states=states,
            count=count,
            keep=keep,
            present=present,
        ):
            say(line)

    # ---- when

    def is_due(self, step: int, *, ends_epoch: bool) -> bool:
        """Whether ``save_every_n_steps`` asks for a checkpoint after a step: null for one after each epoch."""
        every = self._settings.save_every_n_steps
        return ends_epoch if every is None else step % every == 0

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the best evaluation is kept besides the last ones, and so has to be saved."""
        evaluation = self._settings.evaluation
        return evaluation is not None and evaluation.keep_best

    def keep_best(self, step: int | None) -> None:
        """Protect the checkpoint of the best evaluation, after so many steps, from ``keep_last_n``."""
        if self.keeps_best and step is not None:
            self._manager.best = self._manager.output_dir / f"step_{step}"

    @property
    def best(self) -> Path | None:
        """The checkpoint that is kept besides the last ones."""
        return self._manager.best

    # ---- how

    def write(
        self,
        step: int,
        optimizer: torch.optim.Optimizer,
        *,
        model: Mapping[str, Tensor] | None,
        adapter: Mapping[str, Tensor] | None,
        adapter_config: Mapping[str, Any] | None,
        recipe_state: Mapping[str, Any],
    ) -> Path | Beside:
        """Write a checkpoint, or with ``enable_async_checkpointing`` begin to.

        Args:
            step: optimizer steps done.
            optimizer: whose updates change the model meanwhile.
            model, adapter, adapter_config, recipe_state: as :meth:`CheckpointManager.save` takes them.

        Returns:
            The folder, or what writes it.
        """
        content: dict[str, Any] = {
            "model": model,
            "adapter": adapter,
            "adapter_config": adapter_config,
            "recipe_state": recipe_state,
        }
        if not self._settings.enable_async_checkpointing:
            return self._manager.save(step, **content)
        snapshot = None if self._adapts else snapshot_of(optimizer)
        return self._manager.save_beside(step, snapshot=snapshot, world=self._apart, **content)

    def note(self, saved: Path | Beside, step: int) -> None:
        """Take note of what :meth:`write` gave."""
        if isinstance(saved, Path):
            self.newest, self.newest_step = saved, step
        else:
            self._under_way = saved, step

    def look(self) -> None:
        """Take note of a checkpoint that has become whole beside training.

        Raises:
            UserError: it could not be written.
        """
        if self._under_way is not None and not any(self._world.greatest([not self._under_way[0].is_done])):
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint that is under way is whole, and tell how far it is.

        Raises:
            UserError: it could not be written.
        """
        if self._under_way is None:
            return
        (beside, step), self._under_way = self._under_way, None
        seconds = TOLD_AFTER
        while not beside.wait(seconds):
            done, total = (disk_space.size(nbytes) for nbytes in beside.written)
            say(f"waiting for {beside.final.name}: {done} of {total} are written")
            seconds = TOLD_EVERY
        self.newest, self.newest_step = beside.result(), step

    # ---- before a failed run stops

    def finish_before_stopping(self) -> None:
        """What is being written holds steps that are good, whatever failed since."""
        if self._world.is_broken():
            return  # it needs the others
        try:
            self.finish()
        except Exception as error:
            say(f"a checkpoint could not be written: {error}", stream=sys.stderr)

    @contextlib.contextmanager
    def last(self, step: int) -> Iterator[None]:
        """Around the save of so many steps before a failed run stops: tells what became of it, and raises nothing that
        would hide the failure."""
        try:
            yield
            self.finish()
        except Exception as error:
            say(f"step {step} could not be saved before stopping: {error}", stream=sys.stderr)
            return
        say(
            f"saved {self.newest} before stopping; the same command with output_dir={self._manager.output_dir} "
            "resume_from_checkpoint=True goes on from there",
            stream=sys.stderr,
        )

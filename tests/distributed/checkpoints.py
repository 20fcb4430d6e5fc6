"""A run's checkpoints, saved and loaded on every rank."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from offload.checkpoints import shared_states
from offload.checkpoints.manager import CheckpointManager
from offload.distributed.world import PeerError, current
from offload.engine.copy_on_write import Snapshot
from offload.errors import UserError
from offload.models import shares
from offload.training.resume import check_fields, put_back
from tests.distributed import weights

STATE: dict[str, Any] = {
    "epoch": 0, "step_in_epoch": 2, "global_step": 2, "tokens_seen": 5, "seed": 1, "lr_scheduler": None,
    "random": {}, "config": {"checkpointer": {}},
}  # fmt: skip

STEP_BYTES = 3000
"""In place of 64 MiB, which no test's tensor has: several steps of each rank's part, of no power of two."""


def optimizer_of(model: nn.Module, options: dict[str, Any]) -> OffloadOptimizer:
    return OffloadOptimizer(model.named_parameters(), strategy="stream", lr=1e-2, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """With gradients that do not depend on the number of ranks."""
    for index, param in enumerate(model.parameters()):
        gradient = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * seed + index))
        gradient = gradient.to(param.dtype)
        if hasattr(param, "device_mesh"):
            gradient = torch.distributed.tensor.distribute_tensor(gradient, param.device_mesh, param.placements)
        param.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()


def manager(base: str, model_type: str, out: str) -> CheckpointManager:
    return CheckpointManager(weights.torchtune_format(base, model_type), out)


def saved(
    base: str, model_type: str, component: str, out: str, options: dict[str, Any], replicas: int = 1
) -> dict[str, Tensor]:
    """Two steps, saved; what a third makes of the weights."""
    model = weights.read_torchtune(base, model_type, component, torch.bfloat16, replicas=replicas)
    optimizer = optimizer_of(model, options)
    for seed in range(2):
        step(model, optimizer, seed)
    state = {**STATE, "optimizer": optimizer.state_dict()}
    manager(base, model_type, out).save(2, model=model.state_dict(), recipe_state=state)
    step(model, optimizer, 2)
    return weights.whole_of(model)


def saved_beside(
    base: str,
    model_type: str,
    component: str,
    out: str,
    options: dict[str, Any],
    replicas: int = 1,
    room: int = 1 << 20,
) -> dict[str, Tensor]:
    """The same, written while a third and a fourth step are done: nothing is read before the third wants to update."""
    model = weights.read_torchtune(base, model_type, component, torch.bfloat16, replicas=replicas)
    optimizer = optimizer_of(model, options)
    optimizer.reserve_snapshot(room)
    for seed in range(2):
        step(model, optimizer, seed)
    state = {**STATE, "optimizer": optimizer.state_dict()}
    wanted = threading.Event()
    reading, before_update = Snapshot.reading, Snapshot.before_update

    @contextlib.contextmanager
    def late(self: Snapshot, tensor: Tensor) -> Iterator[Tensor]:
        wanted.wait()
        time.sleep(1e-3)
        with reading(self, tensor) as values:
            yield values

    def noted(self: Snapshot, key: Any) -> None:
        wanted.set()
        before_update(self, key)

    with pytest.MonkeyPatch.context() as patch:
        for module in (shared_states, shares):
            patch.setattr(module, "STEP_BYTES", STEP_BYTES)
        patch.setattr(Snapshot, "reading", late)
        patch.setattr(Snapshot, "before_update", noted)
        beside = manager(base, model_type, out).save_beside(
            2, model=model.state_dict(), recipe_state=state, snapshot=optimizer.snapshot(), world=current().apart()
        )
        step(model, optimizer, 2)
        found = weights.whole_of(model)
        step(model, optimizer, 3)
        beside.result()
    return found


def resumed(
    base: str, model_type: str, component: str, out: str, options: dict[str, Any], replicas: int = 1
) -> dict[str, Tensor]:
    """The weights after the step that follows."""
    found = manager(base, model_type, out).load_newest()
    assert found is not None
    folder, loaded = found
    check_fields(loaded.recipe_state, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "STEP_BYTES", STEP_BYTES)
        model = weights.read_torchtune(
            base, model_type, component, torch.bfloat16, replicas=replicas, checkpoint=folder
        )
    optimizer = optimizer_of(model, options)
    put_back(loaded.recipe_state, optimizer, None, folder)
    step(model, optimizer, loaded.step)
    return weights.whole_of(model)


def saved_while_a_disk_fails(
    base: str, model_type: str, component: str, out: str, failing: int, beside: bool = False
) -> tuple[str, bool]:
    """What is said where one rank cannot write, and whether the run stops here as for what a user can mend."""
    model = weights.read_torchtune(base, model_type, component, torch.bfloat16)
    optimizer = optimizer_of(model, {})
    step(model, optimizer, 0)
    state = {**STATE, "optimizer": optimizer.state_dict()}
    run = manager(base, model_type, out)
    run.save(1, model=model.state_dict(), recipe_state=state)
    apart = current().apart()
    optimizer.reserve_snapshot(1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == failing:

            def fail(*args: Any) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(os, "pwrite", fail)
        try:
            if beside:
                snapshot = optimizer.snapshot()
                writer = run.save_beside(
                    2, model=model.state_dict(), recipe_state=state, snapshot=snapshot, world=apart
                )
                step(model, optimizer, 1)
                writer.result()
            else:
                run.save(2, model=model.state_dict(), recipe_state=state)
        except UserError as error:
            return str(error), True
        except PeerError as error:
            return "", error.status == 2
    return "", False

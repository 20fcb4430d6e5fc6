"""States that have files of their own: what a rank reads of them, what it lets go of, what is said where it fails."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from offload.checkpoints import shared_states
from offload.checkpoints.shared_states import SavedStates
from offload.distributed.world import World
from offload.engine.copy_on_write import Unchanging
from offload.engine.shards import empty_as, is_distributed, local
from offload.optim.formats import BLOCK

ROWS, COLUMNS = 4, 2 * BLOCK


class _Like:
    """What a parameter is laid out as."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.device_mesh, self.placements = mesh, (Shard(0),)


def test_a_rank_reads_its_part_of_what_is_cut_as_its_parameter_is_and_the_whole_of_the_rest(
    tmp_path: Path, mesh_of_two: DeviceMesh
) -> None:
    """As one process writes them: scales have one dimension, and a norm's codes have scales over all of it."""
    codes = torch.arange(ROWS * COLUMNS).to(torch.int8)
    scales = torch.arange(ROWS * COLUMNS // BLOCK).float()
    moments = torch.randn(ROWS, 3)
    saved = {
        "0/exp_avg": codes.view(ROWS, COLUMNS), "0/exp_avg_scale": scales,
        "1/exp_avg": codes[:COLUMNS].clone(), "1/exp_avg_scale": scales[:2].clone(),
        "2/exp_avg": moments,
    }  # fmt: skip
    shared_states.write_from(tmp_path, saved, Unchanging(), World())
    like = _Like(mesh_of_two)
    shapes = [(ROWS, COLUMNS), (COLUMNS,), (ROWS, 3)]
    states = SavedStates(tmp_path, {index: {} for index in range(3)})
    states.params = [empty_as(like, shape, torch.bfloat16) for shape in shapes]
    read = {f"{index}/{key}": value for index in states for key, value in states[index].items()}
    assert [name for name, value in read.items() if is_distributed(value)] == ["0/exp_avg", "2/exp_avg"]
    for name, value in read.items():
        want = saved[name][: ROWS // 2] if is_distributed(value) else saved[name]
        assert torch.equal(local(value), want), name


class _Noting(Unchanging):
    """Of two tensors; reading the second fails."""

    def __init__(self, fails_at: Tensor) -> None:
        self.fails_at = fails_at
        self.let_go: list[Tensor] = []

    @contextlib.contextmanager
    def reading(self, tensor: Tensor) -> Iterator[Tensor]:
        if tensor.data_ptr() == self.fails_at.data_ptr():
            raise OSError(errno.ENOSPC, "No space left on device")
        yield tensor

    def done(self, tensor: Tensor) -> None:
        self.let_go.append(tensor)


def test_what_another_rank_writes_is_let_go_of_before_anything_is_written() -> None:
    """Updates would keep a copy of it, for nobody."""
    mine, anothers = torch.ones(4), torch.zeros(4)
    source = _Noting(fails_at=anothers)
    planner = shared_states._StepByStep(source)
    planner.set_up_planner({"0/exp_avg": mine, "1/exp_avg": anothers})
    plan = planner.create_local_plan()
    planner.finish_plan(dataclasses.replace(plan, items=[each for each in plan.items if each.index.fqn == "0/exp_avg"]))
    assert len(source.let_go) == 1 and source.let_go[0] is anothers


def test_what_went_wrong_is_raised_as_itself(tmp_path: Path) -> None:
    """Who saves tells of a full disk by it; torch's CheckpointException is a BaseException."""
    tensors = {"0/exp_avg": torch.ones(4), "1/exp_avg": torch.zeros(4)}
    source = _Noting(fails_at=tensors["1/exp_avg"])
    with pytest.raises(OSError, match="No space left on device"):
        shared_states.write_from(tmp_path, tensors, source, World())
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        shared_states.write_from(tmp_path / "file", tensors, Unchanging(), World())

"""The mesh of a run's processes, and which weights stay gathered: one rank of two, whose collectives do nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from offload.distributed.sharding import _backward_needs_no_weights, find_mesh, groups, keep_gathered, shard
from offload.distributed.world import World

CPU = torch.device("cpu")


def test_replicas_come_before_what_divides_each(mesh_of_two: DeviceMesh) -> None:
    world = World(0, 2, 0, 2)
    whole, replicas = find_mesh(world, CPU), find_mesh(world, CPU, replicate=2)
    assert (whole.mesh_dim_names, whole.shape) == (("shard",), (2,))
    assert (replicas.mesh_dim_names, replicas.shape) == (("replicate", "shard"), (2, 1))


def test_only_a_plain_embeddings_backward_needs_no_weights() -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * self.weight.mean()

    assert _backward_needs_no_weights(nn.Embedding(4, 2))
    assert not _backward_needs_no_weights(nn.Embedding(4, 2, max_norm=1.0))  # which scales the weights in forward
    assert not _backward_needs_no_weights(Scaled(4, 2))
    assert not _backward_needs_no_weights(nn.Linear(4, 2))


def test_weights_are_kept_for_the_next_micro_batch_where_forward_keeps_them(mesh_of_two: DeviceMesh) -> None:
    def kept(model: nn.Module) -> list[bool]:
        states: list[Any] = [group._get_fsdp_state() for group in groups(model)]
        several = [
            each._fsdp_param_groups if hasattr(each, "_fsdp_param_groups") else [each._fsdp_param_group]
            for each in states
        ]  # since torch 2.13
        return [not each.reshard_after_backward for found in several for each in found]

    for resharding, layers in ((False, True), (True, False)):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        shard(model, [model[0]], mesh_of_two, reshard_after_forward=resharding)
        keep_gathered(model, True)
        assert kept(model) == [True, layers]
        keep_gathered(model, False)
        assert kept(model) == [False, False]

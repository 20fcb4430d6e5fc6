"""A model's parameters over the processes of a run: FSDP2's ``fully_shard``, a layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from offload.distributed.world import World
from offload.errors import UserError


def check_shape(world: World, *, replicate: int | str = 1, reshard_after_forward: bool | int | str = True) -> None:
    """Refuse replicas, and a number of processes to reshard among, that do not divide the processes, where there are
    several; ``auto`` is neither.

    Raises:
        UserError: names the key.
    """
    if world.size == 1:
        return
    if isinstance(replicate, str):
        replicate = 1
    if world.size % replicate:
        divisors = ", ".join(str(n) for n in range(1, world.size + 1) if world.size % n == 0)
        raise UserError(
            f"data_parallel_replicate_dim: got {replicate}, expected a divisor of the {world.size} processes: "
            f"{divisors}"
        )
    processes = world.size // replicate
    if isinstance(reshard_after_forward, bool | str):
        return
    if not 1 < reshard_after_forward < processes or processes % reshard_after_forward:
        raise UserError(
            f"reshard_after_forward: got {reshard_after_forward}, expected True, False, or a number that divides the "
            f"{processes} processes of a model, above 1 and below {processes}"
        )


def find_mesh(world: World, device: torch.device, *, replicate: int = 1) -> DeviceMesh:
    """The mesh of all processes: one dimension, ``shard``; or with replicas two, ``replicate`` and ``shard``.

    Args:
        world: of more than one process.
        device: that trains.
        replicate: how many times the model is there, a divisor of the processes; each replica is divided among its part
            of them.
    """
    if replicate == 1:
        return init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    shape = (replicate, world.size // replicate)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool | int = True,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Divide a model's parameters among the processes, and sum gradients over them (without dividing).

    Parameters become DTensors over ``mesh``. Those of a block are gathered together when it runs, those that are in no
    block with the model, for the whole of a step: the head, and an embedding that is tied to it.

    Args:
        model: whole on each process, on any device; what is divided moves to the mesh's device. Activation
            checkpointing and compilation of its layers come before.
        blocks: parts of ``model``, see :meth:`offload.models.protocol.CausalLM.blocks`.
        mesh: of one dimension, or of two: replicas, and processes of each.
        reshard_after_forward: give a block's gathered weights back after its forward, and gather them again in
            backward, but for an embedding's; False keeps them from the first forward of a step to its last backward; a
            number keeps them divided among so many processes.
        reduce_dtype: in which gradients are summed; None for their own.
    """
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype)}
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
        if _backward_needs_no_weights(block):
            block.set_unshard_in_backward(False)
    fully_shard(model, reshard_after_forward=False, **options)  # what FSDP2 comes to by itself, in the first forward
    for module in groups(model):
        # The loss is divided by the labels of all processes, so gradients are summed.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _backward_needs_no_weights(block: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether a block's gradient follows from what goes in alone: an embedding's, which comes from its tokens."""
    return isinstance(block, nn.Embedding) and type(block).forward is nn.Embedding.forward and block.max_norm is None


def groups(model: nn.Module) -> Iterator[FSDPModule]:
    """The parts of a model whose parameters are gathered together."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Give back gathered weights that a forward without a backward has left."""
    for module in groups(model):
        module.reshard()


def keep_gathered(model: nn.Module, keeps: bool) -> None:
    """Whether weights that a forward keeps for backward stay gathered after it too, for the next micro-batch.

    A model that is not divided has none.
    """
    for module in groups(model):
        if not _reshards_after_forward(module):
            module.set_reshard_after_backward(not keeps, recurse=False)


def _reshards_after_forward(module: FSDPModule) -> bool:
    state: Any = module._get_fsdp_state()
    several = hasattr(state, "_fsdp_param_groups")  # since torch 2.13
    found = state._fsdp_param_groups if several else [state._fsdp_param_group]
    return any(group._reshard_after_forward for group in found if group is not None)

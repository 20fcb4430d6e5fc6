"""States of shards are DTensors: torch.distributed.checkpoint saves them, and loads them on any number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import offload.optim
from offload import OffloadOptimizer
from tests.distributed.ranks import Ranks
from tests.distributed.training import Case, Llama, device, differing, made, optimizer_of, sharded, train

PACKED = "offload.optim.AdamW"
SPLIT24 = (("state_dtype", "int8"), ("master", "split24"))
DIM = 256
"""Rows of whole blocks, so that moments are 8-bit codes."""


def llama() -> Any:
    return sharded(Llama(DIM, 1)).bfloat16()


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def everything(model: nn.Module, optimizer: OffloadOptimizer) -> list[Tensor]:
    """Parameters and states, whole."""
    states = optimizer.state_dict()["state"]
    values = [value for _, state in sorted(states.items()) for _, value in sorted(state.items())]
    return [whole(value).clone() for value in [*(p.detach() for p in model.parameters()), *values]]


def trained_and_saved(folder: str, case: Case, kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Train, save, go on; everything at both times."""
    with device(kind):
        model = made(llama)
        optimizer = optimizer_of(case, model)
        train(case, model, optimizer, 2, same=True)
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
        saved = everything(model, optimizer)
        with_one_more_step(model, optimizer)
        return saved, everything(model, optimizer)


def with_one_more_step(model: nn.Module, optimizer: OffloadOptimizer) -> None:
    """With gradients that do not depend on the number of ranks, as sums over ranks would."""
    for index, param in enumerate(model.parameters()):
        gradient = torch.randn(param.shape, generator=torch.Generator().manual_seed(index), dtype=param.dtype)
        param.grad = torch.distributed.tensor.distribute_tensor(gradient, param.device_mesh, param.placements)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()


def loaded(folder: str, case: Case, kind: str) -> tuple[list[Tensor], list[Tensor]]:
    with device(kind):
        model = made(llama, seed=1)
        optimizer = optimizer_of(case, model)
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
        optimizer.sync_from_model()
        saved = everything(model, optimizer)
        with_one_more_step(model, optimizer)
        return saved, everything(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "saver", "loader"),
    [
        ("cpu", Case("resident", options=(("fused", True),)), Case("stream", options=(("fused", True),))),
        ("threaded", Case("stream", base=PACKED, options=SPLIT24), Case("stream", base=PACKED, options=SPLIT24)),
        ("threaded", Case("host", base=PACKED), Case("stream", base=PACKED)),
    ],
    ids=["AdamW", "int8 split24", "int8 split"],
)
@pytest.mark.parametrize("counts", [(1,), pytest.param((3, 4), marks=pytest.mark.slow)], ids=str)
def test_resumed_on_another_number_of_ranks(
    ranks: Ranks, tmp_path: Path, counts: tuple[int, ...], kind: str, saver: Case, loader: Case
) -> None:
    want = ranks.run(2, trained_and_saved, str(tmp_path / "saved"), saver, kind)[0]
    for count in counts:
        for got in ranks.run(count, loaded, str(tmp_path / "saved"), loader, kind):
            assert differing(got[0], want[0]) == ""
            assert differing(got[1], want[1]) == ""


def gradients(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(param.shape, generator=generator).to(param.dtype) for param in model.parameters()]


def stepped_from(state: dict[str, Any], params: list[Tensor], case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    """Parameters and state of another step, whole, from those of an optimizer over plain parameters."""
    model = made(llama, seed=1)
    shards = list(model.parameters())
    for shard, param in zip(shards, params, strict=True):
        shard.data.copy_(distribute_tensor(param, shard.device_mesh, shard.placements))
    optimizer = optimizer_of(case, model)
    optimizer.load_state_dict(state)
    for shard, gradient in zip(shards, gradients(model), strict=True):
        shard.grad = distribute_tensor(gradient, shard.device_mesh, shard.placements)
    optimizer.step()
    by_torch = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    saved = optimizer.state_dict()
    saved["state"] = {
        index: {key: whole(value) for key, value in state.items()} for index, state in saved["state"].items()
    }
    if torch.distributed.get_rank() == 0:
        names = [name for name, _ in model.named_parameters()]
        assert by_torch["state"].keys() == set(names)
        for name, kept in zip(names, saved["state"].values(), strict=True):
            assert all(torch.equal(by_torch["state"][name][key], value) for key, value in kept.items())
    return [whole(shard.detach()) for shard in shards], saved


@pytest.mark.parametrize(
    "options", [(), (("state_dtype", "bf16"), ("master", "stochastic")), (("master", "split24"),)], ids=str
)
def test_states_move_from_one_device_to_ranks_and_back(ranks: Ranks, options: Any) -> None:
    """As whole tensors, such as those of a checkpoint in one file."""
    case = Case("stream", base=PACKED, options=options)
    model = made(lambda: Llama(DIM, 1).bfloat16())
    alone = offload.optim.AdamW(model.named_parameters(), lr=1e-2, **dict(options))
    params = list(model.parameters())
    states = []
    for _ in range(2):
        states.append((copy.deepcopy(alone.state_dict()), [param.detach().clone() for param in params]))
        for param, gradient in zip(params, gradients(model), strict=True):
            param.grad = gradient
        alone.step()
    ((stepped, saved), _) = ranks.run(2, stepped_from, *states[1], case)
    again = [nn.Parameter(value) for value in stepped]
    optimizer = offload.optim.AdamW(again, **dict(options))
    optimizer.load_state_dict(saved)
    is_coded = dict(options).get("state_dtype", "int8") == "int8"
    compared = 0
    for param, got in zip(params, again, strict=True):
        kept, loaded = alone.state[param], optimizer.state[got]
        assert loaded.keys() == kept.keys()
        if param.dim() == 2 or not is_coded:  # else the moments were decoded on the way
            compared += 1
            assert torch.equal(got, param)
            assert [key for key in kept if not torch.equal(loaded[key], kept[key])] == []
    assert compared > 5

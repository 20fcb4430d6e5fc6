"""States of shards are DTensors: torch.distributed.checkpoint saves them, and loads them on any number of ranks."""

from __future__ import annotations

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
from torch.distributed.tensor import DTensor

from offload import OffloadOptimizer
from tests.distributed.ranks import Ranks
from tests.distributed.training import Case, Llama, device, differing, made, optimizer_of, parts, sharded, train

PACKED = "offload.optim.AdamW"
SPLIT24 = (("state_dtype", "int8"), ("master", "split24"))
DIM = 256
"""Rows of whole blocks, so that moments are 8-bit codes."""


def llama() -> Any:
    return sharded(Llama(DIM, 1)).bfloat16()


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.to(torch.int32).full_tensor() if value.dtype == torch.int16 else value.full_tensor()
    return value


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


def full_state(case: Case) -> tuple[dict[str, Any], list[Tensor]]:
    """A state whose tensors are whole, as for a single file."""
    model = made(llama)
    optimizer = optimizer_of(case, model)
    train(case, model, optimizer, 2, same=True)
    options = StateDictOptions(full_state_dict=True)
    return get_optimizer_state_dict(model, optimizer, options=options), everything(model, optimizer)


def loaded_whole(state: dict[str, Any], case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """A state of plain parameters, taken over by shards."""
    model = made(llama)
    optimizer = optimizer_of(case, model)
    optimizer.load_state_dict(state)
    return parts(optimizer.state_dict()["state"][0].values()), everything(model, optimizer)

"""The packed AdamW over shards: random bits and scales belong to an element's place in the whole parameter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import offload.optim
from offload import OffloadOptimizer
from offload.optim.formats import MASTERS, STATE_DTYPES
from tests.distributed.ranks import Ranks
from tests.distributed.training import device

SHAPES = {"aligned": (7, 256), "stacked": (5, 3, 512), "one row": (1, 256), "odd": (5, 7), "vector": (301,)}
ALIGNED = ("aligned", "stacked", "one row")
STEPS = 3
FORMATS = list(itertools.product(STATE_DTYPES, MASTERS))


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def trained_plain(state_dtype: str, master: str) -> dict[str, Tensor]:
    params = {name: nn.Parameter(value) for name, value in tensors(0).items()}
    optimizer = offload.optim.AdamW(params.values(), lr=1e-2, state_dtype=state_dtype, master=master)  # type: ignore[arg-type]
    for step in range(STEPS):
        for name, gradient in tensors(step + 1).items():
            params[name].grad = gradient
        optimizer.step()
    found = {name: param.detach() for name, param in params.items()}
    for name, param in params.items():
        found |= {f"{key}/{name}": value for key, value in optimizer.state[param].items()}
    return found


def trained(kind: str, strategy: str, state_dtype: str, master: str) -> dict[str, Tensor]:
    """Parameters and states after some steps, whole; scales in the order in which they lie in a plain state."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    with device(kind):
        params = {n: nn.Parameter(distribute_tensor(v, mesh, [Shard(0)])) for n, v in tensors(0).items()}
        optimizer = OffloadOptimizer(
            list(params.items())[:3],
            "offload.optim.AdamW",
            strategy=strategy,  # type: ignore[arg-type]
            lr=1e-2,
            state_dtype=state_dtype,
            master=master,
        )
        optimizer.add_param_group({"params": list(params.items())[3:]})
        for step in range(STEPS):
            for name, gradient in tensors(step + 1).items():
                params[name].grad = distribute_tensor(gradient, mesh, [Shard(0)])
            optimizer.step()
        states = optimizer.state_dict()["state"]
    found: dict[str, Any] = {name: param.detach() for name, param in params.items()}
    for name, state in zip(params, states.values(), strict=True):
        found |= {f"{key}/{name}": value for key, value in state.items()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    whole = {name: value.flatten() if "_scale" in name else value for name, value in whole.items()}
    return {n: v.view(torch.int16).squeeze(-1) if v.shape[-1:] == (2,) else v for n, v in whole.items()}


def all_trained(kind: str, strategy: str) -> dict[tuple[str, str], dict[str, Tensor]]:
    return {each: trained(kind, strategy, *each) for each in FORMATS}


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> Any:
    return ranks.run(1, all_trained, "cpu", "resident")[0]


def test_one_rank_equals_no_ranks(alone: Any) -> None:
    for (state_dtype, master), found in alone.items():
        for name, want in trained_plain(state_dtype, master).items():
            if state_dtype != "int8" or name.rpartition("/")[2] in ALIGNED:
                assert torch.equal(found[name], want), (state_dtype, master, name)
            elif "exp_avg" in name:
                assert found.get(name, torch.empty(0)).dtype == torch.float32  # and no scales


SAMPLED = [("threaded", "stream", 2), ("threaded", "host", 2)]
PRODUCT = itertools.product(("cpu", "threaded", "simulated"), ("resident", "stream", "host"), (2, 3, 4))
OTHERS = [each for each in PRODUCT if each not in SAMPLED and (each[0] == "cpu" or each[1] != "resident")]


@pytest.mark.parametrize(
    ("kind", "strategy", "count"), [*SAMPLED, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_any_number_of_ranks_gives_the_same_bits(
    ranks: Ranks, alone: Any, kind: str, strategy: str, count: int
) -> None:
    for found in ranks.run(count, all_trained, kind, strategy):
        for each, want in alone.items():
            assert found[each].keys() == want.keys()
            unequal = [name for name, value in want.items() if not torch.equal(found[each][name], value)]
            assert unequal == [], each

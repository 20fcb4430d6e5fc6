"""Memory of one of several ranks: the planner's count against FSDP2 and the engine on the simulated allocator."""

from __future__ import annotations

import json
from typing import Any, cast

import memory_per_rank
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from offload.distributed.sharding import shard
from offload.distributed.world import World
from offload.plan.budget import DEVICE, Budget, Item, Sharding
from offload.plan.collectives import SYSTEMS
from offload.plan.distributed import Plan, _alone_of, replay_engine
from offload.plan.workload import LLAMA2_7B
from offload.training.budgeting import Planner
from offload.training.dividing import Division, choose, divisions, least
from tests.plan.test_budget import gib, planned

GIB = 2**30


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(0, adapts=False)


MORE = 1.3
"""GiB that the planner may count too much: its fullest moments of forward and backward are taken together."""


@pytest.mark.parametrize(
    ("ranks", "resharding", "reduce_dtype"),
    [(2, True, torch.float32), (8, True, torch.bfloat16), (8, False, torch.bfloat16)],
    ids=str,
)
def test_the_card_of_a_rank(planner: Planner, ranks: int, resharding: bool, reduce_dtype: torch.dtype) -> None:
    words = ("batch_size=1", "tokenizer.max_seq_len=4096", "optimizer.update_in_backward=True")
    sharding = Sharding(ranks, resharding, reduce_itemsize=reduce_dtype.itemsize)
    plan = planned(planner, "llama2_7b_offload", *words, "optimizer.strategy=stream", sharding=sharding)
    replayed = replay_engine(
        Plan(SYSTEMS["rtx4090"], ranks, LLAMA2_7B, resharding, reduce_dtype), strategy="stream", update_in_backward=True
    )
    beside = gib(plan, "slack of PyTorch's allocator") + gib(plan, "CUDA context")
    counted = plan.budget.of(DEVICE) / GIB - beside
    assert 0 <= counted - replayed.steady.allocated / GIB <= MORE


class _Adapted(nn.Linear):
    """A frozen layer, and two small matrices beside it that train."""

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__(dim, dim, bias=False)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + cast("torch.Tensor", self.up(self.down(input)))


def test_fsdp_reduces_what_trains_and_so_a_plan_of_an_adapter_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[int] = []
    reduce = _fsdp_param_group.foreach_reduce

    def noted(params: Any, grads: list[torch.Tensor], *args: Any, **options: Any) -> Any:
        reduced.append(sum(grad.numel() for grad in grads))
        return reduce(params, grads, *args, **options)

    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", noted)
    with _alone_of(4):
        layers = [_Adapted(32, 2) for _ in range(3)]
        model = nn.Sequential(*layers, nn.Linear(32, 8, bias=False).requires_grad_(False))
        shard(model, layers, init_device_mesh("cpu", (4,)))
        model(torch.ones(1, 32)).sum().backward()
    assert reduced == [2 * 2 * 32] * 3
    lora, several = Planner(0, adapts=True), Sharding(8, reduce_itemsize=4)
    plan = planned(lora, "llama2_7b_lora", sharding=several)
    layer = 8 * (2 * 4096 * 3 + 3 * (4096 + 11008))  # of rank 8: three projections of attention, three of the MLP
    assert gib(plan, "gradients, to be reduced") * GIB == 3 * 2 * layer
    full = planned(Planner(0, adapts=False), "llama2_7b_offload", sharding=several)
    layer_and_head = 2 * 4096 * (32000 + 2 * 49408)
    assert gib(full, "weights, gathered") * GIB == pytest.approx(layer_and_head, rel=0.01)
    assert gib(plan, "weights, gathered") * GIB == pytest.approx(layer_and_head + 2 * 2 * layer, rel=0.01)


# What is left to the machine


class Choice:
    """Settings of a distributed recipe."""

    dtype, reduce_dtype = "bf16", "fp32"

    def __init__(self, resharding: object = "auto", replicas: object = "auto") -> None:
        self.reshard_after_forward, self.data_parallel_replicate_dim = resharding, replicas


ONE_HOST, TWO_HOSTS = World(0, 4, 0, 4), World(0, 8, 0, 4)


def taking(sharding: Sharding) -> Budget:
    """80 GiB of weights: a rank's part, what is kept of it for backward, and as much again for all else."""
    kept = 80 if sharding.resharding is False else 0 if sharding.resharding is True else 80 // sharding.resharding
    return Budget((Item(DEVICE, "", (2 * 80 // sharding.ranks + kept) * GIB),))


@pytest.mark.parametrize(
    ("world", "room", "expected"),
    [
        (ONE_HOST, None, Division(1, False)),
        (ONE_HOST, 120, Division(1, False)),  # 40 and 80
        (ONE_HOST, 119, Division(1, True)),
        (ONE_HOST, 1, Division(1, True)),  # the least, though it does not fit
        (TWO_HOSTS, 120, Division(2, False)),
        (TWO_HOSTS, 119, Division(2, True)),  # 40
        (TWO_HOSTS, 39, Division(1, True)),  # 20; with what a host keeps 40
        (TWO_HOSTS, 20, Division(1, True)),
    ],
)
def test_of_what_fits_what_moves_least(world: World, room: int | None, expected: Division) -> None:
    division, why = choose(Choice(), world, taking, device=None if room is None else room * GIB, host=None)
    assert division == expected
    assert str(division) in why


def test_weights_kept_among_the_cards_of_a_host() -> None:
    division, why = choose(Choice(replicas=1), TWO_HOSTS, taking, device=40 * GIB, host=None)
    assert division == Division(1, 4)  # 20 and 20
    assert why == (
        "weights kept divided among 4 from forward to backward: 40.0 of 40.0 GiB; weights kept from forward to "
        "backward would take 100.0"
    )


def test_of_what_did_not_fit_the_nearest_is_told() -> None:
    division, why = choose(Choice(replicas=1), TWO_HOSTS, taking, device=20 * GIB, host=None)
    assert division == Division(1, True)
    assert why.endswith("; weights kept divided among 4 from forward to backward would take 40.0")


@pytest.mark.parametrize("world", [World(0, 4, 0, 1), World(0, 6, 0, 4)], ids=["one to a host", "unequal hosts"])
def test_processes_that_do_not_divide_into_hosts_keep_all_or_nothing(world: World) -> None:
    assert divisions(Choice(replicas=1), world) == [Division(1, False), Division(1, True)]


def test_what_is_set_is_kept() -> None:
    for room in (1, 1000):
        division, _ = choose(Choice(False, 1), TWO_HOSTS, taking, device=room * GIB, host=None)
        assert division == Division(1, False)
    assert least(Choice(), TWO_HOSTS).ranks == 8
    assert least(object(), World()).ranks == 1


# The page's table


def test_docs_have_the_recorded_table() -> None:
    record = json.loads(memory_per_rank.RECORD.read_text(encoding="utf-8"))
    table = memory_per_rank.BEGIN + memory_per_rank.table(record) + memory_per_rank.END
    assert table in memory_per_rank.DISTRIBUTED.read_text(encoding="utf-8")


def test_the_record_is_what_is_planned(planner: Planner) -> None:
    record = json.loads(memory_per_rank.RECORD.read_text(encoding="utf-8"))
    (row,) = [row for row in record["rows"] if (row["config"], row["ranks"]) == ("llama2_7b_offload", 8)]
    plan = planned(planner, "llama2_7b_offload_distributed", sharding=Sharding(8, reduce_itemsize=4))
    assert plan.budget.device / GIB == pytest.approx(row["gpu_gib"], abs=0.1)

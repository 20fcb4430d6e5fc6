"""How a model is divided: what each process's memory follows from, and the room that it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.distributed.world import World
from offload.plan.budget import DEVICE, HOST, Budget, Item, Sharding
from offload.training import dividing
from offload.training.dividing import Division, choose

WORLD = World(0, 8, 0, 4)
GIB = 2**30


def settings(**more: Any) -> Any:
    given = {"dtype": "bf16", "reduce_dtype": None, "data_parallel_replicate_dim": 1, "reshard_after_forward": "auto"}
    return SimpleNamespace(**{**given, **more})


@pytest.mark.parametrize(("reduce_dtype", "itemsize"), [(None, 2), ("fp32", 4), ("bf16", 2)])
def test_gradients_are_summed_in_their_own_dtype_or_in_the_one_that_is_set(
    reduce_dtype: str | None, itemsize: int
) -> None:
    found = Division(2, 4).sharding(settings(reduce_dtype=reduce_dtype), WORLD)
    assert found == Sharding(4, 4, reduce_itemsize=itemsize, itemsize=2)


@pytest.mark.parametrize(
    ("device", "host", "resharding", "said"),
    [
        (None, 40 * GIB, False, "weights kept from forward to backward: 30.0 of ? GiB"),
        (30 * GIB, None, False, "weights kept from forward to backward: 30.0 of 30.0 GiB"),
        (30 * GIB, 39 * GIB, True, "gathered again for backward: 10.0 of 30.0 GiB"),
        (29 * GIB, 40 * GIB, True, "gathered again for backward: 10.0 of 29.0 GiB"),
        (9 * GIB, 40 * GIB, True, "weights gathered again for backward: nothing fits"),
    ],
)
def test_it_has_to_fit_the_device_and_the_host(
    device: int | None, host: int | None, resharding: bool, said: str
) -> None:
    def planned(sharding: Sharding) -> Budget:
        device, host = (30, 40) if sharding.resharding is False else (10, 20)
        return Budget((Item(DEVICE, "all", device * GIB), Item(HOST, "all", host * GIB)))

    found, why = choose(settings(), World(0, 4, 0, 4), planned, device=device, host=host)
    assert found == Division(1, resharding) and said in why
    assert ("; weights kept from forward to backward would take 30.0" in why) is (resharding and "fits" not in why)


def test_processes_share_their_hosts_memory_and_have_a_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "host_memory", lambda: SimpleNamespace(usable=400))
    monkeypatch.setattr(dividing, "total_memory", lambda device: 80)
    assert dividing.room(torch.device("cuda"), WORLD) == (80, 100)
    assert dividing.room(torch.device("cpu"), WORLD) == (None, 100)

"""offload.training.hindsight: what the planner says of a run, beside what the run measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from offload.cli import registry
from offload.cli.validate import recipe_class
from offload.distributed import network
from offload.distributed.world import World
from offload.plan.budget import Sharding
from offload.plan.prediction import COMPUTE, UP
from offload.plan.workload import MACHINES
from offload.training import hindsight, predicting
from offload.training.advice import settings_of_file
from offload.training.hindsight import Expected, expect

MEASURED = {"steps": 100, "tokens_per_second": 4000.0, "device_peak_reserved_gib": 20.0, "host_rss_peak_gib": 30.0,
            "seconds_optimizer": 25.0}  # fmt: skip


def test_predicted_and_measured_side_by_side() -> None:
    expected = Expected(21.0, 27.0, 4400.0, 0.5, UP)
    assert expected.lines(MEASURED) == [
        ("predicted", "21.00 GiB reserved of the device, measured 20.00 (+5%); 27.00 GiB of the host, measured 30.00 "
                      "(-10%); 4,400 tok/s, measured 4,000 (+10%)"),
        ("exposed", f"0.50 s of each step, in which the device waits for: {UP} (predicted); 0.25 s of each in the "
                    "optimizer's step (measured)"),
    ]  # fmt: skip
    assert expected.values() == {
        "predicted_device_peak_reserved_gib": 21.0,
        "predicted_host_rss_peak_gib": 27.0,
        "predicted_tokens_per_second": 4400.0,
        "predicted_exposed_seconds": 0.5,
    }


def test_what_is_not_known_is_left_out() -> None:
    expected = Expected(None, 27.0)
    assert expected.lines({}) == [("predicted", "27.00 GiB of the host")]
    assert expected.values() == {"predicted_host_rss_peak_gib": 27.0}
    hidden = Expected(None, 27.0, 4000.0, 0.0, COMPUTE)
    assert hidden.lines(MEASURED)[1][1].startswith("nothing: the optimizer is hidden (predicted)")


def test_several_processes_are_compared_with_the_speed_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.tiny import register_resolvers

    register_resolvers()
    kind = recipe_class(registry.find_recipe("full_finetune_distributed"))
    words = ["checkpointer.checkpoint_dir=/nowhere", "dtype=bf16", "model.embed_dim=512"]
    settings = settings_of_file(kind, registry.our_configs()["tiny_llama_offload_distributed"], words)(())
    machine = replace(MACHINES["rtx4090"], launch=0.0)
    monkeypatch.setattr(predicting, "machine_here", lambda device, fp32, cards=1: (machine, "told by a test"))
    monkeypatch.setattr(hindsight, "total_memory", lambda device: 24 * 2**30)
    told: list[float | None] = [None]
    monkeypatch.setattr(network, "speed", lambda: told[0])

    def of(world: World) -> Expected:
        common: Any = {"adapts": False, "memory_before": 0, "tokens_per_sequence": 100.0}
        sharding = Sharding(world.size)
        return expect(settings, torch.device("cuda"), torch.bfloat16, sharding=sharding, world=world, **common)

    speeds = [of(World(0, size, 0, size)).tokens_per_second for size in (1, 2)]
    assert speeds[0] is not None and speeds[1] is not None and 0 < speeds[1] < 2 * speeds[0]

    two_hosts = World(0, 4, 0, 2)
    assert of(two_hosts).tokens_per_second is None
    assert (
        of(two_hosts)
        .lines(MEASURED)[0][1]
        .endswith("; no speed, since nothing here tells that of the network between the hosts")
    )
    found = []
    for gbits in (1, 100):
        told[0] = gbits * 1e9 / 8
        found.append(of(two_hosts))
        assert found[-1].lines(MEASURED)[0][1].endswith(f"); with {gbits} Gbit/s between the hosts")
    slow, fast = (each.tokens_per_second for each in found)
    assert slow is not None and fast is not None and 0 < 2 * slow < fast
    assert found[1].host_gib == of(two_hosts).host_gib

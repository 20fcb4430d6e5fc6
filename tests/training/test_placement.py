"""What strategy ``auto`` comes to, as a plan tells it: the budget with its states; and what it goes by on a machine."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from offload.cli.main import main
from offload.config.loading import instantiate
from offload.metrics import this_machine
from offload.placing import Speeds
from offload.plan.budget import DEVICE, HOST, IN_FLIGHT, LOCKED, STATES, Budget, Item
from offload.plan.prediction import Prediction, Settings, share_of_cpu
from offload.plan.profile import Profile, write_profile
from offload.plan.workload import GB, Machine
from offload.training.budgeting import Plan
from offload.training.placement import Room, for_auto, left_over, measured_speeds, placed, told

GIB = 2**30
TRAINED = 2 * 10**9
SECTION: dict[str, Any] = {"_component_": "offload.OffloadOptimizer", "strategy": "auto",
                           "optimizer_class": "offload.optim.AdamW"}  # fmt: skip
PLAN = Plan(
    Budget(
        (
            Item(DEVICE, "weights", 4 * GIB),
            Item(DEVICE, IN_FLIGHT, GIB),
            Item(LOCKED, STATES, 8 * GIB),
            Item(HOST, "Python", 3 * GIB),
        )
    ),
    TRAINED, TRAINED, 1, 1024, (),
)  # fmt: skip
SERVER = Machine("", 1e14, 20 * GB, 20 * GB, 1000 * GB, 400 * GB)


def prediction(reserved: float = 0.0, **shares: float) -> Prediction:
    return Prediction(1.0, 1.0, 1.0, 0.0, "", {}, placed=shares, reserved=reserved)


def test_what_is_left_over() -> None:
    assert left_over(SECTION, PLAN, Room(10 * GIB)) == pytest.approx(4.7 * GIB)
    assert left_over(SECTION, PLAN, Room(5 * GIB)) == 0 and left_over(SECTION, PLAN, Room()) == 0
    assert left_over(SECTION, PLAN, Room(40 * GIB)) == 8 * GIB, "there are no more states"
    limited = {**SECTION, "device_memory_gib": 8.0}
    assert left_over(limited, PLAN, Room(10 * GIB)) == pytest.approx(2.7 * GIB)


def test_the_budget_has_the_states_where_they_come_to_rest_and_host_memory_for_all() -> None:
    some = placed(PLAN, prediction(resident=0.25, stream=0.75), SECTION, 2)
    assert some.budget.device == PLAN.budget.device + 2 * GIB and some.budget.host == PLAN.budget.host
    every = placed(PLAN, prediction(resident=1.0), SECTION, 2)
    assert every.budget.device == PLAN.budget.device + 8 * GIB - int(0.6 * GIB), "no staging ring"
    helped = placed(PLAN, prediction(reserved=0.5, stream=0.6, host=0.4), SECTION, 2)
    assert helped.budget.of(LOCKED) == 8 * GIB + TRAINED and helped.budget.device == PLAN.budget.device
    assert placed(PLAN, prediction(), SECTION, 2) is PLAN, "another strategy's"


def test_the_cpu_may_help_where_its_bits_are_the_same_and_there_is_room_for_copies() -> None:
    settings = Settings("auto", 4.03)

    def may(section: dict[str, Any], host: int | None) -> bool:
        return for_auto(settings, section, PLAN, Room(None, host), SERVER, 2).cpu_may_help

    assert may(SECTION, None) and may(SECTION, 40 * GIB)
    assert not may(SECTION, 12 * GIB), "half of what is free has no room for the copies"
    copies = share_of_cpu(2, SERVER, dataclasses.replace(settings, cpu_may_help=True)) * TRAINED * 2
    assert not may(SECTION, PLAN.budget.host + int(1.9 * copies)) and may(SECTION, PLAN.budget.host + int(2.1 * copies))
    assert not may({**SECTION, "optimizer_class": "torch.optim.AdamW"}, None)
    mixed = {**SECTION, "param_groups": [{"params": ".*", "optimizer_class": "torch.optim.Muon"}]}
    assert not may(mixed, None)


@pytest.mark.parametrize(
    ("found", "first", "why"),
    [
        (prediction(resident=1.0), "8.00 GiB (100%) rest on the GPU", "the GPU has room for all of them"),
        (prediction(resident=0.25, stream=0.75), "2.00 GiB (25%) rest on the GPU, 6.00 GiB (75%) stream",
         "the GPU has room for no more, and what rests there crosses no link"),
        (prediction(reserved=0.5, stream=1.0), "8.00 GiB (100%) stream",
         "the GPU has no room for any; with the CPU's help no step is faster"),
        (prediction(reserved=0.5, stream=0.5, host=0.5),
         "4.00 GiB (50%) stream, 4.00 GiB (50%) are updated by the CPU",
         "the GPU has no room for any; the CPU works beside the link, which a step would wait for"),
    ],
)  # fmt: skip
def test_it_is_told_what_and_why(found: Prediction, first: str, why: str) -> None:
    assert told(PLAN, found) == [f"auto: of the optimizer's states {first}", f"  since {why}"]
    assert told(PLAN, prediction()) == []


def test_a_plan_of_auto_fills_the_card_and_never_more(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optimizer.strategy=auto", "model.embed_dim=1024", "model.num_layers=8", "dtype=bf16"]
    command = ["plan", "--config", "tiny_llama_offload", "--gpu", "RTX 3060", "--ram", "16GiB", *words]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert re.search(r"^auto: of the optimizer's states .* \(100%\) rest on the GPU$", out, re.M)
    assert re.search(r"optimizer states, by auto +[\d.]+ [GM]iB", out)
    assert "since the GPU has room for all of them" in out
    # A limit of the user's leaves less, and so does a card of which nothing but its memory is known.
    assert main([*command, "optimizer.device_memory_gib=0.1"]) == 0
    assert "the GPU has no room for any" in capsys.readouterr().out
    assert main(["plan", "--config", "tiny_llama_offload", "--vram", "12GiB", *words]) == 0
    told_of = re.search(r"^auto: begins as stream does; up to ([\d.]+) GiB", capsys.readouterr().out, re.M)
    assert told_of and float(told_of[1]) > 0.1


RATES = {"matmul": 180e12, "up": 26 * GB, "down": 24 * GB, "each_of_both": 20 * GB, "device_copy": 900 * GB,
         "host_copy": 50 * GB, "cpu_adamw": {"packed int8 split": 1e9, "torch fused": 5e8}}  # fmt: skip


def test_a_run_goes_by_the_speeds_that_were_measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = {"device": "a card", "torch": torch.__version__}
    monkeypatch.setattr(this_machine, "machine_of", lambda device, nvidia: machine)
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    assert measured_speeds(SECTION, cuda, bf16) == {}
    write_profile(Profile(machine, RATES))
    given = measured_speeds(SECTION, cuda, bf16)
    assert given == {"speeds": Speeds(20 * GB, 20 * GB, 1e9, 50 * GB)}
    for section in ({**SECTION, "strategy": "stream"}, {**SECTION, "master": "none"}):
        assert measured_speeds(section, cuda, bf16) == {}
    assert measured_speeds(SECTION, torch.device("cpu"), bf16) == {}
    assert measured_speeds(SECTION, cuda, torch.float32) == {}
    write_profile(Profile({**machine, "device": "another"}, RATES))
    assert measured_speeds(SECTION, cuda, bf16) == {}
    # The optimizer of a section takes them beside it.
    params = [torch.nn.Parameter(torch.zeros(8, dtype=bf16))]
    assert instantiate(OmegaConf.create(SECTION), params, **given)._wishes.speeds == given["speeds"]

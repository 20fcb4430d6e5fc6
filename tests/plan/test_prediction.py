"""Predicted steps: sums that can be done by hand, the replay in full beside the quick one, what a step waits for."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import nn

from offload.optim import AdamW
from offload.plan import prediction
from offload.plan.cards import CARDS, find_card
from offload.plan.efficiency import ATTENTION, SHARES
from offload.plan.machines import PACKED_BYTES, card_named, kind_of, machine_of_card, machine_of_rates
from offload.plan.prediction import (
    COMPUTE,
    CPU_UPDATE,
    DOWN,
    GPU_UPDATE,
    UP,
    Settings,
    compute_seconds,
    estimate,
    passes,
    predict,
)
from offload.plan.rates import CPU_FORMATS
from offload.plan.replay import replay
from offload.plan.work import Amount, Work
from offload.plan.workload import GB, LLAMA2_7B, MACHINES, Machine, Passes, Workload

LAYERS = 8
ELEMENTS = 2**26
MACHINE = Machine("by hand", flops=1e12, up=10 * GB, down=10 * GB, device=500 * GB, host=40 * GB, launch=5e-6)
LOAD = Workload(
    LAYERS, (ELEMENTS // 2, ELEMENTS // 4, ELEMENTS // 4), tokens=1024, passes=Passes((0.1, 0.2), (0.05, 0.0))
)
STATES = 4.03
FORWARD, BACKWARD = 0.1 * LAYERS + 0.05, 0.3 * LAYERS  # recomputation belongs to backward
STREAM = LAYERS * ELEMENTS * STATES / (10 * GB)


def test_work_takes_the_sum_of_its_parts() -> None:
    amount = Amount(products=2e12, attention=3e11, weights=GB, moved=50 * GB, launches=10)
    assert prediction.seconds(amount, MACHINE) == pytest.approx(2 + 0.3 / ATTENTION + 0.1)
    assert prediction.seconds(amount, MACHINE, fused=0.5) == pytest.approx(2 + 0.3 / ATTENTION + 0.05)
    few = dataclasses.replace(amount, products=1.0, attention=0.0, moved=0.0)
    assert prediction.seconds(few, MACHINE) == pytest.approx(1 / 500), "a product with few tokens reads its weights"


def test_recomputation_is_left_to_the_replay() -> None:
    layer = Amount(products=1e12), Amount(products=3e12)
    work = Work(1024, 1024, LAYERS, layer, (Amount(products=5e11), Amount()))
    assert passes(work, MACHINE, recompute=True) == Passes((1.0, 2.0), (0.5, 0.0))
    assert passes(work, MACHINE, recompute=False) == Passes((1.0, 3.0), (0.5, 0.0))


def test_states_on_the_device_expose_almost_nothing() -> None:
    found = predict(LOAD, MACHINE, Settings("resident", STATES, update_in_backward=True))
    assert found.compute_seconds == pytest.approx(FORWARD + BACKWARD, rel=0.01)
    assert found.exposed_seconds < 0.02 * found.step_seconds and found.bottleneck == COMPUTE
    assert found.tokens_per_second == pytest.approx(1024 / found.step_seconds)


def test_a_plain_optimizer_follows_backward() -> None:
    found = predict(LOAD, MACHINE, Settings("plain", 8.0))
    update = LAYERS * ELEMENTS * (2 * 8 + 3 * 2) / (500 * GB)
    assert found.busy[GPU_UPDATE] == pytest.approx(update)
    assert found.step_seconds == pytest.approx(FORWARD + BACKWARD + update)


def test_a_slow_link_is_named() -> None:
    slow = dataclasses.replace(MACHINE, up=0.5 * GB, down=0.5 * GB)
    found = predict(LOAD, slow, Settings("stream", STATES, update_in_backward=True))
    assert found.bottleneck in (UP, DOWN)
    assert found.busy[UP] == pytest.approx(20 * STREAM, rel=0.05)
    assert found.step_seconds >= found.busy[found.bottleneck]


def test_a_slow_cpu_is_named_with_the_packed_kernels_traffic() -> None:
    """Its kernels are no operations of torch: a replay that does not see them updates on the CPU in no time."""
    slow = dataclasses.replace(MACHINE, host=2 * GB, modules=100 * GB)
    found = predict(LOAD, slow, Settings("host", STATES, update_in_backward=True))
    traffic = LAYERS * ELEMENTS * (2 + 2 * 2 + 2 * STATES)
    assert found.busy[CPU_UPDATE] == pytest.approx(traffic / (2 * GB), rel=0.05)
    assert found.bottleneck == CPU_UPDATE


@pytest.mark.parametrize("early", [True, False])
def test_copies_both_ways_take_no_more_of_the_hosts_memory_than_it_has(early: bool) -> None:
    """Two channels of DDR4 give less than a link of 16 lanes would move."""
    slow = dataclasses.replace(MACHINE, host=0.5 * GB)
    settings = Settings("stream", STATES, update_in_backward=early)
    found = predict(LOAD, slow, settings)
    traffic = 2 * LAYERS * ELEMENTS * STATES / (0.5 * GB)
    assert traffic <= found.step_seconds <= traffic + FORWARD + BACKWARD
    assert estimate(LOAD, slow, settings) == pytest.approx(found.step_seconds, rel=0.15)


@pytest.mark.parametrize("down", [10 * GB, 0.2 * GB])
def test_micro_batches_that_were_not_replayed_take_as_long_as_one_that_was(down: float) -> None:
    """Bounded by compute, and by the link that each one's gradients go over."""
    machine = dataclasses.replace(MACHINE, down=down)
    settings = Settings("stream", STATES, update_in_backward=True, offload_gradients=True, micro_batches=6)
    found = predict(LOAD, machine, settings)
    optimizer = {"strategy": "stream", "update_in_backward": True, "offload_gradients": True}
    whole = replay(machine, dataclasses.replace(LOAD, micro_batches=6), optimizer_class="offload.optim.AdamW",
                   state_dtype="int8", master="split", steps=(2, 1), **optimizer)  # fmt: skip
    assert found.step_seconds == pytest.approx(whole.step, rel=0.02)
    assert found.tokens_per_second == pytest.approx(6 * 1024 / found.step_seconds)
    assert found.compute_seconds == found.busy[COMPUTE] == pytest.approx(6 * (FORWARD + BACKWARD), rel=0.01)
    assert found.busy[DOWN] == pytest.approx(whole.busy["down"], rel=0.05)


def test_a_part_of_a_deep_model_stands_for_all_of_it() -> None:
    """With little in flight a few layers are replayed, and with them their part of the edges and of the room."""
    deep = dataclasses.replace(
        LOAD, layers=32, edge=8 * ELEMENTS, head=4 * ELEMENTS, passes=Passes((0.1, 0.2), (0.8, 0.4))
    )
    assert prediction._shallow(deep, 0.25).layers == 8 and prediction._shallow(deep, 0.1).layers == 6
    assert prediction._shallow(deep, 1.0) is deep
    settings = Settings("stream", STATES, update_in_backward=True, in_flight_gib=0.25)
    found = predict(deep, MACHINE, settings)
    assert found.compute_seconds == pytest.approx(32 * 0.4 + 1.2, rel=0.01)
    assert found.busy[UP] == pytest.approx((32 + 8 + 4) * ELEMENTS * STATES / (10 * GB), rel=0.05)
    room = int(deep.parameters * STATES / 2)
    kept = predict(deep, MACHINE, dataclasses.replace(settings, strategy="auto", room=room))
    assert kept.placed["resident"] == pytest.approx(0.5, abs=0.1)


def test_what_bounds_a_step_is_what_works_longest_beside_compute_that_waits() -> None:
    busy = {COMPUTE: 0.9, UP: 0.5, DOWN: 0.6}
    assert prediction.prediction_of(1.0, 10, 0.9, busy).bottleneck == DOWN
    assert prediction.prediction_of(1.0, 10, 0.98, busy).bottleneck == COMPUTE
    assert prediction.prediction_of(1.0, 10, 0.9, {COMPUTE: 0.9}).bottleneck == COMPUTE
    assert prediction.prediction_of(1.0, 10, 1.1, busy).exposed_seconds == 0


def test_a_micro_batch_is_computed_or_launched() -> None:
    launched = dataclasses.replace(LOAD, launches=(30_000, 50_000))  # 0.15 s and 0.25 s; its passes 0.1 s and 0.2 s
    for load, layer in ((LOAD, 0.1 + 0.3), (launched, 2 * 0.15 + 0.25)):
        assert prediction.compute_seconds(load, MACHINE) == pytest.approx(LAYERS * layer + 0.05)
    plain = dataclasses.replace(launched, recompute=False)
    assert prediction.compute_seconds(plain, MACHINE) == pytest.approx(LAYERS * 0.4 + 0.05)


def test_the_last_layers_states_are_the_share_that_streams() -> None:
    pattern = prediction._offloaded(8, 0.25)
    assert [layer for layer in range(8) if re.fullmatch(pattern, f"exp_avg/{layer}.0.weight")] == [6, 7]
    assert re.fullmatch(pattern, "exp_avg/head.weight") and not re.fullmatch(pattern, "exp_avg/embedding.weight")
    assert prediction._offloaded(8, 0.0) == "none"
    half = predict(LOAD, MACHINE, Settings("stream", STATES, update_in_backward=True, offloaded=0.5))
    assert half.busy[UP] == pytest.approx(STREAM / 2, rel=0.05)


@pytest.mark.parametrize(
    ("nbytes", "dtype", "played"),
    [
        (2.03, torch.bfloat16, ("int8", "none")),
        (3.0, torch.bfloat16, ("int8", "split24")),
        (4.0, torch.bfloat16, ("int8", "split")),
        (6.5, torch.bfloat16, ("bf16", "split")),
        (8.0, torch.bfloat16, ("fp32", "none")),
        (12.0, torch.bfloat16, ("fp32", "split")),
        (2.0, torch.float32, ("int8", "none")),
        (4.03, torch.float32, ("bf16", "none")),
        (8.0, torch.float32, ("fp32", "none")),
    ],
)
def test_any_optimizer_is_played_by_the_packed_one_of_its_size(
    nbytes: float, dtype: torch.dtype, played: tuple[str, str]
) -> None:
    """And that has states of so many bytes."""
    found = prediction._class_with(nbytes, dtype)
    assert (found["state_dtype"], found["master"]) == played
    param = nn.Parameter(torch.zeros(2**14, dtype=dtype))
    param.grad = torch.ones_like(param)
    optimizer = AdamW([param], state_dtype=found["state_dtype"], master=found["master"])
    optimizer.step()
    states = [each for each in optimizer.state[param].values() if isinstance(each, torch.Tensor) and each.dim()]
    taken = sum(each.nbytes for each in states) / param.numel()
    assert min((2.03, 3.03, 4.03, 4.0, 6.0, 8.0, 10.0), key=lambda size: abs(size - taken)) == pytest.approx(
        taken, 0.01
    )


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("strategy", "factor"), [("stream", 1.0), ("stream", 0.2), ("auto", 1.0), ("host", 1.0), ("resident", 1.0)]
)
def test_the_estimate_ranks_as_the_replay_does(strategy: str, factor: float, early: bool) -> None:
    machine = dataclasses.replace(MACHINE, up=factor * MACHINE.up, down=factor * MACHINE.down)
    settings = Settings(strategy, STATES, update_in_backward=early)
    assert estimate(LOAD, machine, settings) == pytest.approx(predict(LOAD, machine, settings).step_seconds, rel=0.15)


ALL, WIDTH = LAYERS * ELEMENTS, 2
COMPUTED = 3 * (FORWARD + BACKWARD)


@pytest.mark.parametrize(
    ("rates", "settings", "work"),
    [
        ({"device": GB}, {"strategy": "plain"}, None),
        ({}, {"strategy": "resident"}, None),
        ({"up": 0.1 * GB}, {"strategy": "host"}, ALL * WIDTH / (0.1 * GB)),
        ({"host": 0.1 * GB}, {"strategy": "host"}, ALL * (2 * STATES + 5 * WIDTH) / (0.1 * GB)),
        ({"up": 0.1 * GB}, {"strategy": "stream", "offloaded": 0.5}, ALL * STATES / 2 / (0.1 * GB)),
        ({"modules": 0.1 * GB}, {"strategy": "stream"}, ALL * 2 * STATES / (0.1 * GB)),
        ({"up": 0.1 * GB}, {"strategy": "auto", "room": int(0.75 * ALL * STATES)}, ALL * STATES / 4 / (0.1 * GB)),
        ({"up": 0.1 * GB}, {"strategy": "auto", "room": int(2 * ALL * STATES)}, 0.0),
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_the_estimate_by_hand(rates: dict[str, float], settings: Any, work: float | None, early: bool) -> None:
    """Of three micro-batches: backward hides work that is done in it, the next forward what is done after it."""
    machine = dataclasses.replace(MACHINE, **rates)
    given = Settings(state_bytes=STATES, micro_batches=3, update_in_backward=early, **settings)
    hides = BACKWARD if early else FORWARD
    if work is None:
        want = COMPUTED + (ALL * (2 * STATES + 3 * WIDTH) / GB if given.strategy == "plain" else 0.0)
        assert estimate(LOAD, machine, given) == pytest.approx(want)
        return
    assert estimate(LOAD, machine, given) == pytest.approx(COMPUTED + max(0.0, work - hides))
    slow = dataclasses.replace(machine, down=0.2 * GB)
    gradients = ALL * WIDTH / (0.2 * GB)
    assert 3 * gradients + FORWARD > COMPUTED
    leaving = estimate(LOAD, slow, dataclasses.replace(given, offload_gradients=True))
    assert leaving == pytest.approx(3 * gradients + FORWARD + max(0.0, work + gradients - hides))


@pytest.mark.parametrize(("host", "bound"), [(2 * GB, "link"), (4 * GB, "cpu")])
def test_the_estimate_with_the_cpus_help(host: float, bound: str) -> None:
    settings = Settings("auto", STATES, cpu_may_help=True)
    machine = dataclasses.replace(MACHINE, up=GB, down=GB, host=host, modules=40 * GB)
    share = prediction.share_of_cpu(WIDTH, machine, settings)
    assert 0.1 < share < 0.9
    assert prediction.share_of_cpu(WIDTH, machine, dataclasses.replace(settings, cpu_may_help=False)) == 0
    works = {
        "link": ALL * ((1 - share) * STATES + share * WIDTH) / GB,
        "cpu": ALL * share * (2 * STATES + 4 * WIDTH) / host,
    }
    assert max(works, key=lambda name: works[name]) == bound
    assert estimate(LOAD, machine, settings) == pytest.approx(FORWARD + BACKWARD + max(0.0, works[bound] - FORWARD))


@pytest.mark.parametrize("early", [True, False])
def test_joined_tensors_and_few_steps_tell_the_same_step(early: bool) -> None:
    load = dataclasses.replace(LLAMA2_7B, layers=8, tokens=1024)
    machine = dataclasses.replace(MACHINE, flops=140e12, up=25 * GB, down=25 * GB)
    quick = predict(load, machine, Settings("stream", 4.0, update_in_backward=early))
    whole = replay(machine, dataclasses.replace(load, activations=None), optimizer_class="torch.optim.AdamW",
                   strategy="stream", update_in_backward=early, shares_host_memory=True)  # fmt: skip
    assert quick.step_seconds == pytest.approx(whole.step, rel=0.05)


def test_a_head_that_is_the_embedding_and_one_that_is_frozen() -> None:
    tied = dataclasses.replace(LOAD, edge=ELEMENTS, head=0)
    assert tied.parameters == (LAYERS + 1) * ELEMENTS
    found = predict(tied, MACHINE, Settings("stream", STATES))
    assert found.busy[UP] == pytest.approx((LAYERS + 1) / LAYERS * STREAM, rel=0.05)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_each_card_is_a_machine(card: object) -> None:
    machine = machine_of_card(card)  # type: ignore[arg-type]
    assert kind_of(card) in SHARES  # type: ignore[arg-type]
    assert 20e12 < machine.flops < 1e15 and 10 * GB < machine.up <= 51 * GB
    assert 200 * GB < machine.device < 4500 * GB


def test_a_cards_rates_are_shares_of_its_data_sheet() -> None:
    card = find_card("RTX 4090")
    machine = machine_of_card(card, ram_bandwidth=89.6 * GB)
    assert machine.flops == pytest.approx(0.97 * 165.2e12)
    assert machine.up == pytest.approx(25.2 * GB, rel=0.01) and machine.host == pytest.approx(67.2 * GB)
    assert machine_of_card(card, fp32=True).flops == machine.flops / 2
    assert machine_of_card(find_card("4060")).up == pytest.approx(12.6 * GB, rel=0.01), "eight lanes"
    assert machine_of_card(find_card("RTX 5090")).up == pytest.approx(50.4 * GB, rel=0.01)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100 40GB"),  # of two sizes, which differ in memory
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA L40", None),
    ],
)
def test_a_device_finds_its_card(name: str, card: str | None) -> None:
    found = card_named(name)
    assert (found and found.name) == card


def test_measured_rates_make_a_machine() -> None:
    rates = {"matmul": 180e12, "up": 26 * GB, "down": 24 * GB, "each_of_both": 20 * GB, "device_copy": 900 * GB,
             "host_copy": 50 * GB, "cpu_adamw": {"packed int8 split": 1e9, "packed fp32 split": 0.4e9},
             "page_locking": {"seconds_per_gib": 0.5}}  # fmt: skip
    machine = machine_of_rates("NVIDIA GeForce RTX 4090", rates, card_named("NVIDIA GeForce RTX 4090"))
    assert machine.flops == pytest.approx(0.97 * 165.2e12), "no more than training was seen to reach"
    assert (machine.up, machine.down, machine.device) == (20 * GB, 20 * GB, 900 * GB)
    assert machine.host == pytest.approx(14.06e9), "the CPU's update is slower than its memory"
    assert machine.shared == 50 * GB, "which copies have all of"
    assert machine.pin == 2**30 / 0.5
    assert machine_of_rates("another", rates, None).flops == 180e12
    slow = machine_of_rates("", {**rates, "each_of_both": 5 * GB, "host_copy": 20 * GB}, None)
    assert (slow.up, slow.down, slow.shared) == (13 * GB, 12 * GB, 25 * GB), "half of what each reaches alone, at least"


@pytest.mark.parametrize(("state_dtype", "master"), CPU_FORMATS)
def test_what_the_cpus_update_moves_is_what_it_reads_and_writes(state_dtype: Any, master: Any) -> None:
    param = nn.Parameter(torch.zeros(2**14, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = AdamW([param], state_dtype=state_dtype, master=master)
    optimizer.step()
    states = [each for each in optimizer.state[param].values() if isinstance(each, torch.Tensor) and each.dim()]
    moved = param.grad.nbytes + 2 * (param.nbytes + sum(each.nbytes for each in states))
    assert PACKED_BYTES[f"packed {state_dtype} {master}"] == pytest.approx(moved / param.numel(), rel=0.01)


def test_an_update_on_the_cpu_takes_as_long_as_was_measured() -> None:
    speed = 1e9
    rates = {"matmul": 180e12, "up": 26 * GB, "down": 24 * GB, "each_of_both": 20 * GB, "device_copy": 900 * GB,
             "host_copy": 50 * GB, "cpu_adamw": {"torch fused": 1e8, "packed int8 split": speed}}  # fmt: skip
    machine = machine_of_rates("by hand", rates, None)
    found = predict(LOAD, machine, Settings("host", STATES, update_in_backward=True))
    assert found.busy[CPU_UPDATE] == pytest.approx(LAYERS * ELEMENTS / speed, rel=0.03)


def test_fp32_states_are_played_by_fp32_states() -> None:
    load = dataclasses.replace(LOAD, dtype=torch.float32)
    found = predict(load, MACHINE, Settings("stream", 8.0, update_in_backward=True))
    assert found.busy[UP] == pytest.approx(LAYERS * ELEMENTS * 8 / (10 * GB), rel=0.05)


def test_the_closed_form_knows_that_small_layers_wait_for_the_host() -> None:
    """Twice the tokens of layers that take less than their launches take no longer."""
    machine = dataclasses.replace(MACHINES["rtx4090"], launch=1e-5)
    settings = Settings("resident", 4.03, update_in_backward=True)

    def seconds(tokens: int) -> float:
        passes = Passes((1e-7 * tokens, 2e-7 * tokens), (0.0, 0.0))
        load = Workload(4, (1024,), tokens=tokens, passes=passes, launches=(100, 200), recompute=False)
        assert estimate(load, machine, settings) == pytest.approx(compute_seconds(load, machine))
        return estimate(load, machine, settings)

    assert seconds(1024) == seconds(2048) == pytest.approx(4 * 300 * 1e-5)
    assert seconds(2**16) == pytest.approx(4 * 3e-7 * 2**16)

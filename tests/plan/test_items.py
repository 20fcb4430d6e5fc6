"""Every item of a budget and every part of a step on the CPU, by hand: each is there once, and whole."""

from __future__ import annotations

import dataclasses

import pytest

from offload.plan import budget
from offload.plan.budget import DEVICE, HOST, LOCKED, Group, Item, Optimizer, Sharding, on_accelerator, on_cpu
from offload.plan.calibration import Costs
from offload.plan.footprint import ACTIVATIONS, GRADIENTS, PARAMETERS, Footprint, Moment
from offload.plan.heap import Held
from offload.plan.prediction import STEP_SECONDS, predict_on_cpu
from offload.plan.work import Amount, Work

MIB = 1 << 20
COUNTED = Footprint(
    Moment(70 * MIB, {PARAMETERS: 30 * MIB, ACTIVATIONS: 40 * MIB}, "layers.1"),
    {0: Moment(100 * MIB, {PARAMETERS: 30 * MIB, GRADIENTS: 20 * MIB, ACTIVATIONS: 50 * MIB}, "backward")},
    kept=16 * MIB,
    heap=Held(7 * MIB, 0),
)
OPTIMIZER = Optimizer(3 * MIB, {"gradients": [64 * MIB]}, {"other": 5 * MIB}, in_flight=11 * MIB, keeps_gradients=True)


def sizes(items: list[Item], *places: str) -> dict[str, float]:
    """MiB by name."""
    return {item.name: item.nbytes / MIB for item in items if item.place in places}


def test_items_of_the_host() -> None:
    items = on_cpu(COUNTED, OPTIMIZER, weights=29 * MIB, base=200 * MIB, beside=[("gathered", 13 * MIB)])
    assert sizes(items, HOST) == {
        "weights": 29, "gradients": 20, "optimizer states": 3 + 64 + 5, "activations": 50, "gathered": 13,
        "the C library's heap": 7, "kernels' code": 6, "Python, libraries, data": 200,
    }  # fmt: skip


def test_items_of_a_device() -> None:
    items = on_accelerator(
        COUNTED, OPTIMIZER, weights=29 * MIB, base=200 * MIB, moved=8 * MIB, beside=[("gathered", 13 * MIB)]
    )
    used = {"weights": 29, "gradients": 20, "states and gradients in flight": 11, "optimizer states": 3,
            "activations": 50 - 8, "gathered": 13}  # fmt: skip
    device = sizes(items, DEVICE)
    assert device.pop("slack of PyTorch's allocator") == pytest.approx(0.046 * sum(used.values()), rel=1e-4)
    assert device.pop("CUDA context") == pytest.approx(0.45 * 1024, rel=1e-4)
    assert device == used
    assert sizes(items, LOCKED) == {"gradients": 64, "activations": 8}
    assert sizes(items, HOST) == {"other": 5, "Python, PyTorch and CUDA": 200 + budget.CUDA_LIBRARIES / MIB}


def test_nothing_is_in_flight_before_the_first_gradient() -> None:
    """Where forward's fullest moment is fuller than backward's with all that is in flight."""
    early = Footprint(Moment(112 * MIB, {PARAMETERS: 30 * MIB, ACTIVATIONS: 82 * MIB}), COUNTED.stages, 0)
    device = sizes(on_accelerator(early, OPTIMIZER, weights=30 * MIB, base=0, moved=0), DEVICE)
    assert device["activations"] == 82 and "gradients" not in device and "states and gradients in flight" not in device


def test_parts_of_a_step_on_the_cpu() -> None:
    layer, edge = Amount(products=1e9, attention=1e8, moved=1e7, launches=10), Amount(products=3e9, launches=5)
    work = Work(tokens=64, length=32, layers=3, layer=(layer, 2 * layer), edge=(edge, edge))
    costs = Costs(products=1e-11, attention=2e-11, moved=3e-10, launches=1e-5)
    compute = (9 + 6) * 1e9 * 1e-11 + 9 * 1e8 * 2e-11 + 9 * 1e7 * 3e-10 + (90 + 10) * 1e-5
    found = predict_on_cpu(work, costs, micro_batches=4, update=0.5, faults=0.25)
    assert found.compute_seconds == pytest.approx(4 * compute + 0.25)
    assert found.step_seconds == pytest.approx(4 * compute + 0.25 + 0.5 + STEP_SECONDS)
    assert found.tokens_per_second == pytest.approx(4 * 64 / found.step_seconds)


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients"),
    [
        # Two layers are whole at once; a layer's gradients, and once more in the dtype that is summed.
        (Sharding(4, True, reduce_itemsize=2), 10 + 2 * 30, 10 + 2 * 30),
        (Sharding(4, True, reduce_itemsize=4), 10 + 2 * 30, 10 + 3 * 30),
        (Sharding(4, False, reduce_itemsize=2), 10 + 50 + 6, 10 + 2 * 30),
        (Sharding(4, False, reduce_itemsize=8), 10 + 50 + 6, 10 + 4 * 30),
        (Sharding(8, 2, reduce_itemsize=2), 10 + 2 * 30 + (50 + 6) // 2, 10 + 2 * 30),
    ],
)
def test_what_is_gathered_beside_a_ranks_part(sharding: Sharding, weights: int, gradients: int) -> None:
    root, *layers, embedding = (Group(nbytes, nbytes) for nbytes in (10, 20, 30, 6))
    assert sharding.gathered(root, layers, embedding=embedding) == [
        ("weights, gathered", weights), ("gradients, to be reduced", gradients)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients"),
    [
        (Sharding(4, True, reduce_itemsize=4), 10 + 2 * 30, 3 * 5),
        (Sharding(4, False, reduce_itemsize=2), 10 + 50 + 6, 2 * 30),  # the buffers that weights were copied out of
        (Sharding(4, False, reduce_itemsize=40), 10 + 50 + 6, 20 * 5),
    ],
)
def test_frozen_weights_are_gathered_and_have_no_gradients(sharding: Sharding, weights: int, gradients: int) -> None:
    layers, embedding = [Group(20, 5), Group(30, 3)], Group(6, 0)
    assert sharding.gathered(Group(10, 0), layers, embedding=embedding) == [
        ("weights, gathered", weights), ("gradients, to be reduced", gradients)
    ]  # fmt: skip
    large = sharding.gathered(Group(10, 0), layers, embedding=Group(600, 0))
    assert large[1][1] == (gradients if sharding.resharding is False else 2 * 600 - 2 * 30)


def test_a_large_embeddings_backward_comes_when_the_layers_let_go() -> None:
    def gradients(activations: int) -> int:
        root, *layers, embedding = (Group(nbytes, nbytes) for nbytes in (10, 20, 30, 100))
        return Sharding(4).gathered(root, layers, embedding=embedding, activations=activations)[1][1]

    assert gradients(0) == 10 + (2 + 1 + 1) * 100 - 2 * 30
    assert gradients(50) == gradients(0) - 50
    assert gradients(400) == 10 + 2 * 30


def test_one_rank_gathers_nothing_and_parts_are_rounded_up() -> None:
    assert Sharding(1).gathered(Group(10, 10), [Group(20, 20)], embedding=Group(0, 0)) == []
    assert [Sharding(4).part(nbytes) for nbytes in (8, 9, 0)] == [2, 3, 0]


def test_the_allocators_slack_has_a_limit() -> None:
    items = on_accelerator(COUNTED, OPTIMIZER, weights=60 << 30, base=0, moved=0)
    assert sizes(items, DEVICE)["slack of PyTorch's allocator"] == pytest.approx(0.85 * 1024, rel=1e-4)


@pytest.mark.parametrize(("before", "is_early"), [(110, False), (111, True), (105, False)])
def test_what_is_in_flight_counts_towards_the_fullest_moment(before: int, is_early: bool) -> None:
    parts = {PARAMETERS: 30 * MIB, ACTIVATIONS: (before - 30) * MIB}
    counted = Footprint(Moment(before * MIB, parts), COUNTED.stages, 0)
    device = sizes(on_accelerator(counted, OPTIMIZER, weights=30 * MIB, base=0, moved=0), DEVICE)
    assert device["activations"] == (before - 30 if is_early else 50) and ("gradients" in device) is not is_early


def test_on_the_cpu_the_fuller_moment_counts() -> None:
    early = Footprint(Moment(112 * MIB, {PARAMETERS: 30 * MIB, ACTIVATIONS: 82 * MIB}), COUNTED.stages, 0)
    host = sizes(on_cpu(early, OPTIMIZER, weights=30 * MIB, base=0), HOST)
    assert host["activations"] == 82 and "gradients" not in host


def test_tensors_that_share_no_slabs_take_powers_of_two() -> None:
    apart = dataclasses.replace(OPTIMIZER, locked={"gradients": [65 * MIB, 64 * MIB]}, in_slabs=False)
    locked = sizes(on_accelerator(COUNTED, apart, weights=MIB, base=0, moved=0), LOCKED)
    assert locked == {"gradients": 128 + 64}


def test_a_card_without_room_for_weights_and_cuda_fits_nothing() -> None:
    fixed = 29 * MIB + budget.CONTEXT
    planned = budget.Budget(tuple(on_accelerator(COUNTED, OPTIMIZER, weights=29 * MIB, base=0, moved=0)))
    assert planned.may_fit(fixed) and planned.may_fit(None) and not planned.may_fit(fixed - 1)

"""Every item of a budget and every part of a step on the CPU, by hand: each is there once, and whole."""

from __future__ import annotations

import pytest

from offload.plan import budget
from offload.plan.budget import DEVICE, HOST, LOCKED, Item, Optimizer, on_accelerator, on_cpu
from offload.plan.calibration import Costs
from offload.plan.footprint import ACTIVATIONS, GRADIENTS, PARAMETERS, Footprint, Moment
from offload.plan.prediction import STEP_SECONDS, predict_on_cpu
from offload.plan.work import Amount, Work

MIB = 1 << 20
COUNTED = Footprint(
    Moment(70 * MIB, {PARAMETERS: 30 * MIB, ACTIVATIONS: 40 * MIB}, "layers.1"),
    {0: Moment(100 * MIB, {PARAMETERS: 30 * MIB, GRADIENTS: 20 * MIB, ACTIVATIONS: 50 * MIB}, "backward")},
    kept=16 * MIB,
    heap=7 * MIB,
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
    found = predict_on_cpu(work, costs, micro_batches=4, update=0.5)
    assert found.compute_seconds == pytest.approx(4 * compute)
    assert found.step_seconds == pytest.approx(4 * compute + 0.5 + STEP_SECONDS)
    assert found.tokens_per_second == pytest.approx(4 * 64 / found.step_seconds)

"""Costs of training on a CPU: found again where they are known, and those of a real model for real."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from offload.plan import calibration
from offload.plan.calibration import Costs, training_costs
from offload.plan.prediction import COMPUTE, CPU_UPDATE, STEP_SECONDS, predict_on_cpu
from offload.plan.work import Amount, Work

KNOWN = Costs(products=1e-11, attention=3e-11, moved=7e-11, launches=5e-6, queries=2e-9)
ROWS = [[1e9, 1e7, 1e8, 100.0], [1e8, 5e7, 3e8, 300.0], [1e7, 1e6, 1e6, 900.0], [3e9, 1e6, 1e7, 50.0], [1e6, 0, 9e8, 9]]
OF_ROWS = [1e-11, 3e-11, 7e-11, 5e-6]


def test_costs_that_made_the_times_are_found_again() -> None:
    times = [sum(a * b for a, b in zip(row, OF_ROWS, strict=True)) for row in ROWS]
    found = calibration._least_squares(ROWS, times, times)
    assert found == pytest.approx(OF_ROWS, rel=1e-6)


def test_no_cost_is_below_zero() -> None:
    times = [1e-11 * row[0] + 7e-11 * row[2] - 1e-12 * row[1] for row in ROWS]
    found = calibration._least_squares(ROWS, times, times)
    assert found[1] == 0.0 and min(found) >= 0.0 and found[0] == pytest.approx(1e-11, rel=0.05)


def test_errors_count_as_shares_of_the_whole_time() -> None:
    """Two models disagree about a cost: the one of which it is more has more to say."""
    assert calibration._least_squares([[1.0], [1.0]], [1.0, 3.0], [1.0, 10.0])[0] == pytest.approx(1.03 / 1.01)


def test_a_real_model_has_costs() -> None:
    sizes = ((32, 1, 16, 64), (64, 2, 32, 64), (64, 4, 64, 128), (96, 2, 128, 128))
    costs = training_costs(torch.float32, sizes=sizes)
    values = dataclasses.astuple(costs)
    assert all(value >= 0 for value in values) and 0 < sum(values) < 1e-3


def test_a_part_is_what_its_operations_take() -> None:
    """By a clock that goes on with each operation, and as many operations as PyTorch's profiler saw."""
    model, ticks = calibration._Model(64, 128), itertools.count()
    found = calibration._parts(model, 2, 32, lambda: float(next(ticks)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        model.loss(2, 32).backward()
    seen = {event.key: event.count for event in profiled.key_averages()}
    attention = sum(number for name, number in seen.items() if name.startswith("aten::_scaled_dot_product_flash"))
    assert found == (seen["aten::mm"], attention) and attention == 2 * calibration.LAYERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_turn_trains_the_counted_model_anew_and_the_first_does_not_count(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0
    counted: list[Work] = []
    real_turn, real_parts, real_count = calibration._turn, calibration._parts, calibration.count

    def count(*args: Any, **options: Any) -> Work:
        work = real_count(*args, **options)
        counted.append(work)
        assert options["fused_norms"] is False, "on the CPU a norm is several kernels"
        return work

    def parts(model: Any, *args: Any) -> tuple[float, float]:
        assert all(seconds > 0 for seconds in real_parts(model, *args))
        return tuple(KNOWN.seconds(part, counted[-1].length) for part in parts_of(counted[-1].total))

    def turn(model: Any, *args: Any) -> float:
        nonlocal turns
        assert {param.dtype for param in model.parameters()} == {dtype}
        assert all(param.grad is None for param in model.parameters())
        turns += 1
        real_turn(model, *args)
        return KNOWN.seconds(counted[-1].total, counted[-1].length) * (
            50 if turns % (calibration.TURNS + 1) == 1 else 1
        )

    monkeypatch.setattr(calibration, "count", count)
    monkeypatch.setattr(calibration, "_turn", turn)
    monkeypatch.setattr(calibration, "_parts", parts)
    sizes = ((32, 1, 16, 64), (32, 2, 64, 64), (64, 4, 32, 128), (64, 1, 128, 32), (96, 2, 16, 256))
    before = torch.get_rng_state()
    costs = training_costs(dtype, sizes=sizes)
    assert torch.equal(torch.get_rng_state(), before)
    for work in counted:
        for part in (*parts_of(work.total), work.total):
            assert costs.seconds(part, work.length) == pytest.approx(KNOWN.seconds(part, work.length), rel=1e-3)


def parts_of(amount: Amount) -> tuple[Amount, Amount]:
    return Amount(products=amount.products), Amount(attention=amount.attention)


def test_a_step_is_its_work_and_its_update() -> None:
    layer = Amount(products=1e9, moved=1e8), Amount(products=2e9, launches=100)
    work = Work(512, 128, 4, layer, (Amount(attention=1e7), Amount()))
    compute = 4 * (3e9 * 1e-11 + 1e8 * 7e-11 + 100 * 5e-6) + 1e7 * (3e-11 + 2e-9 / 128)
    found = predict_on_cpu(work, KNOWN, micro_batches=2, update=0.05)
    assert found.compute_seconds == pytest.approx(2 * compute)
    assert found.step_seconds == pytest.approx(2 * compute + 0.05 + STEP_SECONDS)
    assert found.tokens_per_second == pytest.approx(1024 / found.step_seconds)
    assert found.busy == {COMPUTE: pytest.approx(2 * compute), CPU_UPDATE: 0.05}

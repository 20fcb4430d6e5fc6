"""Costs of training on a CPU: found again where they are known, and those of a real model for real."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from offload.plan import calibration
from offload.plan.calibration import Costs, training_costs
from offload.plan.prediction import COMPUTE, CPU_UPDATE, STEP_SECONDS, predict_on_cpu
from offload.plan.work import Amount, Work

KNOWN = Costs(products=1e-11, attention=3e-11, moved=7e-11, launches=5e-6)
ROWS = [[1e9, 1e7, 1e8, 100.0], [1e8, 5e7, 3e8, 300.0], [1e7, 1e6, 1e6, 900.0], [3e9, 1e6, 1e7, 50.0], [1e6, 0, 9e8, 9]]


def test_costs_that_made_the_times_are_found_again() -> None:
    times = [sum(a * b for a, b in zip(row, dataclasses.astuple(KNOWN), strict=True)) for row in ROWS]
    assert calibration._least_squares(ROWS, times) == pytest.approx(list(dataclasses.astuple(KNOWN)), rel=1e-6)


def test_no_cost_is_below_zero() -> None:
    times = [1e-11 * row[0] + 7e-11 * row[2] - 1e-12 * row[1] for row in ROWS]
    found = calibration._least_squares(ROWS, times)
    assert found[1] == 0.0 and min(found) >= 0.0 and found[0] == pytest.approx(1e-11, rel=0.05)


def test_products_cost_something_whatever_disturbed_the_times() -> None:
    times = [max(7e-11 * row[2] + 5e-6 * row[3] - 1e-12 * row[0], 1e-6) for row in ROWS]
    found = calibration._least_squares(ROWS, times)
    assert found[0] > 0 and min(found) >= 0.0


def test_a_real_model_has_costs() -> None:
    sizes = ((32, 1, 16, 64), (64, 2, 32, 64), (64, 4, 64, 128), (96, 2, 128, 128))
    costs = training_costs(torch.float32, sizes=sizes)
    values = dataclasses.astuple(costs)
    assert all(value >= 0 for value in values) and 0 < sum(values) < 1e-3


def test_a_step_is_its_work_and_its_update() -> None:
    layer = Amount(products=1e9, moved=1e8), Amount(products=2e9, launches=100)
    work = Work(512, 128, 4, layer, (Amount(attention=1e7), Amount()))
    compute = 4 * (3e9 * 1e-11 + 1e8 * 7e-11 + 100 * 5e-6) + 1e7 * 3e-11
    found = predict_on_cpu(work, KNOWN, micro_batches=2, update=0.05)
    assert found.compute_seconds == pytest.approx(2 * compute)
    assert found.step_seconds == pytest.approx(2 * compute + 0.05 + STEP_SECONDS)
    assert found.tokens_per_second == pytest.approx(1024 / found.step_seconds)
    assert found.busy == {COMPUTE: pytest.approx(2 * compute), CPU_UPDATE: 0.05}

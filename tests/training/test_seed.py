"""Seeds and schedule: what torchtune's functions of the same purpose do, without torchtune."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy
import pytest
import torch

from offload import torchao_shim
from offload.training.schedules import get_cosine_schedule_with_warmup
from offload.training.seed import set_seed


def state() -> tuple[Any, ...]:
    """What the generators give next, and the switches."""
    return (
        torch.rand(5).tolist(),
        torch.randperm(100).tolist(),
        numpy.random.rand(5).tolist(),
        [random.random() for _ in range(5)],
        torch.get_deterministic_debug_mode(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "before")
    before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.set_deterministic_debug_mode(before[0])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[1:]


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
@pytest.mark.parametrize("mode", [None, "default", "warn", 2])
def test_a_seed_gives_the_numbers_of_torchtunes(switches: None, seed: int, mode: str | int | None) -> None:
    torchao_shim.install()
    from torchtune.training import set_seed as theirs

    theirs(seed, mode)
    expected = state()
    set_seed(seed + 1 if seed == 0 else 0, "default")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = "before"
    if mode is None:
        torch.set_deterministic_debug_mode(expected[4])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = expected[5:7]
    assert set_seed(seed, mode) == seed
    assert state() == expected


def test_a_seed_that_is_drawn_is_told_and_in_range() -> None:
    drawn = {set_seed(None) for _ in range(4)}
    assert all(0 <= seed < 2**32 for seed in drawn)
    again = set_seed(seed := drawn.pop())
    first = torch.rand(3)
    set_seed(seed)
    assert again == seed and torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(("warmup", "steps", "cycles"), [(0, 7, 0.5), (3, 10, 0.5), (10, 5, 0.5), (2, 9, 1.5)])
def test_the_schedule_is_torchtunes(warmup: int, steps: int, cycles: float) -> None:
    torchao_shim.install()
    from torchtune.training import lr_schedulers

    rates = []
    for build in (get_cosine_schedule_with_warmup, lr_schedulers.get_cosine_schedule_with_warmup):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
        schedule = build(optimizer, num_warmup_steps=warmup, num_training_steps=steps, num_cycles=cycles)
        rates.append([])
        for _ in range(steps + 3):
            rates[-1].append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
    assert rates[0] == rates[1] and len(set(rates[0])) > 3

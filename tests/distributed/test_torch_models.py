"""PyTorch's own FSDP2 test models train with OffloadOptimizer as with the plain optimizer, to the last bit."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import OffloadOptimizer
from offload.simulation.accelerator import SimulatedAccelerator
from tests.distributed.ranks import Ranks
from tests.distributed.training import device, differing, made, parts, states_of

pytest.importorskip("expecttest", reason="pip install expecttest")

STEPS = 3

WAYS = [(strategy, in_backward) for in_backward in (True, False) for strategy in ("stream", "host", "resident")]


ALIKE = {("threaded", "resident"), ("simulated", "resident")}
"""As on the CPU: it makes no use of streams."""


def names(count: int) -> list[str]:
    from tests.distributed.torch_models import OF_FOUR, SUBJECTS

    return [name for name in SUBJECTS if (name in OF_FOUR) == (count == 4)]


def trained(name: str, way: tuple[str, bool] | None, simulator: SimulatedAccelerator | None = None) -> list[Tensor]:
    """Losses, parameters and states; without a way, of the plain optimizer."""
    from tests.distributed.torch_models import SUBJECTS, inputs

    subject = SUBJECTS[name]
    model = made(subject.build)
    groups = subject.groups(model)
    optimizer: Any
    if way is None:
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    else:
        strategy, in_backward = way
        optimizer = OffloadOptimizer(
            groups, strategy=strategy, update_in_backward=in_backward, model=model, lr=1e-2, fused=True
        )  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if subject.is_scaled else None
    seen = []
    for step in range(STEPS):
        for micro in range(subject.accumulation):
            is_last = micro == subject.accumulation - 1
            subject.before(model, step, is_last)
            with nullcontext() if way is None or is_last else optimizer.accumulate():
                loss = subject.loss(model, inputs(subject, step, micro))
                (loss if scaler is None else scaler.scale(loss)).backward()
            seen.append(loss.detach().clone())
        if scaler is None:
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    if way is not None:
        optimizer.synchronize()
    seen += [*parts(model.parameters()), *states_of(optimizer)]
    if simulator is not None:
        simulator.finish()  # what was read is freed with the optimizer
    return seen


def compare(count: int, kind: str, ways: list[list[tuple[str, bool]]]) -> list[str]:
    """What differs, by model and way."""
    from tests.distributed.torch_models import SUBJECTS

    found = []
    for name, mine in zip(names(count), itertools.cycle(ways)):
        for strategy, in_backward in mine:
            # A scaler unscales gradients before the update, which excludes updates in backward.
            way = strategy, in_backward and not SUBJECTS[name].is_scaled
            try:
                want = trained(name, None)
                with device(kind) as simulator:
                    problem = differing(trained(name, way, simulator), want)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                found.append(f"{name}, {way}: {problem}")
    return found


def test_torchs_models_train_as_in_plain_fsdp2(ranks: Ranks) -> None:
    """A sample: each model in one way."""
    for found in ranks.run(2, compare, 2, "threaded", [[way] for way in WAYS]):
        assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in ("cpu", "threaded", "simulated") for way in WAYS if (kind, way[0]) not in ALIKE],
    ids=str,
)
def test_every_model_in_every_way(ranks: Ranks, way: tuple[str, bool], kind: str, count: int) -> None:
    for found in ranks.run(count, compare, count, kind, [[way]]):
        assert found == []

"""schedulefree's optimizers, whose parameters have other values in training than in evaluation and when saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from offload.errors import UserError
from offload.simulation.accelerator import SimulatedAccelerator

schedulefree = pytest.importorskip("schedulefree", reason="pip install schedulefree")

CLASSES = ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 3))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    return (model(inputs) - inputs[:, :3].sin()).square().mean()


def train(optimizer_class: str, strategy: str | None, *, resume: bool = False, **settings: Any) -> list[float]:
    """Losses in training and, every second step, in evaluation."""
    base = getattr(schedulefree, optimizer_class)

    def build(model: nn.Module) -> Any:
        if strategy is None:
            return base(model.parameters(), lr=0.05)
        return OffloadOptimizer(model.parameters(), base, strategy=strategy, model=model, lr=0.05, **settings)

    model = make_model()
    optimizer = build(model)
    losses = []
    optimizer.train()
    for seed in range(6):
        loss = loss_of(model, seed)
        loss.backward()
        if strategy is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if seed % 2:
            optimizer.eval()
            losses.append(loss_of(model, 100).item())
            if resume and seed == 3:
                weights, state = model.state_dict(), optimizer.state_dict()
                model = make_model()
                model.load_state_dict(weights)
                optimizer = build(model)
                optimizer.load_state_dict(state)
            optimizer.train()
    return losses


@pytest.mark.parametrize("optimizer_class", CLASSES)
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("resident", {}), ("host", {}), ("host", {"offload_gradients": True})],
    ids=["resident", "host", "host with gradients"],
)
@pytest.mark.parametrize("machine", ["cpu", "late"])
def test_trajectory_and_evaluation_equal_the_plain_class(
    monkeypatch: pytest.MonkeyPatch, machine: str, strategy: str, settings: dict[str, Any], optimizer_class: str
) -> None:
    expected = train(optimizer_class, None)
    assert expected[2] != expected[3]  # one loss in training, one in evaluation
    if machine == "cpu":
        assert train(optimizer_class, strategy, **settings) == expected
        assert train(optimizer_class, strategy, resume=True, **settings) == expected
        return
    with SimulatedAccelerator(order="late") as simulator:
        monkeypatch.setattr("offload.machinery.runtime_for", lambda device: simulator)
        assert train(optimizer_class, strategy, **settings) == expected


@pytest.mark.parametrize("settings", [{"strategy": "stream"}, {"strategy": "host", "update_in_backward": True}])
def test_what_needs_updates_of_single_parameters_is_refused(settings: dict[str, Any]) -> None:
    """Their step counts lie in the group and would count pieces."""
    with pytest.raises(UserError, match=r"AdamWScheduleFree .* use strategy=host with update_in_backward=False"):
        OffloadOptimizer(make_model().parameters(), schedulefree.AdamWScheduleFree, lr=0.1, **settings)


def test_modes_of_other_optimizers_change_nothing() -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = OffloadOptimizer(model.parameters(), lr=0.1)
    optimizer.eval()
    optimizer.train()
    assert all(map(torch.equal, before, model.parameters()))


class Doubling(torch.optim.AdamW):
    """Updates each parameter alone, so that updates go on after ``step()``; evaluates with doubled weights."""

    per_parameter = True

    def _scale(self, factor: float) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(factor)

    def eval(self) -> None:
        self._scale(2.0)

    def train(self) -> None:
        self._scale(0.5)


@pytest.mark.parametrize("strategy", ["stream", "host"])
def test_a_switch_waits_for_updates_that_are_still_under_way(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    def weights(model: nn.Module, optimizer: Any) -> list[Tensor]:
        for seed in range(3):
            loss_of(model, seed).backward()
            optimizer.step()
            optimizer.eval()
            optimizer.train()
            optimizer.zero_grad()
        optimizer.eval()
        return [param.detach().clone() for param in model.parameters()]

    model = make_model()
    expected = weights(model, Doubling(model.parameters(), lr=0.05))
    with SimulatedAccelerator(order="late") as simulator:
        monkeypatch.setattr("offload.machinery.runtime_for", lambda device: simulator)
        model = make_model()
        optimizer = OffloadOptimizer(model.named_parameters(), Doubling, strategy=strategy, model=model, lr=0.05)
        for got, wanted in zip(weights(model, optimizer), expected, strict=True):
            assert torch.equal(got, wanted)

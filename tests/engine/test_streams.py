"""Updates wait for every stream that has to do with them: those that gradients came on, and that of foreign kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import offload.engine.engine
from offload import OffloadOptimizer
from offload.errors import UserError
from offload.simulation.accelerator import RaceError, SimulatedAccelerator
from offload.simulation.streams import Streams
from offload.simulation.threads import Block


@contextmanager
def on_another_stream(simulator: SimulatedAccelerator) -> Iterator[None]:
    """Inside, the caller's current stream is not the one that computes; any other will do."""
    blocks = simulator._threads.main.updating
    blocks.append(Block("the caller's", "down"))
    try:
        yield
    finally:
        blocks.pop()


def backward_on_two_streams(simulator: SimulatedAccelerator, **options: Any) -> list[torch.Tensor]:
    """A layer whose weight's gradient comes on one stream and whose bias's comes on another."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    optimizer = OffloadOptimizer(layer.named_parameters(), lr=1e-2, fused=True, **options)
    for _ in range(3):
        simulator.record().synchronize()
        with on_another_stream(simulator):
            layer.weight.grad = torch.ones_like(layer.weight)
            optimizer._machinery.engine._gradient_ready(layer.weight)
        layer.bias.grad = torch.ones_like(layer.bias)
        optimizer._machinery.engine._gradient_ready(layer.bias)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return [param.detach().clone() for param in layer.parameters()]


def plain() -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        for param in layer.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return [param.detach() for param in layer.parameters()]


@pytest.mark.parametrize("strategy", ["stream", "host"])
def test_an_update_waits_for_each_stream_that_its_gradients_came_on(strategy: str, simulated: Any) -> None:
    for actual, expected in zip(
        backward_on_two_streams(simulated, strategy=strategy, update_in_backward=True), plain(), strict=True
    ):
        assert torch.equal(actual, expected)


def test_without_the_first_stream_it_is_a_race(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    final = offload.engine.engine.Engine._final

    def forgetful(engine: Any, param: Any) -> None:
        for streams in engine._progress.streams.values():
            streams.clear()
        final(engine, param)

    monkeypatch.setattr(offload.engine.engine.Engine, "_final", forgetful)
    with pytest.raises(RaceError):
        backward_on_two_streams(simulated, strategy="stream", update_in_backward=True)


class Foreign(torch.optim.AdamW):
    """Launches on the device's default stream, whichever stream is current, as bitsandbytes' kernels do."""

    per_parameter = elementwise = True
    launch: Callable[[str], Any]

    def step(self, closure: Any = None) -> Any:
        if not hasattr(self.param_groups[0]["params"][0], "offload_range"):
            return super().step(closure)
        with Foreign.launch("compute"):
            return super().step(closure)


class Declared(Foreign):
    launches_on_default_stream = True


def train_foreign(simulator: SimulatedAccelerator, base: type[torch.optim.Optimizer]) -> list[torch.Tensor]:
    Foreign.launch = simulator.launching_on
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = OffloadOptimizer(
        model.named_parameters(), base, strategy="stream", update_in_backward=True, model=model, lr=1e-2, fused=True
    )
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return [param.detach().clone() for param in model.parameters()]


def test_kernels_that_know_no_streams_are_ordered_on_the_default_one(simulated: Any) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        twin(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for actual, expected in zip(train_foreign(simulated, Declared), twin.parameters(), strict=True):
        assert torch.equal(actual, expected)


def test_on_the_update_stream_they_would_read_states_that_have_not_arrived(simulated: Any) -> None:
    with pytest.raises(RaceError):
        train_foreign(simulated, Foreign)


def test_bitsandbytes_is_taken_for_such(monkeypatch: pytest.MonkeyPatch, simulated: Any) -> None:
    layer = nn.Linear(8, 8)
    optimizer: Any = OffloadOptimizer(layer.named_parameters(), "bitsandbytes.optim.AdamW8bit", strategy="stream")
    assert optimizer._machinery.worker._on_default
    optimizer = OffloadOptimizer(layer.named_parameters(), "torch.optim.AdamW", strategy="stream")
    assert not optimizer._machinery.worker._on_default


@pytest.mark.parametrize("strategy", ["stream", "host"])
@pytest.mark.parametrize(
    ("base", "options"),
    [("bitsandbytes.optim.PagedAdamW8bit", {}), ("bitsandbytes.optim.AdamW8bit", {"is_paged": True})],
)
def test_optimizers_that_page_by_themselves_are_refused(strategy: Any, base: str, options: dict[str, Any]) -> None:
    layer = nn.Linear(8, 8)
    with pytest.raises(UserError, match=r"optimizer_class: .* pages its states by itself; .*optim\.AdamW8bit"):
        OffloadOptimizer(layer.parameters(), base, strategy=strategy, **options)


def test_a_device_stream_of_the_simulator_has_the_names_used_here(simulated: Any) -> None:
    streams: Streams = simulated._streams
    assert "down" in streams and "compute" in streams

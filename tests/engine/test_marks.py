"""What a profiler's trace calls the engine's work, and that nothing is called anything while none runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadOptimizer
from offload.engine.marks import ALL, KINDS, PREFIX, Mark, mark, parse
from tests.conftest import ThreadedRuntime
from tests.engine.accelerated import ALL as STRATEGIES

UNITS = {"embedding", "layers.0", "layers.1", "head"}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def train(steps: int = 3, accumulation: int = 1, **options: Any) -> None:
    model = Layers()
    optimizer = OffloadOptimizer(model.named_parameters(), lr=1e-2, model=model, **options)
    for _ in range(steps):
        for part in range(accumulation):
            if part < accumulation - 1:
                with optimizer.accumulate():
                    model(torch.arange(4)).backward()
            else:
                model(torch.arange(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


@contextmanager
def marks(found: dict[str, set[str]]) -> Iterator[None]:
    """Fills ``found`` with the units of each kind that torch's profiler sees, on all threads."""
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config
    ) as profiler:
        yield
    for event in profiler.events():
        if event.name.startswith(PREFIX):
            seen = parse(event.name)
            assert seen is not None, event.name
            found.setdefault(seen.kind, set()).add(seen.unit)


def test_a_name_is_taken_apart_as_it_was_put_together() -> None:
    for kind in KINDS:
        assert parse(mark(kind, "layers.3")) == Mark(kind, "layers.3")
        assert parse(PREFIX + mark(kind, "layers.3: layers.3.mlp.w1.weight")) == Mark(kind, "layers.3")
    assert parse(mark("update", "a:b: a:b.weight")) == Mark("update", "a:b")
    assert parse("layers.3: update") is None and parse("aten::mm") is None and parse("waiting room") is None


@STRATEGIES
@pytest.mark.parametrize("accumulation", [1, 2])
def test_copies_updates_and_waits_carry_the_names_of_all_units(
    options: dict[str, Any], accumulation: int, threaded: ThreadedRuntime
) -> None:
    found: dict[str, set[str]] = {}
    with marks(found):
        train(accumulation=accumulation, **options)
    if options["strategy"] == "resident":
        assert found["update"] == (UNITS if options["update_in_backward"] else {ALL})
        return
    assert found["update"] == found["wait"] - {ALL} == found["copy up"] == UNITS
    if options["strategy"] == "stream":
        assert found["copy down"] == UNITS
    takes = options["offload_gradients"] and (accumulation > 1 or not options["update_in_backward"])
    assert found.get("gradient down", set()) == (UNITS if takes or options["strategy"] == "host" else set())
    assert found.get("gradient up", set()) == (UNITS if takes and options["strategy"] == "stream" else set())


def test_backward_that_waits_for_memory_names_the_unit_that_gives_it_back(threaded: ThreadedRuntime) -> None:
    found: dict[str, set[str]] = {}
    with marks(found):
        train(strategy="host", update_in_backward=True, in_flight_gib=1e-9)
    assert found["wait in backward"] and found["wait in backward"] <= UNITS


def test_on_the_cpu_updates_are_the_callers_and_carry_names_too() -> None:
    found: dict[str, set[str]] = {}
    with marks(found):
        train(strategy="stream", update_in_backward=True)
    assert found["update"] == UNITS and not {"copy up", "copy down"} & set(found)


@pytest.mark.parametrize("strategy", ["stream", "host"])
def test_no_range_is_made_while_no_profiler_runs(
    strategy: str, threaded: ThreadedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch.profiler, "record_function", made.append)
    train(strategy=strategy, update_in_backward=True, in_flight_gib=1e-9)
    train(strategy=strategy, accumulation=2, offload_gradients=True)
    assert made == []

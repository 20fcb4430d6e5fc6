"""Strategy ``auto``: whatever it moves between steps, and whenever, parameters and states keep their bits."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from offload.auto import SPARE, WARM_UP
from offload.placing import Speeds, first, for_cpu, host_share, spread
from offload.simulation.accelerator import SimulatedAccelerator
from offload.training.step import forward_backward
from tests.conftest import play_device  # type: ignore[import-not-found]
from tests.engine.parity_cases import (  # type: ignore[import-not-found]
    Case,
    assert_equal,
    build_model,
    build_offloaded,
    covering_cases,
    outcome,
    playing,
    rearrange,
    run_backward,
    set_lr,
    train_offloaded,
    train_plain,
)

MIXED = [
    replace(case, strategy="auto", steps=4)
    for case in covering_cases()
    if case.strategy == "stream" and case.device != "cpu"
][::4]


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_units_that_change_their_ways_equal_the_plain_optimizer(case: Case) -> None:
    """Resident, streamed and updated on the host, in turns and side by side."""
    assert_equal(train_offloaded(case), train_plain(case))


@pytest.mark.parametrize("in_backward", [False, True], ids=["at step", "in backward"])
def test_every_way_is_met(in_backward: bool) -> None:
    """The cases above move what they say: three ways at once, and each portion by all of them."""
    case = Case("AdamW", "auto", in_backward)
    with playing(case):
        model = build_model(case)
        optimizer = build_offloaded(case, model)
        assert optimizer.auto is not None
        met: dict[str, set[str]] = {}
        for step in range(4):
            run_backward(case, model, optimizer, step % 2)
            optimizer.step()
            optimizer.zero_grad()
            rearrange(optimizer, step)
            placed = optimizer.auto.placed()
            assert set(placed) == {"resident", "stream", "host"} or step == 0
            for portion in optimizer.auto.portions():
                met.setdefault(portion.slices[0].name, set()).add(portion.way)
        assert sum(ways == {"resident", "stream", "host"} for ways in met.values()) >= 4
        assert sum(entry["units"] for entry in placed.values()) == pytest.approx(
            len(optimizer._machinery.engine.units), abs=1
        )


@pytest.mark.parametrize("device", ["late", "threaded"])
@pytest.mark.parametrize("base", ["AdamW", "packed-AdamW-int8-split"])
@pytest.mark.parametrize("then", ["auto", "stream", "host", "resident"])
def test_a_state_of_units_that_go_all_ways_is_loaded_by_any_strategy(base: str, then: str, device: str) -> None:
    """And one of theirs by units that go all ways."""
    case = Case(base, "auto", device=device, branch=(True,))
    plain = train_plain(replace(case, steps=4))
    with playing(case), torch.compiler.set_stance("force_eager"):
        model = build_model(case)
        before = build_offloaded(case, model)
        for step in range(2):
            _step(case, model, before, step)
            rearrange(before, step + 1)
        read = []  # what is copied from goes when the device is done
        for kind in (then, "auto"):
            saved = copy.deepcopy(before.state_dict())
            after = build_offloaded(replace(case, strategy=kind, device="cpu"), model)
            rearrange(after, 1)
            after.load_state_dict(saved)
            step += 1
            _step(case, model, after, step)
            if kind != then:
                rearrange(after, 2)
            read.append(before)
            before = after
        after.synchronize()
        assert_equal(outcome(model, after, []), replace(plain, norms=[]))


def _step(case: Case, model: nn.Module, optimizer: OffloadOptimizer, step: int) -> None:
    initial = [group["initial"] if "initial" in group else float(group["lr"]) for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, initial, strict=True):
        group["initial"] = lr
    set_lr(optimizer, initial, case.lr_factors[step % len(case.lr_factors)])
    run_backward(case, model, optimizer, step)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()


# ---- what it decides

SCALE, DEVICE = 1024, 10 * 2**30
"""Every byte counts so many times; the device's memory. The model takes 3 GiB, so do gradients, its states 6."""

LAYERS, WIDTH, MOST_ROWS = 12, 256, 160


@contextlib.contextmanager
def roomy_device(memory: int | None = DEVICE) -> Iterator[SimulatedAccelerator]:
    simulator = SimulatedAccelerator(order="late", scale=SCALE, memory=memory)
    with simulator, pytest.MonkeyPatch.context() as patch:
        play_device(patch, simulator)
        yield simulator


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def optimizer_of(model: nn.Module, **choices: Any) -> OffloadOptimizer:
    return OffloadOptimizer(
        model.named_parameters(),
        "torch.optim.AdamW",
        strategy="auto",
        in_flight_gib=0.5 / SCALE,
        model=model,
        lr=1e-3,
        **choices,
    )


def loss_of(model: nn.Module, step: int, rows: int = 4) -> Tensor:
    return model(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()


def train(model: nn.Module, optimizer: Any, step: int, rows: int = 4) -> None:
    loss_of(model, step, rows).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("limit", [None, 8.0], ids=["all that is free", "8 GiB"])
def test_states_fill_what_is_left_and_no_more(limit: float | None) -> None:
    with roomy_device() as simulator:
        model = stack()
        optimizer = optimizer_of(model, device_memory_gib=None if limit is None else limit / SCALE)
        for step in range(5):
            train(model, optimizer, step)
            assert optimizer.auto is not None
            assert optimizer.auto.has_lifted == (step >= WARM_UP - 1)
        simulator.finish()
        assert set(optimizer.auto.placed()) == {"resident", "stream"}
        most = DEVICE if limit is None else limit * 2**30
        portion = 2 * SCALE * 4 * WIDTH**2
        assert most - SPARE * DEVICE - portion < simulator.memory.reserved <= most
        assert simulator.memory.retries == 0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_gives_back_and_the_step_begins_again_where_memory_runs_out(accumulation: int) -> None:
    """A longer batch than those before does not fit beside the states; it fits without them, and no bit differs."""

    def gradients(model: nn.Module, optimizer: Any, step: int) -> None:
        batches: Any = [
            SimpleNamespace(inputs=step + 10 * n, labels=torch.zeros(1), num_labels=1) for n in range(accumulation)
        ]

        def loss(step: int, labels: Tensor, count: int) -> Tensor:
            # It draws again what it drew before memory ran out.
            model_loss = loss_of(model, step, MOST_ROWS if step % 10 == 3 else 4)
            return model_loss * nn.functional.dropout(torch.ones(8)).sum()

        forward_backward(loss, batches, optimizer, contextlib.nullcontext(), measures_norm=False)  # type: ignore[arg-type]

    with roomy_device(memory=None):
        plain = stack()
        reference = optimizer_of(plain)
        torch.manual_seed(1)
        for step in range(5):
            gradients(plain, reference, step)
            reference.step()
            reference.zero_grad()
        reference.synchronize()
    with roomy_device():
        model = stack()
        optimizer = optimizer_of(model)
        torch.manual_seed(1)
        for step in range(5):
            gradients(model, optimizer, step)
            assert optimizer.auto is not None
            assert optimizer.auto.has_lifted == (step == 2)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        assert set(optimizer.auto.placed()) == {"stream"}
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_what_cannot_begin_again_is_raised() -> None:
    """Some layers were updated in the backward that ran out of memory."""
    with roomy_device():
        model = stack()
        optimizer = optimizer_of(model, update_in_backward=True)
        for step in range(3):
            train(model, optimizer, step)
        assert optimizer.auto is not None and optimizer.auto.has_lifted
        loss_of(model, 3).backward()
        assert not optimizer.auto.make_room() and optimizer.auto.has_lifted
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.auto.make_room() and not optimizer.auto.has_lifted


def test_it_gives_a_part_back_where_the_allocator_scrapes_memory_together() -> None:
    with roomy_device() as simulator:
        model = stack()
        optimizer = optimizer_of(model)
        for step in range(3):
            train(model, optimizer, step)
        assert optimizer.auto is not None
        before = optimizer.auto.placed()["resident"]["bytes"]
        simulator.memory.retries += 1
        train(model, optimizer, 3)
        assert 0.5 * before < optimizer.auto.placed()["resident"]["bytes"] < before
        for step in range(4, 6):
            after = optimizer.auto.placed()["resident"]["bytes"]
            train(model, optimizer, step)
            assert optimizer.auto.placed()["resident"]["bytes"] == after


@pytest.mark.parametrize("offload_gradients", [False, True])
@pytest.mark.parametrize("in_backward", [False, True], ids=["at step", "in backward"])
def test_nothing_is_page_locked_after_construction(
    in_backward: bool, offload_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the CPU is tried: its copies and buffers were reserved."""
    monkeypatch.setattr("offload.machinery.is_same_everywhere", lambda base_class: True)
    with roomy_device() as simulator:
        model = stack()
        fast = Speeds(up=1e3, down=1e3, cpu=1e9)
        choices: Any = {"update_in_backward": in_backward, "offload_gradients": offload_gradients, "speeds": fast}
        optimizer = optimizer_of(model, device_memory_gib=8 / SCALE, **choices)
        pins, ways = len(simulator.pins), set[str]()
        for step in range(12):
            train(model, optimizer, step)
            assert optimizer.auto is not None
            ways |= set(optimizer.auto.placed())
        assert ways >= {"resident", "host"}
        assert len(simulator.pins) == pins


def test_shares_of_link_and_cpu_balance_and_are_not_tried_in_vain() -> None:
    even = Speeds(up=4.0, down=4.0, cpu=1.0)
    # A parameter takes the link a second as states, half of one as a weight; the CPU a second: (1 + h) ...
    assert host_share(4.0, 2.0, even) == pytest.approx(2 / 3, abs=0.01)
    assert host_share(4.0, 2.0, replace(even, cpu=0.01)) == 0.0
    assert host_share(4.0, 2.0, replace(even, host=8.0)) == 0.0  # the host's memory is what streaming waits for
    assert host_share(1.0, 2.0, even) == 0.0  # states that are smaller than the weights


@pytest.mark.parametrize("wanted", [0.0, 3.0, 17.0, 50.0, 99.0, 100.0, 1000.0])
def test_what_is_spread_is_even_and_fits(wanted: float) -> None:
    sizes = {name: 1.0 + index % 3 for index, name in enumerate(f"layer {n}" for n in range(50))}
    taken = spread(sizes, sizes.__getitem__, wanted)
    total = sum(sizes.values())
    size = sum(map(sizes.__getitem__, taken))
    assert size <= wanted and size >= min(wanted, total) - 3.0
    half = sum(sizes[name] for name in taken if int(name[6:]) < 25)
    assert abs(half - size / 2) <= 4.0
    assert first(sizes, sizes.__getitem__, wanted)[:1] == ([] if wanted < 1 else ["layer 0"])
    assert all(int(name[6:]) >= 6 for name in for_cpu(list(sizes), sizes.__getitem__, 0.5))

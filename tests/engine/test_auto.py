"""Strategy ``auto``: whatever it moves between steps, and whenever, parameters and states keep their bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.parity_cases import (  # type: ignore[import-not-found]
    Case,
    assert_equal,
    build_model,
    build_offloaded,
    covering_cases,
    playing,
    rearrange,
    run_backward,
    train_offloaded,
    train_plain,
)

MIXED = [
    replace(case, strategy="auto", steps=4)
    for case in covering_cases()
    if case.strategy == "stream" and case.device != "cpu"
][::3]


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
        assert sum(entry["units"] for entry in placed.values()) == pytest.approx(len(optimizer._engine.units), abs=1)

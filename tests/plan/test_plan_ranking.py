"""The list of `tune plan` beside every setting of a grid, as recorded, and what the grid is made of."""

from __future__ import annotations

import json
from typing import Any

import plan_ranking
import pytest
from omegaconf import OmegaConf


@pytest.fixture(scope="module")
def rows() -> Any:
    return json.loads(plan_ranking.RECORD.read_text(encoding="utf-8"))["rows"]


def test_every_line_is_taken_and_fits_by_itself(rows: Any) -> None:
    assert rows and not [problem for row in rows for problem in row["problems"]]


@pytest.mark.parametrize("kind", ["own formats", "any format"])
def test_the_lists_fastest_is_within_a_tenth_of_the_best_of_all(rows: Any, kind: str) -> None:
    assert {row["config"] for row in rows} == set(plan_ranking.CONFIGS)
    behind = {(row["config"], row["machine"]): plan_ranking.short(row, kind) for row in rows}
    assert all(share is None or share < 0.1 for share in behind.values()), behind
    assert sum(share is not None for share in behind.values()) > len(rows) / 2


def test_the_page_has_the_recorded_table(rows: Any) -> None:
    assert plan_ranking.BEGIN + plan_ranking.table(rows) + plan_ranking.END in plan_ranking.PLANNING.read_text(
        encoding="utf-8"
    )


def test_a_row_that_falls_short_is_seen() -> None:
    row = {"config": "a", "machine": "b", "own formats": {"best": 100, "listed": 80},
           "any format": {"best": 0, "listed": 0}}  # fmt: skip
    assert plan_ranking.short(row, "own formats") == pytest.approx(0.2)
    assert "| a | 20 % / – |" in plan_ranking.table([row])


def test_the_grid_has_every_strategy_and_contradicts_nothing() -> None:
    section = {"_component_": "offload.OffloadOptimizer", "optimizer_class": "offload.optim.AdamW"}
    settings: Any = OmegaConf.create({"optimizer": section, "clip_grad_norm": None, "loss": {"num_output_chunks": 8}})
    found = list(plan_ranking.optimizers(settings))
    words = [set(changes) for changes in found]
    assert len(found) == len(set(found))
    for strategy in plan_ranking.STRATEGIES:
        assert any(f"optimizer.strategy={strategy}" in each for each in words)
    assert not any({"optimizer.update_in_backward=True", "optimizer.offload_gradients=True"} <= each for each in words)
    settings.clip_grad_norm = 1.0
    assert not any("optimizer.update_in_backward=True" in changes for changes in plan_ranking.optimizers(settings))
    batches = {changes[0] for changes in plan_ranking.shapes(settings)}
    assert batches == {f"batch_size={each}" for each in plan_ranking.BATCHES}

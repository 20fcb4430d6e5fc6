"""Published speeds: the record is of what the code predicts, its table is in docs, and the differences are bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plan_published
import pytest

from offload.plan.cards import find_card
from offload.plan.efficiency import PUBLISHED
from offload.plan.machines import machine_of_card
from offload.plan.prediction import Settings, predict

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def record() -> Any:
    return json.loads(plan_published.RECORD.read_text(encoding="utf-8"))


def test_the_page_has_the_recorded_table(record: Any) -> None:
    text = plan_published.BEGIN + plan_published.table(record) + plan_published.END
    assert text in (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def test_every_published_run_is_recorded_with_its_source(record: Any) -> None:
    assert [(row["system"], row["card"], row["published"]) for row in record["runs"]] == [
        (run.system, run.card, run.tokens_per_second) for run in PUBLISHED
    ]
    assert all(run.source.startswith("https://") for run in PUBLISHED)


def test_offloaded_and_single_card_runs_are_within_a_sixth(record: Any) -> None:
    """Those of several cards, and those that their notes explain, are told as they are."""
    for row in record["runs"]:
        if row["system"] in ("LLMQ", "LLaMA-Factory"):
            assert abs(row["off_percent"]) < 16, row


@pytest.mark.parametrize("index", [3, 16])
def test_what_is_recorded_is_predicted_still(record: Any, index: int) -> None:
    run, row = PUBLISHED[index], record["runs"][index]
    load = plan_published.load_of(run, {})
    settings = Settings(run.optimizer, run.state_bytes, micro_batches=run.micro_batches)
    found = predict(load, machine_of_card(find_card(run.card)), settings)
    assert found.tokens_per_second == pytest.approx(row["predicted"], rel=0.02)

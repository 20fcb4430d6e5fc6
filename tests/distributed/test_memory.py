"""No process holds a whole copy of weights or states: not while it loads, not while it saves, not while it resumes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.distributed import memory
from tests.distributed.ranks import Ranks
from tests.recipes.conftest import ROOT, load_module

RANKS = 3
WEIGHT, STATE = 2, 4.03
"""Bytes of each parameter: in bf16, and those of the packed AdamW."""

MARGIN = 0.25
"""Of all weights: what is read, converted or written at once, and what else a process allocates by the way."""


def test_the_page_has_the_recorded_table() -> None:
    script = load_module(ROOT / "scripts" / "distributed_memory.py")
    record = json.loads(script.RECORD.read_text(encoding="utf-8"))
    table = script.BEGIN + script.table(record) + script.END
    assert table in (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    for name in ("loaded", "trained", "loading", "saving", "resuming"):
        one, two, four = (max(record["mib"][count][name]) for count in ("1", "2", "4"))
        assert two < 0.55 * one and four < 0.55 * two, name


def test_no_process_holds_a_whole_copy(ranks: Ranks, tmp_path: Path) -> None:
    script = load_module(ROOT / "scripts" / "distributed_memory.py")
    count = script.write_base(tmp_path / "base", memory.SIZES)
    base, out = str(tmp_path / "base"), str(tmp_path / "out")
    (whole, *_) = ranks.run(RANKS, memory.phases, base, out, True)
    # Which would be seen, though as much as a tenth or so lies in memory that was freed before.
    assert whole["loading"] > WEIGHT * count * (1 / RANKS + 2 * MARGIN)
    for grown in ranks.run(RANKS, memory.phases, base, out, False):
        assert grown["loading"] < WEIGHT * count * (1 / RANKS + MARGIN)
        assert grown["saving"] < WEIGHT * count * MARGIN
        assert grown["resuming"] < (WEIGHT + STATE) * count / RANKS + WEIGHT * count * MARGIN

"""Checkpoints of a run that several ranks save: whole or absent, as one process saves them, resumed on any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload.checkpoints.manager import CheckpointManager
from offload.models.torchtune.building import build_as_the_base, load_weights
from offload.training.resume import put_back
from tests.distributed import checkpoints, weights
from tests.distributed.ranks import Ranks
from tests.distributed.test_weights import differing, differing_files
from tests.models.torchtune import test_architecture
from tests.models.torchtune.test_architecture import component, write_checkpoint

PACKED = {"optimizer_class": "offload.optim.AdamW"}
PLAIN = {"optimizer_class": "torch.optim.AdamW"}
WIDE = {**test_architecture.SIZES, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 64}
"""Rows of whole blocks, so that moments are 8-bit codes."""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(test_architecture, "SIZES", WIDE)
    return str(write_checkpoint(tmp_path / "base", "llama3").directory)


def arguments(base: str, out: Path, options: dict[str, Any]) -> tuple[Any, ...]:
    return base, "LLAMA3", "torchtune.models.llama3.llama3", str(out), options


def alone(base: str) -> Any:
    format = weights.torchtune_format(base, "LLAMA3")
    return build_as_the_base(
        component("llama3"), format.base, weights.Tokenizer(), device=weights.CPU, dtype=torch.bfloat16, tell=len
    )


@pytest.mark.parametrize(
    "options",
    [PACKED, {**PACKED, "master": "split24"}, PLAIN],
    ids=["int8", "split24", "AdamW"],
)
def test_resumed_on_any_number_of_ranks_and_on_none(
    options: dict[str, Any], base: str, ranks: Ranks, tmp_path: Path
) -> None:
    given = arguments(base, tmp_path / "run", options)
    want = ranks.run(2, checkpoints.saved, *given)[0]
    for count in (1, 3, 4):
        for got in ranks.run(count, checkpoints.resumed, *given):
            assert differing(got, want) == []
    manager = CheckpointManager(weights.torchtune_format(base, "LLAMA3"), tmp_path / "run")
    found = manager.load_newest()
    assert found is not None and found[1].model is not None
    model = alone(base)
    load_weights(model, found[1].model, source="")
    optimizer = checkpoints.optimizer_of(model, options)
    put_back(found[1].recipe_state, optimizer, None, found[0])
    by_one = CheckpointManager(weights.torchtune_format(base, "LLAMA3"), tmp_path / "one")
    state = {**checkpoints.STATE, "optimizer": optimizer.state_dict()}
    by_one.save(2, model=model.state_dict(), recipe_state=state)
    model_files = [name for name in differing_files(tmp_path / "run", tmp_path / "one") if "model" in name]
    assert model_files == []
    checkpoints.step(model, optimizer, 2)
    got = weights.whole_of(model)
    is_coded = options is not PLAIN  # norms have codes on one device only
    assert [name for name in differing(got, want) if not is_coded or got[name].dim() > 1] == []
    for got in ranks.run(2, checkpoints.resumed, *arguments(base, tmp_path / "one", options)):
        assert [name for name in differing(got, want) if not is_coded or got[name].dim() > 1] == []


def test_replicas_save_once_and_read_alike(base: str, ranks: Ranks, tmp_path: Path) -> None:
    by_two, by_four = (arguments(base, tmp_path / name, PACKED) for name in ("two", "four"))
    want = ranks.run(2, checkpoints.saved, *by_two)[0]
    for got in ranks.run(4, checkpoints.saved, *by_four, 2):
        assert differing(got, want) == []
    files = differing_files(tmp_path / "two", tmp_path / "four")
    assert [name for name in files if "model" in name or "config" in name] == []
    for got in (*ranks.run(4, checkpoints.resumed, *by_two, 2), *ranks.run(2, checkpoints.resumed, *by_four)):
        assert differing(got, want) == []


@pytest.mark.parametrize(("count", "replicas", "room"), [(2, 1, 1 << 20), (4, 2, 1 << 14)], ids=["2", "2x2, no room"])
def test_written_beside_training_it_is_the_same(
    count: int, replicas: int, room: int, base: str, ranks: Ranks, tmp_path: Path
) -> None:
    at_once, beside = (arguments(base, tmp_path / name, PACKED) for name in ("at_once", "beside"))
    want = ranks.run(count, checkpoints.saved, *at_once, replicas)[0]
    for got in ranks.run(count, checkpoints.saved_beside, *beside, replicas, room):
        assert differing(got, want) == []
    assert [path.name for path in (tmp_path / "beside").iterdir()] == ["step_2"]
    files = differing_files(tmp_path / "at_once", tmp_path / "beside")
    assert [name for name in files if "model" in name or "config" in name] == []
    for got in ranks.run(count, checkpoints.resumed, *beside, replicas):
        assert differing(got, want) == []


@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_fails_on_one_rank(failing: int, beside: bool, base: str, ranks: Ranks, tmp_path: Path) -> None:
    """That rank says so in one line and the others stop, nothing of the checkpoint remains, the one before is whole."""
    given = (base, "LLAMA3", "torchtune.models.llama3.llama3", str(tmp_path / "run"), failing, beside)
    answers = ranks.run(2, checkpoints.saved_while_a_disk_fails, *given)
    assert [stops for _, stops in answers] == [True, True]
    assert "No space left on device" in answers[failing][0] and "step_2" in answers[failing][0]
    assert answers[1 - failing][0] == ""
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_1"]
    manager = CheckpointManager(weights.torchtune_format(base, "LLAMA3"), tmp_path / "run")
    assert manager.load(tmp_path / "run" / "step_1").step == 1

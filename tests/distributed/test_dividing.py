"""How processes divide a model, where the config leaves it to them, and what weights that are kept save."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from offload.training import distributed
from tests.distributed.ranks import Ranks
from tests.distributed.test_recipes import STEPS, Case, differing, run_on_rank
from tests.recipes.conftest import Workspace

MICRO_BATCHES = 2


def gathers(config: str, room: int | None, overrides: list[str]) -> tuple[int, int, str]:
    """The all-gathers of a run's steps on this rank, its groups of parameters, and what it printed."""
    calls, trains, printed = 0, False, io.StringIO()
    groups: list[int] = []
    gather, shard, keep_gathered = _fsdp_param_group.foreach_all_gather, distributed.shard, distributed.keep_gathered

    def count(*args: Any) -> Any:
        nonlocal calls
        calls += trains
        return gather(*args)

    def keep(model: torch.nn.Module, keeps: bool) -> None:
        nonlocal trains
        trains = True  # loading is over
        keep_gathered(model, keeps)

    def divided(model: torch.nn.Module, blocks: list[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        groups.append(len(blocks) + 1)
        shard(model, blocks, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(_fsdp_param_group, "foreach_all_gather", count)
        patch.setattr(distributed, "shard", divided)
        patch.setattr(distributed, "keep_gathered", keep)
        if room is not None:
            patch.setattr(distributed, "room", lambda device, world: (None, room + world.rank))
        assert run_on_rank("full", config, overrides) == 0
    return calls, groups[0], printed.getvalue()


def test_weights_that_fit_are_kept_and_gathered_once_a_step(ranks: Ranks, workspace: Workspace, tmp_path: Path) -> None:
    case = Case(accumulation=MICRO_BATCHES)
    config = str(workspace.config("full_finetune_single_device"))
    folders, results = {}, {}
    for name, room, words in (
        ("again", None, ["reshard_after_forward=True"]),
        ("kept", 2**40, ["reshard_after_forward=auto", "data_parallel_replicate_dim=auto"]),
        ("too large", 2**20, ["reshard_after_forward=auto"]),
    ):
        folders[name] = tmp_path / name
        overrides = [f"output_dir={folders[name]}", "batch_size=4", "evaluation=null", *case.overrides(), *words]
        results[name] = ranks.run(2, gathers, config, room, overrides)
    for calls, groups, _ in results["kept"]:
        assert calls == STEPS * groups
    for name in ("again", "too large"):
        for calls, groups, _ in results[name]:
            # The head's group is kept from forward to backward anyway, and from one micro-batch to the next; the
            # embedding's backward needs no weights.
            layers = groups - 2
            assert calls == STEPS * (1 + MICRO_BATCHES * (1 + 2 * layers))
    (_, _, told), (_, _, silent) = results["kept"]
    assert "auto: weights kept from forward to backward: " in told
    assert "auto:" not in silent
    assert "auto: weights gathered again for backward: nothing fits" in results["too large"][0][2]
    for name in ("kept", "too large"):
        assert differing(folders[name], folders["again"]) == []

"""The program of docs/own-loop.md runs as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.ranks import Ranks
from tests.distributed.training import Llama, loss_of, made

PAGE = Path(__file__).parents[2] / "docs" / "own-loop.md"


def program() -> str:
    return PAGE.read_text().split("## Several GPUs: FSDP2")[1].split("```python\n")[1].split("```")[0]


def run_program(folder: str) -> tuple[float, float]:
    """The loss before and after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(torch.distributed, "init_process_group", lambda: None)  # the ranks are in one
        names: dict[str, Any] = {
            "device_type": "cpu",
            "build_model": lambda: made(Llama).bfloat16(),
            "steps": [[0, 1]] * 20,
            "loss": _loss,
        }
        exec(program().replace("1e-5", "1e-2"), names)
    first = float(_loss(made(Llama).bfloat16(), 0))
    return first, float(_loss(names["model"], 0))


def _loss(model: nn.Module, batch: int) -> Tensor:
    return loss_of(model, batch)


def test_the_program_trains_saves_and_loads(ranks: Ranks, tmp_path: Path) -> None:
    for before, after in ranks.run(2, run_program, str(tmp_path)):
        assert after < before / 2
    assert (tmp_path / "checkpoint" / ".metadata").exists()

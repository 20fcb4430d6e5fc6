"""The recipes for several processes against those for one device, on the same batches of all processes.

Bounds: in fp32 the gradients of one batch, summed over processes, differ by rounding from those of one process. Losses
agree within ``LOSS`` relatively. Weights agree within ``WEIGHTS`` of the longest step of the run: AdamW divides by the
gradient's own size, so that an element whose gradient is itself of the size of rounding moves by another amount.

The packed AdamW keeps fp32 moments here: codes of 8 bits turn any difference into one of a code (that the same
gradients give the same codes, see ``test_packed.py``).
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.ranks import Ranks
from tests.recipes.conftest import ROOT, Workspace, load_module

LOSS = 2e-6
WEIGHTS = 1e-3
NORM = 5e-5
"""Of the gradients, relatively: PyTorch sums a tensor's squares in fp32 one after the other."""

STEPS = 3
NAMES = {"full": "FullFinetuneRecipe", "lora": "LoRAFinetuneRecipe"}
SINGLE, DISTRIBUTED = "SingleDevice", "Distributed"


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        method: ``full`` or ``lora``.
        accumulation: micro-batches of a step.
    """

    ranks: int = 2
    method: str = "full"
    strategy: str = "stream"
    in_backward: bool = False
    accumulation: int = 1
    clips: bool = True
    base: str = "torch.optim.AdamW"

    def __str__(self) -> str:
        when = "backward" if self.in_backward else "step"
        clip = "clipped" if self.clips else "free"
        return (
            f"{self.ranks}-{self.method}-{self.strategy}-{when}-x{self.accumulation}-{clip}-{self.base.split('.')[0]}"
        )

    def overrides(self) -> list[str]:
        return [
            f"optimizer.strategy={self.strategy}",
            f"optimizer.update_in_backward={self.in_backward}",
            f"optimizer.optimizer_class={self.base}",
            *(["~optimizer.fused", "+optimizer.state_dtype=fp32"] if self.base.startswith("offload.") else []),
            f"gradient_accumulation_steps={self.accumulation}",
            f"clip_grad_norm={0.5 if self.clips else 'null'}",
            f"max_steps_per_epoch={STEPS}",
        ]


PRODUCT = [
    case
    for case in itertools.starmap(
        Case,
        itertools.product(
            (2, 4),
            ("full", "lora"),
            ("resident", "stream", "host"),
            (False, True),
            (1, 4),
            (False, True),
            ("torch.optim.AdamW", "offload.optim.AdamW"),
        ),
    )
    if not (case.in_backward and case.clips)  # refused
]
SAMPLE = [
    Case(),
    Case(strategy="host", accumulation=4, base="offload.optim.AdamW"),
    Case(strategy="resident", in_backward=True, clips=False),
    Case(in_backward=True, accumulation=4, clips=False, base="offload.optim.AdamW"),
    Case(4, strategy="host", accumulation=4),
]


def run_on_rank(method: str, config: str, overrides: list[str]) -> int:
    """A recipe as one of several processes; its status."""
    from offload.training.launch import run_recipe

    module = load_module(ROOT / "recipes" / f"{method}_finetune_distributed.py")
    return run_recipe(getattr(module, f"{NAMES[method]}{DISTRIBUTED}"), ["--config", config, *overrides])


def run_single(workspace: Workspace, method: str, output_dir: Path, *overrides: str) -> Path:
    result = workspace.run(output_dir, *overrides, recipe=f"{method}_finetune_single_device")
    assert result.status == 0, result.err
    return output_dir


def run_distributed(
    ranks: Ranks, workspace: Workspace, count: int, method: str, output_dir: Path, *overrides: str, status: int = 0
) -> Path:
    config = str(workspace.config(f"{method}_finetune_single_device"))
    assert ranks.run(count, run_on_rank, method, config, [f"output_dir={output_dir}", *overrides]) == [status] * count
    return output_dir


def lines(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def trained(output_dir: Path, step: int, method: str = "full") -> dict[str, torch.Tensor]:
    """What trained, as it was saved."""
    folder = output_dir / f"step_{step}"
    (file,) = (folder / "adapter").glob("*.safetensors") if method == "lora" else folder.glob("*.safetensors")
    return load_file(file)


def differing(got: Path, want: Path, method: str = "full", step: int = STEPS, first: Path | None = None) -> list[str]:
    """What differs between two runs by more than the bounds."""
    found = []
    for one, other in zip(lines(got), lines(want), strict=True):
        assert one["step"] == other["step"]
        for key, bound in (("loss", LOSS), ("evaluation/loss", LOSS), ("grad_norm", NORM)):
            if other.get(key) is not None and abs(one[key] / other[key] - 1) > bound:
                found.append(f"{key} of step {one['step']}: {one[key]}, not {other[key]}")
        for key in ("tokens_seen", "lr"):
            if one[key] != other[key]:
                found.append(f"{key} of step {one['step']}: {one[key]}, not {other[key]}")
    mine, theirs = trained(got, step, method), trained(want, step, method)
    assert mine.keys() == theirs.keys()
    moved = max(line["lr"] for line in lines(want))
    for name, tensor in theirs.items():
        worst = float((mine[name] - tensor).abs().max())
        if worst > WEIGHTS * moved:
            found.append(f"{name}: {worst:.2g} apart, with steps of at most {moved:.2g}")
    return found


def check(case: Case, ranks: Ranks, workspace: Workspace, folder: Path) -> None:
    each = 8 // case.ranks
    want = run_single(workspace, case.method, folder / "one", "batch_size=8", *case.overrides())
    got = run_distributed(
        ranks, workspace, case.ranks, case.method, folder / "many", f"batch_size={each}", *case.overrides()
    )
    assert differing(got, want, case.method) == []


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_as_one_process_with_the_same_batch(case: Case, ranks: Ranks, workspace: Workspace, tmp_path: Path) -> None:
    check(case, ranks, workspace, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in PRODUCT if case not in SAMPLE], ids=str)
def test_as_one_process_in_every_way(case: Case, ranks: Ranks, workspace: Workspace, tmp_path: Path) -> None:
    check(case, ranks, workspace, tmp_path)

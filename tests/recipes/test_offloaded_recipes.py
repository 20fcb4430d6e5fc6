"""The recipes with updates that go on beside them: the CPU played as a device of its own, with real threads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

STREAM = ("optimizer.strategy=stream",)
HOST = ("optimizer.strategy=host",)
IN_BACKWARD = ("optimizer.update_in_backward=True", "clip_grad_norm=null")
GRADIENTS = ("optimizer.offload_gradients=True",)
WAYS = {
    "stream": STREAM,
    "stream in backward": (*STREAM, *IN_BACKWARD),
    "stream in backward with gradients": (*STREAM, *IN_BACKWARD, *GRADIENTS),
    "host": HOST,
    "host with gradients": (*HOST, *GRADIENTS),
    "host in backward": (*HOST, *IN_BACKWARD),
    "host in backward with gradients": (*HOST, *IN_BACKWARD, *GRADIENTS),
}

PACKED = ("optimizer.optimizer_class=offload.optim.AdamW", "dtype=bf16")


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@pytest.fixture
def common(workspace: Any) -> tuple[str, ...]:
    """Everything at once: accumulation, activation checkpointing, evaluation in between, a checkpoint on the way."""
    evaluation = (workspace.path / "evaluation.json").read_text()
    settings = ("gradient_accumulation_steps=2", "enable_activation_checkpointing=True", "save_every_n_steps=10")
    return (*settings, f"evaluation={evaluation}")


@pytest.mark.parametrize("way", WAYS)
def test_equals_plain_adamw_bit_for_bit(
    workspace: Any, tmp_path: Path, threaded: Any, common: tuple[str, ...], way: str
) -> None:
    clip = [override for override in WAYS[way] if override.startswith("clip")]
    plain = workspace.run(tmp_path / "plain", "optimizer=torch.optim.AdamW", *common, *clip)
    assert plain.status == 0, plain.err
    result = workspace.run(tmp_path / "offloaded", *common, *WAYS[way])
    assert result.status == 0, result.err
    for step in (10, 20):
        assert_same(result.weights(step), plain.weights(step))
    for key in ("loss", "evaluation/loss", "lr"):
        assert [row.get(key) for row in result.rows] == [row.get(key) for row in plain.rows]
    norms = [row["grad_norm"] for row in result.rows]
    assert norms == pytest.approx([row["grad_norm"] for row in plain.rows], rel=1e-6)


@pytest.mark.parametrize("optimizer", [(), PACKED], ids=["torch's AdamW", "packed AdamW"])
@pytest.mark.parametrize("way", ["stream in backward", "host in backward"])
def test_resumes_bit_for_bit(
    workspace: Any, tmp_path: Path, threaded: Any, common: tuple[str, ...], way: str, optimizer: tuple[str, ...]
) -> None:
    """From a checkpoint that was saved while updates were under way; what bf16 weights lack of fp32 included."""
    common = (*common, *WAYS[way], *optimizer)
    whole = workspace.run(tmp_path / "whole", *common)
    assert whole.status == 0, whole.err
    shutil.copytree(tmp_path / "whole" / "step_10", tmp_path / "resumed" / "step_10")
    resumed = workspace.run(tmp_path / "resumed", *common, "resume_from_checkpoint=True")
    assert resumed.status == 0, resumed.err
    assert_same(resumed.weights(20), whole.weights(20))


def test_a_packed_run_resumes_in_another_format_and_under_torchs_adamw(workspace: Any, tmp_path: Path) -> None:
    """int8 and split in backward, bf16 and no master, torch's AdamW offloaded and plain, and the first again."""
    common = ("dtype=bf16", "clip_grad_norm=null", "save_every_n_steps=4")
    packed = (*PACKED, "optimizer.strategy=stream")
    ways = [
        packed,
        (*packed, "optimizer.state_dtype=bf16", "optimizer.master=none"),
        (),
        packed,
        ("optimizer=torch.optim.AdamW",),
    ]
    for done, chosen in enumerate(ways):
        resume = f"resume_from_checkpoint={done > 0}"
        result = workspace.run(tmp_path / "run", *common, *chosen, resume, f"max_steps_per_epoch={4 * done + 4}")
        assert result.status == 0, result.err
        path = tmp_path / "run" / f"step_{4 * done + 4}" / "recipe_state.pt"
        saved = torch.load(path, weights_only=True)["recipe_state"]["optimizer"]["state"][0]
        if chosen[:1] != PACKED[:1]:
            # Moments, not their codes.
            assert saved["exp_avg"].dtype == torch.bfloat16 and "exp_avg_scale" not in saved
            assert saved["exp_avg"].abs().max() < 1 and 0 <= saved["exp_avg_sq"].min() < 1
    losses = [row["loss"] for row in result.rows]
    assert len(losses) == 20 and losses[-1] < losses[0]


def test_clipping_is_refused_before_the_first_step(workspace: Any, tmp_path: Path) -> None:
    result = workspace.run(tmp_path / "run", "optimizer.update_in_backward=True", "clip_grad_norm=1.0")
    assert result.status == 2
    (error,) = [line for line in result.err.splitlines() if line.startswith("error:")]
    assert "clip_grad_norm" in error and "optimizer.update_in_backward=False" in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

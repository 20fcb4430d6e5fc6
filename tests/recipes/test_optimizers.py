"""Which optimizers the recipes train with, which they refuse, and which states they go on with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.errors import UserError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer=torch.optim.SparseAdam"], "torch.optim.SparseAdam takes sparse gradients only"),
        (["optimizer=torch.optim.LBFGS"], "torch.optim.LBFGS needs a closure"),
        (
            ["optimizer.optimizer_class=torch.optim.LBFGS", "optimizer.strategy=resident"],
            "torch.optim.LBFGS needs a closure",
        ),
        (["optimizer=torchao.optim.CPUOffloadOptimizer"], "use optimizer=offload.TorchAOCPUOffloadOptimizer"),
    ],
    ids=["SparseAdam", "LBFGS", "resident LBFGS", "CPUOffloadOptimizer"],
)
def test_what_no_recipe_can_step_is_refused_in_one_line(
    workspace: Any, tmp_path: Path, overrides: list[str], message: str
) -> None:
    result = workspace.run(tmp_path / "run", *overrides)
    assert result.status == 2
    (line,) = result.errors()
    assert message in line and "Traceback" not in result.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_state_of_another_optimizer_or_dtype_is_refused_in_one_line(workspace: Any, tmp_path: Path) -> None:
    short = ("max_steps_per_epoch=2", "lr_scheduler=null")
    first = workspace.run(tmp_path / "run", *short)
    assert first.status == 0, first.err
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    again = ("max_steps_per_epoch=4", "lr_scheduler=null", "resume_from_checkpoint=True")
    for overrides, message in (
        (["optimizer=torch.optim.Adafactor"], "of torch.optim.AdamW, with which torch.optim.Adafactor cannot"),
        (["optimizer.optimizer_class=torch.optim.SGD"], "of torch.optim.AdamW, with which torch.optim.SGD cannot"),
        (["dtype=bf16"], "dtype: the checkpoint's run was in fp32"),
    ):
        result = workspace.run(tmp_path / "run", *again, *overrides)
        assert result.status == 2, result.err
        (line,) = result.errors()
        assert message in line and "begin a new run from its weights" in line and "Traceback" not in result.err
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()} == before
    # A plain AdamW, and one that converts what it loads, go on.
    for index, overrides in enumerate(
        (["optimizer=torch.optim.AdamW"], ["optimizer.optimizer_class=offload.optim.AdamW"])
    ):
        result = workspace.run(tmp_path / "run", *again[1:], f"max_steps_per_epoch={3 + index}", *overrides)
        assert result.status == 0, result.err


@pytest.mark.parametrize("recipe", ["full_finetune_single_device", "lora_finetune_single_device"])
def test_schedulefree_trains_evaluates_saves_and_resumes(workspace: Any, tmp_path: Path, recipe: str) -> None:
    pytest.importorskip("schedulefree", reason="pip install schedulefree")
    common = (
        "lr_scheduler=null", "max_steps_per_epoch=4", "save_every_n_steps=2", 
        f"evaluation={(workspace.path / 'evaluation.json').read_text()}", "evaluation.every_n_steps=2",
    )  # fmt: skip
    plain = ("optimizer=schedulefree.AdamWScheduleFree", *common)
    ours = ("optimizer.optimizer_class=schedulefree.AdamWScheduleFree", *common)
    runs = {}
    for name, overrides in {"plain": plain, "ours": ours}.items():
        runs[name] = workspace.run(tmp_path / name, *overrides, recipe=recipe)
        assert runs[name].status == 0, runs[name].err
    shutil.copytree(tmp_path / "ours", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "step_4")
    runs["resumed"] = workspace.run(tmp_path / "resumed", *ours, "resume_from_checkpoint=True", recipe=recipe)
    assert runs["resumed"].status == 0, runs["resumed"].err
    expected = runs["plain"].weights(4)
    for name in ("ours", "resumed"):
        weights = runs[name].weights(4)
        assert all(torch.equal(weights[key], expected[key]) for key in expected), name
        for key in ("loss", "evaluation/loss"):
            values, wanted = ([row.get(key) for row in runs[which].rows][-2:] for which in (name, "plain"))
            assert values == wanted


GROUPS = """[
  {params: ".*(norm|scale|lora_b).*", weight_decay: 0.0, optimizer_class: torch.optim.AdamW, lr: 0.003, fused: True},
  {params: "tok_embeddings.*|output.*|layers.1.*lora_a.*", optimizer_class: torch.optim.AdamW, lr: 0.001, fused: True},
]"""


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [
        ("full_finetune_single_device", ["optimizer.strategy=stream", "+optimizer.update_in_backward=True"]),
        ("lora_finetune_single_device", ["optimizer.strategy=host", "+optimizer.offload_gradients=True"]),
    ],
)
def test_muon_beside_adamw_by_parameters_names(
    workspace: Any, tmp_path: Path, recipe: str, strategy: list[str]
) -> None:
    common = (
        "optimizer.optimizer_class=torch.optim.Muon", f"+optimizer.param_groups={GROUPS}", "clip_grad_norm=null",
        "max_steps_per_epoch=4", "save_every_n_steps=2",
    )  # fmt: skip
    expected = workspace.run(tmp_path / "resident", *common, "optimizer.strategy=resident", recipe=recipe)
    assert expected.status == 0, expected.err
    ours = workspace.run(tmp_path / "ours", *common, *strategy, recipe=recipe)
    assert ours.status == 0, ours.err
    shutil.copytree(tmp_path / "ours", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "step_4")
    again = (*common, *strategy, "resume_from_checkpoint=True")
    resumed = workspace.run(tmp_path / "resumed", *again, recipe=recipe)
    assert resumed.status == 0, resumed.err
    wanted = expected.weights(4)
    for result in (ours, resumed):
        weights = result.weights(4)
        assert all(torch.equal(weights[key], wanted[key]) for key in wanted)
    rates = [row["lr"] for row in ours.rows]
    assert max(rates) == 0.01  # what is logged is the rate of what no pattern matches
    changed = GROUPS.replace("tok_embeddings.*|", "")
    for overrides, message in (
        ([f"optimizer.param_groups={changed}"], "optimizer.param_groups: those of the checkpoint's run are"),
        (["dtype=bf16"], "dtype: the checkpoint's run was in fp32"),
    ):
        result = workspace.run(tmp_path / "resumed", *again, "max_steps_per_epoch=6", *overrides, recipe=recipe)
        assert result.status == 2, result.err
        (line,) = result.errors()
        assert message in line


def test_validate_reads_parameter_groups(workspace: Any) -> None:
    from offload.cli import validate

    config = str(workspace.config("full_finetune_single_device"))
    common = ["output_dir=x", '+optimizer.param_groups=[{params: ".*norm.*", weigth_decay: 0.0}]']
    workspace.capture.readouterr()
    with pytest.raises(UserError, match=r"optimizer\.param_groups\.0\.weigth_decay: .* did you mean weight_decay\?"):
        validate.validate(config, common, recipe="full_finetune_single_device")


def test_a_label_names_every_class() -> None:
    from offload import OffloadOptimizer
    from offload.metrics.optimizer_label import optimizer_facts

    layer = torch.nn.Linear(2, 2)
    groups = [{"params": "bias", "optimizer_class": "torch.optim.AdamW"}]
    optimizer = OffloadOptimizer(layer.named_parameters(), "torch.optim.Muon", param_groups=groups, lr=0.1)
    assert optimizer_facts(optimizer)["class"] == "torch.optim.Muon+torch.optim.AdamW"

"""Mistakes with a folder of transformers: each is one line that names the key and the way out, or a warning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from offload.training.launch import run_recipe
from tests.recipes.conftest import ROOT, Workspace, load_module  # type: ignore[import-not-found]

FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"


@pytest.fixture
def here(workspace: Workspace, tmp_path: Path) -> Workspace:
    mine = Workspace(tmp_path / "configs", workspace.recipes, workspace.capture)
    mine.path.mkdir()
    base = shutil.copytree(workspace.path / "base", tmp_path / "base")
    for recipe in (FULL, LORA):
        config = yaml.safe_load(workspace.config(recipe).read_text())
        del config["checkpointer"]
        config |= {"evaluation": None, "max_steps_per_epoch": 4, "save_every_n_steps": 1}
        config["model"] = {"_component_": "offload.models.huggingface.from_pretrained", "path": str(base)}
        if recipe == LORA:
            config["adapter"] = {"_component_": "peft.LoraConfig", "r": 4, "target_modules": ["q_proj"]}
        mine.config(recipe).write_text(yaml.safe_dump(config))
    return mine


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "the name of a repository": (
        FULL,
        ["model.path=Qwen/Qwen3-8B"],
        r"`tune download Qwen/Qwen3-8B`, and give model.path=~/models/Qwen3-8B",
    ),
    "a file": (FULL, ["model.path={base}/config.json"], "is a file: give the folder that it lies in, model.path="),
    "a folder of folders": (FULL, ["model.path={base}/.."], "did you mean model.path="),
    "a warm-up of less than nothing": (
        FULL,
        ["lr_scheduler=offload.training.schedules.get_cosine_schedule_with_warmup", "lr_scheduler.num_warmup_steps=-3"],
        "num_warmup_steps: expected at least 0, got -3",
    ),
    "a pattern that is none": (LORA, ["adapter.target_modules='[q_'"], "adapter: unterminated character set"),
    "what precedes a prompt": (
        LORA,
        ["adapter={{_component_: peft.PrefixTuningConfig, num_virtual_tokens: 4}}"],
        "adapter: PrefixTuningConfig trains what precedes a prompt",
    ),
    "another task": (LORA, ["+adapter.task_type=SEQ_CLS"], "adapter.task_type: got 'SEQ_CLS', expected CAUSAL_LM"),
    "a module that is not there": (
        LORA,
        ["+adapter.modules_to_save=[lm_haed]"],
        "adapter.modules_to_save: the model has no module lm_haed; did you mean lm_head?",
    ),
    "columns that are no mapping": (
        FULL,
        ["dataset={{_component_: offload.data.sft.sft_dataset, path: {train}, columns: messages}}"],
        "dataset.columns: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(here: Workspace, workspace: Workspace, tmp_path: Path, name: str) -> None:
    recipe, overrides, says = REFUSED[name]
    places = {"base": tmp_path / "base", "train": workspace.path / "train.jsonl"}
    result = here.run(tmp_path / "out", *(each.format(**places) for each in overrides), recipe=recipe)
    assert result.status == 2
    (line,) = result.errors()
    assert says in line


def test_a_question_to_a_folder_that_is_not_there(here: Workspace) -> None:
    module = load_module(ROOT / "recipes" / "generate.py")
    argv = ["--config", str(ROOT / "configs" / "hf_generate.yaml"), "model.path=/nowhere", "prompt.user=hi"]
    assert run_recipe(module.GenerateRecipe, argv) == 2
    assert "error: model.path: there is no folder /nowhere" in here.capture.readouterr().err


def test_an_adapter_that_begins_with_the_weights_values(here: Workspace, tmp_path: Path) -> None:
    """What is checked without weights does not stand in its way."""
    result = here.run(tmp_path / "out", "dtype=fp32", "+adapter.init_lora_weights=pissa", recipe=LORA)
    assert result.status == 0, result.err


def test_mistakes_around_a_run(here: Workspace, tmp_path: Path) -> None:
    run = tmp_path / "out"
    assert here.run(run, "max_steps_per_epoch=2").status == 0

    def again(*overrides: str) -> Any:
        return here.run(run, *overrides, "resume_from_checkpoint=auto")

    (error,) = again("tokenizer.max_seq_len=40").errors()
    assert f"with model.path={run / 'step_2'} and another output_dir" in error and "checkpointer" not in error
    (error,) = again("optimizer=torch.optim.SGD").errors()
    assert "model.path=<the checkpoint's folder>" in error and "checkpointer" not in error

    metrics = run / "metrics.jsonl"
    lines = metrics.read_text()
    metrics.write_text(lines + '{"step": "two"}\n[]\n')
    resumed = again()
    assert resumed.status == 0, resumed.err
    assert [row["step"] for row in resumed.rows] == [1, 2, 3, 4]
    metrics.rename(run / "elsewhere")
    metrics.mkdir()
    (error,) = again("max_steps_per_epoch=5").errors()
    assert error.startswith(f"error: output_dir: {metrics} is a folder")
    metrics.rmdir()

    fresh = here.run(run, "max_steps_per_epoch=1")
    assert f"{run} has step_2, step_3, step_4 of an earlier run" in fresh.out
    assert "writes over those of its own steps" in fresh.out and "resume_from_checkpoint=auto" in fresh.out
    fresh = here.run(run, "max_steps_per_epoch=1", "keep_last_n=1")
    assert "deletes them as it saves (keep_last_n=1)" in fresh.out
    assert "earlier run" not in again("max_steps_per_epoch=2").out
    assert json.loads((run / "run.json").read_text())

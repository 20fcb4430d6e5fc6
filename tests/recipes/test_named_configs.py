"""Configs named after a model of transformers train a small one of its family, with their own settings."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offload.models.huggingface import published
from offload.training.launch import run_recipe
from tests.data.conftest import TEMPLATES, byte_level  # type: ignore[import-not-found]  # noqa: F401
from tests.models.huggingface.small_models import scaled_down  # type: ignore[import-not-found]
from tests.recipes.conftest import ROOT, load_module  # type: ignore[import-not-found]

CONFIGS = sorted(
    path
    for path in (ROOT / "configs").glob("*.yaml")
    if path.stem.rpartition("_")[0] in published.MODELS and "huggingface.from_pretrained" in path.read_text()
)
SAMPLED = {"qwen3_8b_offload", "gemma3_4b_lora", "gpt_oss_20b_lora", "phi4_qlora"}
"""A dense model whole; with another tower, with experts and in 4 bits, by an adapter. The others are slow."""

TEMPLATE = {"qwen3": "qwen3", "llama": "llama31", "gemma3": "gemma", "mistral": "mistral", "gpt": "harmony"}


def write_folder(model: str, tokenizer: Path, folder: Path) -> None:
    """A folder as ``tune download`` leaves it, with a few thousand weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.copytree(tokenizer, folder)
    family = next((key for key in TEMPLATE if model.startswith(key)), None)
    shutil.copy(TEMPLATES / f"{TEMPLATE.get(family or '', 'chatml')}.jinja", folder / "chat_template.jinja")
    words = len(AutoTokenizer.from_pretrained(folder))
    torch.manual_seed(0)
    config = published.config_of(scaled_down(published.MODELS[model].config, words))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem in SAMPLED else pytest.mark.slow, id=path.stem) for path in CONFIGS],
)
def test_it_trains_and_saves(
    path: Path,
    byte_level: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, _, method = path.stem.rpartition("_")
    folder, out = tmp_path / "model", tmp_path / "out"
    write_folder(model, byte_level, folder)
    data = tmp_path / "data.jsonl"
    rows = [
        {"instruction": f"What is {i} and {i}?", "input": "", "output": f"{i} and {i} is {2 * i}."} for i in range(60)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = method == "offload"
    recipe = load_module(ROOT / "recipes" / f"{'full' if whole else 'lora'}_finetune_single_device.py")
    recipe_class = recipe.FullFinetuneRecipeSingleDevice if whole else recipe.LoRAFinetuneRecipeSingleDevice
    overrides = {
        "model.path": folder,
        "dataset.path": data,
        "output_dir": out,
        "device": "cpu",
        "metric_logger": "null",
    }
    overrides |= {"tokenizer.max_seq_len": 64, "max_steps_per_epoch": 2, "optimizer.lr": 1e-2}
    overrides |= {"lr_scheduler.num_warmup_steps": 0}
    status = run_recipe(recipe_class, ["--config", str(path), *(f"{key}={value}" for key, value in overrides.items())])
    said = capfd.readouterr()
    assert status == 0, said.err
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all(math.isfinite(json.loads(line)["loss"]) for line in lines)
    assert "the loss is not fused" not in said.out + said.err

    if whole:
        before, after = load_file(folder / "model.safetensors"), load_file(out / "step_2" / "model.safetensors")
        assert before.keys() == after.keys()
        same = {name for name in before if torch.equal(before[name], after[name])}
        towers = {name for name in before if "vision" in name or "multi_modal" in name}
        assert bool(towers) == ("vision_config" in published.MODELS[model].config)
        assert same == towers
    else:
        adapter = load_file(out / "step_2" / "adapter" / "adapter_model.safetensors")
        assert adapter and all(bool(tensor.any()) for tensor in adapter.values())
        assert not any("vision" in name for name in adapter)
        layers = {name.split(".lora_")[0].rpartition(".")[2] for name in adapter}
        assert layers >= ({"qkv_proj", "o_proj"} if model == "phi4" else {"q_proj", "k_proj", "v_proj", "o_proj"})

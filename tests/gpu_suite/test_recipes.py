"""How the GPU suite runs recipes: the config and weights that it makes, and when it stops them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gpu import recipes
from gpu.model import SHAPES
from gpu.recipes import RecipeRun, configure, make_checkpoint, run_recipe, summary

LOGGED = [{"loss": 5.0 - step, "tokens_per_second": 10.0 * step, "memory/host_pinned_gib": step} for step in range(4)]

HEAD = f"""
import json, os, signal, sys, time
output = OUTPUT
rows = {LOGGED!r}
def log(*rows):
    with open(output + "/metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\\n" for row in rows)
"""

GOES_ON = """
def on_interrupt(*_):
    print("saving", flush=True)
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
signal.signal(signal.SIGINT, on_interrupt)
print("begins", flush=True)
log(*rows)
while True:
    time.sleep(0.05)
"""
"""A recipe that is told to stop and then saves for ever."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one recipe without anything that it needs."""
    monkeypatch.setattr(recipes, "ROOT", tmp_path)
    monkeypatch.setattr(recipes, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(recipes, "SECOND_INTERRUPT", 0.3)
    monkeypatch.setattr(recipes, "PATIENCE_WITH_WANDB", 0.5)
    monkeypatch.setattr("gpu.processes.ROOT", tmp_path)
    for name in ("recipes", "configs"):
        (tmp_path / name).mkdir()
    (tmp_path / "configs" / "config.yaml").write_text("output_dir: x\nsection: {key: 1}\n")
    return tmp_path


def run(
    folder: Path, program: str, *, steps: int = 4, seconds: float = 60.0, missing: Any = ("wandb",)
) -> dict[str, Any]:
    text = HEAD.replace("OUTPUT", repr(str(folder / "scratch" / "runs" / "a"))) + program
    (folder / "recipes" / "recipe.py").write_text(text)
    return run_recipe(RecipeRun("a", "recipe", "config", steps=steps), "cpu", seconds, list(missing))


def test_a_recipe_is_stopped_when_it_has_logged_enough(folder: Path) -> None:
    """By two interrupts, because after the first it saves."""
    result = run(folder, GOES_ON)
    assert result["status"] == "ok" and result["steps"] == 4
    assert result["losses"] == [5.0, 4.0, 3.0, 2.0] and result["tokens_per_second"] == 30.0
    assert result["memory/host_pinned_gib"] == 3
    log = (folder / "scratch" / "runs" / "a" / "log.txt").read_text()
    assert log.split() == ["begins", "saving"]
    config = yaml.safe_load((folder / "scratch" / "runs" / "a" / "config.yaml").read_text())
    assert config["device"] == "cpu" and config["seed"] == 0 and config["section"] == {"key": 1}


def test_the_checkpoint_that_a_recipe_began_is_not_kept(folder: Path) -> None:
    """Each is of many GiB, and the disk of a lent machine is small."""
    begins = "os.makedirs(output + '/.step_4'); open(output + '/.step_4/weights', 'w')"
    assert run(folder, GOES_ON.replace("log(*rows)", f"log(*rows); {begins}"))["status"] == "ok"
    left = {path.name for path in (folder / "scratch" / "runs" / "a").iterdir()}
    assert left == {"config.yaml", "log.txt", "metrics.jsonl"}


def test_a_recipe_that_does_not_end_is_killed_and_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "LAST_WAIT", 0.5)
    result = run(folder, GOES_ON.replace("os._exit(130)", "None"))
    assert result["status"] == "error" and "two interrupts" in result["error"] and result["steps"] == 4


@pytest.mark.parametrize(
    ("program", "more", "status", "message"),
    [
        ("log(*rows)", {"steps": 5}, "error", "after 4 of 5 steps"),
        ("log(*rows[:2]); print('why'); sys.exit(2)", {}, "error", "status 2"),
        ("rows[1]['loss'] = float('nan'); log(*rows)", {}, "error", "not finite"),
        ("log(*rows)", {"missing": ()}, "error", "wandb's files are not there"),
        ("log(*rows)", {"missing": ("torchtune", "datasets")}, "not installed", "torchtune, datasets"),
        ("def hangs():\n    time.sleep(1000)\nhangs()", {"seconds": 1.0}, "out of time", "in hangs"),
    ],
)
def test_how_a_recipe_can_fail(folder: Path, program: str, more: dict[str, Any], status: str, message: str) -> None:
    result = run(folder, program, **more)
    assert result["status"] == status and message in result["error"]


def test_waits_for_wandbs_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come only when the steps are logged already; and where they do not, it does not wait for ever."""
    writes = "os.makedirs(output + '/wandb/offline-run-1'); open(output + '/wandb/offline-run-1/a.wandb', 'w')"
    program = GOES_ON.replace("log(*rows)", f"log(*rows); time.sleep(1.5); {writes}")
    result = run(folder, program, missing=())
    assert result["status"] == "error" and "wandb's files" in result["error"]
    monkeypatch.setattr(recipes, "PATIENCE_WITH_WANDB", 60.0)
    result = run(folder, program, missing=())
    assert result["status"] == "ok" and result["wandb_files"]


def test_a_summary_of_nothing() -> None:
    assert summary([]) == {"losses": []}


def test_the_tokens_and_seconds_of_a_step_are_those_of_the_second_half() -> None:
    seen, rows = 0, []
    for tokens, seconds in ((100, 50.0), (100, 9.0), (90, 3.0), (100, 2.0), (80, 2.0)):
        seen += tokens
        rows.append({"loss": 1.0, "tokens_seen": seen, "tokens_per_second": tokens / seconds})
    facts = summary(rows)
    assert facts["tokens"] == 90 and facts["step_seconds"] == pytest.approx(2.0)
    assert "step_seconds" not in summary(rows[:1])


def test_a_recipe_can_be_held_to_a_smaller_card() -> None:
    """As the cases are: what programs see of it, less the CUDA context."""
    total = 80 * 2**30
    whole, held = (RecipeRun("a", "b", "c", memory_gib=gib) for gib in (None, 16))
    assert recipes.allocator_of(whole, total) == "" and recipes.allocator_of(held, None) == ""
    key, _, share = recipes.allocator_of(held, total).partition(":")
    assert key == "per_process_memory_fraction" and float(share) == pytest.approx((15.7 - 0.45) / 80, abs=1e-3)
    assert recipes.allocator_of(held, 12 * 2**30) == ""


@pytest.mark.parametrize("config", ["llama2_7b_offload", "llama2_7b_lora"])
def test_the_config_of_7b_keeps_all_but_data_and_weights(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Any] = []

    def make(*arguments: Any) -> Path:
        folders.append(arguments)
        return tmp_path / "weights"

    monkeypatch.setattr(recipes, "make_checkpoint", make)
    path = configure(RecipeRun("a", "b", config, "7b", 8), "cuda", tmp_path)
    made = yaml.safe_load(path.read_text())
    before = yaml.safe_load((recipes.ROOT / "configs" / f"{config}.yaml").read_text())
    changed = {key for key in made if made[key] != before[key]}
    assert changed <= {"output_dir", "seed", "tokenizer", "dataset", "checkpointer", "epochs"}
    assert made["tokenizer"]["max_seq_len"] == before["tokenizer"]["max_seq_len"]
    assert made["checkpointer"]["checkpoint_dir"] == str(tmp_path / "weights")
    assert folders == [(SHAPES["7b"], "7b", "cuda")]


def test_overrides_reach_into_sections(tmp_path: Path) -> None:
    overrides = {"tokenizer.max_seq_len": 64, "batch_size": 1}
    run = RecipeRun("a", "b", "tiny_llama_offload", overrides=overrides)
    made = yaml.safe_load(configure(run, "cpu", tmp_path).read_text())
    assert made["tokenizer"]["max_seq_len"] == 64 and made["batch_size"] == 1


def test_random_weights_are_a_llama_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight, with its shape, and no other; made once."""
    transformers = pytest.importorskip("transformers", reason="the reference's model")
    from safetensors.torch import load_file

    monkeypatch.setattr(recipes, "SCRATCH", tmp_path)
    monkeypatch.setattr(recipes, "LAYERS_PER_FILE", 1)
    shape = SHAPES["tiny-recipe"]
    folder = make_checkpoint(shape, "tiny-recipe", "cpu")
    config = transformers.LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: tuple(load_file(folder / file)[name].shape) for name, file in index.items()}
    assert found == expected and len(set(index.values())) == 1 + shape.layers
    weight = load_file(folder / index["lm_head.weight"])["lm_head.weight"]
    assert weight.dtype == torch.bfloat16 and 0.015 < weight.float().std() < 0.025
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert make_checkpoint(shape, "tiny-recipe", "cpu") == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    # What was cut off is made again.
    os.remove(folder / "config.json")
    make_checkpoint(shape, "tiny-recipe", "cpu")
    assert (folder / "config.json").exists()

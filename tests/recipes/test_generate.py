"""The generate recipe: answers of trained models, which checkpoint it takes, adapters, mistakes."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from offload import torchao_shim
from offload.checkpoints import manager as checkpoint
from offload.checkpoints.reading import SavedRuns
from offload.models.torchtune.answers import load_checkpoint
from offload.training.launch import run_recipe

ROOT = Path(__file__).parents[2]
LORA = "lora_finetune_single_device"
QUESTION, ANSWER = "What does str.lower do?", "Return a lowercase copy."


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_recipe", ROOT / "recipes" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_recipe"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trained(workspace: Any, tmp_path: Path) -> Path:
    """The output_dir of a run that learnt one answer by heart."""
    data = tmp_path / "one.jsonl"
    data.write_text((json.dumps({"input": QUESTION, "output": ANSWER}) + "\n") * 80)
    result = workspace.run(
        tmp_path / "trained",
        f"dataset.data_files={data}",
        "max_steps_per_epoch=40",
        "save_every_n_steps=20",
        "lr_scheduler=null",
    )
    assert result.status == 0, result.err
    return result.output_dir


@pytest.fixture
def config(workspace: Any, tmp_path: Path) -> Path:
    """A config of the generate recipe for the workspace's model."""
    full = yaml.safe_load(workspace.config("full_finetune_single_device").read_text())
    kept = {key: full[key] for key in ("model", "tokenizer", "checkpointer", "dtype", "device")}
    path = tmp_path / "generate.yaml"
    path.write_text(yaml.safe_dump({**kept, "prompt": {"user": QUESTION}, "max_new_tokens": 24}))
    return path


def ask(recipe: ModuleType, config: Path, capfd: Any, checkpoint_dir: Path, *overrides: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one question."""
    capfd.readouterr()
    argv = ["--config", str(config), f"checkpointer.checkpoint_dir={checkpoint_dir}", *overrides]
    status = run_recipe(recipe.GenerateRecipe, argv)
    return status, *capfd.readouterr()


# ---- answers ---------------------------------------------------------------------------------------------


def test_answers_what_it_learnt_and_nothing_else_on_stdout(
    recipe: ModuleType, config: Path, trained: Path, capfd: Any
) -> None:
    status, out, err = ask(recipe, config, capfd, trained)
    assert (status, out) == (0, ANSWER + "\n"), err
    assert f"newest checkpoint in {trained}: step_40" in err
    assert "tokens/s" in err and "cut at" not in err  # it stopped by itself


def test_the_stop_token_is_not_decoded(
    recipe: ModuleType, config: Path, trained: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokenizers would show it: <|eot_id|>."""
    from torchtune.models.llama2 import Llama2Tokenizer

    monkeypatch.setattr(Llama2Tokenizer, "decode", lambda self, ids: f"{self.eos_id in ids} {len(ids)}")
    _, out, err = ask(recipe, config, capfd, trained)
    shown, number = out.split()
    assert shown == "False" and f"{number} tokens in" in err


def test_the_cache_changes_nothing(recipe: ModuleType, config: Path, trained: Path, capfd: Any) -> None:
    other = "prompt.user=What does dict.pop do?"
    cached = ask(recipe, config, capfd, trained, other)
    recomputed = ask(recipe, config, capfd, trained, other, "enable_kv_cache=False")
    assert cached[0] == recomputed[0] == 0
    assert cached[1] == recomputed[1] != ""


def test_an_answer_is_cut_at_max_new_tokens(recipe: ModuleType, config: Path, trained: Path, capfd: Any) -> None:
    status, out, err = ask(recipe, config, capfd, trained, "max_new_tokens=3")
    assert status == 0
    assert ANSWER.startswith(out.strip()) and 0 < len(out.strip()) < len(ANSWER)
    assert "3 tokens in" in err and "cut at max_new_tokens=3" in err


def test_temperature_and_seed(recipe: ModuleType, config: Path, workspace: Any, capfd: Any) -> None:
    """On an untrained model, whose next token is almost evenly spread."""
    base = workspace.path / "base"
    hot = ("temperature=1.0", "max_new_tokens=12")
    first, again, other = (ask(recipe, config, capfd, base, *hot, f"seed={seed}")[1] for seed in (1, 1, 2))
    assert first == again != other
    # The likeliest of one is the likeliest, however hot.
    greedy = ask(recipe, config, capfd, base, "max_new_tokens=12")[1]
    assert ask(recipe, config, capfd, base, *hot, "top_k=1", "seed=1")[1] == greedy != first


def test_system_prompt_and_template_reach_the_model(
    recipe: ModuleType, config: Path, trained: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    torchao_shim.install()
    from torchtune import generation

    generate = generation.generate

    def spy(model: Any, prompt: torch.Tensor, **options: Any) -> Any:
        seen.append(prompt.tolist())
        return generate(model, prompt, **options)

    monkeypatch.setattr(generation, "generate", spy)
    ask(recipe, config, capfd, trained, "max_new_tokens=1")
    ask(recipe, config, capfd, trained, "max_new_tokens=1", "prompt.system=Hm.")
    from torchtune.models.llama2 import llama2_tokenizer

    tokenizer = llama2_tokenizer(str(OmegaConf.load(config).tokenizer.path))
    assert [tokenizer.decode(tokens) for tokens in seen] == [
        f"[INST] {QUESTION} [/INST]",
        f"[INST] <<SYS>> Hm. <</SYS>> {QUESTION} [/INST]",  # this tokenizer makes a line break a space
    ]


def test_ctrl_c_speaks_of_no_training(
    recipe: ModuleType, config: Path, trained: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, prompt: list[int]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe.GenerateRecipe, "_answer", interrupted)
    status, out, err = ask(recipe, config, capfd, trained)
    assert status == 130 and out == "" and err.endswith("\ninterrupted\n")


# ---- which checkpoint ------------------------------------------------------------------------------------


def test_takes_a_step_folder_a_run_or_a_downloaded_checkpoint(
    recipe: ModuleType, config: Path, trained: Path, workspace: Any, capfd: Any
) -> None:
    assert ask(recipe, config, capfd, trained / "step_40")[1] == ANSWER + "\n"
    assert ask(recipe, config, capfd, workspace.path / "base")[0] == 0
    shutil.rmtree(trained / "step_40")
    status, _, err = ask(recipe, config, capfd, trained)
    assert status == 0 and f"newest checkpoint in {trained}: step_20" in err


def test_newest_is_what_was_saved_last(tmp_path: Path) -> None:
    """Not the highest step: a run that went back to an earlier checkpoint saves lower steps later."""
    for step, sequence in ((10, 1), (20, 2), (15, 3)):
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        manifest = {"format": checkpoint.FORMAT, "step": step, "sequence": sequence, "files": {}}
        (folder / "checkpoint.json").write_text(json.dumps(manifest))
    (tmp_path / "step_99").mkdir()  # not one of ours
    assert SavedRuns().newest(tmp_path) == tmp_path / "step_15"
    assert SavedRuns().newest(tmp_path / "step_15") is None


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_is_merged_as_the_recipe_merges_it(workspace: Any, tmp_path: Path, use_dora: bool) -> None:
    common = (f"model.use_dora={use_dora}", "max_steps_per_epoch=5", "evaluation=null")
    folders = {}
    for adapter_only in (True, False):
        output_dir = tmp_path / f"adapter_only_{adapter_only}"
        result = workspace.run(output_dir, *common, f"save_adapter_weights_only={adapter_only}", recipe=LORA)
        assert result.status == 0, result.err
        folders[adapter_only] = output_dir / "step_5"
    assert not list(folders[True].glob("*.safetensors")) and list(folders[False].glob("*.safetensors"))

    section = OmegaConf.load(workspace.config(LORA)).checkpointer

    def load(folder: Path) -> dict[str, torch.Tensor]:
        pointed = OmegaConf.merge(section, {"checkpoint_dir": str(folder)})
        return load_checkpoint(pointed, None, SavedRuns(), print)[0]

    merged, saved, base = (load(folder) for folder in (folders[True], folders[False], workspace.path / "base"))
    assert merged.keys() == saved.keys() == base.keys()
    for name in saved:
        torch.testing.assert_close(merged[name], saved[name], rtol=1e-6, atol=1e-7)
    changed = {name.split(".")[-2] for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {"q_proj", "v_proj", "w1", "w2", "w3"}


def test_an_adapter_whose_base_has_moved(
    recipe: ModuleType, config: Path, workspace: Any, tmp_path: Path, capfd: Any
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(workspace.path / "base", tmp_path / "first")
    result = workspace.run(
        tmp_path / "lora",
        f"checkpointer.checkpoint_dir={tmp_path / 'first'}",
        "max_steps_per_epoch=1",
        "evaluation=null",
        "save_adapter_weights_only=True",
        recipe=LORA,
    )
    assert result.status == 0, result.err
    (tmp_path / "first").rename(moved)
    status, out, err = ask(recipe, config, capfd, tmp_path / "lora")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 2 and out == "" and "base_checkpoint_dir" in line and str(tmp_path / "first") in line
    status, _, err = ask(recipe, config, capfd, tmp_path / "lora", f"base_checkpoint_dir={moved}")
    assert status == 0, err


# ---- mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("promt.user=hello", "promt"),
        ("temperature=-1", "temperature"),
        ("top_p=0.9", "top_p: torchtune's generation does not know it"),
        ("prompt.user=null", "prompt: give either prompt.user"),
        ("prompt=null", "prompt"),
        ("model.num_layers=1", "model"),
        ("prompt.user=" + "why " * 60, "prompt.user: the prompt has"),
        ("checkpointer.checkpoint_dir=/nowhere", "there is no folder /nowhere"),
    ],
)
def test_mistakes_are_one_line(
    recipe: ModuleType, config: Path, workspace: Any, capfd: Any, override: str, words: str
) -> None:
    status, out, err = ask(recipe, config, capfd, workspace.path / "base", "tokenizer.max_seq_len=null", override)
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 2 and out == "" and words in line
    assert "Traceback" not in err


@pytest.mark.parametrize("key", ["user", "system"])
def test_a_prompt_as_an_ascii_locale_gives_it(
    recipe: ModuleType, config: Path, workspace: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Python keeps the bytes above 127 of its command line and its standard input as surrogates there."""
    words = (workspace.path / "base", "tokenizer.max_seq_len=null", "max_new_tokens=2")
    said = ask(recipe, config, capfd, *words, f"prompt.{key}=naïve €")
    assert said[0] == 0
    as_ascii = "naïve €".encode().decode("ascii", "surrogateescape")
    assert ask(recipe, config, capfd, *words, f"prompt.{key}={as_ascii}")[:2] == said[:2]
    for wrong in (b"caf\xe9".decode("utf-8", "surrogateescape"), r'"\ud800"'):
        status, out, err = ask(recipe, config, capfd, *words, f"prompt.{key}={wrong}")
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (status, out) == (2, "") and line.startswith(f"error: prompt.{key}: ") and "is not UTF-8" in line
        assert "Traceback" not in err


def test_questions_of_a_file_and_of_standard_input(
    recipe: ModuleType, config: Path, workspace: Any, capfd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(recipe.GenerateRecipe, "_prompt", lambda self, question: asked.append(question) or [1])
    file = tmp_path / "questions.txt"
    file.write_bytes(b"\xef\xbb\xbfWhy?\r\n\r\nna\xc3\xafve?\r\n")
    words = (workspace.path / "base", "tokenizer.max_seq_len=null", "max_new_tokens=1", "~prompt.user")
    assert ask(recipe, config, capfd, *words, f"prompt.file={file}")[0] == 0
    typed = io.TextIOWrapper(io.BytesIO("naïve?\n".encode()), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", typed)
    assert ask(recipe, config, capfd, *words, "prompt.file=-")[0] == 0
    assert asked == ["Why?", "naïve?", "naïve?"]


def test_more_tokens_than_the_context_holds(recipe: ModuleType, config: Path, workspace: Any, capfd: Any) -> None:
    status, _, err = ask(recipe, config, capfd, workspace.path / "base", "max_new_tokens=1000")
    assert status == 0 and "max_new_tokens=1000 does not fit" in err

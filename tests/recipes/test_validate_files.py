"""`tune validate` opens the model's folder and the tokenizer, and refuses what a run refuses; it reads no weights."""

from __future__ import annotations

import json
import resource
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from offload.cli.main import main
from tests.models.huggingface import families  # type: ignore[import-not-found]
from tests.recipes.conftest import Workspace  # type: ignore[import-not-found]

FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"


@pytest.fixture
def here(workspace: Workspace, tmp_path: Path) -> Workspace:
    """Configs of a model of transformers, and of torchtune's with the same checkpoint: a copy, to break."""
    mine = Workspace(tmp_path / "configs", workspace.recipes, workspace.capture)
    mine.path.mkdir()
    base = shutil.copytree(workspace.path / "base", tmp_path / "base")
    for recipe in (FULL, LORA):
        config = yaml.safe_load(workspace.config(recipe).read_text())
        config["evaluation"] = None
        config["tokenizer"]["path"] = str(base / "tokenizer.model")
        config["checkpointer"]["checkpoint_dir"] = str(base)
        (mine.path / f"torchtune_{recipe}.yaml").write_text(yaml.safe_dump(config))
        del config["checkpointer"]
        config["model"] = {"_component_": "offload.models.huggingface.from_pretrained", "path": str(base)}
        if recipe == LORA:
            config["adapter"] = {"_component_": "peft.LoraConfig", "r": 4, "target_modules": ["q_proj"]}
        mine.config(recipe).write_text(yaml.safe_dump(config))
    return mine


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def lose_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def small_vocabulary(folder: Path) -> None:
    families.save("llama", folder)


def as_torchtune(workspace: Workspace, recipe: str) -> None:
    (workspace.path / f"torchtune_{recipe}.yaml").replace(workspace.config(recipe))


STREAM = ["optimizer.strategy=stream", "optimizer.fused=null"]
GROUPS = "+optimizer.param_groups=[{params: nothing.*, lr: 1.0}]"
OF_TRANSFORMERS: dict[str, tuple[str, list[str], Any, str]] = {
    "no weights": (FULL, [], lambda base: (base / "model.safetensors").unlink(), "has no safetensors files"),
    "a tensor is missing": (FULL, [], lose_a_tensor, "model.norm.weight is missing"),
    "another size": (FULL, [], lambda base: edit(base, intermediate_size=80), "do not fit its config.json"),
    "an unknown architecture": (FULL, [], lambda base: edit(base, model_type="llama9"), "model type 'llama9'"),
    "code of its own": (
        FULL,
        [],
        lambda base: edit(base, model_type="mine", auto_map={"AutoConfig": "a.B", "AutoModelForCausalLM": "a.C"}),
        "model.trust_remote_code=True",
    ),
    "an attention that nobody has": (FULL, ["+model.attn_implementation=sdpaa"], None, "model.attn_implementation"),
    "a pattern of states": (FULL, [*STREAM, "+optimizer.offload_states=.*/layers.0.*"], None, "matches no state"),
    "a pattern of parameters": (FULL, [GROUPS], None, "optimizer.param_groups.0.params"),
    "an adapter on nothing": (LORA, ["adapter.target_modules=[nope]"], None, "adapter: "),
    "no adapter": (LORA, ["adapter=null"], None, "adapter is missing"),
    "a folder of nobody": (FULL, ["model.path=~nobody_here/x"], None, "model.path: ~nobody_here/x"),
    "a name that no file can have": (FULL, [f"model.path={'x' * 4000}"], None, "File name too long"),
}
OF_TORCHTUNE: dict[str, tuple[str, list[str], Any, str]] = {
    "another number of heads": (FULL, ["model.num_heads=8"], None, "model.num_heads"),
    "sizes left out and a pattern": (
        FULL,
        ["~model.num_heads", *STREAM, "+optimizer.offload_states=momentum/.*"],
        None,
        "matches no state",
    ),
    "no weights": (FULL, [], lambda base: (base / "model.safetensors").unlink(), "checkpointer.checkpoint_dir"),
    "another kind of model": (LORA, ["checkpointer.model_type=QWEN2"], None, "checkpointer.model_type"),
    "no checkpointer": (FULL, ["checkpointer=null"], None, "checkpointer is missing"),
}
CASES = [(kind, name) for kind, cases in (("hf", OF_TRANSFORMERS), ("torchtune", OF_TORCHTUNE)) for name in cases]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_validate_and_the_run_refuse_in_the_same_line(here: Workspace, tmp_path: Path, kind: str, name: str) -> None:
    recipe, overrides, damage, said = (OF_TRANSFORMERS if kind == "hf" else OF_TORCHTUNE)[name]
    if kind == "torchtune":
        as_torchtune(here, recipe)
    if damage is not None:
        damage(tmp_path / "base")
    output_dir = f"output_dir={tmp_path / 'out'}"
    before = sorted(tmp_path.rglob("*"))
    here.capture.readouterr()
    assert main(["validate", str(here.config(recipe)), output_dir, *overrides, "--recipe", recipe]) == 2
    (line,) = here.capture.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line, line
    assert sorted(tmp_path.rglob("*")) == before
    result = here.run(tmp_path / "out", *overrides, recipe=recipe)
    assert result.status == 2 and result.errors() == [line]
    assert len(result.err.splitlines()) == 1, result.err


@pytest.mark.parametrize("kind", ["hf", "torchtune"])
def test_a_tokenizer_of_another_model(here: Workspace, tmp_path: Path, kind: str) -> None:
    """The run tells it when the model is built; validate without the data."""
    if kind == "torchtune":
        as_torchtune(here, FULL)
        overrides = ["model.vocab_size=96", "model.embed_dim=32"]
    else:
        overrides = []
    small_vocabulary(tmp_path / "small")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "small" / name, tmp_path / "base")
    if kind == "torchtune":
        edit(tmp_path / "base", rms_norm_eps=1e-5)
        overrides += ["~model.norm_eps", "model.intermediate_dim=48", "model.max_seq_len=128"]
    here.capture.readouterr()
    assert main(["validate", str(here.config(FULL)), f"output_dir={tmp_path / 'out'}", *overrides]) == 2
    (line,) = here.capture.readouterr().err.splitlines()[:1]
    assert line.startswith("error: tokenizer: it has ") and "the model's embedding has 96 rows" in line, line
    assert here.run(tmp_path / "out", *overrides).errors() == [line]


@pytest.mark.parametrize("recipe", [FULL, LORA])
@pytest.mark.parametrize("kind", ["hf", "torchtune"])
def test_what_is_right_passes(here: Workspace, tmp_path: Path, kind: str, recipe: str) -> None:
    if kind == "torchtune":
        as_torchtune(here, recipe)
    arguments = [str(here.config(recipe)), "output_dir=x", "enable_activation_checkpointing=True", *STREAM]
    assert main(["validate", *arguments, "+optimizer.offload_states=.*layers.0.*", "--recipe", recipe]) == 0
    out, err = here.capture.readouterr()
    assert out.startswith("OK: ") and not err
    if (kind, recipe) == ("hf", LORA):
        assert main(["validate", *arguments, "+model.load_in_4bit=True", "--recipe", recipe]) == 0


@pytest.mark.parametrize(("kind", "key"), [("hf", "model.path"), ("torchtune", "checkpointer.checkpoint_dir")])
def test_files_of_another_machine_are_a_note(here: Workspace, tmp_path: Path, kind: str, key: str) -> None:
    if kind == "torchtune":
        as_torchtune(here, FULL)
    overrides = ["output_dir=x", f"{key}=/not/here", "tokenizer.path=/not/here/tokenizer.model"]
    assert main(["validate", str(here.config(FULL)), *overrides]) == 0
    out = here.capture.readouterr().out
    assert f"{key}: there is no folder /not/here here" in out and "tokenizer.path: there is no " in out
    assert main(["validate", str(here.config(FULL)), *overrides, "optimizer.lr=-1"]) == 2


def test_a_model_that_brings_code_is_not_run(here: Workspace, tmp_path: Path) -> None:
    edit(tmp_path / "base", model_type="mine", auto_map={"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Own"})
    (tmp_path / "base" / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert main(["validate", str(here.config(FULL)), "output_dir=x", "+model.trust_remote_code=True"]) == 0
    assert not (tmp_path / "ran").exists()


def test_weights_are_not_read(here: Workspace, tmp_path: Path) -> None:
    """A sparse file of 8 GiB."""
    base, rows = tmp_path / "base", 2**26
    weights = load_file(base / "model.safetensors")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in weights.items():
        shape = [rows, 32] if name in ("model.embed_tokens.weight", "lm_head.weight") else list(tensor.shape)
        start, end = end, end + (rows * 64 if shape[0] == rows else tensor.numel() * 2)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(base / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
    edit(base, vocab_size=rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["validate", str(here.config(FULL)), "output_dir=x"]) == 0, here.capture.readouterr().err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB

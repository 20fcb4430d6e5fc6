"""The recipes with a model of transformers: against torchtune's builder on the same checkpoint, and by themselves."""

from __future__ import annotations

import io
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.recipes.conftest import MODEL, Result, Workspace  # type: ignore[import-not-found]

FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"
LAYERS = {
    "q_proj": "attn.q_proj",
    "v_proj": "attn.v_proj",
    "gate_proj": "mlp.w1",
    "down_proj": "mlp.w2",
    "up_proj": "mlp.w3",
}
STRATEGIES = {
    "plain": ("optimizer=torch.optim.AdamW",),
    "resident": ("optimizer.strategy=resident",),
    "resident in backward": (
        "optimizer.strategy=resident",
        "+optimizer.update_in_backward=True",
        "clip_grad_norm=null",
    ),
    "stream": ("optimizer.strategy=stream",),
    "stream in backward": ("optimizer.strategy=stream", "+optimizer.update_in_backward=True", "clip_grad_norm=null"),
    "host": ("optimizer.strategy=host", "+optimizer.offload_gradients=True"),
    "host in backward": ("optimizer.strategy=host", "+optimizer.update_in_backward=True", "clip_grad_norm=null"),
}


@pytest.fixture
def here(workspace: Workspace, tmp_path: Path) -> Workspace:
    """A workspace whose configs name the same checkpoint as a model of transformers."""
    mine = Workspace(tmp_path / "hf", workspace.recipes, workspace.capture)
    mine.path.mkdir()
    for recipe in (FULL, LORA):
        config = yaml.safe_load(workspace.config(recipe).read_text())
        del config["checkpointer"]
        config["model"] = {
            "_component_": "offload.models.huggingface.from_pretrained",
            "path": str(workspace.path / "base"),
        }
        if recipe == LORA:
            del config["evaluation"]
            config["adapter"] = {"_component_": "peft.LoraConfig", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
            config["adapter"]["target_modules"] = sorted(LAYERS)
        mine.config(recipe).write_text(yaml.safe_dump(config))
    return mine


def losses(result: Result) -> list[float]:
    assert result.status == 0, result.err
    return [row["loss"] for row in result.rows]


def saved(result: Result, step: int = 20) -> dict[str, torch.Tensor]:
    return load_file(result.output_dir / f"step_{step}" / "model.safetensors")


def same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA's first factors the same in both libraries; the second ones begin at 0 anyway."""
    from offload.models.huggingface import AdaptedModel
    from offload.models.torchtune import AdaptedTorchtuneModel

    def fill(module: Any, ending: str) -> None:
        for name, param in module.named_parameters():
            if name.endswith(ending):
                layer = name.split("layers.")[1].split(".")[0]
                kind = next(ours for ours, theirs in LAYERS.items() if ours in name or theirs in name)
                generator = torch.Generator().manual_seed(zlib.crc32(f"{layer} {kind}".encode()))
                with torch.no_grad():
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.1)

    def patched(kind: type, ending: str) -> None:
        begin = kind.__init__

        def init(self: Any, *args: Any, **options: Any) -> None:
            begin(self, *args, **options)
            fill(self.module, ending)

        monkeypatch.setattr(kind, "__init__", init)

    patched(AdaptedTorchtuneModel, ".lora_a.weight")
    patched(AdaptedModel, ".lora_A.default.weight")


def test_logits_equal_those_of_torchtunes_builder(workspace: Workspace) -> None:
    from torchtune.models.llama2 import llama2

    from offload.models.huggingface import from_pretrained
    from offload.models.torchtune import TorchtuneModel
    from offload.models.torchtune.checkpoint import TorchtuneFormat

    base = workspace.path / "base"
    section = yaml.safe_load(workspace.config(FULL).read_text())["checkpointer"]
    format = TorchtuneFormat(section)
    format.prepare(workspace.path / "unused")
    theirs = TorchtuneModel(llama2(**MODEL))
    theirs.module.load_state_dict(format.load_base())
    ours = from_pretrained(base, device=torch.device("cpu"), dtype=torch.float32)
    tokens = torch.randint(0, MODEL["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for inputs in ({"tokens": tokens}, {"tokens": tokens, "input_pos": torch.arange(40).expand(2, -1)}):
            torch.testing.assert_close(ours.logits(inputs), theirs.logits(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", [FULL, LORA])
def test_twenty_steps_as_with_torchtunes_builder(
    recipe: str, workspace: Workspace, here: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses within 1e-4 of torchtune's under every strategy, and bit for bit those of plain AdamW."""
    same_start(monkeypatch)
    more = ("evaluation=null",) if recipe == LORA else ()
    expected = losses(workspace.run(tmp_path / "torchtune", *more, recipe=recipe))
    unclipped = losses(workspace.run(tmp_path / "unclipped", "clip_grad_norm=null", *more, recipe=recipe))
    assert len(expected) == 20 and min(expected) < expected[0] - 0.1
    plain: dict[bool, dict[str, torch.Tensor]] = {}
    for name, overrides in STRATEGIES.items():
        clips = "clip_grad_norm=null" not in overrides
        result = here.run(tmp_path / name.replace(" ", "_"), *overrides, recipe=recipe)
        assert losses(result) == pytest.approx(expected if clips else unclipped, rel=1e-4), name
        if not clips and False not in plain:
            reference = here.run(tmp_path / "reference", *STRATEGIES["plain"], "clip_grad_norm=null", recipe=recipe)
            plain[False] = saved(reference)
        weights = saved(result)
        for key, value in plain.setdefault(clips, weights).items():
            assert torch.equal(weights[key], value), f"{name}: {key}"


@pytest.mark.parametrize("recipe", [FULL, LORA])
def test_a_resumed_run_ends_bit_for_bit_as_an_unbroken_one(recipe: str, here: Workspace, tmp_path: Path) -> None:
    whole = here.run(tmp_path / "whole", recipe=recipe)
    here.run(tmp_path / "broken", "save_every_n_steps=7", recipe=recipe)
    resumed = here.run(tmp_path / "broken", "resume_from_checkpoint=step_7", recipe=recipe)
    assert losses(resumed)[-13:] == losses(whole)[-13:]
    first, second = saved(whole), saved(resumed)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("recipe", [FULL, LORA])
def test_transformers_and_peft_open_what_is_saved(
    recipe: str, here: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.training.reporting.peak_flops", lambda device: 1e12)  # as on a card that is known
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result = here.run(tmp_path / "out", recipe=recipe)
    assert result.status == 0, result.err
    assert all(0 < row["mfu"] < 1 for row in result.rows)
    step = result.output_dir / "step_20"
    base = Path(yaml.safe_load(here.config(recipe).read_text())["model"]["path"])
    assert load_file(base / "model.safetensors").keys() == saved(result).keys()
    assert (step / "tokenizer.model").read_bytes() == (base / "tokenizer.model").read_bytes()
    merged = AutoModelForCausalLM.from_pretrained(step, dtype=torch.float32)
    tokens = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        logits = merged(input_ids=tokens).logits
        original = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        assert not torch.allclose(original(input_ids=tokens).logits, logits, atol=1e-2)
        if recipe == LORA:
            adapted = PeftModel.from_pretrained(original, str(step / "adapter")).eval()
            torch.testing.assert_close(adapted(input_ids=tokens).logits, logits, rtol=1e-4, atol=1e-5)


def test_packs_of_our_own_data_sets(here: Workspace, tmp_path: Path) -> None:
    """Samples are tokens of the same file; a bad row is left out on request, and a resume sees the same packs."""
    config = yaml.safe_load(here.config(FULL).read_text())
    base = Path(config["model"]["path"])
    rows = [json.loads(line) for line in (base.parent / "train.jsonl").read_text().splitlines()]
    data = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"prompt": row["input"], "completion": row["output"]}) for row in rows]
    lines[57] = json.dumps({"prompt": "?", "completion": None})
    data.write_text("\n".join(lines) + "\n")
    config["tokenizer"] = {"_component_": "offload.data.tokenizer.ChatTokenizer", "path": str(base), "max_seq_len": 60}
    config["dataset"] = {"_component_": "offload.data.sft.sft_dataset", "path": str(data), "packed": True}
    here.config(FULL).write_text(yaml.safe_dump(config))
    refused = here.run(tmp_path / "refused")
    assert refused.status == 2 and len(refused.errors()) == 1
    assert f"{data}, line 58" in refused.err and "completion is null" in refused.err
    more = ("dataset_errors=skip", "max_steps_per_epoch=8", "save_every_n_steps=3")
    whole = here.run(tmp_path / "whole", *more)
    assert losses(whole)[-1] < losses(whole)[0]
    assert "the first sample, with what is trained of it in brackets: " in whole.out + whole.err
    here.run(tmp_path / "broken", *more)
    resumed = here.run(tmp_path / "broken", *more, "resume_from_checkpoint=step_3")
    assert losses(resumed)[-5:] == losses(whole)[-5:]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("+checkpointer.checkpoint_dir=somewhere",), "checkpointer"),
        (("model.path=/nowhere",), "model.path: there is no folder /nowhere"),
        (("model.attn_implementation=sdpaa",), "model.attn_implementation: there is no 'sdpaa', did you mean sdpa?"),
        (("model={_component_: torchtune.models.llama2.llama2_7b}",), "checkpointer is missing"),
    ],
)
def test_mistakes_are_one_line(overrides: tuple[str, ...], says: str, here: Workspace, tmp_path: Path) -> None:
    result = here.run(tmp_path / "out", *overrides)
    assert result.status == 2
    (line,) = result.errors()
    assert says in line


def test_a_missing_adapter_is_one_line(here: Workspace, tmp_path: Path) -> None:
    result = here.run(tmp_path / "out", "adapter=null", recipe=LORA)
    assert result.status == 2
    (line,) = result.errors()
    assert "adapter is missing" in line and "peft.LoraConfig" in line


QUESTION, ANSWER = "What does str.lower do?", "Return a lowercase copy."


@pytest.mark.parametrize("recipe", [FULL, LORA])
def test_the_result_answers(recipe: str, here: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer learnt by heart, asked of the run's folder: of whole weights, and of an adapter beside its base."""
    from offload.training.launch import run_recipe
    from tests.recipes.conftest import ROOT, load_module  # type: ignore[import-not-found]

    config = yaml.safe_load(here.config(recipe).read_text())
    base = config["model"]["path"]
    data = tmp_path / "one.jsonl"
    data.write_text((json.dumps({"prompt": QUESTION, "completion": ANSWER}) + "\n") * 80)
    config["tokenizer"] = {"_component_": "offload.data.tokenizer.ChatTokenizer", "path": base, "max_seq_len": 60}
    config["dataset"] = {"_component_": "offload.data.sft.sft_dataset", "path": str(data)}
    config["optimizer"]["lr"] = 2e-2
    if recipe == LORA:
        config |= {"save_adapter_weights_only": True}
        config["adapter"] |= {"r": 16, "target_modules": "all-linear", "modules_to_save": ["lm_head", "embed_tokens"]}
    here.config(recipe).write_text(yaml.safe_dump(config))
    trained = here.run(tmp_path / "trained", "max_steps_per_epoch=40", "lr_scheduler=null", recipe=recipe)
    assert losses(trained)[-1] < 0.1

    module = load_module(ROOT / "recipes" / "generate.py")
    questions = tmp_path / "questions.txt"
    questions.write_text(f"{QUESTION}\n\n{QUESTION}\n")
    argv = ["--config", str(ROOT / "configs" / "hf_generate.yaml"), f"model.path={trained.output_dir}", "dtype=fp32"]
    argv += ["temperature=0", "max_new_tokens=24", "device=cpu"]
    here.capture.readouterr()
    assert run_recipe(module.GenerateRecipe, [*argv, f"prompt.user={QUESTION}"]) == 0
    assert here.capture.readouterr().out.splitlines()[-1].strip() == ANSWER
    assert run_recipe(module.GenerateRecipe, [*argv, f"prompt.file={questions}"]) == 0
    lines = [line.strip() for line in here.capture.readouterr().out.splitlines()]
    assert lines[-4:] == [f"> {QUESTION}", ANSWER] * 2
    for key, typed, asked in (("user", f"{QUESTION}\n", 1), ("file", f"{QUESTION}\n\n{QUESTION}\n", 2)):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert run_recipe(module.GenerateRecipe, [*argv, f"prompt.{key}=-"]) == 0
        captured = here.capture.readouterr()
        assert captured.out.count(ANSWER) == asked and "sampling: the likeliest token each time" in captured.err
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    for options, says in (
        (["prompt.user=-"], "prompt.user: standard input has no question"),
        ([], "give either prompt.user"),
    ):
        assert run_recipe(module.GenerateRecipe, [*argv, *options]) == 2
        assert says in here.capture.readouterr().err


@pytest.mark.parametrize("recipe", ["full_finetune_single_device", "generate"])
def test_a_run_imports_no_torchtune(recipe: str, here: Workspace, tmp_path: Path) -> None:
    """The shipped configs where importing torchtune raises: a run, its model asked."""
    rows = [{"prompt": f"What is {n}?", "completion": f"{n}."} for n in range(40)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = yaml.safe_load(here.config(FULL).read_text())["model"]["path"]
    words = [f"model.path={base}", "device=cpu", "dtype=fp32"]
    if recipe == "generate":
        words = ["--config", "hf_generate", *words, "prompt.user=Why?", "max_new_tokens=2"]
    else:
        words = ["--config", "hf_offload", *words, f"dataset.path={data}", f"output_dir={tmp_path / 'out'}"]
        words += ["tokenizer.max_seq_len=60", "max_steps_per_epoch=2", "metric_logger=null"]
    program = (
        "import sys\n"
        "for name in ('torchtune', 'torchtune._cli'):\n"
        "    sys.modules[name] = None\n"
        "from offload.cli.main import main\n"
        f"sys.exit(main({['run', recipe, *words]!r}))"
    )
    process = here.spawn([sys.executable, "-c", program], cwd=tmp_path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert recipe == "generate" or "step_2" in out

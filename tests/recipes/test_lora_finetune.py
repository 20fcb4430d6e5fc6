"""The LoRA recipe end to end: what it trains and leaves, peft and transformers on it, QLoRA, resume, mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.recipes.conftest import MODEL, ROOT, Result, load_module  # type: ignore[import-not-found]

RECIPE = "lora_finetune_single_device"
Run = Callable[..., Result]

CHECKPOINT_FILES = {
    "checkpoint.json",
    "recipe_state.pt",
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
}
MODEL_FILES = {"config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.model"}

DORA = ("model.use_dora=True",)
DROPOUT = ("model.lora_dropout=0.2",)
# A random base has nothing for a small adapter to bend; with an adapter of the head it learns which words there are.
LEARNING = ("model.apply_lora_to_output=True", "gradient_accumulation_steps=4", "optimizer.lr=0.03")
ALL_LAYERS = "model.lora_attn_modules=[q_proj,k_proj,v_proj,output_proj]"
# Logits for every token, as peft and transformers give them: the fused loss leaves the head out of forward.
PLAIN_LOSS = "loss=torch.nn.CrossEntropyLoss"
STRATEGIES = {
    "resident": ("optimizer.strategy=resident",),
    "host": ("optimizer.strategy=host",),
    "stream": ("optimizer.strategy=stream",),
    "host with gradients": ("optimizer.strategy=host", "optimizer.offload_gradients=True"),
}
NF4_MODEL = {**MODEL, "embed_dim": 128, "num_kv_heads": 4, "intermediate_dim": 384}


@pytest.fixture
def run(workspace: Any) -> Run:
    def run(output_dir: Path, *overrides: str) -> Result:
        return workspace.run(output_dir, *overrides, recipe=RECIPE)

    return run


@pytest.fixture
def module(workspace: Any) -> ModuleType:
    """The recipe's script, as ``run`` uses it."""
    return workspace.recipes.setdefault(RECIPE, load_module(ROOT / "recipes" / f"{RECIPE}.py"))


@pytest.fixture
def ended(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The recipe objects of the runs so far, with their models as training left them."""
    recipes: list[Any] = []
    cleanup = module.LoRAFinetuneRecipeSingleDevice.cleanup

    def keep(self: Any, exit_code: int) -> None:
        recipes.append(self)
        cleanup(self, exit_code)

    monkeypatch.setattr(module.LoRAFinetuneRecipeSingleDevice, "cleanup", keep)
    return recipes


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        difference = (actual[name].double() - expected[name].double()).abs().max().item()
        assert torch.equal(actual[name], expected[name]), f"{name}: largest difference {difference:.3e}"


def losses(result: Result) -> list[float]:
    return [row["loss"] for row in result.rows]


def adapter(result: Result, step: int = 20) -> dict[str, Tensor]:
    """The adapter as peft finds it."""
    return load_file(result.output_dir / f"step_{step}" / "adapter" / "adapter_model.safetensors")


def state(result: Result, step: int = 20) -> dict[str, Any]:
    return torch.load(result.output_dir / f"step_{step}" / "recipe_state.pt", weights_only=True)


def assert_same_end(actual: Result, expected: Result, step: int = 20) -> None:
    """Weights, adapter, optimizer and random state, and every step's numbers are the same."""
    assert (actual.status, expected.status) == (0, 0), actual.err + expected.err
    assert_same(actual.weights(step), expected.weights(step))
    assert_same(adapter(actual, step), adapter(expected, step))
    theirs, ours = (state(result, step)["recipe_state"] for result in (actual, expected))
    for index, values in ours["optimizer"]["state"].items():
        assert_same(theirs["optimizer"]["state"][index], values)
    assert torch.equal(theirs["random"]["torch"], ours["random"]["torch"])
    assert [row["step"] for row in actual.rows] == list(range(1, step + 1))
    for key in ("loss", "lr", "grad_norm", "tokens_seen", "evaluation/loss"):
        assert [row.get(key) for row in actual.rows] == [row.get(key) for row in expected.rows], key


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def tokens() -> Tensor:
    return torch.randint(MODEL["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------- what it leaves


@pytest.mark.parametrize("only_adapter", [False, True])
def test_trains_the_adapter_and_leaves_metrics_and_a_checkpoint(
    run: Run, ended: list[Any], workspace: Any, tmp_path: Path, only_adapter: bool
) -> None:
    result = run(tmp_path / "run", *LEARNING, f"save_adapter_weights_only={only_adapter}")
    assert result.status == 0, result.err
    assert [row["step"] for row in result.rows] == list(range(1, 21))
    assert sum(losses(result)[-5:]) / 5 < sum(losses(result)[:5]) / 5 - 0.5
    evaluations = {row["step"]: row["evaluation/loss"] for row in result.rows if "evaluation/loss" in row}
    # Of held-out text after ten steps more, other versions of what draws weights and words tell more or less.
    assert evaluations.keys() == {10, 20} and max(evaluations.values()) < losses(result)[0] - 0.2
    model_files = set() if only_adapter else MODEL_FILES
    assert files(tmp_path / "run") == {"metrics.jsonl", "run.json"} | {
        f"step_20/{n}" for n in CHECKPOINT_FILES | model_files
    }

    base = ended[0].source.format.load_base()
    frozen, trained = {}, {}
    for name, param in ended[0].model.named_parameters():
        (trained if param.requires_grad else frozen)[name] = param.detach()
    assert_same(frozen, base)
    assert trained.keys() == state(result)["adapter"].keys()
    assert_same(trained, state(result)["adapter"])
    modules = {
        f"layers.{i}.{m}" for i in range(2) for m in ("attn.q_proj", "attn.v_proj", "mlp.w1", "mlp.w2", "mlp.w3")
    }
    assert trained.keys() == {f"{m}.lora_{part}.weight" for m in modules | {"output"} for part in "ab"}
    assert all(tensor.any() for name, tensor in trained.items() if ".lora_b." in name)

    if not only_adapter:
        before = load_file(workspace.path / "base" / "model.safetensors")
        changed = {name for name, tensor in result.weights(20).items() if not torch.equal(tensor, before[name])}
        parts = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        assert changed == {f"model.layers.{i}.{part}.weight" for i in range(2) for part in parts} | {"lm_head.weight"}
        assert result.weights(20).keys() == before.keys()


@pytest.mark.parametrize("kind", [(), DORA], ids=["lora", "dora"])
def test_peft_transformers_and_the_recipe_agree(
    run: Run, ended: list[Any], workspace: Any, tmp_path: Path, kind: tuple[str, ...]
) -> None:
    import peft
    import transformers

    result = run(tmp_path / "run", *kind, *LEARNING, ALL_LAYERS, PLAIN_LOSS)
    assert result.status == 0, result.err
    folder = tmp_path / "run" / "step_20"
    base = transformers.LlamaForCausalLM.from_pretrained(workspace.path / "base").eval()
    merged = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        before = base(tokens()).logits
        ours = ended[0].model.eval()(tokens())
        of_merged = merged(tokens()).logits
        of_peft = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()(tokens()).logits
    assert (ours - before).abs().max() > 0.1
    torch.testing.assert_close(of_merged, ours, rtol=0, atol=1e-5)
    torch.testing.assert_close(of_peft, ours, rtol=0, atol=1e-5)

    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(workspace.path / "base")
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 8, kind == DORA)
    assert set(config["target_modules"]) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head",
    }  # fmt: skip


def test_a_fresh_adapter_changes_nothing(run: Run, workspace: Any, tmp_path: Path) -> None:
    """DoRA's magnitudes must be those of the base's rows, not of what the builder drew."""
    first = [
        losses(run(tmp_path / name, *overrides, "max_steps_per_epoch=1"))[0]
        for name, overrides in {"lora": (), "dora": DORA, "none": ("model.lora_rank=1",)}.items()
    ]
    assert first[1:] == pytest.approx([first[0], first[0]], rel=1e-6)


@pytest.mark.parametrize("kind", [(), DORA], ids=["lora", "dora"])
def test_activation_checkpointing_leaves_the_result_alone(run: Run, tmp_path: Path, kind: tuple[str, ...]) -> None:
    plain = run(tmp_path / "plain", *kind, *DROPOUT)
    saving = run(tmp_path / "saving", *kind, *DROPOUT, "enable_activation_checkpointing=True")
    assert_same_end(saving, plain)
    assert_same(state(saving)["adapter"], state(plain)["adapter"])


# --------------------------------------------------------------------------------------------------- QLoRA


@pytest.fixture(scope="session")
def nf4_base(_workspace: Any) -> Path:
    """A base whose layers have weights that NF4 can hold."""
    from torchtune.models.convert_weights import tune_to_hf
    from torchtune.models.llama2 import llama2

    folder = _workspace.path / "nf4_base"
    shutil.copytree(_workspace.path / "base", folder)
    torch.manual_seed(0)
    heads, dim = NF4_MODEL["num_heads"], NF4_MODEL["embed_dim"]
    weights = tune_to_hf(llama2(**NF4_MODEL).state_dict(), num_heads=heads, num_kv_heads=heads, dim=dim)
    save_file({name: t.contiguous() for name, t in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": dim, "num_key_value_heads": heads, "intermediate_size": NF4_MODEL["intermediate_dim"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def nf4_overrides(base: Path) -> tuple[str, ...]:
    sizes = (f"model.{key}={NF4_MODEL[key]}" for key in ("embed_dim", "num_kv_heads", "intermediate_dim"))
    return ("model.quantize_base=True", f"checkpointer.checkpoint_dir={base}", *sizes)


def nf4_weights(model: nn.Module) -> dict[str, list[Tensor]]:
    """Everything that the 4-bit weights of a model consist of."""
    from torchao.dtypes.nf4tensor import NF4Tensor

    parts = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean")
    return {
        name: [getattr(param.data, part).clone() for part in parts]
        for name, param in model.named_parameters()
        if isinstance(param.data, NF4Tensor)
    }


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", [(), DORA], ids=["lora", "dora"])
def test_qlora_trains_on_a_4_bit_base_that_stays_as_it_is(
    run: Run,
    ended: list[Any],
    module: ModuleType,
    nf4_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: tuple[str, ...],
    dtype: str,
) -> None:
    import transformers
    from torchao.dtypes.nf4tensor import to_nf4

    at_start = []
    train = module.LoRAFinetuneRecipeSingleDevice.train

    def noting(self: Any) -> int:
        at_start.append(nf4_weights(self.model))
        return train(self)

    monkeypatch.setattr(module.LoRAFinetuneRecipeSingleDevice, "train", noting)
    result = run(
        tmp_path / "run", *nf4_overrides(nf4_base), *kind, *LEARNING, PLAIN_LOSS, f"dtype={dtype}",
        "optimizer.lr=0.01", "save_every_n_steps=10",
    )  # fmt: skip
    assert result.status == 0, result.err
    assert sum(losses(result)[-5:]) / 5 < sum(losses(result)[:5]) / 5 - 0.5

    recipe = ended[0]
    now = nf4_weights(recipe.model)
    assert len(now) == 2 * 7 and now.keys() == at_start[0].keys()
    for name in now:
        assert all(torch.equal(*pair) for pair in zip(now[name], at_start[0][name], strict=True)), name
    base = recipe.source.format.load_base()
    for name in now:
        assert torch.equal(now[name][0], to_nf4(base[name]).quantized_data), f"{name} is not the checkpoint's"

    for step in (10, 20):
        assert files(tmp_path / "run" / f"step_{step}") == CHECKPOINT_FILES | MODEL_FILES
        assert len(adapter(result, step)) == (2 * 5 + 1) * (3 if kind else 2)
    assert {t.dtype for t in result.weights(20).values()} == {recipe.dtype}
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "run" / "step_20").eval()
    assert merged.dtype == recipe.dtype
    with torch.no_grad():
        ours, theirs = recipe.model.eval()(tokens()), merged(tokens()).logits
    # bf16 keeps 8 bits: merged weights are rounded once more, relative to logits of about 5.
    torch.testing.assert_close(theirs.float(), ours.float(), rtol=0, atol=1e-5 if dtype == "fp32" else 0.15)


# ------------------------------------------------------------------------------------------ saves and resume


@pytest.mark.parametrize("kind", [(), DORA], ids=["lora", "dora"])
def test_an_intermediate_save_does_not_alter_the_run(run: Run, tmp_path: Path, kind: tuple[str, ...]) -> None:
    plain = run(tmp_path / "plain", *kind, *DROPOUT)
    saving = run(tmp_path / "saving", *kind, *DROPOUT, "save_every_n_steps=5")
    assert_same_end(saving, plain)
    assert {p.name for p in saving.output_dir.glob("step_*")} == {"step_5", "step_10", "step_15", "step_20"}
    assert files(saving.output_dir / "step_5") >= MODEL_FILES
    assert not torch.equal(
        saving.weights(5)["model.layers.0.mlp.up_proj.weight"], saving.weights(10)["model.layers.0.mlp.up_proj.weight"]
    )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [(), DORA], ids=["lora", "dora"])
def test_resume_from_a_saved_step_equals_an_uninterrupted_run(
    run: Run, tmp_path: Path, kind: tuple[str, ...], workers: int
) -> None:
    options = (*kind, *DROPOUT, f"num_workers={workers}")
    expected = run(tmp_path / "whole", *options)
    first = run(tmp_path / "half", *options, "save_every_n_steps=10")
    assert first.status == 0, first.err
    shutil.rmtree(tmp_path / "half" / "step_20")
    resumed = run(tmp_path / "half", *options, "resume_from_checkpoint=True")
    assert_same_end(resumed, expected)


@pytest.mark.parametrize("kind", [(), DORA], ids=["lora", "dora"])
def test_resume_after_sigterm_equals_an_uninterrupted_run(
    run: Run, module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, ...]
) -> None:
    only_adapter = "save_adapter_weights_only=True"
    expected = run(tmp_path / "whole", *kind, *DROPOUT)
    steps = []
    forward_backward = module.forward_backward

    def interrupted(*args: Any, **options: Any) -> Tensor:
        steps.append(None)
        if len(steps) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward_backward(*args, **options)

    monkeypatch.setattr(module, "forward_backward", interrupted)
    killed = run(tmp_path / "killed", *kind, *DROPOUT, only_adapter)
    assert killed.status == 143 and len(killed.rows) == 7, killed.err
    assert files(tmp_path / "killed" / "step_7") == CHECKPOINT_FILES
    resumed = run(tmp_path / "killed", *kind, *DROPOUT, "resume_from_checkpoint=True")
    assert_same_end(resumed, expected)
    assert len(steps) == 20


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.lora_rank=8", ("lora_a.weight is [4, 32]", "[8, 32]")),
        ("model.apply_lora_to_output=True", ("adapter has no output.lora_a.weight",)),
        ("model.apply_lora_to_mlp=False", ("adapter has layers.0.mlp.w1.lora_a.weight",)),
        ("model.use_dora=True", ("adapter has no layers.0.attn.q_proj.magnitude",)),
    ],
)
def test_resume_refuses_another_adapter(run: Run, tmp_path: Path, override: str, expected: tuple[str, ...]) -> None:
    assert run(tmp_path / "run", "max_steps_per_epoch=2", "save_adapter_weights_only=True").status == 0
    result = run(tmp_path / "run", "max_steps_per_epoch=4", "resume_from_checkpoint=True", override)
    assert_one_error(result, "model: ", *expected)


def test_a_recipe_refuses_the_other_ones_checkpoint(run: Run, workspace: Any, tmp_path: Path) -> None:
    more = ("max_steps_per_epoch=4", "resume_from_checkpoint=True")
    assert run(tmp_path / "lora", "max_steps_per_epoch=2").status == 0
    assert workspace.run(tmp_path / "full", "max_steps_per_epoch=2").status == 0
    result = workspace.run(tmp_path / "lora", *more)
    assert_one_error(result, "resume_from_checkpoint", "lora_finetune_single_device")
    assert_one_error(run(tmp_path / "full", *more), "resume_from_checkpoint", "full_finetune_single_device")


# ---------------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_strategy_equals_plain_adamw_bit_for_bit(run: Run, tmp_path: Path, accumulation: int) -> None:
    common = (f"gradient_accumulation_steps={accumulation}", "clip_grad_norm=0.5")
    plain = run(tmp_path / "plain", "optimizer=torch.optim.AdamW", *common)
    assert plain.status == 0, plain.err
    for name, overrides in STRATEGIES.items():
        result = run(tmp_path / name.replace(" ", "_"), *overrides, *common)
        assert result.status == 0, result.err
        assert_same(adapter(result), adapter(plain))
        assert_same(result.weights(20), plain.weights(20))
        assert losses(result) == losses(plain)
        norms = [row["grad_norm"] for row in result.rows]
        assert norms == pytest.approx([row["grad_norm"] for row in plain.rows], rel=1e-6)


# ----------------------------------------------------------------------------------------------- mistakes


def assert_one_error(result: Result, *expected: str) -> None:
    assert result.status == 2, result.err
    (error,) = result.errors()
    assert all(part in error for part in expected), error
    assert "Traceback" not in result.err


QWEN2 = ("model._component_=torchtune.models.qwen2.lora_qwen2",)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("model=torchtune.models.llama2.llama2",), ("model: ", "no LoRA layers", "lora_*", "full_finetune")),
        (QWEN2, ("model: ", "turns halves pairs", "set model=torchtune.models.llama2.lora_llama2")),
        (
            ("model.quantize_base=True",),
            ("model.quantize_base", "layers.0.attn.q_proj.weight [32, 32]", "divisible by 16384"),
        ),
        # The embedding and the head stay as they are, whatever their size.
        (
            ("model.quantize_base=True", "model.embed_dim=128", "model.intermediate_dim=192", "model.num_kv_heads=4"),
            ("model.quantize_base", "layers.0.mlp.w1.weight [192, 128]", "divisible by 16384"),
        ),
        (("model.embed_dim=64",), ("model.embed_dim: ", "hidden_size is 32", "set model.embed_dim=32")),
    ],
    ids=["no LoRA layers", "another family", "NF4 attention", "NF4 MLP", "other sizes"],
)
def test_mistakes_give_one_line_and_status_2(
    run: Run, tmp_path: Path, overrides: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert_one_error(run(tmp_path / "run", *overrides), *expected)
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_dora_is_for_layers_without_a_bias() -> None:
    from torchtune.models.qwen2 import lora_qwen2

    from offload.errors import UserError
    from offload.models.torchtune.lora import prepare_adapter

    sizes = {key: value for key, value in MODEL.items() if key != "norm_eps"}
    with pytest.raises(UserError, match=r"model.use_dora: .* bias \(q_proj, v_proj\).*set model.use_dora=False"):
        prepare_adapter(lora_qwen2(["q_proj", "v_proj"], use_dora=True, lora_rank=2, lora_alpha=4, **sizes))
    model = lora_qwen2(["output_proj"], apply_lora_to_mlp=True, use_dora=True, lora_rank=2, lora_alpha=4, **sizes)
    prepare_adapter(model)
    trained = {name.split(".")[3] for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {"output_proj", "w1", "w2", "w3"}

"""offload.training.preflight: `tune validate` refuses what a run refuses before it reads anything, in the same line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import tiny
from offload.cli import registry
from offload.cli.main import main
from offload.cli.validate import load_recipe
from offload.optim import cpu
from offload.training.launch import run_recipe
from offload.training.preflight import check_loss

FULL, LORA, GENERATE = "full_finetune_single_device", "lora_finetune_single_device", "generate"

REFUSED = {
    "clipping beside an update in backward": (
        ["clip_grad_norm=1.0", "optimizer.update_in_backward=True"],
        "clip_grad_norm: ",
    ),
    "an unknown device": (["device=tpu"], "device: got 'tpu'"),
    "a learning rate that the base optimizer refuses": (["optimizer.lr=-1"], "Invalid learning rate: -1"),
    "a pattern that matches nothing": (
        ["optimizer.strategy=stream", "optimizer.offload_states=momentum/.*"],
        "optimizer.offload_states: 'momentum/.*' matches no state",
    ),
    "a logger that cannot be imported": (
        ["metric_logger=torchtune.training.metric_logging.CometLogger"],
        "metric_logger: torchtune.training.metric_logging.CometLogger imports comet_ml",
    ),
    "no heads": (["model.num_heads=0"], "model: torchtune.models.llama2.llama2 cannot be built"),
    "negative sizes": (["model.vocab_size=-3"], "model: "),
    "sizes beyond any memory": (["model.embed_dim=4000000000000"], "model: "),
    "a loss of two arguments of one shape": (["loss=torch.nn.MSELoss"], "loss: torch.nn.MSELoss does not take"),
    "a loss for each token": (["loss=torch.nn.CrossEntropyLoss", "loss.reduction=none"], "of shape [8] of 8 labels"),
    "activations offloaded on the CPU": (
        ["device=cpu", "enable_activation_offloading=True"],
        "enable_activation_offloading: ",
    ),
    "an optimizer that needs a closure": (["optimizer=torch.optim.LBFGS"], "needs a closure"),
    "a scheduler's argument": (
        [
            "lr_scheduler=torch.optim.lr_scheduler.CyclicLR",
            "lr_scheduler.base_lr=1e-3",
            "lr_scheduler.max_lr=1e-2",
            "optimizer=torch.optim.Adagrad",
        ],
        "lr_scheduler: torch.optim.lr_scheduler.CyclicLR",
    ),
    "a seed that nothing takes": (["seed=-1"], "seed: expected at least 0, got -1"),
    "a mode that torch does not know": (["cudnn_deterministic_mode=nope"], "cudnn_deterministic_mode: expected"),
    "the standard library": (["loss=os.system", "loss.command=id"], "part of Python's standard library"),
}


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(tiny.HOME_VARIABLE, str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield
    assert list(tmp_path.rglob("*")) == [tmp_path / "here"]


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(("error: ", "note: ")) for line in lines), lines
    return [line for line in lines if line.startswith("error: ")]


@pytest.mark.parametrize(("overrides", "said"), REFUSED.values(), ids=REFUSED)
def test_validate_and_the_run_refuse_in_the_same_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, overrides: list[str], said: str
) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml", None)  # not installed
    assert main(["validate", "tiny_llama_offload", *overrides]) == 2
    (line,) = error_lines(capsys)
    assert said in line
    module = load_recipe(registry.our_recipes()[FULL])
    path = str(registry.our_configs()["tiny_llama_offload"])
    assert run_recipe(module.FullFinetuneRecipeSingleDevice, ["--config", path, *overrides]) == 2
    assert error_lines(capsys) == [line]


@pytest.mark.parametrize(
    ("config", "recipe", "overrides", "said"),
    [
        ("tiny_llama_offload", LORA, [], "model: it has no LoRA layers"),
        ("tiny_llama_lora", LORA, ["model.lora_rank=0"], "model.lora_rank: expected at least 1"),
        ("tiny_llama_lora", LORA, ["optimizer.lr=-1"], "Invalid learning rate"),
        ("tiny_llama_generate", GENERATE, ["device=tpu"], "device: got 'tpu'"),
        ("tiny_llama_generate", GENERATE, ["model.num_heads=0"], "model: "),
    ],
)
def test_every_recipe_has_its_checks(
    capsys: pytest.CaptureFixture[str], config: str, recipe: str, overrides: list[str], said: str
) -> None:
    assert main(["validate", config, *overrides, "--recipe", recipe]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", [*registry.our_configs()])
def test_every_shipped_config_passes(capsys: pytest.CaptureFixture[str], name: str) -> None:
    given = ["model.path=~/models/any"] if name.startswith("hf_") else []
    given += ["dataset.path=chats.jsonl"] if given and not name.endswith("_generate") else []
    assert main(["validate", name, *given]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides",
    [
        ["~model.num_heads"],  # its sizes come from the base checkpoint's config.json
        ["~model.num_heads", "optimizer.strategy=stream", "optimizer.offload_states=momentum/.*"],
        ["model=offload.models.huggingface.from_pretrained", "model.path=/nowhere/yet", "checkpointer=null"],
        ["optimizer=torch.optim.SGD", "optimizer.momentum=0.9"],
        ["optimizer=bitsandbytes.optim.AdamW8bit"],
        ["optimizer=torchao.optim.AdamW8bit"],
        ["loss=torch.nn.CrossEntropyLoss"],
        ["optimizer._component_=${tiny_llama:train}"],
        ["metric_logger._component_=${tiny_llama:train}"],
        ["output_dir=${tiny_llama:checkpoint}"],  # a resolver that prepares files is not called
        ["loss=torchtune.modules.loss.CEWithChunkedOutputLoss"],
        ["metric_logger=null", "lr_scheduler=null", "evaluation=null"],
        [
            "optimizer.strategy=stream",
            "optimizer.offload_states=exp_avg_sq/layers.*",
            "clip_grad_norm=null",
            "optimizer.update_in_backward=True",
        ],
    ],
    ids=lambda overrides: overrides[0],
)
def test_what_only_a_run_can_tell_and_what_is_right_passes(
    capsys: pytest.CaptureFixture[str], overrides: list[str]
) -> None:
    assert main(["validate", "tiny_llama_offload", *overrides]) == 0, capsys.readouterr().err


def test_a_device_of_another_machine_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert main(["validate", "tiny_llama_offload", "device=cuda", "dtype=bf16"]) == 0
    assert "device=cuda is not available here" in capsys.readouterr().out
    assert main(["validate", "tiny_llama_offload", "device=cuda", "optimizer.lr=-1"]) == 2


def test_the_checks_draw_no_random_number(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state()
    assert main(["validate", "tiny_llama_lora"]) == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_missing_kernel_is_left_to_the_run_to_tell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "none.so")
    cpu.load.cache_clear()
    try:
        overrides = ["optimizer.optimizer_class=offload.optim.AdamW", "optimizer.strategy=stream"]
        assert main(["validate", "tiny_llama_offload", *overrides]) == 0
        with pytest.warns(UserWarning, match=r"hatch_build\.py"):
            assert cpu.load() is None
    finally:
        cpu.load.cache_clear()


def test_a_loss_that_counts_each_label_is_taken() -> None:
    check_loss(torch.nn.CrossEntropyLoss(reduction="sum"), "torch.nn.CrossEntropyLoss")

"""Configs of other trainers, as their documentation has them: the command that is told passes the check."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from offload.cli.main import main
from offload.config.translation import command, is_of_another_trainer

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
model_type: AutoModelForCausalLM
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: qlora
lora_model_dir:
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_target_linear: true
lora_target_modules: [gate_proj, down_proj]
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
weight_decay: 0.0
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
dataset: identity,alpaca_en_demo
template: qwen3
cutoff_len: 2048
output_dir: saves/sft
logging_steps: 10
save_steps: 500
report_to: none
disable_gradient_checkpointing: true
per_device_train_batch_size: 1
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: linear
bf16: true
eval_steps: 500
"""
TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
assistant_only_loss: false
learning_rate: 2.0e-5
num_train_epochs: 2.5
warmup_steps: 10
optim: sgd
max_grad_norm: 1.0
packing: false
per_device_train_batch_size: 2
run_name: my run
"""


def told(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], set[str]]:
    """The words of the command that is told of a config, and what it leaves out."""
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(text), sort_keys=False))  # the last of a key said twice
    assert main(["validate", str(path), "--recipe", "lora_finetune_single_device"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    left = second.removeprefix("error: left out of that: ").partition(";")[0]
    return shlex.split(re.sub(".*the same here: ", "", first)), set(left.split(", "))


@pytest.mark.parametrize(
    ("text", "words", "left"),
    [
        (
            AXOLOTL,
            "lora_finetune_single_device --config hf_qlora model.path=NousResearch/Llama-3.2-1B "
            "dataset.path=teknium/GPT4-LLM-Cleaned output_dir=./outputs/lora-out tokenizer.max_seq_len=2048 "
            "dataset.packed=True adapter.r=16 adapter.lora_alpha=32 adapter.target_modules=all-linear "
            "gradient_accumulation_steps=2 batch_size=2 epochs=1 optimizer.lr=0.0002 "
            "enable_activation_checkpointing=True model.attn_implementation=flash_attention_2 "
            "optimizer.weight_decay=0.0",
            {"val_set_size", "warmup_ratio"},
        ),
        (
            LLAMA_FACTORY,
            "lora_finetune_single_device --config hf_lora model.path=Qwen/Qwen3-8B adapter.r=8 "
            "adapter.target_modules=[q_proj,v_proj] tokenizer.max_seq_len=2048 output_dir=saves/sft "
            "log_every_n_steps=10 save_every_n_steps=500 metric_logger=null enable_activation_checkpointing=False "
            "batch_size=1 optimizer.lr=0.0001 epochs=3 lr_scheduler=transformers.get_linear_schedule_with_warmup",
            {"dataset", "template", "eval_steps"},
        ),
        (
            TRL,
            "full_finetune_single_device --config hf_offload model.path=Qwen/Qwen2.5-0.5B "
            "dataset.path=trl-lib/Capybara dataset.train_on=all optimizer.lr=2e-05 "
            "lr_scheduler.num_warmup_steps=10 optimizer=torch.optim.SGD clip_grad_norm=1.0 "
            "dataset.packed=False batch_size=2 metric_logger.name='my run'",
            {"num_train_epochs"},
        ),
    ],
)
def test_the_command_says_what_the_config_says(
    text: str, words: str, left: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, left_out = told(text, tmp_path, capsys)
    assert found == ["tune", "run", *shlex.split(words)]
    assert left_out == left


@pytest.mark.parametrize("text", [AXOLOTL, LLAMA_FACTORY, TRL, f"{TRL}optim: adamw_torch"])
def test_the_command_passes_the_check(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (_, _, recipe, _, config, *overrides), _ = told(text, tmp_path, capsys)
    # Flash attention needs a GPU; what names data is left out of one.
    overrides = [word for word in overrides if "flash" not in word and not word.startswith("dataset.path")]
    words = [config, *overrides, "dataset.path=x.jsonl", "device=cpu"]
    assert main(["validate", *words, "--recipe", recipe]) == 0, capsys.readouterr().err


def test_a_config_of_ours_is_never_taken_for_theirs() -> None:
    configs = [yaml.safe_load(path.read_text()) for path in (Path(__file__).parents[2] / "configs").glob("*.yaml")]
    assert len(configs) > 50 and not any(map(is_of_another_trainer, configs))
    assert not is_of_another_trainer({"output_dir": "x", "batch_size": 1, "learning_rate": 1, "seed": 0})
    assert is_of_another_trainer({"learning_rate": 1, "num_train_epochs": 1, "packing": True})


def test_nothing_is_lost_in_silence() -> None:
    """Every key with a value is in the command or told, but for what the recipe says and defaults."""
    theirs = {
        "learning_rate": 1e-4,
        "fp16": True,
        "datasets": [{"path": "a"}, {"path": "b"}],
        "odd": 3,
        "eval_steps": 5,
    }
    line, left = command({**theirs, "load_in_8bit": True, "tf32": False, "lr_scheduler_type": "polynomial"})
    assert line == "tune run full_finetune_single_device --config hf_offload optimizer.lr=0.0001"
    assert left == ["fp16", "datasets", "odd", "eval_steps", "load_in_8bit", "lr_scheduler_type"]

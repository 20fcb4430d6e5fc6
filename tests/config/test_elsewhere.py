"""Words of other trainers, and slips of the hand: the line that is told has the word that is meant."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from omegaconf import OmegaConf

from offload.cli.main import main
from offload.config.elsewhere import USUAL, component_here
from offload.config.loading import check_config
from offload.config.overrides import apply_overrides
from offload.errors import UserError
from offload.training.settings import TrainSettings

GIVEN = ["model.path=x", "dataset.path=y"]


def said(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert main(["validate", *words]) == 2
    return [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("deepspeed=ds.json", "deepspeed: nothing reads this key; remove it: a run is divided among GPUs by `tune run "
         "--nproc_per_node N full_finetune_distributed`"),
        ("adam_beta2=0.95", "adam_beta2: nothing reads this key; it is called optimizer.betas here"),
        ("run_name=a", "run_name: nothing reads this key; it is called metric_logger.name here"),
        ("adapter.rank=8", "adapter.rank: peft.LoraConfig does not take 'rank'; it is called adapter.r here"),
        ("adapter.lora_r=8", "adapter.lora_r: peft.LoraConfig does not take 'lora_r'; it is called adapter.r here"),
        ("tokenizer.max_length=8", "tokenizer.max_length: offload.data.tokenizer.ChatTokenizer does not take "
         "'max_length'; it is called tokenizer.max_seq_len here"),
        ("optimizer=adamw_8bit", "optimizer: 'adamw_8bit' is no component; did you mean "
         "optimizer=bitsandbytes.optim.AdamW8bit?"),
        ("lr_scheduler=linear", "lr_scheduler: 'linear' is no component; did you mean "
         "lr_scheduler=transformers.get_linear_schedule_with_warmup?"),
        ("lr_scheduler=warm", f"lr_scheduler._component_: expected a full dotted path such as {USUAL['lr_scheduler']}, "
         "got 'warm'"),
        ("metric_logger=none", "metric_logger: 'none' is no component; did you mean metric_logger=null?"),
        ("dataset=chats.jsonl", "dataset: 'chats.jsonl' is no component; did you mean "
         "dataset=offload.data.sft.sft_dataset dataset.path=chats.jsonl?"),
        ("model=Qwen/Qwen3-8B", "model: 'Qwen/Qwen3-8B' is no component; did you mean "
         "model=offload.models.huggingface.from_pretrained model.path=Qwen/Qwen3-8B?"),
    ],
)  # fmt: skip
def test_what_another_trainer_calls_it(word: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["hf_lora", *GIVEN, word], capsys) == [line]


def test_adapters_are_trained_by_another_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = said(["hf_offload", *GIVEN, "lora_r=8"], capsys)
    assert "it is called adapter.r in the recipe lora_finetune_single_device (--config hf_lora)" in line


@pytest.mark.parametrize(
    ("word", "way"),
    [
        ("model.lora_r=8", "it is called model.lora_rank here"),
        ("model.rank=8", "it is called model.lora_rank here"),
        ("model.lora_target_modules=[q_proj]", "it is called model.lora_attn_modules here"),
        ("lora_r=8", "did you mean model.lora_rank?"),
    ],
)
def test_torchtunes_builders_have_adapters_of_their_own(
    word: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = said(["tiny_llama_lora", word], capsys)
    assert line.endswith(f"; {way}")


def test_what_the_usual_component_takes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optimizer=torch.optim.SGD", "optimizer.strategy=stream", "optimizer.betas=[0.9,0.9]"]
    strategy, betas = said(["hf_offload", *GIVEN, *words], capsys)
    assert strategy.endswith("'strategy'; offload.OffloadOptimizer does: optimizer=offload.OffloadOptimizer")
    assert "OffloadOptimizer" not in betas  # AdamW's own, which the default class of it would take
    (line,) = said(["tiny_llama_offload", "evaluation.dataset.path=x.jsonl"], capsys)
    assert line.endswith("does: evaluation.dataset=offload.data.sft.sft_dataset")


@pytest.mark.parametrize(
    "word",
    [
        "lr_scheduler=transformers.get_linear_schedule_with_warmup",
        "lr_scheduler=transformers.get_constant_schedule_with_warmup",
        "lr_scheduler=offload.training.schedules.get_cosine_schedule_with_warmup",
        "metric_logger=null",
        "optimizer=bitsandbytes.optim.PagedAdamW",
        "optimizer=torch.optim.Adafactor",
    ],
)
def test_what_is_told_passes(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "tiny_llama_offload", word]) == 0


def test_a_dotted_path_is_left_alone() -> None:
    assert component_here("optimizer", "torch.optim.AdamW") is component_here("dataset", "mine.rows") is None


def test_what_is_missing_is_told_once_and_in_words_of_users(capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer's path is the model's."""
    assert said(["hf_offload"], capsys) == [
        "dataset.path: required: set dataset.path (text or a path or a list)",
        "model.path: required: set model.path (text or a path)",
    ]


def test_a_key_of_ones_own_that_others_refer_to_is_told_where_it_is_missing() -> None:
    cfg = OmegaConf.create({"output_dir": "${base}/run", "base": "???"})
    with pytest.raises(UserError) as caught:
        check_config(cfg, TrainSettings)
    lines = caught.value.lines
    assert "base: required: set base" in lines and not any(line.startswith("output_dir") for line in lines)


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["a", "=", "4"], "override a = 4: write a=4, without spaces"),
        (["a=", "4"], "override a= 4: write a=4, without spaces"),
        (["a", "=4"], "override a =4: write a=4, without spaces"),
        (["a:", "4", "b=1"], "override a: 4: write a=4, without spaces"),
    ],
)
def test_spaces_are_told_as_one_mistake(words: list[str], written: str) -> None:
    with pytest.raises(UserError) as caught:
        apply_overrides(words, {"a": 1, "b": 2}, None)
    assert caught.value.lines == [written]


def test_values_may_be_empty_or_end_in_an_equals_sign() -> None:
    tree = {"a": 1, "b": 2}
    apply_overrides(["a=", "b=d=", "+c=3", "~b"], tree, None)
    assert tree == {"a": "", "c": 3}

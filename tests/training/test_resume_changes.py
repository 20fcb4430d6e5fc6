"""What a resumed run's configuration may change, and what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from offload.errors import UserError
from offload.training.resume_changes import check_changes, resume_notes, warm_up_note

COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
BASE: dict[str, Any] = {
    "seed": 0,
    "shuffle": True,
    "batch_size": 2,
    "clip_grad_norm": 1.0,
    "dataset": {"_component_": "d", "data_files": "/here/train.jsonl", "packed": True},
    "tokenizer": {"_component_": "t", "path": "/here/tokenizer.model", "max_seq_len": 48},
    "model": {"_component_": "m", "lora_alpha": 8, "lora_dropout": 0.0},
    "checkpointer": {"checkpoint_dir": "/here"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3, "betas": [0.9, 0.95], "fused": True},
    "lr_scheduler": {"_component_": COSINE, "num_warmup_steps": 2},
}
GROUP = {"lr": 5e-4, "initial_lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.01, "fused": True, "params": [0]}
STATE = {"optimizer": {"param_groups": [GROUP]}, "lr_scheduler": {"last_epoch": 3}, "total_steps": 20}


def changed(*overrides: str) -> Any:
    return OmegaConf.merge(OmegaConf.create(BASE), OmegaConf.from_dotlist(list(overrides)))


def check(*overrides: str, step_in_epoch: int = 5, saved: dict[str, Any] = BASE) -> None:
    check_changes(saved, changed(*overrides), checkpoint=Path("/runs/step_5"), step_in_epoch=step_in_epoch)


def notes(*overrides: str, **options: Any) -> list[str]:
    return list(resume_notes(BASE, changed(*overrides), STATE, **{"total_steps": 20, **options}))


def test_the_same_run_is_told_nothing() -> None:
    check()
    assert notes(has_adapter=True) == []
    check("seed=null")
    assert notes("seed=null") == []  # the checkpoint's is taken
    assert notes("optimizer.fused=False", "+optimizer.strategy=host") == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("tokenizer.max_seq_len=24", "tokenizer.max_seq_len: it is 24 now and was 48"),
        ("dataset.packed=False", "set dataset.packed=True"),
        ("dataset.split=train", "dataset.split: it is train now and was null"),
        ("dataset.data_files=/here/other.jsonl", "set dataset.data_files=/here/train.jsonl"),
        ("shuffle=False", "set shuffle=True"),
        ("seed=1", "set seed=0"),
    ],
)
def test_another_order_of_the_data_is_refused_within_an_epoch_alone(override: str, told: str) -> None:
    with pytest.raises(UserError, match="checkpointer.checkpoint_dir=/runs/step_5") as caught:
        check(override)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    check(override, step_in_epoch=0)
    (note,) = notes(override)
    assert note.endswith("the run changes here")


def test_moved_files_are_told_and_not_refused() -> None:
    moved = ("dataset.data_files=/there/train.jsonl", "tokenizer.path=/there/tokenizer.model")
    check(*moved)
    assert len(notes(*moved)) == 2


def test_another_schedule_and_another_adapter_are_refused() -> None:
    with pytest.raises(UserError, match=f"torch.optim.lr_scheduler.StepLR now.*set lr_scheduler={COSINE}"):
        check("lr_scheduler._component_=torch.optim.lr_scheduler.StepLR", step_in_epoch=0)
    with pytest.raises(UserError, match="was null in the checkpoint's run"):
        check(saved={**BASE, "lr_scheduler": None})
    check("lr_scheduler=null")
    assert notes("lr_scheduler=null") == [
        "lr_scheduler is null now: the learning rate stays where the checkpoint's schedule left it"
    ]
    with pytest.raises(UserError, match="model.lora_alpha: it is 16 now and was 8"):
        check("model.lora_alpha=16", step_in_epoch=0)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("batch_size=4", "batch_size is 4 now and was 2 in the checkpoint's run: the run changes here"),
        ("clip_grad_norm=null", "clip_grad_norm is null now and was 1.0"),
        ("model.lora_dropout=0.1", "model.lora_dropout is 0.1 now and was 0.0"),
        ("lr_scheduler.num_warmup_steps=9", "lr_scheduler.num_warmup_steps is 9 now and was 2"),
        ("optimizer.lr=0.5", "optimizer.lr=0.5 is not used: a resumed run goes on with the checkpoint's 0.001"),
        ("optimizer.weight_decay=0.5", "optimizer.weight_decay=0.5 is not used"),
        ("optimizer.betas=[0.8,0.9]", "optimizer.betas=[0.8, 0.9] is not used"),
        ("checkpointer.checkpoint_dir=/there", "checkpointer.checkpoint_dir is /there now"),
    ],
)
def test_each_change_is_told_in_one_line(override: str, told: str) -> None:
    (note,) = notes(override, has_adapter=True)
    assert told in note


def test_a_schedule_of_another_length_is_told() -> None:
    (note,) = notes(total_steps=40)
    assert "40 steps now and had 20: the learning rate follows" in note
    section = {"_component_": "torch.optim.lr_scheduler.CosineAnnealingLR"}
    cfg = OmegaConf.create({**BASE, "lr_scheduler": section})
    state = {**STATE, "lr_scheduler": {"T_max": 20, "last_epoch": 3}}
    (note,) = resume_notes({**BASE, "lr_scheduler": section}, cfg, state, total_steps=40)
    assert "the schedule stays that of 20" in note


def test_what_the_base_model_filled_in_since_is_no_change() -> None:
    assert notes("+model.rope_base=10000") == []


def test_a_warm_up_that_the_run_does_not_outlast() -> None:
    section = OmegaConf.create({"_component_": COSINE, "num_warmup_steps": 20})
    for steps in (5, 20):
        note = warm_up_note(section, steps)
        assert note is not None and "num_warmup_steps is 20" in note and f"{steps} steps" in note
    assert warm_up_note(section, 21) is None
    assert warm_up_note(None, 5) is None
    assert warm_up_note(OmegaConf.create({"_component_": "x", "step_size": 30}), 5) is None

"""Hugging Face's ``Trainer``, ``trl.SFTTrainer`` and Lightning train what they train with torch's AdamW."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import OffloadOptimizer, OffloadTrainerMixin
from offload.errors import UserError

transformers = pytest.importorskip("transformers", reason="pip install transformers")

ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
ROWS, VOCABULARY = 10, 31

AT_STEP: list[dict[str, Any]] = [
    {"strategy": "resident"},
    {"strategy": "stream", "offload_gradients": True},
    {"strategy": "host", "offload_gradients": True},
    {"strategy": "host", "offload_gradients": True, "model": True},
]
IN_BACKWARD: list[dict[str, Any]] = [
    {"strategy": "resident", "update_in_backward": True},
    {"strategy": "stream", "update_in_backward": True, "model": True},
    {"strategy": "host", "update_in_backward": True, "offload_gradients": True},
]


def label(settings: dict[str, Any]) -> str:
    return " ".join(str(value) if key == "strategy" else key for key, value in settings.items())


def make_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def rows() -> list[dict[str, list[int]]]:
    """Of different lengths, so that micro-batches have different numbers of labels."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 9, (ROWS,), generator=generator).tolist()
    tokens = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in tokens]


def collate(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: torch.tensor([sample[key] + [value] * (longest - len(sample[key])) for sample in samples])
        for key, value in fill.items()
    }


class OurTrainer(OffloadTrainerMixin, transformers.Trainer):
    pass


def run(
    trainer_class: type,
    args_class: type,
    folder: Path,
    settings: dict[str, Any] | None,
    *,
    max_grad_norm: float,
    accumulation: int = 4,
    saves: bool = False,
    resume: bool = False,
    **options: Any,
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Parameters and logs; ``settings`` are those of OffloadOptimizer, None is plain AdamW."""
    model = make_model()
    args = args_class(
        output_dir=str(folder), per_device_train_batch_size=1, gradient_accumulation_steps=accumulation,
        max_grad_norm=max_grad_norm, num_train_epochs=2, logging_steps=1, report_to=[], use_cpu=True, seed=0,
        disable_tqdm=True, save_strategy="steps" if saves else "no", save_steps=3, lr_scheduler_type="cosine",
    )  # fmt: skip
    if settings is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    else:
        attached = {"model": model} if settings.get("model") else {}
        optimizer = OffloadOptimizer(model.named_parameters(), **{**settings, "model": None, **attached}, **ADAMW)
    trainer = trainer_class(model=model, args=args, optimizers=(optimizer, None), **options)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    if isinstance(optimizer, OffloadOptimizer):
        optimizer.synchronize()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    kept = [{key: entry[key] for key in ("loss", "grad_norm", "learning_rate")} for entry in logs]
    return {name: p.detach().clone() for name, p in model.named_parameters()}, kept


def huggingface(folder: Path, settings: dict[str, Any] | None, **options: Any) -> Any:
    trainer = transformers.Trainer if settings is None else OurTrainer
    data = {"train_dataset": rows(), "data_collator": collate}
    return run(trainer, transformers.TrainingArguments, folder, settings, **data, **options)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Any]:
    """What Trainer trains with plain AdamW, by ``max_grad_norm``."""
    known: dict[float, Any] = {}

    def of(max_grad_norm: float) -> Any:
        if max_grad_norm not in known:
            known[max_grad_norm] = huggingface(tmp_path_factory.mktemp("plain"), None, max_grad_norm=max_grad_norm)
        return known[max_grad_norm]

    return of


def assert_same(actual: Any, wanted: Any) -> None:
    (values, logs), (expected_values, expected_logs) = actual, wanted
    assert all(torch.equal(value, expected_values[name]) for name, value in values.items())
    assert len(logs) == len(expected_logs) == 6  # two epochs of 10 rows by four, the last step of each by two
    for log, entry in zip(logs, expected_logs, strict=True):
        assert (log["loss"], log["learning_rate"]) == (entry["loss"], entry["learning_rate"])
        assert log["grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("settings", AT_STEP, ids=label)
def test_trainer_with_clipping(tmp_path: Path, expected: Any, settings: dict[str, Any]) -> None:
    wanted = expected(0.5)
    assert any(entry["grad_norm"] > 0.5 for entry in wanted[1])
    assert_same(huggingface(tmp_path, settings, max_grad_norm=0.5), wanted)


@pytest.mark.parametrize("settings", [AT_STEP[2], *IN_BACKWARD], ids=label)
def test_trainer_without_clipping(tmp_path: Path, expected: Any, settings: dict[str, Any]) -> None:
    assert_same(huggingface(tmp_path, settings, max_grad_norm=0.0), expected(0.0))


@pytest.mark.parametrize("settings", [AT_STEP[1], AT_STEP[3]], ids=label)
def test_trainer_beside_a_worker(tmp_path: Path, threaded: Any, expected: Any, settings: dict[str, Any]) -> None:
    """The CPU plays a device of its own, whose updates run on another thread."""
    assert_same(huggingface(tmp_path, settings, max_grad_norm=0.5), expected(0.5))


def test_trainer_resumes(tmp_path: Path) -> None:
    first = huggingface(tmp_path, AT_STEP[3], max_grad_norm=0.5, saves=True)
    assert_same(huggingface(tmp_path, AT_STEP[3], max_grad_norm=0.5, resume=True), first)


def test_mixin_leaves_other_optimizers_alone(tmp_path: Path, expected: Any) -> None:
    data = {"train_dataset": rows(), "data_collator": collate}
    assert_same(
        run(OurTrainer, transformers.TrainingArguments, tmp_path, None, max_grad_norm=0.5, **data), expected(0.5)
    )


def test_clipping_with_updates_in_backward_is_refused_before_the_first(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^max_grad_norm: got 1.0, .* set max_grad_norm=0 in the training arguments"):
        huggingface(tmp_path, IN_BACKWARD[0], max_grad_norm=1.0)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_trainer_without_the_mixin_is_told_of_it(tmp_path: Path, max_grad_norm: float) -> None:
    data = {"train_dataset": rows(), "data_collator": collate}
    with pytest.raises(RuntimeError, match=r"offload\.OffloadTrainerMixin, Trainer"):
        run(
            transformers.Trainer, transformers.TrainingArguments, tmp_path, AT_STEP[1], max_grad_norm=max_grad_norm,
            accumulation=1, **data,
        )  # fmt: skip


def test_sft_trainer(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="pip install trl")
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    tokenizer = word_tokenizer()
    texts = [" ".join(f"w{token % 25}" for token in row["input_ids"]) for row in rows()]
    data = {"train_dataset": datasets.Dataset.from_dict({"text": texts}), "processing_class": tokenizer}

    class OurSFTTrainer(OffloadTrainerMixin, trl.SFTTrainer):
        pass

    plain = run(trl.SFTTrainer, trl.SFTConfig, tmp_path / "plain", None, max_grad_norm=0.5, **data)
    ours = run(OurSFTTrainer, trl.SFTConfig, tmp_path / "ours", AT_STEP[3], max_grad_norm=0.5, **data)
    assert_same(ours, plain)


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(25))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


# Lightning


def fit(folder: Path, settings: dict[str, Any] | None, clip: float | None) -> dict[str, Tensor]:
    """Lightning's automatic optimization."""
    lightning = pytest.importorskip("lightning", reason="pip install lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch).loss

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            if settings is not None and settings.get("offload_gradients"):
                optimizer.clip_grad_norm_(math.inf if gradient_clip_val is None else gradient_clip_val)
            else:
                super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

        def configure_optimizers(self) -> Any:
            if settings is None:
                self.built: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)
            else:
                attached = {"model": self.model} if settings.get("model") else {}
                self.built = OffloadOptimizer(
                    self.model.named_parameters(), **{**settings, "model": None, **attached}, **ADAMW
                )
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.built, 10)
            return {"optimizer": self.built, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, accumulate_grad_batches=4, gradient_clip_val=clip, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=1, collate_fn=collate))
    if isinstance(module.built, OffloadOptimizer):
        module.built.synchronize()
    return {name: p.detach().clone() for name, p in module.model.named_parameters()}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "settings",
    [{"strategy": "resident"}, {"strategy": "stream", "model": True}, {"strategy": "host", "model": True}, AT_STEP[3]],
    ids=label,
)
def test_lightnings_automatic_loop(tmp_path: Path, settings: dict[str, Any], clip: float | None) -> None:
    actual, wanted = fit(tmp_path, settings, clip), fit(tmp_path, None, clip)
    assert all(torch.equal(value, wanted[name]) for name, value in actual.items())

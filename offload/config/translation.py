"""A whole config of another trainer, as the command that does the same here."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offload.config.elsewhere import HERE, NOT_HERE, component_here

ENOUGH = 3
"""Keys of another trainer's that make a config one of theirs, where it has none of our components."""

_SAME = ("gradient_accumulation_steps", "output_dir", "seed")
_LORA = ("lora", "qlora")

_SAID = ("adapter", "finetuning_type", "load_in_4bit", "quantization_bit", "use_peft")
"""What the recipe and its config say."""

_ANYWAY = (
    "dataset_num_proc",
    "dataset_prepared_path",
    "do_train",
    "local_rank",
    "model_type",
    "overwrite_cache",
    "overwrite_output_dir",
    "pad_to_sequence_len",
    "plot_loss",
    "preprocessing_num_workers",
    "remove_unused_columns",
    "save_safetensors",
    "stage",
    "tokenizer_type",
)
"""What nobody misses here."""


def is_of_another_trainer(tree: Mapping[str, Any]) -> bool:
    """Whether a config, of plain containers, is written for another trainer."""
    ours = any(isinstance(value, dict) and "_component_" in value for value in tree.values())
    return not ours and sum(name in HERE or name in NOT_HERE for name in tree) >= ENOUGH


def command(tree: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The command that does here what a config of another trainer says, and its keys that are left out.

    What is empty or false there, or the default here, is neither in the one nor in the others.
    """
    words: list[str] = []
    left = []
    for name, value in tree.items():
        if value is None or value == "" or value == [] or name in _SAID or name in _ANYWAY:
            continue
        found = None if name in NOT_HERE else _overrides(name, value)
        if found is not None:
            words += found
        elif value is not False:
            left.append(name)
    recipe, config = _recipe_and_config(tree)
    if any(word.startswith("optimizer=") for word in words):  # a class that knows nothing of backward
        words = [word for word in words if not word.startswith("optimizer.update_in_backward")]
    first = {word.partition("=")[0]: word for word in reversed(words)}
    given = " ".join(shlex.quote(word) for word in words if first[word.partition("=")[0]] is word)
    return f"tune run {recipe} --config {config} {given}", left


def _recipe_and_config(tree: Mapping[str, Any]) -> tuple[str, str]:
    if tree.get("adapter") == "qlora" or tree.get("load_in_4bit") or tree.get("quantization_bit"):
        return "lora_finetune_single_device", "hf_qlora"
    is_lora = tree.get("adapter") in _LORA or tree.get("finetuning_type") in _LORA or tree.get("use_peft")
    if is_lora or any(HERE.get(name, "").startswith("adapter.") for name in tree):
        return "lora_finetune_single_device", "hf_lora"
    return "full_finetune_single_device", "hf_offload"


def _overrides(name: str, value: Any) -> list[str] | None:
    """What a key of theirs is here, nothing where that is the default; None where it has to be left out."""
    ours = name if name in _SAME else HERE.get(name, name)
    made = _VALUES.get(ours, _plain)(name, value)
    if made is None:
        return None
    return [word if "=" in word else f"{ours}={word}" for word in made]


def _plain(name: str, value: Any) -> list[str] | None:
    is_known = name in _SAME or name in HERE
    return [str(value)] if is_known and isinstance(value, (str, int, float)) else None


def _whole(name: str, value: Any) -> list[str] | None:
    is_whole = isinstance(value, (int, float)) and value == int(value)
    return ([str(int(value))] if value > 0 else []) if is_whole else None


def _is_on(name: str, value: Any) -> list[str]:
    return [str(bool(value) != name.startswith("disable_"))]


def _path(name: str, value: Any) -> list[str] | None:
    if isinstance(value, list):
        paths = [each.get("path") for each in value if isinstance(each, dict)]
        return [paths[0]] if len(paths) == len(value) == 1 and isinstance(paths[0], str) else None
    return [str(value)] if name != "dataset" and isinstance(value, str) else None


def _train_on(name: str, value: Any) -> list[str]:
    is_all = bool(value) if name.startswith("train_on_") else not value
    return ["all"] if is_all else []


def _dtype(name: str, value: Any) -> list[str] | None:
    return None if name == "fp16" or "16" in str(value).replace("bfloat16", "") else []


def _attention(name: str, value: Any) -> list[str] | None:
    return ["flash_attention_2"] if value is True or value == "fa2" else None


def _clip(name: str, value: Any) -> list[str] | None:
    return [str(value), "optimizer.update_in_backward=False"] if value else []


def _optimizer(name: str, value: Any) -> list[str] | None:
    if "adamw" in str(value):
        return []  # the config's own takes no memory of the GPU
    word = component_here("optimizer", str(value))
    return None if word is None else [word]


def _schedule(name: str, value: Any) -> list[str] | None:
    word = component_here("lr_scheduler", str(value))
    return None if word is None else [] if value == "cosine" else [word]


def _targets(name: str, value: Any) -> list[str] | None:
    if value in ("all", "all-linear") or (name == "lora_target_linear" and value is True):
        return ["all-linear"]
    names = value.split(",") if isinstance(value, str) else value
    return [f"[{','.join(names)}]"] if isinstance(names, list) and all(isinstance(n, str) for n in names) else None


def _logger(name: str, value: Any) -> list[str] | None:
    return {"wandb": [], "none": ["null"]}.get(value if isinstance(value, str) else "")


def _left_out(name: str, value: Any) -> None:
    return None


_VALUES: dict[str, Callable[[str, Any], list[str] | None]] = {
    "adapter.target_modules": _targets,
    "clip_grad_norm": _clip,
    "dataset": _left_out,
    "dataset.columns": _left_out,
    "dataset.packed": _is_on,
    "dataset.path": _path,
    "dataset.split": _left_out,
    "dataset.train_on": _train_on,
    "device": _left_out,
    "dtype": _dtype,
    "enable_activation_checkpointing": _is_on,
    "epochs": _whole,
    "evaluation.batch_size": _left_out,
    "evaluation.dataset": _left_out,
    "evaluation.early_stopping_patience": _left_out,
    "evaluation.every_n_steps": _left_out,
    "evaluation.keep_best": _left_out,
    "lr_scheduler": _schedule,
    "lr_scheduler.num_warmup_steps": lambda name, value: _whole(name, value) if name == "warmup_steps" else None,
    "max_steps_per_epoch": _whole,
    "metric_logger": _logger,
    "model.attn_implementation": _attention,
    "optimizer": _optimizer,
    "optimizer.betas": _left_out,
    "resume_from_checkpoint": lambda name, value: [] if value is False else ["auto"],
    "save_every_n_steps": lambda name, value: _whole(name, value) if name == "save_steps" else None,
    "tokenizer.chat_template": _left_out,
}


def problems(tree: Mapping[str, Any]) -> Iterator[str]:
    """What is said of a config that :func:`is_of_another_trainer`."""
    line, left = command(tree)
    yield f"this config is written for another trainer; the same here: {line}"
    if left:
        yield f"left out of that: {', '.join(left)}; docs/configuration.md tells what stands for them"

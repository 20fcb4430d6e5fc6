"""The configuration keys that the fine-tuning recipes share: names, types, defaults, and what each is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from offload.training.config import Above, AtLeast, AtMost, Component, DottedPath, Passes

Dataset = Annotated[Component | list[Component], Passes("tokenizer")]

Checkpointer = Annotated[
    Component,
    Passes(
        keywords=("output_dir", "adapter_checkpoint", "recipe_checkpoint", "resume_from_checkpoint")
        + ("safe_serialization", "should_load_recipe_state"),
        optional_keywords=("checkpoint_files",),
    ),
]
"""torchtune's section, without what the recipes decide: folders and files of checkpoints."""


@dataclass(kw_only=True)
class Evaluation:
    """Section ``evaluation``: the loss on data that training never sees."""

    dataset: Dataset
    every_n_steps: Annotated[int, AtLeast(1)] = 100
    batch_size: Annotated[int, AtLeast(1)] | None = None  # null: as in training
    max_batches: Annotated[int, AtLeast(1)] | None = None  # null: the whole set


@dataclass(kw_only=True)
class TrainSettings:
    """What both recipes read. A recipe's ``Settings`` adds its own."""

    output_dir: str
    seed: Annotated[int, AtLeast(0), AtMost(2**32 - 1)] | None = None  # null draws one and says which
    device: str = "auto"
    dtype: Literal["fp32", "bf16"] = "bf16"
    cudnn_deterministic_mode: Literal["default", "warn", "error", 0, 1, 2] | None = None

    tokenizer: Component
    dataset: Dataset
    shuffle: bool = True
    batch_size: Annotated[int, AtLeast(1)] = 1
    num_workers: Annotated[int, AtLeast(0)] = 0
    collate_fn: Annotated[str, DottedPath()] = "torchtune.data.padded_collate_sft"
    evaluation: Evaluation | None = None

    model: Component
    checkpointer: Checkpointer
    resume_from_checkpoint: bool = False
    save_every_n_steps: Annotated[int, AtLeast(1)] | None = None  # null: at the end only
    keep_last_n: Annotated[int, AtLeast(1)] | None = None  # null: keep all

    epochs: Annotated[int, AtLeast(1)] = 1
    max_steps_per_epoch: Annotated[int, AtLeast(1)] | None = None
    gradient_accumulation_steps: Annotated[int, AtLeast(1)] = 1
    clip_grad_norm: Annotated[float, Above(0)] | None = None
    optimizer: Annotated[Component, Passes("params")]
    lr_scheduler: (
        Annotated[Component, Passes("optimizer", optional_keywords=("num_training_steps", "total_steps", "T_max"))]
        | None
    ) = None
    loss: Component

    compile: bool = False
    enable_activation_checkpointing: bool = False
    enable_activation_offloading: bool = False

    metric_logger: Component | None = None
    log_every_n_steps: Annotated[int, AtLeast(1)] = 1
    profiler: Component | None = None

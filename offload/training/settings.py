"""The configuration keys that the fine-tuning recipes share: names, types, defaults, and what each is for.

The text under a key is its meaning in ``tune run RECIPE --help`` (:mod:`offload.config.help`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from omegaconf import DictConfig

from offload.config.loading import Above, AtLeast, AtMost, Component, DottedPath, Makes, Passes
from offload.data.source import check_not_streaming
from offload.models.source import PASSED

AUTO = "auto"
"""For ``resume_from_checkpoint``: the newest checkpoint, or the beginning where there is none."""

Dataset = Annotated[Component | list[Component], Passes("tokenizer")]

Model = Annotated[
    Component,
    Passes(optional_keywords=PASSED),
    Makes("a model", "torch.nn.Module", or_has="hidden"),
]
"""A model builder; arguments which it leaves out come from the base checkpoint's config.json."""

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
    """held-out data"""
    every_n_steps: Annotated[int, AtLeast(1)] = 100
    """optimizer steps from one evaluation to the next"""
    batch_size: Annotated[int, AtLeast(1)] | None = None
    """sequences per forward; null: as in training"""
    max_batches: Annotated[int, AtLeast(1)] | None = None
    """batches of each evaluation; null: the whole set"""
    early_stopping_patience: Annotated[int, AtLeast(1)] | None = None
    """stop after so many evaluations in a row without a new least loss; null: never"""
    keep_best: bool = False
    """save at each new least evaluation loss, and keep that checkpoint whatever keep_last_n says"""


@dataclass(kw_only=True)
class TrainSettings:
    """What both recipes read. A recipe's ``Settings`` adds its own."""

    output_dir: str
    """folder of the run: checkpoints, metrics.jsonl, logs"""
    seed: Annotated[int, AtLeast(0), AtMost(2**32 - 1)] | None = None
    """of all random choices; null draws one and says which"""
    device: str = "auto"
    """auto (the accelerator if there is one), cpu, cuda, xpu, or one of several as cuda:1"""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """of the parameters and of what is computed with them"""
    cudnn_deterministic_mode: Literal["default", "warn", "error", 0, 1, 2] | None = None
    """torch.set_deterministic_debug_mode: what to do about operations that are not deterministic"""

    tokenizer: Component
    """text to tokens; its max_seq_len is the length of packs, and cuts longer samples"""
    dataset: Dataset
    """training data, or a list of data sets"""
    dataset_errors: Literal["error", "skip"] = "error"
    """rows that cannot be used stop the run before it trains (error), or are left out, counted and told (skip)"""
    shuffle: bool = True
    """draw the samples in a random order, another one each epoch"""
    batch_size: Annotated[int, AtLeast(1)] = 1
    """sequences per forward; activation memory grows with it"""
    num_workers: Annotated[int, AtLeast(0)] = 0
    """processes that load data; 0 loads in the training process"""
    collate_fn: Annotated[str, DottedPath()] = "offload.data.collate.padded_collate_sft"
    """function that makes a batch of samples that are not packed"""
    evaluation: Evaluation | None = None
    """loss on held-out data; null: none"""

    model: Model
    """what is trained: a builder of torchtune, whose weights come from checkpointer.checkpoint_dir, or
    offload.models.huggingface.from_pretrained with the path of any causal language model"""
    checkpointer: Checkpointer | None = None
    """the base model's folder and kind, for torchtune's models"""
    resume_from_checkpoint: bool | str = False
    """auto goes on from the newest checkpoint in output_dir and starts from the beginning where there is none; True
    wants one; or one by name (step_100) or path"""
    save_every_n_steps: Annotated[int, AtLeast(1)] | None = None
    """optimizer steps from one checkpoint to the next; null: one at the end of each epoch"""
    keep_last_n: Annotated[int, AtLeast(1)] | None = None
    """checkpoints to keep; null: all"""
    enable_async_checkpointing: bool = False
    """write checkpoints while training goes on: an update of what is not written yet keeps the old values, or waits"""
    async_checkpoint_gib: Annotated[float, AtLeast(0.125)] = 2.0
    """host memory, page-locked, for values that are kept until they are written; with enable_async_checkpointing"""

    epochs: Annotated[int, AtLeast(1)] = 1
    """passes over the data"""
    max_steps_per_epoch: Annotated[int, AtLeast(1)] | None = None
    """optimizer steps after which an epoch ends; null: all data"""
    gradient_accumulation_steps: Annotated[int, AtLeast(1)] = 1
    """forwards per update: a larger batch at no cost in memory"""
    clip_grad_norm: Annotated[float, Above(0)] | None = None
    """limit of the norm of all gradients; null: none"""
    optimizer: Annotated[Component, Passes("params"), Makes("an optimizer", "torch.optim.Optimizer")]
    """any torch.optim.Optimizer; offload.OffloadOptimizer keeps its states off the device"""
    lr_scheduler: (
        Annotated[
            Component,
            Passes("optimizer", optional_keywords=("num_training_steps", "total_steps", "T_max")),
            Makes("a scheduler", "torch.optim.lr_scheduler.LRScheduler", or_has="get_last_lr"),
        ]
        | None
    ) = None
    """learning rate over optimizer steps; null: constant"""
    loss: Annotated[Component, Makes("a loss", "torch.nn.Module", or_has="__call__")]
    """of logits and labels; offload.training.loss.LinearCrossEntropyLoss never holds all logits"""

    compile: bool = False
    """torch.compile: faster steps after a minute or so"""
    enable_activation_checkpointing: bool = False
    """keep less for backward and recompute the rest: a third more time"""
    enable_activation_offloading: bool = False
    """keep what backward needs in host memory meanwhile; needs checkpointing and an accelerator"""
    memory_snapshot: bool = False
    """where device memory runs out, write what was allocated and from where to output_dir/memory_snapshot.pickle, for
    https://pytorch.org/memory_viz; CUDA only, recording takes a little time"""

    metric_logger: (
        Annotated[
            Component,
            Makes("a logger", "offload.metrics.log.Mirror", or_has="log_dict"),
        ]
        | None
    ) = None
    """where the metrics go beside metrics.jsonl; null: nowhere"""
    log_every_n_steps: Annotated[int, AtLeast(1)] = 1
    """optimizer steps from one line of metrics to the next"""
    compare_with_plan: bool | None = None
    """tell at the end what tune plan would have said of this run, beside what was measured; null: of runs that train
    for longer than a minute"""
    profiler: Component | None = None
    """torch.profiler's traces, where enabled"""

    def __post_init__(self) -> None:
        held_out = self.evaluation.dataset if self.evaluation else []
        for key, given in (("dataset", self.dataset), ("evaluation.dataset", held_out)):
            if isinstance(given, DictConfig):
                check_not_streaming(given, key)
                continue
            for index, each in enumerate(given):
                check_not_streaming(each, f"{key}.{index}")

"""The data sets of a run: what it trains on, and what is held out for evaluation."""

from __future__ import annotations

from typing import Any

import torch

from offload.data.batches import Batches, build_batches
from offload.distributed.world import World
from offload.errors import UserError
from offload.metrics.lines import say
from offload.training.settings import TrainSettings


def build_data_sets(
    settings: TrainSettings,
    tokenizer: Any,
    *,
    ignore_index: int,
    seed: int,
    device: torch.device,
    masks: bool,
    world: World,
    epoch: int,
    step_in_epoch: int,
) -> tuple[Batches, Batches | None]:
    """(batches to train on, held-out ones or None); tells what their samples look like.

    Args:
        settings: of the run.
        tokenizer: of its model.
        ignore_index: label of tokens that the loss leaves out.
        seed: of the order.
        device: that trains.
        masks: the model keeps documents of a pack apart.
        world: the processes, each of which reads its part of every batch.
        epoch, step_in_epoch: where training begins.
    """
    common: dict[str, Any] = {
        "collate_fn": settings.collate_fn,
        "ignore_index": ignore_index,
        "seed": seed,
        "num_workers": settings.num_workers,
        "device": device,
        "masks": masks,
        "skips_bad_rows": settings.dataset_errors == "skip",
        "rank": world.rank,
        "ranks": world.size,
    }
    batches = build_batches(
        settings.dataset,
        tokenizer,
        key="dataset",
        batch_size=settings.batch_size,
        shuffle=settings.shuffle,
        epoch=epoch,
        start=step_in_epoch * settings.gradient_accumulation_steps,
        **common,
    )
    held_out: Batches | None = None
    if settings.evaluation is not None:
        held_out = build_batches(
            settings.evaluation.dataset,
            tokenizer,
            key="evaluation.dataset",
            batch_size=settings.evaluation.batch_size or settings.batch_size,
            shuffle=False,
            drop_last=False,
            **common,
        )
    for each in filter(None, (batches, held_out)):
        for note in each.notes:
            say(note)
    if batches.first_sample is not None:
        say(f"the first sample, with what is trained of it in brackets: {_in_one_line(batches.first_sample)}")
    return batches, held_out


def check_length(batches: Batches, held_out: Batches | None, limit: int | None) -> None:
    """Whether the model, which takes so many tokens, takes the longest sample that was read.

    Raises:
        UserError: it does not.
    """
    for key, each in (("dataset", batches), ("evaluation.dataset", held_out)):
        if each is not None and limit is not None and each.tally.longest > limit:
            raise UserError(
                f"model.max_seq_len: the model takes {limit} tokens and {key} has samples of "
                f"{each.tally.longest}; cut them with tokenizer.max_seq_len={limit}, or raise it where the "
                "model was trained on longer ones"
            )


def _in_one_line(text: str) -> str:
    """A text whose line breaks, tabs, odd blanks and control characters can be seen."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)

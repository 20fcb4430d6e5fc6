"""Learning rate over optimizer steps."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR


def get_cosine_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """From 0 up to the optimizer's lr in a line, then down along a cosine.

    The function of this name in transformers and torchtune, without what they import.

    Args:
        optimizer: its groups' lr are the peaks.
        num_warmup_steps: steps of the line.
        num_training_steps: steps of the run; a recipe passes it.
        num_cycles: waves of the cosine; 0.5 ends at 0.
        last_epoch: steps done, less one.

    Raises:
        ValueError: fewer than 0 steps of warm-up.
    """
    if num_warmup_steps < 0:
        raise ValueError(f"num_warmup_steps: expected at least 0, got {num_warmup_steps}")

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)))

    return LambdaLR(optimizer, factor, last_epoch)

"""All random choices of a run from one number."""

from __future__ import annotations

import os
import random

import numpy
import torch


def draw_seed() -> int:
    """A seed for a run that was given none."""
    return int(torch.randint(2**32, (1,)))


def draw_apart(seed: int, rank: int) -> None:
    """From here, processes that share a seed draw different numbers (dropout); the first one goes on as it was."""
    if rank:
        torch.manual_seed(seed + rank)
        numpy.random.seed((seed + rank) % 2**32)
        random.seed(seed + rank)


def set_seed(seed: int | None = None, debug_mode: str | int | None = None) -> int:
    """Seed the generators of PyTorch (every device's), NumPy and Python; returns the seed.

    Args:
        seed: from 0 to 2**32 - 1; None draws one.
        debug_mode: what to do about operations that are not deterministic
            (:func:`torch.set_deterministic_debug_mode`); None leaves that as it is. With "warn" or "error" cuDNN and
            cuBLAS use deterministic algorithms; with "default" cuDNN looks for the fastest.
    """
    if seed is None:
        seed = draw_seed()
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
    if debug_mode is not None:
        torch.set_deterministic_debug_mode(debug_mode)
        is_deterministic = torch.get_deterministic_debug_mode() != 0
        torch.backends.cudnn.deterministic = is_deterministic
        torch.backends.cudnn.benchmark = not is_deterministic
        if is_deterministic:
            # https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return seed

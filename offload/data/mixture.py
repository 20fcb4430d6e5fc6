"""Several data sets in one, each gone through as often in an epoch as its weight says.

The order is a pure function of the seed and the epoch: a run that resumes in the middle of an epoch goes on with the
samples that an uninterrupted one would have seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from offload.errors import UserError


def epoch_order(
    lengths: Sequence[int], weights: Sequence[float] | None = None, *, seed: int, epoch: int, shuffle: bool = True
) -> Tensor:
    """Which samples an epoch consists of, in order.

    A data set of weight 1 gives each of its samples once in an epoch, of weight 2 twice, and of weight 0.25 a quarter
    of them, another one in each of four epochs. With equal weights of 1, the order is that of
    ``torch.randperm(sum(lengths))`` under ``seed + epoch``.

    Args:
        lengths: samples of each data set.
        weights: of each data set; None for 1.
        seed: of the run.
        epoch: from 0.
        shuffle: mix the data sets; otherwise they follow each other, and only what a weight's fraction takes is chosen
            by chance.

    Returns:
        int64 [samples of the epoch], numbers in the data sets one after the other.

    Raises:
        UserError: a weight is not above 0, or leaves no sample of a data set.
    """
    weights = [1.0] * len(lengths) if weights is None else weights
    parts, start = [], 0
    for number, (length, weight) in enumerate(zip(lengths, weights, strict=True)):
        taken = round(length * weight) if 0 < weight < float("inf") else 0
        if taken < 1:
            raise UserError(
                f"dataset.weight: {weight} takes no sample of data set {number + 1}, which has {length}; "
                "raise it or leave the data set out"
            )
        parts.append(start + _part(length, taken, seed=seed, number=number, epoch=epoch))
        start += length
    samples = torch.cat(parts)
    if not shuffle:
        return samples
    generator = torch.Generator().manual_seed(seed + epoch)
    return samples[torch.randperm(len(samples), generator=generator)]


def _part(length: int, taken: int, *, seed: int, number: int, epoch: int) -> Tensor:
    """``taken`` of a data set's numbers: whole rounds, and of the next one what is left.

    What is left comes from permutations written one after the other, in which an epoch goes on where the last ended.
    """
    rounds, rest = divmod(taken, length)
    whole = torch.arange(length).repeat(rounds)
    if rest == 0:
        return whole
    begin = epoch * rest
    first, last = begin // length, (begin + rest - 1) // length
    permutations = []
    for turn in range(first, last + 1):
        # Not near the seeds of the epochs' own permutations, and the same in every process.
        digest = hashlib.sha256(f"{seed} {number} {turn}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        permutations.append(torch.randperm(length, generator=generator))
    stream = torch.cat(permutations)
    offset = begin - first * length
    return torch.cat([whole, stream[offset : offset + rest]])

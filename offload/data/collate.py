"""Samples of different lengths to one rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def padded_collate_sft(samples: Sequence[Any], padding_idx: int, ignore_idx: int) -> dict[str, Tensor]:
    """Pad samples at their end to the longest of them.

    Args:
        samples: ``tokens`` and ``labels``, lists of one length.
        padding_idx: token that pads.
        ignore_idx: label that pads.

    Returns:
        ``tokens`` and ``labels``, int64 [samples, tokens].
    """

    def padded(name: str, value: int) -> Tensor:
        return pad_sequence([torch.as_tensor(each[name]) for each in samples], batch_first=True, padding_value=value)

    return {"tokens": padded("tokens", padding_idx).long(), "labels": padded("labels", ignore_idx).long()}

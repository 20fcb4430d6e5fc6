"""Labels: what a model is to predict, and where."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""The label that does not count, in torch.nn.CrossEntropyLoss and in torchtune's data sets."""


def shift_labels(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Labels moved one to the left, so that position t holds what the model predicts there.

    Args:
        labels: int64, shape [batch, tokens].
        ignore_index: what the last position gets.
    """
    return F.pad(labels[:, 1:], (0, 1), value=ignore_index)

"""Moments in 8 bits as states of groups without the option ``codes`` have them, to be read alone: version 1.

First moments are ratios, as in :mod:`offload.optim.codes`. Roots of second moments are minifloats E3M5 with an offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.optim import codes
from offload.optim.formats import BLOCK, f32

E3M5_BIAS = (127 - 8) << 5
"""Of codes as the upper bits of an fp32 number: the least of 8 exponents is that of 2^-8, the offset."""

E3M5_OFFSET = 2.0**-8
E3M5_RANGE = 2.0**-1 * (1 + 31 / 32) - E3M5_OFFSET
"""What the largest code, 255, stands for."""


def decode(
    exp_avg: Tensor, exp_avg_scale: Tensor, exp_avg_sq: Tensor, exp_avg_sq_scale: Tensor, state_dtype: str, eps: float
) -> tuple[Tensor, Tensor]:
    """fp32 moments ``m`` and ``v``, each ``[n]``; arguments as of :func:`offload.optim.codes.decode`."""
    bits = (exp_avg_sq.to(torch.int32) + E3M5_BIAS) << 18
    scale = (exp_avg_sq_scale * f32(1 / E3M5_RANGE)).repeat_interleave(BLOCK)[: bits.numel()]
    root = (bits.view(torch.float32) - E3M5_OFFSET) * scale
    ratio, _ = codes.decode(
        exp_avg, exp_avg_scale, torch.zeros_like(exp_avg_sq), torch.zeros_like(exp_avg_sq_scale), state_dtype, 1.0, True
    )
    return ratio * (root + eps), root * root

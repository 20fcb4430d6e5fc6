"""Moments in 8 bits as earlier versions stored them, to be read alone.

Version 1, of groups without the option ``codes``: first moments are ratios, as in :mod:`offload.optim.codes`; roots of
second moments are minifloats E3M5 with an offset. Version 2, of groups whose ``codes`` are :data:`MOMENTS`: first
moments have 8 bits (the square root with its sign) and roots, 254 steps as beside ratios.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.optim import codes
from offload.optim.formats import BLOCK, f32

MOMENTS = "moments"

E3M5_BIAS = (127 - 8) << 5
"""Of codes as the upper bits of an fp32 number: the least of 8 exponents is that of 2^-8, the offset."""

E3M5_OFFSET = 2.0**-8
E3M5_RANGE = 2.0**-1 * (1 + 31 / 32) - E3M5_OFFSET
"""What the largest code, 255, stands for."""


def decode(
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    eps: float,
    kind: str | None,
) -> tuple[Tensor, Tensor]:
    """fp32 moments ``m`` and ``v``, each ``[n]``; arguments as of :func:`offload.optim.codes.decode`.

    Args:
        kind: the group's ``codes``.
    """
    first = codes.decode_ratios(exp_avg, exp_avg_scale)
    if kind == MOMENTS:
        _, v = codes.decode(exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, eps, True)
        return first * (exp_avg.float() / 127).abs(), v
    bits = (exp_avg_sq.to(torch.int32) + E3M5_BIAS) << 18
    scale = (exp_avg_sq_scale * f32(1 / E3M5_RANGE)).repeat_interleave(BLOCK)[: bits.numel()]
    root = (bits.view(torch.float32) - E3M5_OFFSET) * scale
    return first * (root + eps), root * root

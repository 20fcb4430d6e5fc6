"""Moments in 8 bits: codes and one fp32 scale per block and moment.

Of the second moment, ``sqrt(v)`` is stored, as a minifloat E3M5: 8 octaves of 32 steps each, and equal steps below.
Of the first, the *ratio* ``m / (sqrt(v) + eps)`` is, Adam's update but for its step size: its size is about the same
for all elements of a block, whatever decades their gradients span, and what rounding ``v`` changes does not change the
update. It has 127 equal steps either way (``int8``), or is a minifloat E4M3 of 16 octaves of 8 steps (``fp8``).

A block's scale is its largest finite value, so that what a block's elements have in common is exact. No second moment
decodes as zero, because a denominator of ``eps`` alone would blow the update up. Where a moment is not finite, neither
is the parameter, for good; its codes say no ratio and the largest root, which changes nothing for its neighbours.

Ratios are rounded to nearest. A second moment changes by less than half a step at a time, so that rounding to nearest
would keep it where it is; it is rounded up where the fraction exceeds a threshold that walks through [0, 1) by the
golden ratio from step to step. What else was tried, and the error of each: ``scripts/quantisers.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.optim.formats import BLOCK, f32

GOLDEN_RATIO = 0x9E3779B9
"""Of 2^32: how far thresholds move in a step."""

POSITION = 0x85EBCA6B
"""Of 2^32: how far apart the thresholds of neighbours are."""

SMALLEST_SCALE = 2.0**-120
"""Scales below it count as zero, so that their inverse is finite."""

E4M3_BIAS = (127 - 15) << 3
"""Of codes as the upper bits of an fp32 number: the largest of 16 exponents is that of 1."""

E3M5_BIAS = (127 - 8) << 5
"""The least of 8 exponents is that of 2^-8, which is added to every number: below it, steps are equal."""

E3M5_OFFSET = 2.0**-8
E3M5_RANGE = 2.0**-1 * (1 + 31 / 32) - E3M5_OFFSET
"""The largest code, 255, stands for 1 - 2^-6, less the offset."""


def thresholds(start: int, count: int, key: int, device: torch.device) -> Tensor:
    """Rounding thresholds of ``count`` elements from ``start`` on, as int32 in ``[0, 65536)``.

    Args:
        key: moves by :data:`GOLDEN_RATIO` from step to step.
    """
    i = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return ((i * POSITION + key & 0xFFFFFFFF) >> 16).to(torch.int32)


def decode(
    exp_avg: Tensor, exp_avg_scale: Tensor, exp_avg_sq: Tensor, exp_avg_sq_scale: Tensor, state_dtype: str, eps: float
) -> tuple[Tensor, Tensor]:
    """fp32 moments ``m`` and ``v``, each ``[n]``.

    Args:
        exp_avg: int8 ``[n]``.
        exp_avg_sq: uint8 ``[n]``.
        exp_avg_scale, exp_avg_sq_scale: fp32 ``[ceil(n / BLOCK)]``.
        state_dtype: ``int8`` or ``fp8``.
        eps: what was added to sqrt(v) when the codes were made.
    """
    if state_dtype == "int8":
        ratio = exp_avg.float() * _spread(exp_avg_scale * f32(1 / 127), exp_avg)
    else:
        code = exp_avg.view(torch.uint8).to(torch.int32)
        magnitude = code & 127
        bits = torch.where(magnitude == 0, 0, (magnitude + E4M3_BIAS) << 20) | (code & 128) << 24
        ratio = bits.view(torch.float32) * _spread(exp_avg_scale, exp_avg)
    bits = (exp_avg_sq.to(torch.int32) + E3M5_BIAS) << 18
    root = (bits.view(torch.float32) - E3M5_OFFSET) * _spread(exp_avg_sq_scale * f32(1 / E3M5_RANGE), exp_avg)
    return ratio * (root + eps), root * root


def encode(
    ratio: Tensor,
    root: Tensor,
    threshold: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    state_dtype: str,
) -> None:
    """Write codes and scales; tensors and ``state_dtype`` as in :func:`decode`.

    Args:
        ratio: ``m / (sqrt(v) + eps)``, fp32 ``[n]``.
        root: ``sqrt(v)``, fp32 ``[n]``.
        threshold: :func:`thresholds` of the elements.
    """
    exp_avg_scale.copy_(_largest(ratio))
    exp_avg_sq_scale.copy_(_largest(root))
    ratio = torch.where(ratio.isfinite(), ratio, 0.0)
    root = torch.where(root.isfinite(), root, _spread(exp_avg_sq_scale, root))
    if state_dtype == "int8":
        exp_avg.copy_((ratio * _spread(_inverse(exp_avg_scale, 127.0), ratio)).round())
    else:
        bits = (ratio * _spread(_inverse(exp_avg_scale), ratio)).view(torch.int32)
        magnitude = ((bits & 0x7FFFFFFF) + (1 << 19) >> 20) - E4M3_BIAS
        exp_avg.view(torch.uint8).copy_(magnitude.clamp(min=0) | bits >> 24 & 128)
    bits = (root * _spread(_inverse(exp_avg_sq_scale, E3M5_RANGE), root) + E3M5_OFFSET).view(torch.int32)
    exp_avg_sq.copy_(((bits + (threshold << 2) >> 18) - E3M5_BIAS).clamp(1, 255))


def _largest(values: Tensor) -> Tensor:
    """Of each block, the largest finite magnitude ``[ceil(n / BLOCK)]``."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))
    return padded.view(-1, BLOCK).abs().nan_to_num(nan=0.0, posinf=0.0).amax(dim=1)


def _inverse(scale: Tensor, over: float = 1.0) -> Tensor:
    return torch.where(scale >= SMALLEST_SCALE, 1 / scale, 0.0) * over


def _spread(scale: Tensor, like: Tensor) -> Tensor:
    """A block's number for each of its elements, ``[n]``."""
    return scale.repeat_interleave(BLOCK)[: like.numel()]

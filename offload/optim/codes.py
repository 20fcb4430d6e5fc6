"""Moments in 8 bits: codes and one fp32 scale per block and moment.

Of the second moment, ``sqrt(v)`` is stored: 254 steps up to the block's largest, about equal in the logarithm. They are
equal in the bits of fp32, which are a logarithm that is straight between powers of two. A block's steps are as wide as
it takes to reach from its smallest to its largest, 0.05 % to 8 %: a second moment wanders by less than a step at a
time, and the noise of rounding it grows with the step's square root. All numbers that codes stand for are multiples of
the step, and its width changes as seldom as it may: a root that has not changed is not rounded again because another
one has. Code 0 is zero, and nothing else is, because a denominator of ``eps`` alone would blow the update up.

Of the first, the *ratio* ``m / (sqrt(v) + eps)`` is, Adam's update but for its step size: its size is about the same
for all elements of a block, whatever decades their gradients span, and what rounding ``v`` changes does not change the
update. It has 127 equal steps either way. What rounding takes from a ratio is missing in the updates to come, all of
which are known but for what ``v`` does: the parameter gets it at once (:func:`ahead`), so that errors do not add up
over the steps.

Where ``beta2`` is below :data:`LEAST_BETA2_OF_RATIOS`, ``m`` itself is stored, as its square root with its sign:
so short an average follows single gradients, and the ratio to one of nearly zero would leave no steps for the others.
Nor are updates to come known. But the second moment is soon forgotten, and one of its 8 bits, the lowest, is the first
moment's: that has 255 steps either way, and the roots have 126.

A block's scales are its largest finite values, of roots the next multiple of the step. The lowest 8 bits of the first
moment's are the width of the second's steps. Where a moment is not finite, neither is the
parameter, for good; its codes say no ratio and the largest root, which changes nothing for its neighbours.

First moments are rounded to nearest. A second moment changes by less than half a step at a time, so that rounding to
nearest would keep it where it is; it is rounded up where the fraction exceeds a threshold that walks through [0, 1) by
the golden ratio from step to step. What else was tried, and the error of each: ``scripts/quantisers.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.optim.formats import BLOCK, f32, sqrt

RATIOS, MOMENTS = "ratios", "moments of 9 bits"
"""What codes of first moments stand for: the option ``codes`` of a group. Groups with another one, or none, have codes
of :mod:`offload.optim.earlier`."""

LEAST_BETA2_OF_RATIOS = 0.7
"""Below it, where ``sqrt(v)`` is forgotten much sooner than ``m`` at ``beta1`` of 0.9, ratios and the errors of their
rounding grow from step to step wherever gradients fall silent."""

GOLDEN_RATIO = 0x9E3779B9
"""Of 2^32: how far thresholds move in a step."""

POSITION = 0x85EBCA6B
"""Of 2^32: how far apart the thresholds of neighbours are."""

SMALLEST_SCALE = 2.0**-120
"""Scales below it count as zero, so that their inverse is finite."""

HORIZON = 20
"""Steps over which :func:`ahead` is best."""

STEP = 65536 + 2.0**-6
"""What a step is counted as, a little more than 2^16: however it is rounded, one step above zero is never zero."""

WIDTH_SHIFT = 12
"""Roots' steps are multiples of 2^12 in the bits of fp32: 2^-11 of a number between 1 and 2."""

WIDEST = 161
"""In these multiples: 20 octaves, six decades, from the code 1 to the largest."""

SMALLEST_SCALE_BITS = (127 - 120) << 23


def best_for(beta2: float) -> str:
    """:data:`RATIOS` or :data:`MOMENTS`."""
    return RATIOS if beta2 >= LEAST_BETA2_OF_RATIOS else MOMENTS


def ahead(beta1: float) -> float:
    """Of what rounding takes from a ratio, how much the parameter gets at once, in learning rates.

    The steps to come lack ``beta1 + beta1^2 + ... = beta1 / (1 - beta1)`` of it. Who gets all of that at once is
    exact after many steps, but off by the rounding of a whole average until then. A share of ``1 / (1 + 1 / (HORIZON
    * (1 - beta1)))``, two thirds where ``beta1`` is 0.9, is the closest after :data:`HORIZON` steps.
    """
    return beta1 / (1 - beta1 + 1 / HORIZON)


def grain(has_ratios: bool) -> int:
    """Of which roots' codes are multiples."""
    return 1 if has_ratios else 2


def largest_root(has_ratios: bool) -> int:
    """Code of a block's scale; the largest root may be rounded up to one grain more."""
    return 256 - 2 * grain(has_ratios)


def thresholds(start: int, count: int, key: int, device: torch.device) -> Tensor:
    """Rounding thresholds of ``count`` elements from ``start`` on, as int32 in ``[0, 65536)``.

    Args:
        key: moves by :data:`GOLDEN_RATIO` from step to step.
    """
    i = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return ((i * POSITION + key & 0xFFFFFFFF) >> 16).to(torch.int32)


def decode(
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    eps: float,
    has_ratios: bool,
) -> tuple[Tensor, Tensor]:
    """fp32 moments ``m`` and ``v``, each ``[n]``.

    Args:
        exp_avg: int8 ``[n]``.
        exp_avg_sq: uint8 ``[n]``.
        exp_avg_scale, exp_avg_sq_scale: fp32 ``[ceil(n / BLOCK)]``.
        eps: what was added to sqrt(v) when the codes were made.
        has_ratios: first moments are :data:`RATIOS`.
    """
    step = (exp_avg_scale.view(torch.int32) & 0xFF) << WIDTH_SHIFT
    bottom = exp_avg_sq_scale.view(torch.int32) - largest_root(has_ratios) * step
    code = exp_avg_sq.to(torch.int32) & -grain(has_ratios)
    bits = _spread(bottom, code) + code * _spread(step, code)
    root = torch.where(code == 0, 0, bits).view(torch.float32)
    if has_ratios:
        return decode_ratios(exp_avg, exp_avg_scale) * (root + eps), root * root
    code = exp_avg.to(torch.int32) << 1 | exp_avg_sq.to(torch.int32) & 1
    x = code.float() * f32(1 / 255)
    return x * x.abs() * _spread(exp_avg_scale, x), root * root


def decode_ratios(exp_avg: Tensor, exp_avg_scale: Tensor, factor: float | None = None) -> Tensor:
    """What codes of ratios stand for, fp32 ``[n]``; arguments as of :func:`decode`.

    Args:
        factor: of the ratios, multiplied into each block's unit.
    """
    unit = exp_avg_scale * f32(1 / 127)
    if factor is not None:
        unit = unit * factor
    value = exp_avg.float()
    return value * _spread(unit, value)


def encode(
    ratio: Tensor,
    root: Tensor,
    threshold: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor,
    eps: float,
    has_ratios: bool,
) -> None:
    """Write codes and scales; tensors, ``eps`` and ``has_ratios`` as in :func:`decode`.

    Args:
        ratio: ``m / (sqrt(v) + eps)``, fp32 ``[n]``.
        root: ``sqrt(v)``, fp32 ``[n]``.
        threshold: :func:`thresholds` of the elements.
    """
    first = ratio if has_ratios else ratio * (root + eps)
    largest = _blocks(first.abs().nan_to_num(nan=0.0, posinf=0.0)).amax(dim=1)
    step, top = steps(root, exp_avg_scale, has_ratios)
    width = step >> WIDTH_SHIFT
    exp_avg_scale.copy_((largest.view(torch.int32) & -256 | width).view(torch.float32))
    exp_avg_sq_scale.copy_(top.view(torch.float32))

    bottom = top - largest_root(has_ratios) * step
    inverse = torch.where(step > 0, 1 / step.float() * STEP, 0.0)
    bits = torch.where(root.isfinite(), root.view(torch.int32), _spread(top, root))
    bits = torch.where(bits > 0, torch.maximum(bits, _spread(bottom + grain(has_ratios) * step, bits)), 0)
    above = (bits - _spread(bottom, bits)).clamp(min=0).float() * _spread(inverse, bits)
    code = (above.to(torch.int32) + threshold * grain(has_ratios) >> 16) & -grain(has_ratios)

    first = torch.where(first.isfinite(), first, 0.0)
    inverse = torch.where(exp_avg_scale >= SMALLEST_SCALE, 1 / exp_avg_scale, 0.0)
    if has_ratios:
        exp_avg_sq.copy_(code)
        exp_avg.copy_((first * _spread(inverse * 127, first)).round())
        return
    share = first * _spread(inverse, first)
    nine = (torch.copysign(sqrt(share.abs()), share) * 255).round().to(torch.int32)
    exp_avg.view(torch.uint8).copy_(nine >> 1 & 255)
    exp_avg_sq.copy_(code | nine & 1)


def steps(root: Tensor, before: Tensor, has_ratios: bool = True) -> tuple[Tensor, Tensor]:
    """Of each block, its roots' step and scale as int32 ``[ceil(n / BLOCK)]``, both in the bits of fp32.

    The width is that of before, unless it is too small or more than 8/7 of what it takes for the first code to be no
    larger than any root but zero. It is at most :data:`WIDEST`, such that no code stands for a negative number, and 0
    where the largest root counts as zero.

    Args:
        root: fp32 ``[n]``.
        before: the scales of the first moment that are going to be replaced.
        has_ratios: first moments are :data:`RATIOS`.
    """
    bits = _blocks(torch.where(root.isfinite(), root, 0.0)).view(torch.int32)
    top = bits.amax(dim=1)
    least = torch.where(bits > 0, bits, 0x7FFFFFFF).amin(dim=1)
    largest = largest_root(has_ratios)
    one = (largest - 2 * grain(has_ratios)) << WIDTH_SHIFT
    needed = (top - least + one - 1).div(one, rounding_mode="floor").clamp(min=1, max=WIDEST)
    width = before.view(torch.int32) & 0xFF
    width = torch.where((needed <= width) & (8 * needed >= 7 * width - 7), width, needed)
    width = torch.minimum(width, (top - 1).div(largest << WIDTH_SHIFT, rounding_mode="floor"))
    step = torch.where(top >= SMALLEST_SCALE_BITS, width, 0).to(torch.int32) << WIDTH_SHIFT
    multiple = (step * grain(has_ratios)).clamp(min=1)
    return step, (top + multiple - 1).div(multiple, rounding_mode="floor") * multiple


def _blocks(values: Tensor) -> Tensor:
    """``[ceil(n / BLOCK), BLOCK]``, with zeros at the end."""
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _spread(scale: Tensor, like: Tensor) -> Tensor:
    """A block's number for each of its elements, ``[n]``."""
    return scale.repeat_interleave(BLOCK)[: like.numel()]

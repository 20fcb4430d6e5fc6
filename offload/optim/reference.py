"""The update in torch operations, on any device: what the kernels are compared with, and what runs without them.

Every operation is a call of its own, so that each result is rounded to fp32 and nothing is contracted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.optim import codes
from offload.optim.formats import (
    BLOCK,
    Item,
    f32,
    flat,
    join_master,
    random_bits,
    round_half_away,
    round_stochastically,
    split_master,
    split_master24,
    sqrt,
)

CHUNK = BLOCK * 1024
"""Elements at a time, which bounds the memory of intermediate results."""


def update(items: Sequence[Item], scale: Tensor | None = None) -> None:
    """Update every tensor of ``items`` in place.

    Args:
        items: tensors on any device.
        scale: 0-dim, a factor of all gradients, beside each item's own ``gscale``; the host does not read it.
    """
    for item in items:
        gscale: float | Tensor = f32(item.constants.gscale)
        if scale is not None:
            gscale = gscale * scale.to(item.grad.device, torch.float32)
        whole = [
            None if tensor is None else flat(tensor)
            for tensor in (item.param, item.grad, item.exp_avg, item.exp_avg_sq, item.remainder)
        ]
        for first in range(0, item.param.numel(), CHUNK):
            last = min(first + CHUNK, item.param.numel())
            blocks = slice(first // BLOCK, -(-last // BLOCK))
            param, grad, m, v, remainder = (tensor if tensor is None else tensor[first:last] for tensor in whole)
            assert param is not None and grad is not None and m is not None and v is not None
            _update(
                item._replace(
                    param=param,
                    grad=grad,
                    exp_avg=m,
                    exp_avg_sq=v,
                    exp_avg_scale=None if item.exp_avg_scale is None else item.exp_avg_scale[blocks],
                    exp_avg_sq_scale=None if item.exp_avg_sq_scale is None else item.exp_avg_sq_scale[blocks],
                    remainder=remainder,
                    start=item.start + first,
                ),
                gscale,
            )


def _update(item: Item, gscale: float | Tensor) -> None:
    p = item.param.float() if item.remainder is None else join_master(item.param, item.remainder)
    g = item.grad.float()
    if item.kind.state == "fp32":
        p, m, v = _as_torch(item, p, g * gscale, item.exp_avg, item.exp_avg_sq)
        item.exp_avg.copy_(m)
        item.exp_avg_sq.copy_(v)
    elif item.kind.state == "bf16":
        m, v = _moments(item, p, g, gscale, item.exp_avg.float(), item.exp_avg_sq.float())
        c = item.constants
        p = p * c.decay - m * c.step_size / (sqrt(v) + c.eps)
        item.exp_avg.copy_(round_half_away(m))
        item.exp_avg_sq.copy_(round_stochastically(v, _bits(item, item.key_v)))
    else:
        p = _update_codes(item, p, g, gscale)
    _store_param(item, p)


def _update_codes(item: Item, p: Tensor, g: Tensor, gscale: float | Tensor) -> Tensor:
    c = item.constants
    assert item.exp_avg_scale is not None and item.exp_avg_sq_scale is not None
    stored = (item.exp_avg, item.exp_avg_scale, item.exp_avg_sq, item.exp_avg_sq_scale)
    has_ratios = bool(c.has_ratios)
    m, v = _moments(item, p, g, gscale, *codes.decode(*stored, c.eps_before, has_ratios))
    root = sqrt(v)
    ratio = m / (root + c.eps)
    threshold = codes.thresholds(item.start, p.numel(), item.key_v, p.device)
    codes.encode(ratio, root, threshold, *stored, c.eps, has_ratios)
    p = p * c.decay - ratio * f32(f32(c.step_size) + f32(c.ahead))
    if not has_ratios:
        return p
    return p + codes.decode_ratios(item.exp_avg, item.exp_avg_scale, f32(c.ahead))


def _as_torch(item: Item, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The operations of torch.optim.AdamW(fused=True) and Adam, in their order, each rounded on its own.

    Args:
        g: the gradient, scaled.
    """
    c = item.constants
    if item.kind.coupled:
        g = g + p * c.l2
    p = p * c.decay
    difference = g - m
    # torch.lerp starts from the nearer end.
    m = m + difference * c.w1 if f32(c.w1) < 0.5 else g - difference * (1 - f32(c.w1))
    v = v * c.beta2
    v = v + g * c.w2 * g
    denominator = sqrt(v) / c.bc2_sqrt + c.eps
    return p + m * -c.step_size / denominator, m, v


def _moments(item: Item, p: Tensor, g: Tensor, gscale: float | Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """New moments with fewer operations: the gradient's scale is folded into the constants."""
    c = item.constants
    w1: float | Tensor = f32(c.w1)
    w2: float | Tensor = f32(c.w2)
    if item.kind.coupled:
        g = g * gscale + p * c.l2
    else:
        w1, w2 = _product(w1, gscale), _product(_product(w2, gscale), gscale)
    return m * c.beta1 + g * w1, v * c.beta2 + g * w2 * g


def _product(x: float | Tensor, y: float | Tensor) -> float | Tensor:
    """Of two fp32 numbers, rounded to fp32."""
    product = x * y
    return product if isinstance(product, Tensor) else f32(product)


def _store_param(item: Item, p: Tensor) -> None:
    if item.remainder is not None:
        is_split = item.kind.param == "split"
        param, remainder = split_master(p) if is_split else split_master24(p, _bits(item, item.key_param))
        item.param.copy_(param)
        item.remainder.copy_(remainder)
    elif item.kind.param == "stochastic":
        item.param.copy_(round_stochastically(p, _bits(item, item.key_param)))
    elif item.kind.param == "nearest":
        item.param.copy_(round_half_away(p))
    else:
        item.param.copy_(p)


def _bits(item: Item, key: int) -> Tensor:
    return random_bits(item.start, item.param.numel(), key, item.param.device)

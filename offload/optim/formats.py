"""Formats of the packed AdamW: which tensors hold the master weight and the moments, and how they are read and made.

A parameter is fp32, or bf16 with one of four masters. ``none``: the parameter is all there is, rounded to nearest.
``stochastic``: the same, rounded up or down with probabilities that make the mean exact. ``split``: the parameter is
the upper half of an fp32 master, rounded to nearest, and ``remainder`` the signed lower half; together they are the
master to the last bit. ``split24``: the same, but the master is fp32 without its lowest 8 bits, rounded like
``stochastic``, and the remainder has 8 bits.

Moments are fp32, bf16, or codes of 8 bits with one fp32 scale per block of :data:`BLOCK` elements.
Blocks are ranges of a dense tensor's memory. Functions here are exact definitions in terms of torch operations;
``reference.py``, the C kernel and the Triton kernel give the same bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale. 8-bit states cost 1 + 4 / BLOCK bytes per element and moment."""

STATE_DTYPES = ("fp32", "bf16", "int8")
"""How moments are kept; ``int8``: as codes of 8 bits with scales."""

MASTERS = ("none", "stochastic", "split", "split24")

REMAINDERS = {"split": torch.int16, "split24": torch.int8}
"""Of masters that keep one, its dtype."""

PARAM_KINDS = ("fp32", "nearest", "stochastic", "split", "split24")
"""How a parameter is stored: an fp32 parameter is its own master, whatever was asked for; the others are bf16."""

STATE_BLOCK = {"exp_avg_scale": BLOCK, "exp_avg_sq_scale": BLOCK}
"""Elements of the parameter per element of a state, for states that do not have the parameter's shape."""

_MASK = 0xFFFFFFFF


class Kind(NamedTuple):
    """What distinguishes one compiled loop from another.

    Attributes:
        param: one of :data:`PARAM_KINDS`.
        state: one of :data:`STATE_DTYPES`.
        coupled: weight decay is added to the gradient (Adam) instead of shrinking the parameter (AdamW).
    """

    param: str
    state: str
    coupled: bool


class Constants(NamedTuple):
    """Numbers of one update, the same for all elements; each is rounded to fp32 before it is used.

    For moments other than fp32, ``eps`` and ``step_size`` have ``bc2_sqrt`` multiplied in, which saves an operation
    per element: ``m / bc1 / (sqrt(v) / s + eps) = m * s / bc1 / (sqrt(v) + eps * s)``.

    Attributes:
        gscale: factor of the gradient; negative to maximize.
        l2: weight decay that is added to the gradient; 0 unless coupled.
        decay: factor of the parameter, ``1 - lr * weight_decay``; 1 if coupled.
        beta1, w1: decay rate of the first moment, and ``1 - beta1``.
        beta2, w2: of the second.
        eps: added to the denominator.
        step_size: learning rate over the first moment's bias correction.
        bc2_sqrt: square root of the second moment's bias correction.
        eps_before: ``eps`` of the step before, with which 8-bit codes were made.
        has_ratios: 1 where 8-bit codes of the first moment are ratios, 0 where they are moments.
        ahead: what :func:`offload.optim.codes.ahead` gives for ratios, else 0.
    """

    gscale: float
    l2: float
    decay: float
    beta1: float
    w1: float
    beta2: float
    w2: float
    eps: float
    step_size: float
    bc2_sqrt: float
    eps_before: float
    has_ratios: float = 1.0
    ahead: float = 0.0


class Item(NamedTuple):
    """One tensor to update, and all that its update reads and writes; every tensor dense, in one memory order.

    Attributes:
        kind: which loop.
        param, grad: fp32 or bf16, both the same.
        exp_avg, exp_avg_sq: moments: fp32, bf16, or int8 and uint8 codes.
        exp_avg_scale, exp_avg_sq_scale: fp32 ``[ceil(numel / BLOCK)]`` for codes, else None.
        remainder: int16 for ``split``, int8 for ``split24``, else None.
        start: position of the first element in the parameter that this is a range of; a multiple of BLOCK.
        key_param, key_v: keys of the random bits that round the parameter and the second moment; for 8-bit moments,
            ``key_v`` is that of :func:`offload.optim.codes.thresholds`.
        constants: numbers of the update.
    """

    kind: Kind
    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor | None
    exp_avg_sq_scale: Tensor | None
    remainder: Tensor | None
    start: int
    key_param: int
    key_v: int
    constants: Constants


def shared_shape(key: str, dtype: torch.dtype, shape: Sequence[int]) -> Sequence[int]:
    """The shape of what is saved of a state of a parameter of that shape, where several ranks share the parameter.

    Scales have the parameter's dimensions, the last one shorter; 16-bit remainders are two bytes each, since no backend
    of torch.distributed knows 16-bit integers.
    """
    if key in STATE_BLOCK:
        return *shape[:-1], shape[-1] // BLOCK
    return (*shape, 2) if key == "remainder" and dtype == torch.int16 else shape


def as_shared(key: str, value: Tensor, shape: Sequence[int]) -> Tensor:
    """A state of a parameter of that shape in :func:`shared_shape`, over the same memory."""
    if key in STATE_BLOCK:
        return value.view(*shared_shape(key, value.dtype, shape))
    return value.unsqueeze(-1).view(torch.uint8) if key == "remainder" and value.dtype == torch.int16 else value


def as_kept(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse, of all states of a parameter, which may be in that form already."""
    kept = dict(state)
    kept.update((key, state[key].reshape(-1)) for key in STATE_BLOCK if key in state)
    remainder = state.get("remainder")
    if remainder is not None and remainder.dtype == torch.uint8:
        kept["remainder"] = remainder.contiguous().view(torch.int16).squeeze(-1)
    return kept


def state_dtype_of(param: Tensor, state_dtype: str) -> str:
    """In what the moments of a parameter are kept where its group says ``state_dtype``.

    fp32 for 8 bits, where several ranks share the parameter and cut it within blocks (an attribute
    ``offload_has_blocks`` of it, which is False then): norms, biases, and matrices whose rows are no whole number of
    blocks. So scales belong to one rank, and results do not depend on how many there are.
    """
    return "fp32" if state_dtype == "int8" and not getattr(param, "offload_has_blocks", True) else state_dtype


def param_kind(dtype: torch.dtype, master: str) -> str:
    """How a parameter of a dtype is stored under a choice of master."""
    if dtype == torch.float32:
        return "fp32"
    return "nearest" if master == "none" else master


def state_spec(dtype: torch.dtype, numel: int, state_dtype: str, master: str) -> dict[str, torch.dtype | None]:
    """The tensors that a parameter's state has beside ``step``, with their dtypes, in the order of a saved state.

    Those in :data:`STATE_BLOCK` have ``ceil(numel / BLOCK)`` elements, the others the parameter's shape.
    """
    moments = {"fp32": (torch.float32,) * 2, "bf16": (torch.bfloat16,) * 2}.get(state_dtype, (torch.int8, torch.uint8))
    spec: dict[str, Any] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
    if state_dtype == "int8":
        spec |= dict.fromkeys(STATE_BLOCK, torch.float32)
    if (remainder := REMAINDERS.get(param_kind(dtype, master))) is not None:
        spec["remainder"] = remainder
    return spec


def is_dense(tensor: Tensor) -> bool:
    """Whether elements fill a range of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in memory order, ``[numel]``."""
    return tensor.as_strided((tensor.numel(),), (1,))


def f32(value: float) -> float:
    """``value`` rounded to fp32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


# Random bits


def lowbias32(x: int) -> int:
    """A 32-bit integer hash with low bias (https://github.com/skeeto/hash-prospector)."""
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def random_key(seed: int, step: int, purpose: int) -> int:
    """Of one step; with :func:`tensor_key`, the key of one tensor's random bits in it."""
    return lowbias32(lowbias32(lowbias32(seed & _MASK) ^ seed >> 32 & _MASK) + 2 * step + purpose & _MASK)


def tensor_key(random_key: int, position: int) -> int:
    """The key for the parameter at a position over all groups."""
    return lowbias32(random_key + 0x9E3779B9 * position & _MASK)


def random_bits(start: int, count: int, key: int, device: torch.device) -> Tensor:
    """16 random bits for each of ``count`` elements from ``start`` on, as int32 in ``[0, 65536)``.

    They depend on the element's position and the key alone: on no order, thread or device. One hash serves an
    even element with its lower and the odd element after it with its upper half.
    """
    i = torch.arange(start, start + count, dtype=torch.int64, device=device)
    x = (i >> 1 & _MASK) ^ key
    x = x ^ x >> 16
    x = x * 0x7FEB352D & _MASK
    x = x ^ x >> 15
    x = x * 0x846CA68B & _MASK
    x = x ^ x >> 16
    return torch.where(i & 1 == 1, x >> 16, x & 0xFFFF).to(torch.int32)


def sqrt(values: Tensor) -> Tensor:
    """Correctly rounded, as the kernels' is; torch's own fp32 square root on the CPU is one unit off here and there."""
    return values.double().sqrt().float()


# Halves of fp32


def _bits(values: Tensor) -> Tensor:
    """fp32 as int32; of all NaNs, one that stays NaN when something is added to it."""
    return torch.where(values.isnan(), 0x7FC00000, values.view(torch.int32))


def round_half_away(values: Tensor) -> Tensor:
    """fp32 to bf16, to nearest; ties go away from zero, which takes one addition."""
    return (_bits(values) + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, up with the probability of what is cut off; ``bits`` from :func:`random_bits`."""
    return (_bits(values) + bits >> 16).to(torch.int16).view(torch.bfloat16)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 to ``(bf16 parameter, int16 remainder)``."""
    return round_half_away(master), _bits(master).to(torch.int16)


def split_master24(master: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 to ``(bf16 parameter, int8 remainder)``, rounded stochastically; ``bits`` from :func:`random_bits`."""
    rounded = _bits(master) + (bits >> 8) >> 8
    return (rounded + 0x80 >> 8).to(torch.int16).view(torch.bfloat16), rounded.to(torch.int8)


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """The inverse of :func:`split_master` and :func:`split_master24`, as the remainder's dtype says."""
    return ((param.view(torch.int16).to(torch.int32) << 16) + _units(remainder)).view(torch.float32)


def remainder_like(remainder: Tensor, dtype: torch.dtype) -> Tensor:
    """A remainder as one of another dtype, to nearest."""
    return _as_remainder(_units(remainder), dtype)


def _units(remainder: Tensor) -> Tensor:
    """In units of fp32's last place, int32."""
    return remainder.to(torch.int32) << (8 if remainder.dtype == torch.int8 else 0)


def _as_remainder(units: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        units = units + 0x80 >> 8
    return units.clamp(max=torch.iinfo(dtype).max).to(dtype)


def remainder_of(master: Tensor, param: Tensor, dtype: torch.dtype = torch.int16) -> Tensor:
    """The remainder with which a bf16 parameter that was rounded elsewhere is its fp32 master.

    A tie that was rounded to even, not away, becomes the nearest master that the parameter can have: one unit in the
    last place off. In int8, all are rounded to nearest.

    Raises:
        ValueError: where the parameter is not its master rounded to nearest.
    """
    high = param.view(torch.int16).to(torch.int64) << 16
    difference = master.view(torch.int32).to(torch.int64) - high
    if bool((difference.abs() > 0x8000).any()):
        raise ValueError(
            "the parameter is not its fp32 master rounded to bf16: load the model that belongs to it first"
        )
    return _as_remainder(difference, dtype)

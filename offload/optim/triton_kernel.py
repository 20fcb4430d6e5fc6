"""The update as a Triton kernel, and the sums of squares that clipping needs: what runs on accelerators.

Same bits as ``reference.py``: fp32, every operation rounded on its own (no contraction to fused multiply-adds), IEEE
division and square root, subnormals kept. Only where a number is not finite may the two differ.

One launch covers all tensors of a call that share a kind. What differs between them (addresses, sizes, keys,
constants) travels in one small table, a single copy that the host does not wait for.

Names: p parameter, g gradient, m first moment (exp_avg), v second moment (exp_avg_sq), q code of 8 bits. A tile is
``[ROWS, BLOCK]`` elements in memory order, so that the blocks of 8-bit states are its rows.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.optim import codes
from offload.optim.formats import BLOCK, Item, Kind

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Of every launch. Four warps read a tile of two rows (32-bit numbers) or four (16-bit ones) at 16 bytes per thread."""

ALIGNMENT = 16
"""Bytes of the widest load. Tensors at other addresses have a launch of their own, with narrow loads."""

SUM_BLOCKS = 64
"""Blocks whose squares one program sums up."""

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_UPDATE_ROW = struct.Struct("=11q11f4x")
"""Addresses of p, g, m, v, the scales of m and v, and the remainder; number of elements; position of the first in the
parameter; keys of p and v; Constants."""

_SUM_ROW = struct.Struct("=3q")
"""Address, number of elements, position of the sum in the result."""

_CONSTANTS = tl.constexpr(11)
_UPDATE_WORDS = tl.constexpr(_UPDATE_ROW.size // 8)
_SUM_WORDS = tl.constexpr(_SUM_ROW.size // 8)
_BLOCK = tl.constexpr(BLOCK)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_POSITION = tl.constexpr(codes.POSITION)
_SMALLEST_SCALE = tl.constexpr(codes.SMALLEST_SCALE)
_E4M3_BIAS = tl.constexpr(codes.E4M3_BIAS)
_E3M5_BIAS = tl.constexpr(codes.E3M5_BIAS)
_E3M5_OFFSET = tl.constexpr(codes.E3M5_OFFSET)
_E3M5_RANGE = tl.constexpr(codes.E3M5_RANGE)


def update(items: Sequence[Item], scale: Tensor | None = None) -> None:
    """Update every tensor of ``items`` in place, on the current stream and without waiting for the device.

    Args:
        items: tensors on one device. Those of one kind share a launch; see also :data:`ALIGNMENT`.
        scale: 0-dim, on any device; a factor of all gradients, beside each item's own ``gscale``.
    """
    launches: dict[tuple[Kind, bool], list[Item]] = {}
    for item in items:
        launches.setdefault((item.kind, _is_aligned(item)), []).append(item)
    if not launches:
        return
    device = items[0].param.device
    with _current(device):
        if scale is not None:
            scale = scale.to(device, torch.float32, non_blocking=True)
        for (kind, is_aligned), members in launches.items():
            rows = 2 if "fp32" in (kind.param, kind.state) else 4
            sizes = [item.param.numel() for item in members]
            table, programs = _table([_update_row(item) for item in members], sizes, rows * BLOCK, device)
            if programs:
                _update[(programs,)](
                    table,
                    table.view(torch.float32),
                    len(members),
                    scale,
                    PARAM=kind.param,
                    STATE=kind.state,
                    COUPLED=kind.coupled,
                    ALIGNED=is_aligned,
                    ROWS=rows,
                    **OPTIONS,
                )


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of each tensor's squares, fp32 ``[len(tensors)]``, on the current stream and without waiting for it.

    Two launches for all tensors of one dtype. Sums are taken in fp32 and without atomics: their order depends on
    nothing but a tensor's size and dtype and whether its address is a multiple of :data:`ALIGNMENT`.

    Args:
        tensors: fp32, bf16 or fp16, each dense, all on one device.

    Raises:
        TypeError: for tensors of another dtype.
    """
    launches: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"tensor {index} is {tensor.dtype}: expected one of {', '.join(map(str, _DTYPES))}")
        launches.setdefault((tensor.dtype, tensor.data_ptr() % ALIGNMENT == 0), []).append(index)
    if not launches:
        return torch.zeros(0)
    device = tensors[0].device
    with _current(device):
        sums = torch.empty(len(tensors), dtype=torch.float32, device=device)
        for (dtype, is_aligned), members in launches.items():
            packed = [_SUM_ROW.pack(tensors[i].data_ptr(), tensors[i].numel(), i) for i in members]
            table, programs = _table(packed, [tensors[i].numel() for i in members], SUM_BLOCKS * BLOCK, device)
            partial = torch.empty(programs, dtype=torch.float32, device=device)
            rows = 2 if dtype == torch.float32 else 4
            if programs:
                _partial_sums[(programs,)](
                    table,
                    len(members),
                    partial,
                    DTYPE=_DTYPES[dtype],
                    ALIGNED=is_aligned,
                    ROWS=rows,
                    TILES=SUM_BLOCKS // rows,
                    **OPTIONS,
                )
            _final_sums[(len(members),)](table, len(members), partial, sums, **OPTIONS)
    return sums


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _is_aligned(item: Item) -> bool:
    tensors = (item.param, item.grad, item.exp_avg, item.exp_avg_sq, item.remainder)
    return all(tensor is None or tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def _update_row(item: Item) -> bytes:
    scales = (item.exp_avg_scale, item.exp_avg_sq_scale, item.remainder)
    return _UPDATE_ROW.pack(
        item.param.data_ptr(),
        item.grad.data_ptr(),
        item.exp_avg.data_ptr(),
        item.exp_avg_sq.data_ptr(),
        *(0 if tensor is None else tensor.data_ptr() for tensor in scales),
        item.param.numel(),
        item.start,
        item.key_param,
        item.key_v,
        *item.constants,
    )


def _table(rows: Sequence[bytes], sizes: Sequence[int], share: int, device: torch.device) -> tuple[Tensor, int]:
    """The rows, then each one's first program and the number of all, as int64 words on the device; and that number.

    Args:
        rows: packed, one per tensor.
        sizes: each tensor's number of elements.
        share: elements per program.
        device: where the kernel runs.
    """
    firsts = [0]
    for size in sizes:
        firsts.append(firsts[-1] + -(-size // share))
    content = b"".join(rows) + struct.pack(f"={len(firsts)}q", *firsts)
    # Pinned memory of torch's own allocator is not used again before a copy from it is done.
    table = torch.empty(len(content) // 8, dtype=torch.int64, pin_memory=device.type != "cpu")
    table.numpy().view("uint8")[:] = memoryview(content)
    return table.to(device, non_blocking=True), firsts[-1]


# A program finds its tensor by binary search among the tensors' first programs, a few KiB that stay in the nearest
# cache. A map with an entry per program would be read in one step, but for 10^9 elements it is 4 MB to make and copy.


@triton.jit
def _tensor_of(program, firsts, count):
    """The last tensor whose first program is not after this one; those without elements have none."""
    low = program * 0
    high = low + count
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(firsts + middle) > program
        low = tl.where(is_after, low, middle)
        high = tl.where(is_after, middle, high)
    return low


@triton.jit
def _pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, _ALIGNMENT)
    return pointer


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["table", "numbers", "scale"])
def _update(
    table,  # int64 [count * _UPDATE_WORDS + count + 1]
    numbers,  # the same as fp32
    count,  # of tensors
    scale,  # fp32 [] or None
    PARAM: tl.constexpr,
    STATE: tl.constexpr,
    COUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    firsts = table + count * _UPDATE_WORDS
    tensor = _tensor_of(program, firsts, count)
    block = (program - tl.load(firsts + tensor)) * ROWS
    row = table + tensor * _UPDATE_WORDS
    constants = numbers + 2 * (tensor * _UPDATE_WORDS + _CONSTANTS)
    left = tl.load(row + 7) - block * _BLOCK
    # Without a mask where none is needed: loads under one are narrow.
    if left >= ROWS * _BLOCK:
        _update_tile(row, constants, block, left, scale, PARAM, STATE, COUPLED, ALIGNED, ROWS, False)
    else:
        _update_tile(row, constants, block, left, scale, PARAM, STATE, COUPLED, ALIGNED, ROWS, True)


@triton.jit
def _update_tile(
    row,  # of the table
    constants,
    block,  # of the tensor, the tile's first
    left,  # elements from there on
    scale,
    PARAM: tl.constexpr,
    STATE: tl.constexpr,
    COUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):
    gscale = tl.load(constants)
    l2 = tl.load(constants + 1)
    decay = tl.load(constants + 2)
    beta1 = tl.load(constants + 3)
    w1 = tl.load(constants + 4)
    beta2 = tl.load(constants + 5)
    w2 = tl.load(constants + 6)
    eps = tl.load(constants + 7)
    step_size = tl.load(constants + 8)
    bc2_sqrt = tl.load(constants + 9)
    eps_before = tl.load(constants + 10)
    if scale is not None:
        gscale = gscale * tl.load(scale)

    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, _BLOCK)
    at = rows[:, None] * _BLOCK + columns[None, :]
    first = block * _BLOCK
    # Beyond the end of a tensor there are zeros, which no block's largest value is.
    if MASKED:
        mask = at < left
        row_mask = rows * _BLOCK < left
        other = 0
    else:
        mask = None
        row_mask = None
        other = None

    FULL: tl.constexpr = tl.float32 if PARAM == "fp32" else tl.uint16
    p_at = _pointer(tl.load(row), FULL, ALIGNED) + first + at
    g_at = _pointer(tl.load(row + 1), FULL, ALIGNED) + first + at
    if PARAM == "split":
        remainder_at = _pointer(tl.load(row + 6), tl.int16, ALIGNED) + first + at
        low = tl.load(remainder_at, mask, other).to(tl.int32).to(tl.uint32, bitcast=True)
        p = ((tl.load(p_at, mask, other).to(tl.uint32) << 16) + low).to(tl.float32, bitcast=True)
    else:
        p = _widen(tl.load(p_at, mask, other))
    g = _widen(tl.load(g_at, mask, other))

    CODED: tl.constexpr = STATE == "int8" or STATE == "fp8"
    MOMENT: tl.constexpr = tl.uint8 if CODED else (tl.float32 if STATE == "fp32" else tl.uint16)
    m_at = _pointer(tl.load(row + 2), MOMENT, ALIGNED) + first + at
    v_at = _pointer(tl.load(row + 3), MOMENT, ALIGNED) + first + at
    position = (tl.load(row + 8) + first).to(tl.uint32) + at.to(tl.uint32)
    pair = ((tl.load(row + 8) + first) >> 1).to(tl.uint32) + (at >> 1).to(tl.uint32)
    if CODED:
        ratio_scale_at = tl.load(row + 4).to(tl.pointer_type(tl.float32)) + block + rows
        root_scale_at = tl.load(row + 5).to(tl.pointer_type(tl.float32)) + block + rows
        ratio = _decode_ratio(tl.load(m_at, mask, other), tl.load(ratio_scale_at, row_mask, other), STATE)
        root = _decode_root(tl.load(v_at, mask, other), tl.load(root_scale_at, row_mask, other))
        m = ratio * (root + eps_before)
        v = root * root
    else:
        m = _widen(tl.load(m_at, mask, other))
        v = _widen(tl.load(v_at, mask, other))

    if STATE == "fp32":
        # The operations of torch.optim.AdamW and Adam, in their order.
        g = g * gscale
        if COUPLED:
            g = g + l2 * p
        p = p * decay
        difference = g - m
        m = tl.where(w1 < 0.5, m + w1 * difference, g - difference * (1 - w1))
        v = v * beta2
        v = v + (w2 * g) * g
        p = p + tl.div_rn(-step_size * m, tl.div_rn(tl.sqrt_rn(v), bc2_sqrt) + eps)
    else:
        # The same with fewer operations: scale and bias correction are folded into the constants.
        if COUPLED:
            g = g * gscale + l2 * p
        else:
            w1 = w1 * gscale
            w2 = (w2 * gscale) * gscale
        m = beta1 * m + w1 * g
        v = beta2 * v + (w2 * g) * g
        root = tl.sqrt_rn(v)
        if CODED:
            ratio = tl.div_rn(m, root + eps)
            p = p * decay - step_size * ratio
        else:
            p = p * decay - tl.div_rn(step_size * m, root + eps)

    if PARAM == "fp32":
        tl.store(p_at, p, mask)
    elif PARAM == "stochastic":
        tl.store(p_at, _round_stochastically(p, pair, tl.load(row + 9), columns), mask)
    else:
        tl.store(p_at, _round_half_away(p), mask)
    if PARAM == "split":
        tl.store(remainder_at, _bits(p).to(tl.int16), mask)

    if STATE == "fp32":
        tl.store(m_at, m, mask)
        tl.store(v_at, v, mask)
    elif STATE == "bf16":
        tl.store(m_at, _round_half_away(m), mask)
        tl.store(v_at, _round_stochastically(v, pair, tl.load(row + 10), columns), mask)
    else:
        ratio_scale = _largest(ratio)
        root_scale = _largest(root)
        tl.store(ratio_scale_at, ratio_scale, row_mask)
        tl.store(root_scale_at, root_scale, row_mask)
        tl.store(m_at, _encode_ratio(ratio, ratio_scale, STATE), mask)
        tl.store(v_at, _encode_root(root, root_scale, position, tl.load(row + 10)), mask)


# Halves of fp32: formats.py


@triton.jit
def _widen(x):
    """fp32, or bf16 as uint16, to fp32."""
    if x.dtype == tl.uint16:
        x = (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _bits(x):
    """fp32 to uint32. The NaN that NVIDIA's arithmetic gives, 0x7fffffff, would be rounded to a zero."""
    return tl.where(x == x, x.to(tl.uint32, bitcast=True), 0x7FC00000)


@triton.jit
def _round_half_away(x):
    return ((_bits(x) + 0x8000) >> 16).to(tl.uint16)


@triton.jit
def _round_stochastically(x, pair, key, columns):
    """``pair`` and ``key`` as in formats.random_bits. Neighbours have one hash, which the compiler sees."""
    r = pair ^ key.to(tl.uint32)
    r = r ^ (r >> 16)
    r = r * 0x7FEB352D
    r = r ^ (r >> 15)
    r = r * 0x846CA68B
    r = r ^ (r >> 16)
    r = tl.where((columns & 1)[None, :] == 1, r >> 16, r & 0xFFFF)
    return ((_bits(x) + r) >> 16).to(tl.uint16)


# Codes: codes.py


@triton.jit
def _largest(x):
    """The largest magnitude of each row; the maximum passes NaN over."""
    return tl.max(tl.abs(x), axis=1)


@triton.jit
def _inverse(scale, over: tl.constexpr):
    return tl.where(scale >= _SMALLEST_SCALE, tl.div_rn(over, scale), 0.0)[:, None]


@triton.jit
def _decode_ratio(code, scale, STATE: tl.constexpr):
    """Codes as uint8 ``[ROWS, BLOCK]`` and scales ``[ROWS]`` to fp32."""
    if STATE == "int8":
        return code.to(tl.int8, bitcast=True).to(tl.float32) * (scale * (1 / 127))[:, None]
    else:
        code = code.to(tl.uint32)
        magnitude = code & 127
        bits = tl.where(magnitude == 0, 0, (magnitude + _E4M3_BIAS) << 20) | ((code & 128) << 24)
        return bits.to(tl.float32, bitcast=True) * scale[:, None]


@triton.jit
def _encode_ratio(ratio, scale, STATE: tl.constexpr):
    if STATE == "int8":
        # The lowest bit of the sum stands for 1, so that adding rounds to an integer, in two's complement.
        return (ratio * _inverse(scale, 127.0) + 12582912.0).to(tl.uint32, bitcast=True).to(tl.uint8)
    else:
        bits = (ratio * _inverse(scale, 1.0)).to(tl.int32, bitcast=True)
        magnitude = (((bits & 0x7FFFFFFF) + (1 << 19)) >> 20) - _E4M3_BIAS
        return (tl.maximum(magnitude, 0) | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def _decode_root(code, scale):
    bits = (code.to(tl.uint32) + _E3M5_BIAS) << 18
    return (bits.to(tl.float32, bitcast=True) - _E3M5_OFFSET) * (scale * (1 / _E3M5_RANGE))[:, None]


@triton.jit
def _encode_root(root, scale, position, key):
    """``position`` uint32 and ``key`` as in codes.thresholds."""
    threshold = (position * _POSITION + key.to(tl.uint32)) >> 16
    bits = (root * _inverse(scale, _E3M5_RANGE) + _E3M5_OFFSET).to(tl.int32, bitcast=True)
    code = ((bits + (threshold << 2).to(tl.int32)) >> 18) - _E3M5_BIAS
    return tl.minimum(tl.maximum(code, 1), 255).to(tl.uint8)


# Sums of squares


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["table", "partial"])
def _partial_sums(
    table,  # int64 [count * _SUM_WORDS + count + 1]
    count,  # of tensors
    partial,  # fp32 [programs]
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    program = tl.program_id(0)
    firsts = table + count * _SUM_WORDS
    tensor = _tensor_of(program, firsts, count)
    row = table + tensor * _SUM_WORDS
    first = (program - tl.load(firsts + tensor)) * (TILES * ROWS * _BLOCK)
    left = tl.load(row + 1) - first
    at = tl.arange(0, ROWS * _BLOCK)
    start = _pointer(tl.load(row), DTYPE, ALIGNED) + first
    total = tl.zeros([ROWS * _BLOCK], tl.float32)
    if left >= TILES * ROWS * _BLOCK:
        for tile in range(TILES):
            x = tl.load(start + tile * (ROWS * _BLOCK) + at).to(tl.float32)
            total += x * x
    else:
        for tile in range(TILES):
            x = tl.load(start + tile * (ROWS * _BLOCK) + at, tile * (ROWS * _BLOCK) + at < left, 0.0).to(tl.float32)
            total += x * x
    tl.store(partial + program, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["table", "partial", "sums"])
def _final_sums(
    table,  # as above
    count,
    partial,
    sums,  # fp32 [all tensors]
):
    tensor = tl.program_id(0)
    firsts = table + count * _SUM_WORDS + tensor
    last = tl.load(firsts + 1)
    total = tl.zeros([_BLOCK], tl.float32)
    at = tl.load(firsts) + tl.arange(0, _BLOCK)
    while tl.min(at) < last:
        total += tl.load(partial + at, at < last, 0.0)
        at += _BLOCK
    tl.store(sums + tl.load(table + tensor * _SUM_WORDS + 2), tl.sum(total, axis=0))

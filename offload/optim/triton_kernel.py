"""The update as a Triton kernel: what runs on GPUs.

Same bits as ``reference.py``: fp32, every operation rounded on its own (no contraction to fused multiply-adds), IEEE
division and square root, subnormals kept. Only where a number is not finite may the two differ.

One launch covers all tensors of a call that share a kind. What differs between them (addresses, sizes, keys,
constants) is written to a table in page-locked memory, and a small kernel before it fetches that to the device. A
copy engine would bring it behind the states of whole units that are on their way up, milliseconds later; as arguments
of the kernel, addresses could not be looked up by a tensor's number; and if every program read them from the host,
thousands of reads would share the link with those states.

Names: p parameter, g gradient, m first moment (exp_avg), v second moment (exp_avg_sq), q code of 8 bits. A tile is
``[ROWS, BLOCK]`` elements in memory order, so that the blocks of 8-bit states are its rows.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.optim import codes
from offload.optim.formats import BLOCK, Constants, Item, Kind, state_spec
from offload.optim.ring import Ring

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Of every launch. Four warps read a tile of two rows (32-bit numbers) or four (16-bit ones) at 16 bytes per thread."""

ALIGNMENT = 16
"""Bytes of the widest load. Tensors at other addresses have a launch of their own, with narrow loads."""

MOST_TENSORS = 1024
"""Of one launch."""

TABLE_WORDS = 1 << 17
"""Words of 8 bytes for the tables that queued launches have not read yet: 1 MiB, 700 pieces of ten tensors."""

FETCH_WORDS = 512
"""Of a table, what one program fetches."""

_UPDATE_ROW = struct.Struct("=11q13f4x")
"""Addresses of p, g, m, v, the scales of m and v, and the remainder; number of elements; position of the first in the
parameter; keys of p and v; Constants; padding to whole words."""

_CONSTANTS = tl.constexpr(11)
_FETCH_WORDS = tl.constexpr(FETCH_WORDS)
_UPDATE_WORDS = tl.constexpr(_UPDATE_ROW.size // 8)
_BLOCK = tl.constexpr(BLOCK)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_POSITION = tl.constexpr(codes.POSITION)
_SMALLEST_SCALE = tl.constexpr(codes.SMALLEST_SCALE)
_STEP = tl.constexpr(codes.STEP)
_WIDTH_SHIFT = tl.constexpr(codes.WIDTH_SHIFT)
_WIDEST = tl.constexpr(codes.WIDEST)
_SMALLEST_SCALE_BITS = tl.constexpr(codes.SMALLEST_SCALE_BITS)


class _Tables:
    """Space for tables, on the host and on one device at the same places, and the factor 1 on the device."""

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type != "cpu"
        # Kernels can read page-locked memory, at the address that it has on the host.
        self.on_host = torch.empty(TABLE_WORDS, dtype=torch.int64, device="cpu", pin_memory=is_gpu)
        self.words = torch.empty(TABLE_WORDS, dtype=torch.int64, device=device)
        self.numbers = self.words.view(torch.float32)
        self.one = torch.ones((), dtype=torch.float32, device=device)
        self.bytes = self.on_host.numpy().data.cast("B")
        self.ring = Ring(TABLE_WORDS)
        self.lock = threading.Lock()
        self._device = device if is_gpu else None
        if is_gpu:
            # The one was written on this thread's stream; launches may come on others.
            torch.accelerator.synchronize(device)

    def read(self, start: int, size: int) -> None:
        """What reads a range has been queued, on the current stream; in the interpreter it is done."""
        if self._device is not None:
            self.ring.read_until(torch.accelerator.current_stream(self._device).record_event(), start, size)


_tables = cache(_Tables)


def prepare(device: torch.device, kinds: Iterable[Kind]) -> None:
    """Compile what updates of some kinds launch, and see that it works; waits for the device.

    Raises:
        Exception: whatever Triton, a compiler or the driver raise where there is no launch.
        RuntimeError: where a launch gives wrong numbers.
    """
    with torch.no_grad(), _current(device):
        for kind in kinds:
            items = [_sample(kind, device, offset) for offset in (0, 1)]
            update(items)
            for item in items:
                change = 1 - item.param.float().cpu()
                if not bool(((change - _SAMPLE_CHANGE).abs() < 0.01).all()):
                    raise RuntimeError(f"a trial of {kind} changed a parameter by {change[0].item()}")


_SAMPLE_CHANGE = 0.1 * 0.1 / 0.001**0.5
"""How far the first step takes a parameter of :func:`_sample`: step_size * m / sqrt(v)."""


def _sample(kind: Kind, device: torch.device, offset: int) -> Item:
    """A tensor of ones with gradients of one and no moments, ``offset`` elements behind an aligned address."""

    def filled(dtype: torch.dtype | None, value: float, size: int = BLOCK) -> Tensor:
        return torch.full((size + offset,), value, dtype=dtype, device=device)[offset:]

    dtype = torch.float32 if kind.param == "fp32" else torch.bfloat16
    spec = state_spec(dtype, BLOCK, kind.state, "none" if kind.param == "fp32" else kind.param)
    state = {key: filled(dtype, 0, 1 if "scale" in key else BLOCK) for key, dtype in spec.items()}
    return Item(
        kind,
        filled(dtype, 1),
        filled(dtype, 1),
        state["exp_avg"],
        state["exp_avg_sq"],
        state.get("exp_avg_scale"),
        state.get("exp_avg_sq_scale"),
        state.get("remainder"),
        start=0,
        key_param=0,
        key_v=0,
        constants=Constants(1.0, 0.0, 1.0, 0.9, 0.1, 0.999, 0.001, 1e-8, 0.1, 1.0, 0.0),
    )


def update(items: Sequence[Item], scale: Tensor | None = None) -> None:
    """Update every tensor of ``items`` in place, on the current stream and without waiting for the device.

    Args:
        items: tensors on one device. Those of one kind share a launch; see also :data:`ALIGNMENT` and
            :data:`MOST_TENSORS`.
        scale: 0-dim, a factor of all gradients, beside each item's own ``gscale``; the kernel reads it on the device.
    """
    launches: dict[tuple[Kind, bool], list[tuple[int, bytes]]] = {}
    for item in items:
        kind, param, grad, m, v, m_scale, v_scale, remainder, start, key_param, key_v, constants = item
        at = param.data_ptr(), grad.data_ptr(), m.data_ptr(), v.data_ptr()
        remainder_at = 0 if remainder is None else remainder.data_ptr()
        numel = param.numel()
        row = _UPDATE_ROW.pack(
            *at,
            0 if m_scale is None else m_scale.data_ptr(),
            0 if v_scale is None else v_scale.data_ptr(),
            remainder_at,
            numel,
            start,
            key_param,
            key_v,
            *constants,
        )
        is_aligned = (at[0] | at[1] | at[2] | at[3] | remainder_at) % ALIGNMENT == 0
        launches.setdefault((kind, is_aligned), []).append((numel, row))
    if not launches:
        return
    device = items[0].param.device
    with _current(device):
        tables = _tables(device)
        # Always an address, so that one compiled kernel serves with and without a scale.
        scale = tables.one if scale is None else scale.to(device, torch.float32, non_blocking=True)
        for (kind, is_aligned), rows in launches.items():
            for first in range(0, len(rows), MOST_TENSORS):
                _launch(tables, kind, is_aligned, rows[first : first + MOST_TENSORS], scale)


def _launch(tables: _Tables, kind: Kind, is_aligned: bool, tensors: Sequence[tuple[int, bytes]], scale: Tensor) -> None:
    """Update tensors, each given by its number of elements and its row of the table."""
    rows = 2 if "fp32" in (kind.param, kind.state) else 4
    share = rows * BLOCK
    firsts = [0]
    for numel, _ in tensors:
        firsts.append(firsts[-1] + -(-numel // share))
    programs = firsts[-1]
    if not programs:
        return
    content = b"".join(row for _, row in tensors) + struct.pack(f"={len(firsts)}q", *firsts)
    size = len(content) // 8
    with tables.lock:
        start = tables.ring.take(size)
        tables.bytes[8 * start : 8 * start + len(content)] = content
        try:
            _fetch[(-(-size // FETCH_WORDS),)](tables.on_host, tables.words, start, size, CACHE=read_anew(), **OPTIONS)
            _update[(programs,)](
                tables.words,
                tables.numbers,
                len(tensors),
                scale,
                start=start,
                PARAM=kind.param,
                STATE=kind.state,
                COUPLED=kind.coupled,
                ALIGNED=is_aligned,
                ROWS=rows,
                **OPTIONS,
            )
        finally:
            tables.read(start, size)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, and on the stream that is this thread's current one there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def read_anew() -> str:
    """The cache modifier of loads past a device's caches, which may hold an earlier table, beside ``volatile``.

    NVIDIA needs none: Triton up to 3.7 drops it there, 3.8 does not compile the two together. On AMD ``volatile`` alone
    reads a cache.
    """
    return ".cv" if torch.version.hip else ""


@triton.jit(do_not_specialize=["start", "size"])
def _fetch(
    source,  # int64 [TABLE_WORDS], page-locked
    target,  # the same, on the device
    start,  # of the table, in words
    size,
    CACHE: tl.constexpr,
):
    at = tl.program_id(0) * _FETCH_WORDS + tl.arange(0, _FETCH_WORDS)
    words = tl.load(source + start + at, at < size, volatile=True, cache_modifier=CACHE)
    tl.store(target + start + at, words, at < size)


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


@triton.jit(do_not_specialize=["count", "start"], do_not_specialize_on_alignment=["scale"])
def _update(
    table,  # int64 [TABLE_WORDS], count * _UPDATE_WORDS + count + 1 of them from start on
    numbers,  # the same as fp32
    count,  # of tensors
    scale,  # fp32 []
    start,
    PARAM: tl.constexpr,
    STATE: tl.constexpr,
    COUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    firsts = table + start + count * _UPDATE_WORDS
    tensor = _tensor_of(program, firsts, count)
    block = (program - tl.load(firsts + tensor)) * ROWS
    row = table + start + tensor * _UPDATE_WORDS
    constants = numbers + 2 * (start + tensor * _UPDATE_WORDS + _CONSTANTS)
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
    has_ratios = tl.load(constants + 11) != 0
    ahead = tl.load(constants + 12)
    grain = tl.where(has_ratios, 1, 2)
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
    SPLIT: tl.constexpr = PARAM == "split" or PARAM == "split24"
    if SPLIT:
        REMAINDER: tl.constexpr = tl.int16 if PARAM == "split" else tl.int8
        remainder_at = _pointer(tl.load(row + 6), REMAINDER, ALIGNED) + first + at
        low = tl.load(remainder_at, mask, other).to(tl.int32).to(tl.uint32, bitcast=True)
        if PARAM == "split24":
            low = low << 8
        p = ((tl.load(p_at, mask, other).to(tl.uint32) << 16) + low).to(tl.float32, bitcast=True)
    else:
        p = _widen(tl.load(p_at, mask, other))
    g = _widen(tl.load(g_at, mask, other))

    CODED: tl.constexpr = STATE == "int8"
    MOMENT: tl.constexpr = tl.uint8 if CODED else (tl.float32 if STATE == "fp32" else tl.uint16)
    m_at = _pointer(tl.load(row + 2), MOMENT, ALIGNED) + first + at
    v_at = _pointer(tl.load(row + 3), MOMENT, ALIGNED) + first + at
    position = (tl.load(row + 8) + first).to(tl.uint32) + at.to(tl.uint32)
    pair = ((tl.load(row + 8) + first) >> 1).to(tl.uint32) + (at >> 1).to(tl.uint32)
    if CODED:
        first_scale_at = tl.load(row + 4).to(tl.pointer_type(tl.float32)) + block + rows
        root_scale_at = tl.load(row + 5).to(tl.pointer_type(tl.float32)) + block + rows
        first_scale = tl.load(first_scale_at, row_mask, other)
        width = first_scale.to(tl.int32, bitcast=True) & 0xFF
        root_code = tl.load(v_at, mask, other).to(tl.int32)
        root = _decode_root(root_code & -grain, tl.load(root_scale_at, row_mask, other), width, grain)
        m_code = tl.load(m_at, mask, other)
        ratio = _decode_ratio(m_code) * _unit(first_scale)[:, None]
        moment = _decode_moment(m_code, root_code) * first_scale[:, None]
        m = tl.where(has_ratios, ratio * (root + eps_before), moment)
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
            p = p * decay - (step_size + ahead) * ratio
        else:
            p = p * decay - tl.div_rn(step_size * m, root + eps)

    if STATE == "fp32":
        tl.store(m_at, m, mask)
        tl.store(v_at, v, mask)
    elif STATE == "bf16":
        tl.store(m_at, _round_half_away(m), mask)
        tl.store(v_at, _round_stochastically(v, pair, tl.load(row + 10), columns), mask)
    else:
        stored = tl.where(has_ratios, ratio, ratio * (root + eps))
        stored = tl.where(tl.abs(stored) < float("inf"), stored, 0.0)
        largest = tl.max(tl.abs(stored), axis=1).to(tl.int32, bitcast=True)
        # Roots as bits, which have the order of numbers.
        bits = tl.where(root < float("inf"), root, 0.0).to(tl.int32, bitcast=True)
        top = tl.max(bits, axis=1)
        width = _width(top, tl.min(tl.where(bits > 0, bits, 0x7FFFFFFF), axis=1), width, grain)
        multiple = tl.maximum((width << _WIDTH_SHIFT) * grain, 1)
        top = (top + multiple - 1) // multiple * multiple
        bits = tl.where(root < float("inf"), bits, top[:, None])
        first_scale = ((largest & -256) | width).to(tl.float32, bitcast=True)
        tl.store(first_scale_at, first_scale, row_mask)
        tl.store(root_scale_at, top.to(tl.float32, bitcast=True), row_mask)
        inverse = tl.where(first_scale >= _SMALLEST_SCALE, tl.div_rn(1.0, first_scale), 0.0)
        m_code = _encode_ratio(stored, inverse)
        moment_code = _encode_moment(stored * inverse[:, None])
        root_code = _encode_root(bits, top, width, position, tl.load(row + 10), grain)
        tl.store(m_at, tl.where(has_ratios, m_code, (moment_code >> 1).to(tl.uint8)), mask)
        tl.store(v_at, tl.where(has_ratios, root_code, root_code | (moment_code & 1)).to(tl.uint8), mask)
        known = p + _decode_ratio(m_code) * (_unit(first_scale) * ahead)[:, None]
        p = tl.where(has_ratios, known, p)

    if PARAM == "fp32":
        tl.store(p_at, p, mask)
    elif PARAM == "stochastic":
        tl.store(p_at, _round_stochastically(p, pair, tl.load(row + 9), columns), mask)
    elif PARAM == "split24":
        bits = _bits(p) + (_random_bits(pair, tl.load(row + 9), columns) >> 8)
        tl.store(p_at, ((bits + 0x8000) >> 16).to(tl.uint16), mask)
        tl.store(remainder_at, (bits >> 8).to(tl.int8), mask)
    else:
        tl.store(p_at, _round_half_away(p), mask)
    if PARAM == "split":
        tl.store(remainder_at, _bits(p).to(tl.int16), mask)


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
def _random_bits(pair, key, columns):
    """``pair`` and ``key`` as in formats.random_bits. Neighbours have one hash, which the compiler sees."""
    r = pair ^ key.to(tl.uint32)
    r = r ^ (r >> 16)
    r = r * 0x7FEB352D
    r = r ^ (r >> 15)
    r = r * 0x846CA68B
    r = r ^ (r >> 16)
    return tl.where((columns & 1)[None, :] == 1, r >> 16, r & 0xFFFF)


@triton.jit
def _round_stochastically(x, pair, key, columns):
    return ((_bits(x) + _random_bits(pair, key, columns)) >> 16).to(tl.uint16)


# Codes: codes.py


@triton.jit
def _unit(scale):
    """What the code 1 of a ratio stands for."""
    return scale * (1 / 127)


@triton.jit
def _decode_ratio(code):
    """Codes as uint8 ``[ROWS, BLOCK]`` to fp32, in units."""
    return code.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _encode_ratio(stored, inverse):
    # The lowest bit of the sum stands for 1, so that adding rounds to an integer, in two's complement.
    return (stored * (inverse * 127.0)[:, None] + 12582912.0).to(tl.uint32, bitcast=True).to(tl.uint8)


@triton.jit
def _decode_moment(code, root_code):
    """Shares of the largest, fp32, out of 9 bits of which the lowest is the root's."""
    code = (code.to(tl.uint32) << 1) | (root_code.to(tl.uint32) & 1)
    share = ((code << 23).to(tl.int32, bitcast=True) >> 23).to(tl.float32) * (1 / 255)
    return share * tl.abs(share)


@triton.jit
def _encode_moment(share):
    """Of shares, fp32: int32 of which the lower 9 bits count."""
    root = tl.sqrt_rn(tl.abs(share))
    return (tl.where(share < 0, -root, root) * 255.0 + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _width(top, least, before, grain):
    """Of each row: codes.steps."""
    largest = 256 - 2 * grain
    one = (largest - 2 * grain) << _WIDTH_SHIFT
    width = tl.minimum(tl.maximum((top - least + (one - 1)) // one, 1), _WIDEST)
    width = tl.where((width <= before) & (8 * width + 7 >= 7 * before), before, width)
    width = tl.minimum(width, (top - 1) // (largest << _WIDTH_SHIFT))
    return tl.where(top >= _SMALLEST_SCALE_BITS, width, 0)


@triton.jit
def _decode_root(code, scale, width, grain):
    step = width << _WIDTH_SHIFT
    bottom = scale.to(tl.int32, bitcast=True) - (256 - 2 * grain) * step
    return tl.where(code == 0, 0, bottom[:, None] + code * step[:, None]).to(tl.float32, bitcast=True)


@triton.jit
def _encode_root(bits, top, width, position, key, grain):
    """int32; ``position`` uint32 and ``key`` as in codes.thresholds."""
    threshold = ((position * _POSITION + key.to(tl.uint32)) >> 16).to(tl.int32)
    step = width << _WIDTH_SHIFT
    bottom = (top - (256 - 2 * grain) * step)[:, None]
    inverse = tl.where(step > 0, tl.div_rn(1.0, step.to(tl.float32)) * _STEP, 0.0)
    bits = tl.where(bits > 0, tl.maximum(bits, bottom + (grain * step)[:, None]), 0)
    above = tl.maximum(bits - bottom, 0).to(tl.float32) * inverse[:, None]
    return ((above.to(tl.int32) + threshold * grain) >> 16) & -grain

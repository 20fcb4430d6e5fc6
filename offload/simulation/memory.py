"""Device memory as PyTorch's caching allocator hands it out: sizes and addresses, without the memory.

What a program needs is not the sum of what it holds: memory comes in blocks, a block belongs to the stream for which
it was allocated, and what lies between two blocks in use may be too small for the next. The rules are those of
https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp with its default settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field

import torch

MIN_BLOCK = 512
"""Bytes; sizes are rounded up to its multiples (``kMinBlockSize``)."""

SMALL_SIZE = 1 << 20
"""Largest small allocation (``kSmallSize``)."""

SMALL_SEGMENT = 2 << 20
"""What is asked of the device for small allocations (``kSmallBuffer``)."""

LARGE_SEGMENT = 20 << 20
"""What is asked of the device for allocations between 1 and 10 MiB (``kLargeBuffer``)."""

MIN_LARGE = 10 << 20
"""From here on an allocation gets a segment of its size (``kMinLargeAlloc``)..."""

ROUND_LARGE = 2 << 20
"""...rounded up to multiples of this (``kRoundLarge``)."""

GAP = 1 << 46
"""Between the addresses of two segments, so that none can be mistaken for one that follows another."""


class Block:
    """A part of a segment, in use or free.

    Attributes:
        address: of its first byte.
        nbytes: its size, which may be more than was asked for.
        purpose: what it is in use for.
    """

    __slots__ = ("address", "after", "before", "in_use", "nbytes", "pool", "purpose")

    def __init__(self, pool: tuple[str, bool], address: int, nbytes: int) -> None:
        self.pool = pool
        self.address = address
        self.nbytes = nbytes
        self.in_use = False
        self.purpose = ""
        self.before: Block | None = None
        self.after: Block | None = None


@dataclass
class Use:
    """The most memory that was in use over a time, in bytes, and what for.

    Attributes:
        allocated: in blocks that were in use (``torch.cuda.max_memory_allocated``).
        reserved: taken from the device (``torch.cuda.max_memory_reserved``).
        retries: times that cached segments had to be given back to serve an allocation (``num_alloc_retries``).
        purposes: what the blocks were for when the most was allocated; those still in use with the same purpose summed.
    """

    allocated: int = 0
    reserved: int = 0
    retries: int = 0
    purposes: dict[str, int] = field(default_factory=dict)

    def joined(self, other: Use) -> Use:
        """Over both times."""
        more = self if self.allocated >= other.allocated else other
        reserved = max(self.reserved, other.reserved)
        return Use(more.allocated, reserved, self.retries + other.retries, dict(more.purposes))


class CachingAllocator:
    """Hands out blocks of a device's memory.

    Args:
        capacity: bytes of the device; None for one without limit.

    Attributes:
        allocated: bytes in blocks that are in use.
        reserved: bytes taken from the device, in use or kept for later.
        retries: as in :class:`Use`, since the start.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._free: dict[tuple[str, bool], list[tuple[int, int, Block]]] = defaultdict(list)  # by size, then address
        self._segments = 0
        self._purposes: dict[str, int] = defaultdict(int)
        self._before = Use()
        self._since = Use()
        self.allocated = 0
        self.reserved = 0
        self.retries = 0

    # ---- allocating and freeing

    def allocate(self, nbytes: int, stream: str, purpose: str = "") -> Block:
        """A block of at least ``nbytes`` for the work of a stream.

        Raises:
            torch.OutOfMemoryError: where the device has too little left.
        """
        size = max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)
        pool = (stream, size <= SMALL_SIZE)
        free = self._free[pool]
        place = bisect_left(free, (size,))
        block = free.pop(place)[2] if place < len(free) else self._segment(pool, size, nbytes)
        rest = block.nbytes - size
        if rest >= MIN_BLOCK if pool[1] else rest > SMALL_SIZE:
            self._split(block, size)
        block.in_use, block.purpose = True, purpose
        self.allocated += block.nbytes
        self._purposes[purpose] += block.nbytes
        if self.allocated > self._since.allocated:
            self._since.allocated = self.allocated
            self._since.purposes = {name: used for name, used in self._purposes.items() if used}
        return block

    def free(self, block: Block) -> None:
        """Give a block back; the same stream may have it again at once."""
        assert block.in_use
        block.in_use = False
        self.allocated -= block.nbytes
        self._purposes[block.purpose] -= block.nbytes
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.in_use:
                self._take(neighbour)
                block = self._merged(block, neighbour)
        self._put(block)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.pool, block.address + size, block.nbytes - size)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.nbytes = size
        self._put(rest)

    @staticmethod
    def _merged(one: Block, other: Block) -> Block:
        first, second = sorted((one, other), key=lambda block: block.address)
        first.nbytes += second.nbytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _put(self, block: Block) -> None:
        insort(self._free[block.pool], (block.nbytes, block.address, block))

    def _take(self, block: Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.nbytes, block.address))]

    # ---- segments

    def _segment(self, pool: tuple[str, bool], size: int, asked: int) -> Block:
        """A segment in which ``size`` bytes fit, as one block."""
        if pool[1]:
            nbytes = SMALL_SEGMENT
        elif size < MIN_LARGE:
            nbytes = LARGE_SEGMENT
        else:
            nbytes = -(-size // ROUND_LARGE) * ROUND_LARGE
        if not self._fits(nbytes):
            self.retries += 1
            self._since.retries += 1
            self._release()
            if not self._fits(nbytes):
                raise torch.OutOfMemoryError(self._message(asked))
        self.reserved += nbytes
        self._since.reserved = max(self._since.reserved, self.reserved)
        self._segments += 1
        return Block(pool, self._segments * GAP, nbytes)

    def _fits(self, nbytes: int) -> bool:
        return self._capacity is None or self.reserved + nbytes <= self._capacity

    def _release(self) -> None:
        """Give back every segment of which nothing is in use."""
        for free in self._free.values():
            whole = [entry for entry in free if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(nbytes for nbytes, _, _ in whole)
            free[:] = [entry for entry in free if entry[2].before is not None or entry[2].after is not None]

    def _message(self, asked: int) -> str:
        assert self._capacity is not None
        uses = sorted(self._purposes.items(), key=lambda entry: -entry[1])
        listed = ", ".join(f"{readable(used)} {name}" for name, used in uses if used)
        return (
            f"simulated device out of memory. Tried to allocate {readable(asked)}. It has a total capacity of "
            f"{readable(self._capacity)} of which {readable(self._capacity - self.reserved)} is free. Of the allocated "
            f"memory {readable(self.allocated)} is allocated ({listed}), and "
            f"{readable(self.reserved - self.allocated)} is reserved but unallocated."
        )

    # ---- what was used

    def left(self) -> tuple[int, int] | None:
        """Bytes that were never taken since the last :meth:`reset_peak`, and the device's; None without a limit."""
        if self._capacity is None:
            return None
        return self._capacity - max(self.reserved, self._since.reserved), self._capacity

    def reset_peak(self) -> None:
        """Begin a new time for :meth:`use`."""
        self._before = self.use_since_start()
        self._since = Use(
            self.allocated, self.reserved, 0, {name: used for name, used in self._purposes.items() if used}
        )

    def use(self) -> Use:
        """Since the last :meth:`reset_peak`."""
        return self._since.joined(Use())

    def use_since_start(self) -> Use:
        """Since the start."""
        return self._before.joined(self._since)


def readable(nbytes: int) -> str:
    """Bytes as CUDA's messages give them: ``1.50 GiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"

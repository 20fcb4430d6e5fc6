"""What the C library's heap holds of the host's memory beyond what is in use, without the memory.

PyTorch takes a CPU tensor's memory from ``posix_memalign``, and glibc gives what it is given back to the system only at
the heap's end. The rules are those of https://sourceware.org/git/?p=glibc.git;a=blob;f=malloc/malloc.c with its default
settings: the best fit among free chunks, then the heap's end, then a mapping of its own for a chunk above a threshold
that grows with what is freed.

A tensor's chunk is aligned to 64 bytes, and what is cut off at its ends is smaller than any tensor. Small objects
(nodes of the graph, Python's) take those remainders, so that the hole which the tensor leaves is a little too small for
the next of its size. That is where most of what the heap holds beyond its use comes from.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable

LEAST = 32
"""Bytes of the smallest chunk (``MINSIZE``)."""

ALIGNMENT = 64
"""Of PyTorch's tensors (``gAlignment`` in c10/core/alignment.h)."""

THRESHOLD, MOST_THRESHOLD = 128 << 10, 32 << 20
"""From which size on a chunk has a mapping of its own, at first and at most (``DEFAULT_MMAP_THRESHOLD``)."""

TOP_PAD = 128 << 10
"""What the heap grows by beyond what it must, and keeps at its end (``DEFAULT_TOP_PAD``)."""

PAGE = 4096

CACHED = 7
"""Chunks of a size that a thread's cache keeps; they count as in use (``TCACHE_FILL_COUNT``)."""

TAKEN = 0.065
"""Remainders of each size that small objects hold at a time, as a share of the tensors that a step makes; of the
others, those beside free chunks join them. The number is no rule of glibc's: it was chosen for the first runs of
scripts/plan_accuracy.py, whose record shows how it does on the others."""

STEPS = 3
"""Passes over a step's tensors, after which the heap has found its shape."""

Event = tuple[int, int | None]
"""A tensor's key, and its bytes when it is made, None when it is gone."""


class _Chunk:
    """A part of the heap, free or not, between its neighbours; or a mapping of its own, whose address is -1."""

    __slots__ = ("address", "after", "before", "is_free", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.is_free = False
        self.before: _Chunk | None = None
        self.after: _Chunk | None = None


class Heap:
    """Hands out tensors' memory as glibc does.

    Args:
        taken: remainders of each size that stay in use.

    Attributes:
        reserved: bytes of the heap from its start to its end, and of mappings.
        resident: of them, those that were touched.
        in_use: bytes that were asked for and not freed.
    """

    def __init__(self, taken: int = CACHED) -> None:
        self.in_use = 0
        self._most_taken = taken
        self._threshold = THRESHOLD
        self._free: list[tuple[int, int, _Chunk]] = []  # by size, then address
        self._last: _Chunk | None = None
        self._top = self._end = self._touched = self._mapped = 0
        self._taken: dict[int, int] = defaultdict(int)

    @property
    def reserved(self) -> int:
        return self._end + self._mapped

    @property
    def resident(self) -> int:
        return self._touched + self._mapped

    def allocate(self, nbytes: int) -> _Chunk:
        """A tensor's chunk."""
        size = max(LEAST, -(-(nbytes + 8) // 16) * 16)
        chunk = self._chunk(size + ALIGNMENT + LEAST)
        if chunk.address >= 0:
            lead = -(chunk.address + 16) % ALIGNMENT
            lead += ALIGNMENT if 0 < lead < LEAST else 0
            if lead:
                rest = self._split(chunk, lead)
                self._remainder(chunk)
                chunk = rest
            if chunk.nbytes - size > LEAST:
                self._remainder(self._split(chunk, size))
        self.in_use += chunk.nbytes
        self._touched = max(self._touched, min(self._top, self._end))
        return chunk

    def free(self, chunk: _Chunk) -> None:
        """Give a tensor's chunk back."""
        self.in_use -= chunk.nbytes
        if chunk.address < 0:
            self._mapped -= chunk.nbytes
            if self._threshold < chunk.nbytes <= MOST_THRESHOLD:
                self._threshold = chunk.nbytes
        else:
            self._join(chunk)

    def _chunk(self, size: int) -> _Chunk:
        place = bisect_left(self._free, (size,))
        if place < len(self._free):
            chunk = self._free.pop(place)[2]
            chunk.is_free = False
            if chunk.nbytes - size >= LEAST:
                self._put(self._split(chunk, size))
            return chunk
        if self._end - self._top < size + LEAST:
            if size >= self._threshold:
                mapping = _Chunk(-1, -(-(size + 16) // PAGE) * PAGE)
                self._mapped += mapping.nbytes
                return mapping
            self._end += -(-(size + TOP_PAD + LEAST - (self._end - self._top)) // PAGE) * PAGE
        chunk = _Chunk(self._top, size)
        chunk.before = self._last
        if self._last is not None:
            self._last.after = chunk
        self._last = chunk
        self._top += size
        return chunk

    def _split(self, chunk: _Chunk, size: int) -> _Chunk:
        """Cut a chunk after ``size`` bytes; returns the second part."""
        rest = _Chunk(chunk.address + size, chunk.nbytes - size)
        rest.before, rest.after = chunk, chunk.after
        if chunk.after is None:
            self._last = rest
        else:
            chunk.after.before = rest
        chunk.after, chunk.nbytes = rest, size
        return rest

    def _remainder(self, chunk: _Chunk) -> None:
        if self._taken[chunk.nbytes] < self._most_taken:
            self._taken[chunk.nbytes] += 1
        else:
            self._join(chunk)

    def _join(self, chunk: _Chunk) -> None:
        """Make a chunk free, with its free neighbours, or part of the heap's end."""
        if chunk.before is not None and chunk.before.is_free:
            before = chunk.before
            self._take(before)
            self._merge(before, chunk)
            chunk = before
        chunk.is_free = False
        if chunk.after is None:
            self._top, self._last = chunk.address, chunk.before
            if chunk.before is not None:
                chunk.before.after = None
            if self._end - self._top >= 2 * self._threshold:
                self._end = -(-(self._top + TOP_PAD) // PAGE) * PAGE
                self._touched = min(self._touched, self._end)
            return
        if chunk.after.is_free:
            self._take(chunk.after)
            self._merge(chunk, chunk.after)
        self._put(chunk)

    def _merge(self, chunk: _Chunk, after: _Chunk) -> None:
        chunk.nbytes += after.nbytes
        chunk.after = after.after
        if after.after is None:
            self._last = chunk
        else:
            after.after.before = chunk

    def _put(self, chunk: _Chunk) -> None:
        chunk.is_free = True
        insort(self._free, (chunk.nbytes, chunk.address, chunk))

    def _take(self, chunk: _Chunk) -> None:
        del self._free[bisect_left(self._free, (chunk.nbytes, chunk.address))]


def held_beyond_use(events: Iterable[Event], micro_batches: int = 1) -> int:
    """Bytes that the heap holds at its fullest moment beyond what is in use at the fullest of that.

    Args:
        events: tensors of a micro-batch in the order in which they come and go; what is left goes at its end.
        micro_batches: of a step.
    """
    events = list(events)
    made = micro_batches * sum(nbytes is not None for _, nbytes in events)
    heap = Heap(max(CACHED, round(TAKEN * made)))
    most = used = 0
    for _ in range(STEPS):
        chunks: dict[int, _Chunk] = {}
        for key, nbytes in events:
            if nbytes is not None:
                chunks[key] = heap.allocate(nbytes)
                most, used = max(most, heap.resident), max(used, heap.in_use)
            elif key in chunks:
                heap.free(chunks.pop(key))
        for chunk in chunks.values():
            heap.free(chunk)
    return most - used

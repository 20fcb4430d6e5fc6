"""What the C library's heap holds of the host's memory beyond what is in use, without the memory.

PyTorch takes a CPU tensor's memory from ``posix_memalign``, and glibc gives what it is given back to the system only at
the heap's end. The rules are those of glibc 2.36 with its default settings
(https://sourceware.org/git/?p=glibc.git;a=blob;f=malloc/malloc.c;hb=refs/tags/glibc-2.36); names are its own.

A tensor's chunk is aligned to 64 bytes, and what is cut off at its ends is smaller than any tensor. Small objects take
those remainders, so that the hole which the tensor leaves is a little too small for the next of its size. Those that
stay long are autograd's: what a node of its graph has beside it stays until backward is over. That is where most of
what the heap holds beyond its use comes from.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

MINSIZE = 32
"""Bytes of the smallest chunk."""

ALIGNMENT = 64
"""Of PyTorch's tensors (``gAlignment`` in c10/core/alignment.h)."""

MMAP_THRESHOLD, MMAP_THRESHOLD_MAX = 128 << 10, 32 << 20
"""From which size on a chunk has a mapping of its own, at first and at most: it grows with what is given back."""

TOP_PAD = 128 << 10
"""What the heap grows by beyond what it must, and keeps at its end."""

TRIM_THRESHOLD = 128 << 10
"""What the heap's end has to have for that, at first; twice the other threshold when that has grown."""

PAGE = 4096

TCACHE_COUNT, TCACHE_MOST = 7, 1040
"""Chunks of a size that a thread's cache keeps, and the largest size; they count as in use."""

FASTBIN_MOST, CONSOLIDATION = 128, 64 << 10
"""Bytes of chunks that are not joined with their neighbours before a chunk of so many is given back, or one of
``SMALL`` asked for."""

SMALL = 1024
"""Bytes from which on chunks of about a size share a bin."""

START = 0x290
"""Bytes of the cache, which is the heap's first chunk."""

STEPS, MOST_MICRO_BATCHES = 3, 4
"""That are replayed; the heap has found its shape then."""

STARTS = 12
"""Heaps that differ in what was there before: where small objects come to lie decides how large the holes are, and
equal runs differ by as much as these do. What is told is the mean."""

FREE_BEFORE = {48: 1637, 64: 630, 80: 1353, 96: 230, 112: 7, 128: 20, 144: 22, 160: 5, 176: 2, 320: 6, 528: 3}
"""Chunks of each size that importing libraries and loading a model leave free, between others that stay: those that
``malloc_info`` told in a run of tiny_llama_offload before its first step. Without them more small objects of a step
come to lie between its tensors."""

Event = tuple[int, int | None, bool]
"""A key; bytes when memory is taken, None when it is given back; whether it is a tensor's, which is aligned."""


class Heap:
    """Hands out memory as glibc does: addresses of chunks, counted from the heap's start, below zero for mappings.

    Attributes:
        resident: bytes of the heap that were touched, and of mappings.
        reserved: bytes of the heap from its start to its end, and of mappings.
        in_use: bytes that were asked for and not freed, with what chunks take beside.
        faulted: bytes that were touched for the first time since the system gave them.
    """

    def __init__(self) -> None:
        self.in_use = 0
        self.faulted = START
        self._sizes: dict[int, int] = {}  # of chunks that are in use, or look so to their neighbours
        self._free: dict[int, int] = {}  # their sizes
        self._ends: dict[int, int] = {}  # of free chunks
        self._cache: dict[int, list[int]] = defaultdict(list)
        self._fast: dict[int, list[int]] = defaultdict(list)
        self._unsorted: dict[int, None] = {}  # the first is the oldest
        self._small: dict[int, dict[int, None]] = {}  # by size; the first is the oldest
        self._large: dict[int, list[int]] = {}  # by size, as glibc has them
        self._binned: list[int] = []  # sizes of both
        self._last_remainder = -1
        self._top = self._touched = START
        self._end = START + TOP_PAD + PAGE - (START + TOP_PAD) % PAGE
        self._mapped = 0
        self._mappings = 0
        self._mmap_threshold, self._trim_threshold = MMAP_THRESHOLD, TRIM_THRESHOLD

    @property
    def reserved(self) -> int:
        return self._end + self._mapped

    @property
    def resident(self) -> int:
        return self._touched + self._mapped

    def allocate(self, nbytes: int, *, aligned: bool = True) -> int:
        """``posix_memalign`` as PyTorch calls it for tensors, or ``malloc``."""
        size = max(MINSIZE, (nbytes + 23) & ~15)
        if not aligned:
            cached = self._cache.get(size)
            chunk = cached.pop() if cached else self._malloc(size)
            self.in_use += self._sizes[chunk]
            return chunk
        chunk = self._malloc(size + ALIGNMENT + MINSIZE + 16)  # which counts a chunk's header twice
        lead = -(chunk + 16) % ALIGNMENT if chunk >= 0 else 0
        if lead:
            lead += ALIGNMENT if lead < MINSIZE else 0
            whole = self._sizes[chunk]
            self._sizes[chunk], self._sizes[chunk + lead] = lead, whole - lead
            self._give_back(chunk)
            chunk += lead
        whole = self._sizes[chunk]
        if chunk >= 0 and whole > size + MINSIZE:
            self._sizes[chunk], self._sizes[chunk + size] = size, whole - size
            self._give_back(chunk + size)
        self.in_use += self._sizes[chunk]
        return chunk

    def free(self, chunk: int) -> None:
        """Give a chunk back."""
        size = self._sizes[chunk]
        self.in_use -= size
        if chunk >= 0:
            self._give_back(chunk)
            return
        del self._sizes[chunk]
        self._mapped -= size
        # What the alignment cut off at a mapping's start does not count.
        size -= 48
        if self._mmap_threshold < size <= MMAP_THRESHOLD_MAX:
            self._mmap_threshold, self._trim_threshold = size, 2 * size

    # ---- taking

    def _malloc(self, size: int) -> int:
        """``_int_malloc``."""
        if size <= FASTBIN_MOST and self._fast[size]:
            fast = self._fast[size]
            chunk = fast.pop()
            while fast and len(self._cache[size]) < TCACHE_COUNT:
                self._cache[size].append(fast.pop())
            return chunk
        is_small = size < SMALL
        if is_small:
            if size in self._small:
                chunk = self._oldest(size)
                while size in self._small and len(self._cache[size]) < TCACHE_COUNT:
                    self._cache[size].append(self._oldest(size))
                return chunk
        else:
            self._consolidate()
        while True:
            found = self._sort(size)
            if found is None:
                found = self._fitting(size)
            if found is None and self._end - self._top < size + MINSIZE and self._consolidate():
                continue
            return self._from_top(size) if found is None else found

    def _oldest(self, size: int) -> int:
        chunk = next(iter(self._small[size]))
        self._unlink(chunk)
        self._sizes[chunk] = size
        return chunk

    def _sort(self, size: int) -> int | None:
        """Put chunks that were given back into bins; returns one of just that size."""
        is_cached = False
        while self._unsorted:
            chunk = next(iter(self._unsorted))
            has = self._free[chunk]
            is_remainder = chunk == self._last_remainder and len(self._unsorted) == 1
            if size < SMALL and is_remainder and has > size + MINSIZE:
                self._unlink(chunk)
                self._last_remainder = chunk + size
                self._sizes[chunk] = size
                self._put(chunk + size, has - size)
                return chunk
            del self._unsorted[chunk]
            if has != size:
                self._bin(chunk, has)
                continue
            del self._free[chunk], self._ends[chunk + has]
            self._sizes[chunk] = size
            if size > TCACHE_MOST or len(self._cache[size]) == TCACHE_COUNT:
                return chunk
            self._cache[size].append(chunk)
            is_cached = True
        return self._cache[size].pop() if is_cached else None

    def _bin(self, chunk: int, size: int) -> None:
        if size < SMALL:
            same = self._small.get(size)
            if same is None:
                same = self._small[size] = {}
                insort(self._binned, size)
            same[chunk] = None
        elif size in self._large:
            self._large[size].insert(1, chunk)
        else:
            self._large[size] = [chunk]
            insort(self._binned, size)

    def _fitting(self, size: int) -> int | None:
        """The best fit of the chunks in bins."""
        place = bisect_left(self._binned, size)
        if place == len(self._binned):
            return None
        has = self._binned[place]
        if has < SMALL:
            chunk = next(iter(self._small[has]))
        else:
            same = self._large[has]
            its_own = size >= SMALL and _bin_of(has) == _bin_of(size)
            chunk = same[min(1, len(same) - 1)] if its_own else same[-1]
        self._unlink(chunk)
        if has - size < MINSIZE:
            self._sizes[chunk] = has
        else:
            self._sizes[chunk] = size
            self._put(chunk + size, has - size)
            if size < SMALL:
                self._last_remainder = chunk + size
        return chunk

    def _from_top(self, size: int) -> int:
        """From the heap's end, which grows where it must (``sysmalloc``)."""
        if self._end - self._top < size + MINSIZE:
            if size >= self._mmap_threshold:
                self._mappings += 1
                nbytes = self._sizes[-self._mappings] = -(-(size + 8) // PAGE) * PAGE
                self._mapped += nbytes
                self.faulted += nbytes
                return -self._mappings
            self._end += -(-(size + TOP_PAD + MINSIZE - (self._end - self._top)) // PAGE) * PAGE
        chunk = self._top
        self._sizes[chunk] = size
        self._top += size
        if self._top > self._touched:
            self.faulted += self._top - self._touched
            self._touched = self._top
        return chunk

    # ---- giving back

    def _give_back(self, chunk: int) -> None:
        """``_int_free``."""
        size = self._sizes[chunk]
        if size <= TCACHE_MOST and len(self._cache[size]) < TCACHE_COUNT:
            self._cache[size].append(chunk)
        elif size <= FASTBIN_MOST:
            self._fast[size].append(chunk)
        elif self._join(chunk) >= CONSOLIDATION:
            self._consolidate()
            spare = self._end - self._top
            if spare >= self._trim_threshold:
                self._end -= max(0, spare - MINSIZE - 1 - TOP_PAD) // PAGE * PAGE
                self._touched = min(self._touched, self._end)

    def _consolidate(self) -> bool:
        """Join small chunks with their neighbours; whether there were any."""
        found = False
        for size in sorted(size for size, chunks in self._fast.items() if chunks):
            chunks, self._fast[size] = self._fast[size], []
            found = True
            for chunk in reversed(chunks):
                self._join(chunk)
        return found

    def _join(self, chunk: int) -> int:
        """Make a chunk free, with its free neighbours, or part of the heap's end; returns the bytes of it all."""
        size = self._sizes.pop(chunk)
        if chunk in self._ends:
            before = self._ends[chunk]
            size += self._unlink(before)
            chunk = before
        if chunk + size == self._top:
            self._top = chunk
            return self._end - chunk
        if chunk + size in self._free:
            size += self._unlink(chunk + size)
        self._put(chunk, size)
        return size

    def _put(self, chunk: int, size: int) -> None:
        self._free[chunk] = size
        self._ends[chunk + size] = chunk
        self._unsorted[chunk] = None

    def _unlink(self, chunk: int) -> int:
        """Take a free chunk out of wherever it is."""
        size = self._free.pop(chunk)
        del self._ends[chunk + size]
        if chunk in self._unsorted:
            del self._unsorted[chunk]
            return size
        if size < SMALL:
            small = self._small[size]
            del small[chunk]
            if small:
                return size
            del self._small[size]
        else:
            large = self._large[size]
            large.remove(chunk)
            if large:
                return size
            del self._large[size]
        del self._binned[bisect_left(self._binned, size)]
        return size


def _bin_of(size: int) -> int:
    """The number of a large chunk's bin (``largebin_index_64``)."""
    for shift, most, first in ((6, 48, 48), (9, 20, 91), (12, 10, 110), (15, 4, 119), (18, 2, 124)):
        if size >> shift <= most:
            return first + (size >> shift)
    return 126


@dataclass(frozen=True)
class Step:
    """What the C library is asked for in a step, in the order in which memory comes and goes.

    Attributes:
        inputs: of all micro-batches. What is left of them goes when the next step's are there.
        first: of the first micro-batch. What is left, as gradients, goes when the step ends.
        others: of each other; what is left goes at its end.
        states: bytes of each tensor that comes when the first step ends, and stays.
        micro_batches: number of them.
        early: of those that come in the first step's first micro-batch, by the index of the event before which they do.
    """

    inputs: Sequence[Event]
    first: Sequence[Event]
    others: Sequence[Event] = ()
    states: Sequence[int] = ()
    micro_batches: int = 1
    early: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """Of the heap, the mean over :data:`STARTS`.

    Attributes:
        beyond_use: bytes that it holds at its fullest moment beyond what is in use at the fullest of that.
        faulted: bytes that the system gives anew in every step, page by page: those of mappings, and of the heap's end
            where it was given back.
    """

    beyond_use: int
    faulted: int


def held(step: Step) -> Held:
    """What the heap holds in training."""
    found = [_held(step, start) for start in range(STARTS)]
    return Held(*(sum(values) // STARTS for values in zip(*found, strict=True)))


def _used_before(start: int) -> Heap:
    """As an interpreter leaves it that has imported what a run needs; ``start`` is one of STARTS."""
    heap = Heap()
    sizes = [size for size, number in FREE_BEFORE.items() for _ in range(number)]
    random.Random(start).shuffle(sizes)
    gone = []
    for size in sizes:
        gone.append(heap.allocate(size - 8, aligned=False))
        heap.allocate(MINSIZE - 8, aligned=False)
    for chunk in gone:
        heap.free(chunk)
    return heap


def _held(step: Step, start: int) -> tuple[int, int]:
    heap = _used_before(start)
    most = used = 0

    def play(events: Iterable[Event], early: Mapping[int, Sequence[int]] = MappingProxyType({})) -> list[int]:
        """Returns the chunks that are left."""
        nonlocal most, used
        chunks: dict[int, int] = {}
        for index, (key, nbytes, aligned) in enumerate(events):
            for state in early.get(index, ()):
                heap.allocate(state)
            if nbytes is not None:
                chunks[key] = heap.allocate(nbytes, aligned=aligned)
                most, used = max(most, heap.resident), max(used, heap.in_use)
            elif key in chunks:
                heap.free(chunks.pop(key))
        return list(chunks.values())

    def let_go(chunks: Iterable[int]) -> None:
        for chunk in chunks:
            heap.free(chunk)

    last: list[int] = []
    micro_batches = min(step.micro_batches, MOST_MICRO_BATCHES)
    for number in range(STEPS):
        before = heap.faulted
        inputs = play(step.inputs)
        let_go(last)
        last = inputs
        gradients = play(step.first, step.early) if number == 0 else play(step.first)
        for _ in range(micro_batches - 1):
            let_go(play(step.others))
        if number == 0:
            play((-1 - index, nbytes, True) for index, nbytes in enumerate(step.states))
        let_go(gradients)
    return most - used, (heap.faulted - before) * step.micro_batches // micro_batches

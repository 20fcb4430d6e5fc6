"""The caching allocator's sizes are those that CUDA's rules give, worked out by hand."""

from __future__ import annotations

import random

import pytest
import torch

from offload.simulation.memory import Block, CachingAllocator, readable

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, KIB, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the last MiB is too small to be split off
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (GIB + 1, GIB + 512, GIB + 2 * MIB),
    ],
)
def test_sizes(asked: int, block: int, segment: int) -> None:
    memory = CachingAllocator()
    memory.allocate(asked, "compute")
    assert (memory.allocated, memory.reserved) == (block, segment)


def test_the_best_fit_is_taken_and_split() -> None:
    memory = CachingAllocator()
    large, _, small = (memory.allocate(size * MIB, "compute") for size in (40, 2, 30))
    memory.free(large)
    memory.free(small)
    taken = memory.allocate(20 * MIB, "compute")
    assert taken.address == small.address
    assert memory.allocate(10 * MIB, "compute").address == small.address + 20 * MIB
    assert memory.reserved == 90 * MIB


def test_neighbours_are_joined() -> None:
    memory = CachingAllocator()
    blocks = [memory.allocate(5 * MIB, "compute") for _ in range(4)]  # a 20 MiB segment
    for index in (0, 2, 1, 3):  # before, alone, between two, after
        memory.free(blocks[index])
    assert memory.allocated == 0
    whole = memory.allocate(20 * MIB, "compute")
    assert (whole.address, memory.reserved) == (blocks[0].address, 20 * MIB)


def test_a_hole_that_is_too_small_does_not_serve() -> None:
    memory = CachingAllocator()
    blocks = [memory.allocate(5 * MIB, "compute") for _ in range(4)]
    memory.free(blocks[0])
    memory.free(blocks[2])
    memory.allocate(10 * MIB, "compute")  # of 10 MiB that are free, in two parts
    assert memory.reserved == 30 * MIB


def test_blocks_belong_to_a_stream() -> None:
    memory = CachingAllocator()
    memory.free(memory.allocate(12 * MIB, "compute"))
    memory.free(memory.allocate(12 * MIB, "update"))
    assert memory.reserved == 24 * MIB
    memory.allocate(12 * MIB, "compute")
    assert memory.reserved == 24 * MIB


def test_small_and_large_are_kept_apart() -> None:
    memory = CachingAllocator()
    memory.free(memory.allocate(4 * MIB, "compute"))
    memory.allocate(MIB, "compute")
    assert memory.reserved == 22 * MIB


def test_cached_segments_are_given_back_before_there_is_too_little() -> None:
    memory = CachingAllocator(40 * MIB)
    memory.free(memory.allocate(20 * MIB, "update"))
    memory.allocate(30 * MIB, "compute", "activations")
    assert (memory.retries, memory.reserved) == (1, 30 * MIB)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"Tried to allocate 12.00 MiB. It has a total capacity of 40.00 MiB of which 10.00 MiB is free. Of the "
        r"allocated memory 30.00 MiB is allocated \(30.00 MiB activations\), and 0 bytes is reserved but unallocated.",
    ):
        memory.allocate(12 * MIB, "compute")
    assert (memory.retries, memory.allocated, memory.reserved) == (2, 30 * MIB, 30 * MIB)
    memory.allocate(10 * MIB, "compute")  # goes on working


def test_a_split_segment_is_not_given_back() -> None:
    memory = CachingAllocator(40 * MIB)
    blocks = [memory.allocate(15 * MIB, "compute"), memory.allocate(15 * MIB, "compute")]
    memory.free(blocks[0])
    memory.allocate(5 * MIB, "compute")  # of the first
    with pytest.raises(torch.OutOfMemoryError):
        memory.allocate(22 * MIB, "compute")
    assert memory.reserved == 32 * MIB


def test_peaks_since_the_start_and_since_a_reset() -> None:
    memory = CachingAllocator(64 * MIB)
    kept = memory.allocate(10 * MIB, "compute", "parameters")
    memory.free(memory.allocate(20 * MIB, "compute", "activations"))
    first = memory.use()
    assert first == memory.use_since_start()
    assert (first.allocated, first.reserved, first.retries) == (30 * MIB, 30 * MIB, 0)
    assert first.purposes == {"parameters": 10 * MIB, "activations": 20 * MIB}
    memory.reset_peak()
    assert memory.use().purposes == {"parameters": 10 * MIB}
    memory.allocate(40 * MIB, "update", "states")  # the cached 20 MiB are given back for it
    memory.free(kept)
    since = memory.use()
    assert (since.allocated, since.reserved, since.retries) == (50 * MIB, 50 * MIB, 1)
    assert since.purposes == {"parameters": 10 * MIB, "states": 40 * MIB}
    assert memory.use_since_start() == since
    memory.reset_peak()
    assert (memory.use().allocated, memory.use().reserved, memory.use().retries) == (40 * MIB, 50 * MIB, 0)
    assert memory.use_since_start() == since


@pytest.mark.parametrize("seed", range(5))
def test_blocks_in_use_never_overlap(seed: int) -> None:
    chosen, memory = random.Random(seed), CachingAllocator(600 * MIB)
    held: list[tuple[Block, int]] = []
    for _ in range(2000):
        if held and chosen.random() < 0.5:
            memory.free(held.pop(chosen.randrange(len(held)))[0])
        else:
            asked = int(2 ** chosen.uniform(0, 26))
            try:
                held.append((memory.allocate(asked, chosen.choice(["compute", "update"])), asked))
            except torch.OutOfMemoryError:
                continue
        ends = sorted((block.address, block.address + block.nbytes) for block, _ in held)
        assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:], strict=False))
        assert all(asked <= block.nbytes for block, asked in held)
        assert memory.allocated == sum(block.nbytes for block, _ in held) <= memory.reserved <= 600 * MIB
    for block, _ in held:
        memory.free(block)
    memory.allocate(1, "down")
    with pytest.raises(torch.OutOfMemoryError):
        memory.allocate(600 * MIB, "down")
    assert memory.reserved == 2 * MIB  # everything else was whole again, and given back


def test_readable_sizes() -> None:
    assert [readable(n) for n in (3, 1536, 3 * MIB, 5 * GIB // 2)] == ["3 bytes", "1.50 KiB", "3.00 MiB", "2.50 GiB"]

"""Ranges of the ring: never written while something still reads them, and waited for no earlier than that."""

from __future__ import annotations

import random
from collections import deque

import pytest

from offload.optim.ring import Ring


class Reader:
    """Work that reads a range, queued on a device, which gets to it when somebody waits for it or for later work."""

    def __init__(self, device: Device, start: int, size: int) -> None:
        self.device = device
        self.units = set(range(start, start + size))

    def synchronize(self) -> None:
        self.device.waits += 1
        while self in self.device.queue:
            self.device.queue.popleft()


class Device:
    def __init__(self) -> None:
        self.queue: deque[Reader] = deque()
        self.waits = 0

    def read(self, ring: Ring, start: int, size: int) -> None:
        reader = Reader(self, start, size)
        assert not any(reader.units & other.units for other in self.queue), "still to be read"
        self.queue.append(reader)
        ring.read_until(reader, start, size)


@pytest.mark.parametrize("seed", range(20))
def test_no_range_is_handed_out_while_it_is_read(seed: int) -> None:
    draw = random.Random(seed)
    ring, device = Ring(draw.choice([16, 97, 100])), Device()
    for _ in range(400):
        size = draw.choice([1, 2, 3, 7, 16]) if draw.random() < 0.9 else ring.size
        size = min(size, ring.size)
        start = ring.take(size)
        assert 0 <= start <= ring.size - size
        if draw.random() < 0.9:  # or nothing was launched
            device.read(ring, start, size)
        while device.queue and draw.random() < 0.3:
            device.queue.popleft()


def test_the_cpu_runs_ahead_by_as_much_as_fits() -> None:
    ring, device = Ring(100), Device()
    for _ in range(10):
        device.read(ring, ring.take(10), 10)
    assert device.waits == 0 and len(device.queue) == 10
    device.read(ring, ring.take(10), 10)
    assert device.waits == 1 and len(device.queue) == 10
    # Two of ten are in the way of fifteen.
    ring.take(15)
    assert device.waits == 3 and len(device.queue) == 8


def test_what_was_read_long_ago_at_the_end_is_in_nobodys_way() -> None:
    """A lap that ends earlier than the one before leaves ranges behind it; those after them are still waited for."""
    ring, device = Ring(100), Device()
    for size in (50, 50, 70):
        device.read(ring, ring.take(size), size)
    assert ring.take(40) == 0
    assert not device.queue


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="101 units of a ring of 100"):
        Ring(100).take(101)

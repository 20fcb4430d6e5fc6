"""The heap's rules against glibc itself, and by hand."""

from __future__ import annotations

import json
import platform
import random
import subprocess
import sys

import pytest

from offload.plan.heap import Heap, held_beyond_use

MIB = 1 << 20

PROGRAM = """
import ctypes, json, sys
libc = ctypes.CDLL(None)
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
libc.mallinfo2.restype = Info
libc.free.argtypes = [ctypes.c_void_p]
libc.posix_memalign.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
events, found, at = json.load(sys.stdin), [], {}
slots = (ctypes.c_void_p * (1 + max(key for key, _ in events)))()
start = libc.mallinfo2()
for key, nbytes in events:
    if nbytes is None:
        libc.free(slots[key])
    else:
        libc.posix_memalign(ctypes.addressof(slots) + 8 * key, 64, nbytes)
    now = libc.mallinfo2()
    found.append(now.arena + now.hblkhd - start.arena - start.hblkhd)
print(json.dumps(found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the rules are glibc's")
@pytest.mark.parametrize("seed", [0, 1])
def test_it_grows_and_shrinks_as_glibc_does(seed: int) -> None:
    """In a process without small objects that take remainders, but for the cache of its thread. Whether a tensor leaves
    a remainder at its end depends on its address, which is not known here: a tensor's memory or two may differ."""
    chosen = random.Random(seed)
    events: list[tuple[int, int | None]] = []
    alive: list[int] = []
    for key in range(300):
        while alive and (len(alive) > 40 or chosen.random() < 0.45):
            events.append((alive.pop(chosen.randrange(len(alive))), None))
        events.append((key, chosen.choice([4, 4, 4, 1, 8, 11, 40]) * MIB // 4))
        alive.append(key)
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(events), capture_output=True, text=True, check=True
    ).stdout
    mine, chunks, found = Heap(), {}, []
    for key, nbytes in events:
        if nbytes is None:
            mine.free(chunks.pop(key))
        else:
            chunks[key] = mine.allocate(nbytes)
        found.append(mine.reserved)
    theirs = json.loads(told)
    assert max(found) == pytest.approx(max(theirs), rel=0.12)
    off = sorted(abs(one - other) for one, other in zip(found, theirs, strict=True))
    assert off[len(off) // 2] < 0.1 * max(theirs)


def test_a_hole_is_too_small_for_the_next_of_its_size() -> None:
    def held(taken: int) -> int:
        mine = Heap(taken)
        first = mine.allocate(31 * MIB)  # which sets the threshold when it goes
        mine.free(first)
        one, _ = mine.allocate(4 * MIB), mine.allocate(4 * MIB)
        mine.free(one)
        mine.allocate(4 * MIB)
        return round(mine.resident / MIB)

    assert held(7) == 12
    assert held(0) == 8  # then the hole is whole again


def test_large_tensors_have_mappings_that_go_with_them() -> None:
    mine = Heap()
    chunks = [mine.allocate(64 * MIB) for _ in range(3)]
    assert mine.resident == pytest.approx(192 * MIB, rel=1e-3)
    for chunk in chunks:
        mine.free(chunk)
    assert mine.resident == 0 and mine.in_use == 0
    assert held_beyond_use([(0, 64 * MIB), (1, 64 * MIB), (0, None), (1, None)]) == 0

"""The heap's rules against glibc itself, and by hand."""

from __future__ import annotations

import platform
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from offload.plan.heap import MMAP_THRESHOLD_MAX, STARTS, Event, Heap, Held, Step, _used_before, held

MIB = 1 << 20

PROGRAM = """
#include <malloc.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>
static struct { int64_t key, nbytes, aligned; } events[20000];
static void *slots[20000];
static int64_t found[20000][3];
int main(void) {
  size_t size = 0, count;
  ssize_t part;
  while ((part = read(0, (char *)events + size, sizeof events - size)) > 0) size += part;
  count = size / sizeof *events;
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  void *volatile first = malloc(24);
  free(first);
  memset(found, 1, sizeof found);
  for (size_t i = 0; i < count; i++) {
    void **slot = &slots[events[i].key];
    if (events[i].nbytes < 0) free(*slot);
    else if (events[i].aligned) { if (posix_memalign(slot, 64, events[i].nbytes)) return 1; }
    else *slot = malloc(events[i].nbytes);
    if (events[i].nbytes > 0) memset(*slot, 1, events[i].nbytes);
    struct mallinfo2 now = mallinfo2();
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    found[i][0] = (char *)*slot - (char *)first;
    found[i][1] = now.arena + now.hblkhd;
    found[i][2] = usage.ru_minflt;
  }
  size = sizeof *found * count;
  for (char *rest = (char *)found; size; rest += part, size -= part) if ((part = write(1, rest, size)) < 0) return 1;
  return 0;
}
"""


@pytest.fixture(scope="module")
def glibc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that does what it is told with glibc's heap, in which nothing else is."""
    if platform.libc_ver() != ("glibc", "2.36") or shutil.which("cc") is None:
        pytest.skip("the rules are those of glibc 2.36, and a C compiler asks it")
    folder = tmp_path_factory.mktemp("glibc")
    (folder / "heap.c").write_text(PROGRAM)
    subprocess.run(["cc", "-o", folder / "heap", folder / "heap.c"], check=True)
    return folder / "heap"


@pytest.mark.parametrize("seed", range(4))
def test_every_address_is_glibcs(glibc: Path, seed: int) -> None:
    """Tensors and small objects, taken and given back in any order; and pages that are new."""
    chosen = random.Random(seed)
    events: list[Event] = []
    alive: list[int] = []
    for key in range(3000):
        while alive and (len(alive) > 150 or chosen.random() < 0.45):
            events.append((alive.pop(chosen.randrange(len(alive))), None, False))
        aligned = chosen.random() < 0.4
        sizes = (4, 2621, 78643, *3 * (MIB,), MIB // 4, 2 * MIB, 11 * MIB // 4, 10 * MIB)
        objects = (24, 24, 40, 104, 184, 300, 500, 700, 2000)
        events.append((key, chosen.choice(sizes if aligned else objects), aligned))
        alive.append(key)
    told = b"".join(struct.pack("qqq", key, -1 if size is None else size, aligned) for key, size, aligned in events)
    theirs = struct.iter_unpack("qqq", subprocess.run([glibc], input=told, capture_output=True, check=True).stdout)
    mine, chunks = Heap(), {}
    first = mine.allocate(24, aligned=False)
    mine.free(first)
    mapped, faults = 0, []
    for (key, size, aligned), (place, reserved, pages) in zip(events, theirs, strict=True):
        if size is None:
            mine.free(chunks.pop(key))
        else:
            chunk = chunks[key] = mine.allocate(size, aligned=aligned)
            assert chunk < 0 or chunk - first == place
            mapped += chunk < 0
        assert mine.reserved == reserved
        faults.append((mine.faulted, 4096 * pages))
    assert mapped
    mine_first, theirs_first = faults[0]
    assert faults[-1][0] - mine_first == pytest.approx(faults[-1][1] - theirs_first, rel=0.01)
    assert faults[-1][0] > 1.5 * mine.resident


def left(objects: int) -> int:
    """MiB of a heap of 64 tensors of 1 MiB when one a little smaller has come for every second one, and so many small
    objects in between."""
    mine = Heap()
    mine.free(mine.allocate(31 * MIB))  # which sets the threshold
    chunks = [mine.allocate(MIB) for _ in range(64)]
    for index in range(objects):
        mine.allocate((24, 40, 56, 72, 104)[index % 5], aligned=False)
    for chunk in chunks[::2]:
        mine.free(chunk)
    for _ in chunks[::2]:
        mine.allocate(MIB - 16)
    return round(mine.resident / MIB)


def test_a_hole_is_too_small_where_objects_have_taken_its_remainders() -> None:
    """Of 64 remainders at the tensors' starts the cache has seven."""
    assert left(objects=0) < 75
    assert left(objects=400) > 90


def test_large_tensors_have_mappings_that_go_with_them() -> None:
    mine = Heap()
    start = mine.resident
    chunks = [mine.allocate(2 * MMAP_THRESHOLD_MAX) for _ in range(3)]
    assert mine.resident == pytest.approx(192 * MIB, rel=1e-3)
    for chunk in chunks:
        mine.free(chunk)
    assert mine.resident == start and mine.in_use == 0
    events = [(0, 64 * MIB, True), (1, 64 * MIB, True), (0, None, True), (1, None, True)]
    found = held(Step((), events))
    assert found.beyond_use < MIB
    assert found.faulted == pytest.approx(128 * MIB, rel=1e-3)


def test_the_pages_of_all_micro_batches_are_new() -> None:
    """Of more of them than are replayed, too."""
    events = [(0, 64 * MIB, True), (0, None, True)]
    assert held(Step((), events, events, micro_batches=10)).faulted == pytest.approx(640 * MIB, rel=1e-3)


def test_what_the_heap_keeps_is_not_new() -> None:
    events = [(0, 8 * MIB, True), (1, 2 * MIB, True), (0, None, True), (1, None, True)]
    assert held(Step((), events)).faulted < MIB


def follow(monkeypatch: pytest.MonkeyPatch, step: Step, *sizes: int) -> list[str]:
    """What becomes of tensors of these bytes: a line for each that comes (``+``) or goes (``-``), of one heap."""
    seen: list[str] = []
    allocate, free = Heap.allocate, Heap.free
    at: dict[int, int] = {}

    def allocated(self: Heap, nbytes: int, *, aligned: bool = True) -> int:
        chunk = allocate(self, nbytes, aligned=aligned)
        if nbytes in sizes:
            at[chunk] = nbytes
            seen.append(f"+{nbytes}")
        return chunk

    def freed(self: Heap, chunk: int) -> None:
        if chunk in at:
            seen.append(f"-{at.pop(chunk)}")
        free(self, chunk)

    monkeypatch.setattr("offload.plan.heap.STARTS", 1)
    monkeypatch.setattr(Heap, "allocate", allocated)
    monkeypatch.setattr(Heap, "free", freed)
    held(step)
    return seen


INPUT, GRADIENT, SUMMED, STATE = 5000, 6000, 7000, 8000


def test_inputs_go_when_the_next_steps_are_there_and_states_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """States come while gradients are still there, in whose room they cannot be."""
    step = Step([(0, INPUT, True)], [(1, GRADIENT, True)], (), [STATE])
    first = ["+5000", "+6000", "+8000", "-6000"]
    assert follow(monkeypatch, step, INPUT, GRADIENT, STATE) == first + 2 * ["+5000", "-5000", "+6000", "-6000"]


def test_states_of_updates_in_backward_come_among_the_first_steps_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [(1, GRADIENT, True), (1, None, True), (2, SUMMED, True), (2, None, True)]
    every = ["+6000", "-6000", "+7000", "-7000"]
    step = Step((), events, early={1: [STATE], 3: [STATE]})
    first = ["+6000", "+8000", "-6000", "+7000", "+8000", "-7000"]
    assert follow(monkeypatch, step, GRADIENT, SUMMED, STATE) == first + 2 * every


def test_what_the_first_micro_batch_leaves_stays_until_the_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step((), [(1, GRADIENT, True)], [(2, SUMMED, True)], (), micro_batches=3)
    assert follow(monkeypatch, step, GRADIENT, SUMMED) == 3 * ["+6000", "+7000", "-7000", "+7000", "-7000", "-6000"]


def test_a_heap_begins_with_the_small_holes_of_an_interpreter() -> None:
    """Small objects take those, and a tensor's hole stays whole until they are used up."""
    heap = _used_before(0)
    tensor = heap.allocate(100_000)
    heap.allocate(24, aligned=False)
    heap.free(tensor)
    heap.allocate(300_000)  # which puts what is free into bins
    for size in (40, 56, 72):
        for _ in range(200):
            heap.allocate(size, aligned=False)
    assert heap.allocate(100_000 - 16) == tensor


def test_of_heaps_that_differ_it_tells_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(range(STARTS))
    monkeypatch.setattr("offload.plan.heap._held", lambda *_: (10 * next(told), 5))
    assert held(Step((), ())) == Held(10 * sum(range(STARTS)) // STARTS, 5)

"""What is read beside training is as it was, whoever comes first, and takes no more memory than was reserved."""

from __future__ import annotations

import itertools
import math
import threading
from random import Random
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from offload.engine import copy_on_write, units
from offload.engine.copy_on_write import CopyOnWrite, Memory, Room, Snapshot
from offload.engine.memory import ALIGNMENT, HostMemory
from offload.engine.runtime import HostRuntime
from offload.engine.units import flat_bytes
from offload.simulation.accelerator import SimulatedAccelerator

SOON = 0.2
"""Seconds in which a thread that is not blocked is done."""


def snapshot_of(runtime: Any, room: int, **tensors: Tensor) -> Snapshot:
    parts = {name: [Memory(flat_bytes(tensor), flat_bytes(tensor))] for name, tensor in tensors.items()}
    snapshot = Snapshot(runtime, Room(HostMemory(runtime), room), parts)
    snapshot.expect(tensors.values())
    return snapshot


def started(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("has_room", [True, False])
def test_an_update_waits_for_who_is_reading(has_room: bool) -> None:
    tensor = torch.arange(1000.0)
    snapshot = snapshot_of(HostRuntime(), 1 << (16 if has_room else 8), a=tensor)
    with snapshot.reading(tensor) as values:
        update = started(lambda: (snapshot.before_update("a"), tensor.zero_()))
        update.join(SOON)
        assert update.is_alive() and torch.equal(values, torch.arange(1000.0))
    update.join(SOON)
    assert update.is_alive() is not has_room
    if has_room:
        with snapshot.reading(tensor) as values:
            assert torch.equal(values, torch.arange(1000.0))
    snapshot.done(tensor)
    update.join()
    assert not tensor.any()


def test_an_update_waits_for_room_and_for_nothing_that_was_read() -> None:
    a, b = torch.ones(1000), torch.ones(1000)
    snapshot = snapshot_of(HostRuntime(), 1 << 13, a=a, b=b)  # half of it for what is on its way to a reader
    snapshot.before_update("a")
    a.zero_()
    update = started(lambda: (snapshot.before_update("b"), b.zero_()))
    update.join(SOON)
    assert update.is_alive()
    with snapshot.reading(a) as values:
        assert values.all()
    snapshot.done(a)
    update.join()
    with snapshot.reading(b) as values:
        assert values.all()
    snapshot.done(b)
    snapshot.before_update("a")
    assert snapshot._room.used == 0


def test_room_that_is_copied_into_is_not_used_again() -> None:
    with SimulatedAccelerator(order="late") as simulator:
        on_host = simulator.empty_pinned(512).fill_(1)
        on_device = simulator.empty_device(512).fill_(2)
        simulator.finish()
        snapshot = snapshot_of(simulator, 1 << 10, device=on_device, host=on_host)
        snapshot.before_update("device")
        snapshot.done(on_device)  # was read before
        snapshot.before_update("host")
        on_host.zero_()
        with snapshot.reading(on_host) as values:
            assert values.eq(1).all()
        snapshot.close()
        simulator.finish()


def test_what_the_caller_has_queued_is_done_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates at once, on the caller's stream, are nothing that the engine waits for."""
    with SimulatedAccelerator(order="late") as simulator:
        weight = simulator.empty_device(512)
        monkeypatch.setattr(CopyOnWrite, "_changed_by", lambda self, piece: iter([Memory(piece, piece)]))
        snapshots = CopyOnWrite(simulator, HostMemory(simulator), cast(Any, None), None)
        snapshots.reserve(1 << 12)
        weight.fill_(3)
        snapshot = snapshots.take([cast(Any, weight)])
        snapshot.expect([weight])
        with snapshot.reading(weight) as values:
            assert values.eq(3).all()
        snapshot.close()
        simulator.finish()


def test_what_may_be_lost_is_not_read() -> None:
    a, b = torch.ones(4), torch.ones(4)
    snapshot = snapshot_of(HostRuntime(), 1 << 10, a=a)
    with snapshot.reading(b) as values:  # nothing that updates change
        assert values.all()
    snapshot.done(a)
    with pytest.raises(RuntimeError, match="after it was done with"), snapshot.reading(a):
        pass


def test_a_reader_that_gives_up_lets_updates_go_on() -> None:
    tensor = torch.ones(1000)
    snapshot = snapshot_of(HostRuntime(), 1 << 8, a=tensor)
    update = started(lambda: snapshot.before_update("a"))
    update.join(SOON)
    assert update.is_alive()
    snapshot.close()
    update.join()


@pytest.mark.parametrize("nbytes", [1 << 31, 3 << 30, (1 << 30) + (1 << 29) + 4096, (1 << 20) + ALIGNMENT])
def test_room_is_as_large_as_was_asked_for(nbytes: int) -> None:
    class Pinned(HostRuntime):
        shares_memory = False

        def empty_pinned(self, nbytes: int) -> Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    memory = HostMemory(Pinned())
    Room(memory, nbytes)
    assert memory.report() == {"pinned_host": {"checkpoint": nbytes}}


@pytest.mark.parametrize("strategy", ["host", "stream", "resident"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_tensors_in_several_pieces(strategy: Any, in_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "CHUNK_ELEMENTS", 64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 1))
    optimizer = OffloadOptimizer(
        model.named_parameters(), "offload.optim.AdamW", strategy=strategy, update_in_backward=in_backward, lr=0.1
    )
    optimizer.reserve_snapshot(1 << 16)

    def step() -> None:
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = optimizer.state_dict()["state"].values()
    live = [*model.state_dict().values(), *(v for state in states for v in state.values() if v.dim())]
    want = [tensor.clone() for tensor in live]
    snapshot = optimizer.snapshot()
    assert all(map(snapshot.holds, live))
    snapshot.expect(live)
    for tensor, values in zip(live[::2], want[::2], strict=True):
        with snapshot.reading(tensor) as read:
            assert torch.equal(read, values)
        snapshot.done(tensor)
    for _ in range(2):
        step()
    assert not torch.equal(live[1], want[1])
    for tensor, values in zip(live[1::2], want[1::2], strict=True):
        with snapshot.reading(tensor) as read:
            assert torch.equal(read, values)
        snapshot.done(tensor)
    assert snapshot._room.used == 0
    snapshot.close()


@pytest.mark.parametrize("seed", range(4))
def test_room_is_given_once_and_comes_back(seed: int) -> None:
    """Buffers never overlap, and what is refused takes nothing."""
    random = Random(seed)
    room = Room(HostMemory(HostRuntime()), 1 << 13)
    most = 1 << 12  # half is for what is on its way to a reader
    taken: list[tuple[list[Tensor], int]] = []
    refused = 0
    for number in range(1, 120):
        if taken and random.random() < 0.45:
            buffers, written = taken.pop(random.randrange(len(taken)))
            assert all(buffer.eq(written).all() for buffer in buffers)
            room.give_back(buffers)
        sizes = [random.randint(1, 700) for _ in range(random.randint(1, 4))]
        before = room.used
        found = room.take(sizes)
        if found is None:
            refused += 1
            assert room.used == before
        else:
            assert [buffer.numel() for buffer in found] == sizes
            taken.append(([buffer.fill_(number % 256) for buffer in found], number % 256))
    assert refused
    for buffers, _ in taken:
        room.give_back(buffers)
    assert room.used == 0 and not room._places
    assert room.take([most]) is not None and room.take([1]) is None


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_whoever_reads_whatever_part_reads_one_moment(
    seed: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors in pieces that no two updates share, read whole, by rows and transposed, between updates in any order."""
    monkeypatch.setattr(copy_on_write, "STEP_BYTES", 300)
    random = Random(seed)
    with SimulatedAccelerator(order="late") as simulator:
        runtime: Any = simulator if on_device else HostRuntime()

        def memory(nbytes: int) -> Tensor:
            made = simulator.empty_device(nbytes) if on_device else torch.empty(nbytes, dtype=torch.uint8)
            return made.copy_(torch.randint(256, (nbytes,), dtype=torch.uint8))

        weight, state = (memory(4 * 30 * 20).view(torch.int32).view(30, 20) for _ in range(2))
        nothing = memory(0)
        cuts = sorted(random.sample(range(1, 600), 4))
        parts: dict[Any, list[Memory]] = {}
        for begin, end in itertools.pairwise([0, *cuts, 600]):
            live = [flat_bytes(each.view(-1)[begin:end]) for each in (state, weight)]
            parts[begin] = [Memory(each, each) for each in (live[0], nothing, live[1])]
        simulator.finish()
        snapshot = Snapshot(runtime, Room(HostMemory(runtime), 1 << 16), parts)
        tensors = [weight, state.t(), weight[3:5], state[29:], weight.t()[:, :1], state.view(-1)[cuts[0] : cuts[1]]]
        tensors = [each for each in tensors if each.is_contiguous() or each.t().is_contiguous()]
        reads = [(each, each.cpu().clone()) for each in tensors]
        simulator.finish()
        snapshot.expect(tensors)
        todo: list[Any] = [*reads, *parts]
        random.shuffle(todo)
        for each in todo:
            if isinstance(each, tuple):
                tensor, want = each
                with snapshot.reading(tensor) as values:
                    assert torch.equal(values, want) and values.shape == tensor.shape
                snapshot.done(tensor)
            else:
                snapshot.before_update(each)
                for changed in parts[each]:
                    changed.live.fill_(random.randrange(256))
        assert snapshot._room.used == 0
        simulator.finish()


def test_a_snapshot_knows_what_updates_change_and_when() -> None:
    changed, other = torch.zeros(12), torch.zeros(12)
    pieces = map(flat_bytes, (changed[6:9], changed[:6]))
    parts: dict[Any, list[Memory]] = {key: [Memory(live, live)] for key, live in enumerate(pieces)}
    snapshot = Snapshot(HostRuntime(), Room(HostMemory(HostRuntime()), 1 << 10), parts)
    assert [snapshot.position(each) for each in (changed[:6], changed[6:9], changed[:9], other)] == [1, 0, 0, math.inf]
    assert snapshot.holds(changed[2:9]) and snapshot.holds(changed[8:9])
    assert not any(map(snapshot.holds, (changed, changed[9:], other, changed[:0])))


def test_one_of_two_readers_leaves_and_the_update_waits_for_the_other() -> None:
    tensor = torch.ones(8)
    snapshot = snapshot_of(HostRuntime(), 1 << 10, a=tensor)
    with snapshot.reading(tensor):
        with snapshot.reading(tensor):
            pass
        update = started(lambda: snapshot.before_update("a"))
        update.join(SOON)
        assert update.is_alive()
    update.join()
    snapshot.close()


def test_the_next_snapshot_waits_for_the_one_before() -> None:
    snapshots = CopyOnWrite(HostRuntime(), HostMemory(HostRuntime()), cast(Any, None), None)
    with pytest.raises(RuntimeError, match="reserve_snapshot"):
        snapshots.take([])
    snapshots.reserve(1 << 10)
    first = snapshots.take([])
    second = started(lambda: snapshots.take([]))
    second.join(SOON)
    assert second.is_alive()
    first.close()
    second.join()


def test_what_lies_in_two_parts_on_a_device_is_brought_side_by_side() -> None:
    """As a step of a tensor above the largest piece: an embedding's."""
    with SimulatedAccelerator(order="late") as simulator:
        tensor = simulator.empty_device(512)
        tensor[:256].fill_(1)
        tensor[256:].fill_(2)
        simulator.finish()
        parts: dict[Any, list[Memory]] = {key: [Memory(live, live)] for key, live in enumerate(tensor.split(256))}
        snapshot = Snapshot(simulator, Room(HostMemory(simulator), 1 << 11), parts)
        snapshot.expect([tensor])
        with snapshot.reading(tensor) as values:
            assert values[:256].eq(1).all() and values[256:].eq(2).all()
        snapshot.close()
        simulator.finish()


def test_what_was_read_while_it_was_kept_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedAccelerator(order="late") as simulator:
        tensor = simulator.empty_device(512).fill_(1)
        simulator.finish()
        snapshot = snapshot_of(simulator, 1 << 11, a=tensor)
        copy = simulator.copy

        def read_meanwhile(*args: Any) -> Any:
            with snapshot.reading(tensor):
                pass
            snapshot.done(tensor)
            return copy(*args)

        with snapshot.reading(tensor):
            pass
        monkeypatch.setattr(simulator, "copy", lambda *args: (monkeypatch.undo(), read_meanwhile(*args))[1])
        snapshot.before_update("a")
        assert snapshot._room.used == 0
        simulator.finish()


def test_weights_that_the_cpu_updates_are_read_from_the_host(simulated: SimulatedAccelerator) -> None:
    model = nn.Linear(16, 24)
    optimizer = OffloadOptimizer(model.named_parameters(), strategy="host", lr=0.1)
    optimizer.reserve_snapshot(1 << 16)
    snapshot = optimizer.snapshot()
    memory = [each for part in snapshot._parts.values() for each in part.memory]
    live = [each for each in memory if not simulated.is_on_host(each.live)]
    assert len(live) == 2 and all(simulated.is_on_host(each.source) for each in live)
    snapshot.close()

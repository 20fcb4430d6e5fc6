"""What is read beside training is as it was, whoever comes first, and takes no more memory than was reserved."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from offload.engine import units
from offload.engine.copy_on_write import CopyOnWrite, Memory, Room, Snapshot
from offload.engine.memory import HostMemory
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


@pytest.mark.parametrize("nbytes", [1 << 31, 3 << 30, (1 << 30) + (1 << 29) + 4096])
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

"""Bandwidth that is shared: nothing gets more than there is, and all of what is asked for is done."""

from __future__ import annotations

import random

import pytest
import torch

from offload.simulation.accelerator import Rates, SimulatedAccelerator
from offload.simulation.ledger import RaceError
from offload.simulation.sharing import Sharing

LINK = {"copy": {"link": 1.0}, "collective": {"link": 0.7}, "far": {"link": 2.0, "memory": 0.5}}


def test_alone_at_full_speed() -> None:
    sharing = Sharing(LINK)
    assert sharing.run("copy", 1.0, 2.0) == 3.0
    assert sharing.run("", 1.0, 2.0) == 3.0  # uses nothing that is shared
    assert sharing.run("copy", 5.0, 0.0) == 5.0


def test_a_share_above_one_limits() -> None:
    assert Sharing(LINK).run("far", 1.0, 2.0) == 5.0
    assert Sharing({"copy": {"memory": 1e9}}).run("copy", 1.0, 2e-9) == pytest.approx(3.0)


def test_what_comes_later_gets_what_is_left() -> None:
    sharing = Sharing(LINK)
    assert sharing.run("collective", 0.0, 4.0) == 4.0
    # 0.3 of the link for four seconds, and then all of it for 1.8.
    assert sharing.run("copy", 0.0, 3.0) == pytest.approx(5.8)
    assert sharing.run("copy", 0.0, 1.0) == pytest.approx(6.8)


def test_a_gap_is_filled() -> None:
    sharing = Sharing(LINK)
    assert sharing.run("copy", 10.0, 2.0) == 12.0
    assert sharing.run("copy", 8.0, 3.0) == pytest.approx(13.0)
    assert sharing.run("copy", 0.0, 3.0) == 3.0


@pytest.mark.parametrize("seed", range(5))
def test_never_more_than_there_is(seed: int) -> None:
    """Random work, looked at in small steps of time by somebody else's arithmetic."""
    chance = random.Random(seed)
    sharing = Sharing(LINK)
    asked = {"link": 0.0, "memory": 0.0}
    for _ in range(60):
        kind, seconds = chance.choice(list(LINK)), chance.uniform(0.1, 3.0)
        begin = chance.uniform(0.0, 50.0)
        end = sharing.run(kind, begin, seconds)
        assert end >= begin + seconds * max(1.0, *LINK[kind].values()) - 1e-6
        for name, share in LINK[kind].items():
            asked[name] += share * seconds
    for name, total in asked.items():
        profile = sharing._used[name]
        step = 0.001
        levels = [profile.at(index * step)[0] for index in range(400_000)]
        assert max(levels) <= 1.0 + 1e-6
        assert sum(levels) * step == pytest.approx(total, rel=0.01)


def test_what_is_forgotten_is_over() -> None:
    sharing = Sharing(LINK)
    sharing.run("copy", 0.0, 1.0)
    sharing.run("copy", 2.0, 1.0)
    sharing.forget(2.5)
    assert sharing.run("copy", 2.5, 1.0) == pytest.approx(4.0)
    assert sharing.seconds(0.0, 1.5) == {"link": 1.0, "memory": 0.0}


def test_copies_work_and_transfers_share() -> None:
    uses = {kind: {"memory": 1.0} for kind in ("up", "host", "other")}
    with SimulatedAccelerator(Rates(up=8.0, host=8.0), order="time", sharing=Sharing(uses)) as sim:
        host, device = sim.empty_pinned(32), torch.zeros(32, dtype=torch.uint8)
        mine = sim.empty_pinned(16)
        ready = sim.copy(device, host, "up", (sim.record(),))
        sim.transfer(2.0, "other", "other")
        assert sim.now("compute") == pytest.approx(6.0)  # behind the copy of four seconds
        sim.start(lambda: mine.add_(1), "worker").join()
        assert sim.now("worker") == pytest.approx(10.0)  # 16 bytes read and written
        ready.synchronize()


def test_a_transfer_reads_and_writes() -> None:
    with SimulatedAccelerator(streams=("library",)) as sim:
        values = torch.zeros(4)
        with sim.on("library"), pytest.raises(RaceError, match="nothing orders"):
            sim.transfer(0.0, "gather", "", writes=[values])


def test_a_storage_gives_its_memory_back_and_gets_other() -> None:
    with SimulatedAccelerator(streams=("library",)) as sim:
        values = torch.zeros(2**20)
        assert sim.memory.allocated == 2**22
        sim.resize(values, 0)
        assert sim.memory.allocated == 0
        sim.resize(values, values.nbytes)
        values.fill_(1.0)
        assert sim.memory.allocated == 2**22
        ready = sim.record()
        with sim.on("library"):
            sim.wait(ready)
            values.sum()
        with pytest.raises(RaceError, match="memory was freed while `library`"):
            sim.resize(values, 0)

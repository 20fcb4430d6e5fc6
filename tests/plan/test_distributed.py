"""Several cards under FSDP2, replayed: what collectives take and share, and docs' tables."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import distributed_timelines
import pytest
import torch

from offload.plan.collectives import SYSTEMS, THROUGH_HOST, System
from offload.plan.distributed import Plan, replay_cpu_offload, replay_engine, replay_nothing
from offload.plan.workload import GB, Machine, Workload
from offload.simulation.sharing import COLLECTIVE

ROOT = Path(__file__).parents[2]

LAYERS = 16
TENSOR = 2**24
BYTES = LAYERS * 4 * TENSOR * 4
"""Of all weights."""
LOAD = Workload(LAYERS, (TENSOR,) * 4, tokens=1, dtype=torch.float32, recompute=False)
COMPUTE = LAYERS * 3.0
"""Seconds: a layer's forward takes one, its backward two."""
FAST = 1e18


def system(*, link: float = FAST, host: float = FAST, bus: float = FAST, through_host: bool = False) -> System:
    machine = Machine("", flops=2.0 * 4 * TENSOR, up=link, down=link, device=FAST, host=host)
    return System("", machine, bus, through_host)


def plan(cards: System, ranks: int, resharding: bool = True, load: Workload = LOAD) -> Plan:
    return Plan(cards, ranks, load, resharding)


def test_what_a_collective_takes() -> None:
    """https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    cards = system(bus=10.0)
    assert cards.seconds("all_gather_single", 400, 4) == 30.0
    assert cards.seconds("reduce_scatter_single", 400, 4) == 30.0
    assert cards.seconds("all_reduce", 400, 4) == 60.0


@pytest.mark.parametrize(("cards", "published"), [(4, 35.0), (8, 28.0)])
def test_collectives_through_the_host_are_as_fast_as_published(cards: int, published: float) -> None:
    """RTX 5090 on PCIe 5.0, 16 channels of DDR5-4800: https://github.com/NVIDIA/nccl/issues/1639"""
    machine = Machine("", FAST, 50 * GB, 50 * GB, FAST, 614.4 * GB * 0.75)
    measured = System("", machine, THROUGH_HOST * 50 * GB, True)
    alone = measured.seconds("all_reduce", 10**9, cards)
    end = measured.sharing(cards).run(COLLECTIVE, 0.0, alone)
    bus = 2 * (cards - 1) / cards * 10**9 / end
    assert bus / GB == pytest.approx(published, rel=0.05)


def test_cards_with_links_of_their_own_leave_the_host_alone() -> None:
    sharing = SYSTEMS["h100"].sharing(8)
    sharing.run(COLLECTIVE, 0.0, 1.0)
    assert sharing.run("up", 0.0, 1.0) == 1.0
    through_host = SYSTEMS["rtx4090"].sharing(2)
    through_host.run(COLLECTIVE, 0.0, 1.0)
    assert through_host.run("up", 0.0, 1.0) > 1.4


@pytest.mark.parametrize("resharding", [False, True])
def test_collectives_hide_behind_compute_but_for_the_ends(resharding: bool) -> None:
    """Half of the time of compute: exposed are the first gather, and the last gather before backward or reduction."""
    gathers = 3 if resharding else 2
    bus = gathers * BYTES * 3 / 4 / (COMPUTE / 2)
    result = replay_nothing(plan(system(bus=bus), 4, resharding))
    assert result.compute == COMPUTE
    assert result.busy["collectives"] == pytest.approx(COMPUTE / 2, rel=0.01)
    layer = COMPUTE / 2 / gathers / LAYERS
    assert 2 * layer - 0.01 <= result.exposed <= 3 * layer + 0.01


@pytest.mark.parametrize("resharding", [False, True])
def test_a_slow_bus_bounds_the_step(resharding: bool) -> None:
    gathers = 3 if resharding else 2
    bus = gathers * BYTES * 3 / 4 / (COMPUTE * 4)
    result = replay_nothing(plan(system(bus=bus), 4, resharding))
    assert result.bound == pytest.approx(COMPUTE * 4, rel=0.01)
    assert result.step == pytest.approx(result.bound, rel=0.05)


def test_weights_that_stay_are_gathered_once_in_a_step() -> None:
    """Sharded weights move three times the bytes in every micro-batch but the first."""
    cards = system(bus=BYTES)
    moved = {
        (resharding, micro): replay_nothing(
            plan(cards, 2, resharding, dataclasses.replace(LOAD, micro_batches=micro))
        ).busy["collectives"]
        for resharding in (False, True)
        for micro in (1, 3)
    }
    once = 0.5  # half of the bytes
    assert moved[False, 1] == pytest.approx(2 * once)
    assert moved[False, 3] == pytest.approx(4 * once)
    assert moved[True, 1] == pytest.approx(3 * once)
    assert moved[True, 3] == pytest.approx(9 * once)


def test_states_stream_beside_collectives() -> None:
    """A link that both need for 0.8 of the time of compute. Exposed are two gathers, and little else."""
    link = 2.5 * BYTES / (0.8 * COMPUTE)
    cards = system(link=link, bus=link, through_host=True)
    result = replay_engine(plan(cards, 2, True), strategy="stream", update_in_backward=True, in_flight_gib=64.0)
    # Of each direction: three collectives of half of the bytes, and two states of this rank's half of the parameters.
    assert result.busy["up"] == pytest.approx(0.8 * COMPUTE, rel=0.05)
    gather = 0.5 * BYTES / LAYERS / link
    assert 2 * gather <= result.exposed <= 4.01 * gather


def test_a_host_that_all_share_bounds_updates_on_the_cpu() -> None:
    """Fused AdamW reads four tensors and writes three, of one rank's part, with one rank's share of the bandwidth; the
    gradient's copy down writes one more, and that of the weights up reads one."""
    host = 9 * BYTES / (2 * COMPUTE)
    for ranks in (2, 4):
        result = replay_engine(plan(system(host=host), ranks, True), strategy="host", update_in_backward=True)
        assert result.busy["host"] == pytest.approx(2 * COMPUTE, rel=0.01)
        assert result.step == pytest.approx(2 * COMPUTE, rel=0.1)


def test_cpu_offload_updates_when_backward_is_over() -> None:
    host = 7 * BYTES / COMPUTE
    result = replay_cpu_offload(plan(system(host=host), 2, True))
    assert result.step == pytest.approx(2 * COMPUTE, rel=0.02)
    assert replay_cpu_offload(plan(system(), 2, True)).step == pytest.approx(COMPUTE, rel=0.01)


def test_cpu_offload_brings_weights_up_before_every_gather() -> None:
    result = replay_cpu_offload(plan(system(link=BYTES), 2, True))
    assert result.busy["up"] == pytest.approx(2 * 0.5)
    assert result.busy["down"] == pytest.approx(0.5)


def test_cpu_offload_adds_up_micro_batches_and_each_direction_has_its_own_rate() -> None:
    cards = system(link=BYTES)
    uneven = dataclasses.replace(cards, machine=dataclasses.replace(cards.machine, up=2 * BYTES))
    result = replay_cpu_offload(plan(uneven, 2, True, dataclasses.replace(LOAD, micro_batches=2)))
    assert result.compute == 2 * COMPUTE
    assert result.busy["up"] == pytest.approx(2 * 2 * 0.5 / 2) and result.busy["down"] == pytest.approx(2 * 0.5)


def test_memory_is_that_of_the_parts_and_a_few_layers() -> None:
    layer, part = BYTES / LAYERS, BYTES / 4
    sharded = replay_nothing(plan(system(), 4, True)).steady.allocated
    whole = replay_nothing(plan(system(), 4, False)).steady.allocated
    assert 2 * part + layer <= sharded <= 2 * part + 6 * layer
    # Backward lets go of a layer's weights when its gradients are reduced.
    assert BYTES + part <= whole <= BYTES + part + 4 * layer


def test_no_process_group_is_left_and_none_is_taken() -> None:
    hook = sys.excepthook
    replay_nothing(plan(system(), 2, load=dataclasses.replace(LOAD, layers=1)))
    assert sys.excepthook is hook, "messages have no rank in front"
    assert not torch.distributed.is_initialized()


@pytest.fixture(scope="module")
def record() -> Any:
    return json.loads(distributed_timelines.RECORD.read_text())


def test_docs_have_the_recorded_tables(record: Any) -> None:
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    script = distributed_timelines
    assert script.BEGIN + script.table(record) + script.END in page
    assert script.BEGIN_PUBLISHED + script.published_table(record) + script.END in page


def test_recorded_rows_are_close_to_what_the_machine_can_do(record: Any) -> None:
    rows = [row for row in record["rows"] if row["update"] == distributed_timelines.IN_BACKWARD]
    assert len(rows) == 2 * 3 * 6
    for row in rows:
        assert row["step_ms"] <= 1.2 * max(row["busy_ms"].values()), row


def test_one_recorded_row_is_what_the_engine_does_now(record: Any) -> None:
    row = distributed_timelines.Row(False, distributed_timelines.IN_BACKWARD)
    result = row.replay("h100", 2)
    assert result.step * 1e3 == pytest.approx(row.find(record, "h100", 2)["step_ms"], rel=0.01)

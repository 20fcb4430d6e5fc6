"""Steps of several ranks in closed form: beside the recorded replays, and where a sum can be done by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import distributed_timelines
import pytest

from offload.plan.cards import find_card
from offload.plan.collectives import ETHERNET, NETWORK, SYSTEMS, THROUGH_HOST, System, network_of, system_of
from offload.plan.machines import TWO_SOCKETS, WORKSTATION, machine_of_card
from offload.plan.prediction import COMPUTE, CPU_UPDATE, DOWN, UP, Settings
from offload.plan.ranks import COLLECTIVES, HOST, Exchange, predict_ranks
from offload.plan.workload import GB, Machine, Passes, Workload

ROOT = Path(__file__).parents[2]
BOUND = 0.1
"""Of a recorded step."""

LAYERS, ELEMENTS = 8, 2**26
LOAD = Workload(LAYERS, (ELEMENTS,), tokens=1024, passes=Passes((0.1, 0.2), (0.0, 0.0)), recompute=False)
FORWARD, BACKWARD = 0.1 * LAYERS, 0.2 * LAYERS
FAST = 1e18
EXCHANGE = Exchange(4, LAYERS * ELEMENTS, 0, 0, ELEMENTS, LAYERS * ELEMENTS)


def system(*, link: float = FAST, host: float = FAST, bus: float = FAST, through_host: bool = False) -> System:
    return System("", Machine("", FAST, link, link, FAST, host), bus, through_host)


@pytest.fixture(scope="module")
def record() -> Any:
    return json.loads(distributed_timelines.RECORD.read_text(encoding="utf-8"))


def test_every_recorded_step_is_told_within_the_bound(record: Any) -> None:
    told = [row for row in record["rows"] if row["update"] in distributed_timelines.CLOSED]
    assert len(told) == 2 * 3 * 12
    for row in told:
        fields = {name: row[name] for name in distributed_timelines.FIELDS}
        found = distributed_timelines.closed_form(distributed_timelines.Row(**fields), row["system"], row["ranks"])
        assert 1e3 * found == pytest.approx(row["step_ms"], rel=BOUND), row
        assert row["closed_ms"] == pytest.approx(1e3 * found, abs=0.1)


def test_the_page_has_the_recorded_table(record: Any) -> None:
    script = distributed_timelines
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    assert script.BEGIN_CLOSED + script.closed_table(record) + script.END in page


def test_one_that_nothing_holds_up_computes() -> None:
    found = predict_ranks(LOAD, system(), EXCHANGE, Settings("stream", 4.0, update_in_backward=True, micro_batches=3))
    assert found.step_seconds == pytest.approx(3 * (FORWARD + BACKWARD)) and found.bottleneck == COMPUTE
    assert found.tokens_per_second == pytest.approx(3 * 4 * 1024 / found.step_seconds)


@pytest.mark.parametrize(("resharding", "gathers"), [(True, 6), (False, 1), (2, 3 + 3 * 2 / 3)])
def test_a_slow_bus_moves_what_is_gathered_and_reduced(resharding: bool | int, gathers: float) -> None:
    """Of three micro-batches: three quarters of the weights each time, or a half where they are kept between two."""
    bus = 1 * GB
    exchange = dataclasses.replace(EXCHANGE, resharding=resharding)
    settings = Settings("resident", 4.0, micro_batches=3)
    found = predict_ranks(LOAD, system(bus=bus), exchange, settings)
    weights = LAYERS * ELEMENTS * 2 * 3 / 4 / bus
    assert found.busy[COLLECTIVES] == pytest.approx(gathers * weights + 3 * 2 * weights)
    assert found.bottleneck == COLLECTIVES and found.step_seconds >= found.busy[COLLECTIVES]


def test_an_embedding_is_gathered_for_forward_alone() -> None:
    settings = Settings("resident", 4.0, micro_batches=2)
    exchange = dataclasses.replace(EXCHANGE, embedding=ELEMENTS, trained=0)
    for resharding, layers, embeddings in ((True, 4, 2), (False, 1, 1)):
        found = predict_ranks(
            LOAD, system(bus=GB), dataclasses.replace(exchange, resharding=resharding), settings
        ).busy[COLLECTIVES]
        assert found == pytest.approx((layers * LAYERS + embeddings) * ELEMENTS * 2 * 3 / 4 / GB)


def test_an_update_at_step_has_the_next_forward_alone() -> None:
    link = 4.0 * LAYERS * ELEMENTS / 4 / (2 * FORWARD)
    late, early = (predict_ranks(LOAD, system(link=link), EXCHANGE, Settings("stream", 4.0, update_in_backward=when))
                   for when in (False, True))  # fmt: skip
    assert late.step_seconds == pytest.approx(BACKWARD + 2 * FORWARD) and late.bottleneck in (UP, DOWN)
    assert early.step_seconds == pytest.approx(FORWARD + BACKWARD)
    assert late.busy[UP] == late.busy[DOWN] == pytest.approx(2 * FORWARD)


def test_a_host_that_all_share_bounds_updates_on_the_cpu() -> None:
    traffic = LAYERS * ELEMENTS / 4 * (2 * 4.0 + 4 * 2)
    slow = system(host=4 * traffic / (2 * BACKWARD))
    found = predict_ranks(LOAD, slow, EXCHANGE, Settings("host", 4.0, update_in_backward=True))
    assert found.busy[CPU_UPDATE] == pytest.approx(2 * BACKWARD)
    assert found.step_seconds == pytest.approx(found.busy[HOST]) and found.bottleneck == HOST


def test_states_that_a_card_has_room_for_cross_no_link() -> None:
    settings = Settings("auto", 4.0, update_in_backward=True, room=LAYERS * ELEMENTS // 2)
    found = predict_ranks(LOAD, system(link=GB), EXCHANGE, settings)
    assert found.busy[UP] == pytest.approx((4.0 * LAYERS * ELEMENTS / 4 - settings.room) / GB)


def test_gradients_that_leave_come_down_in_every_micro_batch() -> None:
    settings = Settings("stream", 4.0, offload_gradients=True, micro_batches=3)
    found = predict_ranks(LOAD, system(link=GB), EXCHANGE, settings)
    part = LAYERS * ELEMENTS / 4 / GB
    assert found.busy[DOWN] == pytest.approx((4 + 3 * 2) * part) and found.busy[UP] == pytest.approx((4 + 2) * part)


def test_replicas_sum_their_parts_and_train_on_more_tokens() -> None:
    settings = Settings("resident", 4.0)
    divided, replicated = (
        predict_ranks(LOAD, system(bus=GB), dataclasses.replace(EXCHANGE, ranks=2, replicas=count), settings)
        for count in (1, 2)
    )
    more = 2 * LAYERS * ELEMENTS * 4 / 2 * 1 / 2 / GB
    assert replicated.busy[COLLECTIVES] == pytest.approx(divided.busy[COLLECTIVES] + more)
    assert replicated.tokens_per_second * replicated.step_seconds == pytest.approx(4 * 1024)
    assert divided.tokens_per_second * divided.step_seconds == pytest.approx(2 * 1024)


def test_all_cards_of_a_host_share_its_memory_whether_they_divide_a_model_or_repeat_it() -> None:
    exchange = dataclasses.replace(EXCHANGE, ranks=2, replicas=2)
    found = predict_ranks(LOAD, system(host=GB), exchange, Settings("host", 4.0))
    assert found.busy[CPU_UPDATE] == pytest.approx(LAYERS * ELEMENTS / 2 * (2 * 4.0 + 4 * 2) / (GB / 4))


def test_a_layer_computes_or_is_launched() -> None:
    machine = dataclasses.replace(system().machine, launch=5e-6)
    load = dataclasses.replace(LOAD, launches=(40_000, 30_000), recompute=True)
    found = predict_ranks(load, System("", machine, FAST, False), EXCHANGE, Settings("resident", 4.0))
    assert found.compute_seconds == pytest.approx(LAYERS * (0.2 + 0.35))


def test_collectives_through_the_host_take_of_each_direction_what_it_has() -> None:
    machine = Machine("", FAST, up=4 * GB, down=2 * GB, device=FAST, host=FAST)
    found = predict_ranks(LOAD, System("", machine, GB, True), EXCHANGE, Settings("resident", 4.0))
    assert found.busy[UP] == pytest.approx(found.busy[COLLECTIVES] / 4)
    assert found.busy[DOWN] == pytest.approx(found.busy[COLLECTIVES] / 2)


def test_gradients_that_left_are_there_when_the_cpu_updates() -> None:
    settings = Settings("host", 4.0, offload_gradients=True, micro_batches=2)
    found = predict_ranks(LOAD, system(link=GB, host=GB), EXCHANGE, settings)
    part = LAYERS * ELEMENTS / 4 / GB
    assert found.busy[DOWN] == pytest.approx(2 * 2 * part) and found.busy[UP] == pytest.approx(2 * part)
    assert found.busy[HOST] == pytest.approx(4 * (2 * 2 + (2 * 4.0 + 4 * 2) + 2) * part)


@pytest.mark.parametrize(
    ("settings", "share"),
    [(Settings("stream", 4.0, offloaded=0.25), 0.25), (Settings("auto", 4.0, room=1 << 40), 0.0)],
)
def test_states_that_stay_cross_no_link(settings: Settings, share: float) -> None:
    busy = predict_ranks(LOAD, system(link=GB, host=GB), EXCHANGE, settings).busy
    states = share * 4.0 * LAYERS * ELEMENTS / 4 / GB
    assert busy[UP] == busy[DOWN] == pytest.approx(states)
    assert busy[HOST] == pytest.approx(4 * 2 * states)


def test_gradients_that_there_are_not_are_not_reduced_at_the_end() -> None:
    adapter = dataclasses.replace(EXCHANGE, trained=ELEMENTS // 2)
    later = dataclasses.replace(adapter, first=2 * ELEMENTS)
    steps = [predict_ranks(LOAD, system(bus=GB), each, Settings("resident", 4.0)) for each in (adapter, later)]
    assert steps[1].step_seconds - steps[0].step_seconds == pytest.approx(2 * ELEMENTS * 3 / 4 / GB)


def test_cards_of_servers_have_links_of_their_own() -> None:
    h100 = find_card("H100")
    served = system_of(machine_of_card(h100, cards=8), h100)
    assert not served.through_host and served.bus == SYSTEMS["h100"].bus
    assert machine_of_card(h100, cards=8).host / machine_of_card(h100).host == 2
    card = find_card("RTX 4090")
    desk = system_of(machine_of_card(card, cards=2), card)
    assert desk.through_host and desk.bus == pytest.approx(THROUGH_HOST * desk.machine.up)
    assert desk.machine.host == pytest.approx(0.75 * WORKSTATION) and TWO_SOCKETS > WORKSTATION
    assert system_of(desk.machine, None).through_host


def between_hosts(hosts: int, network: float, exchange: Exchange, *, bus: float = FAST) -> float:
    """Seconds of a step's collectives."""
    several = dataclasses.replace(system(bus=bus), hosts=hosts, network=network)
    return predict_ranks(LOAD, several, exchange, Settings("resident", 4.0)).busy[COLLECTIVES]


def test_a_ring_through_hosts_is_as_fast_as_what_leaves_a_host() -> None:
    parts = (4 - 1) / 4 * LAYERS * ELEMENTS
    moved = 2 * 2 * parts + 4 * parts  # gathered twice in 16 bits, reduced in 32
    assert between_hosts(2, GB, EXCHANGE) == pytest.approx(moved / GB)
    assert between_hosts(4, GB, EXCHANGE) == pytest.approx(moved / GB), "of one card each"
    assert between_hosts(1, GB, EXCHANGE) == pytest.approx(moved / FAST)
    assert between_hosts(2, 10 * GB, EXCHANGE, bus=GB) == pytest.approx(moved / GB)


def test_a_replica_in_each_host_sends_gradients_alone_and_their_rings_share_the_network() -> None:
    replicated = dataclasses.replace(EXCHANGE, ranks=2, replicas=2)
    inside = (2 - 1) / 2 * LAYERS * ELEMENTS * (2 * 2 + 4) / FAST
    a_part = LAYERS * ELEMENTS * 4 / 2
    assert between_hosts(2, GB, replicated) == pytest.approx(inside + 2 * a_part * (2 - 1) / 2 / (GB / 2))
    # Weights that are kept divided within a host are gathered again there.
    kept = dataclasses.replace(EXCHANGE, resharding=2)
    across = (4 - 1) / 4 * LAYERS * ELEMENTS * (2 + 4) / GB
    assert between_hosts(2, GB, kept) == pytest.approx(across)


@pytest.mark.parametrize(
    ("hosts", "ranks", "replicas", "gathered_across", "rings"),
    [(4, 4, 2, True, 2), (2, 2, 4, False, 2), (1, 2, 4, False, 0)],
    ids=["two cards a host, a model in two hosts", "two models of two cards a host", "one host"],
)
def test_as_many_rings_of_replicas_leave_a_host_as_it_has_parts(
    hosts: int, ranks: int, replicas: int, gathered_across: bool, rings: int
) -> None:
    whole = LAYERS * ELEMENTS * (ranks - 1) / ranks * (2 * 2 + 4)
    part = LAYERS * ELEMENTS * 4 / ranks * 2 * (replicas - 1) / replicas
    seconds = (whole / GB if gathered_across else 0.0) + (part * rings / GB if rings else 0.0)
    exchange = dataclasses.replace(EXCHANGE, ranks=ranks, replicas=replicas)
    assert between_hosts(hosts, GB, exchange) == pytest.approx(seconds, abs=1e-6)


UNEVEN = Machine("", FAST, up=4 * GB, down=2 * GB, device=FAST, host=8 * GB)
PART = LAYERS * ELEMENTS / 4


@pytest.mark.parametrize(
    ("settings", "up", "down"),
    [
        (Settings("host", 4.0), 2, 2),
        (Settings("host", 4.0, offload_gradients=True), 2, 2),
        (Settings("stream", 4.0), 4, 4),
        (Settings("stream", 4.0, offload_gradients=True), 4 + 2, 4 + 2),
        (Settings("plain", 4.0), 0, 0),
    ],
    ids=["host", "host, gradients", "stream", "stream, gradients", "plain"],
)
def test_each_direction_of_the_link_has_its_own_rate_and_both_use_the_hosts_memory(
    settings: Settings, up: int, down: int
) -> None:
    """Bytes for an element of a rank's part."""
    busy = predict_ranks(LOAD, System("", UNEVEN, FAST, False), EXCHANGE, settings).busy
    assert busy.get(UP, 0.0) == pytest.approx(up * PART / (4 * GB))
    assert busy.get(DOWN, 0.0) == pytest.approx(down * PART / (2 * GB))
    updated = 2 * 4.0 + 4 * 2 if settings.strategy == "host" else 0.0
    assert busy.get(HOST, 0.0) == pytest.approx((up + down + updated) * PART / (8 * GB / 4))


def test_what_goes_through_the_host_is_as_fast_as_the_slower_direction() -> None:
    """Each card sends as much as it receives."""
    through = system_of(UNEVEN, None, hosts=2, network=GB)
    assert through.bus == pytest.approx(THROUGH_HOST * 2 * GB) and through.hosts == 2
    assert max(through.shares(1).values()) <= 1.0
    assert system_of(UNEVEN, find_card("H100"), hosts=3, network=GB).hosts == 3


def test_a_hosts_memory_is_divided_among_its_own_cards() -> None:
    through = dataclasses.replace(system(host=GB, link=GB, through_host=True, bus=GB), hosts=2, network=GB / 8)
    found = predict_ranks(LOAD, through, EXCHANGE, Settings("resident", 4.0))
    # Each of two cards writes and reads what it sends.
    assert found.busy[HOST] == pytest.approx(2 * 2 * found.busy[COLLECTIVES] / 8)
    alone = predict_ranks(LOAD, dataclasses.replace(through, hosts=4), EXCHANGE, Settings("resident", 4.0))
    assert alone.busy[HOST] == pytest.approx(found.busy[HOST] / 2)


def test_networks_that_nobody_tells() -> None:
    card, centre = find_card("RTX 4090"), find_card("H100")
    assert network_of(card, 8) == ETHERNET == network_of(None, 8)
    assert network_of(centre, 8) == 8 * 50 * GB
    machine = machine_of_card(centre, cards=8)
    assert system_of(machine, centre, hosts=2, network=400 * GB).network == pytest.approx(NETWORK * 400 * GB)
    assert system_of(machine, centre, network=GB).network == float("inf")

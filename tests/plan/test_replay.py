"""What the engine's schedules cost, on simulated machines: exposed time as units of work, and docs' table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import timelines
import torch

from offload.engine import units
from offload.engine.pipeline import Pipeline
from offload.plan.replay import Result, _share, replay, replay_compute, replay_torchao
from offload.plan.workload import Machine, Workload
from offload.simulation.accelerator import SimulatedAccelerator
from offload.simulation.ledger import Memory

ROOT = Path(__file__).parents[2]

LAYERS = 32
TENSOR = 2**24
ELEMENTS = 4 * TENSOR
LOAD = Workload(LAYERS, (TENSOR,) * 4, tokens=1, dtype=torch.float32, recompute=False)
"""Each of a layer's four tensors is a piece."""
PLENTY: dict[str, Any] = {"in_flight_gib": 256.0}
"""With memory to spare, backward waits for no update: what the order of work alone can do."""
LAYER_SECONDS = 3.0
"""Of a layer's compute: one second of forward, two of backward."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "CHUNK_ELEMENTS", TENSOR)


def machine(*, link: float = 0.0, cpu: float = 0.0) -> Machine:
    """A layer takes so many seconds of each direction of the link for its parameters, and of the CPU."""
    parameters, update = ELEMENTS * 4, 7 * ELEMENTS * 4  # fused AdamW reads four tensors and writes three
    fast = 1e18
    return Machine(
        "three seconds per layer",
        flops=2.0 * ELEMENTS,
        up=parameters / link if link else fast,
        down=parameters / link if link else fast,
        device=fast,
        host=update / cpu if cpu else fast,
    )


def ratio(result: Result) -> float:
    return result.step / result.bound


def test_compute_alone() -> None:
    assert replay_compute(machine(), LOAD).step == pytest.approx(LAYERS * LAYER_SECONDS)


@pytest.mark.parametrize(("cpu", "limit", "arrival"), [(0.5, 1.02, 1.0), (1.0, 1.08, 1.25), (1.7, 1.05, 1.1)])
def test_the_cpu_updates_what_the_next_forward_needs_first(
    monkeypatch: pytest.MonkeyPatch, cpu: float, limit: float, arrival: float
) -> None:
    """The CPU takes ``cpu`` times as long as the device; order of arrival leaves the first layers for last."""
    slow = machine(cpu=cpu * LAYER_SECONDS)
    ours = replay(slow, LOAD, strategy="host", update_in_backward=True, **PLENTY)
    assert ours.bound == pytest.approx(max(1, cpu) * LAYERS * LAYER_SECONDS, rel=0.01)
    assert ratio(ours) <= limit
    monkeypatch.setattr(Pipeline, "_choose", lambda self: next(iter(self._queue), None))
    by_arrival = replay(slow, LOAD, strategy="host", update_in_backward=True, **PLENTY)
    assert ratio(by_arrival) >= arrival
    monkeypatch.undo()
    without = replay(slow, LOAD, strategy="host", update_in_backward=True, waits_per_unit=False, **PLENTY)
    assert without.step >= ours.step - 1e-6


# Two states go up and come down for each tensor, so that a layer takes twice the link time of its parameters.
@pytest.mark.parametrize(("link", "limit"), [(0.5, 1.03), (0.8, 1.05), (1.0, 1.08), (1.5, 1.05), (3.0, 1.05)])
def test_states_stream_beside_backward_and_the_next_forward(link: float, limit: float) -> None:
    """The link takes ``link`` times as long as compute."""
    slow = machine(link=link * LAYER_SECONDS / 2)
    result = replay(slow, LOAD, strategy="stream", update_in_backward=True, **PLENTY)
    assert result.bound == pytest.approx(max(1, link) * LAYERS * LAYER_SECONDS, rel=0.02)
    assert ratio(result) <= limit


@pytest.mark.parametrize("link", [0.5, 1.0, 1.5])
def test_a_budget_costs_at_most_the_forward(link: float) -> None:
    """Backward waits for updates, so that the link has to do its work beside backward: 64 of the 96 seconds."""
    slow = machine(link=link * LAYER_SECONDS / 2)
    result = replay(slow, LOAD, strategy="stream", update_in_backward=True, in_flight_gib=3.0)
    assert result.step <= 1.05 * (32 + max(64, link * 96))
    assert result.steady.purposes["gradients"] + result.steady.purposes["empty_device"] <= 3.0 * 2**30 + TENSOR * 4


def test_at_step_hides_behind_the_forward_only() -> None:
    """Exposed is what a forward of 32 seconds cannot hide of 48 seconds of link, give or take a few pieces."""
    result = replay(machine(link=LAYER_SECONDS / 4), LOAD, strategy="stream")
    assert result.exposed == pytest.approx(48 - LAYERS, abs=1.0)


def test_step_waits_for_all_without_a_model() -> None:
    """Updates at step that nobody can wait for one by one are exposed whole."""
    result = replay(machine(cpu=1.0), LOAD, strategy="host", waits_per_unit=False)
    assert result.exposed == pytest.approx(LAYERS * 1.0, rel=0.02)


def test_torchaos_schedule_updates_in_order_of_arrival() -> None:
    result = replay_torchao(machine(cpu=LAYER_SECONDS), LOAD)
    # Backward hides its 64 seconds but for the first layer's; the rest of the CPU's 96 is exposed.
    assert result.exposed == pytest.approx(LAYERS * LAYER_SECONDS - 64 + 2, abs=1.5)


@pytest.mark.parametrize("direction", ["down", "up"])
def test_torchaos_schedule_waits_for_each_gradient_and_for_all_weights(direction: str) -> None:
    """The CPU takes no time, so that weights follow gradients as these come down. The first gradient is there half a
    second into backward, after 32 of forward; from then on one direction of the link is busy for 96."""
    slow = dataclasses.replace(machine(), **{direction: ELEMENTS * 4 / LAYER_SECONDS})
    assert replay_torchao(slow, LOAD).step == pytest.approx(32 + 0.5 + 96, abs=0.1)


def test_a_later_micro_batch_is_told_apart_from_the_first_which_waits_for_updates() -> None:
    """Of 48 seconds of link at step, the first forward hides 32."""
    load = dataclasses.replace(LOAD, micro_batches=3)
    result = replay(machine(link=LAYER_SECONDS / 4), load, strategy="stream")
    compute = LAYERS * LAYER_SECONDS
    assert result.compute == pytest.approx(3 * compute) and result.micro_batch == pytest.approx(compute)
    assert result.step == pytest.approx(3 * compute + 48 - LAYERS, abs=1.0)
    spans = [span for span in result.trace if span.agent == "compute"]
    assert spans[0].name == "0: forward" and spans[-1].name == "0: backward"
    assert sum(span.end - span.start for span in spans) == pytest.approx(3 * compute)


def test_launches_of_a_layer_are_divided_among_its_tensors_and_each_has_one() -> None:
    assert [_share(10, index, 4) for index in range(4)] == [2, 3, 2, 3]
    assert [_share(2, index, 4) for index in range(4)] == [1, 1, 1, 1]


@pytest.fixture(scope="module")
def record() -> Any:
    return json.loads(timelines.RECORD.read_text())


def test_the_readme_has_the_recorded_table(record: Any) -> None:
    assert timelines.BEGIN + timelines.table(record) + timelines.END in (ROOT / "docs" / "strategies.md").read_text(
        encoding="utf-8"
    )


def test_recorded_schedules_are_close_to_what_the_machine_can_do(record: Any) -> None:
    rows = [row for row in record["rows"] if row["schedule"].startswith(("`stream`, in", "`host`, in"))]
    rows = [row for row in rows if "step()" not in row["schedule"]]
    assert len(rows) == 4 * 2 * 3
    for row in rows:
        first, second = sorted(row["busy_ms"].values(), reverse=True)[:2]
        limit = 1.08 if second > 0.9 * first else 1.05
        # Backward waits rather than exceed the budget: what it cannot hide, the next forward does not hide either.
        others = max(busy for agent, busy in row["busy_ms"].items() if agent != "compute")
        assert row["step_ms"] <= limit * max(row["bound_ms"], row["forward_ms"] + others), row
        if "GiB" in row["schedule"]:
            assert row["step_ms"] <= limit * row["bound_ms"], row


def test_one_recorded_row_is_what_the_engine_does_now(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # pieces as they are
    load = timelines.dataclasses.replace(timelines.LLAMA2_7B, tokens=4096)
    name = "`stream`, in backward"
    result = timelines.SCHEDULES[name](timelines.MACHINES["h200"], load)
    (row,) = [r for r in record["rows"] if (r["machine"], r["tokens"], r["schedule"]) == ("h200", 4096, name)]
    assert result.step * 1e3 == pytest.approx(row["step_ms"], rel=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "stream", "update_in_backward": True, "in_flight_gib": 0.5},
        {"strategy": "stream", "offload_gradients": True},
        {"strategy": "host", "update_in_backward": True, "shares_host_memory": True},
    ],
)
def test_unchecked_replays_take_as_long_and_record_no_access(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Workload(4, (TENSOR,) * 2, tokens=1, dtype=torch.float32, launches=(2, 4), micro_batches=2)
    rates = machine(link=2.0, cpu=1.0)
    if options.get("update_in_backward"):
        load = dataclasses.replace(load, micro_batches=1)
    checked = replay(rates, load, steps=(2, 1), **options)
    monkeypatch.setattr(Memory, "add", lambda *_: pytest.fail("an access was recorded"))
    unchecked = replay(rates, load, steps=(2, 1), is_checked=False, **options)
    for name in {each.name for each in dataclasses.fields(Result)} - {"first", "steady"}:
        assert getattr(unchecked, name) == getattr(checked, name), name


def test_a_replay_runs_backward_of_the_steps_that_it_needs_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured ends as a forward begins; the backward after that took a third of a prediction's time."""
    backwards: list[str] = []
    compute = SimulatedAccelerator.compute

    def told(self: SimulatedAccelerator, seconds: float, name: str, launches: int = 1) -> None:
        backwards.extend([name] if name == "0: backward" else [])
        compute(self, seconds, name, launches)

    monkeypatch.setattr(SimulatedAccelerator, "compute", told)
    replay(machine(), Workload(2, (TENSOR,), tokens=1, recompute=False), steps=(1, 1), strategy="stream")
    assert len(backwards) == 2

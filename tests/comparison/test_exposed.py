"""The time that each unit exposes, as a trace tells it: against the simulator's own account, against numbers written
down by hand, and of real runs on the CPU."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from offload.comparison import trace as tracing
from offload.comparison.exposed import UnitTime, account
from offload.comparison.trace import TraceError, read_trace
from offload.engine.marks import ALL
from offload.engine.runtime import Direction, Event, traced
from offload.plan import distributed
from offload.plan.replay import replay
from offload.plan.workload import GB, Machine, Workload
from tests.comparison.kineto import traced_replay, write_trace
from tests.conftest import ThreadedRuntime, play_device

LAYERS = 8
LOAD = Workload(LAYERS, (2**24,) * 4, tokens=2048, edge=2**26, dtype=torch.bfloat16, recompute=False)
UNITS = ["0", "1", "2", "3", "4", "5", "6", "7", "embedding", "head"]


def machine(*, link: float = 50, host: float = 250) -> Machine:
    return Machine("a machine", 80e12, link * GB, link * GB, 800 * GB, host * GB)


STREAM, HOST = {"strategy": "stream", "update_in_backward": True}, {"strategy": "host", "update_in_backward": True}
CASES: dict[str, tuple[Machine, dict[str, Any]]] = {
    "a slow link": (machine(link=8), STREAM),
    "a slow link and little memory": (machine(link=8), {**STREAM, "in_flight_gib": 0.3}),
    "at step": (machine(link=20), {"strategy": "stream"}),
    "step waits for all": (machine(link=20), {"strategy": "stream", "waits_per_unit": False}),
    "a slow host": (machine(host=60), HOST),
    "a slow host and little memory": (machine(host=60), {**HOST, "in_flight_gib": 0.3}),
    "nearly all hidden": (machine(link=400), STREAM),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_the_simulated_timeline_tells(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, options = CASES[case]
    path = tmp_path / "trace.json"
    simulated = traced_replay(monkeypatch, path, lambda: replay(where, LOAD, **{"in_flight_gib": 8.0, **options}))
    found = account(read_trace(path))
    assert found.of_device and found.steps > 3 and list(found.units) == UNITS
    assert found.step == pytest.approx(simulated.step, rel=1e-4)
    assert found.exposed == pytest.approx(simulated.exposed, rel=1e-3)
    worker = "offload-host" if options["strategy"] == "host" else "update"
    for field, agent in (("up", "up"), ("down", "down"), ("update", worker)):
        total = sum(getattr(unit, field) for unit in found.units.values())
        assert total == pytest.approx(simulated.busy[agent], rel=0.03), field


def test_where_a_model_is_sharded_gathers_wait_for_units_and_are_not_the_optimizers_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives alone expose some; what a unit's update and a collective expose at once is the unit's."""
    cards = distributed.System("cards", machine(link=8), 100 * GB, False)
    plan = distributed.Plan(cards, 4, LOAD, True)
    alone = distributed.replay_nothing(plan)
    path = tmp_path / "trace.json"
    simulated = traced_replay(
        monkeypatch, path, lambda: distributed.replay_engine(plan, in_flight_gib=8.0, **STREAM), distributed
    )
    found = account(read_trace(path))
    assert list(found.units) == UNITS and found.step == pytest.approx(simulated.step, rel=0.01)
    optimizers = simulated.exposed - alone.exposed
    assert optimizers > 0.05 * simulated.step
    assert optimizers <= found.exposed <= 1.5 * optimizers < simulated.exposed


# ---- by hand

MAIN, AUTOGRAD, WORKER = 100, 101, 102
COMPUTE, UPDATE, UP = 7, 24, 20


def complete(kind: str, name: str, thread: int, begin: float, end: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def mark(name: str, thread: int, begin: float, end: float) -> dict[str, Any]:
    return complete("user_annotation", f"offload: {name}", thread, begin, end, **{"External id": int(begin)})


class Device:
    """Kernels and the calls that launch them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def run(self, stream: int, thread: int, call: float, begin: float, end: float, kind: str = "kernel") -> None:
        number = len(self.events)
        self.events.append(complete("cuda_runtime", "cudaLaunchKernel", thread, call, call + 3, correlation=number))
        name = "Memcpy HtoD (Pinned -> Device)" if kind == "gpu_memcpy" else "void at::native::kernel<4>(int)"
        self.events.append(complete(kind, name, stream, begin, end, device=0, stream=stream, correlation=number))


def two_steps() -> list[dict[str, Any]]:
    device = Device()
    for begin in (0, 1000):
        device.events.append(complete("user_annotation", f"ProfilerStep#{begin}", MAIN, begin, begin + 1000))
        device.events.append(complete("cpu_op", f"{tracing.BACKWARD}: Mm", AUTOGRAD, begin + 200, begin + 300))
        device.run(COMPUTE, MAIN, begin + 10, begin + 20, begin + 120)
        device.events.append(mark("update layers.0: layers.0.w", WORKER, begin + 125, begin + 140))
        device.run(UPDATE, WORKER, begin + 130, begin + 150, begin + 640)
        device.events.append(mark("wait layers.0", MAIN, begin + 410, begin + 412))
        device.run(COMPUTE, MAIN, begin + 420, begin + 645, begin + 700)
    device.events.append(complete("user_annotation", "ProfilerStep#2000", MAIN, 2000, 2500))  # as a profiler that stops
    return device.events


@pytest.mark.parametrize("order", [1, -1])
def test_events_lie_in_a_trace_in_any_order(order: int, tmp_path: Path) -> None:
    found = account(read_trace(write_trace(tmp_path / "trace.json", two_steps()[::order])))
    assert found.steps == 2 and found.of_device
    waited, paused = 2e-6, 220e-6  # the host while the stream had nothing, and then the stream
    assert found.units == {"layers.0": UnitTime(exposed=pytest.approx(waited + paused), update=pytest.approx(490e-6))}


def test_the_engines_own_kernels_are_not_what_computes(tmp_path: Path) -> None:
    """However long they take, and wherever they are queued; what is queued in a wait is no work of a unit."""
    device = Device()
    device.events.append(complete("user_annotation", "ProfilerStep#9", MAIN, 0, 1000))
    device.events.append(mark("update layers.0: layers.0.w", WORKER, 1, 9))
    device.run(UPDATE, WORKER, 5, 10, 910)
    device.run(COMPUTE, MAIN, 10, 20, 120)
    device.events.append(mark("wait layers.1", MAIN, 30, 40))
    device.run(COMPUTE, MAIN, 35, 120, 200)
    device.run(COMPUTE, MAIN, 50, 200, 300)
    found = account(read_trace(write_trace(tmp_path / "trace.json", device.events)))
    assert found.exposed == 0 and found.units["layers.0"].update == pytest.approx(900e-6)


def test_ranges_that_follow_each_other_at_once_do_not_lie_in_each_other(tmp_path: Path) -> None:
    events = [
        complete("user_annotation", "ProfilerStep#9", MAIN, 0, 1000),
        mark("update layers.0", MAIN, 10, 20),
        mark("update layers.1", MAIN, 20, 50),
        mark("copy up layers.1", MAIN, 20, 30),
    ]
    found = account(read_trace(write_trace(tmp_path / "trace.json", events)))
    assert {name: unit.exposed for name, unit in found.units.items()} == {
        "layers.0": pytest.approx(10e-6), "layers.1": pytest.approx(30e-6)
    }  # fmt: skip


def test_a_pause_is_the_units_that_were_waited_for_in_it(tmp_path: Path) -> None:
    device = Device()
    events = device.events
    events.append(complete("user_annotation", "ProfilerStep#9", MAIN, 0, 1000))
    device.run(COMPUTE, MAIN, 10, 20, 120)
    # Nobody waits: the next batch is loaded.
    device.run(COMPUTE, MAIN, 400, 405, 500)
    # The stream waits for a unit until its update is done, and 5 microseconds more for the event.
    events.append(mark("update layers.0: layers.0.w", WORKER, 295, 310))
    device.run(UPDATE, WORKER, 300, 500, 640)
    events.append(mark("wait layers.0", MAIN, 410, 412))
    device.run(COMPUTE, MAIN, 420, 645, 700)
    # Backward is held back, while the stream still works for 10 microseconds.
    events.append(mark("wait in backward layers.1", AUTOGRAD, 690, 800))
    device.run(COMPUTE, AUTOGRAD, 810, 812, 900)
    # Of two units the first was updated long ago; the second's states come up first.
    events += [mark("wait layers.0", MAIN, 820, 821), mark("wait layers.1", MAIN, 822, 823)]
    events.append(mark("copy up layers.1", WORKER, 700, 705))
    device.run(UP, WORKER, 702, 710, 730, "gpu_memcpy")
    events.append(mark("update layers.1: layers.1.w", WORKER, 815, 822.5))
    device.run(UPDATE, WORKER, 820, 880, 950)
    device.run(COMPUTE, MAIN, 830, 960, 980)
    # A base optimizer whose kernels run on the default stream.
    events.append(mark("update head", WORKER, 840, 850))
    device.run(COMPUTE, WORKER, 845, 980, 990)
    # A collective fills another stream for longer than all kernels.
    device.run(30, MAIN, 11, 20, 990)
    events[-1]["name"] = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    found = account(read_trace(write_trace(tmp_path / "trace.json", events)))
    micro = {
        name: [round(1e6 * each, 3) for each in (time.exposed, time.update, time.up, time.down)]
        for name, time in found.units.items()
    }
    assert micro == {
        "head": [10, 10, 0, 0],
        "layers.0": [140, 140, 0, 0],
        "layers.1": [100 + 50, 70, 20, 0],
    }
    assert found.exposed == pytest.approx(300e-6) and found.step == pytest.approx(970e-6) and found.steps == 1
    assert found.share == pytest.approx(300 / 970)


def test_an_update_that_was_queued_before_the_trace_began_gets_the_whole_pause(tmp_path: Path) -> None:
    device = Device()
    device.events.append(complete("user_annotation", "ProfilerStep#9", MAIN, 0, 1000))
    device.run(COMPUTE, MAIN, 10, 20, 120)
    device.events.append(mark("wait layers.0", MAIN, 12, 13))
    device.run(COMPUTE, MAIN, 20, 150, 160)
    found = account(read_trace(write_trace(tmp_path / "trace.json", device.events)))
    assert found.units == {"layers.0": UnitTime(exposed=pytest.approx(30e-6))}


def test_a_call_on_a_thread_that_the_trace_does_not_know_is_found_by_its_operation(tmp_path: Path) -> None:
    """CUPTI numbers threads in its own way where PyTorch has not told it of them."""
    device = Device()
    device.events.append(mark("update layers.0", WORKER, 5, 30))
    device.events.append(complete("cpu_op", "aten::_fused_adamw_", WORKER, 8, 20, **{"External id": 77}))
    device.run(UPDATE, 987654, 10, 40, 50)
    device.events[-1]["args"] |= {"External id": 77, "correlation": 123}
    device.run(COMPUTE, MAIN, 6, 10, 90)
    found = account(read_trace(write_trace(tmp_path / "trace.json", device.events)))
    assert found.units["layers.0"].update == pytest.approx(10e-6)


def test_on_the_cpu_helpers_are_hidden_and_what_lies_in_a_wait_counts_once(tmp_path: Path) -> None:
    events = [
        complete("user_annotation", "ProfilerStep#9", MAIN, 0, 1000),
        complete("cpu_op", "autograd::engine::evaluate_function: MmBackward0", MAIN, 500, 600),
        complete("user_annotation", "ProfilerStep#10", MAIN, 1001, 1002),  # the profiler stops
        mark("update layers.2", WORKER, 100, 400),
        mark("wait layers.2", MAIN, 300, 410),
        mark("update layers.10", MAIN, 520, 560),
        mark("copy down layers.10", MAIN, 530, 540),
        mark("update layers.10", MAIN, 1001.1, 1001.2),
    ]
    found = account(read_trace(write_trace(tmp_path / "trace.json", events)))
    assert not found.of_device and found.steps == 1 and found.step == pytest.approx(1e-3)
    assert list(found.units) == ["layers.2", "layers.10"]
    assert found.units["layers.2"] == UnitTime(exposed=pytest.approx(110e-6), update=pytest.approx(300e-6))
    assert found.units["layers.10"] == UnitTime(
        exposed=pytest.approx(40e-6), update=pytest.approx(40e-6), down=pytest.approx(10e-6)
    )


# ---- real runs on the CPU

COPY_SECONDS = 0.02


class SlowLink(ThreadedRuntime):
    """States take their time on their way up."""

    def copy(
        self, dst: Tensor, src: Tensor, direction: Direction, after: Sequence[Event] = (), name: str = ""
    ) -> Event:
        with traced(name):
            time.sleep(COPY_SECONDS if direction == "up" else 0)
            dst.data.copy_(src.data)
        return self.record()


def profiled(path: Path, in_backward: bool, *, device: str = "cpu", width: int = 8) -> Path:
    """Three recorded steps of a model of four layers."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))).to(device)
    optimizer = OffloadOptimizer(
        model.named_parameters(), fused=True, strategy="stream", update_in_backward=in_backward, model=model
    )
    with torch.profiler.profile(
        activities=torch.profiler.supported_activities(),
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True),
    ) as profiler:
        for _ in range(5):
            model(torch.ones(2, width, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    optimizer.synchronize()
    return path


def test_a_real_trace_of_a_slow_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of it is exposed: the model's own work hides what comes up ahead, two of four copies at most."""
    play_device(monkeypatch, SlowLink())
    found = account(read_trace(profiled(tmp_path / "trace.json.gz", in_backward=False)))
    assert found.steps == 3 and list(found.units) == ["0", "1", "2", "3"]
    assert all(unit.up >= COPY_SECONDS for unit in found.units.values())
    assert 2 * COPY_SECONDS < found.exposed <= found.step


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator, and there is none here")
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_real_trace_of_an_accelerator(in_backward: bool, tmp_path: Path) -> None:
    """The model's work takes less time than its states' way: 16 MiB a layer each way, beside products with two rows."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    path = profiled(tmp_path / "trace.json.gz", in_backward, device=accelerator.type, width=2048)
    found = account(read_trace(path))
    assert found.of_device and found.steps == 3 and list(found.units) == ["0", "1", "2", "3"]
    assert all(min(unit.up, unit.down, unit.update) > 0 for unit in found.units.values())
    assert 0.2 * found.step < found.exposed <= found.step


def test_a_real_trace_without_a_device_of_its_own(tmp_path: Path) -> None:
    """What is exposed is the update: it runs on the thread that trains."""
    found = account(read_trace(profiled(tmp_path / "trace.json", in_backward=True)))
    assert found.steps == 3 and not found.of_device
    for unit in found.units.values():
        assert unit.exposed == unit.update > 0 and unit.up == unit.down == 0


def test_of_a_plain_optimizer_the_step_is_exposed(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = account(read_trace(tmp_path / "trace.json"))
    assert list(found.units) == [ALL] and 0 < found.exposed == found.units[ALL].update < found.step


# ---- what is no trace


def gzipped(path: Path) -> bytes:
    return gzip.compress(path.read_bytes())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda path: path.read_bytes()[:-3000], "it is damaged or cut short"),
        (lambda path: gzipped(path)[:-3000], "it is damaged or cut short"),
        (lambda path: gzipped(path)[:500] + b"x" * 500 + gzipped(path)[1000:], "it is damaged or cut short"),
        (lambda path: path.read_bytes().replace(b'"ts"', b'"ts', 9), "it is damaged or cut short"),
        (lambda path: b"", "it is no trace of torch's profiler"),
        (lambda path: b"\x1f\x8bnot really", "it is damaged or cut short"),
        (lambda path: b"\xff\xfe" * 100, "it is damaged or cut short"),
        (lambda path: b'{"a": 1}', "it is no trace of torch's profiler"),
        (lambda path: b'{"traceEvents": [1, 2]}', "it is no trace of torch's profiler"),
        (lambda path: b'{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', "it is no trace of torch's profiler"),
        (lambda path: b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x"}]}', "it is no trace"),
        (lambda path: b'{"traceEvents": []}', "no update is named in it; profiler.cpu=True records the names"),
        (
            lambda path: path.read_bytes().replace(b"offload: ", b"other: ").replace(b"Optimizer.step", b"step"),
            "no update is named in it",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(content: Any, reason: str, tmp_path: Path) -> None:
    path = profiled(tmp_path / "good.json", in_backward=True)
    bad = tmp_path / "bad.json.gz"
    bad.write_bytes(content(path))
    with pytest.raises(TraceError) as raised:
        account(read_trace(bad))
    assert reason in str(raised.value) and "\n" not in str(raised.value)


def test_a_trace_that_is_too_large_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_trace(tmp_path / "trace.json", [complete("cpu_op", "aten::mm", 1, n, n + 1) for n in range(30_000)])
    monkeypatch.setattr(tracing, "LARGEST", 2 * 2**20)
    with pytest.raises(TraceError, match=r"more than 2 MiB of text; record fewer steps \(active_steps\)"):
        read_trace(path)


def test_a_trace_that_is_there_only_in_name_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "trace.json.gz")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path / "folder")


def test_it_is_read_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that lie across the borders of what is read at a time are whole."""
    path = profiled(tmp_path / "trace.json", in_backward=True)
    whole = account(read_trace(path))
    monkeypatch.setattr(tracing, "_CHUNK", 97)
    assert account(read_trace(path)) == whole
    assert len(list(tracing._events(path))) == len(json.loads(path.read_text())["traceEvents"])

"""scripts/bench_adamw.py at a tiny size: what it measures, and what it says about it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_adamw as bench
import pytest
import torch

import hatch_build
from offload.optim.formats import MASTERS, STATE_DTYPES

PARAM_BYTES = {"fp32": 3 * 4, "none": 3 * 2, "stochastic": 3 * 2, "split": 3 * 2 + 2 * 2, "split24": 3 * 2 + 2}
"""The parameter and the remainder are read and written, the gradient is read."""

STATE_BYTES = {"fp32": 16.0, "bf16": 8.0, "int8": 4 + 16 / 256}


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what the script sets is taken back
    monkeypatch.setattr(bench, "PACE_ELEMENTS", 1 << 10)
    monkeypatch.setattr(bench, "PACE_SECONDS", 1e-4)
    monkeypatch.setattr(bench, "STEADY", 0.0)  # all turns count, on however busy a machine


@pytest.fixture
def has_compiler() -> None:
    try:
        hatch_build.compiler()
    except hatch_build.NoCompiler as error:
        pytest.skip(str(error))


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    output = folder / "results" / "adamw.json"
    threads = ["--threads", str(torch.get_num_threads())]
    size = ["--device", "cpu", "--params", "10000", "--rounds", "2", "--steps", "2", "--patience", "0"]
    assert bench.main([*size, *threads, "--output", str(output), *arguments]) == 0
    assert output.with_suffix(".png").stat().st_size > 1000
    return json.loads(output.read_text())


def test_every_format_is_measured_beside_its_probe_and_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run(tmp_path, "--only", "offload (fp32|bf16).*|torch (fused|cast.fused.cast|foreach)[^0-9]* .*")
    rows = {row["name"]: row for row in record["contenders"]}
    ours = {(row["parameter"], row["master"], row["moments"]) for row in rows.values() if row["optimizer"] == "offload"}
    bf16 = {("bf16", master, state_dtype) for master in MASTERS for state_dtype in STATE_DTYPES}
    assert ours == bf16 | {("fp32", "fp32", state_dtype) for state_dtype in STATE_DTYPES}
    assert record["params"] == 4096 + 2 * 4096 and record["failures"] == {}
    assert all(row["samples"] == 4 for row in rows.values())
    for _, master, state_dtype in ours:
        row = rows[f"offload {'fp32' if master == 'fp32' else 'bf16'} {master} {state_dtype}"]
        assert row["bytes_per_param"] == PARAM_BYTES[master] + STATE_BYTES[state_dtype]
        own = row["seconds"]["median"]
        for name in ("probe", "limit"):
            assert row[f"of_{name}"] == pytest.approx(row[name]["seconds"]["median"] / own)
        assert row["mparam_per_second"] == pytest.approx(record["params"] / own / 1e6)
    claims = {claim["claim"]: claim for claim in record["claims"]}
    faster = claims["offload bf16 none bf16: times torch fused bf16 none bf16"]
    ratio = (
        rows["torch fused bf16 none bf16"]["seconds"]["median"] / rows["offload bf16 none bf16"]["seconds"]["median"]
    )
    assert faster["measured"] == pytest.approx(ratio) and faster["holds"] == (ratio >= 2)
    assert claims["offload bf16 split int8: times torchao's int8"]["holds"] is None
    said = capsys.readouterr().out
    assert "| offload | bf16 | split | int8 | 14.06 |" in said and "not measured" in said


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 70000, 200000])
def test_the_probe_reaches_every_byte_and_puts_it_back(has_compiler: None, numel: int) -> None:
    blocks = -(-numel // 256)
    arrays = [
        (torch.randn(numel).bfloat16(), True),
        (torch.randn(numel), False),
        (torch.randint(-128, 128, (numel,), dtype=torch.int8), True),
        (torch.randn(blocks), True),
    ]
    before = [values.view(torch.uint8).clone() for values, _ in arrays]
    probes = bench.Probes(torch.device("cpu"))
    assert probes.how == "compiled"
    function, added = probes._function, []

    def watch(*arguments: int) -> None:
        function(*arguments)
        added.append([values.view(torch.uint8).clone() for values, _ in arrays])

    probes._function = watch
    calls = probes.of([arrays])
    assert list(calls) == ["probe", "limit"]
    for call, passes in calls.values():
        added.clear()
        call()
        assert passes == 2 and len(added) == 2
        for old, new, (_, is_written) in zip(before, added[0], arrays, strict=True):
            assert torch.equal(new, old + 1 if is_written else old)
        for old, (values, _) in zip(before, arrays, strict=True):
            assert torch.equal(values.view(torch.uint8), old)


def test_without_a_compiler_the_probe_is_torch_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    record = run(tmp_path, "--only", "offload bf16 split .*")
    assert "no-such-compiler" in record["probe"]
    assert all(row["of_probe"] > 0 for row in record["contenders"]) and len(record["contenders"]) == len(STATE_DTYPES)
    # It reads and writes the two that are written, and that twice; a pass reads the third too.
    arrays = [(torch.zeros(512, dtype=torch.bfloat16), written) for written in (True, False, True)]
    calls = bench.Probes(torch.device("cpu")).of([arrays])
    assert list(calls) == ["probe"]
    _, passes = calls["probe"]
    assert passes == pytest.approx(2 * (2 * 2 * 2) / (2 * 2 * 2 + 2))


def test_a_peer_that_does_not_run_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everyone = bench.contenders

    def with_a_stranger(memory: Any) -> Any:
        yield bench.peer(("stranger", "bf16", "none", "bf16"), memory.params[torch.bfloat16], "no_such_package.AdamW")
        yield from everyone(memory)

    monkeypatch.setattr(bench, "contenders", with_a_stranger)
    record = run(tmp_path, "--only", "stranger .*|offload bf16 none bf16")
    assert "no_such_package" in record["failures"]["stranger bf16 none bf16"]
    assert [row["name"] for row in record["contenders"]] == ["offload bf16 none bf16"]
    assert "stranger bf16 none bf16: did not run" in capsys.readouterr().out


class Rates:
    """A memory whose rates are known, in place of :class:`bench_adamw.Pace`."""

    def __init__(self, before: list[float], after: list[float]) -> None:
        self.before, self.after, self.best = iter(before), iter(after), 100.0

    @property
    def least(self) -> float:
        return bench.STEADY * self.best

    def settle(self) -> float:
        return next(self.before)

    def rate(self) -> float:
        return next(self.after)


def with_rates(monkeypatch: pytest.MonkeyPatch, before: list[float], after: list[float]) -> dict[str, Any]:
    """Three rounds of one contender, whose n-th turn takes n seconds."""
    monkeypatch.setattr(bench, "STEADY", 0.8)
    monkeypatch.setattr(bench, "Pace", lambda *_: Rates(before, after))
    durations = iter(range(1, 7))
    monkeypatch.setattr(bench, "time_steps", lambda entry, *_: [next(durations)] if entry.nbytes else [1.0])
    contender = bench.Entry(("ours", "", "", ""), lambda: (lambda: None, []), 1, nbytes=1)
    monkeypatch.setattr(bench, "contenders", lambda _: iter([contender]))
    return bench.measure("cpu", 1000, rounds=3, steps=1)


def test_turns_count_where_the_memory_was_steady_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    # Turns 1, 4 and 5; then there are enough.
    result = with_rates(monkeypatch, before=[90, 70, 90, 80, 90], after=[90, 90, 79, 80, 90])
    assert result["contenders"][0]["seconds"] == {"median": 4, "min": 1, "max": 5}
    assert result["memory"]["counting"] == {"turns": 3, "gb_per_second": 90}
    assert result["memory"]["others"]["turns"] == 2 and not result["memory"]["without_turns_that_count"]


def test_without_a_turn_that_counts_all_are_shown_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = with_rates(monkeypatch, before=[50] * 6, after=[90] * 6)
    assert result["contenders"][0]["seconds"] == {"median": 3.5, "min": 1, "max": 6}
    assert result["memory"]["without_turns_that_count"] == ["ours"]
    assert "all turns count, because the memory was slower in each: ours" in bench.table(result)


def test_a_turn_waits_for_the_memory_until_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "STEADY", 0.8)
    monkeypatch.setattr(bench, "PACE_SECONDS", 1.0)
    clock, rates = iter(range(1000)), iter([100, 50, 50, 90, 50, 50, 50, 50])
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    pace = bench.Pace(bench.Probes(torch.device("meta")), patience=5.0)
    monkeypatch.setattr(bench.Pace, "rate", lambda self: next(rates))
    pace.best = 100.0
    assert pace.settle() == 100 and pace.patience == 5.0
    assert pace.settle() == 90 and pace.patience == 3.0  # a second each for two that were too slow
    assert pace.settle() == 50 and pace.patience == 0.0
    assert pace.settle() == 50, "the last one is not waited for"


def test_idle_loops_end_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    started, popen = [], subprocess.Popen

    def start(*arguments: Any) -> Any:
        started.append(popen(*arguments))
        return started[-1]

    monkeypatch.setattr(bench.subprocess, "Popen", start)
    with bench.awake() as cores:
        assert cores == len(started)
        for _ in range(3000):  # interpreters take their time to start on a busy machine
            if all(os.sched_getscheduler(loop.pid) == os.SCHED_IDLE for loop in started):
                break
            time.sleep(0.01)
        for loop in started:
            assert loop.poll() is None and os.sched_getscheduler(loop.pid) == os.SCHED_IDLE
            assert len(os.sched_getaffinity(loop.pid)) == 1
    assert all(loop.poll() is not None for loop in started)


def test_small_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MANY", (5, 1024))
    monkeypatch.setattr(bench, "SMALL_CALLS", 3)
    record = run(tmp_path, "--only", ".*(tensors|small).*")
    assert len(record["contenders"]) == 7 and record["failures"] == {}
    measured = {claim["claim"] for claim in record["claims"] if claim["measured"] is not None}
    assert measured == {
        "offload, 5 tensors fp32 fp32 fp32: times one torch optimizer each",
        "offload, 5 tensors bf16 none bf16: times one torch optimizer each",
        "one small tensor: microseconds of a call",
    }


def test_claims_hold_from_their_bound_on() -> None:
    assert [bench.at_least(2.0, "", value)["holds"] for value in (1.99, 2.0, None)] == [False, True, None]
    assert [bench.at_most(10.0, "", value)["holds"] for value in (10.0, 10.1, None)] == [True, False, None]


def test_shapes_are_the_llamas_until_there_are_enough_elements() -> None:
    assert list(bench.shapes_of(202_383_360)) == bench.LAYER
    assert list(bench.shapes_of(202_383_361))[-1] == (1,)
    assert list(bench.shapes_of(5000)) == [(4096,), (1, 4096)]


def test_the_readme_has_the_recorded_table() -> None:
    record = json.loads(bench.RECORDED.read_text(encoding="utf-8"))
    rows = bench.readme_table(record)
    assert rows.count("\n") >= 12
    assert bench.BEGIN + rows + bench.END in (bench.ROOT / "docs" / "adamw.md").read_text(encoding="utf-8")

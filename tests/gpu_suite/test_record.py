"""The GPU suite's record: what it keeps, and what it derives from several results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu import record as record_module
from gpu.measure import Job
from gpu.record import Record, derive, line

RATES = {"up": 50e9, "down": 40e9, "each_of_both": 25e9, "device_copy": 4000e9}


def run(card: str | None = "NVIDIA H200", **more: Any) -> dict[str, Any]:
    return {"environment": {"card": card}, **more}


def result(case: str, step_seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    facts = {
        "case": case,
        "device": "cuda",
        "model": "7b",
        "layers": None,
        "tokens": 1024,
        "memory_gib": None,
        "allocator": "",
        "run": 0,
        "status": "ok",
        "step_seconds": step_seconds,
        "link_bytes": {"down": 0, "up": 0},
    }
    return {**facts, **more}


def derived(*results: dict[str, Any], runs: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    content = {"runs": runs or [run(rates=RATES)], "results": list(results)}
    derive(content)
    once = json.loads(json.dumps(content))
    derive(content)
    assert content == once
    return content["results"]


def test_exposed_time_is_against_the_mean_of_before_and_after() -> None:
    runs = [run(rates=RATES)]
    _, _, ours = derived(result("none", 1.0), result("none-again", 1.2), result("packed", 1.5), runs=runs)
    assert ours["compute_seconds"] == pytest.approx(1.1) and ours["exposed_seconds"] == pytest.approx(0.4)
    assert runs[0]["drift"] == {"1024": pytest.approx(0.2)}


def test_exposed_time_is_against_the_same_setting_first() -> None:
    """Held alike and of the same run, then the whole card of the same run, then another run on the same card."""
    ours = result("packed", 2.0, memory_gib=16, run=1)
    held, whole = result("none", 1.0, memory_gib=16, run=1), result("none", 1.1, run=1)
    earlier, other_card = result("none", 1.2, run=0), result("none", 1.9, run=2)
    runs = [run(), run(), run("NVIDIA A100")]
    others = [result("none", 0.5, tokens=8192, run=1), result("none", 0.5, run=1, model="1b"), other_card]
    for alone, expected in (([earlier, whole, held], 1.0), ([earlier, whole], 1.1), ([earlier], 1.2)):
        found = derived(*alone, *others, {**ours}, runs=runs)[-1]
        assert found["compute_seconds"] == expected
    assert "exposed_seconds" not in derived(*others, {**ours}, runs=runs)[-1]


def test_copies_and_updates_are_compared_with_what_the_machine_gave() -> None:
    copies = {
        "up": {"bytes": 10, "seconds": 1.0, "bytes_per_second": 20e9},
        "down": {"bytes": 0, "seconds": 0.0},
        "update": {"seconds": 0.01, "launches": 3},
    }
    more = {"link_bytes": {"down": 10e9, "up": 50e9}, "update_bytes": 20e9, "copies": copies}
    _, ours = derived(result("none", 1.0), result("packed", 3.0, **more))
    assert ours["bound_seconds"] == 2.0
    assert ours["copies"]["up"]["of_link_alone"] == 0.4 and ours["copies"]["up"]["of_link_both"] == 0.8
    assert "of_link_alone" not in ours["copies"]["down"]
    assert ours["copies"]["update"]["of_device_copy"] == 0.5


def test_losses_are_compared_to_the_last_bit() -> None:
    """With the case of the same arithmetic, on the same card; the first step that differs is told."""
    one = 5.476019859313965
    name = "packed-stream-in-backward+model"
    same, other = [one, 5.0, 4.0], [one, 5.0, 4.000000000000001]
    _, ours = derived(result("packed", losses=same), result(name, losses=same, memory_gib=16))
    assert ours["same_losses"] == {"to": "packed", "steps": 3, "equal": True, "first_unequal_step": None}
    _, ours = derived(result("packed", losses=same), result(name, losses=other))
    assert ours["same_losses"] == {"to": "packed", "steps": 3, "equal": False, "first_unequal_step": 3}
    for reference in (result("adamw", losses=same), result("packed", losses=same, tokens=8192), result("packed")):
        assert "same_losses" not in derived(reference, result(name, losses=same))[-1]


def test_simulated_time_is_that_of_the_card_and_the_schedule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = {"machine": "h200", "tokens": 1024, "schedule": "`stream`, in backward", "exposed_ms": 438.6}
    rows = [{**row, "machine": "rtx4090", "exposed_ms": 1}, {**row, "tokens": 4096, "exposed_ms": 2}, row]
    path = tmp_path / "timelines.json"
    path.write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(record_module, "TIMELINES", path)
    streamed = "packed-stream-in-backward+model"
    assert derived(result(streamed))[0]["simulated_exposed_seconds"] == pytest.approx(0.4386)
    other_card = derived(result(streamed), runs=[run("NVIDIA GeForce RTX 4090")])[0]
    assert other_card["simulated_exposed_seconds"] == pytest.approx(0.001)
    for others in (result("packed"), result(streamed, tokens=2048), result(streamed, model="1b")):
        assert "simulated_exposed_seconds" not in derived(others)[0]
    assert "simulated_exposed_seconds" not in derived(result(streamed), runs=[run(None)])[0]


def test_every_simulated_schedule_is_recorded() -> None:
    from gpu.cases import cases

    schedules = {row["schedule"] for row in json.loads(record_module.TIMELINES.read_text())["rows"]}
    assert {case.simulated for case in cases() if case.simulated} <= schedules


def test_a_result_takes_the_place_of_an_earlier_one_about_the_same(tmp_path: Path) -> None:
    """Compute alone is kept for each run, because each run's others are compared with it."""
    record = Record(tmp_path / "folder" / "r.json", mirror=tmp_path / "mirror")
    job = Job("packed", tokens=[1024])
    for index in range(2):
        record.begin(run())
        assert not record.has(Job("none"), 1024)
        assert record.has(job, 1024) == (index == 1)
        record.add(job, {"tokens": 1024, "status": "out of memory"})
        record.add(Job("none"), result("none", run=index))
    assert [(r["case"], r["run"]) for r in record.content["results"]] == [("none", 0), ("packed", 1), ("none", 1)]
    assert record.has(job, 1024) and record.has(Job("none"), 1024)
    for other in (
        Job("packed", memory_gib=16),
        Job("packed", layers=2),
        Job("packed", allocator="expandable_segments:True"),
        Job("adamw"),
    ):
        assert not record.has(other, 1024)
    assert not record.has(job, 2048)
    record.begin(run("NVIDIA A100"))
    assert not record.has(job, 1024)
    record.add(job, {"tokens": 1024, "status": "ended with status -6"})
    assert not record.has(job, 1024)

    copied = (tmp_path / "mirror" / "r.json").read_text()
    assert copied == (tmp_path / "folder" / "r.json").read_text()
    assert Record(tmp_path / "folder" / "r.json").content == json.loads(copied)
    assert Record(tmp_path / "folder" / "r.json", fresh=True).content["results"] == []
    assert not list(tmp_path.rglob("*.part"))


def test_the_line_of_a_result_tells_what_is_wrong() -> None:
    told = {
        "tokens_per_second": 1024.0,
        "construction_seconds": 1.0,
        "first_step_seconds": 2.0,
        "num_alloc_retries": 3,
        "same_losses": {"to": "packed", "steps": 4, "equal": False, "first_unequal_step": 2},
        "gradients_repeat": False,
    }
    text = line(result("packed", **told))
    assert "3 retries" in text and "LOSSES DIFFER from packed in step 2" in text and "do not repeat" in text
    assert line({**result("packed"), "status": "error", "error": "a\nb"}).endswith("error: a b")

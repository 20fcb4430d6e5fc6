"""run.json, the label of an optimizer, and the numbers that a run comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadOptimizer
from offload.metrics.log import MetricLog
from offload.metrics.optimizer_label import label_of, optimizer_facts
from offload.metrics.run_record import RUN_FILE, RunRecord, read_run
from offload.metrics.run_summary import summarise
from offload.optim import AdamW


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Linear(8, 8, bias=False, dtype=dtype)


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"optimizer_class": "torch.optim.AdamW", "strategy": "host"}, "torch.optim.AdamW bf16, host"),
        (
            {"optimizer_class": "offload.optim.AdamW", "strategy": "stream", "update_in_backward": True},
            "offload.optim.AdamW int8 split, stream in backward",
        ),
        (
            {"optimizer_class": "offload.optim.AdamW", "strategy": "stream", "state_dtype": "bf16", "master": "none",
             "offload_gradients": True},
            "offload.optim.AdamW bf16 none, stream, gradients offloaded",
        ),
        ({"optimizer_class": "torchao.optim.AdamW8bit", "strategy": "resident"}, "torchao.optim.AdamW8bit, resident"),
    ],
)  # fmt: skip
def test_the_label_tells_an_offloaded_optimizer(options: dict[str, Any], label: str) -> None:
    optimizer = OffloadOptimizer(model().parameters(), lr=1e-3, **options)
    assert label_of(optimizer_facts(optimizer, {"_component_": "offload.OffloadOptimizer", **options})) == label


def test_the_label_tells_an_optimizer_that_works_by_itself() -> None:
    plain = torch.optim.SGD(model(torch.float32).parameters(), lr=1e-3)
    assert label_of(optimizer_facts(plain)) == "torch.optim.SGD fp32, plain"
    own = AdamW(model().parameters(), state_dtype="bf16")
    assert label_of(optimizer_facts(own)) == "offload.optim.AdamW bf16 split, plain"


def test_the_label_names_another_project_s_offloader_and_its_base() -> None:
    # torchao's own runs on accelerators only: what the recipe sees is the section and an optimizer without strategy.
    section = {"_component_": "offload.TorchAOCPUOffloadOptimizer", "optimizer_class": "torch.optim.AdamW"}
    facts = optimizer_facts(torch.optim.AdamW(model().parameters()), section)
    assert label_of(facts) == "torch.optim.AdamW bf16, TorchAOCPUOffloadOptimizer"


def test_groups_with_different_options_are_all_told() -> None:
    groups = [{"params": model().parameters()}, {"params": model().parameters(), "state_dtype": "fp32"}]
    assert optimizer_facts(AdamW(groups))["state_dtype"] == "fp32+int8"


def test_a_record_is_there_when_the_run_begins_and_tells_how_it_ended(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, {"label": "x", "config": {"lr": float("inf"), "betas": (0.9, 0.95)}}, resume_step=7)
    running = read_run(tmp_path)
    assert running["status"] == "running" and running["ended"] is None and running["summary"] == {}
    assert running["resumed_from_step"] == 7 and running["config"] == {"lr": "inf", "betas": [0.9, 0.95]}
    record.finish(0, {"steps": 3})
    done = read_run(tmp_path)
    assert done["status"] == "done" and done["ended"] >= done["started"] == running["started"]
    assert done["summary"] == {"steps": 3} and done["label"] == "x"
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]


@pytest.mark.parametrize(("exit_code", "status"), [(130, "interrupted"), (143, "interrupted"), (2, "failed")])
def test_the_status_follows_the_exit_status(exit_code: int, status: str, tmp_path: Path) -> None:
    RunRecord(tmp_path, {}).finish(exit_code, {})
    assert read_run(tmp_path)["status"] == status


def test_a_full_disk_costs_a_warning_and_leaves_the_record_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RunRecord(tmp_path, {"label": "x"})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    record.finish(0, {})
    assert read_run(tmp_path)["status"] == "running"
    assert capsys.readouterr().err == (
        f"warning: cannot write {tmp_path / RUN_FILE}: No space left on device; training goes on\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == [RUN_FILE]


def test_a_fresh_run_sets_the_earlier_record_aside_with_its_metrics(tmp_path: Path) -> None:
    for number in range(3):
        log = MetricLog(tmp_path)
        RunRecord(tmp_path, {"label": str(number)})
        log.log({"loss": float(number)}, 1)
        log.close()
    labels = {path.name: json.loads(path.read_text())["label"] for path in tmp_path.glob("run*.json")}
    assert labels == {"run.1.json": "0", "run.2.json": "1", "run.json": "2"}
    losses = {path.name: json.loads(path.read_text())["loss"] for path in tmp_path.glob("metrics*.jsonl")}
    assert losses == {"metrics.1.jsonl": 0.0, "metrics.2.jsonl": 1.0, "metrics.jsonl": 2.0}


def test_reading_a_run_without_a_record_and_with_a_damaged_one(tmp_path: Path) -> None:
    assert read_run(tmp_path) == {}
    (tmp_path / RUN_FILE).write_text("[1")
    with pytest.raises(ValueError, match="run.json is damaged"):
        read_run(tmp_path)


def test_the_summary_has_medians_peaks_best_and_last_values_and_times() -> None:
    rows: list[dict[str, Any]] = [
        {
            "step": 2 * line, "loss": loss, "tokens_per_second": rate, "tokens_seen": 100 * line, "mfu": None,
            "memory/device_peak_active_gib": 0.0, "memory/host_rss_peak_gib": 3.0 + line, "time/data": 0.5,
        }
        for line, loss, rate in ((1, 4.0, 1.0), (2, 2.0, 300.0), (3, 1.0, 100.0), (4, 3.0, 250.0))
    ]  # fmt: skip
    rows[1]["evaluation/loss"] = 2.5
    rows[3] |= {"evaluation/loss": 2.75, "loss": None}
    assert summarise(rows, {"time/data": 0.25, "time/checkpoint": 8.0}) == {
        "steps": 8,
        "tokens": 400,
        "loss_first": 4.0,
        "loss_final": 1.0,
        "loss_best": 1.0,
        "evaluation_loss_first": 2.5,
        "evaluation_loss_final": 2.75,
        "evaluation_loss_best": 2.5,
        "evaluation_loss_best_step": 4,
        "tokens_per_second": 250.0,
        "host_rss_peak_gib": 7.0,
        "seconds_data": 2.25,
        "seconds_checkpoint": 8.0,
    }
    assert summarise([]) == {}

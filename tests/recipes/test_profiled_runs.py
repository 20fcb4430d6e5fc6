"""``profiler.enabled=True`` leaves a trace in which each unit's work has its name, however the run ends."""

from __future__ import annotations

import gzip
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from offload.engine.marks import parse
from offload.training.finetune import FinetuneRecipe

UNITS = {"tok_embeddings", "layers.0", "layers.1", "norm", "output"}
COMPONENT = "offload.training.profiler.torch_profiler"
PROFILER = f"profiler={{_component_: {COMPONENT}, enabled: True, output_dir: '${{output_dir}}/profiles'}}"


def trace_of(output_dir: Path) -> list[dict[str, Any]]:
    (path,) = output_dir.glob("profiles/step_*/trace.json.gz")
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def updates(events: list[dict[str, Any]]) -> dict[str, int]:
    """How often each unit was updated."""
    marks = [parse(event["name"]) for event in events if event["name"].startswith("offload: ")]
    return dict(Counter(mark.unit for mark in marks if mark is not None and mark.kind == "update"))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_that_is_interrupted_while_it_is_profiled_leaves_the_steps_until_there(
    method: str, workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = FinetuneRecipe.begin_step

    def begin_step(self: FinetuneRecipe) -> None:
        begin(self)
        if self.global_step == 10:  # the second that is recorded, of three
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(FinetuneRecipe, "begin_step", begin_step)
    in_backward = ("optimizer.update_in_backward=True", "clip_grad_norm=null")
    run = workspace.run(tmp_path / "run", PROFILER, *in_backward, recipe=f"{method}_finetune_single_device")
    assert run.status == 130, run.err
    units = UNITS if method == "full" else {"layers.0", "layers.1"}
    assert updates(trace_of(tmp_path / "run")) == dict.fromkeys(units, 2)


def test_a_schedule_that_cannot_be_is_told_before_anything_is_loaded(workspace: Any, tmp_path: Path) -> None:
    run = workspace.run(tmp_path / "run", PROFILER, "profiler.active_steps=0")
    assert run.status == 2 and run.errors() == ["error: profiler.active_steps: got 0, expected 1 or more"]
    assert "model:" not in run.out and not list((tmp_path / "run").glob("*"))


def test_the_log_is_closed_where_the_profiler_fails_to_stop(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def stop(self: Any) -> None:
        raise RuntimeError("the profiler is stuck")

    monkeypatch.setattr(torch.profiler.profile, "stop", stop)
    with pytest.raises(RuntimeError, match="the profiler is stuck"):
        workspace.run(tmp_path / "run", PROFILER, "max_steps_per_epoch=2")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["summary"]["steps"] == 2

"""``tune compare`` of three real runs: what it tells, and the page as a browser draws it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from offload.cli.main import main
from tests.comparison.test_page import CHROMIUM, browse
from tests.recipes.test_profiled_runs import PROFILER, UNITS

STEPS = 12


def test_three_runs_beside_each_other(workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = json.loads((workspace.path / "evaluation.json").read_text())
    evaluation = f"evaluation={json.dumps({**section, 'every_n_steps': 4})}"
    common = (f"max_steps_per_epoch={STEPS}", evaluation, PROFILER)
    early = ("optimizer.update_in_backward=True", "clip_grad_norm=null")
    runs = {
        "stream": workspace.run(tmp_path / "stream", *common, *early, "optimizer.strategy=stream"),
        "host": workspace.run(tmp_path / "host", *common, "optimizer.strategy=host"),
        "lora": workspace.run(tmp_path / "lora", *common, *early, recipe="lora_finetune_single_device"),
    }
    assert [run.status for run in runs.values()] == [0, 0, 0], [run.err for run in runs.values()]
    monkeypatch.chdir(tmp_path)
    workspace.capture.readouterr()
    assert main(["compare", *runs, "--json"]) == 0
    told = json.loads(workspace.capture.readouterr().out)

    # Speed and its spread, what a step's time goes to, memory, losses at equal tokens, and what differs.
    assert all(rate > 0 for rate in told["speed"]["tokens per second"])
    assert all(" to " in spread for spread in told["speed"]["half of the lines"])
    # Writing a trace is no part of a step.
    assert all(seconds > 0 for seconds in told["beside training"]["profiler"])
    (times,) = [values for name, values in told.items() if name.startswith("time of a step")]
    for whole, *parts in zip(times["whole"], *(times[key] for key in times if key != "whole"), strict=True):
        assert whole == pytest.approx(sum(part for part in parts if part is not None))
    assert all(peak > 0.1 for peak in told["peak memory (GiB)"]["host, resident"])
    (losses,) = [values for name, values in told.items() if name.startswith("loss at ")]
    assert all(0 < loss < 10 for loss in [*losses["training"], *losses["held out"]])
    assert told["configuration"]["optimizer.strategy"] == ["stream", "host", "host"]
    assert not {"epochs", "output_dir", "profiler.output_dir"} & set(told["configuration"])

    # Where updates run on the thread that trains, all of them are exposed.
    exposed, work = told["exposed time per step (ms)"], told["optimizer's work per step (ms)"]
    assert UNITS | {"all units", "total", "share of the step"} == set(exposed)
    assert all(exposed[unit][0] > 0 and exposed[unit][1] is None for unit in UNITS)
    assert exposed["layers.0"][2] > 0 and exposed["norm"][2] is None and exposed["all units"][1] > 0
    assert exposed["total"] == pytest.approx(work["update"], rel=0.2)
    assert work["steps in the trace"] == [3, 3, 3]

    assert main(["compare", *runs]) == 0
    assert (tmp_path / "compared.png").read_bytes().startswith(b"\x89PNG")
    if CHROMIUM is None:
        pytest.skip("no Chromium to open the page with")
    dom, network = browse(tmp_path / "compared.html", tmp_path)
    panels = dict(re.findall(r'class="panel" data-metric="([^"]+)" data-curves="(\d)"', dom))
    assert {"loss": "3", "evaluation/loss": "3", "tokens_per_second": "3", "grad_norm": "3"}.items() <= panels.items()
    assert dom.count("<canvas") == len(panels)
    bars = re.findall(r'data-unit="([^"]+)"', dom)
    assert set(bars) == UNITS | {"all units"} and dom.count('class="bar"') == 3 * len(bars)
    assert '"initiator":"null"' not in network

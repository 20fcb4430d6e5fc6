"""scripts/wandb_workspace.py: its panels show what a recipe logs, nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb_workspace  # scripts/ is on the path


def test_every_panel_shows_a_key_that_a_recipe_logs(workspace: Any, tmp_path: Path) -> None:
    section = json.loads((workspace.path / "evaluation.json").read_text())
    run = workspace.run(
        tmp_path / "run", "max_steps_per_epoch=2", f"evaluation={json.dumps({**section, 'every_n_steps': 1})}"
    )
    assert run.status == 0, run.err
    logged = {key for row in run.rows for key in row}
    shown = {key for curves in wandb_workspace.CURVES.values() for _, _, keys in curves for key in keys}
    assert shown and shown <= logged
    assert {over for curves in wandb_workspace.CURVES.values() for _, over, _ in curves} <= logged | {"Step"}
    summary = json.loads((tmp_path / "run" / "run.json").read_text())["summary"]
    # A run on the CPU has no device memory to tell of.
    summary |= {name: 0.0 for name in ("device_peak_reserved_gib",)}
    assert {key for _, key in wandb_workspace.BARS} <= {f"summary/{name}" for name in summary}


def test_the_view_holds_all_panels_and_groups_by_label(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb_workspaces", reason="pip install -e .[dev]")
    assert wandb_workspace.main(["--entity", "me", "--print", "--group"]) == 0
    text = capsys.readouterr().out
    view = json.loads(text)
    assert (view["entity"], view["project"]) == ("me", "tune-offload")
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    panels = {section["name"]: len(section["panels"]) for section in sections}
    assert panels == {"Runs": 4, "Loss": 6, "Speed": 4, "Memory (GiB)": 4}
    assert '"label' in json.dumps(view["spec"]["section"]["runSets"])


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert wandb_workspace.main(["--entity", "me"]) == 2
    assert capsys.readouterr().err == "error: views need wandb-workspaces: pip install wandb-workspaces\n"

"""Runs that diverge, are killed, started twice, out of disk, or given a damaged checkpoint: nothing good is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.checkpoints import manifest as checkpoint_manifest
from offload.checkpoints.output_lock import OutputLock
from offload.training.finetune import FinetuneRecipe

SHORT = ("max_steps_per_epoch=6", "save_every_n_steps=2")
RESUME = "resume_from_checkpoint=True"


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.is_dir())


def spoil_gradients(monkeypatch: pytest.MonkeyPatch, at_step: int, value: float) -> None:
    """From step ``at_step`` on one gradient holds ``value``; the loss of that step is as it would be."""
    prepare = FinetuneRecipe.prepare_model

    def prepared(recipe: Any, parts: Any) -> None:
        prepare(recipe, parts)
        param = [p for p in recipe.model.parameters() if p.requires_grad][-1]

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            if recipe.global_step >= at_step:
                gradient.view(-1)[0] = value
            return gradient

        param.register_hook(spoil)

    monkeypatch.setattr(FinetuneRecipe, "prepare_model", prepared)


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        (float("inf"), (), "the norm of the gradients became {value} in step 4 at lr="),
        (
            float("nan"),
            ("clip_grad_norm=null", "log_every_n_steps=3"),
            "the weights output.weight are not finite after step 4;",
        ),
        (
            float("inf"),
            ("clip_grad_norm=null", "log_every_n_steps=3", "optimizer.update_in_backward=True"),
            "the weights output.weight are not finite after step 4;",
        ),
    ],
    ids=["norm known", "norm unknown", "in backward"],
)
def test_gradients_that_are_not_finite_cost_no_checkpoint(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, expected: str, value: float
) -> None:
    spoil_gradients(monkeypatch, 4, value)
    result = workspace.run(tmp_path / "run", "max_steps_per_epoch=6", "save_every_n_steps=1", "keep_last_n=1", *options)
    assert result.status == 2
    (error,) = result.errors()
    assert error.startswith("error: " + expected.format(value=value)), error
    assert "nothing was saved since step_3" in error
    assert f"resume_from_checkpoint={tmp_path / 'run' / 'step_3'}" in error
    assert folders(tmp_path / "run") == ["step_3"]
    assert all(tensor.isfinite().all() for tensor in result.weights(3).values())
    monkeypatch.undo()
    again = workspace.run(tmp_path / "run", "max_steps_per_epoch=6", f"resume_from_checkpoint={tmp_path}/run/step_3")
    assert again.status == 0, again.err


def test_a_first_checkpoint_that_would_be_bad(workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_gradients(monkeypatch, 1, float("nan"))
    lora = workspace.run(
        tmp_path / "run",
        "max_steps_per_epoch=1",
        "clip_grad_norm=null",
        "log_every_n_steps=5",
        "evaluation=null",
        recipe="lora_finetune_single_device",
    )
    (error,) = lora.errors()
    assert "are not finite after step 1; nothing was saved." in error and "start again" in error
    assert not folders(tmp_path / "run")


def test_a_run_that_is_complete_is_resumed_with_status_0(workspace: Any, tmp_path: Path) -> None:
    """A supervisor that restarts until 0 ends, also after a kill behind the last save."""
    first = workspace.run(tmp_path / "run", *SHORT)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    (tmp_path / "run" / ".run.json.tmp").write_text("{")  # killed while it wrote
    done = workspace.run(tmp_path / "run", *SHORT, RESUME)
    assert (first.status, done.status) == (0, 0), done.err
    assert f"the run ended with step 6, and {tmp_path / 'run' / 'step_6'} holds its result" in done.out
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    beyond = workspace.run(tmp_path / "run", "max_steps_per_epoch=5", RESUME)
    assert beyond.status == 0 and "nothing is left to train" in beyond.out


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_damaged_newest_checkpoint_costs_its_steps_only(workspace: Any, tmp_path: Path) -> None:
    expected = workspace.run(tmp_path / "whole", *SHORT)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step_6")
    flip(tmp_path / "run" / "step_4" / "model-00001-of-00001.safetensors", -4000)
    resumed = workspace.run(tmp_path / "run", *SHORT, RESUME)
    assert resumed.status == 0, resumed.err
    assert "step_4 is damaged" in resumed.err and f"resuming from {tmp_path / 'run' / 'step_2'}" in resumed.out
    for name, tensor in expected.weights(6).items():
        assert torch.equal(resumed.weights(6)[name], tensor)
    chosen = workspace.run(tmp_path / "run", *SHORT, "resume_from_checkpoint=step_2")
    assert chosen.status == 0 and f"resuming from {tmp_path / 'run' / 'step_2'}" in chosen.out
    assert [row["step"] for row in chosen.rows] == list(range(1, 7))
    unknown = workspace.run(tmp_path / "run", *SHORT, "resume_from_checkpoint=step_3")
    assert unknown.status == 2 and "step_2, step_4, step_6" in unknown.errors()[0]


def test_one_command_for_a_job_that_may_be_stopped_at_any_time(workspace: Any, tmp_path: Path) -> None:
    """auto starts from the beginning where nothing was saved, and goes on from the newest checkpoint where it was."""
    run, auto = tmp_path / "run", "resume_from_checkpoint=auto"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')  # of a run that was killed before it saved
    strict = workspace.run(run, *SHORT, RESUME)
    assert strict.status == 2 and "no whole checkpoint" in strict.errors()[0]
    assert "resume_from_checkpoint=auto" in strict.errors()[0]
    first = workspace.run(run, *SHORT, auto, "max_steps_per_epoch=4")
    assert first.status == 0, first.err
    assert f"resume_from_checkpoint=auto: no checkpoint in {run} yet, starting from the beginning" in first.out
    assert [row["step"] for row in first.rows] == [1, 2, 3, 4]
    assert json.loads((run / "run.json").read_text())["config"]["resume_from_checkpoint"] is False
    second = workspace.run(run, *SHORT, auto)
    assert second.status == 0 and f"resuming from {run / 'step_4'}" in second.out
    assert [row["step"] for row in second.rows] == list(range(1, 7))
    third = workspace.run(run, *SHORT, auto)
    assert third.status == 0 and "nothing is left to train" in third.out
    for checkpoint in run.glob("step_*"):
        flip(checkpoint / "recipe_state.pt", -100)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    damaged = workspace.run(run, *SHORT, auto)
    assert damaged.status == 2 and f"every checkpoint in {run} is damaged" in damaged.errors()[0]
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_two_runs_in_one_output_dir(workspace: Any, tmp_path: Path) -> None:
    other = OutputLock(tmp_path / "run")
    before = sorted((tmp_path / "run").iterdir())
    refused = workspace.run(tmp_path / "run", *SHORT)
    assert refused.status == 2
    (error,) = refused.errors()
    assert error.startswith("error: output_dir: another run is at work in") and "choose another output_dir" in error
    assert sorted((tmp_path / "run").iterdir()) == before
    other.release()
    assert workspace.run(tmp_path / "run", *SHORT).status == 0


@pytest.mark.parametrize("given", ["", "~nobody-of-that-name/x"])
def test_an_output_dir_that_is_no_folder(workspace: Any, given: str) -> None:
    result = workspace.run(Path("unused"), f"output_dir={given}")
    assert result.status == 2
    (error,) = result.errors()
    assert "output_dir" in error


def change(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(state: dict[str, Any]) -> None:
        *path, last = field.split(".")
        for key in path:
            state = state[int(key) if key.isdigit() else key]
        state[last] = value

    return apply


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("global_step", "4"),
        ("optimizer.state", {0: {"exp_avg": "text"}}),
        ("optimizer.param_groups", [{"params": ["a"]}]),
        ("lr_scheduler", {"base_lrs": "x"}),
        ("random.torch", torch.zeros(3)),
    ],
)
def test_fields_of_odd_types(workspace: Any, tmp_path: Path, one_run: Path, field: str, value: Any) -> None:
    run = Path(shutil.copytree(one_run, tmp_path / "run"))
    content = torch.load(run / "step_4" / "recipe_state.pt", weights_only=True)
    change(field, value)(content["recipe_state"])
    torch.save(content, run / "step_4" / "recipe_state.pt")
    (run / "step_4" / "checkpoint.json").unlink()
    checkpoint_manifest.write(run / "step_4", step=4, sequence=9, sums={})
    result = workspace.run(run, "max_steps_per_epoch=5", RESUME)
    assert result.status == 2
    (error,) = result.errors()
    assert "recipe_state.pt" in error and field.split(".")[0] in error, error


@pytest.fixture(scope="module")
def one_run(_workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from offload.training.launch import run_recipe
    from tests.recipes.conftest import ROOT, load_module  # type: ignore[import-not-found]

    run: Path = tmp_path_factory.mktemp("odd") / "run"
    recipe = load_module(ROOT / "recipes" / "full_finetune_single_device.py")
    config = str(_workspace.config("full_finetune_single_device"))
    options = ["max_steps_per_epoch=4", f"output_dir={run}"]
    assert run_recipe(recipe.FullFinetuneRecipeSingleDevice, ["--config", config, *options]) == 0
    return run


def test_a_reader_that_leaves_ends_nothing(workspace: Any, tmp_path: Path) -> None:
    process = workspace.spawn(workspace.command(tmp_path / "run", *SHORT))
    assert process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=60)
    assert process.returncode == 0, process.stderr.read()
    assert "no reader any more" in process.stderr.read()
    assert folders(tmp_path / "run") == ["step_2", "step_4", "step_6"]


def test_a_signal_while_the_logs_are_closed_tells_what_was_saved(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("offload.training.reporting.Reporter.close", interrupted)
    result = workspace.run(tmp_path / "run", "max_steps_per_epoch=1")
    assert result.status == 130
    assert f"interrupted at the end; {tmp_path / 'run' / 'step_1'} is whole" in result.err

"""The full fine-tuning recipe on data that is not as it should be: what it says, skips, saves, and goes on with."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from offload.data import batches as data

NOT_READ_BEFORE = 0.0


@pytest.fixture
def rows(workspace: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workspace.path / "train.jsonl").read_text().splitlines()][:60]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[list[dict[str, Any]]], str]:
    def write(rows: list[dict[str, Any]]) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"dataset.data_files={path}"

    return write


def with_nulls(rows: list[dict[str, Any]], *numbers: int) -> list[dict[str, Any]]:
    """The rows with no output in these, counted from 1."""
    return [{**row, "output": None} if n in numbers else row for n, row in enumerate(rows, start=1)]


def has_files(folder: Path) -> bool:
    return any(path.is_file() for path in folder.rglob("*"))


def only_error(result: Any) -> str:
    assert result.status == 2 and "Traceback" not in result.err, result.err
    (line,) = result.errors()
    return str(line)


@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_row_is_told_before_the_first_step(
    workspace: Any, tmp_path: Path, rows: Any, write: Any, packed: bool
) -> None:
    result = workspace.run(tmp_path / "run", write(with_nulls(rows, 58)), f"dataset.packed={packed}")
    assert f"{tmp_path}/rows.jsonl, line 58: output is null" in only_error(result)
    assert "dataset_errors=skip" in result.err and not has_files(tmp_path / "run")


@pytest.mark.parametrize("packed", [False, True])
def test_bad_rows_are_left_out_on_request(workspace: Any, tmp_path: Path, rows: Any, write: Any, packed: bool) -> None:
    """What is trained is what a file without them gives."""
    options = ("dataset_errors=skip", "shuffle=False", f"dataset.packed={packed}", "max_steps_per_epoch=4")
    result = workspace.run(tmp_path / "run", write(with_nulls(rows, 2, 5, 58)), *options)
    assert result.status == 0, result.err
    assert "3 of 60 rows are left out (dataset_errors=skip)" in result.out
    assert f"{tmp_path}/rows.jsonl, line 2: output is null" in result.out
    good = [row for number, row in enumerate(rows, start=1) if number not in (2, 5, 58)]
    expected = workspace.run(tmp_path / "other", write(good), *options)
    assert [row["loss"] for row in result.rows] == [row["loss"] for row in expected.rows]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["data"] == {"rows_read": 60, "rows_left_out": 3, "samples_without_labels": 0}


def test_a_bad_row_in_the_middle_loses_nothing(
    workspace: Any, tmp_path: Path, rows: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops a run that could not read all rows before; going on without it is as if it had been left out at once."""
    order = data.Batches([None] * 60, None, batch_size=2, shuffle=True, seed=0).order(0)  # type: ignore[arg-type]
    reached, line = 6, order[13] + 1
    bad = write(with_nulls(rows, line))
    skipping = workspace.run(tmp_path / "whole", bad, "dataset_errors=skip")
    assert skipping.status == 0, skipping.err
    monkeypatch.setattr(data, "SCAN_SECONDS", NOT_READ_BEFORE)
    stopped = workspace.run(tmp_path / "run", bad)
    assert f"rows.jsonl, line {line}: output is null" in only_error(stopped)
    assert f"saved {tmp_path}/run/step_{reached} before stopping" in stopped.err
    monkeypatch.undo()
    resumed = workspace.run(tmp_path / "run", bad, "dataset_errors=skip", "resume_from_checkpoint=True")
    assert resumed.status == 0, resumed.err
    weights, expected = resumed.weights(20), skipping.weights(20)
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)
    assert [row["loss"] for row in resumed.rows] == [row["loss"] for row in skipping.rows]


class Dying(Dataset[Any]):
    """Samples of which one kills the process that makes it; like host memory that runs out in a data worker."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 9 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"tokens": [1, 5, 6, 2], "labels": [-100, 5, 6, 2]}


def dying(tokenizer: Any) -> Dying:
    return Dying()


def test_a_killed_data_worker_loses_nothing(workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "dying", sys.modules[__name__])
    before = signal.getsignal(signal.SIGCHLD)
    result = workspace.run(
        tmp_path / "run", "dataset=dying.dying", "num_workers=1", "shuffle=False", "max_steps_per_epoch=8"
    )
    assert signal.getsignal(signal.SIGCHLD) is before
    line = only_error(result)
    assert "num_workers" in line and "SIGKILL" in line
    saved = {path.name for path in (tmp_path / "run").iterdir() if path.name.startswith("step_")}
    assert len(saved) == 1 and f"{tmp_path}/run/{saved.pop()} before stopping" in result.err


@pytest.mark.parametrize("packed", [False, True])
def test_no_label_counts(workspace: Any, tmp_path: Path, packed: bool) -> None:
    result = workspace.run(tmp_path / "run", "tokenizer.max_seq_len=8", f"dataset.packed={packed}")
    line = only_error(result)
    assert "has a label that counts" in line and "tokenizer.max_seq_len=8" in line
    assert not has_files(tmp_path / "run")


def test_some_samples_without_labels_are_told(workspace: Any, tmp_path: Path, rows: Any, write: Any) -> None:
    long = {"input": "word " * 60, "output": "never seen"}
    result = workspace.run(tmp_path / "run", write([*rows[:15], long, *rows[15:]]), "max_steps_per_epoch=1")
    assert result.status == 0, result.err
    assert "note: dataset: 1 of 61 samples (1.6 %) have no label that counts: prompts fill" in result.out


def test_samples_longer_than_the_model_takes(workspace: Any, tmp_path: Path) -> None:
    line = only_error(workspace.run(tmp_path / "run", "model.max_seq_len=16"))
    assert "model.max_seq_len" in line and "tokenizer.max_seq_len=16" in line


@pytest.mark.parametrize("at", ["log", "evaluate"])
def test_a_failure_between_steps_saves_first(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    from offload.errors import UserError
    from offload.training.finetune import FinetuneRecipe
    from offload.training.reporting import Reporter

    owner = Reporter if at == "log" else FinetuneRecipe
    original = getattr(owner, at)

    def failing(self: Any, *arguments: Any) -> Any:
        if at == "evaluate" or arguments[0] == 10:
            raise UserError("cannot be done")
        return original(self, *arguments)

    monkeypatch.setattr(owner, at, failing)
    result = workspace.run(tmp_path / "run", f"evaluation={(workspace.path / 'evaluation.json').read_text()}")
    assert only_error(result) == "error: cannot be done"
    assert (tmp_path / "run" / "step_10" / "checkpoint.json").is_file()


@pytest.mark.parametrize("in_backward", [False, True])
def test_memory_that_runs_out_in_a_step_loses_nothing(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_backward: bool
) -> None:
    """The resumed run draws the dropout that it would have drawn."""
    recipe = "lora_finetune_single_device"
    options = ("model.lora_dropout=0.2", "max_steps_per_epoch=6", "evaluation=null")
    if in_backward:
        options = (*options, "optimizer.update_in_backward=True", "clip_grad_norm=null")
    whole = workspace.run(tmp_path / "whole", *options, recipe=recipe)
    assert whole.status == 0, whole.err
    module, calls = workspace.recipes[recipe], []
    original = module.forward_backward

    def running_out(*arguments: Any, **keywords: Any) -> Any:
        loss = original(*arguments, **keywords)
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("too much")
        return loss

    monkeypatch.setattr(module, "forward_backward", running_out)
    stopped = workspace.run(tmp_path / "run", *options, recipe=recipe)
    assert "out of device memory" in only_error(stopped)
    saved = [path.name for path in (tmp_path / "run").glob("step_*")]
    if in_backward:
        assert saved == []
        return
    assert saved == ["step_3"]
    monkeypatch.undo()
    resumed = workspace.run(tmp_path / "run", *options, "resume_from_checkpoint=True", recipe=recipe)
    assert resumed.status == 0, resumed.err
    assert [row["loss"] for row in resumed.rows] == [row["loss"] for row in whole.rows]
    weights, expected = resumed.weights(6), whole.weights(6)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_loss_that_is_not_finite_is_not_saved(workspace: Any, tmp_path: Path) -> None:
    result = workspace.run(tmp_path / "run", "optimizer.lr=1e30", "lr_scheduler=null", "clip_grad_norm=null")
    assert "became nan" in only_error(result) and "before stopping" not in result.err
    assert not list((tmp_path / "run").glob("step_*"))


def test_nothing_is_saved_in_the_middle_of_a_step(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.errors import UserError

    calls = []

    def failing(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise UserError("half way")

    workspace.run(tmp_path / "first", "max_steps_per_epoch=1")  # loads the recipe
    monkeypatch.setattr(workspace.recipes["full_finetune_single_device"], "step_scheduler", failing)
    result = workspace.run(tmp_path / "run")
    assert only_error(result) == "error: half way" and len(calls) == 3
    assert not list((tmp_path / "run").glob("step_*"))


def test_a_resume_on_other_data_is_told(workspace: Any, tmp_path: Path, rows: Any, write: Any) -> None:
    options = ("save_every_n_steps=2", "dataset_errors=skip")
    first = workspace.run(tmp_path / "run", write(rows), *options, "max_steps_per_epoch=2")
    assert first.status == 0, first.err
    again = ("resume_from_checkpoint=True", "max_steps_per_epoch=3")
    # A row that is left out is still one of those that the order is made of.
    same = workspace.run(tmp_path / "run", write(with_nulls(rows, 58)), *options, *again)
    assert same.status == 0 and "rows or packs" not in same.out
    other = workspace.run(tmp_path / "run", write(rows[1:]), *options, again[0], "max_steps_per_epoch=4")
    assert other.status == 0 and "note: dataset: 60 rows or packs in the checkpoint's run, 59 now" in other.out

"""What a step logs is read when the next one is queued: the recipes on a played device.

The device is the simulated accelerator, on which a copy runs only when somebody waits for it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.metrics.log import read_metrics
from offload.simulation.accelerator import SimulatedAccelerator
from offload.training.loss import SummedLoss
from tests.recipes.conftest import ROOT, load_module
from tests.recipes.played import play_batches, play_reporting

FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"
PLAIN = ("optimizer=torch.optim.AdamW",)
STREAM = ("optimizer.strategy=stream",)
IN_BACKWARD = ("optimizer.update_in_backward=True", "clip_grad_norm=null")
WAYS = {
    "plain": PLAIN,
    "stream": STREAM,
    "stream in backward": (*STREAM, *IN_BACKWARD),
    "host in backward": ("optimizer.strategy=host", *IN_BACKWARD),
}

OPTIMIZER = ("optimizer.py", *(path.name for path in (ROOT / "offload" / "engine").glob("*.py")))
"""Where the optimizer waits, for its budget of memory; its own tests count that."""


@pytest.fixture
def played(simulated: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch) -> SimulatedAccelerator:
    play_reporting(monkeypatch, simulated)
    return simulated


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[Tensor], Tensor]) -> None:
    """Changes the loss of one step; without accumulation and evaluation, as each forward is a step's."""
    call, steps = SummedLoss.__call__, iter(range(1, 1000))

    def changed(self: SummedLoss, *batch: Any) -> Tensor:
        loss = call(self, *batch)
        return act(loss) if next(steps) == step else loss

    monkeypatch.setattr(SummedLoss, "__call__", changed)


@pytest.mark.parametrize(("recipe", "way"), [*((FULL, way) for way in WAYS), (LORA, "stream in backward")])
def test_a_step_waits_for_nothing_but_the_values_of_the_one_before(
    workspace: Any,
    tmp_path: Path,
    played: SimulatedAccelerator,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    way: str,
) -> None:
    waited: list[int] = []
    written: list[int] = []

    def on_batch() -> None:
        waited.append(len(played.host_waits))
        written.append(len(read_metrics(tmp_path / "run")))

    play_batches(monkeypatch, played, on_batch)
    options = ("max_steps_per_epoch=16", "evaluation=null", "log_every_n_steps=1")
    result = workspace.run(tmp_path / "run", *WAYS[way], *options, recipe=recipe)
    assert result.status == 0, result.err
    assert len(waited) == 16, "one batch is one step"
    # The optimizer is asked for its memory at lines 1, 2, 4, 8 and 16.
    for step in range(10, 16):
        waits = [place for thread, place in played.host_waits[waited[step - 1] : waited[step]] if thread == "main"]
        in_recipe = [place for place in waits if not place.startswith(OPTIMIZER)]
        assert len(in_recipe) <= 1 and all(place.startswith("late.py:") for place in in_recipe), in_recipe
    assert written == [0, *range(15)], "a line is written when the next step is queued"
    assert [row["step"] for row in result.rows] == list(range(1, 17))


def read_at_once(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[dict[str, float]]:
    """Loss, lr and norm of each step, read by the recipe as soon as it has them."""
    read: list[dict[str, float]] = []
    forward_backward, clip_gradients = module.forward_backward, module.clip_gradients

    def with_loss(loss: Any, batches: Any, optimizer: Any, *rest: Any, **options: Any) -> Tensor:
        value = forward_backward(loss, batches, optimizer, *rest, **options)
        read.append({"loss": value.item(), "lr": optimizer.param_groups[0]["lr"]})
        return value

    def with_norm(*arguments: Any, **options: Any) -> Tensor | None:
        norm = clip_gradients(*arguments, **options)
        read[-1]["grad_norm"] = norm if norm is None else norm.item()
        return norm

    monkeypatch.setattr(module, "forward_backward", with_loss)
    monkeypatch.setattr(module, "clip_gradients", with_norm)
    return read


@pytest.mark.parametrize(("way", "every"), [("plain", 1), ("plain", 3), ("stream in backward", 1)])
def test_lines_are_those_of_a_run_that_reads_at_once(
    workspace: Any,
    tmp_path: Path,
    simulated: SimulatedAccelerator,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    every: int,
) -> None:
    """With a schedule, accumulation, evaluations and checkpoints in between."""
    evaluation = {**json.loads((workspace.path / "evaluation.json").read_text()), "every_n_steps": 4}
    options = (
        *WAYS[way], "max_steps_per_epoch=10", "gradient_accumulation_steps=2", "save_every_n_steps=7",
        f"log_every_n_steps={every}", f"evaluation={json.dumps(evaluation)}",
    )  # fmt: skip
    workspace.recipes.setdefault(FULL, load_module(ROOT / "recipes" / f"{FULL}.py"))
    with monkeypatch.context() as patch:
        read = read_at_once(patch, workspace.recipes[FULL])
        expected = workspace.run(tmp_path / "at once", *options)
    play_reporting(monkeypatch, simulated)
    actual = workspace.run(tmp_path / "late", *options)
    assert (expected.status, actual.status) == (0, 0), expected.err + actual.err
    steps = [row["step"] for row in expected.rows]
    assert steps == (list(range(1, 11)) if every == 1 else [3, 4, 6, 7, 8, 9, 10])
    assert [list(row) for row in actual.rows] == [list(row) for row in expected.rows]
    for key in ("step", "loss", "lr", "grad_norm", "tokens_seen", "evaluation/loss"):
        assert [row.get(key) for row in actual.rows] == [row.get(key) for row in expected.rows], key
    for row, first in zip(actual.rows, [0, *steps], strict=False):
        values = read[first : row["step"]]
        # Summed in fp32, on the device.
        mean = sum((torch.tensor(value["loss"]) for value in values), torch.zeros(())).item() / len(values)
        assert (row["loss"], row["lr"], row["grad_norm"]) == (mean, values[-1]["lr"], values[-1]["grad_norm"])
    assert all(one["lr"] != other["lr"] and one["loss"] != other["loss"] for one, other in pairwise(read))


@pytest.mark.parametrize(
    ("options", "named", "saved"),
    [
        ((), "step 6 ", set()),
        (("save_every_n_steps=1",), "step 6 ", {"step_1", "step_2", "step_3", "step_4", "step_5"}),
        (("log_every_n_steps=4", "save_every_n_steps=3"), "steps 5 to 6 ", {"step_3"}),
    ],
    ids=["found a step late", "found before it is saved", "between logs"],
)
def test_a_loss_that_is_not_finite_names_its_step_and_is_not_saved(
    workspace: Any,
    tmp_path: Path,
    played: SimulatedAccelerator,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    named: str,
    saved: set[str],
) -> None:
    at_step(monkeypatch, 6, lambda loss: loss * float("nan"))
    result = workspace.run(tmp_path / "run", *PLAIN, "max_steps_per_epoch=12", "optimizer.lr=3e-3", *options)
    assert result.status == 2
    (error,) = result.errors()
    # Cosine after two steps of warm-up: the sixth step is the fourth of ten.
    lr = 3e-3 * 0.5 * (1 + torch.tensor(torch.pi * 3 / 10).cos().item())
    assert f"became nan in {named}at lr={lr:g}" in error
    assert all(row["step"] < 6 for row in result.rows) and not any("nonfinite" in row for row in result.rows)
    assert len(result.rows) == (2 if "log_every_n_steps=4" in options else 5)
    assert {path.name for path in (tmp_path / "run").glob("step_*")} == saved


def test_a_run_that_fails_leaves_the_lines_of_all_steps_before(
    workspace: Any, tmp_path: Path, played: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(loss: Tensor) -> Tensor:
        raise RuntimeError("a defect")

    at_step(monkeypatch, 6, fail)
    with pytest.raises(RuntimeError, match="a defect"):
        workspace.run(tmp_path / "run", *PLAIN, "max_steps_per_epoch=12")
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("every", [1, 4])
def test_an_interrupted_run_writes_its_last_line(
    workspace: Any, tmp_path: Path, played: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    def interrupt(loss: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return loss

    at_step(monkeypatch, 6, interrupt)
    result = workspace.run(tmp_path / "run", *PLAIN, "max_steps_per_epoch=12", f"log_every_n_steps={every}")
    assert result.status == 143
    assert [row["step"] for row in result.rows] == ([1, 2, 3, 4, 5, 6] if every == 1 else [4, 6])
    assert (tmp_path / "run" / "step_6").is_dir()


class Told(torch.optim.SGD):
    """Notes whether it was told to measure."""

    measure_grad_norm = True
    told: list[bool] = []

    def step(self, closure: Any = None) -> Any:
        self.told.append(self.measure_grad_norm)
        return super().step(closure)


def test_the_optimizer_is_told_in_which_steps_the_norm_is_asked_for(workspace: Any, tmp_path: Path) -> None:
    Told.told.clear()
    options = ("max_steps_per_epoch=8", "log_every_n_steps=3", "clip_grad_norm=null", "evaluation=null")
    result = workspace.run(
        tmp_path / "run", "optimizer={_component_: tests.recipes.test_late_logging.Told, lr: 0.1}", *options
    )
    assert result.status == 0, result.err
    assert Told.told == [step % 3 == 0 for step in range(1, 9)]
    assert [row["step"] for row in result.rows if row["grad_norm"] is not None] == [3, 6]

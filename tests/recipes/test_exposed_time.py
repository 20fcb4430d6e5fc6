"""A recipe's loop takes as long as the engine alone on simulated machines: logging every step exposes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from offload.data.batches import Batch
from offload.distributed.world import current
from offload.metrics.log import read_metrics
from offload.plan import replay as replaying
from offload.plan.replay import replay
from offload.plan.workload import GB, Machine, Workload
from offload.simulation.accelerator import SimulatedAccelerator
from offload.training.best_evaluation import BestEvaluation
from offload.training.page_locking import PageLocking
from offload.training.reporting import Reporter
from offload.training.saving import Saving
from tests.recipes.conftest import ROOT, load_module
from tests.recipes.played import StreamOfItsOwn, play_reporting

LOAD = Workload(16, (2**24,) * 4, tokens=2048, edge=2**26, dtype=torch.bfloat16, recompute=False)
MACHINE = Machine("a machine whose link is busy half of the time", 80e12, 50 * GB, 50 * GB, 800 * GB, 250 * GB)

STEPS = 8
WARM_UP = 5  # steps that create states and settle into the rhythm that goes on
TOKENS = 1000
LOADING_SECONDS = 0.02  # a tenth of a step, which the device must not wait for
IN_FLIGHT = {"in_flight_gib": 8.0}  # how far the CPU runs ahead in backward

RECIPES = {
    "full_finetune_single_device": "FullFinetuneRecipeSingleDevice",
    "lora_finetune_single_device": "LoRAFinetuneRecipeSingleDevice",
}
WAYS: dict[str, dict[str, Any]] = {
    "stream in backward": {"strategy": "stream", "update_in_backward": True, **IN_FLIGHT},
    "stream at step": {"strategy": "stream", **IN_FLIGHT},
    "host in backward": {"strategy": "host", "update_in_backward": True, **IN_FLIGHT},
}


class Batches:
    """Batches without end, each of which costs the host time."""

    def __init__(self, simulator: SimulatedAccelerator) -> None:
        self._simulator = simulator

    def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        while True:
            self._simulator._threads.main.now += LOADING_SECONDS
            x = torch.zeros(1, requires_grad=True)
            yield Batch({"x": x}, torch.zeros(1), num_tokens=TOKENS, num_labels=1, sample_length=1.0)


def recipe_of(
    module: ModuleType,
    name: str,
    simulator: SimulatedAccelerator,
    output_dir: Path,
    begins: list[float],
    **optimizer: Any,
) -> Any:
    """A recipe whose model, data and optimizer are those that :func:`replay` times; the loop is its own.

    Args:
        begins: gets the moment at which each step's first layer begins.
    """
    optimizer["in_flight_gib"] /= LOAD.shrink
    model = replaying._model(simulator, MACHINE, LOAD)
    model[0].register_forward_pre_hook(lambda *_: begins.append(simulator.now("compute")))
    recipe = getattr(module, RECIPES[name]).__new__(getattr(module, RECIPES[name]))
    recipe.world = current()
    recipe.page_locking = PageLocking(recipe)
    recipe.settings = SimpleNamespace(
        gradient_accumulation_steps=1, epochs=1, evaluation=None, log_every_n_steps=1, save_every_n_steps=None,
        clip_grad_norm=None,
    )  # fmt: skip
    recipe.saving = Saving(None, recipe.settings, recipe.world, adapts=False)
    recipe.device, recipe.activations = torch.device("cpu"), contextlib.nullcontext()
    recipe.held_out = recipe.profiler = recipe.lr_scheduler = None
    recipe.epoch = recipe.step_in_epoch = recipe.global_step = 0
    recipe.best = BestEvaluation(None)
    recipe.total_steps = recipe.steps_per_epoch = STEPS
    recipe.batches, recipe.params = Batches(simulator), list(model.parameters())
    recipe.loss = lambda inputs, labels, num_labels: model(inputs["x"]).sum()
    recipe.optimizer = replaying._Simulated(simulator, model.named_parameters(), lr=1e-3, model=model, **optimizer)
    recipe.save_checkpoint = lambda: output_dir
    recipe.reporter = Reporter(
        OmegaConf.create({}), None, output_dir=output_dir, device=recipe.device, size=None,
        optimizer=recipe.optimizer, total_steps=STEPS, resume_step=None, tokens_seen=0,
    )  # fmt: skip
    return recipe


@dataclass
class Trained:
    """Seconds of a step in the steady state, and what the log says of these steps."""

    step: float
    rows: list[dict[str, Any]]


def train(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, output_dir: Path, way: str) -> Trained:
    begins: list[float] = []
    with (
        SimulatedAccelerator(MACHINE.rates(), order="time", scale=LOAD.shrink) as simulator,
        replaying._small_chunks(LOAD.shrink),
    ):
        play_reporting(monkeypatch, simulator, StreamOfItsOwn(simulator))
        assert recipe_of(module, name, simulator, output_dir, begins, **WAYS[way]).train() == 0
    steady = slice(WARM_UP, STEPS - 1)
    return Trained((begins[-1] - begins[WARM_UP]) / (STEPS - 1 - WARM_UP), read_metrics(output_dir)[steady])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_the_loop_takes_as_long_as_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, name: str
) -> None:
    expected = replay(MACHINE, LOAD, **WAYS[way])
    assert expected.step < 1.8 * expected.compute, "no machine on which much could overlap"
    trained = train(monkeypatch, load_module(ROOT / "recipes" / f"{name}.py"), name, tmp_path, way)
    assert trained.step == pytest.approx(expected.step, rel=0.01)
    # Read a step late, and told of the step that they belong to.
    rates = [row["tokens_per_second"] for row in trained.rows]
    assert len(rates) == 2 and rates == pytest.approx([TOKENS / expected.step] * 2, rel=0.01)


@pytest.mark.parametrize("way", ["stream in backward", "host in backward"])
def test_a_loss_that_is_read_at_once_exposes_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """So would any other wait for the step that was queued last: the device runs dry until the next one is."""
    name = "full_finetune_single_device"
    module = load_module(ROOT / "recipes" / f"{name}.py")
    monkeypatch.setattr(module, "step_scheduler", lambda scheduler, loss: loss.item())
    trained = train(monkeypatch, module, name, tmp_path, way)
    assert trained.step > 1.02 * replay(MACHINE, LOAD, **WAYS[way]).step

"""What the recipe costs over a bare PyTorch loop: same model, batches, loss and optimizer, step by step in turn.

    python scripts/bench_recipe.py                                  # prints the result
    python scripts/bench_recipe.py --out scripts/results/NAME.json  # records it too

The recipe trains the tiny config in a thread of its own, exactly as its users run it (metrics, progress, checks and
all). After each of its steps it is held up while the bare loop below, which has nothing but the work, does one step
on a model of its own; both take turns on an otherwise idle process. So each pair of steps sees the same machine, and
the median over all pairs is steady where whole runs differ by ten per cent. A step is timed from the end of one
backward to the end of the next.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# As `tune run` does; OpenMP reads it when torch loads.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

from offload.config.loading import load_and_check

ROOT = Path(__file__).parents[1]
WARM_UP_STEPS = 10


def load_recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe", ROOT / "recipes" / "full_finetune_single_device.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(module: ModuleType, output_dir: str, steps: int, overrides: list[str]) -> Any:
    """The recipe, set up."""
    overrides = [f"output_dir={output_dir}", f"max_steps_per_epoch={steps}", "evaluation=null", *overrides]
    recipe_class = module.FullFinetuneRecipeSingleDevice
    cfg, settings = load_and_check(ROOT / "configs" / "tiny_llama_offload.yaml", overrides, recipe_class.Settings, [])
    recipe = recipe_class(settings, cfg)
    recipe.setup()
    return recipe


def loop_steps(recipe: Any) -> Iterator[None]:
    """The bare loop over a recipe's parts, one step per ``next``."""
    loss_of, optimizer, scheduler = recipe.loss, recipe.optimizer, recipe.lr_scheduler
    clip = recipe.settings.clip_grad_norm
    for batch in recipe.batches.epoch(0):
        loss = loss_of(batch.inputs, batch.labels, batch.num_labels) / batch.num_labels
        loss.backward()
        optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield


class Turns:
    """Lets the recipe's thread run from the end of one backward to the next, and holds it there."""

    def __init__(self, recipe: Any) -> None:
        self._recipe = recipe
        self._go, self._held = threading.Semaphore(0), threading.Semaphore(0)
        self._count = recipe.reporter.count
        recipe.reporter.count = self._hold
        self._thread = threading.Thread(target=self._train)
        self._thread.start()
        self._held.acquire()

    def _hold(self, *step: Any, **options: Any) -> None:
        self._held.release()
        self._go.acquire()
        self._count(*step, **options)

    def _train(self) -> None:
        self._recipe.train()
        self._held.release()

    def step(self) -> None:
        self._go.release()
        self._held.acquire()

    def join(self) -> None:
        self._thread.join()


def pairs(module: ModuleType, steps: int, overrides: list[str]) -> list[tuple[float, float]]:
    """Seconds of each step of the recipe and of the loop."""
    result = []
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        recipe = make(module, one, steps, overrides)
        bare = make(module, other, steps, [*overrides, "metric_logger=null"])
        loop, turns = loop_steps(bare), Turns(recipe)
        for _ in range(steps):
            started = time.perf_counter()
            turns.step()
            between = time.perf_counter()
            next(loop)
            result.append((between - started, time.perf_counter() - between))
        turns.join()
        recipe.cleanup(0)
        bare.cleanup(1)
    # The recipe's last turn saves the checkpoint, which is not a step.
    return result[WARM_UP_STEPS:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--out", type=Path, help="record the result as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    module = load_recipe()
    rounds, all_pairs = [], []
    for number in range(arguments.rounds):
        measured = pairs(module, arguments.steps, arguments.overrides)
        all_pairs += measured
        rounds.append(statistics.median(loop / recipe for recipe, loop in measured))
        print(f"round {number + 1}: recipe / loop {rounds[-1]:.3f}, median of {len(measured)} pairs of steps")
    result = {
        "throughput_ratio": statistics.median(loop / recipe for recipe, loop in all_pairs),
        "recipe_step_seconds": statistics.median(recipe for recipe, _ in all_pairs),
        "loop_step_seconds": statistics.median(loop for _, loop in all_pairs),
        "pairs": len(all_pairs),
        "throughput_ratio_by_round": rounds,
    }
    print(f"recipe / loop {result['throughput_ratio']:.3f} in tokens per second, median of {len(all_pairs)} pairs")
    if arguments.out:
        command = f"python scripts/bench_recipe.py --rounds {arguments.rounds} --steps {arguments.steps}"
        record = {
            "benchmark": "recipe against a bare loop, tiny_llama_offload",
            "command": " ".join([command, *arguments.overrides]),
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "result": result,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"recorded in {arguments.out}")


if __name__ == "__main__":
    main()

"""What the recipe costs over a bare PyTorch loop: same model, batches, loss and optimizer, in turn in one process.

    python scripts/bench_recipe.py                                  # prints the table
    python scripts/bench_recipe.py --out scripts/results/NAME.json  # records it too

Each round trains the tiny config once with the recipe (as its users run it: metrics, progress, checks and all)
and once with the loop below, which has nothing but the work. Compared are tokens per second of the steps
alone: neither set-up nor the final checkpoint counts. The order alternates, and the ratio is taken per round,
because machines drift.
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
import time
from pathlib import Path
from types import ModuleType
from typing import Any

# As `tune run` does; OpenMP reads it when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from offload.training.config import load_and_check
from offload.training.metrics import read_metrics

ROOT = Path(__file__).parents[1]
WARM_UP_STEPS = 5


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


def time_recipe(module: ModuleType, steps: int, overrides: list[str]) -> float:
    """Tokens per second of the recipe's steps after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            recipe = make(module, folder, steps, overrides)
            recipe.cleanup(recipe.train())
        rows = read_metrics(folder)
    seen = [row["tokens_seen"] for row in rows]
    tokens = [after - before for before, after in zip([0, *seen], seen, strict=False)]
    seconds = [n / row["tokens_per_second"] for n, row in zip(tokens, rows, strict=True)]
    return sum(tokens[WARM_UP_STEPS:]) / sum(seconds[WARM_UP_STEPS:])


def time_loop(module: ModuleType, steps: int, overrides: list[str]) -> float:
    """Tokens per second of the bare loop's steps after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            recipe = make(module, folder, steps, [*overrides, "metric_logger=null"])
        loss_of, optimizer, scheduler = recipe.loss, recipe.optimizer, recipe.lr_scheduler
        clip = recipe.settings.clip_grad_norm
        batches = recipe.batches.epoch(0)
        tokens, started = 0, 0.0
        for step in range(steps):
            if step == WARM_UP_STEPS:
                tokens, started = 0, time.perf_counter()
            batch = next(batches)
            loss = loss_of(batch.inputs, batch.labels, batch.num_labels) / batch.num_labels
            loss.backward()
            optimizer.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            tokens += batch.num_tokens
        seconds = time.perf_counter() - started
        recipe.cleanup(1)
    return tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="record the result as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    module = load_recipe()
    rounds = []
    for number in range(arguments.rounds):
        timers = {"recipe": time_recipe, "loop": time_loop}
        names = ["recipe", "loop"] if number % 2 == 0 else ["loop", "recipe"]
        rates = {name: timers[name](module, arguments.steps, arguments.overrides) for name in names}
        rounds.append({"recipe": rates["recipe"], "loop": rates["loop"], "ratio": rates["recipe"] / rates["loop"]})
        print(f"round {number + 1}: recipe {rates['recipe']:,.0f} tok/s, loop {rates['loop']:,.0f} tok/s, "
              f"ratio {rounds[-1]['ratio']:.3f}")  # fmt: skip
    median = {key: statistics.median(r[key] for r in rounds) for key in ("recipe", "loop", "ratio")}
    print(f"median: recipe {median['recipe']:,.0f}, loop {median['loop']:,.0f} tok/s, ratio {median['ratio']:.3f}")
    if arguments.out:
        record = {
            "benchmark": "recipe against a bare loop, tiny_llama_offload",
            "command": f"python scripts/bench_recipe.py --rounds {arguments.rounds} --steps {arguments.steps} "
            + " ".join(arguments.overrides),
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "processor": platform.processor() or platform.machine(),
            "unit": "tokens per second; ratio is recipe / loop, per round",
            "median": median,
            "rounds": rounds,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"recorded in {arguments.out}")


if __name__ == "__main__":
    main()

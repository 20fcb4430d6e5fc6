"""Kills training runs at random moments and resumes them until they end: each must end as if nothing had happened.

    python scripts/kill_storm.py --kills 20                                         # prints the result
    python scripts/kill_storm.py --kills 1000 --out scripts/results/kill_storm.json  # records it too
    python scripts/kill_storm.py --kills 50 --setups 5 --add --out …                # adds to what is recorded

A run is killed (SIGKILL; one time in eight SIGTERM, which it may answer with a checkpoint), looked at, and started
again with the same command, resuming if it has a checkpoint. Where checkpoints are written beside training, every other
kill comes while one is being written. Each time every `step_<n>` must be whole, with the right checksums; when it ends,
its weights, its optimizer's state, its random state and its metrics must equal those of a run that nobody touched, bit
for bit, and nothing but what that one leaves may be there.

Each start is a fork of this process, which has imported everything and computed nothing: a start costs what its set-up
and its steps cost, not the imports.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from offload import torchao_shim

torchao_shim.install()

from offload.checkpoints import manifest as checkpoint_manifest  # noqa: E402
from offload.checkpoints import state as recipe_state  # noqa: E402
from offload.checkpoints.manager import STATE_NAME  # noqa: E402
from offload.checkpoints.shared_states import STATES_DIR  # noqa: E402
from offload.metrics.log import read_metrics  # noqa: E402
from offload.training.launch import run_recipe  # noqa: E402

ROOT = Path(__file__).parents[1]
FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"
COMMON = ("metric_logger=null", "max_steps_per_epoch=9", "save_every_n_steps=2", "batch_size=1")
BESIDE = ("enable_async_checkpointing=True", "async_checkpoint_gib=0.125", "save_every_n_steps=1")
PACKED = ("optimizer.optimizer_class=offload.optim.AdamW", "~optimizer.fused", "dtype=bf16")
# Times and memory differ from run to run; everything else must not.
MEASURED = re.compile(r"time|time/.*|memory/.*|.*tokens_per_second|mfu")
NUMBERED = re.compile(r"(metrics|run)\.\d+\.jsonl?")
TIMEOUT = 300.0


@dataclass(frozen=True)
class Setup:
    """What is trained: overrides of a recipe's tiny config."""

    recipe: str
    overrides: tuple[str, ...]

    @property
    def writes_beside(self) -> bool:
        """Whether checkpoints are written beside training."""
        return set(BESIDE) <= set(self.overrides)


SETUPS = {
    "update on the CPU, clipped, accumulated": Setup(
        FULL, ("optimizer.strategy=host", "gradient_accumulation_steps=2", "clip_grad_norm=1.0")
    ),
    "plain AdamW, evaluated, last one kept": Setup(FULL, ("optimizer=torch.optim.AdamW", "keep_last_n=1")),
    "8-bit states streamed in backward": Setup(
        FULL,
        (*PACKED, "optimizer.state_dtype=int8", "optimizer.master=split", "optimizer.strategy=stream",
         "optimizer.update_in_backward=True", "clip_grad_norm=null", "keep_last_n=2"),
    ),
    "stochastic rounding, two epochs, a worker": Setup(
        FULL, (*PACKED, "optimizer.master=stochastic", "max_steps_per_epoch=5", "epochs=2", "num_workers=1")
    ),
    "LoRA with dropout, merged too": Setup(LORA, ("model.lora_dropout=0.1", "keep_last_n=2")),
    "checkpoints beside training, states streamed": Setup(
        FULL, (*BESIDE, "optimizer.strategy=stream", "max_steps_per_epoch=12", "keep_last_n=2")
    ),
}  # fmt: skip


@dataclass
class Tally:
    """What happened to one set-up."""

    kills: int = 0
    before_the_first_step: int = 0
    while_a_checkpoint_was_written: int = 0
    answered_with_a_checkpoint: int = 0
    runs_that_ended: int = 0
    resumes: int = 0
    checkpoints_checked: int = 0
    failures: list[str] = field(default_factory=list)


class Storm:
    """Runs one set-up, whole and in pieces.

    Args:
        setup: what to run.
        config: its YAML file.
        folder: everything is written below.
    """

    def __init__(self, setup: Setup, config: Path, folder: Path) -> None:
        self._setup, self._config, self._folder = setup, config, folder
        self._module = load_recipe(setup.recipe)
        self.tally = Tally()
        start = time.monotonic()
        self._whole = folder / "whole"
        # Twice: the first one fills caches, the second tells how long a run takes.
        for _ in range(2):
            shutil.rmtree(self._whole, ignore_errors=True)
            start = time.monotonic()
            self._check(self._wait(self._start(self._whole, resume=False)) == 0, "the unbroken run failed")
        self._seconds = time.monotonic() - start

    def run(self, kills: int, rng: random.Random, minutes: float) -> Tally:
        """Kills ``kills`` times, or for so many minutes, and lets the last run end."""
        deadline = time.monotonic() + 60 * minutes
        life = 0

        def is_over() -> bool:
            return self.tally.kills >= kills or time.monotonic() > deadline

        while not is_over():
            life += 1
            self._live(self._folder / f"run{life}", is_over, rng)
        return self.tally

    def _live(self, out: Path, is_over: Callable[[], bool], rng: random.Random) -> None:
        """One run, killed until it ends."""
        while True:
            resume = out.exists() and bool(checkpoint_manifest.whole_checkpoints(out))
            self.tally.resumes += resume
            started = time.monotonic()
            child = self._start(out, resume=resume)
            if is_over():
                status = self._wait(child)
                break
            number = signal.SIGTERM if rng.random() < 0.125 else signal.SIGKILL
            # A resumed run is shorter, so the end of runs is hit all the same.
            delay = rng.uniform(0, 0.9 * self._seconds)
            while time.monotonic() - started < delay and not has_ended(child):
                time.sleep(0.001)
            if self._setup.writes_beside and rng.random() < 0.5:
                while not is_writing(out) and not has_ended(child):
                    time.sleep(0.0005)
                time.sleep(rng.uniform(0, 0.03))
            if has_ended(child):
                status = self._wait(child)
                break
            steps = num_steps(out)
            writes = is_writing(out)
            os.kill(child, number)
            status = self._wait(child)
            if status in (0, 2):  # it had ended in the meantime, or has failed by itself
                break
            self.tally.kills += 1
            self.tally.before_the_first_step += steps == 0
            self.tally.while_a_checkpoint_was_written += writes
            self.tally.answered_with_a_checkpoint += status == 128 + signal.SIGTERM
            self._check(status in (-number, 128 + number), f"status {status} after {signal.Signals(number).name}")
            self._check_checkpoints(out)
        self._check(status == 0, f"a run ended with {status}")
        self.tally.runs_that_ended += 1
        self._check_checkpoints(out)
        if status == 0:
            self._compare(out)
        if not self.tally.failures:
            shutil.rmtree(out)

    def _start(self, out: Path, *, resume: bool) -> int:
        overrides = [*COMMON, *self._setup.overrides, f"output_dir={out}", f"resume_from_checkpoint={resume}"]
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        status = 70
        try:
            log = os.open(self._folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            recipe_class = next(
                value for name, value in vars(self._module).items() if name.endswith("RecipeSingleDevice")
            )
            status = run_recipe(recipe_class, ["--config", str(self._config), *overrides])
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _wait(self, child: int) -> int:
        """Its status as a shell's caller sees it: -9 where SIGKILL ended it."""
        deadline = time.monotonic() + TIMEOUT
        while not has_ended(child):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                self._check(False, f"a run hung for {TIMEOUT:.0f} s")
            time.sleep(0.001)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.tally.failures.append(otherwise)

    def _check_checkpoints(self, out: Path) -> None:
        for path in out.glob("step_*") if out.exists() else ():
            self.tally.checkpoints_checked += 1
            damage = damage_of(path)
            self._check(damage is None, f"{path.name}: {damage}")

    def _compare(self, out: Path) -> None:
        theirs, ours = (sorted(p.name for p in folder.iterdir()) for folder in (self._whole, out))
        ours = [name for name in ours if not NUMBERED.fullmatch(name)]
        # With SIGTERM a run saves at steps of its own, and then keeps others.
        expected = {name for name in theirs if not name.startswith("step_")}
        self._check({name for name in ours if not name.startswith("step_")} == expected, f"{ours} instead of {theirs}")
        last = max((name for name in theirs if name.startswith("step_")), key=lambda name: int(name[5:]))
        self._check(last in ours, f"{last} is missing: {ours}")
        rows = [
            [{key: value for key, value in row.items() if not MEASURED.fullmatch(key)} for row in read_metrics(folder)]
            for folder in (self._whole, out)
        ]
        self._check(rows[0] == rows[1], "the metrics differ")
        for path in sorted((self._whole / last).rglob("*")):
            name = path.relative_to(self._whole / last)
            if path.suffix == ".safetensors":
                self._check(path.read_bytes() == (out / last / name).read_bytes(), f"{last}/{name} differs")
        states = [state_of(folder / last) for folder in (self._whole, out)]
        for place in differences(states[0], states[1], "state"):
            self._check(False, f"{last}: {place} differs")


def load_recipe(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def is_writing(out: Path) -> bool:
    """Whether a checkpoint is being written, or was when its run was killed."""
    try:
        return any(name.startswith(".step_") for name in os.listdir(out))
    except OSError:
        return False


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with it; None for a whole one."""
    try:
        manifest = checkpoint_manifest.read(checkpoint)
        return checkpoint_manifest.difference(checkpoint, manifest, manifest.sums)
    except Exception as error:
        return str(error)


def state_of(checkpoint: Path) -> dict[str, Any]:
    """All that a resume reads, beside the weights; the optimizer's state whole."""
    state: dict[str, Any] = recipe_state.read(checkpoint / STATE_NAME)
    del state["recipe_state"]["config"]  # has the output_dir
    optimizer: dict[str, Any] = {}
    if (checkpoint / STATES_DIR).is_dir():
        reader = FileSystemReader(checkpoint / STATES_DIR)
        _load_state_dict(optimizer, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {**state, STATES_DIR: optimizer}


def num_steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    with contextlib.suppress(OSError):
        return path.read_bytes().count(b"\n")
    return 0


def differences(left: Any, right: Any, place: str) -> list[str]:
    """Where two nested states are not equal to the bit."""
    if type(left) is not type(right):
        return [place]
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [f"{place}: keys"]
        return [d for key in left for d in differences(left[key], right[key], f"{place}.{key}")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{place}: length"]
        return [d for i, (a, b) in enumerate(zip(left, right, strict=True)) for d in differences(a, b, f"{place}.{i}")]
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
        return [] if same else [place]
    return [] if left == right else [place]


def import_everything() -> None:
    """What a run would import, so that no child has to."""
    for name in (
        "datasets",
        "sentencepiece",
        "torchtune.data",
        "torchtune.datasets",
        "torchtune.models.llama2",
        "torchtune.training",
        "torchtune.training.lr_schedulers",
        "offload.optim",
        "offload.training.loss",
        "torch.utils.data",
    ):
        importlib.import_module(name)
    import datasets

    datasets.disable_progress_bars()
    gc.freeze()


def write_result(
    out: Path,
    result: Mapping[str, Mapping[str, Any]],
    started: float,
    names: Iterable[str],
    *,
    adds_to: Mapping[str, Any],
) -> None:
    """Records what happened to each set-up, and all of it together.

    Args:
        out: a JSON file.
        result: what happened now, by set-up.
        started: since when, by the monotonic clock.
        names: of all set-ups, in order.
        adds_to: a result of before, or nothing.
    """

    def together(tallies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Counts and failures added, the worst of what is measured."""
        columns = {key: [tally[key] for tally in tallies] for key in tallies[0]}
        return {key: max(v) if isinstance(v[0], float) else sum(v, type(v[0])()) for key, v in columns.items()}

    before: Mapping[str, Any] = adds_to.get("setups", {})
    found = {
        name: together([each[name] for each in (before, result) if name in each])
        for name in names
        if name in before or name in result
    }
    total = together(list(found.values()))
    del total["failures"]
    facts = {
        "command": " && ".join([*filter(None, [adds_to.get("command")]), " ".join(["python", *sys.argv])]),
        "seconds": adds_to.get("seconds", 0) + round(time.monotonic() - started),
        "machine": {
            "processor": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "total": total,
        "failures": [f"{name}: {line}" for name, one in found.items() for line in one["failures"]],
        "setups": found,
    }
    out.write_text(json.dumps(facts, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="in all, divided among the set-ups")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most this long, the kills it then has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--setups", type=int, nargs="*", help="their numbers, from 0 (default: all)")
    parser.add_argument("--config", nargs=2, type=Path, help="configs for full and LoRA fine-tuning (default: tiny)")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    parser.add_argument("--add", action="store_true", help="to what --out has")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import_everything()
    tiny = (ROOT / "configs" / "tiny_llama_offload.yaml", ROOT / "configs" / "tiny_llama_lora.yaml")
    configs = dict(zip((FULL, LORA), args.config or tiny, strict=True))
    rng = random.Random(args.seed)
    chosen = [list(SETUPS.items())[number] for number in args.setups or range(len(SETUPS))]
    adds_to = json.loads(args.out.read_text()) if args.add else {}
    started = time.monotonic()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kill_storm-") as scratch:
        for index, (name, setup) in enumerate(chosen):
            kills = args.kills // len(chosen) + (index < args.kills % len(chosen))
            folder = Path(scratch) / str(index)
            folder.mkdir()
            storm = Storm(setup, configs[setup.recipe], folder)
            tally = storm.run(kills, rng, args.minutes / len(chosen)) if not storm.tally.failures else storm.tally
            result[name] = vars(tally)
            print(f"{name}: {json.dumps(vars(tally))}", flush=True)
            if tally.failures:
                print((folder / "log.txt").read_text()[-4000:], file=sys.stderr)
    failures = [line for one in result.values() for line in one["failures"]]
    kills, ended = (sum(one[key] for one in result.values()) for key in ("kills", "runs_that_ended"))
    print(f"{kills} kills, {ended} runs ended, {len(failures)} failures")
    if args.out:
        write_result(args.out, result, started, SETUPS, adds_to=adds_to)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

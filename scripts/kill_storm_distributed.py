"""Kills one process of distributed runs at random moments, and resumes them on the same or another number of them.

    python scripts/kill_storm_distributed.py --kills 4                  # prints the result
    nice -n 15 python scripts/kill_storm_distributed.py --kills 50 --minutes 40 \
        --out scripts/results/kill_storm_distributed.json               # records what it has, after each run

One process is killed (SIGKILL). The others are left to themselves, without torchrun, which would end them: each has to
leave with an error within ``BOUND`` seconds, and one line of them all has to name the rank. Then every ``step_<n>`` has
to be whole, and the same command goes on from the newest.

A run that ends is compared with one that nobody touched. Where all its lives had as many processes as that one, its
metrics, its weights, its optimizer's state and its random state are equal to the bit. Where it went on with another
number, losses agree within ``LOSS`` relatively, and weights within ``WEIGHTS`` of the longest step: sums over processes
are rounded in another order, and AdamW divides by a gradient that may itself be of the size of rounding.

Each process is a fork of this one, as in ``kill_storm.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kill_storm as single
import torch
import torch.distributed as dist
from kill_storm import ROOT, damage_of, differences, has_ended, is_writing, load_recipe, num_steps, state_of
from safetensors.torch import load_file

from offload.checkpoints import manifest as checkpoint_manifest
from offload.metrics.log import read_metrics
from offload.training.launch import run_recipe

FULL, LORA = "full_finetune_distributed", "lora_finetune_distributed"
SEQUENCES = 6
"""Of a step, divided among the processes."""
STEPS = 9
COMMON = (
    "metric_logger=null", f"max_steps_per_epoch={STEPS}", "save_every_n_steps=2", "evaluation.max_batches=1",
    "lr_scheduler=null",
)  # fmt: skip
PACKED = ("optimizer.optimizer_class=offload.optim.AdamW", "~optimizer.fused")
OFFLOADED = ("optimizer=offload.OffloadOptimizer", "+optimizer.optimizer_class=torch.optim.AdamW")

LOSS = 1e-5
WEIGHTS = 2e-2
BOUND = 120.0
"""Seconds that the others have to leave, on a machine that does much else beside."""


@dataclass(frozen=True)
class Setup:
    """What is trained: overrides of a recipe's tiny config.

    Attributes:
        ranks: processes of the run that nobody touches.
        others: with how many it may go on; empty: it goes on with as many.
    """

    recipe: str
    ranks: int
    overrides: tuple[str, ...]
    others: tuple[int, ...] = ()

    @property
    def writes_beside(self) -> bool:
        """Whether checkpoints are written beside training."""
        return set(single.BESIDE) <= set(self.overrides)


SETUPS = {
    "2 processes, update on the CPU, clipped, accumulated": Setup(
        FULL, 2, ("optimizer.strategy=host", "gradient_accumulation_steps=2", "clip_grad_norm=1.0")
    ),
    "3 processes, 8-bit states streamed in backward": Setup(
        FULL,
        3,
        (*PACKED, "dtype=bf16", "optimizer.state_dtype=int8", "optimizer.master=split", "optimizer.strategy=stream",
         "optimizer.update_in_backward=True", "clip_grad_norm=null", "keep_last_n=2"),
    ),
    "2 processes, LoRA, merged too, states streamed at step": Setup(
        LORA, 2, (*OFFLOADED, "optimizer.strategy=stream", "keep_last_n=2")
    ),
    "2 processes, going on with 1, 2 or 3": Setup(
        FULL, 2, ("optimizer.strategy=stream", "clip_grad_norm=1.0"), (1, 2, 3)
    ),
    "3 processes, LoRA, going on with 1, 2 or 3": Setup(
        LORA,
        3,
        (*OFFLOADED, "optimizer.strategy=host", "optimizer.update_in_backward=True", "clip_grad_norm=null"),
        (1, 2, 3),
    ),
    "2 processes, checkpoints beside training, states streamed": Setup(
        FULL, 2, (*single.BESIDE, "optimizer.strategy=stream", "keep_last_n=2")
    ),
}  # fmt: skip


@dataclass
class Tally:
    """What happened to one set-up."""

    kills: int = 0
    of_the_main_process: int = 0
    before_the_first_step: int = 0
    while_a_checkpoint_was_written: int = 0
    runs_that_ended: int = 0
    resumes: int = 0
    on_another_number: int = 0
    checkpoints_checked: int = 0
    most_seconds_to_leave: float = 0.0
    worst_loss: float = 0.0
    worst_weight: float = 0.0
    failures: list[str] = field(default_factory=list)


class Group:
    """The processes of one run, forked from this one; the store is kept here, as torchrun keeps it."""

    def __init__(self, recipe: str, ranks: int, arguments: list[str], log: Path) -> None:
        self.log = log
        self._store = dist.TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=60)
        )
        module = load_recipe(recipe)
        (recipe_class,) = (value for name, value in vars(module).items() if name.endswith("RecipeDistributed"))
        sys.stdout.flush()
        self.pids = [self._fork(rank, ranks, recipe_class, arguments) for rank in range(ranks)]

    def _fork(self, rank: int, ranks: int, recipe_class: Any, arguments: list[str]) -> int:
        child = os.fork()
        if child:
            return child
        status = 70
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.register(signal.SIGUSR1)  # where it hangs
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                MASTER_ADDR="localhost", MASTER_PORT=str(self._store.port), TORCHELASTIC_USE_AGENT_STORE="True",
            )  # fmt: skip
            status = run_recipe(recipe_class, arguments)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    @property
    def have_ended(self) -> bool:
        return all(has_ended(pid) for pid in self.pids)

    @property
    def has_ended_partly(self) -> bool:
        return any(has_ended(pid) for pid in self.pids)

    def wait(self, seconds: float) -> list[int] | None:
        """Their statuses, -9 where SIGKILL ended one; None where they hang, and are killed."""
        until = time.monotonic() + seconds
        while not self.have_ended and time.monotonic() < until:
            time.sleep(0.005)
        hang = not self.have_ended
        for number in (signal.SIGUSR1, signal.SIGKILL) if hang else ():
            for pid in self.pids:
                os.kill(pid, number)
            time.sleep(1)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        return None if hang else statuses


class Storm:
    """Runs one set-up, whole and in pieces.

    Args:
        setup: what to run.
        folder: everything is written below.
    """

    def __init__(self, setup: Setup, folder: Path) -> None:
        self._setup, self._folder = setup, folder
        self.tally = Tally()
        self._whole = folder / "whole"
        start = time.monotonic()
        statuses = self._start(self._whole, setup.ranks, resume=False).wait(single.TIMEOUT)
        self._seconds = time.monotonic() - start
        self._check(statuses == [0] * setup.ranks, f"the unbroken run ended with {statuses}")

    def run(self, kills: int, rng: random.Random, until: float) -> Tally:
        """Kills ``kills`` times, or until a moment of the monotonic clock, and lets the last run end."""
        life = 0

        def is_over() -> bool:
            return self.tally.kills >= kills or time.monotonic() > until or len(self.tally.failures) > 0

        while not is_over():
            life += 1
            self._live(self._folder / f"run{life}", is_over, rng)
        return self.tally

    def _live(self, out: Path, is_over: Any, rng: random.Random) -> None:
        """One run, killed until it ends."""
        setup = self._setup
        numbers = set()
        while True:
            resume = out.exists() and bool(checkpoint_manifest.whole_checkpoints(out))
            ranks = rng.choice(setup.others) if setup.others and resume else setup.ranks
            numbers.add(ranks)
            self.tally.resumes += resume
            self.tally.on_another_number += ranks != setup.ranks
            group = self._start(out, ranks, resume=resume)
            if is_over():
                statuses = group.wait(single.TIMEOUT)
                break
            self._wait_for_a_moment(group, out, rng)
            if group.has_ended_partly:
                statuses = group.wait(single.TIMEOUT)
                break
            victim = rng.randrange(ranks)
            steps, writes = num_steps(out), is_writing(out)
            os.kill(group.pids[victim], signal.SIGKILL)
            killed = time.monotonic()
            statuses = group.wait(BOUND)
            if statuses is not None and -signal.SIGKILL not in statuses:  # it had ended in the meantime
                break
            self.tally.kills += 1
            self.tally.of_the_main_process += victim == 0
            self.tally.before_the_first_step += steps == 0
            self.tally.while_a_checkpoint_was_written += writes
            took = round(time.monotonic() - killed, 1)
            self.tally.most_seconds_to_leave = max(self.tally.most_seconds_to_leave, took)
            self._check_end(statuses, victim, ranks, group.log)
            self._check_checkpoints(out)
            if self.tally.failures:
                return
        self._check(statuses == [0] * ranks, f"a run on {ranks} ended with {statuses}")
        self.tally.runs_that_ended += 1
        self._check_checkpoints(out)
        if not self.tally.failures:
            self._compare(out, exactly=numbers == {setup.ranks})
        if not self.tally.failures:
            shutil.rmtree(out)

    def _wait_for_a_moment(self, group: Group, out: Path, rng: random.Random) -> None:
        """Any of a run, and one time in four, or in two where that is beside training, one at which a checkpoint is
        being written."""
        until = time.monotonic() + rng.uniform(0, 0.95 * self._seconds)
        while time.monotonic() < until and not group.has_ended_partly:
            time.sleep(0.001)
        if rng.random() < (0.5 if self._setup.writes_beside else 0.25):
            while not is_writing(out) and not group.has_ended_partly:
                time.sleep(0.0005)
            time.sleep(rng.uniform(0, 0.05))

    def _start(self, out: Path, ranks: int, *, resume: bool) -> Group:
        config = "tiny_llama_offload_distributed" if self._setup.recipe == FULL else "tiny_llama_lora"
        arguments = [
            "--config", str(ROOT / "configs" / f"{config}.yaml"), *COMMON, f"batch_size={SEQUENCES // ranks}",
            *self._setup.overrides, f"output_dir={out}", f"resume_from_checkpoint={resume}",
        ]  # fmt: skip
        log = self._folder / "log.txt"
        log.unlink(missing_ok=True)
        return Group(self._setup.recipe, ranks, arguments, log)

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.tally.failures.append(otherwise)

    def _check_end(self, statuses: list[int] | None, victim: int, ranks: int, log: Path) -> None:
        if statuses is None:
            self._check(False, f"after rank {victim} of {ranks} was killed, the others hung for {BOUND:.0f} s")
            return
        others = [status for rank, status in enumerate(statuses) if rank != victim]
        self._check(all(status in (1, 2) for status in others), f"after rank {victim} was killed: {statuses}")
        lines = log.read_text(errors="replace") if log.exists() else ""
        told = re.findall(r"^error: .*", lines, re.M)
        # One that has not joined yet when it is killed is missed by all that have not either.
        names = [line for line in told if line.startswith(f"error: rank {victim} of {ranks} on ")]
        is_known = "model: " in lines
        self._check(ranks == 1 or not is_known or (len(told) == 1 and names == told), f"rank {victim} killed: {told}")
        self._check("Traceback" not in lines, f"rank {victim} killed: a traceback")

    def _check_checkpoints(self, out: Path) -> None:
        for path in out.glob("step_*") if out.exists() else ():
            self.tally.checkpoints_checked += 1
            damage = damage_of(path)
            self._check(damage is None, f"{path.name}: {damage}")

    def _compare(self, out: Path, *, exactly: bool) -> None:
        theirs, ours = (_names(folder) for folder in (self._whole, out))
        self._check(ours == theirs, f"{ours} instead of {theirs}")
        last = f"step_{STEPS}"
        rows = [
            [
                {key: value for key, value in row.items() if not single.MEASURED.fullmatch(key)}
                for row in read_metrics(folder)
            ]
            for folder in (self._whole, out)
        ]
        weights = [_weights(folder / last) for folder in (self._whole, out)]
        if exactly:
            self._check(rows[0] == rows[1], "the metrics differ")
            states = [{**state_of(folder / last), "weights": weights[i]} for i, folder in enumerate((self._whole, out))]
            for place in differences(states[0], states[1], last):
                self._check(False, f"{place} differs")
            return
        self._check([row["step"] for row in rows[1]] == list(range(1, STEPS + 1)), "steps are missing")
        for want, got in zip(*rows, strict=True):
            for key in ("loss", "evaluation/loss"):
                if key in want:
                    apart = abs(got[key] / want[key] - 1)
                    self.tally.worst_loss = max(self.tally.worst_loss, apart)
                    self._check(apart <= LOSS, f"{key} of step {want['step']}: {got[key]}, not {want[key]}")
            self._check(got["tokens_seen"] == want["tokens_seen"], f"tokens_seen of step {want['step']}")
        self._check(weights[0].keys() == weights[1].keys(), "other weights")
        for name, tensor in weights[0].items():
            apart = float((weights[1][name] - tensor).abs().max()) / max(row["lr"] for row in rows[0])
            self.tally.worst_weight = max(self.tally.worst_weight, apart)
            self._check(apart <= WEIGHTS, f"{name} is {apart:.2g} of a step apart")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not single.NUMBERED.fullmatch(path.name))


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    files = [path for path in folder.rglob("*.safetensors")]
    return {f"{path.relative_to(folder)}:{name}": t for path in files for name, t in load_file(path).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="in all, divided among the set-ups")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most about so long, the kills it has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--setups", type=int, nargs="*", help="their numbers, from 0 (default: all)")
    parser.add_argument("--out", type=Path, help="a JSON file for the result, written after each set-up")
    parser.add_argument("--add", action="store_true", help="to what --out has")
    args = parser.parse_args()
    torch.set_num_threads(1)
    single.import_everything()
    for name in ("torch.distributed.fsdp", "torch.distributed.checkpoint", "offload.training.distributed"):
        __import__(name)
    chosen = [list(SETUPS.items())[number] for number in args.setups or range(len(SETUPS))]
    adds_to = json.loads(args.out.read_text()) if args.add else {}
    started = time.monotonic()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kill_storm-") as scratch:
        for index, (name, setup) in enumerate(chosen):
            kills = args.kills // len(chosen) + (index < args.kills % len(chosen))
            folder = Path(scratch) / str(index)
            folder.mkdir()
            storm = Storm(setup, folder)
            until = started + 60 * args.minutes * (index + 1) / len(chosen)
            tally = storm.run(kills, random.Random(args.seed + index), until)
            result[name] = vars(tally)
            print(f"{name}: {json.dumps(vars(tally))}", flush=True)
            if tally.failures and (folder / "log.txt").exists():
                print((folder / "log.txt").read_text()[-4000:], file=sys.stderr)
            if args.out:
                single.write_result(args.out, result, started, SETUPS, adds_to=adds_to)
    failures = [line for one in result.values() for line in one["failures"]]
    kills, ended = (sum(one[key] for one in result.values()) for key in ("kills", "runs_that_ended"))
    print(f"{kills} kills, {ended} runs ended, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

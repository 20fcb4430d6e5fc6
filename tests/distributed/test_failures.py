"""``tune run --nproc_per_node N`` when a process dies or hangs, or somebody stops it: real processes, as a user sees
them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.recipes.conftest import ROOT

RECIPE = "full_finetune_distributed --config tiny_llama_offload_distributed"
OVERRIDES = ("metric_logger=null", "save_every_n_steps=2", "lr_scheduler=null", "evaluation=null", "batch_size=1")
PATIENCE = 300.0
LOSS = """
import os, time
from offload.training.loss import LinearCrossEntropyLoss

class Loss(LinearCrossEntropyLoss):
    calls = 0

    def forward(self, *args, **options):
        Loss.calls += 1
        if os.environ.get("RANK") == "1" and Loss.calls > 3:
            {action}
        return super().forward(*args, **options)
"""


class Job:
    """A command, its processes by rank, and what they wrote."""

    def __init__(self, folder: Path, options: str, *overrides: str, prefix: tuple[str, ...] = ()) -> None:
        self.out, self._log = folder / "run", folder / "log.txt"
        command = [*prefix, sys.executable, "-m", "offload", "run", *options.split(), *RECIPE.split(), *OVERRIDES]
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                [*command, f"output_dir={self.out}", *overrides],
                cwd=folder,
                env={
                    **os.environ,
                    "TMPDIR": str(folder),
                    "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error, KeyError):
                found[int(child.environ()["RANK"])] = child
        return found

    @property
    def log(self) -> str:
        return self._log.read_text()

    def errors(self) -> list[str]:
        return [line for line in self.log.splitlines() if line.startswith("error: ")]

    def steps(self) -> list[int]:
        path = self.out / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, condition: Callable[[], Any]) -> None:
        until = time.monotonic() + PATIENCE
        while not condition() and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)

    def train(self) -> dict[int, psutil.Process]:
        """Wait until a checkpoint was saved and a step done since."""
        self.wait_for(lambda: (self.out / "step_2").exists() and max(self.steps(), default=0) >= 3)
        assert self.process.poll() is None, self.log
        return self.ranks

    def wait(self) -> int:
        return self.process.wait(PATIENCE)


@contextlib.contextmanager
def job(*arguments: Any, **options: Any) -> Iterator[Job]:
    started = Job(*arguments, **options)
    try:
        yield started
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(started.process.pid).children(recursive=True), started.process]:
                process.kill()
        started.process.wait()


def are_gone(ranks: dict[int, psutil.Process]) -> bool:
    _, left = psutil.wait_procs(list(ranks.values()), timeout=PATIENCE)
    return not left


def test_a_killed_rank_is_named_and_torchrun_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    with job(tmp_path, "--nproc_per_node 2 --max-restarts 1", "max_steps_per_epoch=8") as run:
        ranks = run.train()
        ranks[1].kill()
        assert run.wait() == 0, run.log
    (error,) = run.errors()
    assert error.startswith("error: rank 1 of 2 on ") and f"({ranks[1].pid}) was killed" in error
    assert "restart 1 of at most 1, after a process failed: going on from " in run.log
    assert "Traceback" not in run.log and "torch/distributed" not in run.log
    assert run.steps() == list(range(1, 9))
    assert sorted(path.name for path in run.out.iterdir()) == [
        "metrics.jsonl", "run.json", "step_2", "step_4", "step_6", "step_8",
    ]  # fmt: skip
    assert list(tmp_path.glob("torchelastic_*")) == []
    record = json.loads((run.out / "run.json").read_text())
    assert record["status"] == "done" and record["resumed_from_step"] % 2 == 0 and record["resumed_from_step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_torchrun_tells_which_rank_died_of_what(rank: int, number: int, tmp_path: Path) -> None:
    with job(tmp_path, "--nproc_per_node 3", "max_steps_per_epoch=500") as run:
        ranks = run.train()
        ranks[rank].send_signal(number)
        status = run.wait()
        assert are_gone(ranks)
    if number == signal.SIGTERM:  # answered with a checkpoint, by all
        assert status == 143 and run.errors() == [] and (run.out / f"step_{run.steps()[-1]}").is_dir()
        return
    (error,) = run.errors()
    assert error.startswith(f"error: rank {rank} on ") and f"was ended by {signal.Signals(number).name}" in error
    assert status == (2 if number == signal.SIGKILL else 1) and "Traceback" not in run.log


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_run(rank: int, tmp_path: Path) -> None:
    with job(tmp_path, "--nproc_per_node 2", "max_steps_per_epoch=500", "collective_timeout_minutes=0.2") as run:
        ranks = run.train()
        ranks[rank].suspend()
        assert run.wait() == 1 and are_gone(ranks)
    (error,) = run.errors()
    assert error.startswith(f"error: rank {rank} of 2 on ") and error.endswith("its state is 'stopped'")


@pytest.mark.slow
def test_a_stuck_rank_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(LOSS.format(action="time.sleep(1000)"))
    overrides = ("loss._component_=stuck.Loss", "collective_timeout_minutes=0.2")
    with job(tmp_path, "--nproc_per_node 2", "max_steps_per_epoch=500", *overrides) as run:
        assert run.wait() == 1
    (error,) = run.errors()
    assert error.startswith("error: rank 1 of 2 on ") and "stuck.py:" in error and "Traceback" not in run.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "status", "told"),
    [
        ("raise MemoryError", 2, "out of host memory"),
        ("raise RuntimeError('a defect')", 1, "failed, and with it the run:"),
    ],
)
def test_an_error_on_one_rank_ends_all(action: str, status: int, told: str, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(LOSS.format(action=action))
    with job(tmp_path, "--nproc_per_node 3", "max_steps_per_epoch=500", "loss._component_=stuck.Loss") as run:
        run.wait_for(lambda: run.ranks)
        ranks = run.ranks
        assert run.wait() == status and are_gone(ranks)
    (error,) = run.errors()
    assert error.startswith("error: rank 1 of 3 on ") and told in error
    assert run.log.count("Traceback (most") == (status == 1)  # of the one that failed
    assert json.loads((run.out / "run.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    with job(tmp_path, "--nproc_per_node 2", "max_steps_per_epoch=500") as run:
        run.train()
        (tmp_path / "second").mkdir()
        with job(tmp_path / "second", "--nproc_per_node 2", f"output_dir={run.out}") as other:
            assert other.wait() == 2
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143
    (error,) = other.errors()
    assert "another run is at work" in error and run.errors() == []


@pytest.mark.slow
def test_processes_save_and_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    with job(tmp_path, "--nproc_per_node 2", "max_steps_per_epoch=500") as run:
        ranks = run.train()
        run.process.kill()
        assert are_gone(ranks)
    assert (run.out / f"step_{run.steps()[-1]}").is_dir() and run.errors() == []
    assert json.loads((run.out / "run.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_at_once(tmp_path: Path) -> None:
    with job(tmp_path, "--nproc_per_node 2", "max_steps_per_epoch=500") as run:
        ranks = run.train()
        ranks[1].suspend()  # the first one waits for it
        run.process.send_signal(signal.SIGINT)
        time.sleep(2)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(30) == 130 and are_gone(ranks)


@pytest.mark.slow
def test_nohup_holds_for_torchrun_too(tmp_path: Path) -> None:
    with job(tmp_path, "--nproc_per_node 2", "max_steps_per_epoch=500", prefix=("nohup",)) as run:
        run.train()
        run.process.send_signal(signal.SIGHUP)
        steps = len(run.steps())
        run.wait_for(lambda: len(run.steps()) > steps + 1)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143


@pytest.mark.slow
def test_a_terminal_that_is_closed_saves(tmp_path: Path) -> None:
    heard = ("env", "--default-signal=HUP")  # also where the tests run under nohup
    with job(tmp_path, "--nproc_per_node 2", "max_steps_per_epoch=500", prefix=heard) as run:
        ranks = run.train()
        for _ in range(2):
            run.process.send_signal(signal.SIGHUP)
            time.sleep(0.2)
        assert run.wait() == 129 and are_gone(ranks)
    assert (run.out / f"step_{run.steps()[-1]}").is_dir() and run.errors() == []


@pytest.mark.slow
def test_a_mistake_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    with job(tmp_path, "--nproc_per_node 2 --max-restarts 3") as run:
        assert run.wait() == 2
    (error,) = run.errors()
    assert "output_dir" in error


@pytest.mark.slow
def test_hosts_that_do_not_meet(tmp_path: Path) -> None:
    options = "--nproc_per_node 1 --nnodes 2 --node_rank 1 --rdzv_conf timeout=3 --master_addr 127.0.0.1"
    with job(tmp_path, options + " --master_port 29999") as run:
        assert run.wait() == 2
    (error,) = run.errors()
    assert "--master_addr" in error and "2 hosts" in error
    assert "waiting for 2 hosts to meet at 127.0.0.1:29999" in run.log

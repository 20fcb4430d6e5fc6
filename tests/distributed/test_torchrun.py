"""``tune run --nproc_per_node 2``: real processes, as a user starts and stops them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from offload.cli import torchrun
from tests.recipes.conftest import ROOT

COMMAND = "run --nproc_per_node 2 full_finetune_distributed --config tiny_llama_offload_distributed"


def test_two_processes_train_and_end_on_ctrl_c_with_a_checkpoint(tmp_path: Path) -> None:
    """A terminal's Ctrl-C reaches the command alone: torchrun gives its processes sessions of their own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "offload", *COMMAND.split(), f"output_dir={tmp_path}/run", "metric_logger=null"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2) and time.monotonic() < until:
            if process.poll() is not None:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert out.count("device=auto: ") == 1 and out.count("goes on from here") == 1
    assert [line for line in err.splitlines() if line.startswith("SIGINT")] == [
        "SIGINT: finishing the step and saving; once more to exit at once without saving"
    ]
    assert "torch/distributed" not in err and "Traceback" not in err
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == [f"step_{steps[-1]}"]
    row = json.loads(metrics.read_text().splitlines()[0])
    assert 0 < row["memory/host_rss_peak_min_gib"] <= row["memory/host_rss_peak_gib"]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["environment"]["processes"] == 2


def test_only_the_first_hangup_is_heard() -> None:
    """The kernel and the shell each send one when a terminal is closed; the second would end processes that save."""
    arguments = argparse.Namespace(signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    before = signal.getsignal(signal.SIGHUP)
    with torchrun._hung_up_once(arguments):
        assert arguments.signals_to_handle == "SIGTERM,SIGINT,SIGQUIT"  # those of torchrun
        with pytest.raises(SignalException) as caught:
            signal.raise_signal(signal.SIGHUP)
        assert caught.value.sigval == signal.SIGHUP
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is before


def test_nohup_is_left_alone() -> None:
    arguments = argparse.Namespace(signals_to_handle="SIGTERM,SIGINT")
    before = signal.getsignal(signal.SIGHUP)
    with torchrun._hung_up_once(arguments):
        assert signal.getsignal(signal.SIGHUP) is before and arguments.signals_to_handle == "SIGTERM,SIGINT"


class _Child:
    """A process that no signal ends."""

    def __init__(self, told: Queue[Any]) -> None:
        self.told = told

    def send_signal(self, number: int) -> None:
        self.told.put(signal.Signals(number))

    def kill(self) -> None:
        self.told.put("killed")


@pytest.mark.parametrize(
    ("first", "second", "sent"),
    [
        (signal.SIGINT, signal.SIGINT, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGTERM, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGINT, signal.SIGINT),
    ],
    ids=lambda number: number.name,
)
def test_the_second_signal_ends_the_processes_at_once(
    first: signal.Signals, second: signal.Signals, sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one that torchrun has not passed on to them: of that they would take it for a copy, for a second."""
    told: Queue[Any] = Queue()
    waited: list[float] = []

    def wait(children: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        waited.append(timeout)
        return [], children

    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [_Child(told)] if recursive else [])
    monkeypatch.setattr(psutil, "wait_procs", wait)
    monkeypatch.setattr(os, "_exit", told.put)
    before = {number: signal.signal(number, lambda *_: None) for number in {first, second}}
    try:
        with torchrun._ending_at_second_signal():
            signal.raise_signal(first)
            time.sleep(0.05)
            assert told.empty(), "it is torchrun that passes the first one on"
            signal.raise_signal(second)
            assert [told.get(timeout=10) for _ in range(3)] == [sent, "killed", 128 + second]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert waited == [torchrun._LAST_SECONDS]


def test_without_a_second_signal_nothing_is_left_of_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Queue[Any] = Queue()
    monkeypatch.setattr(os, "_exit", told.put)
    monkeypatch.setattr(torchrun, "_end_children", told.put)
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found)
    for signals in range(2):
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            with torchrun._ending_at_second_signal():
                (watching,) = [thread for thread in threading.enumerate() if thread.name == "second signal"]
                for _ in range(signals):
                    signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)
        watching.join(10)
        assert not watching.is_alive() and told.empty()
        assert signal.set_wakeup_fd(found) == found

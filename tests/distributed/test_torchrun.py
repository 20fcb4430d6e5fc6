"""``tune run --nproc_per_node 2``: real processes, as a user starts and stops them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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

"""offload.training.launch: a recipe's command line."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from offload.distributed import watch
from offload.errors import UserError
from offload.training.launch import _mendable, run_recipe

ROOT = Path(__file__).parents[2]


@dataclass
class Settings:
    seed: int = 0
    rate: float = 0.0


class Recipe:
    """Tells what it was given."""

    Settings = Settings

    def __init__(self, settings: Any, cfg: Any) -> None:
        self.settings = settings

    def setup(self) -> None:
        pass

    def train(self) -> int:
        print(self.settings)
        return 0

    def cleanup(self, exit_code: int) -> None:
        pass


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text("seed: 1\n")
    return str(path)


@pytest.mark.parametrize(
    "words",
    [
        ["seed=2", "rate=1e-5"],
        ["--seed=2", "--rate=1e-5"],
        ["--seed=3", "seed=2", "rate=1", "--rate=1e-5"],  # in the order in which they were written
    ],
)
def test_settings_may_be_written_with_dashes(config: str, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run_recipe(Recipe, ["--config", config, *words]) == 0
    assert capsys.readouterr().out == "Settings(seed=2, rate=1e-05)\n"


def test_several_runs_in_one_process_log_each_line_once(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Logging(Recipe):
        def train(self) -> int:
            logging.getLogger("offload.somewhere").info("at %d", self.settings.seed)
            return 0

    for seed in (2, 3):
        assert run_recipe(Logging, ["--config", config, f"seed={seed}"]) == 0
        assert capsys.readouterr().err == f"at {seed}\n"


def test_an_option_that_does_not_exist_is_told_how_to_be_written(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rate", "1e-5", "--packing", "--learning-rate", "2e-5"]
    assert run_recipe(Recipe, ["--config", config, *words]) == 2
    assert capsys.readouterr().err == (
        "error: unknown option --rate: settings are written as rate=1e-5\n"
        "error: unknown option --packing: settings are written as dataset.packed=True\n"
        "error: unknown option --learning-rate: settings are written as optimizer.lr=2e-5\n"
    )


def test_a_python_without_docstrings_runs_recipes() -> None:
    """PYTHONOPTIMIZE=2."""
    recipe = ROOT / "recipes/generate.py"
    command = [
        sys.executable,
        "-OO",
        str(recipe),
        "--config",
        str(ROOT / "configs/tiny_llama_generate.yaml"),
        "seed=-1",
    ]
    # Packages may lie in a folder of their own, as on a GPU machine without a network.
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": paths, "PATH": "/usr/bin"})
    assert (done.returncode, done.stderr) == (2, "error: seed: expected at least 0, got -1\n")


def test_a_folder_that_must_not_be_read_is_not_said_to_be_written() -> None:
    line = _mendable(PermissionError(errno.EACCES, "Permission denied", "/models/theirs"))
    assert line is not None and line.startswith("no access to /models/theirs: Permission denied; ")
    line = _mendable(OSError(errno.ENOSPC, "No space left on device", "/runs/a"))
    assert line == "cannot write /runs/a: No space left on device; free space or choose another output_dir"


def test_a_process_that_leaves_after_a_signal_is_not_ended_by_torchrun(config: str, tmp_path: Path) -> None:
    """Which sends SIGTERM to those that are left when the first is gone; it hears that nothing was left to do."""
    code = """
import os, signal, sys
from offload.distributed.world import World
from offload.training.launch import run_recipe
from tests.training.test_launch import Recipe

class Stopped(Recipe):
    is_distributed = True

    def train(self):
        return 143

World.barrier = lambda self: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(run_recipe(Stopped))
"""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    word = str(tmp_path / "error.json")
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "PYTHONPATH": str(ROOT), "TORCHELASTIC_ERROR_FILE": word}
    command = [sys.executable, "-c", code, "--config", config]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **ranks, **where})
    assert (done.returncode, done.stderr) == (143, "")
    assert watch.noted_end(word) == 143


def test_a_process_that_fails_has_not_done_all(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Recipe):
        def train(self) -> int:
            raise UserError("dataset: gone")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert run_recipe(Failing, ["--config", config]) == 2
    assert watch.noted_end(str(tmp_path / "error.json")) is None

"""The recipes with the tiny default config, as their users run them, on a real accelerator; slowly, on the CPU too."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

for package in ("torchtune", "torchao", "omegaconf", "datasets", "sentencepiece"):
    # Not imported: torchtune by itself does not load beside today's torchao.
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the recipes need {package}", allow_module_level=True)

ROOT = Path(__file__).parents[2]
STEPS = 12

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param(
        "accelerator",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if request.param == "accelerator" and accelerator is not None else "cpu"


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny default is made, once."""
    return tmp_path_factory.mktemp("tune-offload")


def run(home: Path, output: Path, recipe: str, config: str, *overrides: str) -> list[dict[str, Any]]:
    """The rows that a recipe logged."""
    settings = [f"output_dir={output}", f"max_steps_per_epoch={STEPS}", "cudnn_deterministic_mode=warn", *overrides]
    command = [sys.executable, f"recipes/{recipe}.py", "--config", f"configs/{config}.yaml", *settings]
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "TUNE_OFFLOAD_HOME": str(home),
        "HF_DATASETS_CACHE": str(home / "datasets"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def test_streamed_in_backward_equals_resident_to_the_last_bit(home: Path, tmp_path: Path, device: str) -> None:
    """The packed AdamW: losses as they were logged, and the weights that were saved."""
    common = (f"device={device}", "dtype=bf16", "clip_grad_norm=null", "optimizer.optimizer_class=offload.optim.AdamW")
    ways = {
        "resident": ("optimizer.strategy=resident",),
        "stream": ("optimizer.strategy=stream", "optimizer.update_in_backward=True"),
    }
    recipe = "full_finetune_single_device"
    rows = {
        way: run(home, tmp_path / way, recipe, "tiny_llama_offload", *common, *overrides)
        for way, overrides in ways.items()
    }
    losses = {way: [row["loss"] for row in each] for way, each in rows.items()}
    assert len(losses["stream"]) == STEPS and losses["stream"] == losses["resident"]
    assert losses["stream"][-1] < losses["stream"][0]
    mine, theirs = (
        load_file(tmp_path / way / f"step_{STEPS}" / "model-00001-of-00001.safetensors")
        for way in ("stream", "resident")
    )
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    if device != "cpu":
        last = rows["stream"][-1]
        assert last["memory/host_pinned_gib"] > 0
        assert last["memory/device_peak_reserved_gib"] >= last["memory/device_peak_allocated_gib"] > 0


def test_lora_trains_and_logs(home: Path, tmp_path: Path, device: str) -> None:
    rows = run(home, tmp_path / "lora", "lora_finetune_single_device", "tiny_llama_lora", f"device={device}")
    assert len(rows) == STEPS and rows[-1]["loss"] < rows[0]["loss"]
    assert all(row["tokens_per_second"] > 0 and row["grad_norm"] > 0 for row in rows[1:])
    assert list((tmp_path / "lora" / f"step_{STEPS}" / "adapter").glob("adapter_model.safetensors"))

"""The profiler of a run: which steps it records, whose threads, and what it does where it cannot."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from offload import torchao_shim
from offload.errors import UserError
from offload.training.profiler import build_profiler, torch_profiler

OURS, TORCHTUNES = "offload.training.profiler.torch_profiler", "torchtune.training.setup_torch_profiler"


def section(folder: Path, component: str = OURS, **options: Any) -> Any:
    profiler = {"_component_": component, "enabled": True, "output_dir": "${output_dir}", "cpu": True, **options}
    return OmegaConf.create({"output_dir": str(folder), "profiler": profiler}).profiler


def run(profiler: Any, steps: int) -> None:
    """Steps of one matrix product each, and of one on another thread."""
    profiler.start()
    for _ in range(steps):
        torch.ones(4, 4) @ torch.ones(4, 4)
        beside = threading.Thread(target=lambda: torch.ones(4, 4).cos())
        beside.start()
        beside.join()
        profiler.step()
    profiler.stop()


def traces(folder: Path) -> list[list[str]]:
    """The names of each trace's events."""
    return [
        [event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
        for path in sorted(folder.rglob("*trace.json.gz"))
    ]


def test_a_profiler_leaves_a_trace_of_the_steps_in_its_cycle(tmp_path: Path) -> None:
    profiler = torch_profiler(str(tmp_path), wait_steps=1, warmup_steps=1, active_steps=2, num_cycles=1)
    assert profiler is not None
    run(profiler, 6)
    (folder,) = tmp_path.iterdir()
    assert folder.name == "step_4"
    (names,) = traces(tmp_path)
    assert names.count("aten::mm") == 2
    assert "aten::mm" in (folder / "operations.txt").read_text()
    assert torch_profiler(str(tmp_path), enabled=False) is None


@pytest.mark.parametrize("component", [OURS, TORCHTUNES])
def test_all_threads_are_recorded(component: str, tmp_path: Path) -> None:
    """The optimizer's own do most of its work."""
    torchao_shim.install()
    options = {} if component == OURS else {"cuda": False, "xpu": False, "record_shapes": True}
    run(build_profiler(section(tmp_path, component, wait_steps=0, warmup_steps=1, active_steps=2, **options), 9), 4)
    (names,) = traces(tmp_path)
    assert names.count("aten::cos") == names.count("aten::mm") == 2


@pytest.mark.parametrize(
    ("steps", "recorded", "told"),
    [
        (11, 3, ""),
        (9, 3, "the run has 9 steps; it lets 3 pass, warms up in 3 and records 3"),
        (4, 3, "the run has 4 steps; it lets 0 pass, warms up in 1 and records 3"),
        (2, 1, "the run has 2 steps; it lets 0 pass, warms up in 1 and records 1"),
        (1, 1, "the run has one step; it lets 0 pass, warms up in 0 and records 1"),
    ],
)
@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_a_schedule_that_is_longer_than_the_run_is_cut(
    steps: int, recorded: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(build_profiler(section(tmp_path), steps), steps)
    (names,) = traces(tmp_path)
    assert names.count("aten::mm") == recorded
    assert told in capsys.readouterr().out


def test_a_run_that_stops_in_the_middle_leaves_the_steps_until_there(tmp_path: Path) -> None:
    run(build_profiler(section(tmp_path, wait_steps=1, warmup_steps=1, active_steps=50), 100), 5)
    (names,) = traces(tmp_path)
    assert names.count("aten::mm") == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active_steps": 0}, "profiler.active_steps: got 0, expected 1 or more"),
        ({"wait_steps": -1}, "profiler.wait_steps: got -1, expected 0 or more"),
        ({"warmup_steps": -2}, "profiler.warmup_steps: got -2, expected 0 or more"),
        ({"num_cycles": -1}, "profiler.num_cycles: got -1, expected 0 or more"),
        ({"cpu": False}, "profiler.cpu: got False, and nothing else here can be recorded"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    if options == {"cpu": False} and torch.accelerator.is_available():
        pytest.skip("there is something else to record")
    with pytest.raises(UserError) as refused:
        build_profiler(section(tmp_path, **options), 20)
    assert str(refused.value).startswith(message)


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    run(build_profiler(section(tmp_path / "file"), 3), 3)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "USDT" not in line]
    assert line.startswith("warning: profiler: the trace was not written to") and "Not a directory" in line

"""What a run says that ran out of memory: where, what it takes, what saves most; and that following it succeeds."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from offload.cli import registry
from offload.cli.validate import load_recipe
from offload.distributed.world import World
from offload.errors import first_line, raise_shortage
from offload.host_memory import HostMemory, Use
from offload.metrics.this_machine import machine_of
from offload.plan.budget import CONTEXT
from offload.plan.cards import find_card
from offload.plan.collectives import system_of
from offload.plan.machines import machine_of_card
from offload.plan.prediction import Prediction
from offload.plan.profile import Profile, write_profile
from offload.plan.replay import replay
from offload.plan.workload import LLAMA2_7B, MACHINES
from offload.tiny import register_resolvers
from offload.training.advice import Advisor, of_host_memory, room, settings_of_file
from offload.training.budgeting import Planner
from offload.training.dividing import least
from offload.training.out_of_memory import record_for_snapshot, shortage, tell_of_a_kill, write_snapshot
from offload.training.predicting import Predictor

ROOT = Path(__file__).parents[2]
FP32 = torch.float32
GIB = 2**30
CPU = torch.device("cpu")
RECIPE = "full_finetune_single_device"
WORDS = ("device=cpu", "max_steps_per_epoch=2", "evaluation=null", "metric_logger=null", "batch_size=32",
         "lr_scheduler=null")  # fmt: skip


def recipe_class() -> Any:
    register_resolvers()
    return load_recipe(registry.find_recipe(RECIPE).path).FullFinetuneRecipeSingleDevice


def advisor(name: str, *overrides: str) -> Advisor:
    recipe = recipe_class()
    return Advisor(recipe, settings_of_file(recipe, registry.our_configs()[name], overrides))


def enough(lines: list[str]) -> list[str]:
    (told,) = (line for line in lines if line.startswith("enough, with "))
    return told.partition(": ")[2].split()


# ---- following it


def limited(mapped_kib: int | None, *words: str) -> subprocess.CompletedProcess[str]:
    """A run whose address space is limited, and on its last line how much of it was mapped at most, in KiB."""
    program = (
        "import atexit, sys\nfrom offload.cli.main import main\natexit.register(lambda: "
        "print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmPeak'))))\n"
        "sys.exit(main(sys.argv[1:]))"
    )

    def limit() -> None:
        if mapped_kib is not None:
            resource.setrlimit(resource.RLIMIT_AS, (mapped_kib * 1024, mapped_kib * 1024))

    return subprocess.run(
        [sys.executable, "-c", program, "run", RECIPE, "--config", "tiny_llama_offload", *words],
        capture_output=True, text=True, check=False, cwd=ROOT, preexec_fn=limit,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux'")
def test_a_run_that_is_held_to_too_little_memory_succeeds_with_the_advice(tmp_path: Path) -> None:
    words = (*WORDS, f"output_dir={tmp_path / 'run'}")
    peak = int(limited(None, *words, "batch_size=4").stdout.split()[-1])
    held = peak + 100 * 1024
    failed = limited(held, *words)
    assert failed.returncode == 2 and "Traceback" not in failed.stderr, failed.stderr
    (error,) = (line for line in failed.stderr.splitlines() if line.startswith("error: "))
    assert re.match(
        r"error: out of host memory in (forward|backward) of step 1.* \(tried to allocate [\d.]+ MiB\)", error
    )
    followed = limited(held, *words, *enough(failed.stderr.splitlines()))
    assert followed.returncode == 0, followed.stderr


def test_advice_is_what_a_plan_says_of_it() -> None:
    common = ("device=cpu", "checkpointer.checkpoint_dir=/nowhere", "batch_size=32", "loss=torch.nn.CrossEntropyLoss")
    room = 600 << 20
    lines = advisor("tiny_llama_offload", *common).lines(CPU, of_device=False, used=400 << 20, room=room)
    assert lines[0].endswith(" GiB of the host's memory at its fullest moment, where it can have 0.59 GiB:")
    start = lines.index("what saves most, one by one:") + 1
    told = [line.split()[2] for line in lines[start:-1]]
    assert len(told) == 2 and told[0] == "batch_size=1" and told[1].startswith("enable_activation_checkpointing")
    followed = advisor("tiny_llama_offload", *common, *enough(lines))
    again = followed.lines(CPU, of_device=False, used=400 << 20, room=None)
    assert f"takes {lines[-1].split()[2]} GiB" in again[0] and not again[-1].startswith("enough")


@pytest.mark.slow
def test_advice_for_a_card_is_enough_for_it() -> None:
    """The engine runs out of memory on the simulated allocator of a 16 GB card, and no more when advice is followed."""
    schedule = {"strategy": "stream", "update_in_backward": False, "in_flight_gib": 1.0}
    room = find_card("RTX 4080 SUPER").memory
    load = dataclasses.replace(LLAMA2_7B, tokens=1024)
    memory = room - CONTEXT
    assert replay(MACHINES["rtx4090"], load, memory=memory, **schedule).out_of_memory
    words = [f"optimizer.{key}={value}" for key, value in schedule.items()]
    common = ("optimizer.optimizer_class=torch.optim.AdamW", "batch_size=1", "tokenizer.max_seq_len=1024")
    lines = advisor("llama2_7b_offload", *common, *words).lines(
        torch.device("cuda"), of_device=True, used=2**29, room=room
    )
    assert len(lines[lines.index("what saves most, one by one:") + 1 : -1]) == 3
    told = dict(word.removeprefix("optimizer.").split("=") for word in enough(lines) if word.startswith("optimizer."))
    followed = {**schedule, **{key: yaml.safe_load(value) for key, value in told.items()}}
    assert followed != schedule
    assert not replay(MACHINES["rtx4090"], load, memory=memory, **followed).out_of_memory


# ---- where it ran out


class Inner(nn.Module):
    def forward(self) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
            "4194304 bytes. Error code 12 (Cannot allocate memory)"
        )


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), Inner()])

    def forward(self) -> None:
        self.layers[1]()


class Run:
    model = Outer()
    global_step = 3
    is_between_steps = False

    def forward_backward(self) -> None:
        self.model()

    def setup_data(self) -> None:
        raise MemoryError

    def save_checkpoint(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.\nmore")


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("forward_backward", "out of host memory in forward of step 3, layers.1 (tried to allocate 4.0 MiB)"),
        ("setup_data", "out of host memory while the data were read"),
        (
            "save_checkpoint",
            "out of device memory while a checkpoint was saved (CUDA out of memory. Tried to allocate 1 TiB)",
        ),
    ],
)
def test_it_says_what_the_run_was_doing(method: str, told: str) -> None:
    run = Run()
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        getattr(run, method)()
    assert str(shortage(caught.value, run)) == told


@pytest.mark.parametrize(
    "error", [MemoryError("x"), OSError(12, "?"), RuntimeError("Cannot allocate memory (os error 12)")]
)
def test_what_came_of_want_of_memory_is_no_fault_of_a_file(error: Exception) -> None:
    """As torchtune says that a file is bad."""
    wrapped = ValueError("Unable to load checkpoint from model.safetensors")
    wrapped.__cause__ = error
    with pytest.raises(MemoryError, match=re.escape(first_line(error))):
        raise_shortage(wrapped)
    raise_shortage(ValueError("no such key"))


@pytest.mark.parametrize("error", [ValueError("can't allocate memory"), RuntimeError("shapes"), KeyError("x")])
def test_other_errors_are_not_of_memory(error: Exception) -> None:
    assert shortage(error, Run()) is None


# ---- what it leaves


def test_a_snapshot_is_written_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda max_entries: recorded.append(max_entries))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"what was allocated"))
    cuda = torch.device("cuda", 0)
    assert record_for_snapshot(cuda) and recorded
    path = write_snapshot(cuda, tmp_path)
    assert path is not None and path.read_bytes() == b"what was allocated"
    assert write_snapshot(cuda, tmp_path / "missing") is None
    assert not record_for_snapshot(CPU) and write_snapshot(CPU, tmp_path) is None


@pytest.mark.parametrize(
    ("record", "kills", "told"),
    [
        ({"status": "running", "oom_kills": 1}, 2, "killed a process here for want of memory"),
        ({"status": "running", "oom_kills": 0}, 2, "killed 2 processes here"),
        ({"status": "running", "oom_kills": 2}, 2, None),  # killed by somebody else
        ({"status": "done", "oom_kills": 0}, 2, None),
        ({"status": "running", "oom_kills": None}, 2, None),
        ({"status": "running"}, 2, None),
        ({"status": "running", "oom_kills": 0}, None, None),
        ({}, 1, None),
    ],
)
def test_a_run_that_the_kernel_killed_is_told_of_by_the_next(
    record: dict[str, Any], kills: int | None, told: str | None
) -> None:
    line = tell_of_a_kill(record, kills)
    assert line is None if told is None else told in str(line)


# ---- what advice costs


def test_costs_are_those_of_predicted_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of as many tokens as a step of the run has: smaller micro-batches are compared with it too."""
    costs = {"products": 1e-9, "attention": 0.0, "moved": 0.0, "launches": 1e-3}
    rates = {"training": {"fp32": costs, "bf16": costs}, "cpu_adamw": {"torch fused": 1e9}, "host_copy": 1e12}
    common = ("device=cpu", "checkpointer.checkpoint_dir=/nowhere", "batch_size=32", "loss=torch.nn.CrossEntropyLoss")

    def told(*overrides: str) -> list[str]:
        room = 640 << 20
        return advisor("tiny_llama_offload", *common, *overrides).lines(CPU, of_device=False, used=2**29, room=room)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    without = told()
    assert "a third more time; each layer's forward" in "".join(without) and " ms a step" not in "".join(without)
    write_profile(Profile(machine_of(CPU, []), rates))
    lines = told()

    def seconds(*overrides: str) -> float:
        """Of the tokens of a step with 32 sequences."""
        run = advisor("tiny_llama_offload", *common, *overrides)
        settings = run._settings(())
        planner = Planner(0, adapts=False)
        found = Predictor(planner).predict_on_cpu(settings, planner.plan(settings, CPU, FP32), rates, FP32)
        return 32 / settings.batch_size * found.step_seconds

    for override in ("batch_size=1", "enable_activation_checkpointing=True"):
        (line,) = [line for line in lines if f"  {override} " in line]
        share = seconds(override) / seconds() - 1
        assert f"  {1000 * share * seconds():+,.0f} ms a step ({share:+.0%}); " in line
        assert share > 0.05 and "a third more time" not in line
    assert re.match(r"enough, with [\d.]+ [GM]iB and \+[\d,]+ ms a step \(\+\d+%\): ", lines[-1])
    assert enough(lines)[0].startswith(("batch_size=", "enable_activation_checkpointing="))


def test_a_run_after_one_that_the_kernel_killed_is_told_what_takes_less() -> None:
    kind = recipe_class()
    words = ("device=cpu", "checkpointer.checkpoint_dir=/nowhere", "batch_size=32", "loss=torch.nn.CrossEntropyLoss")
    run = object.__new__(kind)
    run.settings = settings_of_file(kind, registry.our_configs()["tiny_llama_offload"], words)(())
    run.world, run.device, run.memory_before = World(), CPU, 2**28
    lines = of_host_memory(run)
    assert "GiB of the host's memory at its fullest moment, where it can have " in lines[0]
    assert any("  batch_size=1 " in line for line in lines)
    run.settings = None
    assert of_host_memory(run) == []


# ---- several processes


def of_several(world: World, *overrides: str) -> Advisor:
    recipe = load_recipe(registry.find_recipe("full_finetune_distributed").path).FullFinetuneRecipeDistributed
    words = ("checkpointer.checkpoint_dir=/nowhere", "model.embed_dim=512", "dtype=bf16",
             "optimizer.optimizer_class=offload.optim.AdamW", *overrides)  # fmt: skip
    load = settings_of_file(recipe, registry.our_configs()["tiny_llama_offload_distributed"], words)
    return Advisor(recipe, load, world=world)


def test_processes_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four that took 1 GiB each have what is left among them, and each what it has."""
    register_resolvers()
    left = HostMemory(64 * GIB, 48 * GIB, 16 * GIB, 8 * GIB, None, False)
    monkeypatch.setattr("offload.host_memory.host_memory", lambda: left)
    monkeypatch.setattr("offload.host_memory._limit", lambda name: None)
    monkeypatch.setattr("offload.training.advice.use_of_this_process", lambda: Use(GIB, 2 * GIB))
    assert room(CPU, World(size=4, local_size=4), of_device=False) == 8 * GIB // 4 + GIB
    assert room(CPU, World(size=8, local_size=2), of_device=False) == 8 * GIB // 2 + GIB
    assert room(CPU, World(), of_device=False) == 9 * GIB
    lines = of_several(World(size=4, local_size=2), "device=cpu").lines(CPU, of_device=False, used=2**28, room=2**28)
    found = re.match(
        r"each of 4 processes takes ([\d.]+) GiB of the host's memory at its fullest moment, where it can have 0.25 "
        r"GiB \(([\d.]+) GiB of 0.50 GiB for the 2 of a host\):$", lines[0])  # fmt: skip
    assert found and float(found[2]) == pytest.approx(2 * float(found[1]), abs=0.011)
    assert any(line.startswith("on twice as many hosts each process takes 0.") for line in lines)


def test_what_overrides_cost_several_processes_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form of all of them; weights that are gathered again take more of a slow bus."""
    register_resolvers()
    card = find_card("RTX 3060")
    machine = dataclasses.replace(machine_of_card(card, cards=4), up=2e9, down=2e9)
    monkeypatch.setattr("offload.training.predicting.machine_here", lambda *_, **__: (machine, "told by a test"))
    monkeypatch.setattr("offload.training.advice.total_memory", lambda device: card.memory)
    cuda, world = torch.device("cuda"), World(size=4, local_size=4)
    monkeypatch.setattr(Advisor, "_is_valid", lambda *_: True)  # there is no such device here
    words = ("reshard_after_forward=False", "device=cuda", "model.num_layers=12", "loss.num_output_chunks=8")
    lines = of_several(world, *words).lines(cuda, of_device=True, used=0, room=2**28)

    def predicted(*more: str) -> Prediction:
        run = of_several(world, *words, *more)
        settings = run._settings(())
        planner = Planner(0, adapts=False)
        sharding = least(settings, world)
        plan = planner.plan(settings, cuda, torch.bfloat16, sharding=sharding)
        system = system_of(machine, card)
        return Predictor(planner).predict_ranks(settings, plan, system, sharding, torch.bfloat16, processes=4)

    before, after = predicted(), predicted("reshard_after_forward=True")
    share = before.tokens_per_second / after.tokens_per_second - 1
    assert share > 0.05
    (line,) = [line for line in lines if "  reshard_after_forward=True " in line]
    assert (
        f"{1000 * share * before.step_seconds:+,.0f} ms a step ({share:+.0%}); each layer's weights are gathered"
        in line
    )
    monkeypatch.setattr("offload.distributed.network.speed", lambda: None)
    hosts = of_several(World(size=8, local_size=4), *words).lines(cuda, of_device=True, used=0, room=2**28)
    (line,) = [line for line in hosts if "  reshard_after_forward=True " in line]
    assert " ms a step" not in line, "nobody knows their network"

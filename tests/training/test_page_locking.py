"""Host memory that cannot be page-locked: the one line that a run tells of it, and what it is told from."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadOptimizer
from offload.distributed.world import World
from offload.engine.memory import PageLockWarning
from offload.host_memory import HostMemory, why_not_locked
from offload.plan.budget import readable
from offload.plan.workload import GB, MACHINES
from offload.simulation.accelerator import SimulatedAccelerator
from offload.training import page_locking
from offload.training.advice import ALONE, Advisor, settings_of_file
from offload.training.page_locking import PageLocking, slowed, told
from offload.training.ranking import applied
from tests.conftest import play_device  # type: ignore[import-not-found]
from tests.training.test_advice import recipe_class, registry  # type: ignore[import-not-found]

GIB = 2**30
CUDA = torch.device("cuda")
HOST = HostMemory(64 * GIB, 48 * GIB, None, 0, None, False)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (replace(HOST, is_wsl=True), "This is WSL 2, whose driver page-locks about half of its memory: give it more"),
        (replace(HOST, limit=16 * GIB, used_of_limit=12 * GIB),
         "Its control group may have 16.0 GiB, of which 4.0 are left: give the container or the job more"),
        (replace(HOST, available=4 * GIB), "The host has 4.0 GiB left"),
        (replace(HOST, locked_limit=2**23), "`ulimit -l` is 0.0078 GiB: raise it"),
        (HOST, "The driver refused it though the host has room"),
    ],
)  # fmt: skip
def test_what_kept_memory_from_being_locked(memory: HostMemory, says: str) -> None:
    line = why_not_locked(memory, 8 * GIB)
    assert says in line and "\n" not in line


def test_a_part_of_the_copies_at_half_the_rate() -> None:
    machine = MACHINES["rtx4090"]
    assert slowed(machine, 1.0, 0.5) == machine
    assert slowed(machine, 0.5, 0.5).up == pytest.approx(machine.up / 1.5)
    assert slowed(machine, 0.0, 0.25).down == pytest.approx(machine.down / 4)


def advisor(*overrides: str, world: World = ALONE) -> Advisor:
    recipe = recipe_class()
    more = ("model.embed_dim=512", "model.num_layers=4", "dtype=bf16", "checkpointer.checkpoint_dir=/nowhere",
            "optimizer.optimizer_class=offload.optim.AdamW", "optimizer.strategy=stream", "clip_grad_norm=null",
            "optimizer.update_in_backward=True")  # fmt: skip
    load = settings_of_file(recipe, registry.our_configs()["tiny_llama_offload"], (*more, *overrides))
    return Advisor(recipe, functools.partial(applied, load(())), world=world)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a slow link, and nothing wrong with its host."""
    machine = replace(MACHINES["rtx4090"], up=0.2 * GB, down=0.2 * GB)
    slower = {1: machine, 4: replace(machine, up=machine.up / 2, down=machine.down / 2)}
    monkeypatch.setattr(page_locking, "machine_here", lambda device, fp32, cards: (slower[cards], "told by a test"))
    monkeypatch.setattr(page_locking, "total_memory", lambda device: 24 * GIB)
    monkeypatch.setattr(page_locking, "pageable_share", lambda device: 0.5)
    monkeypatch.setattr(page_locking, "host_memory", lambda: replace(HOST, is_wsl=True))


def test_the_line_has_the_share_the_price_the_reason_and_what_takes_less(card: None) -> None:
    mine = advisor()
    plan = mine._plans(CUDA, 0)(())
    locked = plan.budget.of("host, page-locked")
    report = {"pinned_host": {"optimizer_state": locked // 2}, "host": {"optimizer_state": locked // 2}}
    line = told(PageLockWarning(GIB, "CUDA error: out of memory"), report, mine, CUDA, used=0)
    share, _, rest = line.partition("; a step takes ")
    assert share.startswith(f"{readable(locked // 2)} of {readable(locked)} of the optimizer's host memory")
    assert "(CUDA error: out of memory): copies of the rest block" in share
    after, before = (float(word.split()[0]) for word in rest.split(" s instead of ")[:2])
    assert 1.3 * before < after < 1.6 * before, "bound by the link, of which half is half as fast"
    assert ". This is WSL 2" in line and "\n" not in line
    changes = line.rpartition(". Less to lock: ")[2].rpartition(" (")[0].split()
    assert changes == ["optimizer.master=stochastic"]
    less = advisor(*changes)._plans(CUDA, 0)(()).budget.of("host, page-locked")
    assert less < 0.6 * locked and line.endswith(f"({readable(less)})")


def test_the_price_is_that_of_a_host_with_so_many_cards(card: None) -> None:
    worlds = (ALONE, World(local_size=4))
    alone, of_four = (page_locking._steps(advisor(world=world), CUDA, 0, 0.5)[0] for world in worlds)
    assert of_four > 1.5 * alone


def test_without_a_plan_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locking, "host_memory", lambda: replace(HOST, is_wsl=True))
    broken: Any = SimpleNamespace(dtype=torch.bfloat16)
    line = told(PageLockWarning(GIB, "no"), {"host": {"gradients": GIB}}, broken, CUDA, used=0)
    assert line.startswith("0.00 MiB of 1.00 GiB of the optimizer's host memory") and "This is WSL 2" in line


@pytest.mark.parametrize("lockable", [0, 2**22])
def test_a_machine_that_locks_less_trains_and_reports_it(lockable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedAccelerator(lockable=lockable) as simulator:
        play_device(monkeypatch, simulator)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        with pytest.warns(PageLockWarning, match="no more memory can be page-locked") as warned:
            optimizer = OffloadOptimizer(model.parameters(), strategy="stream", model=model, lr=1e-3)
        assert len(warned) == 1
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        report = optimizer.memory_report()
        assert sum(report.get("pinned_host", {}).values()) <= lockable
        assert sum(report["host"].values()) >= 8 * 512 * 512 * 8 - lockable
        optimizer.synchronize()


class _Run:
    """What page-locking asks a recipe for."""

    settings, memory_before, device = None, 0, CUDA
    world = SimpleNamespace(size=1)
    optimizer: Any = None


def test_what_is_refused_after_construction_is_told_in_the_same_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gradients that are added to others are staged in memory of backward's: the hook plans nothing, and the step's end
    tells, once."""
    broken: Any = SimpleNamespace(dtype=torch.bfloat16)
    monkeypatch.setattr(page_locking, "advisor_of", lambda *_: broken)
    monkeypatch.setattr(page_locking, "host_memory", lambda: replace(HOST, is_wsl=True))
    run = _Run()
    locking = PageLocking(run)
    with SimulatedAccelerator(lockable=6 * 2**20) as simulator:
        play_device(monkeypatch, simulator)
        model = nn.Linear(512, 512)
        with locking.watched():
            run.optimizer = OffloadOptimizer(model.parameters(), strategy="stream", offload_gradients=True, lr=1e-3)
        assert "locked" not in capsys.readouterr().err, "the states were locked"
        with warnings.catch_warnings():
            warnings.simplefilter("error", PageLockWarning)
            with locking.watched():
                lines = []
                for _ in range(2):
                    with run.optimizer.accumulate():
                        model(torch.ones(1, 512)).sum().backward()
                    model(torch.ones(1, 512)).sum().backward()
                    assert not capsys.readouterr().err
                    run.optimizer.step()
                    locking.tell()
                    lines.append(capsys.readouterr().err)
        told, again = lines
        share = f"{readable(6 * 2**20)} of {readable(8 * 2**20)}"
        assert told.startswith(f"warning: {share} of the optimizer's host memory could be page-locked (")
        assert "no more memory can be page-locked)" in told and "This is WSL 2" in told and told.count("\n") == 1
        assert not again
        assert not capsys.readouterr().err
        run.optimizer.synchronize()


def test_other_warnings_are_shown_as_they_are() -> None:
    with pytest.warns(UserWarning, match="something else") as warned, PageLocking(None).watched():
        warnings.warn("something else", stacklevel=1)
    assert len(warned) == 1

"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import gc
import resource
import signal
from collections.abc import Generator, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from offload.engine.runtime import Direction, Event, HostRuntime, Runtime
from offload.simulation.accelerator import SimulatedAccelerator
from tests.garbage import freeze_libraries


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # a third of the time, and nothing to find
    try:
        return (yield)
    finally:
        gc.enable()
        freeze_libraries()


def pytest_runtest_logfinish() -> None:
    freeze_libraries()


class ThreadedRuntime(HostRuntime):
    """CPU memory treated as a separate device whose streams are immediate; the engine's threads are real ones."""

    shares_memory = False

    def copy(
        self, dst: Tensor, src: Tensor, direction: Direction, after: Sequence[Event] = (), name: str = ""
    ) -> Event:
        # As on an accelerator, autograd sees the write when it is queued.
        torch.autograd.graph.increment_version(dst)
        return super().copy(dst.data, src.data, direction, after, name)


def play_device(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    """Makes OffloadOptimizer treat the CPU as a separate device."""
    monkeypatch.setattr("offload.machinery.runtime_for", lambda device: runtime)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedAccelerator]:
    """The CPU as a device whose copies and threads run as late as they may, and on which a missing wait is an error."""
    with SimulatedAccelerator(order="late") as simulator:
        play_device(monkeypatch, simulator)
        yield simulator


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> ThreadedRuntime:
    """The CPU as a device of its own, with real threads."""
    runtime = ThreadedRuntime()
    play_device(monkeypatch, runtime)
    return runtime


@pytest.fixture(autouse=True, scope="session")
def _hear_interrupts() -> None:
    """A background job of a script ignores SIGINT, and so would every process that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _few_open_files() -> None:
    """No more than most machines grant a process: what leaks descriptors fails everywhere, not on some of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Models here are tiny, and test processes run side by side."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests neither read the user's wandb login nor reach for a network, and leave no runs in the current folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path_factory.getbasetemp()))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")

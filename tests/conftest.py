"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor


class LateEvent:
    """A position in a :class:`LateRuntime` stream; reaching it runs everything queued before it."""

    def __init__(self, queue: list[Callable[[], None]], position: int) -> None:
        self._queue, self._position = queue, position

    def synchronize(self) -> None:
        while self._queue and self._queue_done() < self._position:
            self._queue.pop(0)()

    def _queue_done(self) -> int:
        return self._queue.done  # type: ignore[attr-defined]


class _Stream(list):  # type: ignore[type-arg]
    """Copies that were queued but have not run; ``done`` counts those that have."""

    done = 0
    queued = 0

    def pop(self, index: int = -1) -> Callable[[], None]:  # type: ignore[override]
        self.done += 1
        return super().pop(index)


class LateRuntime:
    """CPU memory treated as a separate device whose copies run as late as their ordering allows.

    A copy reads its source only when somebody waits for it, so a missing wait shows as a wrong value.
    """

    shares_memory = False

    def __init__(self) -> None:
        self.streams = {"down": _Stream(), "up": _Stream()}
        self.copied_bytes = {"down": 0, "up": 0}

    def copy(self, dst: Tensor, src: Tensor, direction: str) -> LateEvent:
        stream = self.streams[direction]
        # As on an accelerator, autograd sees the write when it is queued, not when it runs.
        torch.autograd.graph.increment_version(dst)

        def run() -> None:
            dst.data.copy_(src.data)

        stream.append(run)
        stream.queued += 1
        self.copied_bytes[direction] += src.nbytes
        return LateEvent(stream, stream.queued)

    def compute_wait(self, event: LateEvent) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        for stream in self.streams.values():
            LateEvent(stream, stream.queued).synchronize()

    def empty_pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def late_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateRuntime]:
    """Makes OffloadOptimizer treat the CPU as a separate device with late copies."""
    runtime = LateRuntime()
    monkeypatch.setattr("offload.optimizer.runtime_for", lambda device: runtime)
    yield runtime


@pytest.fixture(autouse=True, scope="session")
def _hear_interrupts() -> None:
    """A background job of a script ignores SIGINT, and so would every process that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Models here are tiny, and test processes run side by side."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests neither read the user's wandb login nor reach for a network."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")

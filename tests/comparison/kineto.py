"""The simulated accelerator's work as torch's profiler would write it: events of a Chrome trace, as Kineto's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.engine.marks import PREFIX
from offload.engine.runtime import Direction, Event
from offload.optimizer import OffloadOptimizer
from offload.plan import replay as replaying
from offload.simulation.accelerator import SimulatedAccelerator

STREAMS = {"compute": 7, "update": 24, "up": 20, "down": 21}
"""Others, from 30 on, are a library's that exchanges tensors with other devices."""
APART = 1e-4
"""Microseconds between two moments of a thread, which on the simulator may be none."""


class Kineto(SimulatedAccelerator):
    """Notes each launch and what came of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.events: list[dict[str, Any]] = []
        self._moments = 0
        self._step: tuple[int, float] | None = None
        work = self._streams.work

        def noted(stream: Any, thread: Any, seconds: float, name: str, *rest: Any, **options: Any) -> None:
            call = self.moment(thread.now)
            begin = max(stream.now, thread.now)
            work(stream, thread, seconds, name, *rest, **options)
            if stream.now > begin:
                self._launched(thread.name, call, stream.name, begin, stream.now, name)

        self._streams.work = noted  # type: ignore[method-assign]

    # As the runtimes of real machines do.

    def copy(
        self, dst: Tensor, src: Tensor, direction: Direction, after: Sequence[Event] = (), name: str = ""
    ) -> Event:
        with self.range(PREFIX + name):
            return super().copy(dst, src, direction, after, name)

    @contextmanager
    def updating(self, name: str = "", *, on_default: bool = False) -> Iterator[None]:
        with self.range(PREFIX + name), super().updating(name, on_default=on_default):
            yield

    @contextmanager
    def working(self, name: str) -> Iterator[None]:
        with self.range(PREFIX + name), super().working(name):
            yield

    def moment(self, now: float) -> float:
        self._moments += 1
        return now * 1e6 + self._moments * APART

    def _launched(self, thread: str, call: float, stream: str, begin: float, end: float, name: str) -> None:
        number = len(self.events) + 1
        place = STREAMS.get(stream, 30)
        name = name if stream in STREAMS else f"ncclDevKernel_{name}"
        is_copy = stream in ("up", "down")
        runtime = {"External id": number, "cbid": 41 if is_copy else 211, "correlation": number}
        self._complete(
            "cuda_runtime", "cudaMemcpyAsync" if is_copy else "cudaLaunchKernel", 1, thread, call, 0.0, runtime
        )
        kind = {"up": "HtoD (Pinned -> Device)", "down": "DtoH (Device -> Pinned)"}
        on_device = {"device": 0, "context": 1, "stream": place, "correlation": number, "External id": number}
        self._complete(
            "gpu_memcpy" if is_copy else "kernel", f"Memcpy {kind[stream]}" if is_copy else name.replace(" ", "_"),
            0, place, begin * 1e6, (end - begin) * 1e6, on_device,
        )  # fmt: skip
        flow = {"id": number, "cat": "ac2g", "name": "ac2g"}
        self.events.append({"ph": "s", "pid": 1, "tid": thread, "ts": call, **flow})
        self.events.append({"ph": "f", "pid": 0, "tid": place, "ts": begin * 1e6, "bp": "e", **flow})

    def _complete(
        self, kind: str, name: str, process: int, thread: Any, begin: float, seconds: float, args: dict[str, Any]
    ) -> None:
        event = {"ph": "X", "cat": kind, "name": name, "pid": process, "tid": thread, "ts": begin, "dur": seconds}
        self.events.append({**event, "args": args})

    def range(self, name: str) -> Any:
        """Stands for torch.profiler.record_function."""
        return _Range(self, name)

    def end_step(self) -> None:
        """The profiler is stepped."""
        now = self.moment(self._threads.main.now)
        number = 0
        if self._step is not None:
            number, begin = self._step
            self._complete("user_annotation", f"ProfilerStep#{number}", 1, "main", begin, now - begin, {})
        self._step = number + 1, self.moment(self._threads.main.now)


class _Range:
    def __init__(self, simulator: Kineto, name: str) -> None:
        self._simulator, self._name = simulator, name

    def __enter__(self) -> None:
        self._thread = self._simulator._threads.current()
        self._begin = self._simulator.moment(self._thread.now)

    def __exit__(self, *_: Any) -> None:
        end = self._simulator.moment(self._thread.now)
        for kind, process in (("user_annotation", 1), ("gpu_user_annotation", 0)):  # Kineto writes it twice
            name, begin = self._thread.name, self._begin
            self._simulator._complete(kind, self._name, process, name, begin, end - begin, {"External id": 0})


def write_trace(path: Path, events: list[dict[str, Any]]) -> Path:
    """As torch writes it."""
    named = {"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "tid": 0, "args": {"name": "python"}}
    properties = [{"id": 0, "name": "NVIDIA GeForce RTX 4090", "totalGlobalMem": 25_386_352_640}]
    head = {"schemaVersion": 1, "deviceProperties": properties, "trace_id": "0", "displayTimeUnit": "ms"}
    content = {**head, "traceEvents": [named, *events], "traceName": str(path)}
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return path


def traced_replay(
    monkeypatch: pytest.MonkeyPatch, path: Path, replay: Callable[[], Any], module: Any = replaying
) -> Any:
    """What ``replay`` of a module returns, with a trace of its machine at ``path``."""
    made: list[Kineto] = []

    def make(*args: Any, **kwargs: Any) -> Kineto:
        made.append(Kineto(*args, **kwargs))
        return made[-1]

    zero_grad = OffloadOptimizer.zero_grad

    def step(self: OffloadOptimizer, set_to_none: bool = True) -> None:
        zero_grad(self, set_to_none)
        made[-1].end_step()

    with monkeypatch.context() as patch:
        patch.setattr(module, "SimulatedAccelerator", make)
        patch.setattr(OffloadOptimizer, "zero_grad", step)
        patch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        patch.setattr(torch.profiler, "record_function", lambda name: made[-1].range(name))
        result = replay()
    write_trace(path, made[-1].events)
    return result

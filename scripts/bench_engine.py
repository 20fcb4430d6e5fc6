"""What the engine itself costs for each layer of Llama-2 7B: Python on either thread, copies, events.

    python scripts/bench_engine.py                    # prints and records scripts/results/engine_python.json

The engine runs on a machine whose copies and events do nothing, over tensors 65,536 times smaller than the model's, so
that what is left is Python and the base optimizer's call. The processor time of each thread is taken, not the clock's:
both threads hold the interpreter's lock in turn. On a GPU each copy costs some 10 microseconds of CUDA calls more, and
each event 3. ``before`` in the record is an earlier engine on the same machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import threading
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import offload.optimizer
from offload import OffloadOptimizer
from offload.engine import units
from offload.engine.runtime import DONE, Direction, Event, HostRuntime
from offload.plan.workload import LLAMA2_7B as LOAD

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "scripts" / "results" / "engine_python.json"
WARM_UP, MEASURED = 3, 20
SCHEDULES: dict[str, dict[str, Any]] = {
    "stream, in backward": {"strategy": "stream", "update_in_backward": True},
    "stream, at step": {"strategy": "stream"},
    "host, in backward": {"strategy": "host", "update_in_backward": True},
}
BASES = ("offload.optim.AdamW", "torch.optim.AdamW")


class NoMachine(HostRuntime):
    """Counts copies and events, and does neither."""

    shares_memory = False

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def copy(
        self, dst: Tensor, src: Tensor, direction: Direction, after: Sequence[Event] = (), name: str = ""
    ) -> Event:
        self.counts[f"copies {direction}"] += 1
        return DONE

    def record(self, stream: Hashable = None) -> Event:
        self.counts["events"] += 1
        return DONE


class Llama(nn.Module):
    """The parameters of Llama-2 7B, shrunk; nothing computes with them."""

    def __init__(self) -> None:
        super().__init__()

        def weight(elements: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(max(1, elements // LOAD.shrink), dtype=torch.bfloat16))

        self.embedding = nn.ParameterDict({"weight": weight(LOAD.edge)})
        self.layers = nn.ModuleList(
            nn.ParameterDict({str(index): weight(elements) for index, elements in enumerate(LOAD.tensors)})
            for _ in range(LOAD.layers)
        )
        self.head = nn.ParameterDict({"weight": weight(LOAD.edge)})


def measure(base: str, **schedule: Any) -> dict[str, Any]:
    """Medians of a step, divided by the model's layers."""
    runtime = NoMachine()
    in_flight = 1.0 / LOAD.shrink
    with (
        mock.patch.object(offload.optimizer, "runtime_for", lambda device: runtime),
        mock.patch.object(units, "CHUNK_ELEMENTS", units.CHUNK_ELEMENTS // LOAD.shrink),
    ):
        model = Llama()
        optimizer = OffloadOptimizer(
            model.named_parameters(), base, model=model, lr=1e-5, in_flight_gib=in_flight, **schedule
        )
    engine = optimizer._machinery.engine
    gradients = {param: torch.ones_like(param) for param in model.parameters()}
    backward = list(reversed(gradients))
    seconds: dict[str, list[float]] = {"caller": [], "worker": []}
    for step in range(WARM_UP + MEASURED):
        if step == WARM_UP:
            runtime.counts.clear()
        for param in backward:
            param.grad = gradients[param]
        began = time.thread_time(), worker_time()
        for param in backward:
            engine._gradient_ready(param)
        optimizer.step()
        for unit in engine.units:
            engine.wait(unit)
        optimizer.zero_grad()
        ended = time.thread_time()
        if step >= WARM_UP:
            seconds["caller"].append(ended - began[0])
            seconds["worker"].append(worker_time() - began[1])
    counts = {name: count / MEASURED for name, count in runtime.counts.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    layers = LOAD.layers
    return {
        "base": base,
        "pieces": len(engine.pieces),
        "caller_ms_per_layer": round(medians["caller"] / layers * 1e3, 3),
        "worker_ms_per_layer": round(medians["worker"] / layers * 1e3, 3),
        "copies_up_per_layer": round(counts.get("copies up", 0) / layers, 2),
        "copies_down_per_layer": round(counts.get("copies down", 0) / layers, 2),
        "events_per_layer": round(counts.get("events", 0) / layers, 2),
    }


def worker_time() -> float:
    """Processor time of the engine's threads so far, in seconds."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("offload") and thread.ident]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads if thread.ident)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RECORD)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for base in BASES:
        for name, schedule in SCHEDULES.items():
            rows.append({"schedule": name, **measure(base, **schedule)})
            print(json.dumps(rows[-1]), flush=True)
    record: dict[str, Any] = {
        "command": "python scripts/bench_engine.py",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "model": {"layers": LOAD.layers, "parameters": LOAD.parameters, "tensors shrunk by": LOAD.shrink},
        "rows": rows,
    }
    if arguments.output.exists():  # measured on the same machine by an earlier version of the engine
        record["before"] = json.loads(arguments.output.read_text(encoding="utf-8")).get("before")
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

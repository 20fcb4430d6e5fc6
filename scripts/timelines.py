"""What each schedule of the optimizer costs on three machines, by replaying the engine on simulated time.

    python scripts/timelines.py                     # prints the table, records it, draws the pictures, updates docs
    python scripts/timelines.py --traces outputs    # also Chrome traces, for https://ui.perfetto.dev

The rows are the engine itself (:mod:`offload.plan.replay`) and torchao's schedule, on the same rates: data sheets times
an efficiency, no measurement. Compute is Llama-2 7B in bf16 with activation checkpointing; attention's own products,
the launch of kernels and Python take no time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pages import STRATEGIES, write_table

from offload.plan.replay import Result, replay, replay_compute, replay_torchao
from offload.plan.workload import LLAMA2_7B, MACHINES, Machine, Workload
from offload.simulation.timeline import draw, write_chrome_trace

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results"
RECORD = RESULTS / "timelines.json"
TOKENS = (1024, 4096)
BEGIN, END = "<!-- scripts/timelines.py writes this table -->\n", "<!-- end of the table -->\n"

Schedule = Callable[[Machine, Workload], Result]

SCHEDULES: dict[str, Schedule] = {
    "no optimizer": replay_compute,
    "torchao's schedule": replay_torchao,
    "`host`, at step": lambda m, w: replay(m, w, strategy="host"),
    "`host`, in backward, `step()` waits": lambda m, w: replay(
        m, w, strategy="host", update_in_backward=True, waits_per_unit=False
    ),
    "`host`, in backward, waits per unit": lambda m, w: replay(m, w, strategy="host", update_in_backward=True),
    "`host`, in backward, 8 GiB in flight": lambda m, w: replay(
        m, w, strategy="host", update_in_backward=True, in_flight_gib=8.0
    ),
    "`stream`, at step": lambda m, w: replay(m, w, strategy="stream"),
    "`stream`, in backward": lambda m, w: replay(m, w, strategy="stream", update_in_backward=True),
    "`stream`, in backward, 8 GiB in flight": lambda m, w: replay(
        m, w, strategy="stream", update_in_backward=True, in_flight_gib=8.0
    ),
}

PICTURES = {
    "timeline_torchao": ("h200", 4096, "torchao's schedule"),
    "timeline_host": ("h200", 4096, "`host`, in backward, waits per unit"),
    "timeline_stream": ("h200", 4096, "`stream`, in backward"),
}
"""File name: machine, tokens, schedule."""


def run(traces: Path | None) -> dict[str, Any]:
    """Replay every schedule on every machine; returns what is recorded."""
    rows = []
    for tokens in TOKENS:
        load = dataclasses.replace(LLAMA2_7B, tokens=tokens)
        for key, machine in MACHINES.items():
            for name, schedule in SCHEDULES.items():
                result = schedule(machine, load)
                rows.append(
                    {
                        "machine": key,
                        "tokens": tokens,
                        "schedule": name,
                        "step_ms": round(result.step * 1e3, 1),
                        "compute_ms": round(result.compute * 1e3, 1),
                        "exposed_ms": round(max(result.exposed, 0.0) * 1e3, 1),
                        "bound_ms": round(result.bound * 1e3, 1),
                        "forward_ms": round(forward_share(load) * result.compute * 1e3, 1),
                        "busy_ms": {agent: round(seconds * 1e3, 1) for agent, seconds in result.busy.items()},
                    }
                )
                print(f"{key} {tokens} {name}: {rows[-1]['step_ms']} ms", flush=True)
                if traces is not None:
                    traces.mkdir(parents=True, exist_ok=True)
                    plain = name.replace("`", "").replace(", ", "_").replace(" ", "_").replace("()", "")
                    write_chrome_trace(result.trace, traces / f"{key}_{tokens}_{plain}.json")
                for picture, wanted in PICTURES.items():
                    if wanted == (key, tokens, name):
                        title = f"{machine.name}, {tokens} tokens per step: {name.replace('`', '')}"
                        draw(result.trace, RESULTS / f"{picture}.png", title)
    return {
        "command": "python scripts/timelines.py",
        "torch": torch.__version__,
        "machines": {key: dataclasses.asdict(machine) for key, machine in MACHINES.items()},
        "workload": {"layers": LLAMA2_7B.layers, "parameters": LLAMA2_7B.parameters, "dtype": str(LLAMA2_7B.dtype)},
        "rows": rows,
    }


def forward_share(load: Workload) -> float:
    """Of a step's compute: two FLOPs for each weight and token, beside four of backward and two of recomputation."""
    return 2 / 8 if load.recompute else 2 / 6


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table: exposed milliseconds, and the step over its bound."""
    machines = record["machines"]
    heads = [f"{machine['name'].split(',')[0]}, {tokens}" for tokens in TOKENS for machine in machines.values()]
    lines = [
        "| exposed ms (step over its bound) | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    by_key = {(row["machine"], row["tokens"], row["schedule"]): row for row in record["rows"]}
    for name in SCHEDULES:
        cells = []
        for tokens in TOKENS:
            for key in machines:
                row = by_key[key, tokens, name]
                if name == "no optimizer":
                    cells.append(f"step {row['compute_ms']:,.0f} ms")
                else:
                    # Every schedule of one strategy has the same work; torchao's is that of host.
                    work = "`stream`, in backward" if "stream" in name else "`host`, in backward, waits per unit"
                    bound = by_key[key, tokens, work]["bound_ms"]
                    cells.append(f"{row['exposed_ms']:,.0f} ({row['step_ms'] / bound:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, help="folder for Chrome traces")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = run(arguments.traces)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = table(record)
    print(text)
    write_table(text, BEGIN, END, STRATEGIES)


if __name__ == "__main__":
    main()

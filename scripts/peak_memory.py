"""What device memory each schedule of the optimizer takes, by replaying the engine on a simulated allocator.

    python scripts/peak_memory.py             # prints the table and records it
    python scripts/peak_memory.py --readme    # also writes it into docs/strategies.md

Llama-2 7B in bf16 with activation checkpointing and a fused head and loss (:mod:`offload.plan.workload` has the sums)
on an RTX 4090's rates. Peaks are those of torch.cuda.max_memory_allocated, in step 1, which makes the states, and in
the steady state. The optimizer is torch.optim.AdamW in bf16, whose states take 4 bytes per parameter where the packed
AdamW's take 4.03: its kernels are not torch operations, so they cannot be simulated.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from pages import STRATEGIES, write_table

from offload.plan.replay import Result, replay
from offload.plan.workload import LLAMA2_7B, MACHINES

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "scripts" / "results" / "peak_memory.json"
BEGIN, END = "<!-- scripts/peak_memory.py writes this table -->\n", "<!-- end of the memory table -->\n"

TOKENS = (1024, 4096)
MACHINE = "rtx4090"
GIB = 2**30

CARDS = {"24 GB": 23.64 - 0.45, "16 GB": 15.60 - 0.45}
"""GiB for PyTorch: what torch reports as the total of an RTX 4090 and of a 4080 SUPER, less 0.45 GiB for the CUDA
context and its modules, which is what processes on such cards hold beside PyTorch's memory."""

SCHEDULES: dict[str, dict[str, Any]] = {
    f"`{strategy}`, {'in backward' if in_backward else 'at step'}{', gradients on the host' if offloads else ''}": {
        "strategy": strategy,
        "update_in_backward": in_backward,
        "offload_gradients": offloads,
    }
    for strategy, in_backward, offloads in itertools.product(("stream", "host"), (True, False), (False, True))
}
SCHEDULES["`stream`, in backward, `in_flight_gib=0.125`"] = {
    **SCHEDULES["`stream`, in backward"],
    "in_flight_gib": 0.125,
}


def replayed(name: str, tokens: int, card: str | None) -> Result:
    """One schedule, on a card or on one without limit."""
    memory = None if card is None else int(CARDS[card] * GIB)
    return replay(MACHINES[MACHINE], dataclasses.replace(LLAMA2_7B, tokens=tokens), memory=memory, **SCHEDULES[name])


def run() -> dict[str, Any]:
    """Replay every schedule on every card; returns what is recorded."""
    rows = []
    for tokens, name, card in itertools.product(TOKENS, SCHEDULES, (None, *CARDS)):
        result = replayed(name, tokens, card)
        row: dict[str, Any] = {"tokens": tokens, "schedule": name, "card": card}
        for time, use in (("first", result.first), ("steady", result.steady)):
            row[time] = {
                "allocated_gib": round(use.allocated / GIB, 2),
                "reserved_gib": round(use.reserved / GIB, 2),
                "retries": use.retries,
                "purposes_gib": {
                    purpose: round(used / GIB, 2)
                    for purpose, used in sorted(use.purposes.items(), key=lambda entry: -entry[1])
                    if used >= GIB / 100
                },
            }
        row["step_ms"] = None if result.out_of_memory else round(result.step * 1e3, 1)
        row["pinned_late_gib"] = round(result.pinned_late / GIB, 2)
        row["out_of_memory"] = result.out_of_memory
        rows.append(row)
        print(f"{tokens} {name}, {card or 'no limit'}: {cell(row)}", flush=True)
    return {
        "command": "python scripts/peak_memory.py",
        "torch": torch.__version__,
        "cards_gib": CARDS,
        "machine": dataclasses.asdict(MACHINES[MACHINE]),
        "workload": {
            "layers": LLAMA2_7B.layers,
            "parameters": LLAMA2_7B.parameters,
            "dtype": str(LLAMA2_7B.dtype),
            "activations": dataclasses.asdict(LLAMA2_7B.activations) if LLAMA2_7B.activations else None,
        },
        "rows": rows,
    }


def cell(row: dict[str, Any]) -> str:
    """A row of the record in the table: peaks without a limit, whether it fits with one."""
    if row["out_of_memory"]:
        return "fails in " + row["out_of_memory"].partition(":")[0]
    if row["card"] is None:
        return f"{row['first']['allocated_gib']:.1f}, {row['steady']['allocated_gib']:.1f}"
    retries = row["first"]["retries"] + row["steady"]["retries"]
    return f"fits, {retries} retries" if retries else "fits"


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    columns = list(itertools.product(TOKENS, (None, *CARDS)))
    heads = [f"{tokens} tokens: GiB in step 1, later" if card is None else card for tokens, card in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    by_key = {(row["tokens"], row["schedule"], row["card"]): row for row in record["rows"]}
    for name in SCHEDULES:
        cells = [cell(by_key[tokens, name, card]) for tokens, card in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", action="store_true", help="write the table into docs/strategies.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = run()
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = table(record)
    print(text)
    if arguments.readme:
        write_table(text, BEGIN, END, STRATEGIES)


if __name__ == "__main__":
    main()

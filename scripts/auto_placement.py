"""Strategy ``auto`` against each strategy alone, on simulated machines: the engine itself, run on virtual time.

    python scripts/auto_placement.py [--only "RTX 4090"]

writes scripts/results/auto_placement.json and the table in docs/strategies.md. Each machine has the memory that its
card leaves PyTorch; what copies and the CPU take of the host's memory they share. `auto` finds everything out by itself
in the first steps, and the steps after them are counted, as are those of the others. Beside each is what
:func:`offload.plan.prediction.predict` makes of it, which is told the memory that `stream` leaves in the steps after
which `auto` moves states.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pages import write_table

from offload.auto import SPARE, WARM_UP
from offload.plan.budget import CONTEXT
from offload.plan.cards import find_card
from offload.plan.efficiency import LINK
from offload.plan.machines import LANES, machine_of_card
from offload.plan.prediction import Prediction, Settings, cpu_bytes, predict
from offload.plan.replay import Result, replay, speeds_of
from offload.plan.workload import GB, LLAMA2_7B, Machine, Workload, llama_activations

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "scripts" / "results" / "auto_placement.json"
STRATEGIES = ROOT / "docs" / "strategies.md"
BEGIN, END = "<!-- scripts/auto_placement.py writes this table -->\n", "<!-- end of the placements' table -->\n"
GIB = 2**30

SINGLE = ("resident", "stream", "host")

OPTIMIZER: dict[str, Any] = {"optimizer_class": "offload.optim.AdamW", "state_dtype": "int8", "master": "split"}
STATE_BYTES = 4.03
CPU_BYTES = cpu_bytes(2, Settings("auto", STATE_BYTES))

STEPS, AUTO_STEPS = (3, 2), (14, 2)
"""Before those that count, and those."""


def llama(layers: int, dim: int, hidden: int, heads: int, groups: int, vocabulary: int) -> Workload:
    """A Llama with ``groups`` heads of keys and values."""
    narrow = dim * dim * groups // heads
    return dataclasses.replace(
        LLAMA2_7B,
        layers=layers,
        tensors=(dim, dim * dim, narrow, narrow, dim * dim, dim, *(dim * hidden,) * 3),
        edge=vocabulary * dim,
        activations=llama_activations(dim, hidden, heads, vocabulary),
    )


MODELS = {
    "1.2 B": llama(16, 2048, 8192, 32, 8, 32000),  # Llama 3.2 1B's layers
    "3 B": llama(28, 3072, 8192, 24, 8, 32000),  # Llama 3.2 3B's
    "6.7 B": LLAMA2_7B,
}

HOSTS = {
    # Name: card, memory modules' GB/s, PCIe generation and lanes where they are not the card's own, models.
    "RTX 4060 laptop, DDR5-4800": ("RTX 4060", 76.8, None, ("1.2 B",)),
    "RTX 4060 Ti 16 GB, DDR4-3200": ("RTX 4060 Ti 16GB", 51.2, None, ("1.2 B", "3 B")),
    "RTX 3090 in PCIe 3, DDR5-5600": ("RTX 3090", 89.6, (3, 16), ("3 B", "6.7 B")),
    "RTX 4090, DDR5-5600": ("RTX 4090", 89.6, None, ("3 B", "6.7 B")),
    "RTX 5090, DDR5-6000": ("RTX 5090", 96.0, None, ("3 B", "6.7 B")),
    "A100 40 GB, 8 x DDR4-3200": ("A100 40GB", 204.8, None, ("3 B", "6.7 B")),
    "H100 80 GB, 8 x DDR5-4800": ("H100", 307.2, None, ("6.7 B",)),
}

TOKENS = (1024, 4096)


def machine(name: str) -> tuple[Machine, int]:
    """Its rates, and bytes of the device that PyTorch can have."""
    card_name, memory, link, _ = HOSTS[name]
    card = find_card(card_name)
    made = machine_of_card(card, ram_bandwidth=memory * GB)
    if link is not None:
        rate = LINK * LANES[link[0]] * link[1]
        made = dataclasses.replace(made, up=rate, down=rate)
    return dataclasses.replace(made, name=name), card.memory - CONTEXT


def measured(
    name: str, model: str, tokens: int, in_backward: bool, strategy: str, steps: tuple[int, int] = STEPS
) -> Result:
    """One run; ``steps`` of a strategy alone."""
    rates, memory = machine(name)
    load = dataclasses.replace(MODELS[model], tokens=tokens).coarse(4)
    options: dict[str, Any] = {**OPTIMIZER, "strategy": strategy, "update_in_backward": in_backward}
    if strategy != "auto":
        memory = int((1 - SPARE) * memory)  # which `auto` leaves free
    else:
        steps, options["speeds"] = AUTO_STEPS, speeds_of(rates, load, cpu_bytes=CPU_BYTES)
    return replay(rates, load, memory=memory, steps=steps, shares_host_memory=True, **options)


def cases(only: str | None) -> Iterator[tuple[str, str, int, bool]]:
    for name, (_, _, _, models) in HOSTS.items():
        for model in models:
            for tokens in TOKENS:
                for in_backward in (True, False):
                    if only is None or only in name:
                        yield name, model, tokens, in_backward


def predicted(name: str, model: str, tokens: int, in_backward: bool) -> Prediction:
    """What `tune plan` says of `auto`, where it finds as much memory left as it would after its first steps, which are
    those of `stream`. Later ones may take a little more."""
    rates, memory = machine(name)
    load = dataclasses.replace(MODELS[model], tokens=tokens)
    before = measured(name, model, tokens, in_backward, "stream", (1, WARM_UP - 1))
    room = int((1 - SPARE) * memory) - before.first.joined(before.steady).reserved
    settings = Settings("auto", STATE_BYTES, update_in_backward=in_backward, room=room, cpu_may_help=True)
    return predict(load, rates, settings)


def row(name: str, model: str, tokens: int, in_backward: bool) -> dict[str, Any]:
    """What is recorded of a case."""
    _, memory = machine(name)
    results = {s: measured(name, model, tokens, in_backward, s) for s in (*SINGLE, "auto")}
    fits = not results["stream"].out_of_memory
    plan = predicted(name, model, tokens, in_backward) if fits else None
    return {
        "machine": name,
        "model": model,
        "tokens": tokens,
        "in_backward": in_backward,
        "memory_gib": round(memory / GIB, 2),
        "compute_ms": _ms(min(result.compute for result in results.values())),
        "step_ms": {strategy: _ms(result.step) for strategy, result in results.items()},
        "peak_gib": {strategy: round(result.steady.reserved / GIB, 2) for strategy, result in results.items()},
        "placed": _shares(results["auto"].placed),
        "predicted_ms": None if plan is None else _ms(plan.step_seconds),
        "predicted_placed": {} if plan is None else _shares(plan.placed),
    }


def _shares(placed: Mapping[str, float]) -> dict[str, float]:
    return {way: round(share, 3) for way, share in placed.items()}


def _ms(seconds: float) -> float | None:
    """None where memory ran out."""
    return None if math.isinf(seconds) else round(seconds * 1e3, 1)


def best(entry: dict[str, Any]) -> tuple[str, float] | None:
    """Of the strategies alone, the fastest that fits, and its step in ms; None where none fits."""
    fitting = [(entry["step_ms"][s], s) for s in SINGLE if entry["step_ms"][s] is not None]
    return None if not fitting else (min(fitting)[1], min(fitting)[0])


def table(record: dict[str, Any]) -> str:
    """As Markdown: step time of each strategy, `auto`'s gain over the best of the others, its peak of what there is."""
    lines = ["| ms a step | `resident` | `stream` | `host` | `auto` | faster | peak GiB |", "|---" * 7 + "|"]
    for entry in record["rows"]:
        found = best(entry)
        if found is None:
            continue
        steps = ["–" if entry["step_ms"][s] is None else f"{entry['step_ms'][s]:,.0f}" for s in (*SINGLE, "auto")]
        gain = found[1] / entry["step_ms"]["auto"]
        what = f"{entry['machine']}: {entry['model']}, {entry['tokens']} tokens"
        how = "" if entry["in_backward"] else ", at step"
        peak = f"{entry['peak_gib']['auto']:.1f} of {entry['memory_gib']:.1f}"
        lines.append(f"| {what}{how} | " + " | ".join([*steps, f"{gain:.2f} x", peak]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="part of a machine's name; nothing is written then")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    rows = []
    for case in cases(only):
        rows.append(row(*case))
        print(json.dumps(rows[-1]), flush=True)
    record = {"command": "python scripts/auto_placement.py", "torch": torch.__version__, "rows": rows}
    print(table(record))
    if only is None:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        write_table(table(record), BEGIN, END, STRATEGIES)


if __name__ == "__main__":
    main()

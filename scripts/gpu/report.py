"""README's account of the GPU: what was measured, and where nothing was, that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pages import README, write_table

from gpu.measure import GIB
from gpu.parts import HEADLINE, LOCKING, SIZE_ON_A_GPU, large_recipes
from gpu.record import latest

BEGIN, END = "<!-- scripts/gpu_suite.py writes this table -->\n", "<!-- end of the table -->"
NOTHING = "not measured"

Entry = dict[str, Any]

HEADS = (
    "7B, bf16",
    "card",
    "tokens per step",
    "tokens/s",
    "exposed ms (simulated)",
    "GPU GiB (step 1)",
    "page-locked GiB",
)

ROWS = (
    ("none", "no optimizer", None, (1024, 8192)),
    (HEADLINE, "**packed, streamed in backward**", None, (1024, 8192)),
    ("packed", "packed, resident", None, (1024, 8192)),
    ("adamw", "`torch.optim.AdamW`, resident", None, (1024, 8192)),
    ("packed-host-in-backward+model", "packed, `host` in backward", None, (1024, 8192)),
    ("packed-stream-offload-gradients+model", "packed, streamed, gradients offloaded", None, (1024, 8192)),
    ("torchao-offload-gradients", "torchao `CPUOffloadOptimizer`", None, (1024, 8192)),
    (HEADLINE, "**packed, streamed in backward**", 16, (1024, 4096)),
    (HEADLINE, "**packed, streamed in backward**", 24, (1024, 4096)),
)
"""Case, what it is called, size of the card in GB or None for all of it, and tokens of a step."""

MANAGED = {"bnb-paged-adamw8bit": "PagedAdamW8bit", "bnb-paged-adamw32bit": "PagedAdamW32bit"}
"""Shown where they were measured: the driver pages their memory, so that no peak tells what they need."""


def report(content: dict[str, Any]) -> str:
    """The table and the lines below it, as Markdown. Cells and lines without a record say so."""
    runs = content["runs"]
    on_gpu = [r for r in content["results"] if r.get("device") != "cpu" and r.get("model") == "7b" and not r["layers"]]
    rows = [" | ".join(cells) for cells in _rows(on_gpu)]
    table = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|", *(f"| {row} |" for row in rows)]
    gpu_runs = [run for run in runs if run["environment"].get("card")]
    lines = [
        _machine(gpu_runs),
        _tests(content),
        _losses(on_gpu),
        _copies(on_gpu, gpu_runs),
        _updates(gpu_runs),
        _locking(gpu_runs),
        _recipes(content),
    ]
    return "\n".join([*table, "", *(f"- {line}" for line in lines)]) + "\n"


def _rows(results: list[Entry]) -> Iterator[list[str]]:
    for case, title, limit, sizes in ROWS:
        for tokens in sizes:
            yield _row(title, "whole" if limit is None else f"{limit} GB", tokens, _find(results, case, limit, tokens))
    for case, name in MANAGED.items():
        for found in [r for r in results if r["case"] == case and r["status"] == "ok"]:
            yield _row(f"bitsandbytes `{name}`, managed memory", "whole", found["tokens"], found)


def _find(results: list[Entry], case: str, limit: int | None, tokens: int) -> Entry | None:
    """The last result about a case, with the allocator's default settings."""
    wanted = (case, limit, tokens, "")
    found = [r for r in results if (r["case"], r["memory_gib"], r["tokens"], r.get("allocator", "")) == wanted]
    return found[-1] if found else None


def _row(title: str, card: str, tokens: int, result: Entry | None) -> list[str]:
    start = [title, card, f"{tokens:,}"]
    if result is None:
        return [*start, *[NOTHING] * 4]
    if result["status"] != "ok":
        return [*start, result["status"], *[NOTHING] * 3]

    def memory(key: str) -> str:
        return f"{result[key] / GIB:.1f}" if key in result else NOTHING

    exposed = f"{1e3 * result['exposed_seconds']:,.0f}" if "exposed_seconds" in result else NOTHING
    if "simulated_exposed_seconds" in result:
        exposed += f" ({1e3 * result['simulated_exposed_seconds']:,.0f})"
    if result["case"].startswith("none"):
        exposed = f"step {1e3 * result['step_seconds']:,.0f} ms"
    peaks = f"{memory('device_peak_reserved_bytes')} ({memory('first_step_device_peak_reserved_bytes')})"
    if result.get("beyond_limit_bytes", 0) > 0:
        peaks += f", {result['beyond_limit_bytes'] / GIB:.2f} beyond the card"
    return [*start, f"{result['tokens_per_second']:,.0f}", exposed, peaks, memory("host_pinned_bytes")]


def _machine(runs: list[Entry]) -> str:
    if not runs:
        return f"Machine: {NOTHING}."
    parts = []
    for run in runs:
        facts = run["environment"]
        versions = f"driver {facts.get('driver')}, torch {facts['torch']}, Triton {facts.get('triton')}"
        commit = (run.get("commit") or "commit unknown")[:12]
        part = f"{facts['card']}, {facts['cpu']} with {facts['cpu_count']} threads, {versions}"
        parts.append((part, f"{run['date'][:10]} ({commit})"))
    machines = {part: [date for other, date in parts if other == part] for part, _ in parts}
    return (
        "Machine: " + "; ".join(f"{part}: {', '.join(dict.fromkeys(dates))}" for part, dates in machines.items()) + "."
    )


def _tests(content: dict[str, Any]) -> str:
    cards = {card: tests for card, tests in content.get("tests", {}).items() if card != "cpu"}
    names = {
        "kernels": "native kernels",
        "engine": "engine",
        "optimizers": "every optimizer",
        "recipes": "recipes",
        "sanitizer": "under the CUDA sanitizer",
    }
    parts = []
    for name, title in names.items():
        outcomes = [tests[name] for tests in cards.values() if name in tests]
        if not outcomes:
            parts.append(f"{title}: {NOTHING}")
            continue
        last = outcomes[-1]
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(last.get("outcomes", {}).items()))
        left = f", {last['left_out']} not run" if last.get("left_out") else ""
        parts.append(f"{title}: {counts or 'none ran'}{left}")
    return f"Tests on the card: {'; '.join(parts)}."


def _losses(results: list[Entry]) -> str:
    compared = [r for r in results if r["status"] == "ok" and "same_losses" in r]
    if not compared:
        return f"Losses of streamed and of resident training compared bit for bit: {NOTHING}."
    different = [r for r in compared if not r["same_losses"]["equal"]]
    steps = min(r["same_losses"]["steps"] for r in compared)
    text = f"Losses of streamed and of resident training compared bit for bit over {steps} steps: "
    text += f"{len(compared) - len(different)} of {len(compared)} equal"
    for r in different:
        same = r["same_losses"]
        text += f"; {r['case']} at {r['tokens']} tokens differs from {same['to']} in step {same['first_unequal_step']}"
    repeats = [r["gradients_repeat"] for r in results if "gradients_repeat" in r]
    if not repeats:
        return f"{text}; whether gradients repeat: {NOTHING}."
    return f"{text}; gradients of the same step {'repeat' if all(repeats) else 'DO NOT repeat'} to the bit."


def _copies(results: list[Entry], runs: list[Entry]) -> str:
    rates = [run["rates"] for run in runs if "rates" in run]
    link = NOTHING
    if rates:
        one = ", ".join(f"{rates[-1][way] / 1e9:.1f} {way}" for way in ("up", "down"))
        link = f"{one}, {rates[-1]['each_of_both'] / 1e9:.1f} each way at once"
    found = [r["copies"] for r in results if r["case"] == HEADLINE and "up" in r.get("copies", {})]
    ours = NOTHING
    if found:
        ways = [
            f"{copies[way]['bytes_per_second'] / 1e9:.1f} {way}"
            for copies in found[-1:]
            for way in ("up", "down")
            if "bytes_per_second" in copies[way]
        ]
        ours = ", ".join(ways) or NOTHING
    return f"Link, GB/s: {link}; the optimizer's copies beside training: {ours}."


def _updates(runs: list[Entry]) -> str:
    rates = [run["rates"] for run in runs if "updates" in run.get("rates", {})]
    if not rates:
        return f"Update kernel against a copy on the device: {NOTHING}."
    last = rates[-1]
    parts = [f"{name} {rate / last['device_copy']:.2f}" for name, rate in last["updates"].items()]
    return f"Update kernel against a copy on the device ({last['device_copy'] / 1e9:,.0f} GB/s): {', '.join(parts)}."


def _locking(runs: list[Entry]) -> str:
    parts = []
    for name in LOCKING:
        found = [run["page_locking"][name] for run in runs if name in run.get("page_locking", {})]
        parts.append(f"{name} {found[-1]['seconds_per_gib']:.2f} s" if found else f"{name}: {NOTHING}")
    return f"Page-locking a GiB: {'; '.join(parts)}."


def _recipes(content: dict[str, Any]) -> str:
    parts = []
    for name in ("full-tiny", "lora-tiny", *(run.name for run in large_recipes(SIZE_ON_A_GPU))):
        entry = latest(content, name)
        if entry is None:
            parts.append(f"{name}: {NOTHING}")
            continue
        speed = f", {entry['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in entry else ""
        parts.append(f"{name}: {entry['status']}, {entry.get('steps', 0)} steps{speed}")
    return f"Recipes: {'; '.join(parts)}."


def write_into_readme(content: dict[str, Any]) -> None:
    """Replace what is between the markers; ValueError where they are not."""
    write_table(report(content), BEGIN, END, README)

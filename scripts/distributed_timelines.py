"""What schedules cost on several cards of one host, by replaying FSDP2 and the engine on simulated time.

    python scripts/distributed_timelines.py                     # prints the tables, records them, updates docs
    python scripts/distributed_timelines.py --only "in backward"  # prints some rows, records nothing
    python scripts/distributed_timelines.py --traces outputs    # also Chrome traces, for https://ui.perfetto.dev

Rates are data sheets times an efficiency (:mod:`offload.plan.workload`, :mod:`offload.plan.collectives`), no
measurement. Compute is Llama-2 7B in bf16 with activation checkpointing; attention's own products, Python, and the
processors that NCCL's kernels take from a card cost nothing. It takes a quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from pages import DISTRIBUTED, write_table

from offload.device import DTYPES
from offload.plan.budget import CONTEXT
from offload.plan.cards import find_card
from offload.plan.collectives import SYSTEMS
from offload.plan.distributed import Plan, RankResult, replay_cpu_offload, replay_engine, replay_nothing
from offload.plan.prediction import Settings
from offload.plan.ranks import Exchange, predict_ranks
from offload.plan.workload import LLAMA2_7B, Workload, llama_activations
from offload.simulation.timeline import write_chrome_trace

RESULTS = Path(__file__).parent / "results"
RECORD = RESULTS / "distributed_timelines.json"
BEGIN, END = "<!-- scripts/distributed_timelines.py writes this table -->\n", "<!-- end of the table -->\n"
BEGIN_CLOSED = "<!-- scripts/distributed_timelines.py writes the closed form -->\n"
BEGIN_PUBLISHED = "<!-- scripts/distributed_timelines.py writes what is published -->\n"

RANKS = (2, 4, 8)
CARDS = {"rtx4090": "RTX 4090", "h100": "H100"}
GIB = 2**30

Schedule = Callable[[Plan], RankResult]

UPDATES: dict[str, Schedule] = {
    "no optimizer": replay_nothing,
    "states on the cards": lambda p: replay_engine(p, strategy="resident"),
    "`stream`, in backward": lambda p: replay_engine(p, strategy="stream", update_in_backward=True),
    "`stream`, in backward, `step()` waits": lambda p: replay_engine(
        p, strategy="stream", update_in_backward=True, waits_per_unit=False
    ),
    "`stream`, at step": lambda p: replay_engine(p, strategy="stream"),
    "`host`, in backward": lambda p: replay_engine(p, strategy="host", update_in_backward=True),
    "FSDP2's `CPUOffloadPolicy`": replay_cpu_offload,
}

IN_BACKWARD = "`stream`, in backward"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        resharding: as the recipes' ``reshard_after_forward``.
        update: one of :data:`UPDATES`.
        micro_batches: of a step.
        reduce_dtype: as the recipes' key.
    """

    resharding: bool
    update: str
    micro_batches: int = 1
    reduce_dtype: str = "fp32"

    @property
    def label(self) -> str:
        parts = ["weights sharded" if self.resharding else "weights whole", self.update]
        if self.reduce_dtype != "fp32":
            parts.append(f"reduced in {self.reduce_dtype}")
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        return f"{parts[0]}: {', '.join(parts[1:])}"

    def replay(self, system: str, ranks: int) -> RankResult:
        load = dataclasses.replace(LLAMA2_7B, micro_batches=self.micro_batches)
        plan = Plan(SYSTEMS[system], ranks, load, self.resharding, DTYPES[self.reduce_dtype])
        return UPDATES[self.update](plan)

    def find(self, record: dict[str, Any], system: str, ranks: int) -> dict[str, Any]:
        """What is recorded of it."""
        wanted = {"system": system, "ranks": ranks, **dataclasses.asdict(self)}
        (found,) = [row for row in record["rows"] if wanted.items() <= row.items()]
        result: dict[str, Any] = found
        return result


FIELDS = [each.name for each in dataclasses.fields(Row)]

ROWS = [
    row
    for resharding in (False, True)
    for row in (
        *(Row(resharding, update) for update in UPDATES),
        Row(resharding, IN_BACKWARD, reduce_dtype="bf16"),
        Row(resharding, IN_BACKWARD, 4),
    )
]


def qwen(layers: int, dim: int, hidden: int, heads: int, kv: int, tokens: int) -> Workload:
    """A Qwen2.5: ``kv`` elements of all its keys, or values, of a token."""
    return Workload(
        layers=layers,
        tensors=(dim, dim * dim, dim * kv, dim * kv, dim * dim, dim, *(dim * hidden,) * 3),
        tokens=tokens,
        edge=152064 * dim,
        activations=llama_activations(dim, hidden, heads, 152064),
        launches=LLAMA2_7B.launches,
    )


CLOSED: dict[str, Settings] = {
    "states on the cards": Settings("resident", 4.0),
    IN_BACKWARD: Settings("stream", 4.0, update_in_backward=True),
    "`stream`, at step": Settings("stream", 4.0),
    "`host`, in backward": Settings("host", 4.0, update_in_backward=True),
}
"""Updates whose steps :mod:`offload.plan.ranks` tells in closed form; those replayed are torch's AdamW in bf16."""


def closed_form(row: Row, system: str, ranks: int) -> float:
    """Seconds of a step, as `tune plan` tells them."""
    load = dataclasses.replace(LLAMA2_7B, micro_batches=row.micro_batches)
    layer = sum(load.tensors)
    exchange = Exchange(
        ranks,
        layers=load.layers * layer,
        embedding=load.edge,
        root=load.head_elements,
        first=load.edge + layer,
        trained=load.parameters,
        reduce_itemsize=DTYPES[row.reduce_dtype].itemsize,
        resharding=row.resharding,
    )
    settings = dataclasses.replace(CLOSED[row.update], micro_batches=row.micro_batches)
    return predict_ranks(load, SYSTEMS[system], exchange, settings).step_seconds


@dataclasses.dataclass(frozen=True)
class Published:
    """A speed that somebody else published, on four RTX 4090 and 512 Ki tokens a step.

    Attributes:
        name: what was trained with what.
        tokens_per_second: of all cards.
        ours: what is replayed beside it.
        load: its model, and the tokens of a micro-batch.
        update: that is replayed.
    """

    name: str
    tokens_per_second: float
    ours: str
    load: Workload
    update: Schedule


QWEN_7B = qwen(28, 3584, 18944, 28, 512, 16 * 1024)
QWEN_32B = qwen(64, 5120, 27648, 40, 1024, 4 * 1024)

SOURCE = "https://github.com/IST-DASLab/llmq/blob/main/benchmarks/4090x4.md"
PUBLISHED = (
    Published("Qwen2.5-7B, LLMQ in bf16", 10897, "`stream`, in backward", QWEN_7B, UPDATES[IN_BACKWARD]),
    Published(
        "Qwen2.5-7B, LLaMA-Factory with ZeRO-3 offload",
        6929,
        "FSDP2's `CPUOffloadPolicy`",
        dataclasses.replace(QWEN_7B, tokens=32 * 1024),
        replay_cpu_offload,
    ),
    Published(
        "Qwen2.5-32B, LLMQ in bf16",
        2206,
        "`stream`, gradients on the host",
        QWEN_32B,
        lambda p: replay_engine(p, strategy="stream", update_in_backward=True, offload_gradients=True),
    ),
)


def run(record: dict[str, Any], only: str, traces: Path | None) -> Iterator[None]:
    """Replay every row on every system that is not recorded, and every published speed; yields after each."""
    known = [{name: row[name] for name in ("system", "ranks", *FIELDS)} for row in record["rows"]]
    for row in ROWS:
        for key in SYSTEMS:
            for ranks in RANKS:
                name = {"system": key, "ranks": ranks, **dataclasses.asdict(row)}
                if only not in row.label or name in known:
                    continue
                result = row.replay(key, ranks)
                record["rows"].append({**name, **numbers(result)})
                print(f"{key} x{ranks} {row.label}: {numbers(result)}", flush=True)
                if traces is not None:
                    traces.mkdir(parents=True, exist_ok=True)
                    plain = "".join(c if c.isalnum() else "_" for c in row.label)
                    write_chrome_trace(result.trace, traces / f"{key}_{ranks}_{plain}.json")
                yield
    for each in PUBLISHED:
        if only in each.name and all(row["name"] != each.name for row in record["published"]):
            record["published"].append(compared(each))
            yield


def blank() -> dict[str, Any]:
    """A record without rows."""
    return {
        "command": "python scripts/distributed_timelines.py",
        "torch": torch.__version__,
        "systems": {key: dataclasses.asdict(system) for key, system in SYSTEMS.items()},
        "rows": [],
        "source": SOURCE,
        "published": [],
    }


def numbers(result: RankResult) -> dict[str, Any]:
    """What is recorded of a replay."""
    memory = max(result.first.allocated, result.steady.allocated)
    return {
        "step_ms": round(result.step * 1e3, 1),
        "compute_ms": round(result.compute * 1e3, 1),
        "busy_ms": {name: round(seconds * 1e3, 1) for name, seconds in result.busy.items()},
        "gib": round(memory / GIB, 2),
    }


def compared(each: Published) -> dict[str, Any]:
    """A published speed, and the one that is replayed."""
    cards, step = 4, 512 * 1024
    micro_batches = step // (cards * each.load.tokens)
    load = dataclasses.replace(each.load, micro_batches=micro_batches)
    result = each.update(Plan(SYSTEMS["rtx4090"], cards, load, True, torch.bfloat16))
    row = {
        "name": each.name,
        "published": each.tokens_per_second,
        "ours": each.ours,
        "tokens": each.load.tokens,
        "micro_batches": micro_batches,
        "replayed": round(step / result.step),
        **numbers(result),
    }
    print(row, flush=True)
    return row


def _fits(row: dict[str, Any], key: str) -> bool:
    """Whether a replay's memory is there on a system's card."""
    return float(row["gib"]) * GIB <= find_card(CARDS[key]).memory - CONTEXT


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table: milliseconds of a step, and the share of them that is compute."""
    heads = [f"{ranks} x {CARDS[key]}" for key in SYSTEMS for ranks in RANKS]
    lines = ["| ms per step (of it compute) | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for row in ROWS:
        cells = []
        for key in SYSTEMS:
            for ranks in RANKS:
                found = row.find(record, key, ranks)
                share = found["compute_ms"] / found["step_ms"]
                fits = _fits(found, key)
                cells.append(f"{found['step_ms']:,.0f} ({share:.0%})" if fits else f"needs {found['gib']:.1f} GiB")
        lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def add_closed_form(record: dict[str, Any]) -> None:
    """Put what `tune plan` says beside each recorded step that it knows."""
    for found in record["rows"]:
        if found["update"] in CLOSED:
            row = Row(**{name: found[name] for name in FIELDS})
            found["closed_ms"] = round(closed_form(row, found["system"], found["ranks"]) * 1e3, 1)


def closed_table(record: dict[str, Any]) -> str:
    """How far the closed form is from the replay, as a Markdown table: from the lowest to the highest of all ranks."""
    lines = ["| closed form against replay | " + " | ".join(CARDS.values()) + " |", "|---" * (len(CARDS) + 1) + "|"]
    for row in ROWS:
        if row.update not in CLOSED:
            continue
        cells = []
        for key in SYSTEMS:
            found = [row.find(record, key, ranks) for ranks in RANKS]
            off = [each["closed_ms"] / each["step_ms"] - 1 for each in found]
            cells.append(f"{min(off):+.1%} to {max(off):+.1%}")
        lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def published_table(record: dict[str, Any]) -> str:
    """The record's published speeds as a Markdown table."""
    lines = [
        "| 4 x RTX 4090, 512 Ki tokens a step | published tok/s | replayed here | tok/s | difference |",
        "|---|---|---|---|---|",
    ]
    for row in record["published"]:
        difference = f"{row['replayed'] / row['published'] - 1:+.0%}"
        if not _fits(row, "rtx4090"):
            difference += f", but needs {row['gib']:.1f} GiB"
        cells = f"{row['published']:,} | {row['ours']} | {row['replayed']:,} | {difference}"
        lines.append(f"| {row['name']} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name contains this; records nothing")
    parser.add_argument("--traces", type=Path, help="folder for Chrome traces")
    parser.add_argument("--out", type=Path, default=RECORD, help="where it is recorded")
    parser.add_argument("--resume", action="store_true", help="go on with a record that was interrupted")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.resume else blank()
    for _ in run(record, arguments.only, arguments.traces):
        if not arguments.only:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if arguments.only:
        return
    add_closed_form(record)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record) + "\n" + published_table(record))
    if arguments.out == RECORD:
        write_table(table(record), BEGIN, END, DISTRIBUTED)
        write_table(published_table(record), BEGIN_PUBLISHED, END, DISTRIBUTED)
        write_table(closed_table(record), BEGIN_CLOSED, END, DISTRIBUTED)


if __name__ == "__main__":
    main()

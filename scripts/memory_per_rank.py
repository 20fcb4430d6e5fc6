"""Memory of each process of 7B to 70B models on 1 to 16 GPUs, from the planner.

python scripts/memory_per_rank.py    # prints the table, records it, updates docs; a minute or two
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pages import DISTRIBUTED, write_table

from offload.cli import registry
from offload.cli.planned_run import PlannedRun
from offload.cli.registry import find_config, find_recipe, recipe_of_config
from offload.distributed.world import World
from offload.plan.budget import DISK
from offload.plan.cards import find_card

RECORD = Path(__file__).parent / "results" / "memory_per_rank.json"
BEGIN, END = "<!-- scripts/memory_per_rank.py writes this table -->\n", "<!-- end of the table -->\n"
GIB = 2**30

CONFIGS = {
    "llama2_7b_offload": "Llama 2 7B",
    "qwen3_8b_offload": "Qwen3 8B",
    "qwen3_14b_offload": "Qwen3 14B",
    "qwen3_32b_offload": "Qwen3 32B",
    "qwen3_32b_lora": "Qwen3 32B, LoRA",
    "llama3_1_70b_offload": "Llama 3.1 70B",
    "llama3_1_70b_lora": "Llama 3.1 70B, LoRA",
}
"""By name, without its last part, what the table calls it."""
RANKS = (1, 2, 4, 8, 16)
PER_HOST = 8


def run() -> list[dict[str, Any]]:
    """Every config's plan on every number of processes, up to eight to a host."""
    rows = []
    for name in CONFIGS:
        config = find_config(f"{name}{registry.DISTRIBUTED}")
        recipe = find_recipe(recipe_of_config(config.name))
        planned = None
        for ranks in RANKS:
            world = World(0, ranks, 0, min(ranks, PER_HOST))
            made = PlannedRun(recipe, config.path, [], world)
            if planned is not None:
                made.planner = planned
            made._device = torch.device("cuda")
            plan = made.plan(())
            planned = made.planner
            items = {item.name: round(item.nbytes / GIB, 2) for item in plan.budget.items if item.place != DISK}
            host = plan.budget.host * min(ranks, PER_HOST) / GIB
            rows.append({"config": name, "ranks": ranks, "gpu_gib": round(plan.budget.device / GIB, 1),
                         "host_gib": round(host, 1), "items_gib": items})  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def table(record: dict[str, Any]) -> str:
    """GiB of a GPU and of each host; bold where a card of 24 GB has room."""
    lines = ["| GiB of a GPU / of a host | " + " | ".join(map(str, RANKS)) + " |", "|---" * (len(RANKS) + 1) + "|"]
    small, large = (find_card(name).memory / GIB for name in ("RTX 4090", "H100"))
    for name, title in CONFIGS.items():
        cells = []
        for ranks in RANKS:
            (row,) = [row for row in record["rows"] if (row["config"], row["ranks"]) == (name, ranks)]
            gpu, both = row["gpu_gib"], f"{row['gpu_gib']:.1f} / {row['host_gib']:.0f}"
            cells.append(f"**{both}**" if gpu <= small else both if gpu <= large else f"~~{both}~~")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    record = {"command": "python scripts/memory_per_rank.py", "rows": run()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))
    write_table(table(record), BEGIN, END, DISTRIBUTED)


if __name__ == "__main__":
    main()

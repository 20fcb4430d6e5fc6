"""How far predicted speeds are from those that others have published: each run counted, predicted, and the difference.

    python scripts/plan_published.py    # under two minutes; records scripts/results/plan_published.json, updates docs

A run is its model of torchtune's sizes on the card's machine as `tune plan` has it (:mod:`offload.plan.machines`); what
its source leaves open is in its note. The list, and the constants that were chosen by it, are in
:mod:`offload.plan.efficiency`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from pages import write_table

from offload.models.torchtune import described
from offload.plan.cards import find_card
from offload.plan.efficiency import FUSED, PUBLISHED, Published
from offload.plan.machines import machine_of_card
from offload.plan.prediction import Settings, passes, predict
from offload.plan.work import Work, count
from offload.plan.workload import Workload
from offload.training.tracing import layers_of, shortened

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "scripts" / "results" / "plan_published.json"
PAGE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- scripts/plan_published.py writes this table -->\n", "<!-- end of the published table -->\n"

LORA = {"lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True}


def load_of(run: Published, counted: dict[Any, tuple[Work, Any]]) -> Workload:
    """A published run's micro-batch on its card; ``counted`` keeps what was counted, by model."""
    recompute = run.recompute
    key = run.model, run.lora_rank, recompute
    if key not in counted:
        name = run.model
        arguments: dict[str, Any] = {}
        if run.lora_rank:
            module, _, builder = name.rpartition(".")
            name = f"{module}.lora_{builder}"
            arguments = {**LORA, "lora_rank": run.lora_rank, "lora_alpha": 2 * run.lora_rank}
        section = OmegaConf.create({"_component_": name, **arguments})
        model, _ = described.describe(section, torch.bfloat16, adapts=bool(run.lora_rank))
        settings: Any = OmegaConf.create(
            {"enable_activation_checkpointing": recompute, "compile": False, "gradient_accumulation_steps": 1,
             "loss": {"_component_": "offload.training.loss.LinearCrossEntropyLoss", "num_output_chunks": 8}}
        )  # fmt: skip
        few, of_few, step = shortened(model, settings, run.batch, run.length, number=2)
        work = count(few.module, of_few, step, batch=run.batch, length=run.length,
                     fused_norms=True)  # fmt: skip
        counted[key] = work, model
    work, model = counted[key]
    work = work.with_batch(run.batch, run.length)
    layers = layers_of(model.module)
    trained = tuple(param.numel() for param in layers[0].parameters() if param.requires_grad)
    edges = sum(p.numel() for p in model.module.parameters() if p.requires_grad) - len(layers) * sum(trained)
    whole = Work(work.tokens, work.length, len(layers), work.layer, work.edge)
    machine = machine_of_card(find_card(run.card))
    again = work.layer[0].launches if recompute else 0
    return Workload(
        layers=len(layers), tensors=trained, tokens=work.tokens, edge=edges, head=0, recompute=recompute,
        launches=(round(work.layer[0].launches), round(work.layer[1].launches - again)),
        passes=passes(whole, machine, recompute=recompute, fused=FUSED if run.fused else 1.0),
    )  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Every published run with its prediction."""
    counted: dict[Any, tuple[Work, Any]] = {}
    found = []
    for run in PUBLISHED:
        settings = Settings(run.optimizer, run.state_bytes, micro_batches=run.micro_batches)
        predicted = predict(load_of(run, counted), machine_of_card(find_card(run.card)), settings)
        found.append(
            {
                "system": run.system,
                "card": run.card,
                "model": run.model.rpartition(".")[2],
                "way": way(run),
                "published": run.tokens_per_second,
                "predicted": round(predicted.tokens_per_second),
                "off_percent": round(100 * (predicted.tokens_per_second / run.tokens_per_second - 1), 1),
                "bottleneck": predicted.bottleneck,
                "note": run.note,
                "source": run.source,
            }
        )
        print(found[-1], flush=True)
    return found


def way(run: Published) -> str:
    """How a run trains, in words."""
    words = [f"{run.batch} x {run.length}"]
    words += ["LoRA"] if run.lora_rank else []
    words += ["recomputed"] if run.recompute else []
    words += ["fused"] if run.fused else []
    return ", ".join(words)


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    lines = ["| | card | model, micro-batch | published tok/s | predicted | off | |", "|---|---|---|---|---|---|---|"]
    for row in record["runs"]:
        lines.append(
            f"| [{row['system']}]({row['source']}) | {row['card']} | {row['model']}, {row['way']} | "
            f"{row['published']:,.0f} | {row['predicted']:,} | {row['off_percent']:+.0f} % | {row['note']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    record = {"command": "python scripts/plan_published.py", "runs": rows()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_table(table(record), BEGIN, END, PAGE)


if __name__ == "__main__":
    main()

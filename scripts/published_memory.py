"""Memory that others have published of their runs, against what the planner says of the same runs.

    python scripts/published_memory.py    # computes and records it, half a minute

Each run is one of our configs with overrides that make it the published one. What is compared is what PyTorch's
allocator hands out at most (torch.cuda.max_memory_allocated), or the host's memory, as the source has it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pages import ROOT

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from offload import torchao_shim
from offload.cli import registry
from offload.cli.validate import load_recipe
from offload.config.loading import load_and_check
from offload.plan.budget import DEVICE, GIB, Budget
from offload.tiny import register_resolvers
from offload.training.budgeting import Planner

RECORD = ROOT / "scripts" / "results" / "published_memory.json"

TORCHTUNE = "https://github.com/pytorch/torchtune/tree/v0.6.1#memory-and-training-speed"
COMPILED = "compiled there: the loss keeps logits in bf16 alone, which is counted; fused layers keep less, which is not"
NOT_ALLOCATED = ("slack of PyTorch's allocator", "CUDA context")

LLAMA = ("batch_size=2", "compile=True", "tokenizer.max_seq_len=2048", "enable_activation_checkpointing=True",
         "loss=torchtune.modules.loss.CEWithChunkedOutputLoss", "checkpointer.checkpoint_dir=/nowhere")  # fmt: skip
ADAPTED = (*LLAMA, "model.lora_attn_modules=[q_proj,v_proj,output_proj]", "model.apply_lora_to_mlp=True",
           "model.apply_lora_to_output=False", "model.lora_rank=8", "model.lora_alpha=16",
           "optimizer=torch.optim.AdamW", "optimizer.lr=3e-4")  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A run whose memory was published.

    Attributes:
        what: the run.
        config: ours that comes nearest.
        overrides: that make it the run.
        gib: what was published.
        of_host: the host's, but for the process itself; otherwise what is allocated of the GPU's.
        source: where.
        why: of the difference.
    """

    what: str
    config: str
    overrides: tuple[str, ...]
    gib: float
    of_host: bool
    source: str
    why: str


RUNS = (
    Published(
        "Llama 3.1 8B, all weights, PagedAdamW8bit in backward, batch 2 x 2048",
        "llama2_7b_offload",
        (*LLAMA, "model=torchtune.models.llama3_1.llama3_1_8b", "optimizer=offload.OffloadOptimizer",
         "optimizer.optimizer_class=torch.optim.SGD", "optimizer.strategy=resident",
         "optimizer.update_in_backward=True", "clip_grad_norm=null", "optimizer.lr=2e-5"),
        18.9, False, TORCHTUNE, COMPILED,  # paged states are not on the GPU, so that SGD has as many there
    ),
    Published(
        "Llama 3.1 8B, LoRA of rank 8, batch 2 x 2048", "llama2_7b_lora",
        (*ADAPTED, "model=torchtune.models.llama3_1.lora_llama3_1_8b"), 16.2, False, TORCHTUNE, COMPILED,
    ),
    Published(
        "Llama 3.1 8B, QLoRA of rank 8, batch 2 x 2048", "llama2_7b_qlora",
        (*ADAPTED, "model=torchtune.models.llama3_1.qlora_llama3_1_8b"), 7.4, False, TORCHTUNE, COMPILED,
    ),
    Published(
        "Llama-2 7B, torchao's CPU offload of weights, gradients and bf16 states", "llama2_7b_offload",
        ("optimizer=offload.TorchAOCPUOffloadOptimizer", "optimizer.optimizer_class=torch.optim.AdamW",
         "optimizer.offload_gradients=True"),
        58.0, True, "https://github.com/pytorch/torchtune/pull/1278",
        "50.2 GiB are data; page-locking each tensor by itself rounds 86 MiB up to 128. Whether the process itself is "
        "in their number is not said",
    ),
)  # fmt: skip


def budget(run: Published) -> Budget:
    """The plan of a run on a GPU."""
    torchao_shim.install()
    register_resolvers()
    recipe = registry.find_recipe(registry.recipe_of_config(run.config))
    schema: Any = load_recipe(recipe.path).Settings
    _, settings = load_and_check(registry.our_configs()[run.config], run.overrides, schema, [])
    planner = Planner(0, adapts="lora" in run.config)
    return planner.plan(settings, torch.device("cuda"), torch.bfloat16).budget


def rows() -> list[dict[str, Any]]:
    """Of each published run: ``what``, ``planned_gib``, ``published_gib``, ``off_percent``, ``source``, ``why``."""
    found = []
    for run in RUNS:
        items = [item for item in budget(run).items if not item.name.startswith(("Python", *NOT_ALLOCATED))]
        wanted = [item for item in items if (item.place == DEVICE) != run.of_host and item.place != "disk"]
        gib = sum(item.nbytes for item in wanted) / GIB
        found.append({
            "what": run.what, "planned_gib": round(gib, 2), "published_gib": run.gib,
            "off_percent": round(100 * (gib / run.gib - 1), 1), "source": run.source, "why": run.why,
            "config": run.config, "overrides": list(run.overrides),
            "items": [asdict(item) for item in wanted],
        })  # fmt: skip
    return found


def main() -> None:
    found = rows()
    for row in found:
        print(f"{row['what']}: {row['planned_gib']} GiB planned, {row['published_gib']} published "
              f"({row['off_percent']:+.1f} %): {row['why']}")  # fmt: skip
        for item in row["items"]:
            print(f"    {item['name']}: {item['nbytes'] / GIB:.2f} GiB")
    record = {"command": "python scripts/published_memory.py", "runs": found}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""How far `tune plan` is from what small runs on the CPU take: plans each, runs it, and records both.

    python scripts/plan_accuracy.py             # all, about twenty minutes on an idle machine
    python scripts/plan_accuracy.py 3 17 18     # these alone; the others are as recorded
    python scripts/plan_accuracy.py --plan      # plans all again; what they took is as recorded

Each plan and each run is a process of its own. What a run took is its largest resident set, which metrics.jsonl has as
memory/host_rss_peak_gib. Equal runs differ by up to a tenth, by where the C library's heap happens to put small
objects: each is run three times, and the median counts. Models are the tiny one of the package and a small one of the
same family with random weights, each through both libraries that models come from.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "scripts" / "results" / "plan_memory.json"

COMMON = ("device=cpu", "max_steps_per_epoch=3", "evaluation=null", "metric_logger=null", "lr_scheduler=null",
          "+dataset.train_on_input=True")  # fmt: skip
"""Every token has a label: those without one have no logits, which no plan knows before it has seen the data."""

FULL, LORA = "tiny_llama_offload", "tiny_llama_lora"
RECIPES = {FULL: "full_finetune_single_device", LORA: "lora_finetune_single_device"}
PACKED = "optimizer.optimizer_class=offload.optim.AdamW ~optimizer.fused"
IN_BACKWARD = "optimizer.update_in_backward=True clip_grad_norm=null"
TRANSFORMERS = "model=offload.models.huggingface.from_pretrained model.path=${tiny_llama:checkpoint} checkpointer=null"
PEFT = "adapter=peft.LoraConfig adapter.r=8 adapter.target_modules=all-linear"
SMALL = {"num_layers": 8, "num_heads": 8, "num_kv_heads": 8, "embed_dim": 512, "intermediate_dim": 1408}
"""25.8 M parameters."""
OF_SMALL = " ".join(f"model.{key}={value}" for key, value in SMALL.items()) + " checkpointer.checkpoint_dir={small}"
SGD = "optimizer.optimizer_class=torch.optim.SGD ~optimizer.fused ~optimizer.betas"
SMALL_TRANSFORMERS = TRANSFORMERS.replace("${tiny_llama:checkpoint}", "{small}")

TIMES = 3
"""That each setting is run."""

RUNS = (
    (FULL, "batch_size=4"),
    (FULL, "batch_size=16"),
    (FULL, "batch_size=32"),
    (FULL, "batch_size=64"),
    (FULL, "batch_size=32 tokenizer.max_seq_len=128"),
    (FULL, "batch_size=32 enable_activation_checkpointing=True"),
    (FULL, "batch_size=64 enable_activation_checkpointing=True"),
    (FULL, "batch_size=32 loss=torch.nn.CrossEntropyLoss"),
    (FULL, "batch_size=16 loss=torch.nn.CrossEntropyLoss enable_activation_checkpointing=True"),
    (FULL, f"batch_size=16 {IN_BACKWARD}"),
    (FULL, "batch_size=16 gradient_accumulation_steps=2"),
    (FULL, f"batch_size=16 gradient_accumulation_steps=2 {IN_BACKWARD}"),
    (FULL, "batch_size=16 optimizer.offload_gradients=True"),
    (FULL, "batch_size=16 optimizer.strategy=stream"),
    (FULL, "batch_size=16 optimizer.strategy=resident dtype=bf16"),
    (FULL, f"batch_size=16 {PACKED}"),
    (FULL, f"batch_size=16 {PACKED} +optimizer.state_dtype=bf16 dtype=bf16"),
    (FULL, f"batch_size=32 {TRANSFORMERS}"),
    (FULL, f"batch_size=32 {TRANSFORMERS} enable_activation_checkpointing=True"),
    (FULL, f"batch_size=16 {TRANSFORMERS} {IN_BACKWARD} dtype=bf16"),
    (LORA, "batch_size=16"),
    (LORA, "batch_size=32 enable_activation_checkpointing=True"),
    (LORA, f"batch_size=32 {TRANSFORMERS} {PEFT}"),
    (FULL, f"batch_size=2 {OF_SMALL}"),
    (FULL, f"batch_size=4 {OF_SMALL} {IN_BACKWARD}"),
    (FULL, f"batch_size=4 {OF_SMALL} {PACKED} optimizer.strategy=stream"),
    (FULL, f"batch_size=4 {OF_SMALL} enable_activation_checkpointing=True dtype=bf16"),
    (FULL, f"batch_size=4 {SMALL_TRANSFORMERS}"),
    (FULL, f"batch_size=4 {SMALL_TRANSFORMERS} {SGD}"),
    (LORA, f"batch_size=4 {SMALL_TRANSFORMERS} {PEFT}"),
)  # fmt: skip


def make_small(folder: Path) -> None:
    """A small model with random weights, and the tiny one's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from offload import tiny

    tiny.register_resolvers()
    base = tiny.prepare() / "checkpoint"
    shutil.copytree(base, folder)
    config = AutoConfig.from_pretrained(base)
    config.update({
        "num_hidden_layers": SMALL["num_layers"], "num_attention_heads": SMALL["num_heads"],
        "num_key_value_heads": SMALL["num_kv_heads"], "hidden_size": SMALL["embed_dim"],
        "intermediate_size": SMALL["intermediate_dim"], "head_dim": SMALL["embed_dim"] // SMALL["num_heads"],
    })  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def tune(*words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "offload", *words], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"tune {' '.join(words)}: {done.stderr}")
    return done.stdout


def peak(name: str, words: list[str]) -> float:
    """A run's, in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        tune("run", RECIPES[name], "--config", name, *words, f"output_dir={folder}/run")
        last = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return float(json.loads(last)["memory/host_rss_peak_gib"])


def measure(name: str, overrides: str, small: Path, runs: list[float] | None) -> dict[str, Any]:
    """A run's host memory in GiB, planned and measured; it does not run where that is known."""
    words = [*COMMON, *overrides.replace("{small}", str(small)).split()]
    told = tune("plan", "--config", name, *words)
    planned = re.search(r"^host in all.*?: ([\d.]+) GiB", told, re.M)
    assert planned is not None
    runs = runs or sorted(round(peak(name, words), 3) for _ in range(TIMES))
    measured = statistics.median(runs)
    return {
        "config": name,
        "overrides": overrides.split(),
        "planned_gib": float(planned[1]),
        "measured_gib": measured,
        "runs_gib": runs,
        "off_percent": round(100 * (float(planned[1]) / measured - 1), 1),
    }


def main() -> None:
    plans = sys.argv[1:] == ["--plan"]
    chosen = range(len(RUNS)) if plans else [int(word) for word in sys.argv[1:]] or range(len(RUNS))
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["runs"] if sys.argv[1:] else [{}] * len(RUNS)
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small"
        make_small(small)
        for index in chosen:
            rows[index] = measure(*RUNS[index], small, rows[index]["runs_gib"] if plans else None)
            print(index, rows[index], flush=True)
    record = {"command": "python scripts/plan_accuracy.py", "small": SMALL, "runs": rows}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

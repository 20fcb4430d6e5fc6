"""The recipes as their users run them: on the tiny default, and with random weights of a large model's shapes.

A recipe is a process with a config of the checkout, whose data and weights are made here. It is stopped by two
interrupts when it has logged enough steps, because the checkpoint at its end would take minutes.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.machine import ROOT
from gpu.measure import visible_bytes
from gpu.model import SHAPES, Shape
from gpu.processes import OUT_OF_TIME, abort, apart, environment, kill, last_words

SCRATCH = ROOT / "outputs" / "gpu_suite"
"""Weights, data and what runs leave; the weights are kept for the next recipe."""

NEEDED = ("torchtune", "torchao", "omegaconf", "datasets", "sentencepiece")

LAYERS_PER_FILE = 8

PATIENCE_WITH_WANDB = 30.0
"""Seconds for its files to appear after the last step that is wanted: it starts beside training."""

LAST_WAIT = 60.0
"""Seconds after the second interrupt: the system takes a while to free tens of GiB that were page-locked."""

SECOND_INTERRUPT = 1.0
"""Seconds after the first, which lets a step end and begins to save."""


def own_cache() -> dict[str, str]:
    """Variables with which `tune doctor` keeps what it measures, and recipes find it, without touching the user's."""
    return {"XDG_CACHE_HOME": str(SCRATCH / "cache")}


@dataclass(frozen=True)
class RecipeRun:
    """A recipe to run.

    Attributes:
        name: what ``--only`` matches.
        recipe, config: by the names of their files.
        shape: a key of :data:`gpu.model.SHAPES`, whose weights are made; None for the config's own model and weights.
        steps: to log.
        overrides: of the config, in dotted keys.
        memory_gib: size of the card to be held to, as sold; None for the whole card.
        title: what tables call it.
    """

    name: str
    recipe: str
    config: str
    shape: str | None = None
    steps: int = 8
    overrides: dict[str, Any] = field(default_factory=dict)
    memory_gib: float | None = None
    title: str = ""


def run_recipe(
    run: RecipeRun, device: str, seconds: float | None, packages_missing: list[str], device_memory: int | None = None
) -> dict[str, Any]:
    """Run it.

    Args:
        run: the recipe.
        device: that trains.
        seconds: that there are.
        packages_missing: of :data:`gpu.machine.OPTIONAL`.
        device_memory: bytes of the card, for a recipe that is held to less.

    Returns:
        dict: ``status``: ``ok``, ``not installed``, ``error`` or ``out of time``; of what it logged, the ``losses``,
        medians of the speeds, peaks of memory, and whether wandb's files are there; what it said, unless it is ok.
    """
    if missing := [name for name in NEEDED if name in packages_missing]:
        return {"status": "not installed", "error": f"the recipes need {', '.join(missing)}"}
    started = time.perf_counter()
    output = SCRATCH / "runs" / run.name
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    config = configure(run, device, output)
    prepared = time.perf_counter() - started
    left = None if seconds is None else seconds - prepared
    wants_wandb = "wandb" not in packages_missing
    why, said = run_until_logged(run, config, output, left, wants_wandb, allocator_of(run, device_memory))
    rows = read_rows(output / "metrics.jsonl")
    result: dict[str, Any] = {
        "command": f"python recipes/{run.recipe}.py --config {run.config} ({run.shape or 'own'} weights)",
        "overrides": run.overrides,
        "memory_gib": run.memory_gib,
        "prepare_seconds": prepared,
        "seconds": time.perf_counter() - started,
        "steps": len(rows),
        **summary(rows),
        "wandb_files": has_wandb_files(output),
    }
    if why is None and len(rows) < run.steps:
        why = f"ended after {len(rows)} of {run.steps} steps"
    if why is None and not all(math.isfinite(loss) for loss in result["losses"]):
        why = "a loss is not finite"
    if why is None and wants_wandb and not result["wandb_files"]:
        why = "wandb's files are not there"
    if why is None:
        return {"status": "ok", **result}
    return {"status": why if why == OUT_OF_TIME else "error", **result, "error": f"{why}\n{said}"}


def allocator_of(run: RecipeRun, device_memory: int | None) -> str:
    """PYTORCH_CUDA_ALLOC_CONF that leaves a recipe what a card of its size would beside the CUDA context."""
    from offload.plan.budget import CONTEXT

    if run.memory_gib is None or device_memory is None:
        return ""
    share = (visible_bytes(run.memory_gib) - CONTEXT) / device_memory
    return f"per_process_memory_fraction:{share:.4f}" if share < 1 else ""


def has_wandb_files(output: Path) -> bool:
    """Whether wandb has begun to write."""
    return any(output.glob("wandb/offline-run-*/*.wandb"))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of logged steps; speeds, ``tokens`` of a step and ``step_seconds`` are medians over the second half."""
    facts: dict[str, Any] = {"losses": [row["loss"] for row in rows]}
    steady = rows[len(rows) // 2 :]
    for key in ("tokens_per_second", "trained_tokens_per_second"):
        if values := sorted(row[key] for row in steady if key in row):
            facts[key] = values[len(values) // 2]
    pairs = [(a, b) for a, b in zip(rows, rows[1:], strict=False) if b in steady and "tokens_seen" in b]
    if tokens := sorted(b["tokens_seen"] - a["tokens_seen"] for a, b in pairs):
        facts["tokens"] = tokens[len(tokens) // 2]
        seconds = sorted((b["tokens_seen"] - a["tokens_seen"]) / b["tokens_per_second"] for a, b in pairs)
        facts["step_seconds"] = seconds[len(seconds) // 2]
    for key in sorted({key for row in rows for key in row if key.startswith("memory/")}):
        facts[key] = max(row[key] for row in rows if key in row)
    return facts


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The steps in a metrics file; a line that is being written does not count yet."""
    rows = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(text))
    return [row for row in rows if "loss" in row]


def run_until_logged(
    run: RecipeRun, config: Path, output: Path, seconds: float | None, wants_wandb: bool, allocator: str
) -> tuple[str | None, str]:
    """Start the recipe and end it when it has logged its steps; why that failed, and the end of what it said."""

    def has_logged() -> bool:
        return len(read_rows(output / "metrics.jsonl")) >= run.steps

    variables = {"WANDB_MODE": "offline", "WANDB_DIR": str(output), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    folders = {
        "TUNE_OFFLOAD_HOME": str(SCRATCH / "home"),
        "HF_DATASETS_CACHE": str(SCRATCH / "datasets"),
        **own_cache(),
    }
    command = [sys.executable, str(ROOT / "recipes" / f"{run.recipe}.py"), "--config", str(config)]
    log = output / "log.txt"
    deadline = None if seconds is None else time.perf_counter() + seconds
    with log.open("w") as said:
        process = subprocess.Popen(
            command,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(allocator, **variables, **folders),
            cwd=ROOT,
            **apart(),
        )
        try:
            why = None
            logged_at: float | None = None
            while process.poll() is None:
                now = time.perf_counter()
                if logged_at is None and has_logged():
                    logged_at = now
                if logged_at is not None and (
                    not wants_wandb or has_wandb_files(output) or now > logged_at + PATIENCE_WITH_WANDB
                ):
                    break
                if deadline is not None and now > deadline:
                    why = OUT_OF_TIME if logged_at is None else None
                    if why is not None:
                        abort(process)
                    break
                time.sleep(0.2)
            is_stopped = process.poll() is None
            if is_stopped and why is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SECOND_INTERRUPT)
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WAIT)
        finally:
            kill(process)
            process.wait()
    stopped = (128 + signal.SIGINT, -signal.SIGINT) if is_stopped else ()
    for path in output.iterdir():  # the checkpoint that was begun: what it has is the record's by now
        if path.is_dir() and path.name != "wandb":
            shutil.rmtree(path, ignore_errors=True)
    if why is None and process.returncode not in (0, *stopped):
        killed = is_stopped and process.returncode == -signal.SIGKILL
        why = "did not end after two interrupts" if killed else f"ended with status {process.returncode}"
    return why, last_words(log.read_text(errors="replace"), before=1000)


# Configs and weights


def configure(run: RecipeRun, device: str, output: Path) -> Path:
    """Write the config with what is made here in place of what would be downloaded; returns its path."""
    import yaml

    content = yaml.safe_load((ROOT / "configs" / f"{run.config}.yaml").read_text())
    content["output_dir"] = str(output)
    content["device"], content["seed"] = device, 0
    if run.shape is not None:
        tiny = yaml.safe_load((ROOT / "configs" / "tiny_llama_offload.yaml").read_text())
        shape = SHAPES[run.shape]
        content["dataset"] = tiny["dataset"]
        content["tokenizer"] = {**tiny["tokenizer"], "max_seq_len": content["tokenizer"]["max_seq_len"]}
        content["evaluation"] = None
        content["epochs"] = 100  # the data are few, and the run is stopped
        content["checkpointer"]["checkpoint_dir"] = str(make_checkpoint(shape, run.shape, device))
        if run.shape != "7b":
            content["model"] = model_section(content["model"], shape)
    for key, value in run.overrides.items():
        set_dotted(content, key, value)
    path = output / "config.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def model_section(section: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """The config's model with other sizes: torchtune's builder of a 7B model becomes the general one."""
    component = section["_component_"].removesuffix("_7b")
    sizes = {
        "vocab_size": shape.vocabulary,
        "num_layers": shape.layers,
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "embed_dim": shape.dim,
        "intermediate_dim": shape.hidden,
        "max_seq_len": 4096,
        "norm_eps": 1e-5,
    }
    return {**section, "_component_": component, **sizes}


def set_dotted(content: dict[str, Any], key: str, value: Any) -> None:
    """``content["a"]["b"] = value`` for ``a.b``."""
    *sections, last = key.split(".")
    for section in sections:
        content = content[section]
    content[last] = value


def make_checkpoint(shape: Shape, name: str, device: str) -> Path:
    """Random bf16 weights in Hugging Face's format, unless they are there already; returns their folder."""
    from safetensors.torch import save_file

    folder = SCRATCH / f"checkpoint-{name}"
    if (folder / "config.json").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    index: dict[str, str] = {}
    torch.manual_seed(0)
    parts = list(weights_of(shape, device))
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        tensors = {key: make() for key, make in part.items()}
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    # Last, because it says that the rest is there.
    (folder / "config.json").write_text(json.dumps(huggingface_config(shape)))
    return folder


def weights_of(shape: Shape, device: str) -> Iterator[dict[str, Any]]:
    """Hugging Face's names, and what makes each tensor on the CPU; one file's worth at a time."""

    def matrix(*size: int) -> Any:
        return lambda: (torch.randn(size, device=device, dtype=torch.bfloat16) * 0.02).cpu()

    def ones(size: int) -> Any:
        def make() -> Tensor:
            return torch.ones(size, dtype=torch.bfloat16)

        return make

    head = shape.dim // shape.heads
    yield {
        "model.embed_tokens.weight": matrix(shape.vocabulary, shape.dim),
        "lm_head.weight": matrix(shape.vocabulary, shape.dim),
        "model.norm.weight": ones(shape.dim),
    }
    for first in range(0, shape.layers, LAYERS_PER_FILE):
        part = {}
        for layer in range(first, min(first + LAYERS_PER_FILE, shape.layers)):
            name = f"model.layers.{layer}"
            part |= {
                f"{name}.self_attn.q_proj.weight": matrix(shape.dim, shape.dim),
                f"{name}.self_attn.k_proj.weight": matrix(shape.kv_heads * head, shape.dim),
                f"{name}.self_attn.v_proj.weight": matrix(shape.kv_heads * head, shape.dim),
                f"{name}.self_attn.o_proj.weight": matrix(shape.dim, shape.dim),
                f"{name}.mlp.gate_proj.weight": matrix(shape.hidden, shape.dim),
                f"{name}.mlp.up_proj.weight": matrix(shape.hidden, shape.dim),
                f"{name}.mlp.down_proj.weight": matrix(shape.dim, shape.hidden),
                f"{name}.input_layernorm.weight": ones(shape.dim),
                f"{name}.post_attention_layernorm.weight": ones(shape.dim),
            }
        yield part


def huggingface_config(shape: Shape) -> dict[str, Any]:
    """``config.json`` of a Llama 2 with these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.dim,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }

"""Host memory that each process of a run takes, measured: weights, gradients and states, loading, saving, resuming.

    python scripts/distributed_memory.py           # measures 1, 2 and 4 processes, prints the table and records it
    python scripts/distributed_memory.py --docs    # writes what is recorded into docs/distributed.md

A random Llama of 325 M parameters in bf16 is trained with the packed AdamW in processes on the CPU, whose "device" is
host memory too: so weights and gradients are counted here, which rest on a GPU where there is one. Counted is each
process's own anonymous memory (resident pages that belong to no file) above what it had before it knew of the model,
looked at from outside all the time. Freed memory is given back to the system at once (``MALLOC_MMAP_THRESHOLD_``), so
that a peak is one of memory in use.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pages import DISTRIBUTED, write_table

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "scripts" / "results" / "distributed_memory.json"
BEGIN, END = "<!-- scripts/distributed_memory.py writes this table -->\n", "<!-- end of the table of host memory -->\n"

COUNTS = (1, 2, 4)
MIB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
VOCABULARY = 8192
PHASES = ("started", "loading", "loaded", "training", "trained", "saving", "saved", "resuming", "resumed")
TOKENS = 32


class Tokenizer:
    vocab_size = VOCABULARY
    max_seq_len = None


# The model


def write_base(folder: Path, sizes: dict[str, int]) -> int:
    """A random checkpoint of a Llama in Hugging Face's format, a file for each layer; its number of parameters."""
    from safetensors.torch import save_file

    dim, hidden, layers, heads = sizes.values()
    folder.mkdir(parents=True)
    layer = {
        **{f"self_attn.{name}_proj.weight": (dim, dim) for name in "qkvo"},
        "mlp.gate_proj.weight": (hidden, dim),
        "mlp.up_proj.weight": (hidden, dim),
        "mlp.down_proj.weight": (dim, hidden),
        "input_layernorm.weight": (dim,),
        "post_attention_layernorm.weight": (dim,),
    }
    ends = {"model.embed_tokens.weight": (VOCABULARY, dim), "model.norm.weight": (dim,)}
    ends["lm_head.weight"] = (VOCABULARY, dim)
    count, weight_map = 0, {}
    for number in range(layers + 1):
        shapes = ends if number == layers else {f"model.layers.{number}.{name}": s for name, s in layer.items()}
        tensors = {name: (0.02 * torch.randn(shape)).bfloat16() for name, shape in shapes.items()}
        count += sum(tensor.numel() for tensor in tensors.values())
        file = f"model-{number + 1:05}-of-{layers + 1:05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    index = {"metadata": {"total_size": 2 * count}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", **sizes, "num_key_value_heads": heads, "vocab_size": VOCABULARY}
    config |= {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return count


# A process of a run


def train(rank: int, count: int, store: str, base: str, out: str, phase: Any) -> None:
    """Load, train two steps, save and resume, each a phase that the parent hears of."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    from offload.checkpoints.manager import CheckpointManager
    from offload.training.resume import put_back

    source = source_of(base)
    manager = CheckpointManager(source.format, out)
    enter(phase, "started")
    enter(phase, "loading")
    parts, optimizer = begin(source, count, None, None)
    enter(phase, "loaded")
    enter(phase, "training")
    state = None
    for step in range(2):
        tokens = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(step))
        parts.logits({"tokens": tokens}).float().logsumexp(-1).mean().backward()
        if step == 1:
            enter(phase, "trained")  # gradients and states are all there
        optimizer.step()
        optimizer.zero_grad()
    enter(phase, "saving")
    state = {"optimizer": optimizer.state_dict(), "config": {"checkpointer": {}}}
    folder = manager.save(1, model=parts.module.state_dict(), recipe_state=state)
    enter(phase, "saved")
    del parts, optimizer, state
    gc.collect()
    enter(phase, "resuming")
    loaded = manager.load(folder)
    parts, optimizer = begin(source, count, loaded.model, folder)
    put_back(loaded.recipe_state, optimizer, None, folder)
    del loaded
    enter(phase, "resumed")
    torch.distributed.destroy_process_group()


def source_of(base: str) -> Any:
    from omegaconf import OmegaConf

    from offload.models.source import find_source

    checkpointer = {"_component_": "torchtune.training.FullModelHFCheckpointer", "model_type": "LLAMA2"}
    return find_source(
        OmegaConf.create({"_component_": "torchtune.models.llama2.llama2"}),
        OmegaConf.create({**checkpointer, "checkpoint_dir": base}),
        None,
        Tokenizer(),
        torch.device("cpu"),
        torch.bfloat16,
        len,
    )


def begin(source: Any, count: int, saved: Any, folder: Path | None) -> tuple[Any, Any]:
    """The model, divided among processes as the recipes do it, and its optimizer."""
    from offload import OffloadOptimizer
    from offload.distributed.sharding import find_mesh, shard
    from offload.distributed.world import current

    device = torch.device("cpu")
    if count == 1:
        parts = source.full(saved, folder)
    else:
        parts = source.empty()
        shard(parts.module, parts.blocks(), find_mesh(current(), device))
        source.fill(parts, folder, device)
    optimizer = OffloadOptimizer(parts.module.named_parameters(), "offload.optim.AdamW", strategy="stream", lr=1e-5)
    return parts, optimizer


def enter(phase: Any, name: str) -> None:
    """Tell the parent of the phase that begins, when all processes are there; it looks at what rests for a moment."""
    gc.collect()
    torch.distributed.barrier()
    phase.value = PHASES.index(name)
    if name.endswith("ed"):
        time.sleep(0.3)
        torch.distributed.barrier()
        phase.value = -1


# Looking at it


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that belongs to no file; 0 where it is gone."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * PAGE


@contextlib.contextmanager
def returning_memory() -> Iterator[None]:
    """Inside, processes begin whose freed memory goes back to the system at once."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 * 1024)
    try:
        yield
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def measure(count: int, base: Path, work: Path) -> dict[str, list[float]]:
    """MiB of each process, above what it had at first: at rest after each phase (``…ed``), the peak in each other.

    Raises:
        RuntimeError: a process failed.
    """
    context = multiprocessing.get_context("spawn")
    phases = [context.Value("i", -1) for _ in range(count)]
    arguments = (str(work / f"store{count}"), str(base), str(work / f"run{count}"))
    ranks = [context.Process(target=train, args=(rank, count, *arguments, phases[rank])) for rank in range(count)]
    with returning_memory():
        for process in ranks:
            process.start()
    seen: list[dict[int, list[int]]] = [{} for _ in ranks]
    while any(process.is_alive() for process in ranks):
        for process, phase, values in zip(ranks, phases, seen, strict=True):
            now = phase.value
            if size := anonymous_bytes(process.pid or 0):
                values.setdefault(now, []).append(size)
        time.sleep(0.002)
        if any(process.exitcode for process in ranks):
            for process in ranks:
                process.terminate()
    if failed := [process.exitcode for process in ranks if process.exitcode]:
        raise RuntimeError(f"a process ended with status {failed[0]}")
    result: dict[str, list[float]] = {}
    for index, name in enumerate(PHASES):
        rests = name.endswith("ed")
        result[name] = [
            round(((sorted(v[index])[len(v[index]) // 2] if rests else max(v[index])) - min(v[0])) / MIB, 1)
            for v in seen
        ]
    return result


def run(counts: tuple[int, ...] = COUNTS, sizes: dict[str, int] = SIZES) -> dict[str, Any]:
    """Measure runs of so many processes; what is recorded."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        parameters = write_base(work / "base", sizes)
        measured = {}
        for count in counts:
            measured[str(count)] = measure(count, work / "base", work)
            shutil.rmtree(work / f"run{count}")
    return {"parameters": parameters, "mib": measured}


def table(record: dict[str, Any]) -> str:
    lines = [
        "| Processes | Weights | Weights, gradients, states | Peak while loading | while saving | while resuming |\n",
        "|---:|---:|---:|---:|---:|---:|\n",
    ]
    for count, mib in record["mib"].items():
        columns = ("loaded", "trained", "loading", "saving", "resuming")
        lines.append(f"| {count} | " + " | ".join(f"{max(mib[name]):,.0f} MiB" for name in columns) + " |\n")
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--docs", action="store_true", help="write the recorded table into the page")
    if parser.parse_args().docs:
        write_table(table(json.loads(RECORD.read_text())), BEGIN, END, DISTRIBUTED)
        return 0
    record = run()
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(table(record), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

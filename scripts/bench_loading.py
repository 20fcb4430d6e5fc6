"""How a model of transformers is loaded: ours beside ``from_pretrained``, in processes of their own and in turns.

Makes a sharded checkpoint of random bf16 weights in a temporary folder, and measures what each process takes from its
imports until every page of the weights was written once, as the first step of training does (on the CPU,
``from_pretrained`` maps the files, and each page is copied when it is written), and its largest anonymous memory
(RssAnon, sampled; pages of mapped files are told apart: the system takes them back when it needs them).

python scripts/bench_loading.py --gib 2 --rounds 5
python scripts/bench_loading.py --page
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pages import MODELS, ROOT, write_table
from study import RESULTS, description

BEGIN = "<!-- scripts/bench_loading.py writes this table -->\n"
END = "<!-- end of the table of loading -->"
RECORD = RESULTS / "loading.json"
WAYS = {"ours": "offload.models.huggingface.from_pretrained", "theirs": "transformers' `from_pretrained`"}
SHARD = "512MB"


def make_checkpoint(folder: Path, gib: float) -> dict[str, int]:
    """A Llama of about so many GiB in bf16; returns the bytes of it and of its largest tensor."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_hidden_layers=max(1, round((gib * 2**30 - 4 * 32000 * 2048) / (2 * (2048 * 5632 * 3 + 2048 * 2048 * 2.5)))),
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    for param in model.parameters():
        param.data.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size=SHARD)
    sizes = [param.nbytes for param in model.parameters()]
    return {"bytes": sum(sizes), "largest_tensor_bytes": max(sizes)}


def memory(key: str) -> int:
    """Of this process, in bytes: a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def load(way: str, folder: Path) -> dict[str, float]:
    """In a process of its own: load, and write each page of the weights once."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama  # noqa: F401 - neither way is charged for the import

    from offload.models.huggingface import from_pretrained

    before, peak, done = memory("RssAnon"), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, memory("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    started = time.perf_counter()
    if way == "ours":
        model: Any = from_pretrained(folder, device=torch.device("cpu"), dtype=torch.bfloat16).module
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    loaded = time.perf_counter() - started
    with torch.no_grad():
        for param in model.parameters():
            param.view(-1).view(torch.int16)[::2048].add_(0)
    seconds = time.perf_counter() - started
    done.set()
    sampler.join()
    peak = max(peak, memory("RssAnon"))
    return {"loaded_seconds": loaded, "seconds": seconds, "anonymous_bytes": peak - before, "at_all": memory("VmHWM")}


def measure(gib: float, rounds: int) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        made = make_checkpoint(folder, gib)
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for turn in range(rounds + 1):
            for way in WAYS if turn % 2 else reversed(WAYS):
                command = [sys.executable, __file__, "--load", way, "--folder", str(folder)]
                answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                if turn:  # the first one reads the files into the page cache
                    runs[way].append(json.loads(answer.splitlines()[-1]))
    table = {
        way: {key: statistics.median(run[key] for run in measured) for key in measured[0]}
        for way, measured in runs.items()
    }
    ratio = statistics.median(
        ours["seconds"] / theirs["seconds"] for ours, theirs in zip(runs["ours"], runs["theirs"], strict=True)
    )
    return {**made, "rounds": rounds, "results": table, "time_ratio": round(ratio, 3)}


def page(record: dict[str, Any]) -> str:
    def gib(count: float) -> str:
        return f"{count / 2**30:.2f} GiB"

    lines = [
        f"Weights {gib(record['bytes'])}, largest tensor {gib(record['largest_tensor_bytes'])}; medians of "
        f"{record['rounds']} processes each, in turns, "
        "on one core with the files in the page cache.\n",
        "| | seconds | beside | anonymous memory at most |",
        "|---|---|---|---|",
    ]
    for way, name in WAYS.items():
        row = record["results"][way]
        beside = record["time_ratio"] if way == "ours" else 1
        lines.append(f"| {name} | {row['seconds']:.2f} | {beside:.2f} | {gib(row['anonymous_bytes'])} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", action="store_true", help="write the page from the record alone")
    parser.add_argument("--load", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(load(arguments.load, arguments.folder)))
        return 0
    if not arguments.page:
        about = description(
            "loading a model of transformers",
            f"python scripts/bench_loading.py --gib {arguments.gib} --rounds {arguments.rounds}",
            "transformers",
        )
        RECORD.write_text(json.dumps({**about, **measure(arguments.gib, arguments.rounds)}, indent=1) + "\n")
    text = page(json.loads(RECORD.read_text(encoding="utf-8")))
    print(text)
    write_table(text, BEGIN, END, MODELS)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every way to run AdamW on one GPU, side by side: speed, exposed time, device and host memory of a Llama.

    python scripts/gpu_suite.py --output scripts/results/gpu_suite.json     # 7B; goes on where a stopped run ended
    python scripts/gpu_suite.py --only '^(none|host.*)$' --tokens 1024 --memory whole 16 --budget-seconds 540
    python scripts/gpu_suite.py --trace stream-in-backward+model            # Chrome trace of three steps
    python scripts/gpu_suite.py --sanitize                                  # races, by torch's CUDA sanitizer
    python scripts/gpu_suite.py --device cpu --model tiny --tokens 32       # does the script run?

Weights and tokens are random, made on the device in bf16; layers are checkpointed, the loss is computed in chunks.
Each case has a process of its own, which measures all step sizes in turn, and each result is in the file as soon as
it is there. A case that does not fit is recorded as out of memory.

step_seconds         median time between the ends of consecutive steps on the compute stream. Asynchronous updates of
                     a step delay the next one, and the first step after a halt has none before it; the median of
                     five steps is that of steady state.
mean_step_seconds    everything from an idle device to an idle device, over the number of steps.
drain_seconds        what was still running when the last step's work on the compute stream was done.
exposed_seconds      step_seconds beyond that of `none`: forward and backward alone, gradients dropped at once.
bound_seconds        the longer of `none` and what the case has to move over the link, at its measured speed with
                     both directions busy.

Held to N GiB, the process gets what a card of that size would leave it beside the CUDA context. torch's allocator
has a limit for that; for memory that the driver pages (bitsandbytes), the rest of the card is filled instead.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a checkout need not be installed

GIB = 2**30
WARM_UP_STEPS = 2
SEQUENCE = 4096
LOSS_CHUNK = 1024
MARK = "RESULT "
OUT_OF_TIME = "out of time"
FINDINGS = ("ok", "out of memory", "needs a GPU")
"""What a case can come to that another attempt would not change."""


# The model


@dataclass(frozen=True)
class Shape:
    """Of a Llama. ``tied``: the output layer is the embedding."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    tied: bool = False


SHAPES = {
    "tiny": Shape(dim=64, layers=2, heads=4, kv_heads=2, hidden=128, vocabulary=256, tied=True),
    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
    "1b": Shape(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, vocabulary=128256, tied=True),
    # https://huggingface.co/meta-llama/Llama-2-7b-hf/blob/main/config.json
    "7b": Shape(dim=4096, layers=32, heads=32, kv_heads=32, hidden=11008, vocabulary=32000),
}


class Layer(nn.Module):
    """One transformer layer on ``[batch, sequence, dim]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        h = self.attn_norm(x)
        q, k, v = (
            linear(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )  # each [batch, heads, sequence, head_dim]
        q, k = rotate(q, rotation), rotate(k, rotation)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of ``[batch, heads, sequence, head_dim]``."""
    cos, sin = (part[: x.shape[2]] for part in rotation)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Llama(nn.Module):
    """Token ids and targets, both ``[batch, sequence]``, to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.dim)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.output = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        if shape.tied:
            self.output.weight = self.tok_embeddings.weight
        nn.init.normal_(self.tok_embeddings.weight, std=0.02)
        head_dim = shape.dim // shape.heads
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(SEQUENCE, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.get_default_dtype()), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, (self.cos, self.sin), use_reentrant=False)
        parts = zip(self.norm(x).flatten(0, 1).split(LOSS_CHUNK), targets.flatten().split(LOSS_CHUNK), strict=True)
        losses = [checkpoint(self._loss, h, t, use_reentrant=False) for h, t in parts]
        return torch.stack(losses).sum() / targets.numel()

    def _loss(self, h: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.output(h).float(), targets, reduction="sum")


def make_model(shape: Shape, device: str) -> Llama:
    """Random bf16 weights, made on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Llama(shape)
    finally:
        torch.set_default_dtype(before)


# The cases

LR = 1e-5


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        name: what ``--only`` matches.
        build: ``build(model)`` gives the optimizer, or None for no update.
        needs_gpu: does not run on the CPU.
        pages: the driver moves its memory, which torch's allocator does not count.
    """

    name: str
    build: Callable[[Llama], Any]
    needs_gpu: bool = False
    pages: bool = False


def drop_gradients(model: Llama) -> None:
    def drop(param: Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)


def named(path: str, **kwargs: Any) -> Callable[[Llama], Any]:
    """A plain optimizer by its dotted path."""

    def build(model: Llama) -> Any:
        module, _, attribute = path.rpartition(".")
        return getattr(importlib.import_module(module), attribute)(model.parameters(), lr=LR, **kwargs)

    return build


def ours(base: str = "torch.optim.AdamW", *, waits: bool = False, **kwargs: Any) -> Callable[[Llama], Any]:
    """OffloadOptimizer. ``waits``: it knows the model, whose forward waits unit by unit instead of step()."""

    def build(model: Llama) -> Any:
        from offload import OffloadOptimizer

        if "." in base:
            importlib.import_module(base.rpartition(".")[0])  # a missing package is an ImportError, not a UserError
        options = {**kwargs, "model": model} if waits else kwargs
        return OffloadOptimizer(model.named_parameters(), base, lr=LR, **options)

    return build


def torchao_offload(offload_gradients: bool) -> Callable[[Llama], Any]:
    def build(model: Llama) -> Any:
        from torchao.optim import CPUOffloadOptimizer

        adamw = torch.optim.AdamW
        return CPUOffloadOptimizer(model.parameters(), adamw, offload_gradients=offload_gradients, lr=LR)

    return build


def cases() -> list[Case]:
    """In the order of what is most worth knowing, for when time runs out."""
    backward: dict[str, Any] = {"update_in_backward": True}
    gradients: dict[str, Any] = {"offload_gradients": True}
    stream: dict[str, Any] = {"strategy": "stream"}
    host: dict[str, Any] = {"strategy": "host"}
    bnb, ao = "bitsandbytes.optim", "torchao.optim"
    packed = "offload.optim.AdamW"
    light: dict[str, Any] = {"master": "stochastic"}
    return [
        Case("none", drop_gradients),
        Case("adamw", named("torch.optim.AdamW", fused=True)),
        Case("packed-stream-in-backward+model", ours(packed, waits=True, **stream, **backward)),
        Case("packed", named(packed)),
        Case("packed-host-in-backward+model", ours(packed, waits=True, **host, **backward)),
        Case("packed-stream-offload-gradients+model", ours(packed, waits=True, **stream, **gradients)),
        Case("packed-light-stream-in-backward+model", ours(packed, waits=True, **stream, **backward, **light)),
        Case("stream-in-backward+model", ours(waits=True, **stream, **backward)),
        Case("host+model", ours(waits=True, **host)),
        Case("host-in-backward-offload-gradients+model", ours(waits=True, **host, **backward, **gradients)),
        Case("torchao-offload", torchao_offload(False), needs_gpu=True),
        Case("torchao-offload-gradients", torchao_offload(True), needs_gpu=True),
        Case("bnb-paged-adamw8bit", named(f"{bnb}.PagedAdamW8bit"), needs_gpu=True, pages=True),
        Case("bnb-paged-adamw32bit", named(f"{bnb}.PagedAdamW32bit"), needs_gpu=True, pages=True),
        Case("stream+model", ours(waits=True, **stream)),
        Case("host-offload-gradients+model", ours(waits=True, **host, **gradients)),
        Case("host-in-backward+model", ours(waits=True, **host, **backward)),
        Case("resident-in-backward", ours(strategy="resident", fused=True, **backward)),
        Case("stream-torchao-adamw8bit-in-backward+model", ours(f"{ao}.AdamW8bit", waits=True, **stream, **backward)),
        Case("stream-bnb-adamw8bit-in-backward+model", ours(f"{bnb}.AdamW8bit", waits=True, **stream, **backward)),
        Case("bnb-adamw8bit", named(f"{bnb}.AdamW8bit")),
        Case("torchao-adamw8bit", named(f"{ao}.AdamW8bit")),
        Case("stream-in-backward", ours(**stream, **backward)),
        Case("stream", ours(**stream)),
        Case("host-in-backward", ours(**host, **backward)),
        Case("host", ours(**host)),
        Case("host-offload-gradients", ours(**host, **gradients)),
        Case("host-in-backward-offload-gradients", ours(**host, **backward, **gradients)),
        Case("stream-offload-gradients+model", ours(waits=True, **stream, **gradients)),
        Case("none-again", drop_gradients),
    ]


# One case, in its own process


@dataclass(frozen=True)
class Job:
    """What a process is to do: a case at some step sizes, or ``rates``."""

    case: str
    device: str = "cuda"
    model: str = "7b"
    layers: int | None = None
    tokens: list[int] = field(default_factory=list)
    memory_gib: float | None = None
    steps: int = 5
    trace: str | None = None

    @property
    def shape(self) -> Shape:
        shape = SHAPES[self.model]
        return shape if self.layers is None else Shape(**{**vars(shape), "layers": self.layers})


def hold_to(gib: float, *, pages: bool) -> Tensor | None:
    """Leave the process what a card of ``gib`` would; returns what fills the rest, to be kept."""
    free, total = torch.cuda.mem_get_info()
    limit = int(gib * GIB)
    if limit >= total:
        return None
    if pages:
        return torch.empty(total - limit, dtype=torch.uint8, device="cuda")
    torch.cuda.set_per_process_memory_fraction((limit - (total - free)) / total)
    return None


def run_case(case: Case, job: Job) -> Iterator[dict[str, Any]]:
    """One result per step size; after the first that does not fit there is nothing more to try."""
    on_gpu = job.device == "cuda"
    if case.needs_gpu and not on_gpu:
        yield from ({"tokens": tokens, "status": "needs a GPU"} for tokens in job.tokens)
        return
    ballast = None
    try:
        if on_gpu:
            torch.cuda.init()
            torch.zeros(1, device="cuda")  # makes the context, which counts against the limit
            if job.memory_gib is not None:
                ballast = hold_to(job.memory_gib, pages=case.pages)
        model = make_model(job.shape, job.device)
        optimizer = case.build(model)
    except Exception as error:
        yield from ({"tokens": tokens, **failure(error)} for tokens in job.tokens)
        return
    held = 0 if ballast is None else ballast.nbytes
    for index, tokens in enumerate(job.tokens):
        try:
            yield {"tokens": tokens, "status": "ok", **measure(model, optimizer, job, tokens, held)}
        except Exception as error:
            yield {"tokens": tokens, **failure(error)}
            rest = {**failure(error), "at_tokens": tokens}
            yield from ({"tokens": larger, **rest} for larger in job.tokens[index + 1 :])
            return


def failure(error: Exception) -> dict[str, Any]:
    """What went wrong: what does not fit and what is missing are results, other errors are errors."""
    text = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return {"status": "not installed", "error": text[:300]}
    # Of the driver and of pageable memory, torch raises a plain RuntimeError.
    is_memory = isinstance(error, torch.OutOfMemoryError) or re.search(
        "out of memory|can't allocate memory", text, re.I
    )
    return {"status": "out of memory" if is_memory else "error", "error": f"{type(error).__name__}: {text[:500]}"}


def batch_of(tokens: int, vocabulary: int, device: str) -> tuple[Tensor, Tensor]:
    """Random ids and targets, ``[batch, sequence]`` each."""
    sequence = min(tokens, SEQUENCE)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(vocabulary, (2, tokens // sequence, sequence), generator=generator).to(device)
    return ids[0], ids[1]


def measure(model: Llama, optimizer: Any, job: Job, tokens: int, held: int) -> dict[str, Any]:
    """Trains some steps of ``tokens`` tokens; speed and memory, ``held`` bytes not counted."""
    on_gpu = job.device == "cuda"
    ids, targets = batch_of(tokens, model.tok_embeddings.num_embeddings, job.device)
    losses: list[Tensor] = []

    def step() -> None:
        loss = model(ids, targets)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())

    def settle() -> None:
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        if on_gpu:
            torch.cuda.synchronize()

    def mark() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        step()
    settle()
    warm_up = time.perf_counter() - started
    started = time.perf_counter()
    marks = [mark()]
    for _ in range(job.steps):
        step()
        marks.append(mark())
    settle()
    total = time.perf_counter() - started
    intervals = [
        first.elapsed_time(second) / 1e3 if on_gpu else second - first
        for first, second in zip(marks[:-1], marks[1:], strict=True)
    ]
    last_loss = losses[-1].item()
    if not math.isfinite(last_loss):
        raise ValueError(f"the loss is {last_loss} after {len(losses)} steps")
    result = {
        "step_seconds": statistics.median(intervals),
        "mean_step_seconds": total / job.steps,
        "drain_seconds": max(total - sum(intervals), 0.0),
        "intervals": intervals,
        "tokens_per_second": tokens / statistics.median(intervals),
        "warm_up_seconds": warm_up,
        "first_loss": losses[0].item(),
        "last_loss": last_loss,
        **device_memory(held, on_gpu),
        **host_memory(on_gpu),
        "link_bytes": link_bytes(model, optimizer),
    }
    if hasattr(optimizer, "memory_report"):
        result["memory_report"] = optimizer.memory_report()
    paged = [v for s in plain_state(optimizer) for v in s.values() if getattr(v, "is_paged", False)]
    if paged:
        result["paged_bytes"] = sum(v.nbytes for v in paged)
    if job.trace is not None:
        trace(step, settle, Path(job.trace), on_gpu)
        result["trace"] = job.trace
    return result


def trace(step: Callable[[], None], settle: Callable[[], None], path: Path, on_gpu: bool) -> None:
    """A Chrome trace of three steps."""
    from torch.profiler import ProfilerActivity, profile

    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(3):
            step()
        settle()
    profiler.export_chrome_trace(str(path))


def device_memory(held: int, on_gpu: bool) -> dict[str, int]:
    """Peaks since they were reset, and all that is taken on the card now: context and paged memory too."""
    if not on_gpu:
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "device_peak_allocated_bytes": torch.cuda.max_memory_allocated() - held,
        "device_peak_reserved_bytes": torch.cuda.max_memory_reserved() - held,
        "device_taken_bytes": total - free - held,
    }


def host_memory(on_gpu: bool) -> dict[str, int]:
    """Of this process. Whether page-locked memory is part of the resident set depends on the driver."""
    sizes = {}
    status = Path("/proc/self/status")
    if status.exists():
        for key, name in (("VmRSS", "host_resident_bytes"), ("VmHWM", "host_peak_resident_bytes")):
            match = re.search(rf"^{key}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
            if match:
                sizes[name] = 1024 * int(match[1])
    if on_gpu:
        sizes["host_pinned_bytes"] = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
    return sizes


def plain_state(optimizer: Any) -> list[dict[str, Any]]:
    """The states of an ordinary optimizer; torchao's offloader keeps none of its own."""
    state = getattr(optimizer, "state", None)
    return [] if state is None else list(state.values())


def link_bytes(model: Llama, optimizer: Any) -> dict[str, int]:
    """What one step has to move over the link, each way. What the driver pages is not known."""
    params = list(model.parameters())
    down = up = 0
    if type(optimizer).__name__ == "OffloadOptimizer":
        from offload.engine.states import components

        strategy, gradients = optimizer.strategy, sum(p.nbytes for p in params)
        if strategy == "host":
            down, up = gradients, gradients
        elif strategy == "stream":
            states = [v for s in plain_state(optimizer) for v in s.values() if isinstance(v, Tensor) and v.dim()]
            resting = [c for v in states if v.device.type == "cpu" for c in components(v)]
            down = up = sum(c.nbytes for c in resting)
            if optimizer._engine.gradients is not None:
                down, up = down + gradients, up + gradients
    elif type(optimizer).__name__ == "CPUOffloadOptimizer":
        down = up = sum(p.nbytes for p in params if p.numel() >= optimizer.minimal_size)
    return {"down": down, "up": up}


# The machine


def measure_rates(device: str) -> dict[str, Any]:
    """Bytes per second of page-locked copies each way, alone and at once, of device memory, and of AdamW on the CPU."""
    size = GIB // 2 if device == "cuda" else 2**22
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda") for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []

    def seconds(copies: Sequence[tuple[Tensor, Tensor]], repeats: int = 5) -> float:
        taken = []
        for _ in range(repeats):
            synchronize(device)
            started = time.perf_counter()
            for index, (target, source) in enumerate(copies):
                if streams:
                    with torch.cuda.stream(streams[index]):
                        target.copy_(source, non_blocking=True)
                else:
                    target.copy_(source)
            synchronize(device)
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    up, down = (there[0], host[0]), (host[1], there[1])
    rates = {
        "up": size / seconds([up]),
        "down": size / seconds([down]),
        "each_of_both": size / seconds([up, down]),
        "device_copy": 2 * size / seconds([(there[0], there[1])]),
    }
    weights = [nn.Parameter(torch.zeros(2**22 if device == "cuda" else 2**16, dtype=torch.bfloat16)) for _ in range(8)]
    optimizer = torch.optim.AdamW(weights, lr=LR, fused=True)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        optimizer.step()
        taken.append(time.perf_counter() - started)
    rates["cpu_adamw_parameters"] = sum(w.numel() for w in weights) / statistics.median(taken)
    return rates


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def describe_machine(device: str) -> dict[str, Any]:
    """Card, driver, processor, memory and versions."""
    facts: dict[str, Any] = {
        "device": device,
        "python": platform.python_version(),
        "cpu_threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "system": platform.platform(),
    }
    for package in ("torch", "torchao", "bitsandbytes"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    if hasattr(os, "sysconf"):
        facts["host_memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", cpu.read_text(), re.MULTILINE) if cpu.exists() else None
    facts["cpu"] = match[1] if match else platform.processor()
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts.update(card=properties.name, device_memory_bytes=properties.total_memory, cuda=torch.version.cuda)
        query = [
            "nvidia-smi",
            "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max",
            "--format=csv,noheader",
        ]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
            facts["driver"], facts["pcie_generation"], facts["pcie_lanes"] = answer.splitlines()[0].split(", ")
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            facts["driver"] = None
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "PYTORCH_ALLOC_CONF" in os.environ:
        facts["allocator"] = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
    return facts


def child(job: Job) -> None:
    """Prints one marked line of JSON per result."""
    if job.case == "rates":
        results: Iterator[dict[str, Any]] = iter(
            [{"environment": describe_machine(job.device), "rates": measure_rates(job.device)}]
        )
    else:
        results = run_case(next(case for case in cases() if case.name == job.case), job)
    for result in results:
        print(MARK + json.dumps(result), flush=True)
    # Everything is said, and unpinning tens of GiB takes seconds; the system does it faster.
    sys.stdout.flush()
    os._exit(0)


# All cases


def child_command(job: Job) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(vars(job))]


def run_child(job: Job, seconds: float | None) -> tuple[list[dict[str, Any]], str | None, str]:
    """Results of a process; why it ended, if not by itself; and the end of what else it said."""
    process = subprocess.Popen(
        child_command(job), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        process.kill()

    timer = None if seconds is None else threading.Timer(max(seconds, 0.0), stop)
    if timer is not None:
        timer.start()
    results, said = [], []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(MARK):
                results.append(json.loads(line[len(MARK) :]))
            else:
                said.append(line)
        code = process.wait()
    finally:
        if timer is not None:
            timer.cancel()
        process.kill()
    why = None
    if code != 0:
        hint = " (killed: host memory may have run out)" if code == -9 else ""
        why = OUT_OF_TIME if stopped.is_set() else f"ended with status {code}{hint}"
    return results, why, "".join(said)[-2000:]


class Record:
    """The result file: runs, and results that each name their run."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        self.content: dict[str, Any] = {"runs": [], "results": [], "sanitizer": []}
        if path.exists() and not fresh:
            self.content.update(json.loads(path.read_text()))

    def has(self, job: Job, tokens: int, card: str | None) -> bool:
        wanted = self._key({**vars(job), "tokens": tokens})
        runs = self.content["runs"]
        return any(
            self._key(result) == wanted
            and runs[result["run"]]["environment"].get("card") == card
            and result["status"] in FINDINGS
            for result in self.content["results"]
        )

    @staticmethod
    def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(entry.get(key) for key in ("case", "device", "model", "layers", "tokens", "memory_gib"))

    def add(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        same = {key: value for key, value in vars(job).items() if key not in ("tokens", "trace", "steps")}
        runs = self.content["runs"]
        result = {**same, "steps": job.steps, "run": len(runs) - 1, **result}
        card = runs[-1]["environment"].get("card")
        others = [
            other
            for other in self.content["results"]
            if self._key(other) != self._key(result) or runs[other["run"]]["environment"].get("card") != card
        ]
        self.content["results"] = [*others, result]
        self.write()
        return result

    def write(self) -> None:
        """Replace the file at once, so that whoever stops this leaves a whole one."""
        self._derive()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(self.content, indent=1) + "\n")
        draft.replace(self.path)

    def _derive(self) -> None:
        """Exposed time against ``none``, held to the same memory where that was measured; the link's bound."""
        results = [result for result in self.content["results"] if result["status"] == "ok"]
        for result in results:
            alike = [r for r in results if self._setting(r) == self._setting(result) and r["case"].startswith("none")]
            held = [r["step_seconds"] for r in alike if r["memory_gib"] == result["memory_gib"]]
            whole = [r["step_seconds"] for r in alike if r["memory_gib"] is None]
            if not (held or whole):
                continue
            compute = statistics.mean(held or whole)
            result["exposed_seconds"] = result["step_seconds"] - compute
            rates = self.content["runs"][result["run"]].get("rates")
            if rates:
                link = max(result["link_bytes"].values()) / rates["each_of_both"]
                result["bound_seconds"] = max(compute, link)

    def _setting(self, result: dict[str, Any]) -> tuple[Any, ...]:
        card = self.content["runs"][result["run"]]["environment"].get("card")
        return (card, *(result[key] for key in ("device", "model", "layers", "tokens")))


def table(content: dict[str, Any]) -> str:
    """Markdown, one row per result."""
    rows = ["| card | tokens | case | s/step | tok/s | exposed s | bound s | device GiB | host GiB |", "|" + "---|" * 9]
    for result in content["results"]:
        environment = content["runs"][result["run"]]["environment"]
        limit = result["memory_gib"]
        card = f"{environment.get('card', 'CPU')}{'' if limit is None else f' held to {limit:g} GiB'}"
        start = f"| {card} | {result['tokens']} | {result['case']} |"
        if result["status"] != "ok":
            rows.append(f"{start} {result['status']} | | | | | |")
            continue

        def number(key: str, digits: int, unit: float = 1.0, result: dict[str, Any] = result) -> str:
            return f"{result[key] / unit:.{digits}f}" if key in result else "–"

        cells = [
            number("step_seconds", 3),
            number("tokens_per_second", 0),
            number("exposed_seconds", 3),
            number("bound_seconds", 3),
            number("device_peak_reserved_bytes", 1, GIB),
            number("host_pinned_bytes" if "host_pinned_bytes" in result else "host_peak_resident_bytes", 1, GIB),
        ]
        rows.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(rows)


def git_commit() -> str | None:
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        commit, changes = (
            subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit} with changes" if changes else commit


def sanitize(record: Record, seconds: float | None) -> bool:
    """The accelerator tests under torch's CUDA sanitizer; True if they passed."""
    tests = ("tests/engine/test_on_accelerator.py", "tests/optim/test_triton_kernel.py")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *tests]
    started = time.perf_counter()
    env = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, said = (
            -9,
            error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or "",
        )
    lines = said.strip().splitlines() or [""]
    summary = {
        "command": "TORCH_CUDA_SANITIZER=1 " + shlex.join(["python", *command[1:]]),
        "run": len(record.content["runs"]) - 1,
        "status": code,
        "seconds": time.perf_counter() - started,
        "summary": lines[-1],
        "output": [] if code == 0 else lines[-60:],
    }
    record.content["sanitizer"].append(summary)
    record.write()
    print(f"sanitizer: {lines[-1]}")
    return code == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "scripts" / "results" / "gpu_suite.json")
    parser.add_argument("--only", default=".*", help="regular expression over whole case names")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192], help="per step, smallest first")
    parser.add_argument("--memory", nargs="+", default=["whole", "16", "24"], help="GiB to hold to, or `whole`")
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after two to warm up")
    parser.add_argument("--model", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to save time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget-seconds", type=float, help="stop before; what was left out is recorded")
    parser.add_argument("--fresh", action="store_true", help="discard what the output file has")
    parser.add_argument("--trace", metavar="CASE", help="write a Chrome trace of this case instead of measuring all")
    parser.add_argument("--sanitize", action="store_true", help="run the accelerator tests under the CUDA sanitizer")
    parser.add_argument("--table", action="store_true", help="print what the output file has as Markdown, and end")
    parser.add_argument("--list", action="store_true", help="print the names of all cases, and end")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(Job(**json.loads(options.child)))
    if options.list:
        print("\n".join(case.name for case in cases()))
        return 0
    record = Record(options.output, fresh=options.fresh)
    if options.table:
        print(table(record.content))
        return 0
    pattern = re.compile(re.escape(options.trace) if options.trace else options.only)
    chosen = [case for case in cases() if pattern.fullmatch(case.name)]
    if not chosen:
        parser.error(f"no case matches {pattern.pattern!r}; --list prints their names")
    if any(tokens > SEQUENCE and tokens % SEQUENCE for tokens in options.tokens):
        parser.error(f"--tokens: above {SEQUENCE}, give a multiple of it")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --model tiny --tokens 32 only shows that the script runs")
    limits = [None if limit == "whole" else float(limit) for limit in options.memory]
    if options.device == "cpu":
        limits = [None]
    return suite(options, record, chosen, limits)


def suite(options: argparse.Namespace, record: Record, chosen: list[Case], limits: list[float | None]) -> int:
    """Runs what is not in the record yet; 1 if something ended in an error."""
    started = time.perf_counter()

    def remaining() -> float | None:
        return None if options.budget_seconds is None else options.budget_seconds - (time.perf_counter() - started)

    answers, why, said = run_child(Job("rates", device=options.device), remaining())
    if not answers:
        print(f"the machine's rates could not be measured: {why}\n{said}", file=sys.stderr)
        return 1
    run = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(["python", "scripts/gpu_suite.py", *sys.argv[1:]]),
        "commit": git_commit(),
        **answers[0],
        "left_out": [],
    }
    record.content["runs"].append(run)
    record.write()
    card = run["environment"].get("card")
    print(f"{card or run['environment']['cpu']}: GB/s { ({k: round(v / 1e9, 1) for k, v in run['rates'].items()}) }")
    if options.sanitize:
        return 0 if sanitize(record, remaining()) else 1
    longest, failed = 0.0, False
    for limit in limits:
        for case in chosen:
            path = None
            if options.trace:
                path = str(options.output.parent / f"trace-{case.name}-{options.model}-{options.tokens[0]}.json.gz")
            job = Job(
                case=case.name,
                device=options.device,
                model=options.model,
                layers=options.layers,
                tokens=sorted(options.tokens),
                memory_gib=limit,
                steps=options.steps,
                trace=path,
            )
            wanted = [tokens for tokens in job.tokens if path or not record.has(job, tokens, card)]
            if path:
                wanted = wanted[:1]
            if not wanted:
                continue
            job = Job(**{**vars(job), "tokens": wanted})
            left = remaining()
            if left is not None and left < max(longest, 1.0):
                run["left_out"] += [{"case": case.name, "memory_gib": limit, "tokens": tokens} for tokens in wanted]
                continue
            began = time.perf_counter()
            results, why, said = run_child(job, left)
            longest = max(longest, time.perf_counter() - began)
            missing = wanted[len(results) :]
            if why == OUT_OF_TIME:
                run["left_out"] += [{"case": case.name, "memory_gib": limit, "tokens": tokens} for tokens in missing]
                missing = []
            ended = [{"tokens": tokens, "status": why or "said nothing", "error": said} for tokens in missing]
            for result in [*results, *ended]:
                entry = record.add(job, result)
                show(entry)
                failed |= entry["status"] not in (*FINDINGS, "not installed")
    record.write()
    if run["left_out"]:
        print(f"left out for lack of time: {len(run['left_out'])}; the same command goes on with them")
    return 1 if failed else 0


def show(result: dict[str, Any]) -> None:
    limit = "whole card" if result["memory_gib"] is None else f"{result['memory_gib']:g} GiB"
    line = f"{result['case']:46s} {result['tokens']:6d} tokens  {limit:10s}  "
    if result["status"] == "ok":
        exposed = f", exposed {result['exposed_seconds']:.3f} s" if "exposed_seconds" in result else ""
        peak = result.get("device_peak_reserved_bytes", 0) / GIB
        line += f"{result['step_seconds']:.3f} s, {result['tokens_per_second']:.0f} tok/s{exposed}, {peak:.1f} GiB"
    else:
        line += f"{result['status']}: {result.get('error', '').strip()[-200:]}"
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

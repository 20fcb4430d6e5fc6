"""One case, in its own process: a few steps whose losses can be compared to the bit, then steps against the clock.

First come :data:`REPEATABLE_STEPS` with deterministic algorithms, at the first step size only, where the model is as it
was made. After :data:`WARM_UP_STEPS` with the usual algorithms those are timed that count, and one more is traced.
Step 1 of a size has times and peaks of its own, because it creates states, page-locks memory and compiles kernels.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.cases import Case, DroppedGradients
from gpu.copies import trace_copies, write_trace
from gpu.machine import FALLBACK
from gpu.model import SHAPES, Llama, Shape, batch_of, make_model

GIB = 2**30
REPEATABLE_STEPS = 4
WARM_UP_STEPS = 2

VISIBLE_GIB = {16: 15.70, 24: 23.51}
"""What programs see of cards that are sold with so many GB (Linux; RTX 4080 and 4060 Ti, RTX 4090): out-of-memory
messages of PyTorch name it as the card's capacity. Of other sizes, 98 % is assumed."""

LARGEST_CONTEXT = 3 * GIB
"""More than that taken before anything was allocated means that somebody else uses the card."""


@dataclass(frozen=True)
class Job:
    """What a process is to do: a case at some step sizes, or one of the measurements of the machine.

    Attributes:
        case: a case's name, or what :data:`gpu.child.OTHERS` has.
        tokens: of a step, each with a result of its own, smallest first.
        memory_gib: size of the card to be held to, as sold; None for the whole card.
        allocator: PYTORCH_CUDA_ALLOC_CONF of the process; empty for PyTorch's defaults.
        trace: where to write a Chrome trace of three steps.
    """

    case: str
    device: str = "cuda"
    model: str = "7b"
    layers: int | None = None
    tokens: list[int] = field(default_factory=list)
    memory_gib: float | None = None
    steps: int = 5
    allocator: str = ""
    trace: str | None = None

    @property
    def shape(self) -> Shape:
        shape = SHAPES[self.model]
        return shape if self.layers is None else Shape(**{**vars(shape), "layers": self.layers})


def run_case(case: Case, job: Job) -> Iterator[dict[str, Any]]:
    """One result per step size; after the first that does not fit there is nothing more to try."""
    on_gpu = job.device != "cpu"
    if case.needs_gpu and not on_gpu:
        yield from ({"tokens": tokens, "status": "needs a GPU"} for tokens in job.tokens)
        return
    if case.managed and job.memory_gib is not None:
        yield from ({"tokens": tokens, "status": "whole card only"} for tokens in job.tokens)
        return
    compiling, told = Compiling(), told_warnings()
    try:
        limits = prepare_device(job) if on_gpu else {}
        model = make_model(job.shape, job.device)
        if case.managed:
            check_managed_memory(case, model)
        before, started = locking_seconds(on_gpu), time.perf_counter()
        optimizer = case.build(model)
        construction = {
            "construction_seconds": time.perf_counter() - started,
            "construction_page_locking_seconds": locking_seconds(on_gpu) - before,
        }
    except Exception as error:
        yield from ({"tokens": tokens, **failure(error)} for tokens in job.tokens)
        return
    common = {**construction, **limits, **({"managed_memory": True} if case.managed else {})}
    for index, tokens in enumerate(job.tokens):
        try:
            training = Training(model, optimizer, tokens, job.device)
            measured = measure(training, job, is_first=index == 0)
            compiled = {"compiling_seconds": compiling.seconds, "kernels_compiled": compiling.count}
            result = {"tokens": tokens, "status": "ok", **measured, **compiled, **common}
            if "visible_bytes" in limits:
                result["beyond_limit_bytes"] = max(result["device_taken_bytes"] - limits["visible_bytes"], 0)
            if told:
                result["warnings"] = list(told)
            yield result
        except Exception as error:
            yield {"tokens": tokens, **failure(error)}
            rest = {**failure(error), "at_tokens": tokens}
            yield from ({"tokens": larger, **rest} for larger in job.tokens[index + 1 :])
            return


def told_warnings() -> list[str]:
    """A list that gains the text of each warning about the optimizer, at most ten; a fallback in it is an error."""
    warnings.filterwarnings("error", message=FALLBACK)
    told: list[str] = []
    show = warnings.showwarning

    def collect(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any) -> None:
        text = " ".join(str(message).split())[:300]
        if "offload" in filename and text not in told and len(told) < 10:
            told.append(text)
        show(message, category, filename, *rest, **more)

    warnings.showwarning = collect
    return told


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


# The device


def visible_bytes(memory_gib: float) -> int:
    """What programs see of a card that is sold with so many GB."""
    return int(VISIBLE_GIB.get(round(memory_gib), 0.98 * memory_gib) * GIB)


def prepare_device(job: Job) -> dict[str, int]:
    """Load what every case uses, then leave the process what a card of ``memory_gib`` would beside that.

    Returns:
        dict: ``context_bytes``, and ``visible_bytes`` of the card that is played, if one is.
    """
    warm = make_model(SHAPES["warm-up"], job.device)
    optimizer = torch.optim.AdamW(warm.parameters(), fused=True)
    warm(*batch_of(128, SHAPES["warm-up"].vocabulary, job.device)).backward()
    optimizer.step()
    torch.accelerator.synchronize()
    del warm, optimizer
    gc.collect()
    torch.accelerator.empty_cache()
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.accelerator.memory_reserved()
    if context > LARGEST_CONTEXT:
        raise RuntimeError(f"{context / GIB:.1f} GiB of the card are taken before anything began: another process?")
    facts = {"context_bytes": context}
    if job.memory_gib is not None:
        visible = visible_bytes(job.memory_gib)
        if visible < total:
            torch.cuda.set_per_process_memory_fraction((visible - context) / total)
            facts["visible_bytes"] = visible
    return facts


def check_managed_memory(case: Case, model: Llama) -> None:
    """Refuse a case whose paged memory, with the gradients, the card has not free."""
    params = list(model.parameters())
    needed = int(case.managed * sum(p.numel() for p in params)) + sum(p.nbytes for p in params)
    free, _ = torch.cuda.mem_get_info()
    if needed > 0.9 * free:
        raise torch.OutOfMemoryError(
            f"{needed / GIB:.1f} GiB of managed memory and gradients would not fit into the {free / GIB:.1f} GiB that "
            "are free, and the driver's paging can hang a card: out of memory"
        )


def locking_seconds(on_gpu: bool) -> float:
    """Spent so far by PyTorch in page-locking host memory."""
    return torch.cuda.host_memory_stats().get("host_alloc_time.total", 0) / 1e6 if on_gpu else 0.0


class Compiling:
    """Counts what Triton compiles from here on, and the seconds that it takes; what its cache has counts nothing."""

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        try:
            from triton import knobs
        except ImportError:
            return
        knobs.compilation.listener = self._on_compiled

    def _on_compiled(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.seconds += times.total / 1e6
            self.count += 1


@contextmanager
def repeatable() -> Iterator[None]:
    """Inside, torch takes algorithms that give the same bits each time, where it has them."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


# Steps


class Training:
    """Steps on one batch of random tokens.

    Attributes:
        losses: of all steps so far, 0-dim.
    """

    def __init__(self, model: Llama, optimizer: Any, tokens: int, device: str) -> None:
        self.model, self.optimizer, self.tokens, self.device = model, optimizer, tokens, device
        self.ids, self.targets = batch_of(tokens, model.tok_embeddings.num_embeddings, device)
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """Forward, backward, update; what can go on beside the next step does."""
        loss = self.model(self.ids, self.targets)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def settle(self) -> None:
        """Wait for everything."""
        if hasattr(self.optimizer, "synchronize"):
            self.optimizer.synchronize()
        if self.device != "cpu":
            torch.accelerator.synchronize()

    def mark(self) -> Any:
        """The point that the compute stream has reached."""
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream())
        return event

    def seconds_between(self, first: Any, second: Any) -> float:
        return second - first if self.device == "cpu" else first.elapsed_time(second) / 1e3


def measure(training: Training, job: Job, *, is_first: bool) -> dict[str, Any]:
    """Train with one step size; see the head of this file.

    Args:
        is_first: the model is as it was made, so that losses are comparable with those of other processes.
    """
    on_gpu = job.device != "cpu"
    optimizer, result = training.optimizer, {}
    if on_gpu:
        torch.accelerator.empty_cache()
    before, retries = locking_seconds(on_gpu), allocator_retries(on_gpu)
    with repeatable() if is_first else nullcontext():
        sums = []
        for index in range(REPEATABLE_STEPS if is_first else 1):
            if isinstance(optimizer, DroppedGradients):
                optimizer.count()
            reset_peaks(on_gpu)
            started = time.perf_counter()
            training.step()
            if index == 0:
                training.settle()
                result["first_step_seconds"] = time.perf_counter() - started
                result["first_step_page_locking_seconds"] = locking_seconds(on_gpu) - before
                result |= {f"first_step_{key}": value for key, value in device_peaks(on_gpu).items()}
            if isinstance(optimizer, DroppedGradients) and optimizer.sums is not None:
                sums.append(torch.stack(optimizer.sums).tolist())
                optimizer.sums = None
    if is_first:
        result["losses"] = [loss.item() for loss in training.losses]
        if sums:
            result["gradients_repeat"] = all(other == sums[0] for other in sums)
    for _ in range(WARM_UP_STEPS):
        training.step()
    training.settle()
    reset_peaks(on_gpu)
    result |= time_steps(training, job.steps)
    result |= device_peaks(on_gpu)
    result["num_alloc_retries"] = allocator_retries(on_gpu) - retries
    last_loss = training.losses[-1].item()
    if not math.isfinite(last_loss):
        raise ValueError(f"the loss is {last_loss} after {len(training.losses)} steps")
    result |= {
        "tokens_per_second": training.tokens / result["step_seconds"],
        "first_loss": training.losses[0].item(),
        "last_loss": last_loss,
        **device_taken(on_gpu),
        **host_memory(on_gpu),
        "link_bytes": link_bytes(training.model, optimizer),
        "update_bytes": update_bytes(training.model, optimizer),
    }
    if hasattr(optimizer, "memory_report"):
        result["memory_report"] = optimizer.memory_report()
    paged = [v for s in plain_state(optimizer) for v in s.values() if getattr(v, "is_paged", False)]
    if paged:
        result["paged_bytes"] = sum(v.nbytes for v in paged)
    if on_gpu:
        result["copies"] = trace_copies(training.step, training.settle)
    if job.trace is not None:
        write_trace(training.step, training.settle, Path(job.trace), on_gpu)
        result["trace"] = job.trace
    return result


def time_steps(training: Training, steps: int) -> dict[str, Any]:
    """From an idle device to an idle device.

    Returns:
        dict: ``step_seconds``, the median time between the ends of consecutive steps on the compute stream: updates
        that go on beside the next step delay it, and the first step after a halt has none before it, so that the
        median of five is the steady state's; ``intervals``, all of them; ``mean_step_seconds``, everything over the
        number of steps; ``drain_seconds``, what was still under way when the compute stream was done.
    """
    started = time.perf_counter()
    marks = [training.mark()]
    for _ in range(steps):
        training.step()
        marks.append(training.mark())
    training.settle()
    total = time.perf_counter() - started
    intervals = [training.seconds_between(a, b) for a, b in zip(marks[:-1], marks[1:], strict=True)]
    return {
        "step_seconds": statistics.median(intervals),
        "mean_step_seconds": total / steps,
        "drain_seconds": max(total - sum(intervals), 0.0),
        "intervals": intervals,
    }


# Memory


def reset_peaks(on_gpu: bool) -> None:
    if on_gpu:
        torch.accelerator.reset_peak_memory_stats()


def device_peaks(on_gpu: bool) -> dict[str, int]:
    """Of PyTorch's allocator, since they were reset."""
    if not on_gpu:
        return {}
    return {
        "device_peak_allocated_bytes": torch.accelerator.max_memory_allocated(),
        "device_peak_reserved_bytes": torch.accelerator.max_memory_reserved(),
    }


def device_taken(on_gpu: bool) -> dict[str, int]:
    """All that is taken on the card now: context, libraries and paged memory too."""
    if not on_gpu:
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"device_taken_bytes": total - free}


def allocator_retries(on_gpu: bool) -> int:
    """How often the allocator had to give back what it had cached to find room."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if on_gpu else 0


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
        sizes["host_pinned_bytes"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return sizes


# What a step moves


def plain_state(optimizer: Any) -> list[dict[str, Any]]:
    """The states of an ordinary optimizer; torchao's offloader keeps none of its own."""
    state = getattr(optimizer, "state", None)
    return [] if state is None else list(state.values())


def components(value: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor consists of: itself, or those inside a subclass (torchao's 8-bit states)."""
    if not hasattr(value, "__tensor_flatten__"):
        return [value]
    return [part for name in value.__tensor_flatten__()[0] for part in components(getattr(value, name))]


def state_parts(optimizer: Any) -> list[Tensor]:
    """The dense tensors of all states; step counters are none."""
    states = [v for s in plain_state(optimizer) for v in s.values() if isinstance(v, Tensor) and v.dim()]
    return [part for value in states for part in components(value)]


def link_bytes(model: Llama, optimizer: Any) -> dict[str, int]:
    """What one step has to move over the link, each way. What the driver pages is not known."""
    params = list(model.parameters())
    down = up = 0
    if type(optimizer).__name__ == "OffloadOptimizer":
        gradients = sum(p.nbytes for p in params)
        if optimizer.strategy == "host":
            down, up = gradients, gradients
        elif optimizer.strategy == "stream":
            down = up = sum(part.nbytes for part in state_parts(optimizer) if part.device.type == "cpu")
            if "gradients" in optimizer.memory_report().get("pinned_host", {}):
                down, up = down + gradients, up + gradients
    elif type(optimizer).__name__ == "CPUOffloadOptimizer":
        down = up = sum(p.nbytes for p in params if p.numel() >= optimizer.minimal_size)
    return {"down": down, "up": up}


def update_bytes(model: Llama, optimizer: Any) -> int:
    """What the update has to read and write where it runs: gradients once, parameters and states twice."""
    params = list(model.parameters())
    if isinstance(optimizer, DroppedGradients) or not plain_state(optimizer):
        return 0
    return 3 * sum(p.nbytes for p in params) + 2 * sum(part.nbytes for part in state_parts(optimizer))

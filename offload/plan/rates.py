"""What this machine gives, measured: copies each way, device memory, matrix products, host memory, AdamW on the CPU.

Each number is a median of some turns after one that does not count. Sizes are bytes, rates bytes (or FLOPs, or
parameters) per second.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

GIB = 2**30

TURNS = 5

CPU_FORMATS: tuple[tuple[Literal["int8", "bf16", "fp32"], Literal["split", "split24"]], ...] = (
    ("int8", "split"),
    ("int8", "split24"),
    ("bf16", "split"),
    ("fp32", "split"),
)
"""Of the packed AdamW: moments and master."""

Copy = tuple[Tensor, Tensor]
"""What is written, what is read."""


def copy_rates(device: str, size: int = GIB // 2) -> dict[str, float]:
    """Between the host and an accelerator: ``up``, ``down``, and ``each_of_both`` at once, from page-locked memory;
    ``pageable_up`` and ``pageable_down``; ``device_copy`` on the device, which counts what it reads too.

    Args:
        device: of an accelerator.
        size: bytes of a copy.
    """
    locked = [torch.ones(size, dtype=torch.uint8, pin_memory=device != "cpu") for _ in range(2)]
    pageable = torch.ones(size, dtype=torch.uint8)
    there = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)]
    up, down = (there[0], locked[0]), (locked[1], there[1])
    return {
        "up": size / copy_seconds([up], device),
        "down": size / copy_seconds([down], device),
        "each_of_both": size / copy_seconds([up, down], device),
        "pageable_up": size / copy_seconds([(there[0], pageable)], device),
        "pageable_down": size / copy_seconds([(pageable, there[1])], device),
        "device_copy": 2 * size / copy_seconds([(there[0], there[1])], device),
    }


def copy_seconds(copies: Sequence[Copy], device: str) -> float:
    """Of all copies side by side, each on a stream of its own."""
    if device == "cpu":

        def turn() -> float:
            return _seconds(lambda: [target.copy_(source) for target, source in copies])
    else:
        streams = [torch.Stream(device=device) for _ in copies]

        def turn() -> float:
            caller = torch.accelerator.current_stream()
            begin, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
            begin.record(caller)
            for stream, (target, source) in zip(streams, copies, strict=True):
                stream.wait_event(begin)
                with stream:
                    target.copy_(source, non_blocking=True)
                caller.wait_event(stream.record_event())
            end.record(caller)
            torch.accelerator.synchronize()
            return begin.elapsed_time(end) / 1e3

    return _median(turn)


def matmul_rate(device: str, size: int = 4096) -> float:
    """FLOPS of a bf16 product of two square matrices on an accelerator, of fp32 on the CPU."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    inner = 1 if device == "cpu" else 20  # one alone is over before the clock is

    def turn() -> float:
        def work() -> None:
            for _ in range(inner):
                torch.mm(left, right, out=out)
            if device != "cpu":
                torch.accelerator.synchronize()

        return _seconds(work)

    return 2 * size**3 * inner / _median(turn)


NEW = 64 << 20
"""Bytes of a tensor that the C library never keeps for the next one."""


def host_memory_rates(size: int = GIB // 2) -> dict[str, float]:
    """``host_copy`` with all of torch's threads and ``host_copy_one_thread``, which count what is read and written; and
    ``host_faults``, at which the system makes pages that are touched for the first time, and takes them back."""
    target, source = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    rates = {"host_copy": 2 * size / copy_seconds([(target, source)], "cpu")}
    with _threads(1):
        rates["host_copy_one_thread"] = 2 * size / copy_seconds([(target, source)], "cpu")
    kept = torch.empty(NEW, dtype=torch.uint8)
    anew = _median(lambda: _seconds(lambda: torch.empty(NEW, dtype=torch.uint8).fill_(1)))
    again = _median(lambda: _seconds(lambda: kept.fill_(1)))
    rates["host_faults"] = NEW / max(anew - again, 1e-9)
    return rates


def cpu_adamw_rates(elements: int = 2**26) -> dict[str, float]:
    """Parameters per second of a step of AdamW on the CPU's threads in bf16: torch's fused one, and the packed one by
    format."""
    from offload.optim import AdamW

    weights = [nn.Parameter(torch.randn(elements // 4).mul_(0.02).bfloat16()) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    total = sum(weight.numel() for weight in weights)
    rates = {"torch fused": total / step_seconds(torch.optim.AdamW(weights, fused=True), "cpu")}
    for state, master in CPU_FORMATS:
        optimizer = AdamW(weights, state_dtype=state, master=master)
        rates[f"packed {state} {master}"] = total / step_seconds(optimizer, "cpu")
    return rates


HASHED = 8 << 20
"""Bytes, which take some milliseconds without Python's lock."""


def cores_had(seconds: float = 0.2) -> float:
    """Of the cores that torch's threads would use, the share that this process gets: less than all where other programs
    work, or a limit holds it back.

    Args:
        seconds: for which it keeps them busy.
    """
    data = bytes(HASHED)

    def keep_busy(_: int) -> tuple[float, float]:
        begin, worked = time.perf_counter(), time.thread_time()
        while (passed := time.perf_counter() - begin) < seconds:
            hashlib.blake2b(data)
        return time.thread_time() - worked, passed

    count = torch.get_num_threads()
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        worked, passed = map(sum, zip(*threads.map(keep_busy, range(count)), strict=True))
    return min(1.0, worked / passed)


def step_seconds(optimizer: torch.optim.Optimizer, device: str) -> float:
    """Of a step, after two that make states and compile."""
    for _ in range(2):
        optimizer.step()
    if device == "cpu":
        return statistics.median(_seconds(optimizer.step) for _ in range(TURNS))
    torch.accelerator.synchronize()
    events = [torch.Event(device=device, enable_timing=True) for _ in range(2 * TURNS + 1)]
    events[0].record()
    for event in events[1:]:
        optimizer.step()
        event.record()
    torch.accelerator.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))


def locking(gib: int, slab: int = GIB, lock: Callable[[int], Any] | None = None) -> dict[str, Any]:
    """Page-lock host memory slab by slab, as the optimizer does, until ``gib`` are locked or one cannot be.

    Args:
        gib: at most so many.
        slab: bytes of each.
        lock: makes a slab; default: torch's page-locked memory.

    Returns:
        ``locked_gib``; ``seconds_per_gib``; ``refused``, why no more could be locked, None where ``gib`` could.
    """
    make = lock or (lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
    kept: list[Any] = []
    refused = None
    started = time.perf_counter()
    try:
        while len(kept) * slab < gib * GIB:
            kept.append(make(slab))
    except RuntimeError as error:
        refused = str(error).splitlines()[0]
    taken = time.perf_counter() - started
    locked = len(kept) * slab / GIB
    del kept
    return {"locked_gib": locked, "seconds_per_gib": taken / locked if locked else None, "refused": refused}


def _median(turn: Callable[[], float]) -> float:
    """Of turns after one that does not count, each of which tells its seconds."""
    return statistics.median([turn() for _ in range(TURNS + 1)][1:])


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

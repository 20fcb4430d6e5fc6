"""What the machine gives: the link, device memory, update kernels on the device and on the CPU, page-locking."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpu.measure import GIB, update_bytes

LAYER = ((4096,), *((4096, 4096),) * 4, (4096,), *((11008, 4096),) * 2, (4096, 11008))
"""Shapes of one layer of Llama-2 7B."""

FORMATS = (("int8", "split"), ("int8", "split24"), ("int8", "stochastic"), ("bf16", "split"), ("fp32", "split"))
"""Of the packed AdamW: moments and master."""

REPEATS = 5

LOCKED_GIB = 4
"""Page-locked for the measurement, a GiB at a time as the optimizer does."""


def measure_rates(device: str) -> dict[str, Any]:
    """Bytes per second of copies and updates, and parameters per second on the CPU."""
    return {**copy_rates(device), **update_rates(device), **cpu_rates(device)}


def copy_rates(device: str) -> dict[str, float]:
    """Page-locked copies: each way alone, and each of both at once; a copy on the device counts what it reads too."""
    size = GIB // 2 if device != "cpu" else 2**22
    host = [torch.ones(size, dtype=torch.uint8, pin_memory=device != "cpu") for _ in range(2)]
    there = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)]
    up, down = (there[0], host[0]), (host[1], there[1])
    return {
        "up": size / copy_seconds([up], device),
        "down": size / copy_seconds([down], device),
        "each_of_both": size / copy_seconds([up, down], device),
        "device_copy": 2 * size / copy_seconds([(there[0], there[1])], device),
    }


def copy_seconds(copies: Sequence[tuple[Tensor, Tensor]], device: str) -> float:
    """Of all copies side by side, each on a stream of its own: the median of some turns, after one that does not
    count."""
    if device == "cpu":

        def turn() -> float:
            started = time.perf_counter()
            for target, source in copies:
                target.copy_(source)
            return time.perf_counter() - started
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

    return statistics.median([turn() for _ in range(REPEATS + 1)][1:])


def update_rates(device: str) -> dict[str, Any]:
    """``updates``: by format, bytes per second of one step over a few layers, with nothing beside it."""
    from offload.optim import AdamW

    def builders() -> Iterator[tuple[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]]:
        for state, master in FORMATS:
            yield (
                f"packed {state} {master}",
                lambda p, state=state, master=master: AdamW(p, state_dtype=state, master=master),
            )
        yield "torch fused", lambda p: torch.optim.AdamW(p, fused=True)

    shapes = [*LAYER, *LAYER] if device != "cpu" else [(256, 128), (128,)]
    params = [nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    holder = nn.ParameterList(params)
    rates = {}
    for name, build in builders():
        optimizer = build(params)
        seconds = step_seconds(optimizer, device)
        rates[name] = update_bytes(holder, optimizer) / seconds
        del optimizer
    return {"updates": rates}


def step_seconds(optimizer: torch.optim.Optimizer, device: str) -> float:
    """The median of some steps, after two that make states and compile."""
    for _ in range(2):
        optimizer.step()
    if device == "cpu":
        taken = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            optimizer.step()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)
    torch.accelerator.synchronize()
    events = [torch.Event(device=device, enable_timing=True) for _ in range(2 * REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        optimizer.step()
        event.record()
    torch.accelerator.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))


def cpu_rates(device: str) -> dict[str, float]:
    """Parameters per second of AdamW on all of the CPU's threads: torch's, and the packed one."""
    from offload.optim import AdamW

    count = 2**24 if device != "cpu" else 2**16
    weights = [nn.Parameter(torch.randn(count).mul_(0.02).bfloat16()) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    total = sum(weight.numel() for weight in weights)
    return {
        "cpu_adamw_parameters": total / step_seconds(torch.optim.AdamW(weights, fused=True), "cpu"),
        "cpu_packed_parameters": total / step_seconds(AdamW(weights), "cpu"),
    }


def measure_locking(device: str) -> dict[str, float]:
    """Seconds that page-locking a GiB takes, with the allocator's settings of this process."""
    size = GIB if device != "cpu" else 2**22
    if device != "cpu":
        torch.empty(1, pin_memory=True)  # the context is not part of it
    kept, taken = [], []
    for _ in range(LOCKED_GIB):
        started = time.perf_counter()
        kept.append(torch.empty(size, dtype=torch.uint8, pin_memory=device != "cpu"))
        taken.append((time.perf_counter() - started) * GIB / size)
    return {"seconds_per_gib": sum(taken) / len(taken), "slowest": max(taken)}

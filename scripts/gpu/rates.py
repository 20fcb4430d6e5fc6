"""What the machine gives: the link, device memory, update kernels on the device and on the CPU, page-locking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gpu.measure import GIB, update_bytes
from offload.plan.rates import copy_rates, cpu_adamw_rates, step_seconds

LAYER = ((4096,), *((4096, 4096),) * 4, (4096,), *((11008, 4096),) * 2, (4096, 11008))
"""Shapes of one layer of Llama-2 7B."""

FORMATS = (("int8", "split"), ("int8", "split24"), ("int8", "stochastic"), ("bf16", "split"), ("fp32", "split"))
"""Of the packed AdamW: moments and master."""

LOCKED_GIB = 4
"""Page-locked for the measurement, a GiB at a time as the optimizer does."""


def measure_rates(device: str) -> dict[str, Any]:
    """Bytes per second of copies and updates, and parameters per second on the CPU."""
    size = GIB // 2 if device != "cpu" else 2**22
    return {**copy_rates(device, size), **update_rates(device), **cpu_rates(device)}


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


def cpu_rates(device: str) -> dict[str, float]:
    """Parameters per second of AdamW on all of the CPU's threads: torch's, and the packed one."""
    rates = cpu_adamw_rates(2**26 if device != "cpu" else 2**18)
    return {"cpu_adamw_parameters": rates["torch fused"], "cpu_packed_parameters": rates["packed int8 split"]}


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

"""Facts that a result depends on beside its configuration: versions, system, processor, accelerator, memory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform

GIB = 2**30

DISTRIBUTIONS = ("tune-offload", "torchtune", "torchao", "bitsandbytes", "transformers", "peft", "triton", "wandb")


def environment(device: str | None = None) -> dict[str, str | int | float]:
    """The facts by name; those that cannot be told are left out.

    Args:
        device: as in a configuration: ``auto``, ``cpu``, ``cuda:1``; None for ``auto``.
    """
    import psutil
    import torch

    facts: dict[str, str | int | float] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
    }
    for distribution in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[distribution] = importlib.metadata.version(distribution)
    if processor := _processor():
        facts["processor"] = processor
    facts["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts["host_memory_gib"] = round(psutil.virtual_memory().total / GIB, 1)
    kind, _, index = (device or "auto").partition(":")
    for module in (torch.cuda, torch.xpu):
        if kind in ("auto", module.__name__.rpartition(".")[2]) and module.is_available():
            properties = module.get_device_properties(int(index or 0))
            facts["device"] = properties.name
            facts["device_memory_gib"] = round(properties.total_memory / GIB, 1)
            break
    facts.setdefault("device", f"cpu, {torch.get_num_threads()} threads")
    return facts


def _processor() -> str:
    """The processor's name as its maker writes it; on Linux ``platform`` knows the architecture only."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

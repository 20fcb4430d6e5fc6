"""The update on a GPU: the Triton kernel, or where that cannot be used the reference, which gives the same bits.

Triton compiles a kernel when it is first launched, and even its own driver needs a C compiler then. So kernels are
compiled and tried when an optimizer is built: a step, or a hook of backward, is no place to wait or to fail.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from offload.optim import reference
from offload.optim.formats import Item, Kind

DEVICE_TYPES = ("cuda",)
"""Devices that the Triton kernel runs on; ROCm calls itself cuda too."""

_tried: defaultdict[torch.device, set[Kind]] = defaultdict(set)
_unusable: set[torch.device] = set()


def prepare(device: torch.device, kinds: Iterable[Kind]) -> bool:
    """Compile and try the kernel, once per device and kind; waits for the device.

    Args:
        device: that of the tensors, with its index.
        kinds: what is going to be updated there.

    Returns:
        Whether the kernel is used on the device. One warning says why it is not, and what to do.
    """
    if device.type == "meta":
        return False
    new = set(kinds) - _tried[device]
    if new and device not in _unusable:
        _tried[device] |= new
        if (problem := _problem(device, new)) is not None:
            _unusable.add(device)
            warnings.warn(
                f"the GPU kernel of offload.optim cannot be used on {device}: {problem} Updates there run on PyTorch's "
                "operations with the same results, but much slower.",
                stacklevel=2,
            )
    return device not in _unusable


def update(items: Sequence[Item], scale: Tensor | None = None) -> None:
    """Update every tensor of ``items`` in place, on the current stream and without waiting for the device.

    Args:
        items: tensors on one device.
        scale: 0-dim, on that device; a factor of all gradients, beside each item's own ``gscale``.
    """
    if prepare(items[0].param.device, {item.kind for item in items}):
        from offload.optim import triton_kernel

        triton_kernel.update(items, scale)
    else:
        reference.update(items, scale)


def _problem(device: torch.device, kinds: Iterable[Kind]) -> str | None:
    """In a sentence or two, why the kernel cannot be used and what to do about it; None where it can."""
    if device.type not in DEVICE_TYPES:
        return f"it runs on {' and '.join(DEVICE_TYPES)} devices (NVIDIA, ROCm)."
    try:
        from offload.optim import triton_kernel
    except ImportError as error:
        return f"{_in_words(error)}. It needs Triton: pip install triton, where there is a build."
    try:
        triton_kernel.prepare(device, kinds)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler, a driver or a launch may raise
        missing = missing_tools()
        advice = ""
        if missing:
            advice = (
                f" Triton compiles with {' and '.join(missing)}, which cannot be found: install a C compiler and "
                "Python's headers (apt-get install gcc python3-dev)."
            )
        return f"{_in_words(error)}.{advice}"
    return None


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".: ")


def missing_tools() -> list[str]:
    """Of what Triton compiles its driver with."""
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    missing = [] if any(map(shutil.which, compilers)) else [" or ".join(compilers)]
    if not (Path(sysconfig.get_config_var("INCLUDEPY")) / "Python.h").exists():
        missing.append("Python.h")
    return missing

"""Which device trains, in which precision, and the randomness of a run."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from offload.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def is_here(device: torch.device) -> bool:
    """Whether this machine has ``device``."""
    if device.type == "cpu":
        return True
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == device.type and (device.index or 0) < torch.accelerator.device_count()


def total_memory(device: torch.device) -> int:
    """Bytes of an accelerator of this machine, for all processes together; of one that torch was told to take a share
    of (``set_per_process_memory_fraction``), that."""
    module = torch.get_device_module(device)
    share = getattr(module, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return int(share * module.get_device_properties(device).total_memory)


def find_device(name: str, *, elsewhere: bool = False) -> tuple[torch.device, str]:
    """The device that ``name`` means here, and why, for the log.

    Args:
        name: ``auto`` (an accelerator if there is one, else the CPU), ``cpu``, ``cuda``, ``xpu``, or one of
            several as ``cuda:1``. ROCm's devices are called ``cuda``, as everywhere in PyTorch.
        elsewhere: the run will be on another machine; what this one lacks is no error.

    Raises:
        UserError: for a device that this machine does not have; training never falls back in silence.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        if found is None:
            return torch.device("cpu"), "device=auto: cpu, no accelerator was found"
        return torch.device(found.type, 0), f"device=auto: {found.type}, an accelerator was found"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device: got {name!r}, expected auto, cpu, cuda, xpu or cuda:<n>") from error
    if device.type == "cpu":
        return device, "device=cpu, as configured"
    if elsewhere and not is_here(device) and device.type in ("cuda", "xpu", "mps"):
        return device, f"device={name} is not available here: what depends on it was not checked"
    if found is None or found.type != device.type:
        here = "none is available" if found is None else f"this machine has {found.type}"
        built = f"torch {torch.__version__}"
        raise UserError(
            f"device: {name} is not available here ({here}; {built}); use device=cpu or device=auto, or install a "
            "torch built for your accelerator"
        )
    count = torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise UserError(f"device: {name} does not exist, this machine has {device.type}:0 to {device.type}:{count - 1}")
    return torch.device(device.type, device.index or 0), f"device={name}, as configured"


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """The parameters' dtype; UserError where the device cannot compute in it."""
    if (
        name == "bf16"
        and device.type == "cuda"
        and is_here(device)
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UserError(
            f"dtype: {torch.cuda.get_device_name(device)} has no bf16 arithmetic; use dtype=fp32 or a card of the "
            "Ampere generation or later"
        )
    return DTYPES[name]


def random_state(device: torch.device) -> dict[str, Any]:
    """Every generator's state that a training step can draw from."""
    legacy: Any = numpy.random.get_state()
    kind, keys, position, has_gauss, cached = legacy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what :func:`random_state` gave; a device's own state only on the same kind of device."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)

"""Peak memory of the device and of the host, in GiB (2**30 bytes).

======================================= ==========================================================
key                                     meaning
======================================= ==========================================================
``memory/device_peak_active_gib``       live tensors, including those whose last kernel is still
                                        queued: what the run cannot do without
``memory/device_peak_allocated_gib``    bytes handed out to live tensors
``memory/device_peak_reserved_gib``     what the caching allocator took from the driver: what has to
                                        fit on the card
``memory/host_rss_peak_gib``            largest resident set of this process since it started;
                                        page-locked memory counts towards it
``memory/host_pinned_gib``              page-locked host memory held by the optimizer now
======================================= ==========================================================

Of several processes these are the greatest; each key has a companion, ``…_min_gib``, the least.

The three device keys are peaks since the start of the run or since :func:`reset_peak`. On a CPU device
they are 0.0: every log line has the same keys on every device, and no device memory is used.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from offload.distributed.world import World

GIB = 2**30

# Names of torch's allocator statistics (torch.cuda.memory_stats), by the word used in our keys.
_DEVICE_STATISTICS = {
    "active": "active_bytes.all.peak",
    "allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
}


def peak_memory(device: torch.device | str, pinned_bytes: int = 0) -> dict[str, float]:
    """The memory metrics of one log line, in GiB.

    Costs some ten microseconds: one read of the allocator's counters and one small file of ``/proc``.
    Nothing is synchronised.

    Args:
        device: the device that trains; ``cpu`` has no device memory, its device keys are 0.0.
        pinned_bytes: page-locked host memory held now, in bytes (the optimizer's memory report knows).
    """
    statistics = device_statistics(torch.device(device))
    values = {
        f"memory/device_peak_{word}_gib": statistics.get(name, 0) / GIB for word, name in _DEVICE_STATISTICS.items()
    }
    values["memory/host_rss_peak_gib"] = host_peak_bytes() / GIB
    values["memory/host_pinned_gib"] = pinned_bytes / GIB
    return values


def peaks_of_all(mine: dict[str, float], world: World) -> dict[str, float]:
    """The memory metrics of all processes: the greatest, and of several the least too."""
    if world.size == 1:
        return mine
    values = world.greatest([*mine.values(), *(-value for value in mine.values())])
    names = [*mine, *(f"{name.removesuffix('_gib')}_min_gib" for name in mine)]
    return {name: abs(value) for name, value in zip(names, values, strict=True)}


def device_statistics(device: torch.device) -> dict[str, Any]:
    """The caching allocator's counters of a device (``torch.cuda.memory_stats``), empty for the CPU."""
    module = _device_module(device)
    return {} if module is None else dict(module.memory_stats(device))


def reset_peak(device: torch.device | str) -> None:
    """Starts the device's peaks anew from what is in use now. The host's peak cannot be reset.

    A no-op on the CPU.
    """
    device = torch.device(device)
    module = _device_module(device)
    if module is not None:
        module.reset_peak_memory_stats(device)


def _device_module(device: torch.device) -> Any:
    """``torch.cuda`` or ``torch.xpu``; None where there is no caching allocator to ask."""
    if device.type == "cpu":
        return None
    module = getattr(torch, device.type, None)
    # Other backends (mps) count memory in their own words or not at all.
    return module if hasattr(module, "memory_stats") else None


def host_peak_bytes() -> int:
    """Largest resident set of this process since it started, in bytes.

    Linux tells it as ``VmHWM`` in ``/proc/self/status`` (proc_pid_status(5)). ``getrusage`` is the second
    choice, because its ``ru_maxrss`` survives ``exec``: a small process started by a big one would report
    the big one's peak (getrusage(2) and the kernel's ``setmax_mm_hiwater_rss`` in ``exec_mmap``).
    """
    try:
        with open("/proc/self/status", "rb") as status:
            for line in status:
                if line.startswith(b"VmHWM:"):
                    return int(line.split()[1]) * 1024  # "VmHWM:   123456 kB", where kB means KiB
    except OSError:
        pass
    return _getrusage_peak_bytes()


def _getrusage_peak_bytes() -> int:
    """``ru_maxrss`` of this process in bytes; 0 on systems without ``getrusage`` (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere

"""What is installed, what of it does not fit together, and what is missing; each problem with its way out."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

OURS = "tune-offload"


def mismatches(name: str = OURS) -> list[str]:
    """Requirements of a distribution and of all that it needs which what is installed does not meet."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found, seen, todo = [], {canonicalize_name(name)}, [name]
    while todo:
        here = todo.pop()
        try:
            distribution = importlib.metadata.distribution(here)
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in distribution.requires or ():
            needed = Requirement(line)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            key = canonicalize_name(needed.name)
            try:
                version = importlib.metadata.version(needed.name)
            except importlib.metadata.PackageNotFoundError:
                found.append(f"{here} needs {needed.name}{needed.specifier}, which is not installed: pip install "
                             f'"{needed.name}{needed.specifier}"')  # fmt: skip
                continue
            if not needed.specifier.contains(version, prereleases=True):
                found.append(f"{here} needs {needed.name}{needed.specifier}, {version} is installed: pip install "
                             f'"{needed.name}{needed.specifier}"')  # fmt: skip
            if key not in seen:
                seen.add(key)
                todo.append(needed.name)
    return sorted(found)


def problems(device: Any, nvidia: list[dict[str, str]]) -> Iterator[str]:
    """What hinders training here, each with its way out.

    Args:
        device: the ``torch.device`` that ``device=auto`` means.
        nvidia: of :func:`offload.metrics.this_machine.cards`.
    """
    import torch

    from offload.optim import cpu, gpu

    yield from mismatches()
    if nvidia and device.type == "cpu":
        built = "is a build without CUDA" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        yield (
            f"{nvidia[0]['name']} is here, and torch cannot use it: torch {torch.__version__} {built}, the driver is "
            f"{nvidia[0]['driver']}: pip install --force-reinstall torch, or a newer driver"
        )
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield f"{torch.cuda.get_device_name(device)} has no bf16 arithmetic, which the configs use: dtype=fp32"
    for card in nvidia:
        if card["pcie_lanes"].isdigit() and card["pcie_lanes_most"].isdigit():
            lanes, most = int(card["pcie_lanes"]), int(card["pcie_lanes_most"])
            if lanes < most:
                yield (
                    f"{card['name']} uses {lanes} of its {most} PCIe lanes, and offloading lives on them: another slot "
                    "of the board may have more"
                )
    if not cpu.instruction_sets():
        yield (
            "the CPU kernel of offload.optim is missing, so updates on the CPU are slow: install gcc or clang and "
            "`pip install --force-reinstall --no-deps tune-offload` (in a checkout: python hatch_build.py)"
        )
    if device.type in gpu.DEVICE_TYPES:
        missing = gpu.missing_tools()
        if missing:
            yield (
                f"Triton compiles the GPU's kernels with {' and '.join(missing)}, which cannot be found: install a C "
                "compiler and Python's headers (apt-get install gcc python3-dev)"
            )

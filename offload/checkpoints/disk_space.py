"""The disk that a run's checkpoints will take, known before its first step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.forecast import kind_of, probe_shape
from offload.engine.shards import is_distributed
from offload.engine.units import components
from offload.errors import UserError

FORESEEABLE = ("torch.optim.", "torchao.optim.", "offload.")
"""Packages whose optimizers may be tried on a small parameter."""

Named = list[tuple[str, nn.Parameter]]


def free_bytes(folder: Path) -> int | None:
    """What may still be written in ``folder``; None where that cannot be told."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def size(nbytes: int) -> str:
    """``1.5 MiB``, ``37.80 GiB``."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def state_bytes(optimizer: torch.optim.Optimizer, build: Callable[[Named], torch.optim.Optimizer]) -> int | None:
    """Bytes of an optimizer's state in a checkpoint, before its first step too.

    Args:
        optimizer: if it has states already, they are counted.
        build: makes one of its kind, for small parameters on the CPU that are stepped once. Each state is taken to
            grow with its parameter; where it does not (Adafactor's rows and columns) the result is a rough one.

    Returns:
        None where it does not run on the CPU.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if len(optimizer.state):
        return _nbytes(optimizer.state_dict()["state"])
    density: dict[Any, float] = {}
    for param in params:
        kind = dim, dtype, is_small, _ = kind_of(param)
        if kind in density:
            continue
        probe = nn.Parameter(torch.zeros(probe_shape(max(dim, 1), is_small), dtype=dtype))
        probe.grad = torch.zeros_like(probe)
        try:
            with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices=[]):
                alone = build([("probe", probe)])
                alone.step()
                density[kind] = _nbytes(alone.state_dict()["state"]) / probe.numel()
        except Exception:
            return None
    return int(sum(param.numel() * density[kind_of(param)] for param in params))


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        if is_distributed(value):
            return value.numel() * value.element_size()
        return sum(part.numel() * part.element_size() for part in components(value))
    if isinstance(value, Mapping):
        return sum(_nbytes(item) for item in value.values())
    return sum(_nbytes(item) for item in value) if isinstance(value, (list, tuple)) else 0


def num_saves(*, every: int | None, total_steps: int, done_steps: int, epochs_left: int) -> int:
    """How many checkpoints a run will save: one at its end, and one every so many steps or, for None, each epoch."""
    if every is None:
        return epochs_left
    return total_steps // every - done_steps // every + (total_steps % every != 0)


def peak_bytes(one: int, count: int, keep: int | None, present: Iterable[int]) -> int:
    """The most that ``count`` more checkpoints will take beyond what is taken now.

    Args:
        one: bytes of each.
        count: how many will be saved.
        keep: ``keep_last_n``; one more is there while the newest is written.
        present: bytes of each checkpoint that is there now, oldest first.
    """
    if keep is None:
        return one * count
    old = list(present)
    peak = 0
    for number in range(1, min(count, keep + 1) + 1):
        left = max(0, min(len(old), keep - (number - 1)))
        peak = max(peak, number * one - sum(old[: len(old) - left] if number > 1 else ()))
    return peak


def plan(
    folder: Path, *, weights: int, states: int | None, count: int, keep: int | None, present: list[int]
) -> list[str]:
    """What to tell at the start of a run: the size of its checkpoints, and a warning if they will not fit.

    Raises:
        UserError: if not even one fits.
    """
    free = free_bytes(folder)
    one = weights + (states or 0)
    about = "at least" if states is None else "about"
    peak = peak_bytes(one, count, keep, present)
    room = "" if free is None else f", {size(free)} are free"
    kept = "" if keep is None or count <= keep else f" ({keep} are kept)"
    line = f"checkpoints: {count} of {about} {size(one)} each{kept}, {about} {size(peak)} of disk at most{room}"
    if free is None or free >= peak:
        return [line]
    if free < one:
        raise UserError(
            f"output_dir: a checkpoint of this run takes {about} {size(one)} and {size(free)} are free in {folder}: "
            "free some space, or choose another output_dir"
        )
    way_out = (
        "set keep_last_n=1, raise save_every_n_steps, free space" if keep is None else "lower keep_last_n, free space"
    )
    if keep == 1:
        way_out = "free space for two (the newer is written before the older is deleted)"
    return [
        line,
        f"warning: the disk of {folder} will be full after {_fitting(one, count, keep, present, free)} of {count} "
        f"checkpoints, and the run will stop there: {way_out}, or choose another output_dir",
    ]


def _fitting(one: int, count: int, keep: int | None, present: list[int], free: int) -> int:
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak_bytes(one, middle, keep, present) <= free else (low, middle - 1)
    return low

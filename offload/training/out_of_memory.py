"""A run that ran out of memory: of which kind, while it did what, and how to have room to think about it."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from offload.engine.units import clean_name
from offload.errors import first_line, is_short_of_host_memory
from offload.host_memory import kernel_killed

PHASES = {
    "setup_run": "while the run was set up",
    "setup_data": "while the data were read",
    "prepare_model": "while the model was prepared",
    "_setup_model": "while the model was loaded",
    "setup_optimizer": "while the optimizer was set up",
    "setup_reporting": "while the logs were set up",
    "forward_backward": "in forward",
    "clip_gradients": "while gradients were clipped",
    "evaluate": "while it was evaluated",
    "save_checkpoint": "while a checkpoint was saved",
}
"""What a run does, by the function that does it; the innermost that is found tells."""


@dataclass(frozen=True)
class Shortage:
    """Memory that ran out.

    Attributes:
        of_device: of the accelerator, and not of the host.
        where: what the run was doing.
        said: by who could not allocate.
    """

    of_device: bool
    where: str
    said: str

    def __str__(self) -> str:
        kind = "device" if self.of_device else "host"
        return f"out of {kind} memory {self.where}".rstrip() + (f" ({self.said})" if self.said else "")


def shortage(error: BaseException, recipe: object) -> Shortage | None:
    """What an error tells of memory that ran out; None for any other error.

    Args:
        error: of the run.
        recipe: with ``global_step`` and ``model`` as far as they are there.
    """
    text = str(error)
    is_ours = isinstance(error, (MemoryError, RuntimeError)) and is_short_of_host_memory(error)
    if isinstance(error, torch.OutOfMemoryError):
        return Shortage(True, _where(error, recipe), first_line(error))
    if not is_ours:
        return None
    asked = re.search(r"you tried to allocate (\d+) bytes", text)
    said = f"tried to allocate {int(asked[1]) / 2**20:,.1f} MiB" if asked else first_line(error)
    return Shortage(False, _where(error, recipe), "" if said == type(error).__name__ else said)


def _frames(error: BaseException) -> Iterator[FrameType]:
    """From the outermost to the one that raised."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame


def _where(error: BaseException, recipe: object) -> str:
    model = getattr(recipe, "model", None)
    names = {id(module): name for name, module in model.named_modules()} if isinstance(model, nn.Module) else {}
    phase = module = ""
    for frame in _frames(error):
        function, this = frame.f_code.co_name, frame.f_locals.get("self")
        phase = PHASES.get(function, phase)
        if isinstance(this, nn.Module):
            module = names.get(id(this), "") or module
        elif function == "backward" and phase == PHASES["forward_backward"]:
            phase, module = "in backward", ""
        elif function == "step" and isinstance(this, torch.optim.Optimizer):
            phase = "in the optimizer's update"
    step = getattr(recipe, "global_step", 0)
    # A step that was undone is no longer counted.
    step += bool(getattr(recipe, "is_between_steps", True))
    at = f" of step {step}" if phase.startswith("in ") else ""
    return phase + at + (f", {clean_name(module)}" if module else "")


def release(recipe: object, error: BaseException) -> None:
    """Let go of all that a failed run holds: its model, its optimizer, and what the error's frames keep alive."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    state: dict[str, Any] = vars(recipe)
    state.clear()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


SNAPSHOT = "memory_snapshot.pickle"
EVENTS = 100_000
"""Allocations, and where they come from, that are kept for a snapshot: some tens of steps."""


def record_for_snapshot(device: torch.device) -> bool:
    """Begin to record a device's allocations; False where it cannot."""
    memory = _recorder(device)
    if memory is None:
        return False
    memory._record_memory_history(max_entries=EVENTS)
    return True


def write_snapshot(device: torch.device, folder: Path) -> Path | None:
    """What is allocated on a device, and what was of late, as https://pytorch.org/memory_viz opens it.

    Args:
        device: that :func:`record_for_snapshot` records.
        folder: is there.

    Returns:
        the file; None where the device cannot, or the disk.
    """
    memory, path = _recorder(device), folder / SNAPSHOT
    if memory is None:
        return None
    try:
        memory._dump_snapshot(str(path))
    except OSError:
        return None
    return path


def _recorder(device: torch.device) -> Any:
    return torch.cuda.memory if device.type == "cuda" else None


def tell_of_a_kill(record: Mapping[str, Any], kills: int | None) -> str | None:
    """A line about an earlier run that the kernel ended for want of memory; None where nothing says so.

    Args:
        record: its run.json, as it left it.
        kills: how often the kernel has done that in this control group, see :func:`offload.host_memory.oom_kills`.
    """
    before = record.get("oom_kills")
    if record.get("status") != "running" or not isinstance(before, int) or not kernel_killed(before, kills):
        return None
    assert kills is not None
    processes = "a process" if kills - before == 1 else f"{kills - before} processes"
    return (
        f"the run before in this folder did not end: since it began, the kernel killed {processes} here for want of "
        "memory"
    )

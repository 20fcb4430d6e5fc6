"""Traces of a few steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import DictConfig
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity

from offload.config.loading import instantiate
from offload.distributed.world import current
from offload.errors import UserError
from offload.metrics.lines import say

WAIT, WARM_UP, ACTIVE = 5, 3, 3
"""Steps of a schedule. The first steps make states and settle; of three recorded ones the median is a whole step's."""


def torch_profiler(
    output_dir: str,
    enabled: bool = True,
    cpu: bool = True,
    cuda: bool = True,
    xpu: bool = True,
    profile_memory: bool = False,
    with_stack: bool = False,
    record_shapes: bool = True,
    with_flops: bool = False,
    wait_steps: int = WAIT,
    warmup_steps: int = WARM_UP,
    active_steps: int = ACTIVE,
    num_cycles: int = 1,
) -> torch.profiler.profile | None:
    """:class:`torch.profiler.profile`, stepped by a recipe after each optimizer step; None where it is not enabled.

    After each cycle, or where the run ends in the middle of one, ``output_dir/step_<n>`` gets a trace for Perfetto and
    ``tune compare``, ``trace.json.gz``, and the times by operation, ``operations.txt``. Of several processes each
    writes its own, ``trace_rank<r>.json.gz``. What cannot be written is told, and training goes on.

    Args:
        output_dir: is made.
        enabled: whether to record at all.
        cpu: record what the CPU does, which all names of units are part of.
        cuda: record what a GPU of CUDA or ROCm does, where there is one.
        xpu: record what an XPU does, where there is one.
        profile_memory: record each allocation.
        with_stack: record the source line of each operation.
        record_shapes: record the shapes of each operation's inputs.
        with_flops: estimate the operations of matrix products and convolutions.
        wait_steps: optimizer steps at the beginning of a cycle that are let pass.
        warmup_steps: recorded and thrown away.
        active_steps: recorded.
        num_cycles: how often; 0 until the run ends.

    Raises:
        UserError: a number of steps is out of range, or nothing is to be recorded.
    """
    if not enabled:
        return None
    for key, value, least in (
        ("wait_steps", wait_steps, 0),
        ("warmup_steps", warmup_steps, 0),
        ("active_steps", active_steps, 1),
        ("num_cycles", num_cycles, 0),
    ):
        if value < least:
            raise UserError(f"{key}: got {value}, expected {least} or more")
    wanted = {ProfilerActivity.CPU: cpu, ProfilerActivity.CUDA: cuda, ProfilerActivity.XPU: xpu}
    activities = [each for each in torch.profiler.supported_activities() if wanted.get(each, False)]
    if not activities:
        raise UserError("cpu: got False, and nothing else here can be recorded; set it to True")

    def write(profiler: torch.profiler.profile) -> None:
        world = current()
        of_rank = "" if world.size == 1 else f"_rank{world.rank}"
        folder = Path(output_dir) / f"step_{profiler.step_num}"
        trace = folder / f"trace{of_rank}.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            by_operation = profiler.key_averages(group_by_input_shape=record_shapes)
            on_device = any(each.device_time_total for each in by_operation)
            order = "self_device_time_total" if on_device else "self_cpu_time_total"
            table = by_operation.table(sort_by=order, row_limit=50)
            (folder / f"operations{of_rank}.txt").write_text(table, encoding="utf-8")
        except (OSError, RuntimeError) as error:  # the latter of Kineto, which writes to a temporary file first
            say(f"warning: profiler: the trace was not written to {folder}: {error}", stream=sys.stderr)
        else:
            say(f"profiler: {trace}")

    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=wait_steps, warmup=warmup_steps, active=active_steps, repeat=num_cycles),
        on_trace_ready=write,
        profile_memory=profile_memory,
        with_stack=with_stack,
        record_shapes=record_shapes,
        with_flops=with_flops,
    )


def check_profiler(section: DictConfig) -> None:
    """Raises UserError, before anything is loaded, where :func:`torch_profiler` would on this machine."""
    own = f"{torch_profiler.__module__}.{torch_profiler.__qualname__}"
    if section.get("enabled", False) and section["_component_"] == own:
        instantiate(section)  # nothing is recorded until it is started


def build_profiler(section: DictConfig | None, steps: int) -> Any:
    """The ``profiler`` component, or None where there is none or it is not enabled.

    It records all threads: the optimizer's own do most of its work. A schedule that is longer than the run is cut.

    Args:
        section: of the configuration.
        steps: that the run will take.
    """
    if section is None or not section.get("enabled", False):
        return None
    made = instantiate(section, **_within(section, steps))
    profiler = made
    if isinstance(made, tuple):  # torchtune's comes with its settings
        profiler = made[0]
        if isinstance(profiler, torch.profiler.profile) and profiler.on_trace_ready is not None:
            profiler.on_trace_ready = _without_waiting(profiler.on_trace_ready)
    if isinstance(profiler, torch.profiler.profile) and profiler.experimental_config is None:
        # Otherwise it records the thread that started it, and what autograd does for that one.
        profiler.experimental_config = _ExperimentalConfig(profile_all_threads=True)
    return profiler


def _without_waiting(write: Callable[[torch.profiler.profile], object]) -> Callable[[torch.profiler.profile], None]:
    """torchtune's handler of traces, without its barrier: a process that fails in the middle of a trace would wait for
    the others, who are in an exchange of the same group, and the others for one that has died."""

    def alone(profiler: torch.profiler.profile) -> None:
        rank = current().rank
        with mock.patch("torchtune.training._profiler.get_world_size_and_rank", lambda: (1, rank)):
            write(profiler)

    return alone


def _within(section: DictConfig, steps: int) -> dict[str, Any]:
    """The schedule where the component's section has one that does not fit the run: it lets fewer steps pass, and
    records fewer."""
    keys = {"wait_steps": WAIT, "warmup_steps": WARM_UP, "active_steps": ACTIVE}
    wait, warm_up, active = (section.get(key) if section.get(key) is not None else keys[key] for key in keys)
    if not all(isinstance(each, int) and each >= 0 for each in (wait, warm_up, active)):
        return {}  # for the component to refuse
    if wait + warm_up + active <= steps or steps < 1 or not active:
        return {}
    active = min(active, max(1, steps - 1))
    warm_up = min(warm_up, steps - active)
    wait = min(wait, steps - active - warm_up)
    length = f"{steps} steps" if steps > 1 else "one step"
    say(f"profiler: the run has {length}; it lets {wait} pass, warms up in {warm_up} and records {active}")
    return dict(zip(keys, (wait, warm_up, active), strict=True))

"""Traces of a few steps."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity


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
    wait_steps: int = 5,
    warmup_steps: int = 3,
    active_steps: int = 2,
    num_cycles: int = 1,
) -> torch.profiler.profile | None:
    """:class:`torch.profiler.profile`, stepped by a recipe after each optimizer step; None where it is not enabled.

    After each cycle ``output_dir/step_<n>`` gets a trace for Perfetto or chrome://tracing, ``trace.json.gz``, and the
    times by operation, ``operations.txt``.

    Args:
        output_dir: is made.
        enabled: whether to record at all.
        cpu: record what the CPU does.
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
    """
    if not enabled:
        return None
    wanted = {ProfilerActivity.CPU: cpu, ProfilerActivity.CUDA: cuda, ProfilerActivity.XPU: xpu}

    def write(profiler: torch.profiler.profile) -> None:
        folder = Path(output_dir) / f"step_{profiler.step_num}"
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        by_operation = profiler.key_averages(group_by_input_shape=record_shapes)
        on_device = any(each.device_time_total for each in by_operation)
        order = "self_device_time_total" if on_device else "self_cpu_time_total"
        (folder / "operations.txt").write_text(by_operation.table(sort_by=order, row_limit=50), encoding="utf-8")

    return torch.profiler.profile(
        activities=[each for each in torch.profiler.supported_activities() if wanted.get(each, False)],
        schedule=torch.profiler.schedule(wait=wait_steps, warmup=warmup_steps, active=active_steps, repeat=num_cycles),
        on_trace_ready=write,
        profile_memory=profile_memory,
        with_stack=with_stack,
        record_shapes=record_shapes,
        with_flops=with_flops,
    )

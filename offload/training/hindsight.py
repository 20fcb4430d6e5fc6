"""What the planner would have said of a run, beside what the run measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from offload.device import total_memory
from offload.distributed import network
from offload.distributed.world import World
from offload.plan.budget import CONTEXT, HOST, LOCKED, Sharding
from offload.plan.prediction import COMPUTE
from offload.training.budgeting import Planner
from offload.training.placement import NOTHING_KNOWN, Room, placed
from offload.training.predicting import Predictor
from offload.training.settings import TrainSettings

GIB = 2**30

LEAST_SECONDS = 60.0
"""Of training, below which a run is only compared when it is asked for: planning takes some seconds itself."""


@dataclass(frozen=True)
class Expected:
    """What a run should have taken.

    Attributes:
        device_gib: peak of what PyTorch's allocator holds; None on the CPU.
        host_gib: peak of the process.
        tokens_per_second: None where nothing is known of this machine's rates.
        exposed_seconds: of a step, in which forward and backward wait for the optimizer; likewise.
        bottleneck: what bounds a step, of :mod:`offload.plan.prediction`; likewise.
        note: what the speed rests on between hosts, or why it is not predicted.
    """

    device_gib: float | None
    host_gib: float
    tokens_per_second: float | None = None
    exposed_seconds: float | None = None
    bottleneck: str | None = None
    note: str = ""

    def values(self) -> dict[str, float]:
        """For the summary of the metrics."""
        found = {
            "predicted_device_peak_reserved_gib": self.device_gib,
            "predicted_host_rss_peak_gib": self.host_gib,
            "predicted_tokens_per_second": self.tokens_per_second,
            "predicted_exposed_seconds": self.exposed_seconds,
        }
        return {name: value for name, value in found.items() if value is not None}

    def lines(self, measured: Mapping[str, float]) -> list[tuple[str, str]]:
        """For the summary on the terminal, as (label, text).

        Args:
            measured: of :mod:`offload.metrics.run_summary`.
        """
        parts = []
        if self.device_gib is not None:
            parts.append(
                _beside(self.device_gib, measured.get("device_peak_reserved_gib"), "GiB reserved of the device")
            )
        parts.append(_beside(self.host_gib, measured.get("host_rss_peak_gib"), "GiB of the host"))
        if self.tokens_per_second is not None:
            parts.append(_beside(self.tokens_per_second, measured.get("tokens_per_second"), "tok/s"))
        if self.note:
            parts.append(self.note)
        lines = [("predicted", "; ".join(parts))]
        if self.exposed_seconds is not None:
            why = "nothing: the optimizer is hidden"
            if self.bottleneck != COMPUTE:
                why = f"{self.exposed_seconds:.2f} s of each step, in which the device waits for: {self.bottleneck}"
            at_step = measured.get("seconds_optimizer", 0.0) / max(1, measured.get("steps", 1))
            lines.append(("exposed", f"{why} (predicted); {at_step:.2f} s of each in the optimizer's step (measured)"))
        return lines


def expect(
    settings: TrainSettings,
    device: torch.device,
    dtype: torch.dtype,
    *,
    adapts: bool,
    memory_before: int,
    sharding: Sharding,
    world: World,
    tokens_per_sequence: float,
) -> Expected:
    """Plan a run that has been.

    Args:
        settings: of the run.
        device: that trained.
        dtype: of the parameters.
        adapts: an adapter trained.
        memory_before: bytes of the host that the process held before its model.
        sharding: of the model over its processes.
        world: of these.
        tokens_per_sequence: of its batches, on average: time follows it, memory follows the longest.

    Raises:
        UserError: nothing tells the model's sizes, or it cannot be traced.
    """
    planner = Planner(memory_before, adapts=adapts)
    plan = planner.plan(settings, device, dtype, sharding=sharding)
    room = NOTHING_KNOWN if device.type == "cpu" else Room(total_memory(device), None)
    as_it_was = dataclasses.replace(plan, length=max(1, min(plan.length, round(tokens_per_sequence))))
    if world.size == 1:
        here = Predictor(planner).predict_here(settings, as_it_was, device, dtype, room)
    else:
        here = Predictor(planner).predict_ranks_here(
            settings, as_it_was, device, sharding, dtype, room, processes=world.size, hosts=world.hosts
        )
    budget = (plan if here is None else placed(plan, here[0], settings.optimizer, dtype.itemsize)).budget
    device_gib = None if device.type == "cpu" else (budget.device - CONTEXT) / GIB
    host_gib = budget.of(LOCKED, HOST) / GIB
    note = "" if world.hosts == 1 or device.type == "cpu" else _between(network.speed())
    if here is None:
        return Expected(device_gib, host_gib, note=note)
    found, _ = here
    return Expected(device_gib, host_gib, found.tokens_per_second, found.exposed_seconds, found.bottleneck, note)


def _between(speed: float | None) -> str:
    if speed is None:
        return "no speed, since nothing here tells that of the network between the hosts"
    return f"with {speed * 8 / 1e9:.4g} Gbit/s between the hosts"


def _beside(predicted: float, measured: float | None, unit: str) -> str:
    def text(value: float) -> str:
        return f"{value:,.0f}" if unit == "tok/s" else f"{value:.2f}"

    if not measured:
        return f"{text(predicted)} {unit}"
    return f"{text(predicted)} {unit}, measured {text(measured)} ({predicted / measured - 1:+.0%})"

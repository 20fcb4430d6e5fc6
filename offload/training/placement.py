"""Where strategy ``auto`` would put a run's states: what it is told of the machine, and the run's budget with them.

It decides itself, in the replay of :func:`offload.plan.prediction.predict`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.auto import HOST_SHARE, SPARE
from offload.base_class import base_class_of, is_same_everywhere
from offload.machinery import STAGING_SHARE
from offload.metrics.lines import say
from offload.metrics.this_machine import speeds_here
from offload.plan.budget import DEVICE, IN_FLIGHT, LOCKED, STATES, Budget, Item
from offload.plan.prediction import Prediction, Settings, share_of_cpu
from offload.plan.workload import Machine
from offload.training.budgeting import Plan
from offload.training.optimizer import paths_of

GIB = 2**30


@dataclass(frozen=True)
class Room:
    """What a machine has for a run.

    Attributes:
        device: bytes of the accelerator, for all that is on it; None where that is not known.
        host: bytes of the host; None where that is not known.
    """

    device: int | None = None
    host: int | None = None


NOTHING_KNOWN = Room()


def is_auto(section: Mapping[str, Any]) -> bool:
    """Whether an ``optimizer`` section leaves the placement of states to the engine."""
    is_ours = str(section["_component_"]).rpartition(".")[2] == "OffloadOptimizer"
    return is_ours and section.get("strategy") == "auto"


def kind_of_update(section: Mapping[str, Any]) -> str:
    """What the rates of :func:`offload.plan.rates.cpu_adamw_rates` call the update of an optimizer on the CPU."""
    if section.get("optimizer_class") != "offload.optim.AdamW":
        return "torch fused"
    return f"packed {section.get('state_dtype', 'int8')} {section.get('master', 'split')}"


def measured_speeds(section: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments for an optimizer beside its section: with ``auto``, the speeds that were measured on this machine, so
    that it need not measure them; none otherwise.

    Args:
        section: of the optimizer.
        device: that trains.
        dtype: of the parameters; the CPU's update was measured in bf16.
    """
    if not is_auto(section) or device.type == "cpu" or dtype != torch.bfloat16:
        return {}
    here = speeds_here(device, kind_of_update(section))
    if here is None:
        return {}
    say(f"strategy=auto: link and CPU are as fast as {here[1]}")
    return {"speeds": here[0]}


def for_auto(
    settings: Settings, section: Mapping[str, Any], plan: Plan, room: Room, machine: Machine, itemsize: int
) -> Settings:
    """With what ``auto`` would find on a machine.

    Args:
        settings: when the optimizer works.
        section: of the optimizer.
        plan: of the run, with all states on the host.
        room: of the machine.
        machine: rates.
        itemsize: bytes of a number of a parameter.
    """
    settings = dataclasses.replace(settings, room=left_over(section, plan, room))
    if not all(is_same_everywhere(base_class_of(path)) for path in paths_of(section)):
        return settings
    helped = dataclasses.replace(settings, cpu_may_help=True)
    copies = share_of_cpu(itemsize, machine, helped) * plan.trained * itemsize
    free = None if room.host is None else room.host - plan.budget.host
    return settings if free is not None and copies > HOST_SHARE * free else helped


def left_over(section: Mapping[str, Any], plan: Plan, room: Room) -> int:
    """Bytes of the device that ``auto`` has for states.

    Args:
        section: of the optimizer.
        plan: of the run, with all states on the host.
        room: of the machine.
    """
    if room.device is None:
        return 0
    given = section.get("device_memory_gib")
    limit = room.device if given is None else min(room.device, int(float(given) * GIB))
    return max(0, min(_states(plan), limit - plan.budget.device - int(SPARE * room.device)))


def placed(plan: Plan, found: Prediction, section: Mapping[str, Any], itemsize: int) -> Plan:
    """The plan of a run whose states lie where ``auto`` puts them; host memory stays reserved for all of them.

    Args:
        plan: with all states on the host.
        found: its step, with the placement; any other strategy's leaves the plan as it is.
        section: of the optimizer.
        itemsize: bytes of a number of a parameter.
    """
    if not found.placed:
        return plan
    items = list(plan.budget.items)
    resident = int(found.placed.get("resident", 0.0) * _states(plan))
    if found.placed.get("resident", 0.0) > 1 - 1e-9:  # the staging ring's memory is theirs
        ring = int(STAGING_SHARE * float(section.get("in_flight_gib", 1.0)) * GIB)
        items = [
            dataclasses.replace(item, nbytes=max(0, item.nbytes - ring)) if item.name == IN_FLIGHT else item
            for item in items
        ]
    last = max(index for index, item in enumerate(items) if item.place == DEVICE)
    items.insert(last + 1, Item(DEVICE, f"{STATES}, by auto", resident, "as many as there is room for"))
    copies = int(found.reserved * plan.trained * itemsize)
    items.append(Item(LOCKED, "copies of the weights", copies, "of those that the CPU may update"))
    budget = Budget(tuple(item for item in items if item.nbytes))
    return dataclasses.replace(plan, budget=budget)


def told(plan: Plan, found: Prediction) -> list[str]:
    """What ``auto`` chooses and why, in two lines; none for another strategy.

    Args:
        plan: with all states on the host.
        found: its step.
    """
    if not found.placed:
        return []
    does = {"resident": "rest on the GPU", "stream": "stream", "host": "are updated by the CPU"}
    total = _states(plan) / GIB
    parts = [
        f"{share * total:.2f} GiB ({share:.0%}) {does[way]}" for way, share in found.placed.items() if share > 0.0005
    ]
    resident, host = found.placed.get("resident", 0.0), found.placed.get("host", 0.0)
    why = "the GPU has room for no more, and what rests there crosses no link"
    if resident > 1 - 1e-9:
        why = "the GPU has room for all of them"
    elif resident == 0.0:
        why = "the GPU has no room for any"
    if host:
        why += "; the CPU works beside the link, which a step would wait for"
    elif found.reserved:
        why += "; with the CPU's help no step is faster"
    return [f"auto: of the optimizer's states {', '.join(parts)}", f"  since {why}"]


def _states(plan: Plan) -> int:
    """Bytes of those that can move."""
    return sum(item.nbytes for item in plan.budget.items if item.place == LOCKED and item.name == STATES)

"""The machine that this process runs on: what its profile is kept under, and the rates that predictions use."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import torch

from offload.metrics.environment import environment
from offload.placing import Speeds
from offload.plan.machines import card_named, machine_of_card, machine_of_rates
from offload.plan.profile import Profile, origin, read_profile
from offload.plan.workload import Machine

SMI = {
    "name": "name",
    "driver": "driver_version",
    "pcie_generation": "pcie.link.gen.current",
    "pcie_generation_most": "pcie.link.gen.max",
    "pcie_lanes": "pcie.link.width.current",
    "pcie_lanes_most": "pcie.link.width.max",
    "power_limit": "power.limit",
}
"""What ``nvidia-smi --query-gpu`` calls what is told of a card."""


def cards() -> list[dict[str, str]]:
    """NVIDIA's cards, driver and link as ``nvidia-smi`` tells them, whatever torch can use; nothing is changed."""
    query = ["nvidia-smi", f"--query-gpu={','.join(SMI.values())}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return [dict(zip(SMI, line.split(", "), strict=True)) for line in answer.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def machine_of(device: Any, nvidia: list[dict[str, str]]) -> dict[str, Any]:
    """What a profile of this machine holds for (:class:`offload.plan.profile.Profile`)."""
    facts = environment(str(device))
    known = {key: facts.get(key) for key in ("processor", "cores", "device", "host_memory_gib", "torch")}
    return {**known, "driver": nvidia[0]["driver"] if nvidia and device.type == "cuda" else None}


def profile_here(device: torch.device) -> Profile | None:
    """What ``tune doctor`` measured on this machine with this device; None where it has not."""
    return read_profile(machine_of(device, cards() if device.type == "cuda" else []))


def machine_here(device: torch.device, *, fp32: bool = False, cards: int = 1) -> tuple[Machine, str] | None:
    """The rates of an accelerator of this machine, and where they are from in words: as measured, or those of the
    card's row in :mod:`offload.plan.cards`. None where neither is there, and for a CPU (see :func:`costs_here`).

    Args:
        device: that trains.
        fp32: products are in fp32, not bf16.
        cards: that train together.
    """
    if device.type == "cpu":
        return None
    name = torch.get_device_module(device).get_device_name(device)
    card, profile = card_named(name), profile_here(device)
    if profile is not None and not fp32:
        return machine_of_rates(name, profile.rates, card), f"on rates that {origin(profile)}"
    if card is None:
        return None
    machine = machine_of_card(card, fp32=fp32, cards=cards)
    memory = f"{machine.host / 1e9:.0f} GB/s of host memory assumed (`tune doctor` measures)"
    return machine, f"from the data sheet of {card.name} and published runs, {memory}"


def speeds_here(device: torch.device, kind: str) -> tuple[Speeds, str] | None:
    """What ``tune doctor`` measured of what strategy ``auto`` decides by, and when, in words; None where it has not.

    Args:
        device: an accelerator that trains.
        kind: of the update on the CPU, as :func:`offload.plan.rates.cpu_adamw_rates` calls it.
    """
    profile = profile_here(device)
    if profile is None or "each_of_both" not in profile.rates or kind not in profile.rates.get("cpu_adamw", {}):
        return None
    machine = machine_of_rates("", profile.rates, None)
    speeds = Speeds(machine.up, machine.down, float(profile.rates["cpu_adamw"][kind]), machine.shared)
    return speeds, origin(profile)


def pageable_share(device: torch.device) -> float:
    """Of the link's rate, what copies from and to pageable memory reach: as ``tune doctor`` measured, or a half."""
    profile = profile_here(device)
    if profile is None or "pageable_up" not in profile.rates:
        return 0.5
    rates = profile.rates
    return float(min(1.0, (rates["pageable_up"] + rates["pageable_down"]) / (rates["up"] + rates["down"])))


def costs_here() -> tuple[Mapping[str, Any], str] | None:
    """What ``tune doctor`` measured of training on this CPU with this number of threads, and when, in words."""
    profile = profile_here(torch.device("cpu"))
    if profile is None or "training" not in profile.rates:
        return None
    return profile.rates, f"on rates that {origin(profile)}"

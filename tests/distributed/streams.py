"""FSDP2 on the simulated accelerator, for tests that undo it with a fixture."""

from __future__ import annotations

import pytest

from offload.simulation.accelerator import SimulatedAccelerator
from offload.simulation.fsdp import COLLECTIVES, STREAMS, Device, replacements

__all__ = ["COLLECTIVES", "STREAMS", "Device", "play_streams"]


def play_streams(patch: pytest.MonkeyPatch, simulator: SimulatedAccelerator) -> None:
    """Make what ``fully_shard`` is applied to from now on use the simulator's streams."""
    for where, name, value in replacements(simulator):
        patch.setattr(where, name, value, raising=False)

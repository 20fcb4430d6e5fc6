"""What a run does that torchrun has started again after one of its processes failed (``--max-restarts``).

It goes on from the newest checkpoint that the job has saved, whatever ``resume_from_checkpoint`` says: that was for the
job's beginning. What the folder held before the job began is not taken for the job's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offload.checkpoints.manifest import next_sequence, whole_checkpoints
from offload.checkpoints.manifest import read as read_manifest
from offload.distributed.watch import active, restarts
from offload.distributed.world import World

_BEGAN = "first checkpoint"
_REPORTED = "reported"


@dataclass(frozen=True)
class Restart:
    """What the lives of a job before this one left.

    Attributes:
        has_saved: checkpoints.
        has_reported: metrics, with which this one goes on.
    """

    has_saved: bool
    has_reported: bool

    def line(self, resumed_from: Path | None) -> str:
        """Says what happens."""
        count, most = restarts()
        there = "from the beginning: no checkpoint was saved" if resumed_from is None else f"from {resumed_from}"
        return f"restart {count} of at most {most}, after a process failed: going on {there}"


def find_restart(world: World, output_dir: Path) -> Restart | None:
    """What the lives before left, on all processes; None in the first one."""

    def look() -> Restart | None:
        began = world.noted(_BEGAN)
        if began is None:
            world.note(_BEGAN, str(next_sequence(output_dir)))
            return None
        has_saved = any(read_manifest(path).sequence >= int(began) for path in whole_checkpoints(output_dir))
        return Restart(has_saved, world.noted(_REPORTED) is not None)

    return None if active() is None else world.from_main(look)


def note_report(world: World) -> None:
    """Metrics are written from here on."""
    if world.is_main:
        world.note(_REPORTED, "yes")

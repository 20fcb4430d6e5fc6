"""Two pipelines of one optimizer: the CPU updates some pieces, while others are updated on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload.engine.host import HostPipeline
from offload.engine.pipeline import Job
from offload.engine.stream import StreamPipeline
from offload.engine.units import Piece, Unit


class Both:
    """Hands each job to the pipeline that its piece's ``way`` asks for, and waits for both.

    Args:
        device: of pieces that are updated on the device, wherever their states rest.
        host: of those that the CPU updates.
    """

    def __init__(self, device: StreamPipeline, host: HostPipeline) -> None:
        self.device = device
        self.host = host

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue updates; returns at once."""
        jobs = list(jobs)
        on_cpu = [job for job in jobs if job.piece.way == "host"]
        self.device.submit(job for job in jobs if job.piece.way != "host")
        if on_cpu:
            self.host.submit(on_cpu)

    def expect(self, pieces: Sequence[Piece]) -> None:
        """The order in which the next step's updates will be submitted."""
        self.device.expect([piece for piece in pieces if piece.way != "host"])

    def wait(self, unit: Unit, *, keep: bool = False) -> None:
        """Make the current stream wait for a unit's update; blocks the thread until that is queued."""
        self.device.wait(unit, keep=keep)
        self.host.wait(unit, keep=keep)

    def settle(self) -> None:
        """Block the thread until every update is done, and states and gradients lie where they rest."""
        self.device.settle()
        self.host.settle()

    def close(self) -> None:
        """Finish what was submitted and end both threads."""
        self.device.close()
        self.host.close()

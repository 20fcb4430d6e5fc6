"""Two pipelines of one optimizer: the CPU updates some pieces, while others are updated on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from offload.engine.base import PartialStep
from offload.engine.host import HostCopies, HostPipeline
from offload.engine.in_flight import InFlight
from offload.engine.memory import HostMemory
from offload.engine.pipeline import Job, Pipeline
from offload.engine.runtime import Runtime
from offload.engine.states import States
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


def pipelines(
    runtime: Runtime,
    in_flight: InFlight,
    step: PartialStep,
    states: States,
    memory: HostMemory,
    copies: HostCopies | None,
    before_update: Callable[[Piece], None],
    *,
    updates_on_device: bool,
    on_default: bool,
    ahead: float,
) -> tuple[StreamPipeline | None, HostPipeline | None, Pipeline | Both | None]:
    """What updates on the device, what on the CPU, and what jobs are handed to; None for what is not needed.

    Args:
        runtime: streams of the device.
        in_flight: holds the device tensors that queued work uses.
        step: runs the base optimizer on part of its parameters.
        states: theirs.
        memory: of the host.
        copies: of parameters that the CPU updates; None where it updates none.
        before_update: called with what is going to be updated, with the stream current that does it.
        updates_on_device: anything is updated there.
        on_default: see :class:`StreamPipeline`.
        ahead: see :class:`HostPipeline`.
    """
    device = host = None
    if updates_on_device:
        device = StreamPipeline(runtime, in_flight, step, states, before_update, on_default=on_default)
    if copies is not None:
        # Each thread steps an instance of its own.
        own = step.apart() if updates_on_device else step
        host = HostPipeline(runtime, in_flight, own, states, copies, memory, before_update, ahead=ahead)
    return device, host, Both(device, host) if device is not None and host is not None else device or host

"""Strategy ``host``: parameters have a copy in host memory, and the base optimizer updates it on the CPU.

Life of a piece: its gradient comes down into a slot (or rests on the host already), the base optimizer updates the
host copy, and the new values go up to the device. While one piece is updated, the gradients of the next come down.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.engine.base import Entry, PartialStep
from offload.engine.in_flight import InFlight
from offload.engine.marks import mark
from offload.engine.memory import HostMemory, carve, padded
from offload.engine.pipeline import Job, Pipeline
from offload.engine.runtime import DONE, Event, Runtime
from offload.engine.shards import LocalParameters, local
from offload.engine.states import States
from offload.engine.units import Piece, Slice

SLOTS = 3
"""Host buffers for gradients: one in use, the others coming down. Two, because a piece of norms takes no time."""


class HostCopies:
    """Host copies of parameters, and whether they are up to date.

    Args:
        memory: where they are allocated.
        names: what messages call each parameter.
        parts: of parameters that several ranks share, and that are not trained.
    """

    def __init__(self, memory: HostMemory, names: Mapping[Tensor, str], parts: LocalParameters) -> None:
        self._memory = memory
        self._names = names
        self._parts = parts
        self._host: dict[Tensor, nn.Parameter] = {}
        self._device: dict[Tensor, nn.Parameter] = {}
        self._versions: dict[Tensor, int] = {}
        self._spare: dict[Tensor, nn.Parameter] = {}

    def add(self, params: Sequence[nn.Parameter]) -> None:
        """Make copies of the parameters that are trained and have none yet."""
        new = [p for p in params if p.requires_grad and p not in self._host]
        self.reserve(new)
        for param in new:
            host = self._host[param] = self._spare.pop(param)
            self._device[host] = param
        self.read(new)

    def reserve(self, params: Iterable[nn.Parameter]) -> None:
        """Allocate the copies of parameters that may be added later."""
        new = [p for p in params if p not in self._host and p not in self._spare]
        like = [torch.empty(local(p).shape, dtype=p.dtype, device="meta") for p in new]
        for param, copy in zip(new, self._memory.allocate(like, "parameters"), strict=True):
            self._spare[param] = nn.Parameter(copy)

    def drop(self, params: Iterable[nn.Parameter]) -> None:
        """Forget the copies of some parameters; their memory is kept for :meth:`add`."""
        for param in self.known(params):
            host = self._host.pop(param)
            del self._device[host]
            self._spare[param] = host

    def of(self, param: nn.Parameter) -> nn.Parameter:
        """The host copy of a parameter; if it has none, as a frozen one, this rank's part of it."""
        return self._host[param] if param in self._host else self._parts.of(param)

    def device(self, host: Tensor) -> Tensor:
        """The inverse of :meth:`of`."""
        return self._device[host] if host in self._device else self._parts.device(host)

    def known(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those that have a copy."""
        return [param for param in params if param in self._host]

    def read(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Copy parameters from the device (all that have a copy, by default)."""
        with torch.no_grad():
            for param in list(self._host) if params is None else params:
                self._host[param].copy_(local(param))
                self.written(param)

    def written(self, param: Tensor) -> None:
        """The parameter now has, or will have, the values of its copy."""
        self._versions[param] = local(param)._version

    def check(self, param: nn.Parameter) -> None:
        """Raises RuntimeError where a parameter with a copy was changed by somebody else since it was last written."""
        if param in self._host and self._versions[param] != local(param)._version:
            raise RuntimeError(
                f"{self._names[param]} was changed outside the optimizer since its host copy was made (by "
                "load_state_dict, .to() or an in-place operation); call optimizer.sync_from_model() after "
                "changing parameters, or the change would be lost."
            )


@dataclass(eq=False)
class Slot:
    """A buffer on the host in which a piece's gradients arrive.

    Attributes:
        buffer: uint8, as large as the largest piece so far.
        filled: after it, what was copied in is there.
    """

    buffer: Tensor
    filled: Event = DONE


class HostPipeline(Pipeline):
    """Updates pieces on the CPU.

    Args:
        runtime: streams of the device.
        in_flight: holds the device tensors that queued work uses.
        step: runs the base optimizer on part of its parameters.
        states: where states are; they stay there.
        copies: the parameters' host copies.
        memory: for the ring of gradient buffers.
        before_update: called with what is going to be updated, with the stream current that does it.
        ahead: of the largest piece, how many times its gradients come down ahead of their update. Half hides the
            copies; more lets gradients leave a device whose memory others need.
    """

    name = "offload-host"

    def __init__(
        self,
        runtime: Runtime,
        in_flight: InFlight,
        step: PartialStep,
        states: States,
        copies: HostCopies,
        memory: HostMemory,
        before_update: Callable[[Piece], None],
        *,
        ahead: float = 0.5,
    ) -> None:
        super().__init__(runtime, in_flight)
        self._step = step
        self._states = states
        self._copies = copies
        self._memory = memory
        self._before_update = before_update
        self._ahead_at_most = ahead
        self._slots = [Slot(torch.empty(0, dtype=torch.uint8)) for _ in range(SLOTS + int(ahead))]
        self._free = deque(self._slots)
        self._uploaded: dict[Piece, Event] = {}
        self._coming: deque[tuple[Job, Slot, dict[Slice, Tensor]]] = deque()
        self._largest = 0

    def reserve(self, nbytes: int) -> None:
        """Make the ring of gradient buffers, for pieces of up to ``nbytes``."""
        for slot in self._slots:
            self._enlarge(slot, nbytes)

    def _enlarge(self, slot: Slot, nbytes: int) -> None:
        if slot.buffer.numel() < nbytes:
            (slot.buffer,) = self._memory.allocate([torch.empty(nbytes, dtype=torch.uint8, device="meta")], "staging")

    def _prepare_thread(self) -> None:
        # A thread's number of threads is its own. One core stays for the training loop and its data loader.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() - 1))

    def _work_once(self) -> bool:
        if not self._coming:
            self._bring_next(block=True)
        if not self._coming:
            return False
        current = self._coming.popleft()
        # Far enough ahead to hide the copy behind an update, and no further: the order is decided here.
        while self._ahead() < self._ahead_at_most * self._largest and self._bring_next(block=False):
            pass
        self._update(*current)
        return True

    def _ahead(self) -> int:
        return sum(job.piece.numel for job, _, _ in self._coming)

    def _bring_next(self, *, block: bool) -> bool:
        """Take the job that comes next and queue its gradients' way down; False where there is none."""
        with self._signal:
            while block and not self._queue and not self._stopping:
                self._signal.wait()
            job = self._choose() if self._free else None
            if job is None:
                return False
            self._queue.remove(job)
            self._signal.notify_all()
        self._largest = max(self._largest, job.piece.numel)
        self._coming.append((job, *self._bring_gradients(job)))
        return True

    def _bring_gradients(self, job: Job) -> tuple[Slot, dict[Slice, Tensor]]:
        slot = self._free.popleft()
        spans = {part: part.of(job.gradients[part.param].values) for part in job.slices}
        on_device = {part: span for part, span in spans.items() if not job.gradients[part.param].on_host}
        self._enlarge(slot, sum(padded(span.nbytes) for span in on_device.values()))
        gradients = {**spans, **dict(zip(on_device, carve(slot.buffer, on_device.values()), strict=True))}
        slot.filled = DONE
        for part, span in on_device.items():
            name = mark("gradient down", job.piece.name)
            slot.filled = self._runtime.copy(gradients[part], span, "down", (job.ready,), name)
        return slot, gradients

    def _update(self, job: Job, slot: Slot, gradients: dict[Slice, Tensor]) -> None:
        for part in gradients:
            job.gradients[part.param].arrived().synchronize()
        slot.filled.synchronize()
        for read in job.read:
            read.synchronize()
        self._in_flight.release(job.finished_gradients(), slot.filled, job.piece.unit.name)
        self._uploaded.get(job.piece, DONE).synchronize()
        hosts = {part: part.of(self._copies.of(part.param).detach()) for part in gradients}
        self._before_update(job.piece)

        def step(entries: Sequence[Entry]) -> None:
            with self._runtime.working(mark("update", job.piece.name)):
                self._step(entries, job.groups, job.scale)

        self._states.update({part: (hosts[part], gradient) for part, gradient in gradients.items()}, step)
        self._free.append(slot)
        uploaded: Event = DONE
        for part, host in hosts.items():
            target = part.of(local(part.param).detach())
            uploaded = self._runtime.copy(target, host, "up", (job.ready,), mark("copy up", job.piece.name))
            self._copies.written(part.param)
        self._uploaded[job.piece] = uploaded
        self._finish(job, uploaded)

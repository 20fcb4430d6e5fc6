"""Strategy ``stream``: states rest on the host, are copied to the device around the update, and go back.

Life of a piece: its states are copied up into a slot of the staging ring, before its gradient is there if the
order of the last backward tells that it comes next; the update stream waits for both, runs the base optimizer, and
the states are copied down to where they rest. At most two pieces are on their way up at a time, so that which
piece comes next is decided when the link is free and not long before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor

from offload.engine.base import PartialStep
from offload.engine.memory import carve, padded
from offload.engine.pipeline import Job, Pipeline, Slot
from offload.engine.runtime import DONE, Event, Runtime
from offload.engine.states import States
from offload.engine.units import Piece, Slice

SLOTS = 4
"""Staging buffers: one on its way up, one updating, one on its way down, one ahead."""

UPLOADS_IN_FLIGHT = 2


class StreamPipeline(Pipeline):
    """Updates pieces on the device with states brought from the host.

    Args:
        runtime: streams of the device.
        step: runs the base optimizer on part of its parameters.
        states: where states rest.
    """

    name = "offload-stream"

    def __init__(self, runtime: Runtime, step: PartialStep, states: States) -> None:
        super().__init__(runtime)
        self._step = step
        self._states = states
        self._free = deque(Slot() for _ in range(SLOTS))
        self._staged: dict[Piece, Slot] = {}
        self._uploads: deque[Event] = deque()
        self._rested: dict[Piece, Event] = {}
        self._last_staged: Event = DONE
        self._last_rested: Event = DONE
        self._expected: list[Piece] = []
        self._overdue: set[Job] = set()
        self._holding = True
        self._flushing = False

    # The caller's side

    def submit(self, jobs: Iterable[Job]) -> None:
        with self._signal:
            self._holding = False
        super().submit(jobs)

    def expect(self, pieces: Sequence[Piece]) -> None:
        """The order in which the next step's updates will be submitted; their states are brought up ahead of them."""
        with self._signal:
            self._expected = list(pieces)
            self._overdue = set(self._queue)
            self._holding = False
            self._signal.notify_all()

    def settle(self) -> None:
        """As above; nothing is brought up ahead afterwards, until the next :meth:`submit`."""
        with self._signal:
            self._holding = True
            self._flushing = self._thread is not None  # the worker answers when it has nothing left to update
            self._signal.notify_all()
            while self._flushing and self._error is None:
                self._signal.wait()
            self._raise_error()
        # What was brought up ahead is not used, but is still being read.
        self._last_staged.synchronize()
        self._last_rested.synchronize()
        self._last_update.synchronize()

    def staging_bytes(self) -> int:
        """Device memory of the staging ring."""
        return sum(slot.buffer.numel() + slot.gradients.numel() for slot in [*self._free, *self._staged.values()])

    # The worker's side

    def _work_once(self) -> bool:
        with self._signal:
            while True:
                job = next(filter(None, map(self._queue.of, self._staged)), None)
                piece = None if job is not None else self._next_to_stage()
                if job is not None or piece is not None:
                    break
                if self._flushing or self._stopping:
                    self._flush()
                    if self._stopping:
                        return False
                self._signal.wait()
            if job is not None:
                self._queue.remove(job)
                if job in self._overdue:
                    self._overdue.remove(job)
                elif job.piece in self._expected:
                    self._expected.remove(job.piece)
        if job is not None:
            self._update(job, self._staged.pop(job.piece))
        else:
            assert piece is not None
            self._stage(piece)
        return True

    def _next_to_stage(self) -> Piece | None:
        """Of the pieces that are ready and the one that backward will come to next, the one needed first."""
        job = self._choose()
        if job in self._overdue:
            return job.piece  # what is expected belongs to the step after its
        ahead = self._next_expected()
        if job is None or (ahead is not None and ahead.rank < job.piece.rank):
            return ahead
        return job.piece

    def _next_expected(self) -> Piece | None:
        """The piece to bring up before its gradient is there, while enough slots stay free for those that have it."""
        if self._holding or self._stopping or len(self._free) < 2:
            return None
        pieces = (piece for piece in self._expected if piece not in self._staged)
        return next((piece for piece in pieces if self._states.layout(piece).nbytes), None)

    def _flush(self) -> None:
        """Give up what was brought up ahead."""
        self._flushing = False
        self._free.extend(self._staged.values())
        self._staged.clear()
        self._signal.notify_all()

    def _stage(self, piece: Piece) -> None:
        """Queue the copies that bring a piece's states up."""
        if not self._free:
            self._free.append(self._staged.pop(next(reversed(self._staged))))
        slot = self._free.popleft()
        self._staged[piece] = slot
        layout = self._states.layout(piece)
        slot.filled = DONE
        if not layout.nbytes:
            return
        while len(self._uploads) >= UPLOADS_IN_FLIGHT:
            self._uploads.popleft().synchronize()
        slot.buffer = self._device_buffer(slot, slot.buffer, layout.nbytes)
        after = (slot.made, slot.freed, self._rested.get(piece, DONE))
        for host, offset in layout.runs:
            target = slot.buffer[offset : offset + host.numel()]
            slot.filled = self._runtime.copy(target, host, "up", after, f"{piece.name} states up")
        self._uploads.append(slot.filled)
        self._last_staged = slot.filled

    def _device_buffer(self, slot: Slot, buffer: Tensor, nbytes: int) -> Tensor:
        """``buffer``, or a larger one where it is too small."""
        if buffer.numel() >= nbytes:
            return buffer
        larger = self._runtime.empty_device(nbytes)
        # The allocator hands out memory that the stream it allocates for may still be reading.
        slot.made = self._runtime.record()
        with self._runtime.updating():
            self._runtime.borrow([larger])
        return larger

    def _update(self, job: Job, slot: Slot) -> None:
        layout = self._states.layout(job.piece)
        from_host = self._bring_gradients(job, slot)
        with self._runtime.updating(f"{job.piece.name} update"):
            self._runtime.wait(job.ready)
            self._runtime.wait(slot.filled)
            self._runtime.borrow(job.tensors())
            gradients = {part: part.of(job.gradients[part.param].values) for part in job.slices} | from_host
            created: list[tuple[Tensor, Tensor]] = []
            self._states.update(
                {part: (part.of(part.param.detach()), gradient) for part, gradient in gradients.items()},
                lambda entries: self._step(entries, job.groups, job.scale),
                layout,
                slot.buffer,
                move=lambda target, source: created.append((target, source)),
            )
            updated = self._runtime.record()
        if layout.nbytes or from_host:
            slot.freed = updated

        def down(target: Tensor, source: Tensor) -> None:
            name = f"{job.piece.name} states down"
            slot.freed = self._last_rested = self._runtime.copy(target, source, "down", (updated,), name)

        for host, offset in layout.runs:
            down(host, slot.buffer[offset : offset + host.numel()])
        for target, source in created:
            down(target, source)
        if created:
            # What a first update created does not lie in the ring: one piece of it at a time.
            slot.freed.synchronize()
        self._rested[job.piece] = slot.freed
        self._free.append(slot)
        job.gradients.clear()
        self._finish(job, updated)

    def _bring_gradients(self, job: Job, slot: Slot) -> dict[Slice, Tensor]:
        """Copy gradients that rest on the host up, behind the states."""
        from_host = {part: job.gradients[part.param] for part in job.slices if job.gradients[part.param].on_host}
        if not from_host:
            return {}
        spans = {part: part.of(gradient.values) for part, gradient in from_host.items()}
        total = sum(padded(span.nbytes) for span in spans.values())
        slot.gradients = self._device_buffer(slot, slot.gradients, total)
        gradients = dict(zip(spans, carve(slot.gradients, spans.values()), strict=True))
        for part, span in spans.items():
            after = (slot.made, slot.freed, from_host[part].arrived())
            slot.filled = self._runtime.copy(gradients[part], span, "up", after, f"{job.piece.name} gradient up")
        return gradients

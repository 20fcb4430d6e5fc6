"""Strategy ``stream``: states rest on the host, are copied to the device around the update, and go back.

Life of a piece: its states are copied up into a slot of the staging ring, before its gradient is there if the
order of the last backward tells that it comes next; the update stream waits for both, runs the base optimizer, and
the states are copied down to where they rest. At most two pieces are on their way up at a time, so that which
piece comes next is decided when the link is free and not long before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload.engine.base import PartialStep
from offload.engine.in_flight import InFlight
from offload.engine.marks import mark
from offload.engine.memory import carve, padded
from offload.engine.pipeline import Job, Jobs, Pipeline
from offload.engine.runtime import DONE, Event, Runtime
from offload.engine.shards import local
from offload.engine.states import States
from offload.engine.units import Piece, Slice

SLOTS = 3
"""Staging buffers: one on its way up, one updating or on its way down, one ahead. An update takes a tenth of the time
of its copies, so that three keep both directions of the link busy."""

UPLOADS_IN_FLIGHT = 2


@dataclass(eq=False)
class Slot:
    """Staging buffers on the device that pieces pass through.

    Attributes:
        states: uint8, as large as the largest piece so far.
        gradients: the same, for gradients that come from the host.
        made: after it, the memory of the buffers is theirs.
        filled: after it, what was copied in is there.
        freed: after it, nothing reads the buffers any more.
    """

    states: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    gradients: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    made: Event = DONE
    filled: Event = DONE
    freed: Event = DONE


class StreamPipeline(Pipeline):
    """Updates pieces on the device with states brought from the host.

    Args:
        runtime: streams of the device.
        in_flight: holds the device tensors that queued work uses.
        step: runs the base optimizer on part of its parameters.
        states: where states rest.
        before_update: called with what is going to be updated, with the stream current that does it.
        on_default: the base optimizer's kernels run on the device's default stream, whichever is current.
    """

    name = "offload-stream"

    def __init__(
        self,
        runtime: Runtime,
        in_flight: InFlight,
        step: PartialStep,
        states: States,
        before_update: Callable[[Piece], None],
        *,
        on_default: bool = False,
    ) -> None:
        super().__init__(runtime, in_flight)
        self._step = step
        self._states = states
        self._before_update = before_update
        self._on_default = on_default
        self._slots = [Slot() for _ in range(SLOTS)]
        self._free = deque(self._slots)
        self._staged: dict[Piece, Slot] = {}
        self._uploads: deque[Event] = deque()
        self._rested: dict[Piece, Event] = {}
        self._last_staged: Event = DONE
        self._last_rested: Event = DONE
        self._resident = Jobs()
        self._expected: list[Piece] = []
        self._overdue: set[Job] = set()
        self._withheld = 0
        self._holding = True
        self._is_staging = False

    # The caller's side

    def reserve(self, states: int, gradients: int) -> None:
        """Make the staging ring, for pieces of up to so many bytes of states, and of gradients from the host."""
        self._in_flight.set_aside(-self._withheld)
        self._withheld = 0
        for slot in self._slots:
            slot.states = self._enlarged(slot, slot.states, states)
            slot.gradients = self._enlarged(slot, slot.gradients, gradients)

    def release(self, *, to_gradients: bool) -> tuple[int, int] | None:
        """Let go of the staging ring, while nothing is under way; returns what :meth:`reserve` makes it again with,
        None where there is none.

        ``to_gradients``: more of them may be in flight then; else something else has the memory.
        """
        largest = max(slot.states.numel() for slot in self._slots), max(slot.gradients.numel() for slot in self._slots)
        if to_gradients:
            self._in_flight.set_aside(-self.staging_bytes())
        else:
            self._withheld += self.staging_bytes()
        self._states.forget_layouts()
        for slot in self._slots:
            slot.states = slot.gradients = torch.empty(0, dtype=torch.uint8)
        return largest if any(largest) else None

    def submit(self, jobs: Iterable[Job]) -> None:
        with self._signal:
            self._holding = False
        super().submit(jobs)

    def _add(self, job: Job) -> None:
        is_resident = job.piece.way == "resident" and not any(g.on_host for g in job.gradients.values())
        (self._resident if is_resident else self._queue).add(job)

    def expect(self, pieces: Sequence[Piece]) -> None:
        """The order in which the next step's updates will be submitted; their states are brought up ahead of them."""
        with self._signal:
            self._expected = list(pieces)
            self._overdue = set(self._queue)
            self._holding = False
            self._signal.notify_all()

    def settle(self) -> None:
        """As above; nothing is brought up ahead afterwards until the next :meth:`submit`, since the caller may change
        the states."""
        with self._signal:
            self._holding = True
        super().settle()
        with self._signal:
            self._free.extend(self._staged.values())
            self._staged.clear()
            self._states.forget_layouts()
        # What was brought up ahead is not used, but is still being read.
        self._last_staged.synchronize()
        self._last_rested.synchronize()

    def staging_bytes(self) -> int:
        """Device memory of the staging ring."""
        return sum(slot.states.numel() + slot.gradients.numel() for slot in self._slots)

    def _is_busy(self) -> bool:
        return self._is_staging or super()._is_busy()

    def _has_jobs(self) -> bool:
        return bool(self._resident) or super()._has_jobs()

    def _give_up(self) -> None:
        super()._give_up()
        self._resident = Jobs()

    # The worker's side

    def _work_once(self) -> bool:
        with self._signal:
            if self._is_staging:
                self._is_staging = False
                self._signal.notify_all()
            while True:
                job = next(filter(None, map(self._queue.of, self._staged)), None)
                piece = None if job is not None else self._next_to_stage()
                # What needs no copies is done while the link is busy.
                resident = self._resident.best() if job is None and (piece is None or self._is_link_busy()) else None
                if job is not None or resident is not None or piece is not None:
                    break
                if self._stopping:
                    return False
                self._signal.wait()
            if resident is not None:
                job, slot = resident, Slot()
                self._resident.remove(job)
            elif job is not None:
                self._queue.remove(job)
                if job in self._overdue:
                    self._overdue.remove(job)
                elif job.piece in self._expected:
                    self._expected.remove(job.piece)
                slot = self._staged.pop(job.piece)
            else:
                assert piece is not None
                self._is_staging = True
                if not self._free:
                    self._free.append(self._staged.pop(next(reversed(self._staged))))
                slot = self._staged[piece] = self._free.popleft()
        if job is not None:
            self._update(job, slot)
        else:
            assert piece is not None
            self._stage(piece, slot)
        return True

    def _is_link_busy(self) -> bool:
        """Whether a piece's way up would have to wait for another's."""
        return len(self._uploads) >= UPLOADS_IN_FLIGHT and not self._uploads[0].is_done()

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
        """The piece to bring up before its gradient is there, while a slot stays free for those that have it."""
        if self._holding or self._stopping or len(self._free) < 2:
            return None
        pieces = (piece for piece in self._expected if piece not in self._staged)
        return next((piece for piece in pieces if self._states.layout(piece).nbytes), None)

    def _stage(self, piece: Piece, slot: Slot) -> None:
        """Queue the copies that bring a piece's states up."""
        layout = self._states.layout(piece)
        slot.filled = DONE
        if not layout.nbytes:
            return
        while len(self._uploads) >= UPLOADS_IN_FLIGHT:
            self._uploads.popleft().synchronize()
        slot.states = self._enlarged(slot, slot.states, layout.nbytes)
        after = (slot.made, slot.freed, self._rested.get(piece, DONE))
        for host, offset in layout.runs:
            target = slot.states[offset : offset + host.numel()]
            slot.filled = self._runtime.copy(target, host, "up", after, mark("copy up", piece.name))
        self._uploads.append(slot.filled)
        self._last_staged = slot.filled

    def _enlarged(self, slot: Slot, buffer: Tensor, nbytes: int) -> Tensor:
        """A slot's buffer, or a larger one where it is too small."""
        if buffer.numel() >= nbytes:
            return buffer
        self._states.forget_layouts()
        self._in_flight.release([buffer], slot.freed)
        self._in_flight.set_aside(nbytes - buffer.numel())
        larger = self._runtime.empty_device(nbytes)
        # The allocator hands out memory that the stream it allocates for may still be reading.
        slot.made = self._runtime.record()
        return larger

    def _update(self, job: Job, slot: Slot) -> None:
        layout = self._states.layout(job.piece)
        from_host = self._bring_gradients(job, slot)
        with self._runtime.updating(mark("update", job.piece.name), on_default=self._on_default):
            self._runtime.wait(job.ready)
            self._runtime.wait(slot.filled)
            self._before_update(job.piece)
            gradients = {part: part.of(job.gradients[part.param].values) for part in job.slices} | from_host
            created: list[tuple[Tensor, Tensor]] = []
            self._states.update(
                {part: (part.of(local(part.param).detach()), gradient) for part, gradient in gradients.items()},
                lambda entries: self._step(entries, job.groups, job.scale),
                layout,
                slot.states,
                move=lambda target, source: created.append((target, source)),
            )
            updated = self._runtime.record()
        if layout.nbytes or from_host:
            slot.freed = updated

        def down(target: Tensor, source: Tensor) -> None:
            name = mark("copy down", job.piece.name)
            slot.freed = self._last_rested = self._runtime.copy(target, source, "down", (updated,), name)

        for host, offset in layout.runs:
            down(host, slot.states[offset : offset + host.numel()])
        for target, source in created:
            down(target, source)
        if created:
            # What a first update created does not lie in the ring: one piece of it at a time.
            slot.freed.synchronize()
        self._rested[job.piece] = slot.freed
        gradients.clear()
        self._in_flight.release([*job.options(), *job.finished_gradients()], updated, job.piece.unit.name)
        if slot in self._slots:
            with self._signal:
                self._free.append(slot)
        self._finish(job, updated)

    def _bring_gradients(self, job: Job, slot: Slot) -> dict[Slice, Tensor]:
        """Copy gradients that rest on the host up, behind the states."""
        from_host = {part: job.gradients[part.param] for part in job.slices if job.gradients[part.param].on_host}
        if not from_host:
            return {}
        spans = {part: part.of(gradient.values) for part, gradient in from_host.items()}
        slot.gradients = self._enlarged(slot, slot.gradients, sum(padded(span.nbytes) for span in spans.values()))
        gradients = dict(zip(spans, carve(slot.gradients, spans.values()), strict=True))
        for part, span in spans.items():
            after = (slot.made, slot.freed, from_host[part].arrived())
            slot.filled = self._runtime.copy(gradients[part], span, "up", after, mark("gradient up", job.piece.name))
        return gradients

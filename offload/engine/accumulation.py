"""Gradients that rest in host memory: taken there as backward produces them, summed there over micro-batches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.engine.gradients import TakenGradient
from offload.engine.in_flight import InFlight
from offload.engine.marks import mark
from offload.engine.memory import HostMemory, carve
from offload.engine.norms import tensor_norms
from offload.engine.runtime import DONE, Event, Runtime, traced
from offload.engine.shards import local, set_gradient
from offload.engine.worker import Worker

SLOTS = 2
"""Host buffers, each as large as the largest gradient, in which addends arrive."""


@dataclass
class _Addition:
    """An addend in a slot, on its way into a parameter's buffer; ``first``: the buffer holds nothing yet."""

    param: Tensor
    buffer: Tensor
    addend: Tensor
    slot: Tensor
    filled: Event
    first: bool
    measure: bool


class HostGradients(Worker):
    """One host buffer per parameter, and a thread that adds later micro-batches to it.

    Args:
        runtime: streams of the device.
        in_flight: holds gradients while they are copied.
        memory: where the buffers are allocated.
        dtype: of the sums; None for each gradient's own.
        wait: blocks until nothing uses the buffers; for whoever zeroes a taken gradient.
    """

    name = "offload-accumulate"

    def __init__(
        self,
        runtime: Runtime,
        in_flight: InFlight,
        memory: HostMemory,
        dtype: torch.dtype | None,
        wait: Callable[[], None],
    ) -> None:
        super().__init__(runtime)
        self._in_flight = in_flight
        self._memory = memory
        self._dtype = dtype
        self._wait = wait
        self._buffers: dict[Tensor, Tensor] = {}
        self._arrived: dict[Tensor, Event] = {}
        self._norms: dict[Tensor, Tensor] = {}
        self._additions: deque[_Addition] = deque()
        self._pending: Counter[Tensor] = Counter()
        self._slots: deque[Tensor] = deque()
        self._slot_bytes = 0

    # The caller's side

    def reserve(self, params: Sequence[nn.Parameter], *, sums: bool) -> None:
        """Make the buffers of parameters that have none yet.

        Args:
            params: whose gradients will be taken.
            sums: more than one micro-batch may come.
        """
        if self._runtime.shares_memory:
            return
        new = [param for param in params if param.requires_grad and param not in self._buffers]
        like = [torch.empty(local(p).shape, dtype=self._dtype or p.dtype, device="meta") for p in new]
        self._buffers.update(zip(new, self._memory.allocate(like, "gradients"), strict=True))
        largest = max((local(param).nbytes for param in self._buffers), default=0)
        casts = any(buffer.dtype != param.dtype for param, buffer in self._buffers.items())
        if (sums or casts) and largest > self._slot_bytes:
            slots = [torch.empty(largest, dtype=torch.uint8, device="meta")] * SLOTS
            with self._signal:
                self._slots = deque(self._memory.allocate(slots, "staging"))
                self._slot_bytes = largest

    def take(self, param: nn.Parameter, gradient: Tensor, unit: str, *, measure: bool = False) -> None:
        """Queue the copy of a gradient to its host buffer, and let go of it on the device; ``unit``: its name."""
        if self._runtime.shares_memory and self._dtype in (None, gradient.dtype):
            buffer = gradient
        elif self._runtime.shares_memory:
            buffer = gradient.to(self._dtype)
        else:
            if param not in self._buffers:
                self.reserve([param], sums=False)
            buffer = self._buffers[param]
            # After the parameter's earlier gradient was dropped, an addition to its buffer may still be under way.
            self._wait_for(param)
            self._norms.pop(param, None)
            if buffer.dtype == gradient.dtype:
                after = (self._runtime.record(),)
                self._arrived[param] = self._runtime.copy(buffer, gradient, "down", after, mark("gradient down", unit))
                self._in_flight.release([gradient], self._arrived[param], unit)
            else:
                self._bring(param, buffer, gradient, unit, first=True, measure=measure)

        def before_zeroing() -> None:
            self._wait()
            self._norms.pop(param, None)

        set_gradient(param, TakenGradient(local(param), buffer, on_host=True, wait=before_zeroing))

    def add(
        self, param: nn.Parameter, marker: TakenGradient, addend: Tensor, unit: str, *, measure: bool = False
    ) -> None:
        """Add a later micro-batch's gradient to the one that rests on the host.

        ``measure``: the norm of the sum will be asked for; it is taken behind the addition.
        """
        assert marker.rest is not None
        if self._runtime.shares_memory:
            marker.rest.add_(addend)
        else:
            self._bring(param, marker.rest, addend, unit, first=False, measure=measure)

    def norm(self, param: nn.Parameter) -> Tensor | None:
        """The norm of order 2 that was taken behind the last addition; None where none was."""
        self._wait_for(param)
        return self._norms.get(param)

    def arrived(self, param: nn.Parameter) -> Event:
        """Block until every addition to a parameter's buffer is done; the event of its first copy."""
        self._wait_for(param)
        return self._arrived.get(param, DONE)

    def synchronize(self) -> None:
        """Block until every gradient that was taken lies complete in host memory."""
        with self._signal:
            while any(self._pending.values()) and self._error is None:
                self._signal.wait()
            self._raise_error()
        for event in self._arrived.values():
            event.synchronize()

    def _wait_for(self, param: nn.Parameter) -> None:
        with self._signal:
            while self._pending[param] and self._error is None:
                self._signal.wait()
            self._raise_error()

    def _bring(
        self, param: nn.Parameter, buffer: Tensor, gradient: Tensor, unit: str, *, first: bool, measure: bool
    ) -> None:
        if not self._slot_bytes:
            self.reserve([], sums=True)
        with self._signal:
            self._start()
            if not self._slots:
                with traced(mark("wait in backward", unit)):
                    while not self._slots and self._error is None:
                        self._signal.wait()
            self._raise_error()
            slot = self._slots.popleft()
        (addend,) = carve(slot, [gradient])
        name = mark("gradient down", unit)
        filled = self._runtime.copy(addend, gradient, "down", (self._runtime.record(),), name)
        self._in_flight.release([gradient], filled, unit)
        with self._signal:
            self._pending[param] += 1
            self._additions.append(_Addition(param, buffer, addend, slot, filled, first, measure))
            self._signal.notify_all()

    # The thread's side

    def _work_once(self) -> bool:
        with self._signal:
            while not self._additions:
                if self._stopping:
                    return False
                self._signal.wait()
            addition = self._additions[0]
        # Copies down run in order, so the buffer's first gradient is there once this one is.
        addition.filled.synchronize()
        if addition.first:
            addition.buffer.copy_(addition.addend)
        else:
            addition.buffer.add_(addition.addend)
        norm = tensor_norms([addition.buffer])[0] if addition.measure else None
        with self._signal:
            if norm is not None:
                self._norms[addition.param] = norm
            self._additions.popleft()
            self._pending[addition.param] -= 1
            if addition.slot.numel() == self._slot_bytes:  # else larger ones have taken its place
                self._slots.append(addition.slot)
            self._signal.notify_all()
        return True

"""Gradients that rest in host memory: taken there as backward produces them, summed there over micro-batches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from offload.engine.gradients import TakenGradient
from offload.engine.memory import HostMemory, carve
from offload.engine.pipeline import Slot
from offload.engine.runtime import DONE, Event, Runtime, Thread

SLOTS = 2
"""Host buffers, each as large as the largest gradient, in which addends arrive."""


class HostGradients:
    """One host buffer per parameter, and a thread that adds later micro-batches to it.

    Args:
        runtime: streams of the device.
        memory: where the buffers are allocated, with the first gradient that is taken.
        params: all parameters that may have a gradient.
        dtype: of the sums; None for each gradient's own.
        wait: blocks until nothing uses the buffers; for whoever zeroes a taken gradient.
    """

    def __init__(
        self,
        runtime: Runtime,
        memory: HostMemory,
        params: Callable[[], Sequence[nn.Parameter]],
        dtype: torch.dtype | None,
        wait: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._memory = memory
        self._params = params
        self._dtype = dtype
        self._wait = wait
        self._buffers: dict[Tensor, Tensor] = {}
        self._arrived: dict[Tensor, Event] = {}
        self._signal = runtime.signal()
        self._additions: deque[tuple[Tensor, Tensor, Tensor, Slot, bool]] = deque()
        self._pending: Counter[Tensor] = Counter()
        self._slots: deque[Slot] = deque()
        self._thread: Thread | None = None
        self._stopping = False
        self._error: BaseException | None = None

    # The caller's side

    def take(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Queue the copy of a gradient to its host buffer, and let go of it on the device."""
        if self._runtime.shares_memory and self._dtype in (None, gradient.dtype):
            buffer = gradient
        else:
            buffer = self._buffer(param)
            # After the parameter's earlier gradient was dropped, an addition to its buffer may still be under way.
            self._wait_for(param)
            if buffer.dtype == gradient.dtype:
                after = (self._runtime.record(),)
                self._arrived[param] = self._runtime.copy(buffer, gradient, "down", after, "gradient down")
            else:
                self._bring(param, buffer, gradient, first=True)
        param.grad = TakenGradient(param, buffer, on_host=True, wait=self._wait)

    def add(self, param: nn.Parameter, marker: TakenGradient, addend: Tensor) -> None:
        """Add a later micro-batch's gradient to the one that rests on the host."""
        assert marker.rest is not None
        self._bring(param, marker.rest, addend, first=False)

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

    def close(self) -> None:
        """End the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._signal:
                self._stopping = True
                self._signal.notify_all()
            thread.join()

    def _wait_for(self, param: nn.Parameter) -> None:
        with self._signal:
            while self._pending[param] and self._error is None:
                self._signal.wait()
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _buffer(self, param: nn.Parameter) -> Tensor:
        if param not in self._buffers:
            new = [p for p in self._params() if p.requires_grad and p not in self._buffers]
            like = [torch.empty(p.shape, dtype=self._dtype or p.dtype, device="meta") for p in new]
            self._buffers.update(zip(new, self._memory.allocate(like, "gradients"), strict=True))
        return self._buffers[param]

    def _bring(self, param: nn.Parameter, buffer: Tensor, gradient: Tensor, *, first: bool) -> None:
        if self._runtime.shares_memory:
            buffer.copy_(gradient if first else buffer + gradient)
            return
        if self._thread is None:
            self._start()
        with self._signal:
            while not self._slots and self._error is None:
                self._signal.wait()
            self._raise_error()
            slot = self._slots.popleft()
        (addend,) = carve(slot.buffer, [gradient])
        slot.filled = self._runtime.copy(addend, gradient, "down", (self._runtime.record(),), "gradient down")
        with self._signal:
            self._pending[param] += 1
            self._additions.append((param, buffer, addend, slot, first))
            self._signal.notify_all()

    def _start(self) -> None:
        largest = max(self._params(), key=lambda p: p.nbytes)
        self._slots.extend(Slot(buffer) for buffer in self._memory.allocate([_bytes_like(largest)] * SLOTS, "staging"))
        self._thread = self._runtime.start(self._work, "offload-accumulate")

    # The thread's side

    def _work(self) -> None:
        try:
            with torch.no_grad():
                while self._add_one():
                    pass
        except BaseException as error:
            with self._signal:
                self._error = error
                self._signal.notify_all()

    def _add_one(self) -> bool:
        with self._signal:
            while not self._additions:
                if self._stopping:
                    return False
                self._signal.wait()
            param, buffer, addend, slot, first = self._additions.popleft()
        # Copies down run in order, so the buffer's first gradient is there once this one is.
        slot.filled.synchronize()
        if first:
            buffer.copy_(addend)
        else:
            buffer.add_(addend)
        with self._signal:
            self._pending[param] -= 1
            self._slots.append(slot)
            self._signal.notify_all()
        return True


def _bytes_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.nbytes, dtype=torch.uint8, device="meta")

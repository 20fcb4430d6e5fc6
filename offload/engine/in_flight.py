"""Device memory that the engine holds for work under way, and the wait that bounds the gradients in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from torch import Tensor

from offload.engine.marks import ALL, mark
from offload.engine.runtime import DONE, Event, Runtime, traced


class InFlight:
    """Holds tensors until the work that uses them is done, and counts the gradients among them.

    A gradient counts from its arrival in backward (:meth:`hold`) until the update or copy that uses it is done
    (:meth:`release`). The CPU queues backward long before the device gets there and allocates each gradient when it
    does, so that without :meth:`wait` all of them would be alive at once. FSDP2's gradients are views of one buffer for
    each of its groups, which is there until the last of them is released: it counts as a whole until then.

    Args:
        runtime: supplies the lock.
        limit: bytes of gradients above which :meth:`wait` waits.

    Attributes:
        peak: most bytes of gradients held at a time.
    """

    def __init__(self, runtime: Runtime, limit: int) -> None:
        self.limit = limit
        self.peak = 0
        self._signal = runtime.signal()
        self._counted: dict[Tensor, int] = {}
        self._views: dict[int, dict[Tensor, None]] = {}  # of those counted, by the address of their memory
        self._bytes = 0
        self._submitted: dict[Tensor, str] = {}  # and the unit of each
        self._leaving: deque[tuple[Event, list[Tensor], str]] = deque()

    def set_aside(self, nbytes: int) -> None:
        """Take memory out of the limit, for something else; less than none: give it back."""
        self.limit = max(0, self.limit - nbytes)

    def hold(self, gradient: Tensor) -> None:
        """Count a gradient that has arrived."""
        with self._signal:
            memory = gradient.untyped_storage()
            views = self._views.setdefault(memory.data_ptr(), {})
            nbytes = 0 if views else memory.nbytes()
            views[gradient] = None
            self._counted[gradient] = nbytes
            self._bytes += nbytes
            self.peak = max(self.peak, self._bytes)

    def _forget(self, gradient: Tensor) -> None:
        """Count a gradient no more; the views that share its memory are left with it."""
        nbytes = self._counted.pop(gradient, None)
        if nbytes is None:
            return
        address = gradient.untyped_storage().data_ptr()
        views = self._views[address]
        del views[gradient]
        if views:
            self._counted[next(iter(views))] += nbytes
        else:
            del self._views[address]
            self._bytes -= nbytes

    def submit(self, gradients: Mapping[Tensor, str]) -> None:
        """Say of gradients, each with its unit's name, that something will :meth:`release` them."""
        with self._signal:
            self._submitted.update(gradients)

    def release(self, tensors: Iterable[Tensor], after: Event, unit: str = ALL) -> None:
        """Let go of tensors of a unit once ``after`` is done."""
        leaving = list(tensors)
        if not leaving:
            return
        with self._signal:
            for tensor in leaving:
                self._submitted.pop(tensor, None)
            self._leaving.append((after, leaving, unit))
            self._signal.notify_all()
        self.collect()

    def collect(self) -> None:
        """Let go of what is done."""
        over = []
        with self._signal:
            while self._leaving and self._leaving[0][0].is_done():
                over.append(self._leaving.popleft())
                for tensor in over[-1][1]:
                    self._forget(tensor)
        over.clear()  # outside the lock: the last reference to a tensor may run anything

    def wait(self) -> None:
        """Block the thread while more than the limit is held and something is on its way to be released."""
        while True:
            self.collect()
            with self._signal:
                if self._bytes > self.limit and self._submitted and not self._leaving:
                    with traced(mark("wait in backward", next(iter(self._submitted.values())))):
                        while self._bytes > self.limit and self._submitted and not self._leaving:
                            self._signal.wait()
                if self._bytes <= self.limit or not self._leaving:
                    return
                oldest, _, unit = self._leaving[0]
            with traced(mark("wait in backward", unit)):
                oldest.synchronize()

    def forget(self) -> None:
        """Stop counting gradients that nothing was submitted for: whoever owns them has dropped them."""
        with self._signal:
            leaving = {tensor for _, tensors, _ in self._leaving for tensor in tensors}
            for gradient in [g for g in self._counted if g not in self._submitted and g not in leaving]:
                self._forget(gradient)

    def give_up(self) -> None:
        """Nothing that was submitted will be released: wake whoever waits for it."""
        with self._signal:
            self._leaving.append((DONE, list(self._submitted), ALL))
            self._submitted.clear()
            self._signal.notify_all()

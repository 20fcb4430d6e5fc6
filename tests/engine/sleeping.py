"""Keeps a stream of an accelerator busy for a while, so that what does not wait for it is caught."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

CYCLES_PER_MILLISECOND = 2_000_000
"""Of a GPU's clock, about."""


def sleep(milliseconds: float) -> None:
    """Queue about so much time on this thread's current stream: CUDA's own sleeping kernel, elsewhere products."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    if accelerator.type == "cuda":
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MILLISECOND))
    else:
        products(accelerator).sleep(milliseconds)


@cache
def products(device: torch.device) -> Products:
    """Those of a device, timed once."""
    return Products(device, time_on_accelerator)


class Products:
    """A chain of matrix products, as many as take a given time.

    Args:
        device: where they run.
        measure: gives the milliseconds that what it is handed takes.
        size: rows and columns.
    """

    def __init__(self, device: torch.device, measure: Callable[[Callable[[], None]], float], size: int = 1024) -> None:
        self._matrix = torch.eye(size, device=device)
        self._results: dict[object, Tensor] = {}
        self.each = max(measure(self._multiply), 1e-3)
        """Milliseconds of one product."""

    def _multiply(self) -> None:
        # Each stream has a result of its own: two of them may be asleep at once.
        stream = None if self._matrix.device.type == "cpu" else torch.accelerator.current_stream().stream_id
        result = self._results.get(stream)
        if result is None:
            result = self._results[stream] = torch.empty_like(self._matrix)
        torch.mm(self._matrix, self._matrix, out=result)

    def sleep(self, milliseconds: float) -> None:
        """Queue products for about that time on the current stream."""
        with torch.no_grad():
            for _ in range(math.ceil(milliseconds / self.each)):
                self._multiply()


def time_on_accelerator(run: Callable[[], None], turns: int = 20) -> float:
    """Milliseconds of one call in a row of them, after some that do not count."""
    for _ in range(3):
        run()
    first, last = (torch.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(turns):
        run()
    last.record()
    torch.accelerator.synchronize()
    return first.elapsed_time(last) / turns


@contextmanager
def current(stream: torch.Stream) -> Iterator[None]:
    """Inside, ``stream`` is this thread's current one. A stream that is entered itself serves one thread at a time."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)

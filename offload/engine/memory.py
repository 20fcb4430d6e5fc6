"""Host memory: page-locked slabs with aligned views, and an account of every byte.

PyTorch's page-locked allocator rounds each block up to a power of two (86 MiB becomes 128), so tensors
are laid side by side in slabs whose sizes are powers of two already.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from offload.engine.runtime import Runtime
from offload.engine.units import components

ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector register (AVX-512)."""

SLAB_BYTES = 1 << 30
"""Size of a full slab. Larger tensors get a slab of their own."""


PINNING_THREADS = 8
"""Page-locking touches every page: one thread reaches 2 to 4 GB/s, less than memory can do."""

TOLD_FROM = 2 << 30
"""Bytes from which page-locking takes long enough to be told about."""


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def carve(buffer: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Views of a byte buffer with the shapes, dtypes and order of elements of ``like``, side by side, aligned.

    Args:
        buffer: uint8, of at least the sum of the tensors' :func:`padded` sizes; the last one's need not be padded.
        like: what to match; the tensors may live anywhere, the meta device included.
    """
    views, used = [], 0
    for tensor in like:
        nbytes = tensor.numel() * tensor.element_size()
        flat = buffer[used : used + nbytes].view(tensor.dtype)
        dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
        views.append(flat.as_strided(tensor.shape, dense.stride()))
        used += padded(nbytes)
    return views


class PageLockWarning(UserWarning):
    """Host memory stays pageable.

    Attributes:
        nbytes: that could not be page-locked at once.
        reason: who refused says.
    """

    def __init__(self, nbytes: int, reason: str) -> None:
        self.nbytes, self.reason = nbytes, reason
        super().__init__(
            f"page-locking {nbytes / 2**30:.2f} GiB of host memory failed ({reason}); going on with pageable memory, "
            "whose copies block and are about half as fast. Free host memory, or raise what limits it: that of the "
            "container, WSL's, `ulimit -l`; memory_report() tells how much was locked"
        )


class HostMemory:
    """Hands out host tensors and counts them by memory kind and purpose.

    Tensors of one call lie side by side, in order, wherever a slab has room for all of them.

    Args:
        runtime: supplies the page-locked memory. Where it shares memory with the device, plain pageable
            tensors are handed out.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._bytes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._open: dict[tuple[str, str], Tensor] = {}
        self._pin_failed = False
        self._lock = runtime.signal()  # the caller and the workers allocate

    def allocate(self, like: Sequence[Tensor], purpose: str, kind: str = "pinned_host") -> list[Tensor]:
        """Uninitialised host tensors with the shapes, dtypes and order of elements of ``like``.

        Args:
            like: what to match; the tensors may live anywhere, the meta device included.
            purpose: the name under which :meth:`report` counts the bytes.
            kind: ``pinned_host``, or ``host`` for pageable memory.
        """
        with self._lock:
            return self._allocate(like, purpose, kind)

    def _allocate(self, like: Sequence[Tensor], purpose: str, kind: str) -> list[Tensor]:
        sizes = [padded(t.numel() * t.element_size()) for t in like]
        if self._runtime.shares_memory or kind == "host":
            self._bytes["host"][purpose] += sum(sizes)
            return carve(torch.empty(sum(sizes), dtype=torch.uint8), like)
        space = self._open.pop((kind, purpose), torch.empty(0, dtype=torch.uint8))
        total = sum(sizes)
        if total <= SLAB_BYTES:
            if total > space.numel():
                space = self._slab(total, purpose)
            views = carve(space, like)
            space = space[total:]
        else:
            views = []
            for tensor, size in zip(like, sizes, strict=True):
                if size > space.numel():
                    space = self._slab(size, purpose)
                views += carve(space, [tensor])
                space = space[size:]
        self._open[kind, purpose] = space
        return views

    def allocate_all(
        self, groups: Sequence[Sequence[Tensor]], purpose: str, kind: str = "pinned_host"
    ) -> list[list[Tensor]]:
        """The same for many groups of tensors at once, so that slabs are filled and page-locked in parallel.

        Tensors of one group lie side by side, but where a slab ends between two of them.
        """
        if self._runtime.shares_memory or kind == "host":
            return [self.allocate(group, purpose, kind) for group in groups]
        sizes = [padded(t.numel() * t.element_size()) for group in groups for t in group]
        with self._lock:
            slabs = iter(self._pin(list(slab_sizes(sizes)), purpose))
        space, placed = torch.empty(0, dtype=torch.uint8), []
        for group in groups:
            tensors = []
            for tensor in group:
                size = padded(tensor.numel() * tensor.element_size())
                if size > space.numel():
                    space = next(slabs)
                tensors += carve(space, [tensor])
                space = space[size:]
            placed.append(tensors)
        return placed

    def _pin(self, sizes: Sequence[int], purpose: str) -> list[Tensor]:
        """Slabs of ``sizes``, page-locked on several threads."""
        made: dict[int, Tensor | RuntimeError] = {}
        todo = iter(range(len(sizes)))
        lock = self._runtime.signal()
        progress = _Progress(sum(sizes))

        def work() -> None:
            while True:
                with lock:
                    index = next(todo, None)
                if index is None:
                    return
                slab: Tensor | RuntimeError
                try:
                    slab = self._runtime.empty_pinned(sizes[index])
                except RuntimeError as error:
                    slab = error
                with lock:
                    made[index] = slab
                    progress.add(sizes[index])

        helpers = min(len(sizes) - 1, PINNING_THREADS, os.cpu_count() or 1) if not self._pin_failed else 0
        threads = [self._runtime.start(work, "offload-pin") for _ in range(helpers)]
        if not self._pin_failed:
            work()
        for thread in threads:
            thread.join()
        return [self._account(size, size, purpose, made.get(index)) for index, size in enumerate(sizes)]

    def _slab(self, at_least: int, purpose: str) -> Tensor:
        """A slab that holds ``at_least`` bytes, as large as all that the purpose has so far, up to a full slab."""
        so_far = sum(purposes.get(purpose, 0) for purposes in self._bytes.values())
        wanted = max(at_least, min(so_far, SLAB_BYTES), ALIGNMENT)
        nbytes = _power_of_two(wanted)
        slab: Tensor | RuntimeError | None = None
        if not self._pin_failed:
            try:
                slab = self._runtime.empty_pinned(nbytes)
            except RuntimeError as error:
                slab = error
        return self._account(nbytes, wanted, purpose, slab)

    def _account(self, nbytes: int, wanted: int, purpose: str, slab: Tensor | RuntimeError | None) -> Tensor:
        """Count a slab; pageable memory of ``wanted`` bytes in place of one that could not be page-locked."""
        if isinstance(slab, Tensor):
            self._bytes["pinned_host"][purpose] += nbytes
            return slab
        if slab is not None and not self._pin_failed:
            self._pin_failed = True
            warnings.warn(PageLockWarning(nbytes, str(slab).splitlines()[0]), stacklevel=2)
        self._bytes["host"][purpose] += wanted
        return torch.empty(wanted, dtype=torch.uint8)

    def report(self) -> dict[str, dict[str, int]]:
        """Bytes handed out, as ``{memory kind: {purpose: bytes}}``, slabs at their full size."""
        return {kind: dict(purposes) for kind, purposes in self._bytes.items()}

    def report_with(
        self, states: Iterable[Tensor], is_on_host: Callable[[Tensor], bool], on_device: Mapping[str, int]
    ) -> dict[str, dict[str, int]]:
        """:meth:`report` with what was allocated elsewhere, without what is empty.

        Args:
            states: of an optimizer.
            is_on_host: tells whether a tensor is; the others are on the device.
            on_device: bytes there, by purpose.
        """
        report = self.report()
        there = report.setdefault("device", {})
        for state in states:
            purposes = report.setdefault("host", {}) if is_on_host(state) else there
            nbytes = sum(component.nbytes for component in components(state))
            purposes["optimizer_state"] = purposes.get("optimizer_state", 0) + nbytes
        there.update(on_device)
        kept = {kind: {purpose: nbytes for purpose, nbytes in p.items() if nbytes} for kind, p in report.items()}
        return {kind: purposes for kind, purposes in kept.items() if purposes}


def _power_of_two(nbytes: int) -> int:
    return 1 << max(nbytes - 1, 0).bit_length()


def slab_sizes(sizes: Sequence[int]) -> Iterator[int]:
    """The slabs that tensors of ``sizes`` (bytes, padded) need, filled one after another in order."""
    rest, space = sum(sizes), 0
    for size in sizes:
        if size > space:
            space = _power_of_two(max(size, min(rest, SLAB_BYTES)))
            yield space
        space -= size
        rest -= size


class _Progress:
    """Tells on standard error how far the page-locking of ``total`` bytes is."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._is_told = total >= TOLD_FROM
        if self._is_told and not sys.stderr.isatty():
            print(f"page-locking {total / 2**30:.1f} GiB of host memory", file=sys.stderr, flush=True)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._is_told and sys.stderr.isatty():
            end = "\n" if self._done == self._total else ""
            text = f"\rpage-locking host memory: {self._done / 2**30:.1f} of {self._total / 2**30:.1f} GiB"
            print(text, end=end, file=sys.stderr, flush=True)

"""Host memory: page-locked slabs with aligned views, and an account of every byte.

PyTorch's page-locked allocator rounds each block up to a power of two (86 MiB becomes 128), so tensors
are laid side by side in slabs whose sizes are powers of two already.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from offload.engine.runtime import Runtime

ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector register (AVX-512)."""

SLAB_BYTES = 1 << 30
"""Size of a full slab. Larger tensors get a slab of their own."""


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

    def _slab(self, at_least: int, purpose: str) -> Tensor:
        """A slab that holds ``at_least`` bytes, as large as all that the purpose has so far, up to a full slab."""
        so_far = sum(purposes.get(purpose, 0) for purposes in self._bytes.values())
        wanted = max(at_least, min(so_far, SLAB_BYTES), ALIGNMENT)
        nbytes = 1 << math.ceil(math.log2(wanted))
        if not self._pin_failed:
            try:
                slab = self._runtime.empty_pinned(nbytes)
                self._bytes["pinned_host"][purpose] += nbytes
                return slab
            except RuntimeError as error:
                self._pin_failed = True
                reason = str(error).splitlines()[0]
                warnings.warn(
                    f"page-locking {nbytes / 2**30:.2f} GiB of host memory failed ({reason}); going on with "
                    "pageable memory, whose copies block and are about half as fast. Raise the limit "
                    "(`ulimit -l`) or free memory.",
                    stacklevel=2,
                )
        slab = torch.empty(wanted, dtype=torch.uint8)
        self._bytes["host"][purpose] += wanted
        return slab

    def report(self) -> dict[str, dict[str, int]]:
        """Bytes handed out, as ``{memory kind: {purpose: bytes}}``, slabs at their full size."""
        return {kind: dict(purposes) for kind, purposes in self._bytes.items()}

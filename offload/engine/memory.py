"""Host memory: page-locked slabs with aligned views, and an account of every byte.

PyTorch's page-locked allocator rounds each block up to a power of two (86 MiB becomes 128), so tensors
are laid side by side in slabs whose sizes are powers of two already.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from offload.engine.runtime import Runtime

ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector register (AVX-512)."""

SLAB_BYTES = 1 << 30
"""Size of a full slab. Larger tensors get a slab of their own."""


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class HostMemory:
    """Hands out host tensors and counts them by memory kind and purpose.

    Args:
        runtime: supplies the page-locked memory. Where it shares memory with the device, plain pageable
            tensors are handed out.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._bytes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._pin_failed = False

    def allocate(self, like: Sequence[Tensor], purpose: str) -> list[Tensor]:
        """Uninitialised contiguous host tensors with the shapes and dtypes of ``like``.

        Args:
            like: shapes and dtypes to match; the tensors may live anywhere.
            purpose: the name under which :meth:`report` counts the bytes.
        """
        if self._runtime.shares_memory:
            tensors = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in like]
            self._bytes["host"][purpose] += sum(t.nbytes for t in tensors)
            return tensors
        sizes = [_padded(t.numel() * t.element_size()) for t in like]
        views: list[Tensor] = []
        slab, used = torch.empty(0, dtype=torch.uint8), 0
        for index, (tensor, size) in enumerate(zip(like, sizes, strict=True)):
            if used + size > slab.numel():
                slab, used = self._slab(size, sum(sizes[index:]), purpose), 0
            flat = slab[used : used + tensor.numel() * tensor.element_size()].view(tensor.dtype)
            views.append(flat.view(tensor.shape))
            used += size
        return views

    def _slab(self, at_least: int, remaining: int, purpose: str) -> Tensor:
        """A slab that holds the next tensor and, up to a full slab, what remains after it."""
        wanted = max(at_least, min(remaining, SLAB_BYTES))
        nbytes = 1 << math.ceil(math.log2(max(wanted, ALIGNMENT)))
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

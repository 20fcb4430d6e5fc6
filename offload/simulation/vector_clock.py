"""Vector clocks and the record of who touched which bytes: finds two accesses that nothing puts in order.

An *agent* does things one after another: a stream or a thread. Its clock holds, for every agent, how much of that
agent's work happened before its own next step. An access is ordered after an earlier one if its clock has reached
the earlier one's epoch (C. Fidge, "Timestamps in message-passing systems", 1988).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

# In-place operations that do not look at what they overwrite.
_OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"}

# Frames in these places say nothing about who made an access.
_MACHINERY = (str(Path(torch.__file__).parent), __file__, str(Path(__file__).with_name("accelerator.py")), "<")


class RaceError(AssertionError):
    """Two accesses to the same bytes, at least one a write, that nothing orders."""


class Clock(dict[str, int]):
    """How much of each agent's work happened before: agent to epoch."""

    def join(self, other: Clock) -> None:
        """Come after everything that ``other`` comes after."""
        for agent, epoch in other.items():
            if epoch > self.get(agent, 0):
                self[agent] = epoch

    def tick(self, agent: str) -> int:
        """Begin the next step of ``agent`` and return its epoch."""
        self[agent] = self.get(agent, 0) + 1
        return self[agent]


@dataclass(frozen=True)
class Access:
    """One read or write of the bytes ``[start, stop)`` of a storage."""

    agent: str
    epoch: int
    name: str
    writes: bool
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        what = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        return f"{self.name} on {self.agent} {verb} {what}, bytes {self.start}-{self.stop} ({self.place})"


class Memory:
    """A storage, kept alive so that its address is not used again, and the accesses that still matter."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.on_host = False
        self.accesses: list[Access] = []

    def add(self, new: Access, clock: Clock) -> None:
        """Check ``new``, made at ``clock``, against earlier accesses. Raises RaceError."""
        kept = []
        for old in self.accesses:
            ordered = old.epoch <= clock.get(old.agent, 0)
            overlaps = old.start < new.stop and new.start < old.stop
            if overlaps and not ordered and (old.writes or new.writes):
                raise RaceError(f"nothing orders two accesses:\n  {old}\n  {new}")
            # What comes after `new` comes after `old` too, and what conflicts with `old` conflicts with `new`.
            covered = new.start <= old.start and old.stop <= new.stop and (new.writes or not old.writes)
            if not (ordered and covered):
                kept.append(old)
        self.accesses = [*kept, new]


class Ledger:
    """Every storage that was touched."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}

    def memory(self, tensor: Tensor) -> Memory | None:
        """What is known of a tensor's storage; None for a tensor without one (empty, meta, sparse, wrapper)."""
        address = address_of(tensor)
        if not address:
            return None
        memory = self._memories.get(address)
        # A storage that was resized has left its address to others.
        if memory is None or memory.storage.data_ptr() != address:
            memory = self._memories[address] = Memory(tensor.untyped_storage())
        return memory

    def on_host(self, tensor: Tensor) -> bool:
        memory = self.memory(tensor)
        return memory is not None and memory.on_host

    def add(self, tensor: Tensor, *, writes: bool, agent: str, clock: Clock, name: str, place: str) -> None:
        """Record one access by ``agent``, whose step has begun, at ``clock``. Raises RaceError."""
        memory = self.memory(tensor)
        if memory is not None and tensor.numel():
            start, stop = byte_range(tensor)
            access = Access(agent, clock[agent], name, writes, start, stop, tuple(tensor.shape), tensor.dtype, place)
            memory.add(access, clock)


def address_of(tensor: Tensor) -> int:
    """Where a tensor's storage begins; 0 where it has none."""
    if tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """The smallest range of its storage's bytes that covers a tensor; gaps between strides count as touched."""
    start = stop = int(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        stop += (size - 1) * stride
    return start * tensor.itemsize, (stop + 1) * tensor.itemsize


def touched_bytes(tensor: Tensor) -> int:
    """Memory traffic of reading a tensor once; what is expanded is read once."""
    if not tensor.numel():
        return 0
    start, stop = byte_range(tensor)
    return min(tensor.numel() * tensor.itemsize, stop - start)


def touched_by(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> list[tuple[Tensor, bool, bool]]:
    """What an operation touched: tensor, whether it was read, whether it was written.

    New memory counts as written, even by ``empty``: a device's allocator hands out blocks that the allocating
    stream may still be using.
    """
    if torch.Tag.inplace_view in func.tags:
        return []
    operation = func.overloadpacket.__name__
    looks_at_shape = operation.startswith("new_") or operation.endswith("_like")
    touched = []
    known = set()
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name == "grads" and operation.startswith("_fused_") and kwargs.get("grad_scale") is None:
            writes = False  # written only to unscale them
        reads = not (looks_at_shape or writes and (argument.is_out or operation in _OVERWRITING))
        touched += [(tensor, reads, writes) for tensor in tensors]
        known |= {address_of(tensor) for tensor in tensors}
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    known.discard(0)
    if results and all(address_of(tensor) in known for tensor in results) and not any(entry[2] for entry in touched):
        return []  # views
    touched = [entry for entry in touched if entry[1] or entry[2]]
    return touched + [(tensor, False, True) for tensor in results if address_of(tensor) not in known]


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself, or those that a wrapper subclass is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from plain_tensors(getattr(tensor, name))


def place_of_caller() -> str:
    """``file.py:line`` of the innermost frame that is neither torch nor the simulator."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_MACHINERY) and not file.endswith("contextlib.py"):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"

"""The record of who touched which bytes: finds two accesses that nothing puts in order, and memory freed too early."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.simulation.memory import Block
from offload.simulation.touched import byte_range, plain_tensors
from offload.simulation.vector_clock import Clock

STREAMS = ("compute", "update", "up", "down")

COPY_STREAMS = ("up", "down")
"""Of them, those that work for host memory too."""


class RaceError(AssertionError):
    """Two accesses to the same bytes, at least one a write, that nothing orders; or a use of memory that was freed."""


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
    """A storage's memory, and the accesses to it that still matter.

    Attributes:
        on_host: host memory; else the device's.
        stream: the stream for which device memory was allocated, and which may use it again as soon as it is freed.
        over: what is known to be done by whoever frees it, beside what the thread and the stream know.
        nbytes: the storage's size when it was first seen.
        is_scalar: it was first seen as a tensor without dimensions.
        purpose: what it was allocated for.
        block: what the device's allocator handed out for it, if anything.
        is_loose: it may be freed early, see ``SimulatedAccelerator.loose_memory``.
    """

    __slots__ = (
        "_reference", "accesses", "block", "is_loose", "is_scalar", "nbytes", "on_host", "over", "purpose", "stream",
    )  # fmt: skip

    def __init__(
        self, reference: _Reference, nbytes: int, stream: str, purpose: str, *, on_host: bool, is_scalar: bool
    ) -> None:
        self._reference = reference
        self.nbytes = nbytes
        self.purpose = purpose
        self.is_scalar = is_scalar
        self.block: Block | None = None
        self.is_loose = False
        self.stream = stream
        self.on_host = on_host
        self.accesses: list[Access] = []
        self.over: Clock | None = None

    def is_of(self, storage: torch.UntypedStorage, address: int) -> bool:
        """Whether it is still what lies at an address, where ``storage`` begins."""
        mine = self._reference()
        return mine is storage or (mine is not None and mine.data_ptr() == address)

    def was_of(self, reference: _Reference) -> bool:
        return self._reference is reference

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
        kept.append(new)
        self.accesses = kept

    def used_until(self, clock: Clock) -> None:
        """Whoever frees the memory from now on does so after ``clock``."""
        if self.over is None:
            self.over = Clock(clock)
        else:
            self.over.join(clock)

    def still_used(self, *known: Clock, streams: Container[str] = STREAMS) -> Access | None:
        """An access that a device may not have done yet when the memory is freed.

        Args:
            streams: the device's.
            known: what the freeing thread knows to be done, and, for device memory, what the stream for which it was
                allocated waits for.
        """
        for access in self.accesses:
            # Threads' own accesses are over, and host memory is in use by copies alone: another operation that reads
            # it keeps it by itself, as torch's allocator of page-locked memory does.
            if access.agent not in (COPY_STREAMS if self.on_host else streams):
                continue
            clocks = known if self.over is None else (*known, self.over)
            if not any(access.epoch <= clock.get(access.agent, 0) for clock in clocks):
                return access
        return None


class _Reference(weakref.ref[torch.UntypedStorage]):
    """Knows where the storage was that it refers to."""

    __slots__ = ("address",)

    address: int


class Ledger:
    """Every storage that was touched and is alive.

    torch keeps a storage's Python object as long as its memory is in use, by views and saved tensors too, so that a
    weak reference tells when it is freed.

    Args:
        made: told of memory that was not known before.
        freed: told of memory that is known no more, and of the number of the thread that let go of it. Neither this
            call nor ``made`` is made inside the other, nor inside :meth:`working`.
    """

    def __init__(
        self, made: Callable[[Memory], None], freed: Callable[[Memory, int], None], *, records: bool = True
    ) -> None:
        self._made = made
        self._freed = freed
        self._records = records
        self._memories: dict[int, Memory] = {}
        self._dead: deque[tuple[Memory, int]] = deque()
        self._is_working = False

    def memory(
        self, tensor: Tensor, *, stream: str = "compute", purpose: str = "made before", on_host: bool = False
    ) -> Memory | None:
        """What is known of a tensor's storage; None for a tensor without one (empty, meta, sparse, wrapper).

        Args:
            stream: for which it was allocated, if it is new.
            purpose: what it was allocated for, if it is new.
            on_host: that it is host memory, if it is new.
        """
        if tensor.layout is not torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
        except (RuntimeError, NotImplementedError):
            return None
        if not address:
            return None
        memory = self._memories.get(address)
        if memory is not None:
            if memory.is_of(storage, address):
                return memory
            # A storage that was resized has left its address to others.
            self._forget(address, memory)
        reference = _Reference(storage, self._died)
        reference.address = address
        memory = Memory(reference, storage.nbytes(), stream, purpose, on_host=on_host, is_scalar=not tensor.dim())
        self._memories[address] = memory
        with self.working():
            self._made(memory)
        return memory

    def on_host(self, tensor: Tensor) -> bool:
        memory = self.memory(tensor)
        return memory is not None and memory.on_host

    def add(self, tensor: Tensor, *, writes: bool, agent: str, clock: Clock, name: str, place: str) -> None:
        """Record one access by ``agent``, whose step has begun, at ``clock``. Raises RaceError."""
        memory = self.memory(tensor)
        if memory is not None and self._records and tensor.numel():
            start, stop = byte_range(tensor)
            access = Access(agent, clock[agent], name, writes, start, stop, tuple(tensor.shape), tensor.dtype, place)
            memory.add(access, clock)

    def used_until(self, tensor: Tensor, clock: Clock) -> None:
        """Whoever frees a tensor's memory from now on does so after ``clock``."""
        for plain in plain_tensors(tensor):
            memory = self.memory(plain)
            if memory is not None:
                memory.used_until(clock)

    # ---- what is freed

    def forget(self, tensor: Tensor) -> None:
        """A tensor's memory is about to be freed, and its storage kept."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        memory = self._memories.get(address)
        if memory is not None and memory.is_of(storage, address):
            self._forget(address, memory)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, nobody is told of freed memory; afterwards of all that was freed meanwhile.

        Memory may be freed whenever Python's garbage collector runs, which is anywhere.
        """
        before, self._is_working = self._is_working, True
        try:
            yield
        finally:
            self._is_working = before
            if self._dead and not before:
                self._bury()

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _Reference)
        memory = self._memories.get(reference.address)
        if memory is not None and memory.was_of(reference):
            self._forget(reference.address, memory)

    def _forget(self, address: int, memory: Memory) -> None:
        del self._memories[address]
        self._dead.append((memory, threading.get_ident()))
        if not self._is_working:
            self._bury()

    def _bury(self) -> None:
        self._is_working = True
        try:
            while self._dead:
                self._freed(*self._dead.popleft())
        finally:
            self._is_working = False

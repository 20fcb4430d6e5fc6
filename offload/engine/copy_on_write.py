"""Weights and states as they are at a moment, read while training goes on.

At that moment nothing is copied. What is read of a piece before its next update is read from where it rests; what is
not, the update copies to host memory of a fixed size first, or waits for where that is full. So a checkpoint that is
written beside training holds one step, and costs no second copy of the states.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from offload.engine.host import HostCopies
from offload.engine.memory import ALIGNMENT, SLAB_BYTES, HostMemory, padded
from offload.engine.runtime import DONE, Event, Runtime
from offload.engine.shards import local
from offload.engine.states import States
from offload.engine.units import Piece, flat_bytes

STEP_BYTES = 64 * 2**20
"""Brought to the host at once: so long at most does an update wait for a reader that has begun."""


class Source(Protocol):
    """Where the values of tensors come from that are written to a checkpoint."""

    def reading(self, tensor: Tensor) -> AbstractContextManager[Tensor]:
        """Inside, a tensor's values on the host, not to be changed. ``tensor`` is dense."""

    def done(self, tensor: Tensor) -> None:
        """A tensor is not read any more."""

    def position(self, tensor: Tensor) -> float:
        """When it should be read, among others: smaller is earlier."""

    def close(self) -> None:
        """Nothing is read any more."""


class Unchanging:
    """A :class:`Source` of tensors that nothing changes while they are read."""

    @contextmanager
    def reading(self, tensor: Tensor) -> Iterator[Tensor]:
        yield tensor.detach().cpu()

    def done(self, tensor: Tensor) -> None:
        return None

    def position(self, tensor: Tensor) -> float:
        return math.inf

    def close(self) -> None:
        return None


@dataclass(frozen=True)
class Memory:
    """Memory that an update changes.

    Attributes:
        live: uint8, flat; what a reader names.
        source: the same bytes where they are to be read: ``live``, or a copy on the host that is up to date.
    """

    live: Tensor
    source: Tensor


@dataclass(eq=False)
class _Part:
    """What one update changes.

    Attributes:
        memory: that it changes.
        position: in the order of the next updates.
        left: tensors in it that are still to be read.
        reading: readers that are at its memory.
        is_open: it was not updated since the moment.
        kept: copies, of each of ``memory``.
        copied: after it, they are there.
    """

    memory: list[Memory]
    position: int
    left: int = 0
    reading: int = 0
    is_open: bool = True
    kept: list[Tensor] = field(default_factory=list)
    copied: Event = DONE


class Room:
    """Page-locked host memory of a fixed size for what updates copy, and for what is on its way to a reader.

    Args:
        memory: supplies it.
        nbytes: in all.
    """

    def __init__(self, memory: HostMemory, nbytes: int) -> None:
        self._slabs: list[Tensor] = []
        for size in _powers_of_two(nbytes):  # one at a time: of several, a slab is as large as the rest
            like = torch.empty(size, dtype=torch.uint8, device="meta")
            self._slabs += memory.allocate_all([[like]], "checkpoint")[0]
        step = padded(min(STEP_BYTES, self._slabs[0].numel() // 2))
        self.step, self._slabs[0] = self._slabs[0][:step], self._slabs[0][step:]
        self._taken: list[list[tuple[int, int]]] = [[] for _ in self._slabs]
        self._places: dict[int, tuple[int, tuple[int, int]]] = {}

    def take(self, sizes: Sequence[int]) -> list[Tensor] | None:
        """Buffers of so many bytes, uint8; None where there is no room for all."""
        buffers: list[Tensor] = []
        for size in sizes:
            buffer = self._take(size)
            if buffer is None:
                self.give_back(buffers)
                return None
            buffers.append(buffer)
        return buffers

    def _take(self, size: int) -> Tensor | None:
        for index, (slab, taken) in enumerate(zip(self._slabs, self._taken, strict=True)):
            start = 0
            for begin, end in [*taken, (slab.numel(), slab.numel())]:
                if begin - start >= size:
                    place = start, start + padded(size)
                    insort(taken, place)
                    buffer = slab[start : start + size]
                    self._places[buffer.data_ptr()] = index, place
                    return buffer
                start = end
        return None

    def give_back(self, buffers: Iterable[Tensor]) -> None:
        """Take buffers of :meth:`take` back; nothing uses them any more."""
        for buffer in buffers:
            index, place = self._places.pop(buffer.data_ptr())
            self._taken[index].remove(place)

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return sum(end - begin for taken in self._taken for begin, end in taken)


def _powers_of_two(nbytes: int) -> Iterator[int]:
    """Sizes of slabs, which are powers of two, that make up ``nbytes`` but for less than the alignment."""
    size = SLAB_BYTES
    while size >= ALIGNMENT:
        yield from [size] * (nbytes // size)
        nbytes, size = nbytes % size, size // 2


class Snapshot:
    """The values of parameters and states at the moment when it is made: a :class:`Source`.

    Until it is closed, :meth:`before_update` has to be called before each update, with the stream current that updates.

    Args:
        runtime: streams of the device.
        room: for copies.
        parts: what each update changes, in the order in which the next updates are expected. Everything queued that
            writes to it is done.
    """

    def __init__(self, runtime: Runtime, room: Room, parts: Mapping[Hashable, list[Memory]]) -> None:
        self._runtime = runtime
        self._room = room
        self._signal = runtime.signal()
        self._is_closed = False
        self._parts = {
            key: _Part([each for each in memory if each.live.numel()], position)  # a rank's part may be empty
            for position, (key, memory) in enumerate(parts.items())
        }
        spans = [
            (memory.live.device, memory.live.data_ptr(), part, index)
            for part in self._parts.values()
            for index, memory in enumerate(part.memory)
        ]
        spans.sort(key=lambda span: (str(span[0]), span[1]))
        self._starts = [(str(device), start) for device, start, _, _ in spans]
        self._spans = [(part, index) for _, _, part, index in spans]

    # The reader's side

    def expect(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that will be read, each until :meth:`done`. What is not expected is not kept; call it before the next
        update."""
        with self._signal:
            for tensor in tensors:
                for part in self._parts_of(tensor):
                    part.left += 1

    def holds(self, tensor: Tensor) -> bool:
        """Whether updates change a tensor, all of it; else it is nothing that this knows."""
        return sum(stop - start for _, _, start, stop in self._ranges(tensor)) == tensor.nbytes > 0

    def position(self, tensor: Tensor) -> float:
        return min((part.position for part in self._parts_of(tensor)), default=math.inf)

    @contextmanager
    def reading(self, tensor: Tensor) -> Iterator[Tensor]:
        """Inside, a tensor's values on the host, as they were.

        Args:
            tensor: dense; over memory that updates change, or not at all.

        Raises:
            RuntimeError: it is not expected to be read any more, so that its values may be lost.
        """
        ranges = list(self._ranges(tensor))
        if not ranges:
            yield tensor.detach().cpu()
            return
        assert sum(stop - start for _, _, start, stop in ranges) == tensor.nbytes
        if len(ranges) == 1:
            part, index, start, stop = ranges[0]
            with self._at(part, index) as (source, is_on_host):
                if is_on_host:
                    yield _shaped(source[start:stop], tensor)
                    return
        is_locked = tensor.nbytes <= self._room.step.numel()
        whole = self._room.step[: tensor.nbytes] if is_locked else torch.empty(tensor.nbytes, dtype=torch.uint8)
        at = 0
        for part, index, start, stop in ranges:
            for begin in range(start, stop, self._room.step.numel()):
                end = min(begin + self._room.step.numel(), stop)
                with self._at(part, index) as (source, is_on_host):
                    self._fetch(whole[at : at + end - begin], source[begin:end], is_on_host, is_locked)
                at += end - begin
        yield _shaped(whole, tensor)

    def _fetch(self, target: Tensor, source: Tensor, is_on_host: bool, is_locked: bool) -> None:
        """``is_locked``: the target is page-locked, else what comes from a device goes through memory that is."""
        if is_on_host:
            target.copy_(source)
            return
        step = target if is_locked else self._room.step[: source.numel()]
        self._runtime.copy(step, source, "down", (), "checkpoint down").synchronize()
        if not is_locked:
            target.copy_(step)

    @contextmanager
    def _at(self, part: _Part, index: int) -> Iterator[tuple[Tensor, bool]]:
        """Inside, a part's memory is as it was: (that, whether it is on the host)."""
        with self._signal:
            if not part.left:
                raise RuntimeError("a tensor of a checkpoint is read after it was done with")
            is_live = part.is_open
            part.reading += is_live
        try:
            if is_live:
                source = part.memory[index].source
                yield source, self._runtime.is_on_host(source)
            else:
                part.copied.synchronize()
                yield part.kept[index], True
        finally:
            with self._signal:
                part.reading -= is_live
                self._signal.notify_all()

    def done(self, tensor: Tensor) -> None:
        with self._signal:
            for part in self._parts_of(tensor):
                part.left -= 1
                if not part.left:
                    self._let_go(part)
            self._signal.notify_all()

    def close(self) -> None:
        """Nothing is read any more."""
        with self._signal:
            for part in self._parts.values():
                part.left = 0
                self._let_go(part)
            self._is_closed = True
            self._signal.notify_all()

    def _let_go(self, part: _Part) -> None:
        part.copied.synchronize()
        self._room.give_back(part.kept)
        part.kept = []

    # The engine's side

    def before_update(self, key: Hashable) -> None:
        """Keep what is still to be read of a part, or wait until it is read; the current stream's later work may
        change it."""
        part = self._parts.get(key)
        if part is None:
            return
        room: list[Tensor] | None = None
        with self._signal:
            while part.is_open and part.left and room is None:
                room = self._room.take([memory.live.numel() for memory in part.memory])
                if room is None:
                    self._signal.wait()
        copied: Event = DONE
        for memory, target in zip(part.memory, room or (), strict=False):
            if self._runtime.is_on_host(memory.source):
                target.copy_(memory.source)
            else:
                copied = self._runtime.copy(target, memory.source, "down", (), "checkpoint kept")
        with self._signal:
            part.is_open = False
            if room is not None:
                part.kept, part.copied = room, copied
            if not part.left:
                self._let_go(part)
            while part.reading:
                self._signal.wait()
        self._runtime.wait(copied)

    def wait(self) -> None:
        """Block until it is closed: what it knows will change in other ways than by updates."""
        with self._signal:
            while not self._is_closed:
                self._signal.wait()

    # Where tensors are

    def _parts_of(self, tensor: Tensor) -> list[_Part]:
        return list({id(part): part for part, _, _, _ in self._ranges(tensor)}.values())

    def _ranges(self, tensor: Tensor) -> Iterator[tuple[_Part, int, int, int]]:
        """(part, which of its memory, from which byte of that, to which), in order."""
        begin, end, device = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, str(tensor.device)
        first = max(0, bisect_right(self._starts, (device, begin)) - 1)
        for part, index in self._spans[first : bisect_left(self._starts, (device, end))]:
            live = part.memory[index].live
            start = live.data_ptr()
            low, high = max(begin, start), min(end, start + live.numel())
            if low < high and str(live.device) == device:
                yield part, index, low - start, high - start


def _shaped(memory: Tensor, like: Tensor) -> Tensor:
    """Bytes as a tensor of the dtype, shape and order of elements of a dense one."""
    return memory.view(like.dtype).as_strided(like.shape, like.stride())


class CopyOnWrite:
    """An optimizer's snapshots, of which there is one at a time.

    Args:
        runtime: streams of the device.
        memory: of the host.
        states: what updates change beside parameters.
        copies: of the parameters that the CPU updates.
    """

    def __init__(self, runtime: Runtime, memory: HostMemory, states: States, copies: HostCopies | None) -> None:
        self._runtime = runtime
        self._memory = memory
        self._states = states
        self._copies = copies
        self._room: Room | None = None
        self._current: Snapshot | None = None

    def reserve(self, nbytes: int) -> None:
        """Page-lock what snapshots may use, before there is one."""
        self._room = Room(self._memory, nbytes)

    def take(self, pieces: Iterable[Piece]) -> Snapshot:
        """A snapshot of what updates change, while nothing is queued; the one before is closed, or is waited for.

        Args:
            pieces: all, in the order in which their next updates are expected.
        """
        if self._room is None:
            raise RuntimeError("there is no room for a snapshot: call reserve_snapshot first")
        self.wait()
        self._runtime.record().synchronize()  # what updates at once, or the caller, has queued
        changed: dict[Hashable, list[Memory]] = {piece: list(self._changed_by(piece)) for piece in pieces}
        self._current = Snapshot(self._runtime, self._room, changed)
        return self._current

    def _changed_by(self, piece: Piece) -> Iterator[Memory]:
        for part in piece.slices:
            values = flat_bytes(part.of(local(part.param)))
            source = values
            if self._copies is not None and self._copies.known([part.param]):
                source = flat_bytes(part.of(self._copies.of(part.param)))
            yield Memory(values, source)
            for state in map(flat_bytes, self._states.memory(part)):
                yield Memory(state, state)

    def before_update(self, piece: Piece) -> None:
        """See :meth:`Snapshot.before_update`."""
        if self._current is not None:
            self._current.before_update(piece)

    def wait(self) -> None:
        """Block until nothing is read any more."""
        if self._current is not None:
            self._current.wait()
            self._current = None

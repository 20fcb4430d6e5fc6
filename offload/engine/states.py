"""Optimizer states at rest, and their way to the device and back, piece by piece.

At rest a state is one tensor of the base optimizer's ``state``, in its usual place under its usual key, so that
``state_dict()`` is the base optimizer's own. States that rest on the host lie in page-locked slabs, those of a
piece side by side: one copy brings them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.base import Entry, state_blocks
from offload.engine.forecast import Form
from offload.engine.memory import ALIGNMENT, HostMemory, carve, padded
from offload.engine.placement import Placement
from offload.engine.shards import has_blocks, local
from offload.engine.units import Piece, Slice, components, flat_bytes, rebuild

Move = Callable[[Tensor, Tensor], object]
"""``move(destination, source)`` copies between two plain tensors, now or queued."""


@dataclass
class _Staged:
    """One state of one slice: where it rests, and the offsets of its components in the staging buffer."""

    slice: Slice
    key: str
    resting: Tensor
    parts: list[Tensor]
    offsets: list[int]


@dataclass
class Layout:
    """How the host-resting states of a piece lie in a staging buffer.

    Attributes:
        nbytes: size of the buffer that it needs.
        runs: ``(host memory as uint8, offset in the buffer)``: the copies that bring everything.
        staged: the states.
        views: of each buffer, by its address: the states of each slice as they lie there.
    """

    nbytes: int = 0
    runs: list[tuple[Tensor, int]] = field(default_factory=list)
    staged: list[_Staged] = field(default_factory=list)
    views: dict[int, dict[Slice, dict[str, Tensor]]] = field(default_factory=dict)


class States:
    """The base optimizer's states, by slices.

    A state that has the parameter's shape has ranges, as the parameter has. So has one of ``[ceil(numel / N)]``
    elements, of which each belongs to ``N`` elements of the parameter, if the optimizer's class names it in an
    attribute ``state_block``, a mapping of states' keys to ``N``.

    Args:
        base: the base optimizer.
        resting: maps a parameter to the key of its state in ``base.state``.
        placement: which states rest on the host; None where all stay where the update runs.
        memory: supplies the host memory.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        resting: Callable[[nn.Parameter], nn.Parameter],
        placement: Placement | None,
        memory: HostMemory,
    ) -> None:
        self._base = base
        self._resting = resting
        self._placement = placement
        self._memory = memory
        self._blocks = state_blocks(type(base))
        self._block = math.lcm(*self._blocks.values())
        self._layouts: dict[Piece, Layout] = {}
        self._own: dict[tuple[Slice, str], Any] = {}  # of a range of a parameter: its copy of what has no ranges
        self._begun: dict[nn.Parameter, set[Slice]] = {}  # ranges that had their first update, if not all at once
        self._planned: dict[tuple[nn.Parameter, str], list[Tensor]] = {}  # memory of states that are still to come

    def _state(self, param: nn.Parameter) -> dict[str, Any]:
        return self._base.state[self._resting(param)]

    def _has_state(self, part: Slice) -> bool:
        begun = self._begun.get(part.param)
        return self._resting(part.param) in self._base.state and (begun is None or part in begun)

    def _rests_on_host(self, key: str, value: Any, name: str) -> str | None:
        """The kind of host memory that a state rests in; None where it stays. Scalars are not worth a copy."""
        if self._placement is None or not isinstance(value, Tensor) or value.dim() == 0:
            return None
        kind = self._placement.memory(key, name)
        return None if kind == "device" else kind

    def for_saving(
        self, states: Mapping[int, Mapping[str, Any]], names: Mapping[int, str]
    ) -> dict[int, dict[str, Any]]:
        """States of a ``state_dict`` as tensors with a storage of their own, over the same memory.

        What is saved or copied is then a state and not the slab that it lies in.

        Args:
            states: by a parameter's position over all groups.
            names: the parameters' names, by the same.
        """
        return {
            index: {
                key: rebuild(value, map(_alone, components(value)))
                if self._rests_on_host(key, value, names[index])
                else value
                for key, value in state.items()
            }
            for index, state in states.items()
        }

    def publish(self) -> None:
        """Bring the base optimizer's ``state`` up to date in what each range of a cut parameter has a copy of."""
        for (part, key), value in self._own.items():
            if part.is_last:
                self._state(part.param)[key] = value
        self._own.clear()

    def is_counted(self, key: str, value: Tensor, name: str) -> bool:
        """Whether a state lies in memory that :class:`HostMemory` counts."""
        return self._rests_on_host(key, value, name) is not None

    def plan(self, pieces: Sequence[Piece], forms: Callable[[Slice], Sequence[Form]]) -> int:
        """Page-lock memory for states before there are any, those of a piece side by side.

        Args:
            pieces: what has no states yet.
            forms: the states that a slice's parameter will have.

        Returns:
            Bytes of a staging buffer that holds the states of any of the pieces.
        """
        largest = 0
        wanted: dict[str, list[list[tuple[tuple[nn.Parameter, str], Tensor]]]] = {}  # by kind and piece
        for piece in pieces:
            staged = 0
            of_piece: dict[str, list[tuple[tuple[nn.Parameter, str], Tensor]]] = {}
            for part in piece.slices:
                for form in forms(part) if part.param.requires_grad else ():
                    likes = [component.of(local(part.param)) for component in form.components]
                    kind = self._rests_on_host(form.key, likes[0], part.name)
                    if kind is None:
                        continue
                    staged += sum(padded(c.elements(part) * c.dtype.itemsize) for c in form.components)
                    if part.start == 0:
                        of_piece.setdefault(kind, []).extend(((part.param, form.key), like) for like in likes)
            for kind, entries in of_piece.items():
                wanted.setdefault(kind, []).append(entries)
            largest = max(largest, staged)
        for kind, by_piece in wanted.items():
            likes_of = [[like for _, like in entries] for entries in by_piece]
            placed = self._memory.allocate_all(likes_of, "optimizer_state", kind)
            for entries, tensors in zip(by_piece, placed, strict=True):
                for (owner, _), tensor in zip(entries, tensors, strict=True):
                    self._planned.setdefault(owner, []).append(tensor)
        return largest

    def _memory_of(self, param: nn.Parameter, key: str, like: Sequence[Tensor]) -> list[Tensor] | None:
        """The planned memory of a state in the form of ``like``; None where none fits."""
        planned = self._planned.pop((param, key), [])
        if [tensor.nbytes for tensor in planned] != [tensor.numel() * tensor.element_size() for tensor in like]:
            return None
        return [carve(flat_bytes(memory), [tensor])[0] for memory, tensor in zip(planned, like, strict=True)]

    # On the way

    def layout(self, piece: Piece) -> Layout:
        """Where the states of a piece go in a staging buffer; empty before there are any."""
        layout = self._layouts.get(piece)
        if layout is None:
            layout = self._layouts[piece] = self._lay_out(piece)
        return layout

    def forget_layouts(self) -> None:
        """States may be other tensors now, or staging buffers."""
        self._layouts.clear()

    def _on_host(self, piece: Piece) -> Iterator[tuple[Slice, str, Tensor]]:
        """The states that have to be brought to the device for the update of a piece."""
        for part in piece.slices if piece.way != "host" else ():
            if self._has_state(part):
                for key, value in self._state(part.param).items():
                    if self._rests_on_host(key, value, part.name):
                        yield part, key, value

    def _lay_out(self, piece: Piece) -> Layout:
        layout = Layout()
        end_of_run = -1
        for part, key, value in self._on_host(piece):
            wholes = components(value)
            parts = [self._range(part, key, whole) for whole in wholes]
            offsets = []
            for whole, component in zip(wholes, parts, strict=True):
                memory = flat_bytes(component)
                size = padded(memory.numel())
                offsets.append(layout.nbytes)
                if layout.runs and memory.data_ptr() == end_of_run and _same_storage(layout.runs[-1][0], memory):
                    before, at = layout.runs[-1]
                    joined = before.as_strided((layout.nbytes - at + memory.numel(),), (1,))
                    layout.runs[-1] = (joined, at)
                else:
                    layout.runs.append((memory, layout.nbytes))
                # What pads a state's end is nobody's; behind another range lies the next, which is another piece's.
                is_aligned = (memory.data_ptr() - whole.data_ptr()) % ALIGNMENT == 0
                owns_padding = is_aligned and (part.is_last or size == memory.numel())
                end_of_run = memory.data_ptr() + size if owns_padding else -1
                layout.nbytes += size
            layout.staged.append(_Staged(part, key, value, parts, offsets))
        return layout

    def _range(self, part: Slice, key: str, value: Tensor) -> Tensor:
        return part.of(value, self._blocks.get(key, 1))

    def _has_ranges(self, key: str, value: Any, shape: Sequence[int]) -> bool:
        """Whether a state of a parameter, or of a range of it, of that shape has an element for each or each few of
        its elements."""
        return isinstance(value, Tensor) and value.shape == self._shape(key, shape)

    def _shape(self, key: str, shape: Sequence[int]) -> torch.Size:
        whole = torch.Size(shape)
        return torch.Size([-(-whole.numel() // self._blocks[key])]) if key in self._blocks else whole

    def staged(self, part: Slice, layout: Layout | None, buffer: Tensor | None) -> dict[str, Any]:
        """The state of one slice for the base optimizer, with what rests on the host in ``buffer``."""
        if layout is None or buffer is None:
            return self._in_place(part, {}, everything=True)
        address = buffer.data_ptr()
        if address not in layout.views:
            layout.views[address] = self._views(layout, buffer)
        views = layout.views[address].get(part, {})
        return {**self._in_place(part, views), **views}

    def _views(self, layout: Layout, buffer: Tensor) -> dict[Slice, dict[str, Tensor]]:
        views: dict[Slice, dict[str, Tensor]] = {}
        for entry in layout.staged:
            pairs = zip(entry.parts, entry.offsets, strict=True)
            parts = [carve(buffer[offset:], [component])[0] for component, offset in pairs]
            like = self._range(entry.slice, entry.key, entry.resting)
            views.setdefault(entry.slice, {})[entry.key] = rebuild(like, iter(parts))
        return views

    def _in_place(self, part: Slice, staged: Mapping[str, Tensor], *, everything: bool = False) -> dict[str, Any]:
        """What of a slice's state is where the update runs: all but ``staged`` and what rests elsewhere, or
        ``everything``."""
        state: dict[str, Any] = {}
        if not self._has_state(part):
            return state
        for key, value in self._state(part.param).items():
            if not everything and (key in staged or (not staged and self._rests_on_host(key, value, part.name))):
                continue
            if part.is_whole:
                state[key] = value
            elif self._has_ranges(key, value, local(part.param).shape):
                state[key] = self._range(part, key, value)
            else:
                if (part, key) not in self._own:
                    self._own[part, key] = _copy(value)
                state[key] = self._own[part, key]
        return state

    @staticmethod
    def keep_in_place(before: dict[str, Any], now: dict[str, Any]) -> None:
        """Where an update put a new tensor in a state's place, bring its values into the old one."""
        for key, value in before.items():
            if isinstance(value, Tensor) and now.get(key) is not value and _same_form(value, now.get(key)):
                value.copy_(now[key])
                now[key] = value

    def update(
        self,
        tensors: Mapping[Slice, tuple[Tensor, Tensor]],
        step: Callable[[Sequence[Entry]], None],
        layout: Layout | None = None,
        buffer: Tensor | None = None,
        *,
        move: Move = torch.Tensor.copy_,
    ) -> None:
        """Update slices, with their states from where they are.

        Args:
            tensors: values, which change in place, and gradient of each slice.
            step: runs the base optimizer.
            layout: of the piece that the slices are of, where its states were brought into ``buffer``; they change
                there. None where no state rests elsewhere than where the update runs.
            buffer: uint8, of ``layout.nbytes``.
            move: brings a created tensor to where it rests.
        """
        entries = {
            part: Entry(
                part.group,
                part.position,
                part.first,
                tensor,
                gradient,
                self.staged(part, layout, buffer),
                has_blocks(part.param, self._block),
            )
            for part, (tensor, gradient) in tensors.items()
        }
        before = {part: dict(entry.state) for part, entry in entries.items()}
        step(list(entries.values()))
        for part, entry in entries.items():
            self.keep_in_place(before[part], entry.state)
        self.rest([(part, before[part], entry.state) for part, entry in entries.items()], move)

    def rest(self, updates: Sequence[tuple[Slice, dict[str, Any], dict[str, Any]]], move: Move) -> None:
        """Take over what an update created.

        Args:
            updates: ``(slice, its state as handed to the base optimizer, its state now)``.
            move: brings a created tensor to where it rests.
        """
        created: list[tuple[Slice, str, Tensor]] = []
        for part, before, now in updates:
            if not part.is_whole and (part.param in self._begun or self._resting(part.param) not in self._base.state):
                self._begun.setdefault(part.param, set()).add(part)
            for key, value in now.items():
                target = self._state(part.param)
                if not part.is_whole and not self._has_ranges(key, value, (part.numel,)):
                    self._own[part, key] = value
                    target.setdefault(key, value)
                elif key in before and value is before[key]:
                    continue
                elif not isinstance(value, Tensor) or part.is_whole and not self._rests_on_host(key, value, part.name):
                    target[key] = value
                else:
                    created.append((part, key, value))
        if created:
            self.forget_layouts()
        for part, key, value in created:
            if not part.is_whole:
                self._rest_range(part, key, value, move)
        self._rest_whole([entry for entry in created if entry[0].is_whole], move)

    def _rest_range(self, part: Slice, key: str, value: Tensor, move: Move) -> None:
        target = self._state(part.param)
        shape = local(part.param).shape
        if not self._has_ranges(key, target.get(key), shape):
            whole = torch.empty(self._shape(key, shape), dtype=value.dtype, device="meta")
            kind = self._rests_on_host(key, whole, part.name)
            if kind is None:
                target[key] = torch.empty_like(whole, device=value.device)
            else:
                planned = self._memory_of(part.param, key, [whole])
                (target[key],) = planned or self._memory.allocate([whole], "optimizer_state", kind)
        resting = self._range(part, key, target[key])
        if self._rests_on_host(key, value, part.name):
            move(resting, value)
        else:
            resting.copy_(value)

    def _rest_whole(self, created: Sequence[tuple[Slice, str, Tensor]], move: Move) -> None:
        without: dict[str, list[tuple[Slice, str, Tensor]]] = {}
        for part, key, value in created:
            memory = self._memory_of(part.param, key, components(value))
            if memory is not None:
                self._rest_in(memory, part, key, value, move)
                continue
            kind = self._rests_on_host(key, value, part.name)
            assert kind is not None
            without.setdefault(kind, []).append((part, key, value))
        for kind, entries in without.items():
            sources = [components(value) for _, _, value in entries]
            memory = self._memory.allocate([source for parts in sources for source in parts], "optimizer_state", kind)
            for (part, key, value), parts in zip(entries, sources, strict=True):
                self._rest_in(memory[: len(parts)], part, key, value, move)
                memory = memory[len(parts) :]

    def _rest_in(self, memory: Sequence[Tensor], part: Slice, key: str, value: Tensor, move: Move) -> None:
        for target, source in zip(memory, components(value), strict=True):
            move(target, source)
        self._state(part.param)[key] = rebuild(value, iter(memory))

    def memory(self, part: Slice) -> Iterator[Tensor]:
        """The plain tensors that an update of a slice changes of its states, where they rest; no scalars."""
        for key, value in self._state(part.param).items() if self._has_state(part) else ():
            if isinstance(value, Tensor) and value.dim():
                has_ranges = not part.is_whole and self._has_ranges(key, value, local(part.param).shape)
                yield from components(self._range(part, key, value) if has_ranges else value)

    # From one memory to another, while nothing works on them

    def of(self, param: nn.Parameter) -> Mapping[str, Any]:
        """What the base optimizer keeps for a parameter; empty before its first update."""
        return self._base.state.get(self._resting(param), {})

    def lift(self, param: nn.Parameter, key: str, empty: Callable[[Tensor], Tensor], move: Move) -> None:
        """Bring a state from the host to the device. Its host memory is kept, for :meth:`lower`.

        Args:
            param: whose.
            key: of the state.
            empty: makes a device tensor in the form of another.
            move: copies from host to device.

        Raises:
            torch.OutOfMemoryError: the state is where it was.
        """
        value = self._state(param)[key]
        parts = components(value)
        targets = [empty(part) for part in parts]
        for target, part in zip(targets, parts, strict=True):
            move(target, part)
        self._planned[param, key] = parts
        self._state(param)[key] = rebuild(value, iter(targets))
        self.forget_layouts()

    def lower(self, whole: Slice, key: str, move: Move) -> None:
        """Bring a state of a parameter from the device to where the placement rests it now."""
        self._rest_whole([(whole, key, self._state(whole.param)[key])], move)
        self.forget_layouts()

    def hand_over(self, before: nn.Parameter, whole: Slice, device: torch.device) -> None:
        """Give what was kept under one key to the tensor that is updated in its place, on ``device``."""
        state = self._base.state.pop(before, None)
        if state is None:
            return
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 0 and not self._is_host_scalar(key, value, whole.group):
                state[key] = value.to(device)
        self._base.state[self._resting(whole.param)] = state
        self.forget_layouts()

    # Loading

    def forget(self) -> None:
        """Drop what was derived from states that have been replaced."""
        self._own.clear()
        self._layouts.clear()
        self._begun.clear()

    def adopt(self, pieces: Iterable[Piece], previous: dict[Any, dict[str, Any]], device: torch.device) -> None:
        """Bring loaded states to where they rest, into the memory of those that were there before.

        Args:
            pieces: all pieces.
            previous: the base optimizer's ``state`` before loading.
            device: where states that do not rest on the host go.
        """
        self.forget()
        seen: set[tuple[nn.Parameter, str]] = set()
        for piece in pieces:
            missing: list[tuple[Slice, str, Tensor]] = []
            for part in piece.slices:
                before = previous.get(self._resting(part.param), {})
                state = self._base.state.get(self._resting(part.param), {})
                for key, value in before.items():
                    if key not in state and self._rests_on_host(key, value, part.name):
                        self._planned[part.param, key] = components(value)  # until it is made again
                whole = replace(part, start=0, stop=local(part.param).numel())
                for key, value in list(state.items()):
                    if (part.param, key) in seen or not isinstance(value, Tensor):
                        continue
                    seen.add((part.param, key))
                    if not self._rests_on_host(key, value, part.name):
                        if not self._is_host_scalar(key, value, part.group):
                            state[key] = value.to("cpu" if piece.way == "host" else device)
                    elif key in before and _same_form(before[key], value):
                        for old, new in zip(components(before[key]), components(value), strict=True):
                            old.copy_(new)
                        state[key] = before[key]
                    else:
                        missing.append((whole, key, value))
            self._rest_whole(missing, torch.Tensor.copy_)

    def _is_host_scalar(self, key: str, value: Tensor, group: int) -> bool:
        """Step counters that torch's optimizers keep on the CPU, whatever device they update."""
        options = self._base.param_groups[group]
        return value.dim() == 0 and key == "step" and not (options.get("fused") or options.get("capturable"))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _alone(tensor: Tensor) -> Tensor:
    """The same memory as a tensor whose storage has nothing else in it; it keeps the slab alive."""
    if not tensor.numel():
        return torch.empty_like(tensor)
    flat = torch.from_numpy(flat_bytes(tensor).numpy()).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _same_form(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or type(a) is not type(b):
        return False
    pairs = list(zip(components(a), components(b), strict=False))
    return len(components(a)) == len(components(b)) and all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)

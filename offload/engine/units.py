"""What is updated together: units (a layer, the embedding, the head), cut into pieces that fit a staging buffer."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from offload.engine.shards import first_element, local

CHUNK_ELEMENTS = 48 * 2**20
"""Elements of the largest piece, unless a single tensor that cannot be cut is larger. A layer of a 7B model is five
pieces, of whole tensors: each piece costs Python and a handful of CUDA calls, and a tensor that is cut needs a copy for
each of its states and ranges. A multiple of 64, so that ranges of a tensor begin at the alignment of host memory."""

Way = Literal["resident", "stream", "host"]

Member = tuple[nn.Parameter, str, int, int]
"""``(parameter, name, index of its group, its position over all groups)``."""

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module|module(?=\.))\.?")


def clean_name(name: str) -> str:
    """A parameter's or module's name without what checkpointing and compiling wrappers put into it."""
    return _WRAPPERS.sub("", name).strip(".")


def unit_of(name: str) -> str:
    """The unit that a parameter belongs to: its name up to the first numbered module, else its module's name.

    ``layers.3.attn.q_proj.weight`` is in ``layers.3``, ``tok_embeddings.weight`` in ``tok_embeddings``.
    """
    parts = clean_name(name).split(".")[:-1]
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts)


@dataclass(eq=False, frozen=True)
class Slice:
    """A range of a parameter's elements, in row-major order: ``[start, stop)``; the whole parameter most often.

    Of a parameter that several ranks share, this rank's part counts as the whole. ``position`` is the parameter's over
    all groups.
    """

    param: nn.Parameter
    name: str
    group: int
    position: int
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == local(self.param).numel()

    @property
    def is_last(self) -> bool:
        return self.stop == local(self.param).numel()

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @cached_property
    def first(self) -> int:
        """Position of the first element in the parameter that all ranks share."""
        return first_element(self.param) + self.start

    def of(self, tensor: Tensor, block: int = 1) -> Tensor:
        """This range of a tensor of the parameter's shape: the tensor itself, or a flat view of it.

        Args:
            tensor: the parameter's shape, or ``[ceil(numel / block)]``.
            block: elements of the parameter per element of ``tensor``; ``start`` is a multiple of it.

        Raises:
            RuntimeError: for a range of a tensor that is not contiguous, which has no flat view.
        """
        return tensor if self.is_whole else tensor.view(-1)[self.start // block : -(-self.stop // block)]


@dataclass(eq=False)
class Piece:
    """Slices that are staged together and updated by one call of the base optimizer."""

    unit: Unit
    slices: list[Slice]
    rank: int = 0
    """Position in the order in which the next forward needs the pieces."""
    way: Way = "stream"
    """How it is updated: with states that come from the host (``stream``), that are all on the device (``resident``),
    or on the CPU (``host``). All pieces of one parameter go one way."""

    @property
    def numel(self) -> int:
        return sum(s.numel for s in self.slices)

    @cached_property
    def name(self) -> str:
        """As traces call it, after the kind of work (:mod:`offload.engine.marks`)."""
        return f"{self.unit.name}: {self.slices[0].name}"


@dataclass(eq=False)
class Unit:
    """Parameters that the next forward waits for together."""

    name: str
    params: list[nn.Parameter] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


def build_units(
    params: Iterable[Member],
    *,
    named: bool,
    can_cut: bool | Container[int],
    block: int = 1,
    limit: int | None = None,
) -> list[Unit]:
    """Units in the order of their first parameter.

    Args:
        params: what they are made of.
        named: names are those of a model, so that they tell which parameters belong together; otherwise each
            parameter is a unit.
        can_cut: the base optimizer is elementwise, so that a tensor above :data:`CHUNK_ELEMENTS` may be
            updated in parts; or the indices of the groups of which that is so.
        block: parts begin at multiples of it.
        limit: elements of the largest piece, if fewer than :data:`CHUNK_ELEMENTS`.
    """
    largest = CHUNK_ELEMENTS if limit is None else min(limit, CHUNK_ELEMENTS)
    units: dict[str, Unit] = {}
    entries: dict[str, list[Member]] = {}
    for member in params:
        param, name, _, _ = member
        key = unit_of(name) if named else name
        units.setdefault(key, Unit(key)).params.append(param)
        entries.setdefault(key, []).append(member)
    for key, unit in units.items():
        unit.pieces = [Piece(unit, slices) for slices in _cut(entries[key], can_cut, block, largest)]
    return list(units.values())


def _cut(params: Sequence[Member], can_cut: bool | Container[int], block: int, largest: int) -> list[list[Slice]]:
    """Slices of at most ``largest`` elements together where that can be; small parameters share a piece."""
    cut: list[list[Slice]] = []
    shared: list[tuple[int, list[Slice]]] = []
    for param, name, group, position in params:
        count = local(param).numel()
        if count > largest:
            may_cut = can_cut if isinstance(can_cut, bool) else group in can_cut
            step = max(largest // block, 1) * block if may_cut and local(param).is_contiguous() else count
            starts = range(0, count, step)
            cut.extend([[Slice(param, name, group, position, start, min(start + step, count))] for start in starts])
            continue
        whole = Slice(param, name, group, position, 0, count)
        for index, (used, slices) in enumerate(shared):
            if used + count <= largest:
                slices.append(whole)
                shared[index] = (used + count, slices)
                break
        else:
            shared.append((count, [whole]))
    return cut + [slices for _, slices in shared]


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as a uint8 view of shape ``[nbytes]``, in memory's order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def has_layout_of(tensor: Tensor, like: Tensor) -> bool:
    """Whether the elements of two tensors of one shape lie in the same order."""
    return tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous())


def in_layout_of(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` with its elements in the order of those of ``like``: fused kernels walk over memory."""
    return tensor if has_layout_of(tensor, like) else torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def components(value: Tensor) -> list[Tensor]:
    """The plain tensors that hold a value: itself, or what a tensor subclass (torchao's 8-bit state) is made of."""
    if not _is_wrapper(value):
        return [value]
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return [component for name in names for component in components(getattr(value, name))]


def rebuild(like: Tensor, parts: Iterator[Tensor]) -> Tensor:
    """A tensor like ``like`` out of other components, in the order of :func:`components`."""
    if not _is_wrapper(like):
        return next(parts)
    names, context = like.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: rebuild(getattr(like, name), parts) for name in names}
    return type(like).__tensor_unflatten__(inner, context, like.shape, like.stride())  # type: ignore[attr-defined]


def _is_wrapper(value: Tensor) -> bool:
    return hasattr(value, "__tensor_flatten__")

"""From which tensors others come, found by converting tensors that have no values.

The names in a checkpoint's files are not those of a model, and for some families neither are the tensors: projections
are fused, experts stacked, rotary dimensions in another order. Most of it moves no element: a tensor of one side is a
range of the elements of one tensor of the other, whatever it is called. Such ranges can be read and written by whoever
needs a part of them. The rest has to be computed from whole tensors, a few at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""From tensors of one naming to those of the other, on any device, of as many as are given."""

_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class Range:
    """A tensor that is a part of another one's memory.

    Attributes:
        source: the other's name.
        start: elements of it, in row-major order, before the tensor's first.
    """

    source: str
    start: int


@dataclass(frozen=True)
class Mixture:
    """Tensors that are computed together.

    Attributes:
        sources: names of all that it takes.
        targets: names of what it makes.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Route:
    """Where each tensor comes from; it is in one of the two.

    Attributes:
        ranges: by name.
        mixtures: each as small as was found to do.
    """

    ranges: Mapping[str, Range]
    mixtures: Sequence[Mixture]


def find_route(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor], convert: Convert) -> Route:
    """How ``convert`` makes ``targets`` of ``sources``.

    Args:
        sources: on the meta device, each with a storage of its own.
        targets: what ``convert`` made of all of them, or some of that.
        convert: tried with single sources, those of a layer, and all, until what it makes has the shapes of
            ``targets``.

    Raises:
        ValueError: for a target that it makes of nothing.
    """
    storages = {_storage(tensor): name for name, tensor in sources.items()}
    ranges: dict[str, Range] = {}
    left: dict[str, Tensor] = {}
    used = dict.fromkeys(sources, 0)
    for name, target in targets.items():
        source = storages.get(_storage(target))
        if source is not None and target.is_contiguous() and target.dtype == sources[source].dtype:
            ranges[name] = Range(source, int(target.storage_offset()))
            used[source] += target.numel()
        else:
            left[name] = target
    remaining = [name for name, tensor in sources.items() if used[name] < tensor.numel()]
    mixtures = []
    for names in _groups(remaining):
        if not left:
            break
        made = tuple(_made(convert, {name: sources[name] for name in names}, left))
        if made:
            mixtures.append(Mixture(tuple(names), made))
            left = {name: target for name, target in left.items() if name not in made}
    if left:
        raise ValueError(f"no weights make {', '.join(sorted(left)[:3])}")
    return Route(ranges, mixtures)


def _groups(names: Sequence[str]) -> Iterator[list[str]]:
    yield from ([name] for name in names)
    layers: dict[str, list[str]] = {}
    for name in names:
        if match := _LAYER.match(name):
            layers.setdefault(match[1], []).append(name)
    yield from layers.values()
    yield list(names)


def _made(convert: Convert, sources: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[str]:
    try:
        converted = convert(dict(sources))
    except Exception:  # a conversion that lacks a part of what it joins fails in its own way
        return
    for name, target in wanted.items():
        made = converted.get(name)
        if made is not None and made.shape == target.shape and made.dtype == target.dtype:
            yield name


def _storage(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage

"""This rank's share of a model's weights, between memory and files: nobody holds the whole.

A model that several ranks share has parameters of which each rank has a part (DTensors). What a part consists of are a
few ranges of the whole, in a file too, so each rank reads and writes its own ranges. Only weights that have to be
computed from others (:mod:`offload.models.routes`) are whole for a moment, a few tensors at a time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload.distributed.world import World, current
from offload.durable import sync
from offload.engine.copy_on_write import STEP_BYTES, Source, Unchanging
from offload.engine.fsdp import groups_of
from offload.engine.shards import is_distributed, is_first_copy, local, local_state, runs
from offload.models.merging import MergedWeights
from offload.models.routes import Convert, Range, Route, find_route
from offload.models.safetensors_layout import lay_out
from offload.models.tensors import host_tensor, whole_on
from offload.models.weight_files import WeightFiles, bytes_of

# Reading


def materialize(module: nn.Module, device: torch.device) -> set[Tensor]:
    """Give what a module has on the meta device memory: this rank's parts of its parameters, and its buffers.

    It is not filled. Weights that are tied stay so, which ``nn.Module.to_empty`` does not see to.

    Returns:
        Parameters and buffers that have memory from here on.
    """
    made: dict[Tensor, Any] = {}
    for part in module.modules():
        for name, param in part.named_parameters(recurse=False, remove_duplicate=False):
            if param.is_meta and param not in made:
                empty = torch.empty_like(param, device=device)
                made[param] = nn.Parameter(empty, requires_grad=param.requires_grad)
            part.register_parameter(name, made.get(param, param))
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_meta and buffer not in made:
                made[buffer] = torch.empty_like(buffer, device=device)
            part._buffers[name] = made.get(buffer, buffer)
    for group in groups_of(module):
        for param in group.fsdp_params:
            param.reset_sharded_param()
    return set(made.values())


@torch.no_grad()
def read_share(params: Mapping[str, Tensor], files: WeightFiles, convert: Convert) -> None:
    """Fill this rank's parts of parameters from files; values take on the parameters' dtypes.

    Args:
        params: DTensors, of which each rank has a part, or plain tensors; with memory.
        files: hold all that ``convert`` needs for them.
        convert: makes the parameters' names, in the parameters' shapes, of the files'.
    """
    targets = convert(dict(files.empty))
    route = find_route(files.empty, {name: targets[name] for name in params}, convert)
    for name, origin in route.ranges.items():
        part = local(params[name])
        flat = part.view(-1) if part.is_contiguous() else part.reshape(-1)
        for first, at, count in _steps(params[name], files.empty[origin.source].element_size()):
            flat[first : first + count].copy_(files.read(origin.source, origin.start + at, count))
        if not part.is_contiguous():
            part.copy_(flat.view(part.shape))
    for mixture in route.mixtures:
        if not any(local(params[name]).numel() for name in mixture.targets):
            continue
        made = convert({name: files.read(name).view(files.empty[name].shape) for name in mixture.sources})
        for name in mixture.targets:
            param, value = params[name], made[name]
            local(param).copy_(local_state(value, param) if is_distributed(param) else value)


def _steps(tensor: Tensor, itemsize: int) -> Iterator[tuple[int, int, int]]:
    """The ranges of this rank's part, in steps."""
    most = max(1, STEP_BYTES // itemsize)
    for first, at, count in runs(tensor):
        for done in range(0, count, most):
            yield first + done, at + done, min(most, count - done)


# Writing


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file to write.

    Attributes:
        name: in the checkpoint's folder.
        tensors: what it holds, on the meta device.
    """

    name: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Place:
    file: str
    offset: int
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class Plan:
    """Who writes what, the same on every rank.

    Attributes:
        places: where each tensor goes.
        route: where it comes from.
        order: of the weights, and of the mixtures by their positions in the route, in which they are written.
    """

    places: Mapping[str, _Place]
    route: Route
    order: Sequence[str | int]

    def uses(self) -> Counter[str]:
        """How often each weight is read."""
        single = dict.fromkeys(origin.source for origin in self.route.ranges.values())
        return Counter([*single, *(name for mixture in self.route.mixtures for name in mixture.sources)])


def empty_like(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole of each weight on the meta device; those that are made when they are asked for are not made (their
    mapping has an attribute ``empty``)."""
    if (empty := getattr(weights, "empty", None)) is not None:
        return dict(empty)
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in weights.items()}


def begin_files(
    folder: Path,
    files: Sequence[WeightFile],
    empty: Mapping[str, Tensor],
    convert: Convert,
    position: Callable[[str], float] = lambda name: 0.0,
) -> Plan:
    """Make the files, with their headers, and say how the weights get into them; on one rank.

    Args:
        folder: is there.
        files: to be written.
        empty: the weights on the meta device, of which the files' tensors were made.
        convert: makes files' tensors of them.
        position: of a weight, by its name, among those that are written; the same where that does not matter.
    """
    places: dict[str, _Place] = {}
    targets: dict[str, Tensor] = {}
    for file in files:
        header, offsets, size = lay_out(file.tensors)
        with open(folder / file.name, "wb") as written:
            written.write(header)
            written.truncate(size)
        targets.update(file.tensors)
        for name, tensor in file.tensors.items():
            places[name] = _Place(file.name, offsets[name], tensor.dtype, tensor.numel())
    route = find_route(empty, targets, convert)
    positions: dict[str | int, float] = {origin.source: position(origin.source) for origin in route.ranges.values()}
    for number, mixture in enumerate(route.mixtures):
        positions[number] = min(map(position, mixture.sources))
    return Plan(places, route, sorted(positions, key=lambda each: positions[each]))


@torch.no_grad()
def write_share(
    folder: Path,
    plan: Plan,
    weights: Mapping[str, Tensor],
    convert: Convert,
    *,
    world: World | None = None,
    source: Source | None = None,
) -> None:
    """Write what falls to this rank; every rank has to call it.

    Args:
        folder: where :func:`begin_files` has made the files.
        plan: what it returned.
        weights: DTensors, or plain tensors that all ranks have; merged ones are made on the rank that writes them.
        convert: as there.
        world: the ranks, which talk by its group; None for all, by that of the weights' mesh.
        source: where the weights' values come from; None for where they are.

    Raises:
        OSError: the disk is full or fails; no sooner than the other ranks need this one no more.
    """
    writer = _Writer(plan, weights, world, source)
    targets: dict[str, list[tuple[str, Range]]] = {}
    for name, origin in plan.route.ranges.items():
        targets.setdefault(origin.source, []).append((name, origin))
    with _Files(folder) as files:
        for turn, each in enumerate(plan.order):
            owner = turn % writer.world.size
            if isinstance(each, str):
                writer.write_ranges(files, each, targets[each], owner)
            else:
                writer.write_mixture(files, each, convert, owner)
    if files.error is not None:
        raise files.error


class _Writer:
    def __init__(self, plan: Plan, weights: Mapping[str, Tensor], world: World | None, source: Source | None) -> None:
        self.world = current() if world is None else world
        self._plan = plan
        self._weights = weights
        self._source: Source = Unchanging() if source is None else source
        self._left = plan.uses()

    def write_ranges(self, files: _Files, name: str, targets: Sequence[tuple[str, Range]], owner: int) -> None:
        weight = self._weight(files, name, owner)
        if weight is None:
            return
        if is_first_copy(weight) if is_distributed(weight) else owner == self.world.rank:
            part = local(weight.detach())
            if part.is_contiguous():
                for first, at, count in _steps(weight, part.element_size()):
                    if self._meets(targets, at, count):
                        with self._source.reading(part.view(-1)[first : first + count]) as values:
                            self._write(files, values, at, targets)
            else:
                with self._source.reading(part) as values:
                    flat = values.reshape(-1)
                    for first, at, count in runs(weight):
                        self._write(files, flat[first : first + count], at, targets)
        self._used(name, weight)

    def _meets(self, targets: Sequence[tuple[str, Range]], at: int, count: int) -> bool:
        ends = ((origin.start, origin.start + self._plan.places[name].numel) for name, origin in targets)
        return any(at < end and begin < at + count for begin, end in ends)

    def _write(self, files: _Files, values: Tensor, at: int, targets: Sequence[tuple[str, Range]]) -> None:
        """Write values that begin with a weight's element ``at``."""
        for name, origin in targets:
            place = self._plan.places[name]
            begin, end = max(at, origin.start), min(at + values.numel(), origin.start + place.numel)
            if begin < end:
                files.write(place, begin - origin.start, values[begin - at : end - at])

    def write_mixture(self, files: _Files, number: int, convert: Convert, owner: int) -> None:
        mixture = self._plan.route.mixtures[number]
        sources = {}
        for name in mixture.sources:
            weight = self._weight(files, name, owner)
            if weight is None:
                continue
            gathered = self._whole(weight, owner)
            if gathered is not None:
                sources[name] = host_tensor(gathered, name)
            del gathered
            self._used(name, weight)
        if owner != self.world.rank or files.error is not None:
            return
        try:
            converted = convert(sources)
        except Exception as error:  # the other ranks go on
            files.error = error
            return
        for name in mixture.targets:
            files.write(self._plan.places[name], 0, converted[name])

    def _weight(self, files: _Files, name: str, owner: int) -> Tensor | None:
        """A weight, or this rank's part of it; None where another rank makes it, or this one could not."""
        if not isinstance(self._weights, MergedWeights):
            return self._weights[name]
        wholes = self._weights.gathered(name, owner, self.world)
        if wholes is None or (wholes and files.error is not None):
            return None
        try:
            return self._weights.made(name, wholes)
        except Exception as error:  # the other ranks go on
            files.error = error
            return None

    def _whole(self, weight: Tensor, owner: int) -> Tensor | None:
        """All of a weight, on the rank that wants it."""
        if is_distributed(weight):
            return whole_on(owner, weight, self.world, self._copy)
        return self._copy(weight) if owner == self.world.rank else None

    def _copy(self, part: Tensor) -> Tensor:
        with self._source.reading(part) as values:
            return values.clone()

    def _used(self, name: str, weight: Tensor) -> None:
        self._left[name] -= 1
        if not self._left[name]:
            self._source.done(local(weight.detach()))


class _Files:
    """Files that are there, to write into.

    Attributes:
        error: the first that came up; nothing is written from then on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self.error: Exception | None = None

    def write(self, place: _Place, start: int, values: Tensor) -> None:
        """Elements of a tensor from ``start`` on."""
        try:
            if self.error is None:
                self._write(place, start, values)
        except OSError as error:
            self.error = error

    def _write(self, place: _Place, start: int, values: Tensor) -> None:
        if place.file not in self._open:
            self._open[place.file] = os.open(self._folder / place.file, os.O_WRONLY)
        memory = memoryview(bytes_of(values.contiguous()))
        offset = place.offset + start * place.dtype.itemsize
        while memory:
            written = os.pwrite(self._open[place.file], memory, offset)
            memory, offset = memory[written:], offset + written

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *args: object) -> None:
        try:
            for descriptor in self._open.values() if self.error is None else ():
                sync(descriptor)  # here: another host cannot force this one's memory to the disk
        except OSError as error:
            self.error = error
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

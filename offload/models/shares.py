"""This rank's share of a model's weights, between memory and files: nobody holds the whole.

A model that several ranks share has parameters of which each rank has a part (DTensors). What a part consists of are a
few ranges of the whole, in a file too, so each rank reads and writes its own ranges. Only weights that have to be
computed from others (:mod:`offload.models.routes`) are whole for a moment, a few tensors at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload.durable import sync
from offload.engine.fsdp import groups_of
from offload.engine.shards import is_distributed, is_first_copy, local, local_state, runs
from offload.models.routes import Convert, Range, Route, find_route
from offload.models.safetensors_layout import lay_out
from offload.models.tensors import host_tensor, whole
from offload.models.weight_files import WeightFiles, bytes_of

STEP_BYTES = 64 * 2**20
"""Read and written at once, and copied between a device and the host."""


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
    """

    places: Mapping[str, _Place]
    route: Route


def empty_like(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole of each weight on the meta device; those that are made when they are asked for are not made (their
    mapping has an attribute ``empty``)."""
    if (empty := getattr(weights, "empty", None)) is not None:
        return dict(empty)
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in weights.items()}


def begin_files(folder: Path, files: Sequence[WeightFile], empty: Mapping[str, Tensor], convert: Convert) -> Plan:
    """Make the files, with their headers, and say how the weights get into them; on one rank.

    Args:
        folder: is there.
        files: to be written.
        empty: the weights on the meta device, of which the files' tensors were made.
        convert: makes files' tensors of them.
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
    return Plan(places, find_route(empty, targets, convert))


@torch.no_grad()
def write_share(folder: Path, plan: Plan, weights: Mapping[str, Tensor], convert: Convert) -> None:
    """Write what falls to this rank; every rank has to call it.

    Args:
        folder: where :func:`begin_files` has made the files.
        plan: what it returned.
        weights: DTensors, or plain tensors that all ranks have; some mappings make one when it is asked for, and every
            rank asks for the same ones in the same order.
        convert: as there.

    Raises:
        OSError: the disk is full or fails; no sooner than the other ranks need this one no more.
    """
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with _Files(folder) as files:
        by_source: dict[str, list[tuple[str, Range]]] = {}
        for name, origin in plan.route.ranges.items():
            by_source.setdefault(origin.source, []).append((name, origin))
        for number, (source, targets) in enumerate(by_source.items()):
            weight = weights[source]
            if is_first_copy(weight) if is_distributed(weight) else number % size == rank:
                _write_ranges(files, plan, weight, targets)
            del weight
        for number, mixture in enumerate(plan.route.mixtures):
            is_mine = number % size == rank
            sources = {}
            for name in mixture.sources:
                gathered = whole(weights[name])
                if is_mine:
                    sources[name] = host_tensor(gathered, name)
                del gathered
            if is_mine and files.error is None:
                try:
                    converted = convert(sources)
                except Exception as error:  # the other ranks go on
                    files.error = error
                    continue
                for name in mixture.targets:
                    files.write(plan.places[name], 0, converted[name])
    if files.error is not None:
        raise files.error


def _write_ranges(files: _Files, plan: Plan, weight: Tensor, targets: Sequence[tuple[str, Range]]) -> None:
    part = local(weight.detach())
    flat = part.reshape(-1)
    for first, at, count in _steps(weight, part.element_size()):
        values = None
        for name, origin in targets:
            place = plan.places[name]
            begin, end = max(at, origin.start), min(at + count, origin.start + place.numel)
            if begin < end:
                if values is None:
                    values = flat[first : first + count].cpu()
                files.write(place, begin - origin.start, values[begin - at : end - at])


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

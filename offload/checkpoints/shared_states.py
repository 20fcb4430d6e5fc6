"""Optimizer states of parameters that several ranks share, in a checkpoint: by ``torch.distributed.checkpoint``.

Each rank writes its parts into a file of its own in the checkpoint's folder ``optimizer``, and any number of ranks, one
process without any included, reads the parts that it needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType

from offload.distributed.world import World
from offload.engine.copy_on_write import STEP_BYTES, Source
from offload.engine.shards import empty_as, first_row, has_blocks, is_distributed, local
from offload.optim.formats import BLOCK, STATE_BLOCK

STATES_DIR = "optimizer"


def split(
    states: Mapping[int, Mapping[str, Any]], is_apart: Callable[[Tensor], bool] = is_distributed
) -> tuple[dict[int, dict[str, Any]], dict[str, Tensor]]:
    """States of an optimizer's ``state_dict`` as (what every rank has the same, what each has a part of).

    ``is_apart``: tells the latter."""
    rest: dict[int, dict[str, Any]] = {}
    shared: dict[str, Tensor] = {}
    for index, state in states.items():
        rest[index] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and is_apart(value):
                shared[_path(index, key)] = value
            else:
                rest[index][key] = value
    return rest, shared


def write(folder: Path, shared: Mapping[str, Tensor]) -> None:
    """Write what :func:`split` gave second; every rank has to call it.

    Args:
        folder: of the checkpoint.
        shared: DTensors.
    """
    if not shared:
        return
    with _failing_as_its_cause():
        dcp.save(dict(shared), storage_writer=dcp.FileSystemWriter(folder / STATES_DIR))


def write_from(folder: Path, shared: Mapping[str, Tensor], source: Source, world: World) -> None:
    """The same, a step of a tensor at a time, and in the order of ``shared``.

    Args:
        folder: of the checkpoint.
        shared: DTensors, or plain tensors in one process.
        source: where values come from.
        world: the ranks.
    """
    if not shared:
        return
    # Nothing is read ahead: who reads holds up updates.
    writer = dcp.FileSystemWriter(folder / STATES_DIR, thread_count=1, per_thread_copy_ahead=0)
    with _failing_as_its_cause(), contextlib.closing(_StepByStep(source)) as planner:
        is_alone = world.size == 1
        group = world.group
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            dcp.save(dict(shared), storage_writer=writer, planner=planner, process_group=group, no_dist=is_alone)


@contextlib.contextmanager
def _failing_as_its_cause() -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:  # of some ranks, on all of them
        for cause, _ in error.failures.values():
            raise cause from error


class _StepByStep(dcp.DefaultSavePlanner):
    """Gives values from a source, of a part of a tensor at a time."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._reading = contextlib.ExitStack()
        self._left: Counter[str] = Counter()

    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in _in_steps(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        plan = super().finish_plan(new_plan)
        self._left = Counter(item.index.fqn for item in plan.items)
        for name, tensor in self.state_dict.items():
            if not self._left[name]:  # another rank that has the same writes it
                self._source.done(local(tensor))
        return plan

    def resolve_data(self, write_item: Any) -> Tensor:
        self._reading.close()
        name, chunk = write_item.index.fqn, write_item.tensor_data.chunk
        tensor = self.state_dict[name]
        part = local(tensor)
        before = first_row(tensor)
        self._left[name] -= 1
        if not self._left[name]:
            self._reading.callback(self._source.done, part)
        rows = part.narrow(0, chunk.offsets[0] - before, chunk.sizes[0])
        return self._reading.enter_context(self._source.reading(rows))

    def close(self) -> None:
        """Nothing is written any more."""
        self._reading.close()


def _in_steps(item: Any) -> Iterator[Any]:
    """Write items for ranges of the rows of one."""
    data = item.tensor_data
    chunk = data.chunk
    rows = chunk.sizes[0]
    row_bytes = max(1, math.prod(chunk.sizes[1:]) * data.properties.dtype.itemsize)
    step = max(1, STEP_BYTES // row_bytes)
    if rows <= step:
        yield item
        return
    for begin in range(0, rows, step):
        offsets = torch.Size([chunk.offsets[0] + begin, *chunk.offsets[1:]])
        sizes = torch.Size([min(step, rows - begin), *chunk.sizes[1:]])
        yield dataclasses.replace(
            item,
            index=MetadataIndex(item.index.fqn, offsets),
            type=WriteItemType.SHARD,
            tensor_data=dataclasses.replace(data, chunk=ChunkStorageMetadata(offsets, sizes)),
        )


class SavedStates(Mapping[int, dict[str, Any]]):
    """States of a checkpoint by their parameters' positions; those of a parameter are read when they are asked for.

    Args:
        folder: of the checkpoint.
        rest: what :func:`split` gave first.

    Attributes:
        params: what they are to be loaded for, in the order of the groups: of DTensors each rank reads its parts; None
            for whole tensors.
    """

    def __init__(self, folder: Path, rest: Mapping[int, Mapping[str, Any]]) -> None:
        self._reader = _Reader(folder / STATES_DIR)
        self._rest = rest
        self._saved: dict[int, dict[str, TensorStorageMetadata]] = {}
        for path, saved in self._reader.read_metadata().state_dict_metadata.items():
            index, _, key = path.partition("/")
            if not isinstance(saved, TensorStorageMetadata):
                raise TypeError(f"{path} is no tensor")
            self._saved.setdefault(int(index), {})[key] = saved
        self.params: Sequence[Tensor] | None = None

    @staticmethod
    def are_in(folder: Path) -> bool:
        return (folder / STATES_DIR).is_dir()

    def __getitem__(self, index: int) -> dict[str, Any]:
        saved = self._saved.get(index, {})
        param = self.params[index] if self.params is not None and index < len(self.params) else None
        if param is not None and (not is_distributed(param) or _is_cut_in_blocks(saved, param)):
            param = None
        read = {key: _empty(value, param) for key, value in saved.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            dcp.load({_path(index, key): v for key, v in read.items()}, storage_reader=self._reader, no_dist=True)
        return {**self._rest[index], **read}

    def __iter__(self) -> Iterator[int]:
        return iter(self._rest)

    def __len__(self) -> int:
        return len(self._rest)


class _Reader(dcp.FileSystemReader):
    """Reads the checkpoint's list of contents once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def _path(index: int, key: str) -> str:
    return f"{index}/{key}"


def _is_cut_in_blocks(saved: Mapping[str, Any], param: Tensor) -> bool:
    """Whether a rank's part of the parameter ends within a block of saved codes, so that they have to come whole."""
    return any(key in saved for key in STATE_BLOCK) and not has_blocks(param, BLOCK)


def _empty(saved: TensorStorageMetadata, param: Tensor | None) -> Tensor:
    """Memory on the host for a state: of this rank's part where ``param`` has one."""
    dtype = saved.properties.dtype
    if param is None or len(saved.size) < param.dim():
        return torch.empty(saved.size, dtype=dtype)
    return empty_as(param, saved.size, dtype)

"""Optimizer states of parameters that several ranks share, in a checkpoint: by ``torch.distributed.checkpoint``.

Each rank writes its parts into a file of its own in the checkpoint's folder ``optimizer``, and any number of ranks, one
process without any included, reads the parts that it needs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from offload.engine.shards import empty_as, has_blocks, is_distributed
from offload.optim.formats import BLOCK, STATE_BLOCK

STATES_DIR = "optimizer"


def split(states: Mapping[int, Mapping[str, Any]]) -> tuple[dict[int, dict[str, Any]], dict[str, Tensor]]:
    """States of an optimizer's ``state_dict`` as (what every rank has the same, what each has a part of)."""
    rest: dict[int, dict[str, Any]] = {}
    shared: dict[str, Tensor] = {}
    for index, state in states.items():
        rest[index] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and is_distributed(value):
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
    try:
        dcp.save(dict(shared), storage_writer=dcp.FileSystemWriter(folder / STATES_DIR))
    except CheckpointException as error:  # of some ranks, on all of them
        for cause, _ in error.failures.values():
            raise cause from error


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

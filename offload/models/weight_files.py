"""The tensors of a checkpoint's files, read range by range."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from offload.models.safetensors_header import read_safetensors_header
from offload.models.safetensors_layout import DTYPES


class WeightFiles(AbstractContextManager["WeightFiles"]):
    """Opens files, which are read when a range is asked for; closes them at its end.

    Args:
        paths: safetensors files, or pickled ones (``.bin``), which are mapped.

    Attributes:
        empty: all tensors by name, on the meta device.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.empty: dict[str, Tensor] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        self._mapped: dict[str, Tensor] = {}
        self._open: dict[Path, int] = {}
        for path in paths:
            if path.suffix == ".safetensors":
                self._add(path)
            else:
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
                self._mapped.update((name, value) for name, value in content.items() if isinstance(value, Tensor))
        self.empty.update((name, torch.empty_like(tensor, device="meta")) for name, tensor in self._mapped.items())

    def _add(self, path: Path) -> None:
        header = read_safetensors_header(path)
        data = path.stat().st_size - max((entry["data_offsets"][1] for entry in header.values()), default=0)
        for name, entry in header.items():
            self.empty[name] = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")
            self._places[name] = path, data + entry["data_offsets"][0]

    def read(self, name: str, start: int = 0, count: int | None = None) -> Tensor:
        """Elements of a tensor on the CPU, flat.

        Args:
            name: of the tensor.
            start: the first, in row-major order.
            count: how many; None for all that follow.

        Raises:
            OSError: if they cannot be read.
        """
        empty = self.empty[name]
        count = math.prod(empty.shape) - start if count is None else count
        if name in self._mapped:
            return self._mapped[name].reshape(-1)[start : start + count]
        path, offset = self._places[name]
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        values = torch.empty(count, dtype=empty.dtype)
        memory = memoryview(bytes_of(values))
        offset += start * empty.element_size()
        while memory:
            size = os.preadv(self._open[path], [memory], offset)
            if size == 0:
                raise OSError(f"{path} ends before its tensor {name}")
            memory, offset = memory[size:], offset + size
        return values

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor of the CPU, as bytes."""
    return tensor.view(-1).view(torch.uint8).numpy()

"""Writing and reading ``recipe_state.pt``: everything a resumed run needs besides the model's weights.

The file is written by ``torch.save`` and read back with ``weights_only=True``, so reading one runs no code.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload.checkpoints.sums import SummingFile
from offload.models.tensors import standalone

_PLAIN = (bool, int, float, complex, str, bytes)
_TORCH_VALUES = (torch.dtype, torch.device, torch.Size)


class Prepared:
    """A copy of a nested state which ``torch.save`` writes without waste and ``weights_only`` reads back.

    Tensors keep sharing memory with the originals; nothing is copied but non-contiguous views. A tensor which
    is a view into a larger block (a slab of pinned memory, say) becomes one with exactly its own bytes as its
    storage, because ``torch.save`` writes whole storages. The originals must not change until the state has
    been written.

    Args:
        state: nested dicts, lists, tuples and sets of tensors, NumPy arrays and Python scalars.
        name: how messages call the state.

    Attributes:
        value: the copy.
        nbytes: bytes of its tensors and arrays.

    Raises:
        TypeError: for a value which could not be read back, naming its place.
    """

    def __init__(self, state: Any, name: str = "recipe_state") -> None:
        self.nbytes = 0
        self._seen: dict[tuple[Any, ...], Tensor] = {}
        self.value = self._copy(state, name)

    def _copy(self, value: Any, place: str) -> Any:
        if value is None or isinstance(value, _TORCH_VALUES):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), place)
        if isinstance(value, np.generic):  # before the scalars: numpy.float64 is a float
            return value.item()
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise TypeError(f"{place} is a NumPy array of objects, which a checkpoint cannot hold")
            self.nbytes += value.nbytes
            return value
        if isinstance(value, enum.Enum):
            raise TypeError(f"{place} is {value!r}: store its name or its value")
        kind: Any
        for kind in _PLAIN:
            if isinstance(value, kind):
                return value if type(value) is kind else kind(value)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        if isinstance(value, Mapping):
            return {self._copy(k, f"a key of {place}"): self._copy(v, f"{place}[{k!r}]") for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self._copy(item, f"{place}[{i}]") for i, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, (set, frozenset)):
            return {self._copy(item, f"an item of {place}") for item in value}
        raise TypeError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
            "hold: store tensors, numbers, strings, dicts and lists"
        )

    def _tensor(self, tensor: Tensor, place: str) -> Tensor:
        if tensor.is_meta:
            raise TypeError(f"{place} is on the meta device and has no values to save")
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}
            alone = {name: self._tensor(part, f"{place}.{name}") for name, part in parts.items()}
            if all(alone[name] is parts[name] for name in names):
                return tensor
            return type(tensor).__tensor_unflatten__(alone, context, tensor.size(), tensor.stride())
        if tensor.layout is not torch.strided:
            self.nbytes += tensor.numel() * tensor.element_size()  # an upper bound
            return tensor
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        known = self._seen.get(key) if tensor.data_ptr() else None
        if known is not None:
            return known
        alone_ = standalone(tensor)
        self._seen[key] = alone_
        self.nbytes += alone_.untyped_storage().nbytes()
        return alone_


def write(prepared: Any, path: Path) -> str:
    """Writes with ``torch.save``; tensors of an accelerator pass through host memory one at a time.

    Returns:
        The file's checksum.

    Raises:
        OSError: if the disk is full or fails.
    """
    with open(path, "wb") as file:
        summing: Any = SummingFile(file)
        try:
            torch.save(prepared, summing)
        except RuntimeError as error:
            # While it unwinds from a failed write, PyTorch's writer trips over its own position and raises
            # that instead. Through Python's file object the cause is at hand.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    checksum: str = summing.checksum
    return checksum


def read(path: Path) -> Any:
    """Reads with ``weights_only=True``, on the CPU, mapped from the file rather than read where possible.

    Mapped tensors are private to the process: writing to one does not change the file. They stay valid when
    the file is deleted, but its space on the disk is free only once they are gone.
    """
    with _allowed(path):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


@contextlib.contextmanager
def _allowed(path: Path) -> Iterator[None]:
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if any(name.startswith("torchao.") for name in names):
        importlib.import_module("torchao.optim")  # registers its optimizer states as safe to load
    if any(name.startswith("torch.distributed") for name in names):
        importlib.import_module("torch.distributed.tensor")  # registers DTensor as safe to load
    with torch.serialization.safe_globals(_numpy_globals() if any("numpy" in n for n in names) else []):
        yield


def _numpy_globals() -> list[Any]:
    rebuild = np.empty(0).__reduce__()[0]
    kinds = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFD"}
    return [
        # NumPy 1 and 2 name the same function differently in the file.
        (rebuild, "numpy.core.multiarray._reconstruct"),
        (rebuild, "numpy._core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        *kinds,
    ]

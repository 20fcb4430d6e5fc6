"""What a torch operation reads and writes, and who called it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# In-place operations that do not look at what they overwrite.
_OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"}

# Frames in these places say nothing about who made an access.
_MACHINERY = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


class Touch(NamedTuple):
    """What an operation did with a tensor; ``is_new`` where it made the memory."""

    tensor: Tensor
    reads: bool
    writes: bool
    is_new: bool = False


class _Argument(NamedTuple):
    position: int
    name: str
    reads: bool
    writes: bool


class _Operation(NamedTuple):
    arguments: tuple[_Argument, ...]
    unscales: bool


@functools.cache
def _operation(func: Any) -> _Operation | None:
    """What an operation does with its arguments; None where it touches nothing."""
    if torch.Tag.inplace_view in func.tags:
        return None
    name = func.overloadpacket.__name__
    looks_at_shape = name.startswith("new_") or name.endswith("_like")
    arguments = []
    for position, argument in enumerate(func._schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = not (looks_at_shape or writes and (argument.is_out or name in _OVERWRITING))
        arguments.append(_Argument(position, argument.name, reads, writes))
    return _Operation(tuple(arguments), unscales=name.startswith("_fused_"))


def touched_by(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[list[Touch], list[Tensor]]:
    """What an operation touched, and all tensors among its arguments.

    New memory counts as written, even by ``empty``: a device's allocator hands out blocks that the allocating
    stream may still be using.
    """
    operation = _operation(func)
    if operation is None:
        return [], []
    touched: list[Touch] = []
    inputs: list[Tensor] = []
    known = set()
    has_writes = False
    given = len(args)
    for position, name, reads, writes in operation.arguments:
        value = args[position] if position < given else kwargs.get(name)
        tensors = tensors_in(value)
        if not tensors:
            continue
        if name == "grads" and operation.unscales and kwargs.get("grad_scale") is None:
            writes = False  # written only to unscale them
        inputs += tensors
        known.update([address_of(tensor) for tensor in tensors])
        if reads or writes:
            has_writes = has_writes or writes
            touched += [Touch(tensor, reads, writes) for tensor in tensors]
    results = tensors_in(result)
    known.discard(0)
    made = [Touch(tensor, False, True, True) for tensor in results if address_of(tensor) not in known]
    if results and not made and not has_writes:
        return [], inputs  # views
    return touched + made, inputs


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument or a result: one, or those in lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for entry in value for tensor in tensors_in(entry)]
    return []


def address_of(tensor: Tensor) -> int:
    """Where a tensor's storage begins; 0 where it has none."""
    if tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """The smallest range of its storage's bytes that covers a tensor; gaps between strides count as touched."""
    start = stop = int(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        stop += (size - 1) * stride
    return start * tensor.itemsize, (stop + 1) * tensor.itemsize


def touched_bytes(tensor: Tensor) -> int:
    """Memory traffic of reading a tensor once; what is expanded is read once."""
    if not tensor.numel():
        return 0
    start, stop = byte_range(tensor)
    return min(tensor.numel() * tensor.itemsize, stop - start)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself, or those that a wrapper subclass is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from plain_tensors(getattr(tensor, name))


@functools.cache
def _caller_in(file: str) -> str | None:
    """A file's name; None where it is torch's or the simulator's."""
    is_machinery = file.startswith(_MACHINERY) or file.endswith("contextlib.py")
    return None if is_machinery else Path(file).name


def place_of_caller() -> str:
    """``file.py:line`` of the innermost frame that is neither torch nor the simulator."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = _caller_in(frame.f_code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"

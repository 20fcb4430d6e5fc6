"""What lies on this rank of a parameter that several ranks share: a DTensor of FSDP2 or of tensor parallelism.

The engine updates this rank's part, which is a plain tensor. All that has to be known of the whole is here: where the
part lies in it, how gradients are put into it, how norms are summed over ranks, and how states become DTensors, which
``torch.distributed.checkpoint`` saves and loads on any number of ranks.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(tensor, known.DTensor)


PRIVATE = {
    "torch.distributed.tensor": ("DTensor._local_tensor", "DTensor._spec"),
    "torch.distributed.tensor._dtensor_spec": ("DTensorSpec", "TensorMeta"),
    "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    "torch.distributed._functional_collectives": ("AsyncCollectiveTensor",),
}
"""What of torch is used here and is not documented, by module."""


@functools.cache
def difference() -> str:
    """What of :data:`PRIVATE` there is not; empty if nothing."""
    for module, names in PRIVATE.items():
        for name in names:
            try:
                operator.attrgetter(name)(importlib.import_module(module))
            except (ImportError, AttributeError) as error:
                return f"{module}.{name}: {error}"
    return ""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: a plain tensor over the same memory, or the tensor itself."""
    part: Tensor = tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    return part


def gradient_of(param: Tensor) -> Tensor | None:
    """This rank's part of a parameter's gradient; None where it has none."""
    gradient: Any = param.grad
    if gradient is None or not is_distributed(gradient):
        return gradient
    placements = param.placements  # type: ignore[attr-defined]
    if gradient.placements != placements:
        # Tensor parallelism leaves the sum over ranks to whoever reads the gradient.
        gradient = param.grad = gradient.redistribute(placements=placements)
    part = gradient._local_tensor
    if isinstance(part, torch.distributed._functional_collectives.AsyncCollectiveTensor):
        part = part.wait()
        set_gradient(param, part)
    return part


def set_gradient(param: Tensor, part: Tensor | None) -> None:
    """Make ``part`` this rank's part of a parameter's gradient; None: the parameter has none."""
    if part is None or not is_distributed(param):
        param.grad = part
        return
    param.grad = _distributed(part, param, param.shape)


def _distributed(part: Tensor, param: Any, shape: Sequence[int]) -> Tensor:
    """A DTensor of ``shape`` that is laid out over ranks as ``param`` is, with ``part`` on this one."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, part.dtype)
    spec = DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta)
    # Not from_local, which would bring a part that rests on the host to the mesh's device.
    return DTensor(part, spec, requires_grad=False)


def empty_as(param: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A DTensor of ``shape`` on the host, without values, laid out over ranks as ``param`` is."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    part, _ = compute_local_shape_and_global_offset(torch.Size(shape), param.device_mesh, param.placements)
    return _distributed(torch.empty(part, dtype=dtype), param, shape)


# Where a part lies


def sharded_by(param: Tensor) -> tuple[int, ...]:
    """The dimensions of its mesh over which a parameter is cut; over the others it is repeated."""
    placements = param.placements if is_distributed(param) else ()  # type: ignore[attr-defined]
    return tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())


def first_element(param: Any) -> int:
    """Position in the whole parameter, in row-major order, of the first element of this rank's part."""
    if not is_distributed(param):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    first = 0
    for size, offset in zip(param.shape, offsets, strict=True):
        first = first * size + offset
    return first


def first_row(tensor: Any) -> int:
    """Position in the whole tensor, along its first dimension, of this rank's part."""
    if not is_distributed(tensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offsets[0]


def runs(tensor: Any) -> Iterator[tuple[int, int, int]]:
    """This rank's part of a tensor as ranges of the whole.

    Yields:
        (the range's first element in the part, in the whole, how many), in row-major order of each.
    """
    if not is_distributed(tensor):
        yield 0, 0, tensor.numel()
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    cut = [dim for dim, size in enumerate(shape) if size != tensor.shape[dim]]
    inner = cut[-1] if cut else 0  # from this dimension on, a part's elements follow one another in the whole too
    strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim())]
    count = math.prod(shape[inner:])
    if not count:
        return
    for first, outer in enumerate(itertools.product(*map(range, shape[:inner]))):
        index = [*outer, *([0] * (tensor.dim() - inner))]
        at = sum((i + offset) * stride for i, offset, stride in zip(index, offsets, strides, strict=True))
        yield first * count, at, count


def is_first_copy(tensor: Any) -> bool:
    """Whether this rank is the first of those that have the same part of a DTensor."""
    coordinate = tensor.device_mesh.get_coordinate()
    cut = sharded_by(tensor)
    return coordinate is not None and all(at == 0 for dim, at in enumerate(coordinate) if dim not in cut)


def has_blocks(param: Any, block: int) -> bool:
    """Whether cutting this rank's part into blocks of so many elements cuts the whole in the same places, however many
    ranks there are: the parameter is not distributed, or is a matrix whose rows are whole numbers of blocks."""
    if block == 1 or not is_distributed(param):
        return True
    last = param.dim() - 1
    for dim in sharded_by(param):
        if getattr(param.placements[dim], "dim", 0) == last:
            block *= param.device_mesh.size(dim)
    return bool(last > 0 and param.shape[last] % block == 0)


class LocalParameters:
    """A plain parameter over this rank's part of each distributed one: what the base optimizer is built over."""

    def __init__(self) -> None:
        self._local: dict[Tensor, nn.Parameter] = {}
        self._whole: dict[Tensor, Tensor] = {}

    def add(self, params: Sequence[nn.Parameter]) -> None:
        """Make those of the distributed parameters that have none yet."""
        for param in params:
            if is_distributed(param) and param not in self._local:
                part = nn.Parameter(local(param).detach(), requires_grad=param.requires_grad)
                self._local[param], self._whole[part] = part, param

    def of(self, param: nn.Parameter) -> nn.Parameter:
        """The plain parameter over this rank's part; the parameter itself if that is plain."""
        return self._local.get(param, param)

    def device(self, resting: Tensor) -> Tensor:
        """The inverse of :meth:`of`."""
        return self._whole.get(resting, resting)

    def refresh(self) -> None:
        """FSDP may have moved parts to other memory: take over where they are."""
        for param, part in self._local.items():
            current = local(param).detach()
            if part.data_ptr() != current.data_ptr():
                part.data = current

    def __bool__(self) -> bool:
        return bool(self._local)


# Norms


def summed_norms(norms: Mapping[nn.Parameter, Tensor], norm_type: float) -> list[Tensor]:
    """Norms of whole gradients from those of this rank's parts, in the same order.

    One all-reduce of a vector for each mesh dimension, by the mesh's own backend, where the parameters are; the
    arithmetic is that of torch.nn.utils.get_total_norm over DTensors. Every rank has to call it.

    Args:
        norms: 0-dim, of each parameter's part, anywhere.
        norm_type: p of the p-norm; may be ``inf``.
    """
    summed = dict(norms)
    alike: dict[tuple[Any, tuple[int, ...]], list[nn.Parameter]] = defaultdict(list)
    for param in norms:
        if dims := sharded_by(param):
            alike[param.device_mesh, dims].append(param)  # type: ignore[attr-defined]
    for (mesh, dims), params in alike.items():
        device = local(params[0]).device
        values = [norms[param] for param in params]
        if len({value.device for value in values}) > 1:
            values = [value.to(device) for value in values]
        stacked = torch.stack(values).to(device)
        for dim in dims:
            stacked = _over_ranks(stacked, mesh.get_group(dim), float(norm_type))
        summed.update(zip(params, stacked.unbind(), strict=True))
    return list(summed.values())


def _over_ranks(norms: Tensor, group: Any, norm_type: float) -> Tensor:
    if norm_type == float("inf"):
        torch.distributed.all_reduce(norms, torch.distributed.ReduceOp.MAX, group)
        return norms
    powers = norms**norm_type
    torch.distributed.all_reduce(powers, torch.distributed.ReduceOp.SUM, group)
    return powers ** (1.0 / norm_type)


# States

Shaping = Callable[[Sequence[int]], Sequence[int]]
"""From the shape of a parameter, or of this rank's part of it, to that of a state; the same for either."""


def whole_state(part: Tensor, param: Any, shape_of: Shaping = tuple) -> Tensor:
    """A state of this rank's part of a parameter as a DTensor over the same memory.

    Args:
        part: the state.
        param: a DTensor.
        shape_of: the state's shape.

    Raises:
        ValueError: for a state of another shape.
    """
    expected = tuple(shape_of(local(param).shape))
    if part.shape != expected:
        raise ValueError(f"shape {tuple(part.shape)}, expected {expected}")
    return _distributed(part, param, shape_of(param.shape))


def local_state(value: Any, param: Any, shape_of: Shaping = tuple) -> Tensor:
    """This rank's part of a parameter's saved state.

    Args:
        value: a DTensor laid out in any way over the parameter's mesh, the whole as a plain tensor, or the part itself.
            The latter two may have been flattened.
        param: a DTensor.
        shape_of: the state's shape.

    Raises:
        ValueError: for a state of another shape.
    """
    whole, part = torch.Size(shape_of(param.shape)), torch.Size(shape_of(local(param).shape))
    if is_distributed(value) and value.shape == whole:
        if value.placements != param.placements or value.device_mesh != param.device_mesh:
            value = value.redistribute(param.device_mesh, param.placements)
        return local(value)
    if is_distributed(value) or value.numel() not in (whole.numel(), part.numel()):
        raise ValueError(f"shape {tuple(value.shape)}, expected {tuple(whole)}")
    if value.numel() == part.numel():
        return value.reshape(part)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(whole, param.device_mesh, param.placements)
    ranges = tuple(slice(offset, offset + size) for offset, size in zip(offsets, part, strict=True))
    return value.reshape(whole)[ranges]

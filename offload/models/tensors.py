"""Tensors as a file takes them: on the host, contiguous, alone in their storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from offload.distributed.world import World
from offload.engine.shards import is_distributed, is_first_copy, local, runs


def standalone(tensor: Tensor) -> Tensor:
    """``tensor`` with a storage that holds its own elements and nothing else.

    A contiguous tensor keeps its memory, on any device: only the record of the storage is new. A view which
    is not contiguous is copied.
    """
    if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return tensor
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or tensor.numel() == 0:
        return tensor.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    try:
        # A DLPack capsule describes the view alone: the tensor made from it has a storage of just that size.
        return torch.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError):  # a dtype or device which DLPack does not know
        return tensor.clone()


def is_divided(tensor: Tensor) -> bool:
    """Whether several processes have parts of a tensor (a DTensor)."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is divided among processes, which all have to ask; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_on(rank: int, tensor: Tensor, world: World, read: Callable[[Tensor], Tensor]) -> Tensor | None:
    """All of a tensor on one process, None on the others; one that is not divided as it is, on all.

    Args:
        rank: of that process.
        tensor: every process has to ask for it.
        world: the processes. Where it has a group of its own, parts go by that, from host to host, and not by the
            backend that training uses.
        read: gives a part on the host.
    """
    if not is_distributed(tensor):
        return tensor
    if world.group is None:
        gathered = whole(tensor)
        return gathered if rank == world.rank else None
    part, ranges = torch.empty(0), []
    if is_first_copy(tensor):
        part, ranges = read(local(tensor.detach())), list(runs(tensor))
    parts = world.gathered_by(rank, (ranges, part))
    if not parts:
        return None
    flat = torch.empty(tensor.numel(), dtype=next(part.dtype for ranges, part in parts if ranges))
    for ranges, part in parts:
        for first, at, count in ranges:
            flat[at : at + count] = part.reshape(-1)[first : first + count]
    return flat.view(tensor.shape)


def host_tensor(tensor: Tensor, name: str) -> Tensor:
    """``tensor`` on the CPU, contiguous and alone in its storage; not copied where it is so already."""
    tensor = whole(tensor.detach())
    if type(tensor) is not Tensor:
        raise TypeError(f"{name} is a {type(tensor).__name__}: a model is saved with plain tensors only")
    return standalone(tensor.to("cpu").contiguous())


def host_tensors(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Some of ``tensors`` as :func:`host_tensor` gives them, no two of them in one memory."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name in names:
        tensor = host_tensor(tensors[name], name)
        if tensor.data_ptr() in seen:  # safetensors refuses one memory under two names
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        result[name] = tensor
    return result

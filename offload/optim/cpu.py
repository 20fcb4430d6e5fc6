"""The update on the CPU: the compiled kernel through ctypes, or without it the reference, which gives the same bits.

The library lies in ``kernels/`` beside its sources; the package's own build compiles it (``hatch_build.py``). It knows
neither Python nor torch: a call passes one table of addresses and numbers, and holds no GIL while it runs.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from offload.optim import reference
from offload.optim.formats import PARAM_KINDS, STATE_DTYPES, Item, Kind

LIBRARY = Path(__file__).parent / "kernels" / ("_adamw.dylib" if sys.platform == "darwin" else "_adamw.so")

ABI = 5
"""The library's interface that this file speaks: OFFLOAD_ABI in kernels/adamw.h."""

HUGE_PAGE_BYTES = 4 << 20
"""Tensors below it are not worth huge pages (of 2 MiB, on x86)."""

_KINDS = {
    Kind(param, state, coupled): (p * len(STATE_DTYPES) + s) * 2 + coupled
    for p, param in enumerate(PARAM_KINDS)
    for s, state in enumerate(STATE_DTYPES)
    for coupled in (False, True)
}


@cache
def load() -> ctypes.CDLL | None:
    """The library; None, after one warning, where it is missing or of another version."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.offload_abi.restype = ctypes.c_int32
        if (found := library.offload_abi()) != ABI:
            raise OSError(f"{LIBRARY} has interface {found} instead of {ABI}")
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        library.offload_adamw.argtypes = [pointer, int64, pointer, int64, int32, int32]
        library.offload_adamw.restype = int64
        library.offload_isa.argtypes = [int32]
        library.offload_isa.restype = ctypes.c_char_p
        library.offload_advise_huge_pages.argtypes = [pointer, int64]
        library.offload_advise_huge_pages.restype = int32
        return library
    except (OSError, AttributeError) as error:
        warnings.warn(
            f"the CPU kernel of offload.optim cannot be used ({error}): updates on the CPU run on PyTorch's operations "
            "with the same results, but much slower. It is compiled when tune-offload is installed where there is a "
            "C compiler (pip install --force-reinstall --no-deps), and in a checkout by `python hatch_build.py`.",
            stacklevel=2,
        )
        return None


def instruction_sets() -> list[str]:
    """Those of this CPU for which the kernel was compiled, best first; they all give the same bits."""
    library = load()
    if library is None:
        return []
    names = iter(range(len(_KINDS)))
    return [name.decode() for name in iter(lambda: library.offload_isa(next(names)), None)]


def update(items: Sequence[Item], *, threads: int | None = None, instruction_set: int = 0) -> None:
    """Update every tensor of ``items`` in place, in one call that releases the GIL.

    Args:
        items: CPU tensors of the dtypes and sizes that :class:`offload.optim.formats.Item` states; no two overlap.
        threads: at most as many; ``torch.get_num_threads()`` by default, which OMP_NUM_THREADS and
            ``torch.set_num_threads`` set. The kernel's threads are its own, not OpenMP's.
        instruction_set: position in :func:`instruction_sets`.

    Raises:
        ValueError: an item does not have the tensors that its kind needs, or ``start`` is not a multiple of a block.
    """
    library = load()
    if library is None:
        reference.update(items)
        return
    table, constants, rows = array("q"), array("f"), dict[int, int]()
    for item in items:
        kind, param, grad, m, v, m_scale, v_scale, remainder, start, key_param, key_v, numbers = item
        row = rows.get(id(numbers))
        if row is None:
            row = rows[id(numbers)] = len(rows)
            constants.extend(numbers)
        table.extend(
            (
                param.data_ptr(),
                grad.data_ptr(),
                m.data_ptr(),
                v.data_ptr(),
                0 if m_scale is None else m_scale.data_ptr(),
                0 if v_scale is None else v_scale.data_ptr(),
                0 if remainder is None else remainder.data_ptr(),
                param.numel(),
                start,
                key_param,
                key_v,
                _KINDS[kind],
                row,
            )
        )
    result = library.offload_adamw(
        table.buffer_info()[0],
        len(items),
        constants.buffer_info()[0],
        len(rows),
        torch.get_num_threads() if threads is None else threads,
        instruction_set,
    )
    if result > 0:
        raise ValueError(f"the kernel cannot update {_in_words(items[result - 1])}")
    if result < 0:
        raise ValueError(f"instruction_set={instruction_set}: this CPU has {', '.join(instruction_sets())}")


def _in_words(item: Item) -> str:
    tensors = {name: value for name, value in item._asdict().items() if isinstance(value, Tensor)}
    shapes = ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items())
    return f"a tensor of {item.kind} from element {item.start} on, with {shapes}"


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages under a large CPU tensor that nothing has been written to yet; elsewhere without effect.

    Args:
        tensor: dense; only the pages that are wholly its own are concerned.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes >= HUGE_PAGE_BYTES and tensor.device.type == "cpu" and (library := load()) is not None:
        library.offload_advise_huge_pages(tensor.data_ptr(), nbytes)

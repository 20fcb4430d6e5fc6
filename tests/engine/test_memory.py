"""Host memory: aligned views side by side in page-locked slabs, every byte counted."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from offload.engine import memory
from offload.engine.memory import ALIGNMENT, HostMemory, padded
from offload.engine.runtime import HostRuntime


class Pinning(HostRuntime):
    """Counts what is page-locked; refuses after ``limit`` bytes."""

    shares_memory = False

    def __init__(self, limit: int = 1 << 40) -> None:
        self.slabs: list[int] = []
        self.limit = limit

    def empty_pinned(self, nbytes: int) -> Tensor:
        if sum(self.slabs) + nbytes > self.limit:
            raise RuntimeError("CUDA error: out of memory\nwith more lines")
        self.slabs.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


def like(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.empty(size, dtype=dtype, device="meta") for size in sizes]


def addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_padding(nbytes: int, expected: int) -> None:
    assert padded(nbytes) == expected


def test_tensors_of_one_call_lie_side_by_side_and_aligned() -> None:
    runtime = Pinning()
    tensors = HostMemory(runtime).allocate([*like(3, 100), *like(5, dtype=torch.bfloat16)], "parameters")
    assert [(t.shape, t.dtype) for t in tensors] == [
        ((3,), torch.float32),
        ((100,), torch.float32),
        ((5,), torch.bfloat16),
    ]
    start, second, third = addresses(tensors)
    assert (second - start, third - second) == (padded(12), padded(400))
    assert len(runtime.slabs) == 1
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    assert [tensor.unique().item() for tensor in tensors] == [0, 1, 2]


def test_slabs_are_powers_of_two_and_counted_whole() -> None:
    runtime = Pinning()
    host = HostMemory(runtime)
    for count in (100, 300, 1000, 5, 7):
        host.allocate(like(count), "gradients")
    assert all(slab & (slab - 1) == 0 for slab in runtime.slabs)
    assert host.report() == {"pinned_host": {"gradients": sum(runtime.slabs)}}
    asked = sum(padded(4 * count) for count in (100, 300, 1000, 5, 7))
    assert asked <= sum(runtime.slabs) <= 4 * asked and len(runtime.slabs) < 5


def test_purposes_do_not_share_slabs() -> None:
    host = HostMemory(Pinning())
    host.allocate(like(10), "parameters")
    host.allocate(like(10), "gradients")
    assert host.report() == {"pinned_host": {"parameters": 64, "gradients": 64}}


def test_more_than_a_slab_is_spread_over_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLAB_BYTES", 1024)
    runtime = Pinning()
    tensors = HostMemory(runtime).allocate(like(200, 200, 600, 10), "optimizer_state")
    assert max(runtime.slabs) >= 2400 and sum(runtime.slabs) >= sum(padded(t.nbytes) for t in tensors)
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    assert [tensor.unique().item() for tensor in tensors] == [0, 1, 2, 3]


def test_pageable_memory_is_counted_apart() -> None:
    runtime = Pinning()
    host = HostMemory(runtime)
    host.allocate(like(10), "optimizer_state", "host")
    assert host.report() == {"host": {"optimizer_state": 64}} and not runtime.slabs


def test_where_memory_is_shared_nothing_is_pinned() -> None:
    host = HostMemory(HostRuntime())
    host.allocate(like(10, 20), "parameters")
    assert host.report() == {"host": {"parameters": 64 + 128}}


def test_a_failing_pin_warns_once_and_goes_on_pageable() -> None:
    host = HostMemory(Pinning(limit=64))
    host.allocate(like(10), "parameters")
    with pytest.warns(UserWarning, match=r"page-locking .* failed \(CUDA error: out of memory\)") as warned:
        (first,) = host.allocate(like(100), "parameters")
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (second,) = host.allocate(like(100), "gradients")
    first.fill_(1.0), second.fill_(2.0)
    assert first.sum() == 100 and second.sum() == 200
    report = host.report()
    assert report["pinned_host"] == {"parameters": 64}
    assert report["host"]["parameters"] >= padded(400) and report["host"]["gradients"] >= padded(400)


def test_nothing_asked_for_is_nothing_given() -> None:
    assert HostMemory(Pinning()).allocate([], "parameters") == []


def test_slabs_begin_aligned() -> None:
    (tensor,) = HostMemory(Pinning()).allocate(like(10), "parameters")
    assert tensor.data_ptr() % ALIGNMENT == 0

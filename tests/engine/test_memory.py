"""Host memory: aligned views side by side in page-locked slabs, every byte counted."""

from __future__ import annotations

import threading
import time
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


class Slow(Pinning):
    """Other threads than the caller's take their time, and are told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.caller = threading.current_thread()
        self.others = 0
        self.begun, self.may_end = threading.Event(), threading.Event()

    def empty_pinned(self, nbytes: int) -> Tensor:
        if threading.current_thread() is self.caller:
            self.begun.wait(30)
            self.may_end.set()
        else:
            self.others += 1
            self.begun.set()
            self.may_end.wait(30)
            time.sleep(0.1)
        return super().empty_pinned(nbytes)


def test_many_slabs_are_page_locked_in_parallel_and_filled_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLAB_BYTES", 1024)
    monkeypatch.setattr(memory.os, "cpu_count", lambda: 4)
    runtime = Slow()
    host = HostMemory(runtime)
    groups = [like(40, 60), like(100, 100), like(200), like(7)]
    placed = host.allocate_all(groups, "optimizer_state")
    assert runtime.others > 0
    assert [[tensor.shape for tensor in group] for group in placed] == [[t.shape for t in group] for group in groups]
    tensors = [tensor for group in placed for tensor in group]
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    assert [tensor.unique().item() for tensor in tensors] == list(range(len(tensors)))
    # 192 + 256 + 448 bytes fill a slab of 1024 to 896; the next tensor begins another, and so does 832.
    assert runtime.slabs == [1024, 1024, 1024]
    assert host.report() == {"pinned_host": {"optimizer_state": 3 * 1024}}


def test_tensors_of_a_group_lie_side_by_side_but_at_a_slabs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLAB_BYTES", 1024)
    (first, second, third), (fourth,) = HostMemory(Pinning()).allocate_all([like(16, 16, 240), like(16)], "parameters")
    assert second.data_ptr() - first.data_ptr() == 64
    assert third.data_ptr() - second.data_ptr() != 64 and fourth.data_ptr() - third.data_ptr() == 960


def test_slabs_that_cannot_be_page_locked_are_pageable_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLAB_BYTES", 1024)
    host = HostMemory(Pinning(limit=1024))
    with pytest.warns(UserWarning, match="page-locking") as warned:
        placed = host.allocate_all([like(256), like(256), like(256)], "parameters")
    assert len(warned) == 1
    for index, (tensor,) in enumerate(placed):
        tensor.fill_(index)
    assert [tensor.unique().item() for (tensor,) in placed] == [0, 1, 2]
    assert host.report() == {"pinned_host": {"parameters": 1024}, "host": {"parameters": 2048}}


def test_long_page_locking_is_told_about(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(memory, "TOLD_FROM", 1024)
    HostMemory(Pinning()).allocate_all([like(100)], "parameters")
    assert "page-locking" not in capsys.readouterr().err
    HostMemory(Pinning()).allocate_all([like(256)], "parameters")
    assert "page-locking 0.0 GiB of host memory" in capsys.readouterr().err


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

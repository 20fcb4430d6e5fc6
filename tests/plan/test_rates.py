"""What the rates of a machine count, with times that the tests choose."""

from __future__ import annotations

import resource
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload import optim
from offload.plan import rates

SECONDS = 0.5


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was copied, each time: (target, source) of all that were copied at once."""
    done: list[Any] = []
    monkeypatch.setattr(rates, "copy_seconds", lambda pairs, device: (done.append([*pairs]), SECONDS)[1])
    return done


def test_copies_count_what_they_move_one_way_and_on_one_device_both(copies: list[Any]) -> None:
    size = 1024
    found = rates.copy_rates("cpu", size)
    once = size / SECONDS
    assert found == {"up": once, "down": once, "each_of_both": once, "pageable_up": once, "pageable_down": once,
                     "device_copy": 2 * once}  # fmt: skip
    (up,), (down,), both, (pageable_up,), (pageable_down,), (on_device,) = copies
    assert both[0] is up and both[1] is down
    there, locked = up
    assert pageable_up[0] is there and pageable_up[1] is pageable_down[0] and pageable_up[1] is not locked
    tensors = {id(each) for each in (*up, *down, pageable_up[1])}
    assert len(tensors) == 5, "nothing is read that another copy writes"
    assert {id(each) for each in on_device} == {id(there), id(down[1])}


def test_host_memory_is_read_and_written_with_all_threads_and_with_one(
    copies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(
        rates, "copy_seconds", lambda pairs, device: (threads.append(torch.get_num_threads()), SECONDS)[1]
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = rates.host_memory_rates(1024)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert found.pop("host_faults") > 0
    assert found == {"host_copy": 2048 / SECONDS, "host_copy_one_thread": 2048 / SECONDS} and threads == [2, 1]


def test_new_pages_are_what_writing_a_new_tensor_takes_beyond_writing_one_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times: list[float] = []

    def seconds(work: Any) -> float:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        work()
        is_new = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > rates.NEW >> 22  # of huge pages, too
        times.append(3 * SECONDS if is_new else SECONDS)
        return times[-1]

    monkeypatch.setattr(rates, "copy_seconds", lambda pairs, device: SECONDS)
    monkeypatch.setattr(rates, "_seconds", seconds)
    assert rates.host_memory_rates(1024)["host_faults"] == pytest.approx(rates.NEW / (2 * SECONDS))


def test_a_product_has_two_operations_for_each_of_its_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_seconds", lambda work: SECONDS)
    assert rates.matmul_rate("cpu", 8) == 2 * 8**3 / SECONDS


def test_a_median_of_turns_after_one_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([100.0, 1.0, 9.0, 2.0, 3.0, 8.0])
    monkeypatch.setattr(rates, "_seconds", lambda work: next(turns))
    assert rates.copy_seconds([(torch.ones(1), torch.ones(1))], "cpu") == 3.0


def test_adamw_updates_all_parameters_in_each_of_its_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped: list[Any] = []
    monkeypatch.setattr(rates, "step_seconds", lambda optimizer, device: (stepped.append(optimizer), SECONDS)[1])
    found = rates.cpu_adamw_rates(4096)
    assert set(found.values()) == {4096 / SECONDS}
    groups = [optimizer.param_groups[0] for optimizer in stepped]
    assert all(sum(param.numel() for param in group["params"]) == 4096 for group in groups)
    assert all(
        param.dtype == torch.bfloat16 and param.grad is not None for group in groups for param in group["params"]
    )
    assert isinstance(stepped[0], torch.optim.AdamW) and groups[0]["fused"]
    assert all(isinstance(each, optim.AdamW) for each in stepped[1:])
    assert [*found][1:] == [f"packed {group['state_dtype']} {group['master']}" for group in groups[1:]]


def test_a_step_is_timed_once_states_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([1.0, 9.0, 2.0, 3.0, 8.0])
    monkeypatch.setattr(rates, "_seconds", lambda work: (work(), next(turns))[1])
    param = nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    optimizer = torch.optim.AdamW([param])
    assert rates.step_seconds(optimizer, "cpu") == 3.0
    assert optimizer.state[param]["step"] == 2 + rates.TURNS


@pytest.mark.parametrize("most", [2, 4])
def test_a_gib_is_locked_in_the_seconds_of_those_that_were(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def lock(nbytes: int) -> None:
        if len(made) == 3:
            raise RuntimeError("no more")
        made.append(nbytes)

    clock = iter([10.0, 16.0])
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(clock))
    found = rates.locking(most, lock=lock)
    count = min(most, 3)
    assert made == [rates.GIB] * count
    assert found == {"locked_gib": count, "seconds_per_gib": 6.0 / count, "refused": "no more" if most > 3 else None}


@pytest.mark.parametrize(("rate", "share"), [(0.5, 0.5), (2.0, 1.0)])
def test_the_share_of_the_cores_is_time_worked_of_time_passed(
    rate: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(perf_counter=time.perf_counter, thread_time=lambda: rate * time.perf_counter())
    monkeypatch.setattr(rates, "time", clock)
    assert rates.cores_had(0.02) == pytest.approx(share, rel=0.1)


def test_the_share_of_the_cores_is_measured_on_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[int]()
    monkeypatch.setattr(rates.torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(rates.hashlib, "blake2b", lambda data: (threads.add(threading.get_ident()), time.sleep(0.01)))
    assert rates.cores_had(0.05) < 0.5, "nothing works"
    assert len(threads) == 3

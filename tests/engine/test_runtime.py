"""The accelerator's runtime against a stand-in for torch's streams, whose objects have state as in torch 2.11."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.device import total_memory
from offload.engine.runtime import AcceleratorRuntime, free_pinned


class Stream:
    """May be entered by one thread at a time, since the object itself remembers what to go back to."""

    made = 100

    def __init__(
        self, device: Any = None, *, stream_id: int | None = None, device_index: int = 0, device_type: int = 1
    ):
        if stream_id is None:
            Stream.made += 1
        self.stream_id = Stream.made if stream_id is None else stream_id
        self.device_index = device.index or 0 if device is not None else device_index
        self.device = torch.device("cuda", self.device_index)
        self.device_type = device_type
        self.waited_for: list[Event] = []
        self.is_entered = False

    def __enter__(self) -> Stream:
        if self.is_entered:
            raise RuntimeError("Stream's context should not be initialized")  # pytorch #176560
        self.is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_entered = False

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)

    def synchronize(self) -> None:
        return None


class Event:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Stream | None = None
        self.answers: list[bool] = []

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.answers.pop(0) if self.answers else True

    def synchronize(self) -> None:
        raise AssertionError("spins")


class Machine:
    """Two devices; each thread has a current device, and a current stream on each."""

    def __init__(self) -> None:
        self.threads = threading.local()
        self.defaults = [Stream(stream_id=0, device_index=index) for index in range(2)]

    def current_device_index(self) -> int:
        return getattr(self.threads, "device", 0)

    def set_device_index(self, device: int) -> None:
        self.threads.device = device

    def _streams(self) -> list[Stream]:
        if not hasattr(self.threads, "streams"):
            self.threads.streams = list(self.defaults)
        return self.threads.streams

    def current_stream(self, device: torch.device) -> Stream:
        return self._streams()[device.index]

    def set_stream(self, stream: Stream) -> None:
        self._streams()[stream.device_index] = stream
        self.set_device_index(stream.device_index)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    for name in ("current_device_index", "set_device_index", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.accelerator, name, getattr(machine, name))
    return machine


DEVICE = torch.device("cuda", 1)


class Copied(Tensor):
    """Calls back in the middle of a copy onto it."""

    meanwhile: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            args[0].meanwhile()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_two_threads_use_one_stream_at_the_same_time(machine: Machine) -> None:
    """Backward copies a gradient down while the worker copies states down."""
    runtime = AcceleratorRuntime(DEVICE)
    both = threading.Barrier(2, timeout=30)
    errors: list[BaseException] = []

    def copy() -> None:
        try:
            machine.set_stream(Stream(device=DEVICE))
            before = machine.current_stream(DEVICE)
            target = torch.zeros(3).as_subclass(Copied)
            target.meanwhile = both.wait
            event: Any = runtime.copy(target, torch.ones(3), "down")
            assert machine.current_stream(DEVICE) is before and event.event.stream is not before
            assert torch.equal(target.as_subclass(Tensor), torch.ones(3))
        except BaseException as error:
            errors.append(error)
            both.abort()

    threads = [threading.Thread(target=copy) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_inside_updating_operations_go_to_the_update_stream_or_to_the_default_one(machine: Machine) -> None:
    runtime = AcceleratorRuntime(DEVICE)
    mine = Stream(device=DEVICE)
    machine.set_stream(mine)
    with runtime.updating("update"):
        assert machine.current_stream(DEVICE) not in (mine, machine.defaults[1])
    with runtime.updating("update", on_default=True):
        assert machine.current_stream(DEVICE).stream_id == 0
    assert machine.current_stream(DEVICE) is mine


def test_a_caller_on_another_device_stays_there(machine: Machine) -> None:
    runtime = AcceleratorRuntime(DEVICE)
    machine.set_device_index(0)
    runtime.copy(torch.zeros(1), torch.ones(1), "up")
    with runtime.updating():
        assert machine.current_device_index() == 1
    assert machine.current_device_index() == 0


def test_a_copy_is_queued_behind_its_events_on_its_own_stream(machine: Machine) -> None:
    runtime = AcceleratorRuntime(DEVICE)
    first: Any = runtime.record()
    second: Any = runtime.copy(torch.zeros(1), torch.ones(1), "up", (first,))
    third: Any = runtime.copy(torch.zeros(1), torch.ones(1), "down", (second,))
    assert first.event.stream is machine.defaults[1]
    assert second.event.stream.waited_for == [first.event] and third.event.stream.waited_for == [second.event]
    assert second.event.stream is not third.event.stream


def test_whoever_waits_for_an_event_sleeps(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("offload.engine.runtime.time.sleep", slept.append)
    event: Any = AcceleratorRuntime(DEVICE).record()
    event.event.answers = [False, False, True]
    event.synchronize()
    assert len(slept) == 2 and not event.event.answers


def test_a_record_on_a_stream_of_ones_own(machine: Machine) -> None:
    runtime = AcceleratorRuntime(DEVICE)
    mine = Stream(device=DEVICE)
    machine.set_stream(mine)
    here = runtime.stream()
    machine.set_stream(machine.defaults[1])
    event: Any = runtime.record(here)
    assert event.event.stream.stream_id == mine.stream_id and event.event.stream.device_index == 1
    assert runtime.stream() != here and hash(here)


def test_no_range_is_recorded_while_no_profiler_runs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs more than the launch that it is about."""
    ranges: list[str] = []
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: ranges.append(name) or torch.no_grad())
    runtime = AcceleratorRuntime(DEVICE)
    runtime.copy(torch.zeros(1), torch.ones(1), "up", name="copy up 0")
    assert not ranges
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    runtime.copy(torch.zeros(1), torch.ones(1), "up", name="copy up 0")
    assert ranges == ["offload: copy up 0"]


def test_a_thread_may_join_itself(machine: Machine) -> None:
    """The garbage collector closes an optimizer on whichever thread it runs, the optimizer's own included."""
    runtime, joined = AcceleratorRuntime(DEVICE), threading.Event()
    started = threading.Event()
    own: list[Any] = []

    def work() -> None:
        started.wait(30)
        own[0].join()
        joined.set()

    own.append(runtime.start(work, "own"))
    started.set()
    assert joined.wait(30)
    own[0].join()


@pytest.mark.parametrize("where", ["torch.accelerator.empty_host_cache", "torch._C._host_emptyCache"])
def test_page_locked_memory_is_given_back_in_every_torch(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.11 has the second one alone."""
    called: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.delattr("torch.accelerator.empty_host_cache", raising=False)
    monkeypatch.delattr("torch._C._host_emptyCache", raising=False)
    monkeypatch.setattr(where, lambda: called.append(where), raising=False)
    free_pinned()
    assert called == [where]


def test_a_process_that_may_have_a_share_of_the_device_sees_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.cuda tells it: an 80 GB card of which 70 are free."""
    share = 1.0

    def facts(device: Any) -> Any:
        return SimpleNamespace(total_memory=80)

    module = SimpleNamespace(
        mem_get_info=lambda device: (70, 80),
        memory_reserved=lambda device: 8,
        max_memory_reserved=lambda device: 10,
        get_per_process_memory_fraction=lambda device: share,
        get_device_properties=facts,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    runtime = object.__new__(AcceleratorRuntime)
    runtime._device = torch.device("cuda", 0)
    assert runtime.memory_left() == (70 + 8 - 10, 80) and total_memory(runtime._device) == 80
    share = 0.2
    assert runtime.memory_left() == (16 - 10, 16) and total_memory(runtime._device) == 16

"""The simulated accelerator finds what it is there to find and nothing else; its times are those done by hand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.engine.runtime import DONE
from offload.simulation.accelerator import (
    DeadlockError,
    RaceError,
    Rates,
    SimulatedAccelerator,
    draw,
    write_chrome_trace,
)

ORDERS = ["late", "early", "time", *range(5)]
FLOATS = 10
SLOW = Rates(up=10, down=20, device=100, host=10)


def pinned(sim: SimulatedAccelerator, floats: int = FLOATS) -> Tensor:
    return sim.empty_pinned(4 * floats).view(torch.float32)


def on_device(sim: SimulatedAccelerator, floats: int = FLOATS) -> Tensor:
    buffer = sim.empty_device(4 * floats).view(torch.float32)
    sim.record().synchronize()  # the memory is free for every stream from here on
    return buffer


def test_fresh_device_memory_belongs_to_the_stream_that_asked_for_it() -> None:
    with SimulatedAccelerator() as sim:
        with pytest.raises(RaceError, match="empty_device on compute writes"):
            sim.copy(sim.empty_device(40), sim.empty_pinned(40), "up")
        sim.copy(sim.empty_device(40), sim.empty_pinned(40), "up", after=[sim.record()])


def increment(host: Tensor) -> Callable[[], None]:
    def work() -> None:
        host.add_(1.0)

    return work


@pytest.fixture
def sim() -> Any:
    with SimulatedAccelerator() as simulator:
        yield simulator


class Marker(Tensor):
    """A tensor without memory of its own; keeps what autograd adds to it, and zeroes what it stands for."""

    @staticmethod
    def __new__(cls, like: Tensor, host: Tensor) -> Marker:
        marker: Any = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        marker.host, marker.arrived = host, None
        return marker

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            args[0].arrived = args[1].detach()
        elif func is torch.ops.aten.zero_.default:
            args[0].host.zero_()
        return args[0]


class TestRaces:
    def test_host_reads_a_copy_before_its_event(self, sim: SimulatedAccelerator) -> None:
        host, device = pinned(sim), torch.ones(FLOATS)
        sim.copy(host, device, "down", [sim.record()], "grad")
        with pytest.raises(RaceError, match="copy 'grad' on down writes float32.*\n.*clone on main reads float32"):
            host.clone()

    def test_host_reads_a_copy_after_its_event(self, sim: SimulatedAccelerator) -> None:
        host, device = pinned(sim), torch.ones(FLOATS)
        sim.copy(host, device, "down", [sim.record()]).synchronize()
        assert host.sum().item() == FLOATS

    def test_stream_reads_a_copy(self, sim: SimulatedAccelerator) -> None:
        host, device = pinned(sim).fill_(1.0), on_device(sim)
        event = sim.copy(device, host, "up")
        with pytest.raises(RaceError, match="on up writes.*\n.*mul on compute reads"):
            device * 2
        sim.wait(event)
        assert (device * 2).sum().item() == 2 * FLOATS

    def test_copy_of_what_compute_still_makes(self, sim: SimulatedAccelerator) -> None:
        host, device = pinned(sim), torch.ones(FLOATS)
        with pytest.raises(RaceError, match="ones on compute writes.*\n.*on down reads"):
            sim.copy(host, device, "down")

    def test_copy_into_what_compute_just_allocated(self, sim: SimulatedAccelerator) -> None:
        host, device = pinned(sim).fill_(0.0), torch.empty(FLOATS)
        with pytest.raises(RaceError, match="empty on compute writes"):
            sim.copy(device, host, "up")

    @pytest.mark.parametrize("waits", [True, False])
    def test_source_is_overwritten(self, sim: SimulatedAccelerator, waits: bool) -> None:
        host, device = pinned(sim), torch.ones(FLOATS)
        event = sim.copy(host, device, "down", [sim.record()])
        if waits:
            sim.wait(event)
            device.zero_()
            event.synchronize()
            assert host.sum().item() == FLOATS
        else:
            with pytest.raises(RaceError, match="on down reads.*\n.*zero_ on compute writes"):
                device.zero_()

    def test_two_readers_are_no_race(self, sim: SimulatedAccelerator) -> None:
        device = torch.ones(FLOATS)
        sim.copy(pinned(sim), device, "down", [sim.record()])
        device.sum()

    def test_directions_are_not_in_order_with_each_other(self, sim: SimulatedAccelerator) -> None:
        host, device = pinned(sim), torch.ones(FLOATS)
        event = sim.copy(host, device, "down", [sim.record()], "out")
        with pytest.raises(RaceError, match="copy 'out' on down writes.*\n.*copy 'in' on up reads"):
            sim.copy(torch.empty(FLOATS), host, "up", [sim.record()], "in")
        sim.copy(torch.empty(FLOATS), host, "up", [sim.record(), event], "in")

    def test_one_direction_is_in_order(self, sim: SimulatedAccelerator) -> None:
        first, second, host = on_device(sim).fill_(1.0), on_device(sim).fill_(2.0), pinned(sim)
        ready = sim.record()
        sim.copy(host, first, "down", [ready])
        sim.copy(host, second, "down").synchronize()
        assert host.sum().item() == 2 * FLOATS

    @pytest.mark.parametrize("waits", [True, False])
    def test_update_before_the_gradient_is_there(self, sim: SimulatedAccelerator, waits: bool) -> None:
        param, grad = torch.ones(FLOATS), torch.ones(FLOATS)
        ready = sim.record()
        with sim.updating("layers.0: update"):
            if waits:
                sim.wait(ready)
                param.sub_(grad)
            else:
                with pytest.raises(RaceError, match="ones on compute.*\n.*sub_ in 'layers.0: update' on update"):
                    param.sub_(grad)
        sim.finish()  # before the test's tensors are freed

    @pytest.mark.parametrize("waits", [True, False])
    def test_forward_before_the_update_is_done(self, sim: SimulatedAccelerator, waits: bool) -> None:
        param = on_device(sim)
        with sim.updating():
            param.fill_(1.0)
            updated = sim.record()
        if waits:
            sim.wait(updated)
            param.sum()
        else:
            with pytest.raises(RaceError, match="fill_ in 'update' on update.*\n.*sum on compute"):
                param.sum()
        sim.finish()  # before the test's tensors are freed

    def test_an_event_covers_what_came_before_it_only(self, sim: SimulatedAccelerator) -> None:
        first, second = on_device(sim), on_device(sim)
        with sim.updating():
            first.fill_(1.0)
            event = sim.record()
            second.fill_(1.0)
        sim.wait(event)
        first.sum()
        with pytest.raises(RaceError):
            second.sum()
        sim.finish()  # before the test's tensors are freed

    def test_an_event_covers_what_its_thread_did(self, sim: SimulatedAccelerator) -> None:
        host, events, total = pinned(sim), [], []

        def work() -> None:
            events[0].synchronize()
            total.append(host.sum().item())

        thread = sim.start(work, "worker")  # runs when main is blocked, knowing only what was before this
        host.fill_(1.0)
        events.append(sim.record())
        thread.join()
        assert total == [FLOATS]

    def test_disjoint_views_of_one_slab(self, sim: SimulatedAccelerator) -> None:
        slab = pinned(sim, 2 * FLOATS)
        device = torch.ones(FLOATS)
        sim.copy(slab[:FLOATS], device, "down", [sim.record()])
        slab[FLOATS:].fill_(0.0)
        with pytest.raises(RaceError, match="bytes 0-40.*\n.*bytes 36-80"):
            slab[FLOATS - 1 :].fill_(0.0)

    def test_reads_do_not_hide_each_other(self, sim: SimulatedAccelerator) -> None:
        """The compute stream's read comes last; the copy's must still be known."""
        device = torch.ones(FLOATS)
        sim.copy(pinned(sim), device, "down", [sim.record()])
        device.sum()
        with pytest.raises(RaceError, match="on down reads"):
            device.zero_()

    def test_an_ordered_read_does_not_hide_the_write(self, sim: SimulatedAccelerator) -> None:
        host, source, target = pinned(sim), on_device(sim), on_device(sim)
        event = sim.copy(host, source, "down")
        sim.copy(target, host, "up", [event])
        with pytest.raises(RaceError, match="on down writes.*\n.*on main reads"):
            host.clone()

    def test_an_ordered_write_does_not_hide_another_part(self, sim: SimulatedAccelerator) -> None:
        host, source, part = pinned(sim), on_device(sim), on_device(sim, 1)
        event = sim.copy(host, source, "down", name="whole")
        sim.copy(host[:1], part, "up", [event], name="part")
        with pytest.raises(RaceError, match="copy 'whole' on down writes.*\n.*on main reads"):
            host[5:].clone()

    def test_views_neither_read_nor_write(self, sim: SimulatedAccelerator) -> None:
        device = on_device(sim)
        sim.copy(device, pinned(sim), "up")
        views = [device.view(2, 5).t(), device[2:4], device.detach(), device.unsqueeze(0).expand(3, -1)]
        views += [*device.split(5), torch.empty_like(device), device.new_zeros(3)]
        device.unsqueeze_(0)
        with pytest.raises(RaceError):
            views[0].contiguous()

    def test_lists_of_tensors(self, sim: SimulatedAccelerator) -> None:
        fine, racing = on_device(sim), on_device(sim)
        sim.copy(racing, pinned(sim), "up")
        torch._foreach_add_([fine], 1.0)
        with pytest.raises(RaceError, match="_foreach_add_ on compute"):
            torch._foreach_add_([fine, racing], 1.0)

    def test_out_argument(self, sim: SimulatedAccelerator) -> None:
        device, ones = on_device(sim), torch.ones(FLOATS)
        sim.copy(pinned(sim), device, "down")
        with pytest.raises(RaceError, match="add on compute writes"):
            torch.add(ones, ones, out=device)

    def test_operations_in_backward(self, sim: SimulatedAccelerator) -> None:
        weight = torch.nn.Parameter(on_device(sim).fill_(1.0))
        loss = (weight * weight).sum()
        host = pinned(sim).fill_(0.0)
        sim.copy(weight, host, "up", [sim.record()])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        sim.finish()
        loss = (weight * weight).sum()
        sim.copy(weight.data, host, "up", [sim.record()])
        with pytest.raises(RaceError, match="mul on compute reads"):
            loss.backward()

    def test_fresh_output_belongs_to_its_stream(self, sim: SimulatedAccelerator) -> None:
        with sim.updating():
            made = torch.zeros(FLOATS)
        with pytest.raises(RaceError, match="zeros in 'update' on update"):
            made.sum()

    def test_resized_storages_do_not_pass_on_their_history(self, sim: SimulatedAccelerator) -> None:
        big = torch.empty(1 << 16, dtype=torch.uint8)
        with sim.updating():
            sim.wait(sim.record())
        for _ in range(20):
            with sim.updating():
                there = torch.zeros(1 << 16, dtype=torch.uint8)
            there.untyped_storage().resize_(0)
            del there
            torch.zeros(1 << 16, dtype=torch.uint8).add_(1)
        big.sum()


class TestHostAndDevice:
    def test_host_work_is_the_threads_own(self, sim: SimulatedAccelerator) -> None:
        host = pinned(sim).fill_(1.0)
        half = host * 0.5  # computed from host memory: host memory
        half.add_(1.0)
        host.copy_(half)
        assert sim.copy(on_device(sim), host, "up").is_done() is False

    def test_reading_a_value_waits_for_its_stream(self, sim: SimulatedAccelerator) -> None:
        device = torch.ones(FLOATS)
        host = pinned(sim)
        sim.copy(device, host, "up", [sim.record()])
        sim.compute(3.0, "layer")
        with pytest.raises(RaceError):
            device.sum()
        assert sim.now("main") == 0.0
        torch.zeros(()).item()
        assert sim.now("main") == 3.0
        with pytest.raises(RaceError):  # the compute stream was waited for, the copy was not
            host.fill_(1.0)

    @pytest.mark.parametrize("ask", [lambda t: bool(t.sum() > 0), lambda t: t.equal(t), lambda t: t.nonzero()])
    def test_ways_to_read_a_value(self, sim: SimulatedAccelerator, ask: Callable[[Tensor], object]) -> None:
        device = torch.ones(FLOATS)
        sim.compute(3.0, "layer")
        ask(device)
        assert sim.now("main") == 3.0

    def test_step_counts_rest_on_the_host(self, sim: SimulatedAccelerator) -> None:
        step = torch.tensor(0.0)
        device = torch.ones(FLOATS)
        sim.compute(3.0, "layer")
        ready = sim.record()
        with sim.updating():
            sim.wait(ready)
            step += 1
            device.mul_(step)  # a 0-dim host tensor may join device tensors
            assert step.item() == 1.0
        assert sim.now("main") == 0.0
        with pytest.raises(RaceError):
            device.sum()
        sim.finish()  # before the test's tensors are freed

    def test_plain_adamw(self, sim: SimulatedAccelerator) -> None:
        param = torch.nn.Parameter(torch.ones(FLOATS))
        optimizer = torch.optim.AdamW([param], foreach=False)
        for _ in range(2):
            (param * param).sum().backward()
            ready = sim.record()
            with sim.updating():
                sim.wait(ready)
                optimizer.step()
                updated = sim.record()
            assert not updated.is_done()  # the step count did not make the thread wait
            sim.wait(updated)
            optimizer.zero_grad()

    def test_fused_adamw_only_reads_gradients(self, sim: SimulatedAccelerator) -> None:
        host = [pinned(sim).fill_(1.0) for _ in range(4)]
        param, grad, first, second = host
        targets = on_device(sim), on_device(sim)
        sim.copy(targets[0], grad, "up")
        step = torch.tensor(1.0)
        hyper = dict(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)
        torch._fused_adamw_([param], [grad], [first], [second], [], [step], **hyper)
        sim.copy(targets[1], param, "up")
        with pytest.raises(RaceError, match="_fused_adamw_ on main writes"):
            torch._fused_adamw_([param], [grad], [first], [second], [], [step], **hyper)

    def test_blocking_copy_between_host_and_device(self, sim: SimulatedAccelerator) -> None:
        host, device = pinned(sim), torch.ones(FLOATS)
        sim.compute(3.0, "layer")
        host.copy_(device)
        assert sim.now("main") == 3.0
        assert host.sum().item() == FLOATS
        host.copy_(device, non_blocking=True)
        with pytest.raises(RaceError, match="copy_ on compute writes"):
            host.sum()

    def test_wrapper_subclasses(self, sim: SimulatedAccelerator) -> None:
        """A marker in .grad is left alone, and what it does with memory of its own is seen."""
        param, host = torch.nn.Parameter(torch.ones(FLOATS)), pinned(sim)
        param.grad = marker = Marker(param, host)
        (2 * param).sum().backward()
        assert marker.arrived is not None
        sim.copy(host, marker.arrived, "down", [sim.record()])
        with pytest.raises(RaceError, match="zero_ on main writes"):
            marker.zero_()

    def test_copy_of_a_wrapper_subclass(self, sim: SimulatedAccelerator) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        hosts, devices = (pinned(sim), pinned(sim)), (torch.ones(FLOATS), torch.ones(FLOATS))
        event = sim.copy(TwoTensor(*hosts), TwoTensor(*devices), "down", [sim.record()])
        with pytest.raises(RaceError):
            hosts[1].clone()
        event.synchronize()
        assert hosts[1].sum().item() == FLOATS

    def test_new_buffers_are_poisoned(self, sim: SimulatedAccelerator) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert sim.empty_device(64).view(dtype).isnan().all()
            assert sim.empty_pinned(64).view(dtype).isnan().all()


class TestLateExecution:
    def test_stale_until_somebody_waits(self) -> None:
        host, device = torch.zeros(3), torch.ones(3)
        with SimulatedAccelerator() as sim:
            event = sim.copy(host, device, "down")
            assert host.tolist() == [0, 0, 0]  # tolist() is no torch operation, so the simulator lets it pass
        with pytest.raises(RuntimeError, match="was left"):
            event.synchronize()
        assert host.tolist() == [0, 0, 0]

    def test_waiting_runs_what_came_before_and_no_more(self) -> None:
        buffers = [torch.zeros(1) for _ in range(4)]
        ones = torch.ones(1)
        with SimulatedAccelerator() as sim:
            sim.copy(buffers[0], ones, "down")
            after = sim.copy(buffers[1], ones, "down")
            sim.copy(buffers[2], ones, "down")
            up = sim.copy(buffers[3], ones, "up", [after])
            assert [up.is_done(), after.is_done()] == [False, False]
            up.synchronize()
            assert [up.is_done(), after.is_done()] == [True, True]
        assert [buffer.item() for buffer in buffers] == [1, 1, 0, 1]

    def test_stream_wait_runs_the_copy(self) -> None:
        host, device = torch.zeros(3), torch.ones(3)
        with SimulatedAccelerator() as sim:
            sim.wait(sim.copy(host, device, "down"))
        assert host.tolist() == [1, 1, 1]

    def test_finish_runs_everything(self) -> None:
        host, device = torch.zeros(3), torch.ones(3)
        with SimulatedAccelerator() as sim:
            sim.copy(host, device, "down")
            sim.finish()
            assert (host + 1).tolist() == [2, 2, 2]

    def test_long_chains(self, sim: SimulatedAccelerator) -> None:
        host, device = pinned(sim, 1), torch.ones(1)
        events = [sim.record()]
        for _ in range(3000):
            events.append(sim.copy(host, device, "down", events[-1:]))
        events[-1].synchronize()
        assert host.item() == 1.0

    def test_autograd_sees_the_write_when_it_is_queued(self, sim: SimulatedAccelerator) -> None:
        device, host = torch.zeros(FLOATS), pinned(sim)
        before = device._version
        sim.copy(device, host, "up", [sim.record()])
        assert device._version == before + 1
        sim.finish()
        assert device._version == before + 1

    def test_shapes_that_do_not_fit_are_refused_when_queued(self, sim: SimulatedAccelerator) -> None:
        with pytest.raises(RuntimeError, match="size"):
            sim.copy(pinned(sim, 3), torch.ones(2), "down", [sim.record()])

    def test_bytes_are_counted(self) -> None:
        with SimulatedAccelerator(scale=1000.0) as sim:
            host = pinned(sim)
            sim.copy(host, torch.ones(FLOATS), "down", [sim.record()]).synchronize()
            sim.copy(on_device(sim)[:5], host[:5], "up")
        assert sim.copied_bytes == {"down": 40, "up": 20}

    def test_events_of_work_already_done(self, sim: SimulatedAccelerator) -> None:
        sim.wait(DONE)
        sim.copy(on_device(sim), pinned(sim), "up", [DONE])


class TestThreads:
    @pytest.mark.parametrize("order", ORDERS)
    def test_signal_puts_accesses_in_order(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            host, signal, given = pinned(sim), sim.signal(), []

            def work() -> None:
                host.fill_(1.0)
                with signal:
                    given.append(True)
                    signal.notify_all()

            sim.start(work, "worker")
            with signal:
                while not given:
                    signal.wait()
            assert host.sum().item() == FLOATS

    @pytest.mark.parametrize("order", ORDERS)
    def test_lock_alone_puts_accesses_in_order(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            host, lock = pinned(sim, 1).fill_(0.0), sim.signal()

            def work() -> None:
                for _ in range(3):
                    with lock, lock:  # re-entrant
                        before = host.clone()
                        sim.record()  # others may run
                        host.copy_(before + 1)

            threads = [sim.start(work, "worker") for _ in range(2)]
            work()
            for thread in threads:
                thread.join()
            assert host.item() == 9.0

    @pytest.mark.parametrize("order", ORDERS)
    def test_thread_without_signal(self, order: Any) -> None:
        with pytest.raises(RaceError, match="on worker (reads|writes)"), SimulatedAccelerator(order=order) as sim:
            host = pinned(sim).fill_(0.0)
            thread = sim.start(increment(host), "worker")
            host.sum()
            thread.join()

    @pytest.mark.parametrize("order", ORDERS)
    def test_start_and_join_are_in_order(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            host = pinned(sim).fill_(1.0)
            sim.start(increment(host), "worker").join()
            assert host.sum().item() == 2 * FLOATS

    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("waits", [True, False])
    def test_thread_and_stream(self, order: Any, waits: bool) -> None:
        with SimulatedAccelerator(order=order) as sim:
            host = pinned(sim)
            event = sim.copy(host, torch.ones(FLOATS), "down", [sim.record()])
            seen: list[Any] = []

            def work() -> None:
                if waits:
                    event.synchronize()
                try:
                    seen.append(host.sum().item())
                except RaceError as error:
                    seen.append(str(error))

            sim.start(work, "worker").join()
            assert seen == [FLOATS] if waits else "sum on worker reads" in seen[0]

    def test_started_threads_work_on_the_host(self, sim: SimulatedAccelerator) -> None:
        device = torch.ones(FLOATS)
        sim.copy(device, pinned(sim), "up", [sim.record()])
        with pytest.raises(RaceError, match="add_ on worker writes"):
            sim.start(increment(device), "worker").join()

    @pytest.mark.parametrize("order", ORDERS)
    def test_polling(self, order: Any) -> None:
        """What is_done() says yes to may be read."""
        with SimulatedAccelerator(order=order) as sim:
            host = pinned(sim)
            event = sim.copy(host, torch.ones(FLOATS), "down", [sim.record()])
            if not event.is_done():
                with pytest.raises(RaceError):
                    host.clone()
                event.synchronize()
            assert event.is_done()
            assert host.sum().item() == FLOATS

    def test_late_and_early(self) -> None:
        def history(order: Any) -> list[str]:
            said: list[str] = []
            with SimulatedAccelerator(order=order) as sim:
                thread = sim.start(lambda: said.append("worker"), "worker")
                sim.record().synchronize()
                said.append("main")
                thread.join()
            return said

        assert history("late") == ["main", "worker"]
        assert history("early") == ["worker", "main"]
        assert {tuple(history(seed)) for seed in range(20)} == {("main", "worker"), ("worker", "main")}
        assert all(history(seed) == history(seed) for seed in range(20))

    def test_late_thread_gives_way_when_main_can_go_on(self) -> None:
        said: list[str] = []
        with SimulatedAccelerator(order="late") as sim:
            signal = sim.signal()

            def work() -> None:
                with signal:
                    signal.notify_all()
                said.append("worker")

            thread = sim.start(work, "worker")
            with signal:
                signal.wait()
            said.append("main")
            thread.join()
        assert said == ["main", "worker"]

    def test_time_order(self) -> None:
        """Each thread works as long as its name says; calls come in the order of virtual time."""
        said: list[tuple[str, float]] = []
        with SimulatedAccelerator(Rates(host=40), order="time") as sim:
            buffers = {name: pinned(sim) for name in ("2", "3")}

            def work(name: str) -> Callable[[], None]:
                def run() -> None:
                    for _ in range(3):
                        for _ in range(int(name)):
                            buffers[name].fill_(0.0)  # one second each
                        sim.record()
                        said.append((name, sim.now(name)))

                return run

            threads = [sim.start(work(name), name) for name in buffers]
            for thread in threads:
                thread.join()
            assert sim.now("main") == 9.0
        assert said == [("2", 2.0), ("3", 3.0), ("2", 4.0), ("2", 6.0), ("3", 6.0), ("3", 9.0)]

    def test_time_order_of_those_that_wake(self) -> None:
        """Main is woken at 4 s; what another thread does before then comes first."""
        said: list[str] = []
        with SimulatedAccelerator(Rates(host=40), order="time") as sim:
            signal, buffer, other = sim.signal(), pinned(sim), pinned(sim)

            def long() -> None:
                with signal:
                    for _ in range(4):
                        buffer.fill_(0.0)
                    signal.notify_all()

            def short() -> None:
                for second in range(1, 7):
                    other.fill_(0.0)
                    sim.record()
                    said.append(f"short {second}")

            threads = [sim.start(long, "long"), sim.start(short, "short")]
            with signal:
                signal.wait()
                said.append("main")
            for thread in threads:
                thread.join()
            said.append("end")
        assert said == ["short 1", "short 2", "short 3", "main", "short 4", "short 5", "short 6", "end"]

    def test_time_order_after_an_event(self) -> None:
        said: list[str] = []
        with SimulatedAccelerator(SLOW, order="time") as sim:
            event = sim.copy(on_device(sim), pinned(sim), "up")
            thread = sim.start(lambda: said.append("worker"), "worker")
            event.synchronize()
            said.append("main")
            thread.join()
        assert said == ["worker", "main"]

    def test_is_done_in_time_order(self) -> None:
        with SimulatedAccelerator(SLOW, order="time") as sim:
            device, host = on_device(sim), pinned(sim)
            first = sim.copy(device, host, "up")
            second = sim.copy(device, host, "up")
            assert not first.is_done()
            first.synchronize()
            assert (first.is_done(), second.is_done(), sim.now("main")) == (True, False, 4.0)

    @pytest.mark.parametrize("order", ORDERS)
    def test_deadlock(self, order: Any) -> None:
        heard: list[str] = []
        with SimulatedAccelerator(order=order) as sim:
            signal = sim.signal()

            def work() -> None:
                try:
                    with signal:
                        signal.wait()
                except DeadlockError as error:
                    heard.append(str(error))

            thread = sim.start(work, "worker")
            with pytest.raises(
                DeadlockError, match=r"'main' waits for the end of 'worker'.*'worker' waits in Signal.wait at"
            ):
                thread.join()
            thread.join()
        assert len(heard) == 1 and "test_accelerator.py" in heard[0]

    @pytest.mark.parametrize("order", ORDERS)
    def test_deadlock_of_locks(self, order: Any) -> None:
        with pytest.raises(DeadlockError, match="for a Signal's lock"), SimulatedAccelerator(order=order) as sim:
            lock = sim.signal()
            with lock:
                sim.start(lambda: lock.__enter__() and None, "worker").join()

    @pytest.mark.parametrize("order", ORDERS)
    def test_error_in_a_thread_reaches_main(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            signal = sim.signal()

            def work() -> None:
                raise ZeroDivisionError("in the worker")

            with pytest.raises(ZeroDivisionError, match="in the worker"), signal:
                sim.start(work, "worker")
                while True:
                    signal.wait()
            with signal:  # not left locked
                pass

    def test_error_while_leaving_is_not_lost(self) -> None:
        with pytest.raises(ZeroDivisionError), SimulatedAccelerator(order="early") as sim:
            signal = sim.signal()

            def work() -> None:
                try:
                    with signal:
                        signal.wait()
                finally:
                    raise ZeroDivisionError

            sim.start(work, "worker")

    @pytest.mark.parametrize("order", ORDERS)
    def test_threads_end_with_the_simulator(self, order: Any) -> None:
        before, ended = threading.active_count(), []
        with pytest.raises(KeyError), SimulatedAccelerator(order=order) as sim:
            signal = sim.signal()

            def work() -> None:
                try:
                    with signal:
                        while True:
                            signal.wait()
                finally:
                    ended.append(True)

            for _ in range(3):
                sim.start(work, "worker")
            sim.record()
            raise KeyError
        assert threading.active_count() == before
        assert order != "early" or len(ended) == 3  # in other orders some had not begun
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None

    def test_names_of_threads_are_made_unique(self) -> None:
        with SimulatedAccelerator() as sim:
            for _ in range(2):
                sim.start(lambda: None, "worker").join()
            assert sim.now("worker#2") == 0.0

    def test_signals_must_be_held(self, sim: SimulatedAccelerator) -> None:
        signal = sim.signal()
        with pytest.raises(RuntimeError, match="does not hold"):
            signal.wait()
        with pytest.raises(RuntimeError, match="does not hold"):
            signal.notify_all()


class TestUse:
    def test_outside_with(self) -> None:
        sim = SimulatedAccelerator()
        for call in (sim.record, sim.signal, sim.finish, lambda: sim.empty_pinned(1), sim.stream):
            with pytest.raises(RuntimeError, match="inside its `with` block"):
                call()

    def test_once(self) -> None:
        with SimulatedAccelerator() as sim:
            with sim:
                sim.record()
            sim.record()
        with pytest.raises(RuntimeError, match="make a new one"), sim:
            pass

    def test_other_threads(self, sim: SimulatedAccelerator) -> None:
        errors: list[str] = []

        def call() -> None:
            try:
                sim.record()
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert errors == ["this thread was not started by the SimulatedAccelerator's start()"]

    def test_unknown_order(self) -> None:
        with pytest.raises(ValueError, match="order='soon'"):
            SimulatedAccelerator(order="soon")  # type: ignore[arg-type]


def timeline(order: Any = "time") -> SimulatedAccelerator:
    """Two units: gradient down (2 s), CPU update (8 s), parameters up (4 s); backward takes 3 s a unit."""
    with SimulatedAccelerator(SLOW, order=order) as sim:
        signal, arrived, returned = sim.signal(), [], []

        def work() -> None:
            for unit in range(2):
                with signal:
                    while len(arrived) <= unit:
                        signal.wait()
                    event, host, device = arrived[unit]
                event.synchronize()
                host.mul_(2)  # 40 bytes read, 40 written
                with signal:
                    returned.append(sim.copy(device, host, "up", name=f"{unit}: up"))
                    signal.notify_all()

        thread = sim.start(work, "worker")
        for unit in range(2):
            host, device = pinned(sim), on_device(sim)
            sim.compute(3.0, f"{unit}: backward")
            device.fill_(1.0)
            event = sim.copy(host, device, "down", [sim.record()], f"{unit}: down")
            with signal:
                arrived.append((event, host, device))
                signal.notify_all()
        for unit in range(2):
            with signal:
                while len(returned) <= unit:
                    signal.wait()
            sim.wait(returned[unit])
            sim.compute(1.0, f"{unit}: forward")
        thread.join()
        sim.finish()
    return sim


class TestTime:
    def test_pipeline(self) -> None:
        spans = {(span.agent, span.name): (span.start, span.end) for span in timeline().trace}
        assert spans.pop(("compute", "0: backward")) == (0, 3)
        assert spans.pop(("compute", "1: backward")) == (3, 6)
        assert spans.pop(("down", "0: down")) == (3, 5)
        assert spans.pop(("down", "1: down")) == (6, 8)
        assert [(s.start, s.end) for s in timeline().trace if s.agent == "worker"] == [(5, 13), (13, 21)]
        assert spans.pop(("worker", "mul_")) == (13, 21)
        assert spans.pop(("up", "0: up")) == (13, 17)
        assert spans.pop(("up", "1: up")) == (21, 25)
        assert spans.pop(("compute", "0: forward")) == (17, 18)
        assert spans.pop(("compute", "1: forward")) == (25, 26)
        assert not spans

    def test_now_and_finish(self) -> None:
        sim = timeline()
        assert {agent: sim.now(agent) for agent in ("main", "compute", "down", "up", "worker")} == {
            "main": 26,
            "compute": 26,
            "down": 8,
            "up": 25,
            "worker": 21,
        }

    def test_updates_cost_device_memory_traffic(self) -> None:
        with SimulatedAccelerator(SLOW, scale=10.0) as sim:
            param, grad = on_device(sim).zero_(), on_device(sim).zero_()
            sim.compute(1.0, "backward")
            ready = sim.record()
            with sim.updating("0: update"):
                sim.wait(ready)
                param.add_(grad)  # reads 40 + 40, writes 40
                grad.zero_()  # writes 40
                torch.empty(FLOATS)
            with sim.updating("1: update"):
                grad.add_(param[:1].expand(FLOATS))  # reads 40 + 4, writes 40
            end = sim.finish()
        update = [span for span in sim.trace if span.agent == "update"]
        assert [(span.name, span.start) for span in update] == [("0: update", 1.0), ("1: update", pytest.approx(17.0))]
        assert end == pytest.approx(1 + 16 + 8.4) and update[-1].end == end

    def test_both_directions_at_once(self) -> None:
        with SimulatedAccelerator(SLOW) as sim:
            device, host = [on_device(sim) for _ in range(2)], [pinned(sim) for _ in range(2)]
            sim.copy(device[0], host[0], "up")
            sim.copy(device[0], host[0], "up")
            sim.copy(host[1], device[1], "down")
            assert (sim.now("up"), sim.now("down"), sim.now("main")) == (8.0, 2.0, 0.0)
            assert sim.finish() == sim.now("main") == 8.0

    def test_contiguous_host_work_is_one_span(self) -> None:
        with SimulatedAccelerator(SLOW) as sim:
            host = pinned(sim)

            def work() -> None:
                host.fill_(1.0)
                host.add_(1.0)
                sim.record()
                host.add_(1.0)

            sim.start(work, "worker").join()
            host.add_(1.0)  # on main: free
            assert sim.now("main") == 20.0
        spans = [(span.name, span.start, span.end) for span in sim.trace]
        assert spans == [("cpu update", 0.0, 12.0), ("add_", 12.0, 20.0)]

    def test_a_lock_costs_what_its_holder_takes(self) -> None:
        with SimulatedAccelerator(SLOW, order="time") as sim:
            host, lock = pinned(sim), sim.signal()

            def work() -> None:
                with lock:
                    host.fill_(1.0)  # 4 s
                    sim.record()

            threads = [sim.start(work, name) for name in ("one", "two")]
            for thread in threads:
                thread.join()
            assert (sim.now("one"), sim.now("two")) == (4.0, 8.0)

    def test_without_rates_nothing_takes_time(self, sim: SimulatedAccelerator) -> None:
        host = pinned(sim).fill_(0.0)
        sim.start(increment(host), "worker").join()
        with sim.updating():
            on_device(sim).fill_(1.0)
        target = on_device(sim)
        sim.copy(target, host, "up", name="layers.0: up")
        assert sim.finish() == 0.0
        assert [span.name for span in sim.trace] == ["layers.0: up"]


class TestPictures:
    def test_chrome_trace(self, tmp_path: Path) -> None:
        sim = timeline()
        write_chrome_trace(sim.trace, tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
        assert list(rows) == ["compute", "up", "down", "worker"]
        spans = [event for event in events if event["ph"] == "X"]
        assert len(spans) == len(sim.trace)
        (down,) = [event for event in spans if event["name"] == "1: down"]
        assert (down["tid"], down["ts"], down["dur"]) == (rows["down"], 6e6, 2e6)

    @pytest.mark.parametrize("empty", [True, False])
    def test_picture(self, tmp_path: Path, empty: bool) -> None:
        pytest.importorskip("matplotlib")
        draw([] if empty else timeline().trace, tmp_path / "trace.png", "two units")
        assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")

"""What is freed while a stream may still use it is found, and what is kept long enough is not."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.engine.in_flight import InFlight
from offload.engine.runtime import DONE
from offload.simulation.accelerator import RaceError, Rates, SimulatedAccelerator

ORDERS = ["late", "early", "time", 0, 1]
FLOATS = 10
MIB = 1 << 20
FREED = "memory was freed while `{}` still uses it: keep it until"


def used_by_update(sim: SimulatedAccelerator, use: Callable[[Tensor], object] = lambda t: t.mul_(2)) -> Tensor:
    """A tensor of the compute stream that work queued on the update stream still uses."""
    made = torch.ones(FLOATS)
    ready = sim.record()
    with sim.updating("layers.0: update"):
        sim.wait(ready)
        use(made)
    return made


@pytest.mark.parametrize("order", ORDERS)
class TestFreedTooEarly:
    @pytest.mark.parametrize("use", [lambda t: t.mul_(2), lambda t: t.sum()], ids=["written", "read"])
    def test_while_another_stream_uses_it(self, order: Any, use: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            made = used_by_update(sim, use)
            del made
            with pytest.raises(RaceError, match=FREED.format("update") + r".*\n  (mul_|sum) in 'layers.0: update'"):
                sim.record()
            sim.record()  # said once

    def test_the_next_operation_says_so(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            made = used_by_update(sim)
            del made
            with pytest.raises(RaceError, match=FREED.format("update")):
                torch.ones(1)

    def test_leaving_says_so(self, order: Any) -> None:
        with pytest.raises(RaceError, match=FREED.format("update")), SimulatedAccelerator(order=order) as sim:
            made = used_by_update(sim)
            del made

    def test_the_last_view_counts(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            made = used_by_update(sim)
            view = made[3:].view(7, 1)
            del made
            sim.record()
            del view
            with pytest.raises(RaceError, match=FREED.format("update")):
                sim.record()

    def test_what_autograd_saved_counts(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            weight = nn.Parameter(torch.ones(FLOATS))
            saved = torch.ones(FLOATS)
            product = (weight * saved).sum()
            ready = sim.record()
            with sim.updating():
                sim.wait(ready)
                saved.sum()
            del saved
            sim.record()
            with pytest.raises(RaceError, match=FREED.format("update")):
                product.backward()

    def test_memory_of_the_update_stream_that_compute_reads(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            with sim.updating():
                made = torch.ones(FLOATS)
                event = sim.record()
            sim.wait(event)
            made.sum()
            del made
            with pytest.raises(RaceError, match=FREED.format("compute")):
                sim.record()

    def test_in_a_started_thread(self, order: Any) -> None:
        with pytest.raises(RaceError, match=FREED.format("update")), SimulatedAccelerator(order=order) as sim:
            held = [torch.ones(FLOATS)]
            ready = sim.record()

            def free() -> None:
                with sim.updating():
                    sim.wait(ready)
                    held[0].mul_(2)
                held.clear()

            sim.start(free, "worker").join()

    def test_when_the_thread_lets_go_of_what_it_ran(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            held = used_by_update(sim)
            thread = sim.start(functools.partial(print, held, end=""), "worker")
            del held
            with pytest.raises(RaceError, match=FREED.format("update")):
                thread.join()
                sim.record()


@pytest.mark.parametrize("order", ORDERS)
class TestFreedInTime:
    def test_its_own_stream_may_have_it_again(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            for _ in range(3):
                torch.ones(FLOATS).mul_(2)
                with sim.updating():
                    torch.ones(FLOATS).mul_(2)
            sim.record()

    def test_once_its_own_stream_waits(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            made = used_by_update(sim)
            with sim.updating():
                event = sim.record()
            sim.wait(event)
            del made
            sim.record()

    def test_once_the_thread_knows(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            made = used_by_update(sim)
            with sim.updating():
                event = sim.record()
            event.synchronize()
            del made
            sim.record()

    def test_kept_until_an_event(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            made = used_by_update(sim)
            with sim.updating():
                event = sim.record()
            held = InFlight(sim, 0)
            held.release([made], event)
            del made
            for _ in range(20):
                held.collect()
                sim.record()
            event.synchronize()
            held.collect()
            assert not held._leaving

    def test_an_access_that_was_refused_is_told_of_once(self, order: Any) -> None:
        with SimulatedAccelerator(order=order) as sim:
            made = torch.ones(FLOATS)
            with sim.updating(), pytest.raises(RaceError, match="nothing orders"):
                made.mul_(2)
            with pytest.raises(RaceError, match="nothing orders"):
                sim.copy(sim.empty_pinned(40).view(torch.float32), made, "down")
            del made
            sim.record()


@pytest.mark.parametrize("keeps", [True, False])
def test_kept_by_one_thread_and_freed_by_another(keeps: bool) -> None:
    """What was let go of because its event is done may be freed by a thread that does not know of the event."""
    with SimulatedAccelerator(order="early") as sim:
        held: list[Tensor] = []
        in_flight = InFlight(sim, 0)

        def work() -> None:
            held.append(torch.ones(FLOATS))
            with sim.updating():
                held.append(torch.ones(FLOATS))
                event = sim.record()
            with sim.updating(on_default=True):
                sim.wait(event)
                held[1].mul_(2)
                event = sim.record()
            if keeps:
                in_flight.release([held[1]], event)
            sim.record()

        sim.start(work, "worker")  # goes first
        assert len(held) == 2 and not in_flight._leaving  # in this order every event is done at once
        held.clear()
        if keeps:
            sim.record()
        else:
            with pytest.raises(RaceError, match=FREED.format("compute")):
                sim.record()


@pytest.mark.parametrize("until", ["before", "DONE"])
def test_an_event_before_the_use_does_not_cover_it(until: str) -> None:
    with SimulatedAccelerator(order="early") as sim:
        made = torch.ones(FLOATS)
        ready = sim.record()
        with sim.updating():
            sim.wait(ready)
            before = sim.record()
            made.mul_(2)
        held = InFlight(sim, 0)
        held.release([made], before if until == "before" else DONE)
        del made
        with pytest.raises(RaceError, match=FREED.format("update")):
            held.collect()
            sim.record()


@pytest.mark.parametrize("kept", [None, 0, 1, "both"])
@pytest.mark.parametrize("direction", ["down", "up"])
def test_a_copy_holds_neither_of_its_ends(direction: Any, kept: Any) -> None:
    """Memory of the device and page-locked memory."""
    with SimulatedAccelerator() as sim:
        ends = [sim.empty_pinned(4 * FLOATS).view(torch.float32), torch.ones(FLOATS)]
        if direction == "up":
            ends.reverse()
        event = sim.copy(*ends, direction, [sim.record()], "states")
        held = ends if kept == "both" else [] if kept is None else [ends[kept]]
        del ends
        if kept == "both":
            sim.record()
            event.synchronize()
            held.clear()
            sim.record()
        else:
            with pytest.raises(RaceError, match="memory was freed while copy 'states'.*still uses it"):
                sim.record()


def test_drain_waits_for_the_streams_of_its_own() -> None:
    with SimulatedAccelerator(Rates(up=10)) as sim:
        target, host = sim.empty_device(40), sim.empty_pinned(40)
        sim.copy(target, host, "up", [sim.record()])
        sim.compute(100.0, "forward")
        sim.drain()
        assert sim.now("main") == 4.0
    sim.drain()  # nothing to do after the block


def test_a_new_tensor_where_one_was_freed_has_no_history() -> None:
    with SimulatedAccelerator() as sim:
        addresses = set()
        for _ in range(20):
            with sim.updating():
                made = torch.zeros(1 << 16)
            addresses.add(made.data_ptr())
            del made
            made = torch.zeros(1 << 16).add_(1)
            addresses.add(made.data_ptr())
            del made
        assert len(addresses) < 40, "no address was used again, so nothing was shown"


def test_cycles_are_found_by_the_garbage_collector() -> None:
    with SimulatedAccelerator() as sim:
        made = used_by_update(sim)
        cycle: list[Any] = [made]
        cycle.append(cycle)
        gc.disable()
        try:
            del made, cycle
            sim.record()
        finally:
            gc.enable()
        gc.collect()
        with pytest.raises(RaceError, match=FREED.format("update")):
            sim.record()


class TestCounting:
    def test_purposes_and_scale(self) -> None:
        with SimulatedAccelerator(scale=1024.0) as sim:
            with sim.purpose("parameters"):
                weight = nn.Parameter(torch.ones(1024))  # 4 KiB, for 4 MiB
            with sim.purpose("activations"):
                torch.ones(2048)
                with sim.purpose("inner"):
                    torch.empty(1024)
            made = [sim.empty_device(1024), torch.full((1024,), 1.0), sim.empty_pinned(1 << 20)]
            use = sim.memory.use()
            assert use.purposes == {"parameters": 4 * MIB, "activations": 8 * MIB}
            assert sim.memory.allocated == 9 * MIB
            assert sim.memory._purposes["empty_device"] == MIB and sim.memory._purposes["full"] == 4 * MIB
            del made
            assert sim.memory.allocated == weight.nbytes * 1024

    def test_a_number_stays_as_small_as_it_is(self) -> None:
        with SimulatedAccelerator(scale=1024.0) as sim:
            step = torch.zeros(())
            assert sim.memory.allocated == 512
            step.add_(1)

    def test_what_was_there_before_counts_from_its_first_use(self) -> None:
        before = torch.ones(1 << 20)
        with SimulatedAccelerator() as sim:
            assert sim.memory.allocated == 0
            before.add_(1)
            assert sim.memory.use().purposes == {"made before": 4 * MIB}

    def test_views_and_host_memory_take_none(self) -> None:
        with SimulatedAccelerator() as sim:
            host = sim.empty_pinned(4096)
            (host.view(torch.float32) * 2).view(2, -1)
            torch.tensor(1.0)
            assert sim.memory.use().allocated == 0
            made = torch.ones(FLOATS)
            made.view(2, 5).t()
            made.add_(1)
            assert sim.memory.use().allocated == 512

    def test_memory_of_each_stream_is_its_own(self) -> None:
        with SimulatedAccelerator() as sim:
            torch.ones(3 << 20)
            with sim.updating():
                torch.ones(3 << 20)
            assert (sim.memory.use().allocated, sim.memory.use().reserved) == (12 * MIB, 24 * MIB)

    def test_backward_frees_what_forward_saved(self) -> None:
        with SimulatedAccelerator() as sim:
            weight = nn.Parameter(torch.ones(1 << 20))
            x = weight
            for _ in range(4):
                x = x.exp()  # saves its result
            loss = x.sum()
            del x
            assert sim.memory.allocated == 20 * MIB + 512
            loss.backward()
            assert sim.memory.allocated == 8 * MIB + 512  # weight, gradient and loss

    def test_out_of_memory(self) -> None:
        with SimulatedAccelerator(memory=40 * MIB) as sim:
            made = torch.ones(5 << 20)
            with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 24.00 MiB.*\(20.00 MiB ones\)"):
                torch.ones(6 << 20)
            del made
            torch.ones(6 << 20)
            assert sim.memory.retries == 2 and sim.memory.use().reserved == 24 * MIB

    def test_what_is_kept_is_in_use(self) -> None:
        """Freed by the thread at once, and by the device when the event is done and somebody looks."""
        with SimulatedAccelerator(Rates(device=4 * MIB), order="time", memory=14 * MIB) as sim:
            made = torch.ones(3 << 20)
            ready = sim.record()
            with sim.updating():
                sim.wait(ready)
                made.sum()
                event = sim.record()
            held = InFlight(sim, 0)
            held.release([made], event)
            del made
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(3 << 20)
            event.synchronize()
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(3 << 20)  # nobody has looked
            held.collect()
            torch.ones(3 << 20)

    def test_giving_segments_back_waits_for_the_device(self) -> None:
        with SimulatedAccelerator(memory=40 * MIB) as sim:
            torch.ones(5 << 20)
            sim.compute(3.0, "forward")
            torch.ones(5 << 20)
            assert sim.now("main") == 0.0
            torch.ones(6 << 20)
            assert sim.now("main") == 3.0

    def test_a_storage_that_left_its_address_gives_its_memory_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with SimulatedAccelerator() as sim:
            made = torch.ones(1 << 20)
            with monkeypatch.context() as patch:
                patch.setattr("offload.simulation.ledger.Memory.is_of", lambda *_: False)  # as if it had been resized
                sim._ledger.memory(made)
            assert sim.memory.allocated == 4 * MIB
            made.untyped_storage().resize_(0)
            del made
            assert sim.memory.allocated == 0

    def test_memory_that_is_freed_inside_the_simulator_is_told_of_afterwards(self) -> None:
        """The garbage collector may run there."""
        with SimulatedAccelerator() as sim:
            made = [torch.ones(1 << 20)]
            with sim._ledger.working():
                made.clear()
                assert sim.memory.allocated == 4 * MIB
            assert sim.memory.allocated == 0


class Foreign(torch.optim.SGD):
    """An optimizer whose kernels are launched on the default stream whatever the current one is."""

    simulator: SimulatedAccelerator

    def step(self, closure: Any = None) -> Any:
        with self.simulator.launching_on("compute"):
            return super().step(closure)


@pytest.mark.parametrize("on_default", [True, False])
def test_foreign_kernels(on_default: bool) -> None:
    with SimulatedAccelerator() as sim:
        param = nn.Parameter(torch.ones(FLOATS))
        optimizer = Foreign([param], lr=0.5, momentum=0.9, foreach=False)
        optimizer.simulator = sim
        slow = torch.ones(FLOATS)
        host = sim.empty_pinned(40).view(torch.float32).fill_(3.0)
        uploaded = sim.copy(slow, host, "up", [sim.record()])
        with sim.updating("layers.0: update", on_default=on_default):
            sim.wait(uploaded)  # the current stream waits; the kernels are launched elsewhere
            param.grad = slow
            if on_default:
                optimizer.step()
            else:
                with pytest.raises(RaceError, match="on up writes.*\n.*in 'layers.0: update' on compute reads"):
                    optimizer.step()
        if on_default:
            assert torch.equal(param.detach(), torch.full((FLOATS,), -0.5))
        sim.finish()


def test_foreign_kernels_write_what_was_allocated_for_the_current_stream() -> None:
    with SimulatedAccelerator() as sim:
        made = torch.ones(FLOATS)
        ready = sim.record()
        with sim.updating():
            sim.wait(ready)
            with (
                sim.launching_on("compute"),
                pytest.raises(RaceError, match="the allocation for mul in 'update' on update.*\n.*mul .*on compute"),
            ):
                made * 2
        with pytest.raises(KeyError), sim.launching_on("nowhere"):
            pass


def test_updates_on_the_default_stream_take_their_time_there() -> None:
    with SimulatedAccelerator(Rates(device=40)) as sim:
        made = torch.zeros(FLOATS)
        with sim.updating("0: update", on_default=True):
            made.add_(1)  # reads 40 bytes, writes 40
            assert sim.record().is_done() is False
        made.sum()  # nothing to wait for
        assert (sim.now("compute"), sim.now("update")) == (2.0, 0.0)


def _used_again(*, waits: bool) -> None:
    with SimulatedAccelerator(streams=("library",)) as sim:
        with sim.on("library"), sim.loose_memory():
            values = torch.zeros(4)
            made = sim.record()
        sim.wait(made)
        values.sum()
        used = sim.record()
        del values
        with sim.on("library"):
            if waits:
                sim.wait(used)
            torch.zeros(2).add_(1)


def test_a_librarys_memory_has_to_be_free_when_it_may_be_used_again() -> None:
    """FSDP2 waits for the computing stream before it allocates on its own, and not before it frees."""
    _used_again(waits=True)
    with pytest.raises(RaceError, match="was freed, and may be in use again, while `compute` still uses it"):
        _used_again(waits=False)

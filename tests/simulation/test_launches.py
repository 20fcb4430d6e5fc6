"""What launches and page-locking cost the CPU; times are those done by hand."""

from __future__ import annotations

import pytest
import torch

from offload.simulation.accelerator import Pin, Rates, SimulatedAccelerator


def busy(sim: SimulatedAccelerator, agent: str = "compute") -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in sim.trace if span.agent == agent]


class TestLaunches:
    def test_the_cpu_runs_ahead_of_slow_kernels(self) -> None:
        with SimulatedAccelerator(Rates(launch=1.0)) as sim:
            sim.compute(40.0, "forward", launches=4)
            assert sim.now("main") == 4.0
            assert busy(sim) == [(1.0, 41.0)]

    def test_the_device_waits_for_slow_launches(self) -> None:
        with SimulatedAccelerator(Rates(launch=10.0)) as sim:
            sim.compute(4.0, "forward", launches=4)
            assert sim.now("main") == 40.0
            assert busy(sim) == [(10.0, 11.0), (20.0, 21.0), (30.0, 31.0), (40.0, 41.0)]

    def test_the_queue_holds_so_many_that_have_not_begun(self) -> None:
        with SimulatedAccelerator(Rates(launch=1.0), launch_queue=3) as sim:
            sim.compute(100.0, "forward", launches=1)  # begins at 1
            sim.compute(30.0, "forward", launches=3)  # begin at 101, 111, 121
            assert sim.now("main") == 4.0
            sim.compute(10.0, "forward", launches=1)
            assert sim.now("main") == 101.0
            sim.compute(10.0, "forward", launches=1)
            assert sim.now("main") == 111.0
            assert busy(sim)[-1][1] == 151.0

    def test_a_thousand_by_default(self) -> None:
        with SimulatedAccelerator(Rates(launch=1e-6)) as sim:
            sim.compute(1000.0, "forward", launches=1000)
            assert sim.now("main") == pytest.approx(1e-3)
            sim.compute(100.0, "forward", launches=100)
            assert sim.now("main") == pytest.approx(75.0)  # 1,100 less 1,024, less the first that runs

    def test_each_operation_is_one_launch(self) -> None:
        with SimulatedAccelerator(Rates(launch=1.0)) as sim:
            made = torch.ones(10)
            assert sim.now("main") == 1.0
            made.view(2, 5).t()
            torch.empty(10)
            assert sim.now("main") == 1.0
            made.mul_(2)
            torch._foreach_add_([made, made * 2], 1.0)
            assert sim.now("main") == 4.0
            host = sim.empty_pinned(40).view(torch.float32)
            host.fill_(1.0)
            assert sim.now("main") == 4.0
            sim.copy(made, host, "up", [sim.record()])
            assert sim.now("main") == 5.0
            with sim.updating():
                torch.ones(10)
            assert sim.now("main") == 6.0

    def test_the_thread_that_launches_pays(self) -> None:
        with SimulatedAccelerator(Rates(launch=1.0)) as sim:

            def work() -> None:
                with sim.updating():
                    for _ in range(3):
                        torch.ones(10)

            thread = sim.start(work, "worker")
            sim.record().synchronize()
            assert sim.now("main") == 0.0
            thread.join()
            assert (sim.now("worker"), sim.now("main")) == (3.0, 3.0)

    def test_without_a_rate_nothing_waits(self) -> None:
        with SimulatedAccelerator(launch_queue=1) as sim:
            sim.compute(10.0, "forward", launches=5)
            torch.ones(10)
            assert (sim.now("main"), busy(sim)) == (0.0, [(0.0, 10.0)])


class TestPins:
    def test_page_locking_takes_the_thread_that_asks(self) -> None:
        with SimulatedAccelerator(Rates(pin=100.0), scale=10.0) as sim:
            sim.empty_pinned(50)

            def work() -> None:
                sim.empty_pinned(20)

            thread = sim.start(work, "worker")
            assert sim.now("main") == 5.0
            thread.join()
            assert sim.pins == [Pin("main", 500, 5.0), Pin("worker", 200, 7.0)]
            assert [(span.agent, span.name) for span in sim.trace] == [("main", "page-lock"), ("worker", "page-lock")]

    def test_without_a_rate_pins_are_recorded_all_the_same(self) -> None:
        with SimulatedAccelerator() as sim:
            sim.empty_pinned(50)
            sim.empty_device(50)
            assert sim.pins == [Pin("main", 50, 0.0)] and not sim.trace

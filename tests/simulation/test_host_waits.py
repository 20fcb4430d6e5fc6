"""The simulated accelerator tells which calls made a thread wait for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offload.simulation.accelerator import Rates, SimulatedAccelerator

ORDERS = ("late", "time", 1)
RATES = Rates(up=1.0, down=1.0, device=1.0, host=1.0)


def host_copy(simulator: SimulatedAccelerator, device: Tensor) -> Tensor:
    return simulator.empty_pinned(device.nbytes).view(device.dtype)


def read_item(simulator: SimulatedAccelerator, device: Tensor) -> None:
    device[0].item()


def read_mask(simulator: SimulatedAccelerator, device: Tensor) -> None:
    device[device > 0]


def read_truth(simulator: SimulatedAccelerator, device: Tensor) -> None:
    bool(device[0] > 0)


def read_by_copy(simulator: SimulatedAccelerator, device: Tensor) -> None:
    host_copy(simulator, device).copy_(device)


def write_by_copy(simulator: SimulatedAccelerator, device: Tensor) -> None:
    device.copy_(host_copy(simulator, device).zero_())


def synchronize_a_copy(simulator: SimulatedAccelerator, device: Tensor) -> None:
    host = host_copy(simulator, device)
    simulator.copy(host, device, "down", (simulator.record(),)).synchronize()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "act", [read_item, read_mask, read_truth, read_by_copy, write_by_copy, synchronize_a_copy], ids=lambda f: f.__name__
)
def test_each_wait_is_told_with_its_thread_and_place(
    act: Callable[[SimulatedAccelerator, Tensor], None], order: str | int
) -> None:
    with SimulatedAccelerator(RATES, order=order) as simulator:  # type: ignore[arg-type]
        act(simulator, torch.ones(4))
        ((thread, place),) = simulator.host_waits
        assert thread == "main" and place.startswith("test_host_waits.py:")


@pytest.mark.parametrize("order", ORDERS)
def test_what_only_queues_is_no_wait(order: str | int) -> None:
    with SimulatedAccelerator(RATES, order=order) as simulator:  # type: ignore[arg-type]
        device = torch.ones(4)
        host = host_copy(simulator, device)
        host.copy_(device * 2, non_blocking=True)
        other = host_copy(simulator, device)
        simulator.wait(simulator.copy(other, device, "down", (simulator.record(),)))
        torch.nonzero_static(device > 0, size=4)
        device[torch.arange(3)]
        assert simulator.host_waits == []


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_done_is_not_waited_for(order: str | int) -> None:
    with SimulatedAccelerator(RATES, order=order) as simulator:  # type: ignore[arg-type]
        device = torch.ones(4)
        host = host_copy(simulator, device)
        event = simulator.copy(host, device, "down", (simulator.record(),))
        event.synchronize()
        simulator.host_waits.clear()
        event.synchronize()
        assert host.tolist() == [1.0] * 4, "host memory is read without the device"
        assert simulator.host_waits == []


def test_a_started_thread_waits_under_its_own_name() -> None:
    with SimulatedAccelerator(RATES, order="time") as simulator:
        device = torch.ones(4)
        host = host_copy(simulator, device)
        event = simulator.copy(host, device, "down", (simulator.record(),))
        simulator.start(event.synchronize, "worker").join()
        assert [thread for thread, _ in simulator.host_waits] == ["worker"]

"""Values that are read late are those that were computed, whatever is queued in between."""

from __future__ import annotations

import pytest
import torch

from offload.metrics.late import LateReader
from offload.simulation.accelerator import SimulatedAccelerator

VALUES = {
    "loss": torch.tensor(2.0).exp(),
    "lr": 1e-5,
    "double": torch.tensor(1 / 3, dtype=torch.float64),
    "bf16": torch.tensor([1 / 3], dtype=torch.bfloat16),
    "count": torch.tensor(2**40 + 1),
    "grad_norm": None,
}
NUMBERS = [VALUES["loss"].item(), 1e-5, 1 / 3, VALUES["bf16"].item(), 2**40 + 1, None]


@pytest.fixture(params=["late", 1, 2])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimulatedAccelerator:
    simulator = SimulatedAccelerator(order=request.param)
    monkeypatch.setattr("offload.metrics.late.runtime_for", lambda device: simulator)
    return simulator


def test_values_of_any_kind_survive_to_the_last_bit_and_keep_their_order(device: SimulatedAccelerator) -> None:
    with device:
        reader = LateReader(torch.device("cpu"))
        fetched = reader.fetch(VALUES)
        assert device.host_waits == []
        read = fetched.read()
    assert list(read) == list(VALUES) and list(read.values()) == NUMBERS
    assert not reader.is_immediate


def test_values_that_are_read_later_are_not_written_over(device: SimulatedAccelerator) -> None:
    with device:
        reader = LateReader(torch.device("cpu"))
        pending = []
        for step in range(6):
            pending.append(reader.fetch({"loss": torch.full((), float(step)), "step": step}))
            if step % 3 == 2:  # up to three are under way
                done, pending = pending, []
                assert [late.read() for late in done] == [
                    {"loss": float(n), "step": n} for n in range(step - 2, step + 1)
                ]


def test_memory_of_values_that_were_read_is_used_again(
    device: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device:
        reader = LateReader(torch.device("cpu"))
        made: list[int] = []
        monkeypatch.setattr(reader._runtime, "empty_pinned", made.append)
        for step in range(6):
            assert reader.fetch({"loss": torch.full((), float(step))}).read() == {"loss": float(step)}
        assert made == []


def test_there_may_be_more_values_than_usual(device: SimulatedAccelerator) -> None:
    with device:
        reader = LateReader(torch.device("cpu"))
        many = {str(n): torch.full((), float(n)) for n in range(300)}
        assert reader.fetch(many).read() == {str(n): float(n) for n in range(300)}
        assert reader.fetch(VALUES).read()["loss"] == NUMBERS[0]


def test_the_host_s_own_tensors_are_read_at_once(device: SimulatedAccelerator) -> None:
    """The norm of gradients in host memory, a tensor lr: nothing has to be copied."""
    with device:
        reader = LateReader(torch.device("cuda", 0))
        before = device.copied_bytes["down"]
        host = torch.tensor(3.0)
        fetched = reader.fetch({"grad_norm": host})
        host.zero_()
        assert fetched.read() == {"grad_norm": 3.0}
        assert device.copied_bytes["down"] == before


def test_on_the_cpu_values_are_there_at_once() -> None:
    reader = LateReader(torch.device("cpu"))
    assert reader.is_immediate
    assert list(reader.fetch(VALUES).read().values()) == NUMBERS

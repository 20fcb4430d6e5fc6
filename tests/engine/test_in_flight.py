"""What the engine holds on the device is bounded, let go of when its use is over, and not before."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from offload.engine import norms
from offload.engine.engine import refuse_graphs
from offload.engine.in_flight import InFlight
from offload.engine.runtime import DONE, HostRuntime
from offload.errors import UserError
from offload.simulation.accelerator import Rates, SimulatedAccelerator


class Point:
    """An event that is done when somebody waits for it, or says so."""

    def __init__(self) -> None:
        self.done = False
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1
        self.done = True

    def is_done(self) -> bool:
        return self.done


def test_a_gradient_counts_until_its_event_is_done() -> None:
    held = InFlight(HostRuntime(), limit=100)
    gradient, event = torch.ones(20), Point()
    dead = weakref.ref(gradient)
    held.hold(gradient)
    held.submit({gradient: "0"})
    held.release([gradient], event)
    del gradient
    held.collect()
    assert dead() is not None and held.peak == 80
    event.done = True
    held.collect()
    assert dead() is None
    held.hold(torch.ones(20))
    assert held.peak == 80


def test_views_of_one_buffer_count_until_the_last_is_released() -> None:
    """FSDP2 hands out the gradients of a layer as views of what it has reduced."""
    held = InFlight(HostRuntime(), limit=1000)
    buffer = torch.ones(25)  # 100 bytes, of which five elements pad the views
    first, second, third = buffer[:10], buffer[10:20], torch.ones(5)
    for gradient in (first, second, third):
        held.hold(gradient)
    assert held.peak == 120
    held.submit(dict.fromkeys([first, second, third], "0"))
    held.limit = 100
    events = [Point(), Point(), Point()]
    for gradient, event in zip((first, third, second), events, strict=True):
        held.release([gradient], event)
    held.wait()  # the first view's end frees nothing
    assert [event.done for event in events] == [True, True, False]
    held.limit = 0
    held.wait()
    assert events[2].done
    held.hold(second)
    assert held.peak == 120


def test_waits_for_the_oldest_only_as_long_as_it_must() -> None:
    held, events = InFlight(HostRuntime(), limit=100), [Point(), Point(), Point()]
    for event in events:
        gradient = torch.ones(20)
        held.hold(gradient)
        held.submit({gradient: "0"})
        held.release([gradient], event)
    held.wait()
    assert [event.waited for event in events] == [1, 1, 0]


def test_gradients_that_nothing_was_submitted_for_do_not_block() -> None:
    held = InFlight(HostRuntime(), limit=10)
    held.hold(torch.ones(20))
    held.wait()
    held.forget()
    held.hold(torch.ones(1))
    assert held.peak == 80 and held._bytes == 4


def test_memory_set_aside_comes_out_of_the_limit() -> None:
    held = InFlight(HostRuntime(), limit=100)
    held.set_aside(60)
    assert held.limit == 40
    held.set_aside(60)
    assert held.limit == 0


def test_nobody_waits_for_what_was_given_up() -> None:
    held = InFlight(HostRuntime(), limit=10)
    gradient = torch.ones(20)
    held.hold(gradient)
    held.submit({gradient: "0"})
    held.give_up()
    held.wait()
    assert held._bytes == 0
    held.release([gradient], DONE)


# ---- in an optimizer


class Layers(nn.Module):
    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


ONE = 64 * 64 * 4
"""Bytes of one layer's gradient."""


def watch(model: nn.Module, optimizer: Any) -> list[int]:
    """Bytes held after each hook."""
    seen: list[int] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: seen.append(optimizer._machinery.in_flight._bytes))
    return seen


@pytest.mark.parametrize("order", ["time", "late", "early", 0])
@pytest.mark.parametrize(
    ("strategy", "in_backward", "offload_gradients"),
    [("stream", True, False), ("host", True, False), ("stream", False, True), ("host", True, True)],
)
def test_the_gradients_alive_in_backward_are_bounded_in_the_first_step_as_in_any(
    strategy: Any, in_backward: bool, offload_gradients: bool, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a link that takes far longer than backward, which is queued in no time."""
    with SimulatedAccelerator(Rates(up=1e6, down=1e6, device=1e9, host=1e9), order=order) as simulator:
        monkeypatch.setattr("offload.machinery.runtime_for", lambda device: simulator)
        model = Layers()
        optimizer = OffloadOptimizer(
            model.named_parameters(),
            strategy=strategy,
            update_in_backward=in_backward,
            offload_gradients=offload_gradients,
            model=model,
        )
        optimizer._machinery.in_flight.limit = 3 * ONE
        seen = watch(model, optimizer)
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(seen) == 3 * 8 and max(seen) <= 3 * ONE
        # In a hook, one more: the gradient that backward has just computed.
        assert max(seen) <= optimizer.memory_report()["device"]["gradients"] <= 4 * ONE


def test_the_ring_and_the_gradients_share_one_budget(simulated: Any) -> None:
    model = Layers()
    optimizer = OffloadOptimizer(
        model.named_parameters(), strategy="stream", update_in_backward=True, in_flight_gib=40 * ONE / 2**30
    )
    staging = optimizer.memory_report()["device"]["staging"]
    assert 0 < staging <= 0.6 * 40 * ONE and optimizer._machinery.in_flight.limit == 40 * ONE - staging
    # A smaller budget has smaller pieces.
    tight = OffloadOptimizer(Layers().named_parameters(), strategy="stream", in_flight_gib=2 * ONE / 2**30)
    padding = 3 * 2 * 64
    assert tight.memory_report()["device"]["staging"] <= 0.6 * 2 * ONE + padding
    assert max(piece.numel for piece in tight._machinery.engine.pieces) < 64 * 64


@pytest.mark.parametrize("value", [0, -1.0, True, "much"])
def test_a_budget_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"optimizer\.in_flight_gib: got .* expected GiB"):
        OffloadOptimizer(Layers().parameters(), in_flight_gib=value)


class Uploads(SimulatedAccelerator):
    """Notes how many pieces' states are on their way up at a time."""

    most = 0

    def copy(self, dst: Tensor, src: Tensor, direction: Any, after: Any = (), name: str = "") -> Any:
        event: Any = super().copy(dst, src, direction, after, name)
        if name.startswith("copy up "):
            under_way: list[tuple[str, Any]] = getattr(self, "under_way", [])
            now = self._threads.current().now
            self.under_way = [*((piece, e) for piece, e in under_way if e.end > now), (name, event)]
            self.most = max(self.most, len({piece for piece, _ in self.under_way}))
        return event


@pytest.mark.parametrize("in_backward", [False, True])
def test_which_piece_comes_up_next_is_decided_when_the_link_is_free(
    in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued all at once, pieces would come up in the order of arrival."""
    with Uploads(Rates(up=1e6, down=1e6, device=1e9, host=1e9), order="time") as simulator:
        monkeypatch.setattr("offload.machinery.runtime_for", lambda device: simulator)
        model = Layers()
        optimizer = OffloadOptimizer(
            model.named_parameters(), strategy="stream", update_in_backward=in_backward, model=model
        )
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
    assert simulator.most == 2


@pytest.mark.parametrize("strategy", ["stream", "host"])
def test_norms_of_sums_on_the_host_are_taken_behind_the_last_addition(
    strategy: Any, simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside backward, by the thread that adds, and not once more by the caller."""
    model = Layers()
    optimizer = OffloadOptimizer(
        model.named_parameters(), "torch.optim.SGD", strategy=strategy, offload_gradients=True, model=model, lr=1e-2
    )
    with optimizer.accumulate():
        model(torch.ones(2, 64)).sum().backward()
    model(torch.ones(2, 64)).sum().backward()
    computed: list[int] = []
    original = norms.tensor_norms

    def tensor_norms(gradients: Any, norm_type: float = 2.0) -> Any:
        if threading.current_thread() is threading.main_thread():
            computed.append(len(gradients))
        return original(gradients, norm_type)

    monkeypatch.setattr(norms, "tensor_norms", tensor_norms)
    norm = optimizer.grad_norm()
    assert sum(computed) == 0
    twin = Layers()
    twin.load_state_dict(model.state_dict())
    for _ in range(2):
        twin(torch.ones(2, 64)).sum().backward()
    assert torch.equal(norm, torch.nn.utils.get_total_norm([param.grad for param in twin.parameters()]))
    optimizer.step()


class Fails(torch.optim.SGD):
    per_parameter = True
    broken = True

    def step(self, closure: Any = None) -> Any:
        if Fails.broken and any(p.numel() == 64 * 64 for group in self.param_groups for p in group["params"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
        return super().step(closure)


@pytest.mark.parametrize("strategy", ["stream", "host"])
def test_a_failed_update_lets_go_of_the_optimizer(strategy: Any, threaded: Any) -> None:
    """A retry in a notebook needs the memory that the first try had."""
    model = Layers()
    optimizer = OffloadOptimizer(model.named_parameters(), Fails, strategy=strategy, update_in_backward=True, lr=0.1)

    def train(optimizer: OffloadOptimizer) -> BaseException | None:
        try:
            for _ in range(2):
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
        except torch.OutOfMemoryError as error:
            return error.with_traceback(None)
        return None

    error = train(optimizer)
    assert isinstance(error, torch.OutOfMemoryError) and "1 TiB" in str(error)
    if sys.version_info >= (3, 11):
        assert "in step" in "".join(error.__notes__)
    dead = weakref.ref(optimizer.base_optimizer)
    del optimizer
    gc.collect()
    assert dead() is None


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("strategy", ["resident", "stream", "host"])
def test_after_an_exception_in_backward_zero_grad_begins_a_new_step(
    strategy: Any, accumulation: int, threaded: Any
) -> None:
    """Out of memory, caught by the caller, who goes on with a smaller batch."""
    torch.manual_seed(0)
    model = Layers(4)
    optimizer = OffloadOptimizer(
        model.named_parameters(), strategy=strategy, update_in_backward=True, model=model, lr=1e-2
    )

    def fail(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    handle = model.layers[1].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.ones(2, 64)).sum().backward()
    handle.remove()
    optimizer.zero_grad()
    for _ in range(2):
        before = [param.detach().clone() for param in model.parameters()]
        for micro in range(accumulation):
            if micro < accumulation - 1:
                with optimizer.accumulate():
                    model(torch.ones(1, 64)).sum().backward()
            else:
                model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        assert not any(map(torch.equal, before, model.parameters()))


def test_gradients_out_of_a_cuda_graph_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda", 0))
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    trees = SimpleNamespace(get_manager=lambda index, create_if_none_exists: None)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    refuse_graphs(on_gpu)
    capturing[0] = True
    with pytest.raises(RuntimeError, match="CUDA graph.*max-autotune-no-cudagraphs"):
        refuse_graphs(on_gpu)
    capturing[0] = False
    trees.get_manager = lambda index, create_if_none_exists: object()
    with pytest.raises(RuntimeError, match="CUDA graph"):
        refuse_graphs(on_gpu)
    refuse_graphs(torch.zeros(1))


def test_a_thread_that_torch_made_no_graphs_for_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 answers there."""

    def get_manager(index: int, create_if_none_exists: bool) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(get_manager=get_manager))
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda", 0))
    refuse_graphs(on_gpu)


def test_a_learning_rate_in_device_memory_is_ordered_before_the_update_on_the_host(simulated: Any) -> None:
    model = Layers(3)
    lr = torch.full((), 1e-2)
    optimizer = OffloadOptimizer(
        model.named_parameters(), "torch.optim.SGD", strategy="host", offload_gradients=True, model=model, lr=lr
    )
    twin = Layers(3)
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(twin.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.param_groups[0]["lr"].fill_(1e-2 / (1 + step))
        plain.param_groups[0]["lr"] = torch.full((), 1e-2 / (1 + step))
        for each, stepper in ((model, optimizer), (twin, plain)):
            each(torch.ones(2, 64)).sum().backward()
            stepper.step()
            stepper.zero_grad()
    optimizer.synchronize()
    for actual, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(actual, expected)

"""The engine against plain optimizers: the same tests on a real accelerator and on the CPU that plays one.

On the accelerator (``pytest -m gpu``) streams can be made late, and under ``TORCH_CUDA_SANITIZER=1`` every kernel of
every thread is checked for races; ``scripts/gpu_suite.py --part a`` does that.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from offload.engine import units
from offload.engine.runtime import AcceleratorRuntime, _StreamEvent
from offload.engine.states import components
from tests.engine.accelerated import (
    ADAMW,
    ALL,
    IS_SANITIZED,
    MANY,
    OFFLOADED,
    SOME,
    Place,
    Plain,
    assert_close,
    assert_same,
    check_parity,
    choices,
    ids,
    make_model,
    name_of,
    sanitize_threads,
    train,
)


@pytest.mark.skipif(
    torch.cuda.is_available() and not IS_SANITIZED, reason="would turn tracing on for all tests of this process"
)
def test_the_sanitizer_sees_the_threads_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU only that its mode is on there: it looks at tensors on CUDA alone."""
    sanitize_threads(monkeypatch)
    modes = []

    def work() -> None:
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        modes.append(type(mode).__name__)

    AcceleratorRuntime.start(object.__new__(AcceleratorRuntime), work, "thread").join()
    assert modes == ["CUDASanitizerDispatchMode"]


def test_the_sanitizer_is_told_what_the_host_has_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would call a race what is read after ``synchronize()``. Played: its own bookkeeping, an event that is
    done."""
    from torch.cuda._sanitizer import EventHandler

    sanitize_threads(monkeypatch)

    def races(*, waits: bool) -> int:
        sanitizer, weight, event, update, compute = EventHandler(), 4096, 1, 7, 0

        class Done:
            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                sanitizer._handle_event_synchronization(event)

        updated = object.__new__(_StreamEvent)
        updated.event = Done()  # type: ignore[assignment]
        names = {weight: ["weight"]}
        assert not sanitizer._handle_kernel_launch(update, set(), {weight}, {weight}, "update", names)
        sanitizer._handle_event_record(event, update)
        if waits:
            updated.synchronize()
        return len(sanitizer._handle_kernel_launch(compute, {weight}, set(), set(), "equal", names))

    assert races(waits=False) == 1 and races(waits=True) == 0


# Parity


@MANY
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("attached", [False, True], ids=["", "model"])
@ALL
def test_equals_the_plain_optimizer_bit_for_bit(
    place: Place, options: dict[str, Any], attached: bool, accumulation: int
) -> None:
    """fp32 where step() waits, bf16 where the model's forward does."""
    dtype = torch.bfloat16 if attached else torch.float32
    check_parity(place, options, attached=attached, accumulation=accumulation, dtype=dtype)


@MANY
@OFFLOADED
def test_large_tensors_are_updated_in_ranges(
    place: Place, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "CHUNK_ELEMENTS", 1000)
    check_parity(place, options, attached=True)


@SOME
def test_activation_checkpointing(place: Place, options: dict[str, Any]) -> None:
    check_parity(place, options, attached=True, prepare=lambda model: setattr(model, "is_checkpointed", True))


@SOME
def test_layers_compiled_in_place(place: Place, options: dict[str, Any]) -> None:
    """The reference is compiled too: both run the same kernels."""
    if place.name == "simulated":
        pytest.skip("the simulator watches operations by a dispatch mode, under which nothing is compiled")
    model, twin = (make_model(place) for _ in range(2))
    for each in (model, twin):
        for layer in each.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    train(twin, Plain(twin, torch.optim.AdamW, options["strategy"] == "host", **ADAMW), place)
    params = [p for p in model.parameters() if p.requires_grad]
    train(model, OffloadOptimizer(params, model=model, **ADAMW, **options), place)
    assert_same(model, twin)


@pytest.mark.parametrize("attached", [False, True], ids=["", "model"])
@SOME
def test_a_caller_on_a_stream_of_its_own(place: Place, options: dict[str, Any], attached: bool) -> None:
    with place.stream():
        check_parity(place, options, attached=attached)


@MANY
@pytest.mark.parametrize("options", [o for o in choices("stream", "host") if not o["update_in_backward"]], ids=name_of)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_clipping(place: Place, options: dict[str, Any], accumulation: int) -> None:
    """The sum of squares is taken in another order than torch's, so norms agree within its rounding."""
    model, twin = (make_model(place) for _ in range(2))
    sgd: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "fused": True}
    expected = train(twin, Plain(twin, torch.optim.SGD, False, **sgd), place, accumulation=accumulation, clip=0.1)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = OffloadOptimizer(params, torch.optim.SGD, model=model, **sgd, **options)
    norms = train(model, optimizer, place, accumulation=accumulation, clip=0.1)
    for actual, wanted in zip(norms, expected, strict=True):
        assert wanted > 0.2  # so the limit binds
        torch.testing.assert_close(actual.cpu(), wanted.cpu(), rtol=1e-5, atol=0)
    assert_close(model, twin)


@MANY
@pytest.mark.parametrize("path", ["torchao.optim.AdamW8bit", "torchao.optim.AdamW4bit", "bitsandbytes.optim.AdamW8bit"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["at step", "in backward"])
def test_quantized_states_are_streamed(place: Place, path: str, in_backward: bool) -> None:
    package, _, attribute = path.rpartition(".")
    base = getattr(pytest.importorskip(package, reason=f"{package} is not installed"), attribute)
    model, twin = (make_model(place, dim=64) for _ in range(2))
    kwargs = {"lr": 1e-2, "weight_decay": 0.1}
    with torch.compiler.set_stance("force_eager"):  # no compiler is needed, and both run the same kernels
        train(twin, Plain(twin, base, False, **kwargs), place)
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = OffloadOptimizer(
            params, path, strategy="stream", update_in_backward=in_backward, model=model, **kwargs
        )
        train(model, optimizer, place)
    assert_same(model, twin)
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    small = [part for value in states for part in components(value) if part.dtype == torch.uint8]
    assert small and all(part.device.type == "cpu" for part in small)


class Wide(nn.Module):
    """Much state and little work, or the reverse: ``repeats`` products with the same weight."""

    def __init__(self, dim: int, layers: int, repeats: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers))
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for _ in range(self.repeats):
                x = torch.tanh(layer(x))
        return x.square().mean()


@MANY
@pytest.mark.parametrize("load", ["long copies", "long compute"])
@OFFLOADED
def test_long_copies_and_long_compute(place: Place, options: dict[str, Any], load: str) -> None:
    if load == "long copies":
        dim, rows, repeats = (2048 if place.is_real else 128), 1, 1
    else:
        dim, rows, repeats = (256 if place.is_real else 16), (4096 if place.is_real else 64), 8
    torch.manual_seed(0)
    models = [Wide(dim, 4, repeats).to(place.device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    inputs = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0)).to(place.device)
    reference = Plain(models[1], torch.optim.AdamW, options["strategy"] == "host", **ADAMW)
    optimizer = OffloadOptimizer(models[0].parameters(), model=models[0], **ADAMW, **options)
    for model, each in zip(models, (optimizer, reference), strict=True):
        for _ in range(6):
            model(inputs).backward()
            each.step()
            each.zero_grad()
        each.synchronize()
    assert_same(*models)


@OFFLOADED
def test_no_update_is_lost_with_the_optimizer(place: Place, options: dict[str, Any]) -> None:
    model, twin = (make_model(place) for _ in range(2))
    train(twin, Plain(twin, torch.optim.AdamW, options["strategy"] == "host", **ADAMW), place, steps=range(1))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = OffloadOptimizer(params, model=model, **ADAMW, **options)
    model(ids(0, place)).backward()
    optimizer.step()
    del optimizer
    gc.collect()
    assert_same(model, twin)


# Memory


def total_bytes(params: Any) -> int:
    return sum(p.nbytes for p in params)


def stack(place: Place) -> nn.Sequential:
    """Layers of one size (64 KiB on a real device), each small beside all of them."""
    torch.manual_seed(0)
    layers, dim = (24, 128) if place.is_real else (8, 32)
    return nn.Sequential(*[nn.Linear(dim, dim, bias=False) for _ in range(layers)]).to(place.device)


def train_stack(model: nn.Sequential, optimizer: torch.optim.Optimizer, place: Place, steps: int) -> None:
    inputs = torch.ones(4, model[0].weight.shape[1], device=place.device)
    for _ in range(steps):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("attached", [False, True], ids=["", "model"])
@OFFLOADED
def test_nothing_is_allocated_in_steady_state(place: Place, options: dict[str, Any], attached: bool) -> None:
    model = stack(place)
    own = {**options, **({"model": model} if attached else {})}
    optimizer = OffloadOptimizer(model.named_parameters(), lr=1e-3, **own)
    train_stack(model, optimizer, place, 4)

    def held() -> Any:
        report = optimizer.memory_report()
        report.get("device", {}).pop("gradients", None)  # the most that there were, which depends on the threads
        place.finish()
        return report, torch.accelerator.memory_allocated() if place.is_real else 0

    before = held()
    reserved = torch.accelerator.memory_reserved() if place.is_real else 0
    train_stack(model, optimizer, place, 40 if place.is_real else 6)
    assert held() == before
    if place.is_real:
        # How many gradients wait for the worker differs from step to step, but never more than all.
        assert torch.accelerator.memory_reserved() <= reserved + total_bytes(model.parameters()) + 4 * 2**20


@pytest.mark.parametrize("in_backward", [False, True], ids=["at step", "in backward"])
def test_streaming_takes_the_states_off_the_device(place: Place, in_backward: bool) -> None:
    """Peak device memory falls by all states but the staging ring: three slots of a layer's states."""

    def peak(strategy: Any) -> int:
        model = stack(place)
        optimizer = OffloadOptimizer(
            model.named_parameters(), strategy=strategy, update_in_backward=in_backward, lr=1e-3, fused=True
        )
        train_stack(model, optimizer, place, 2)
        if not place.is_real:
            return sum(nbytes for what, nbytes in optimizer.memory_report()["device"].items() if what != "gradients")
        place.finish()
        before = torch.accelerator.memory_allocated() - total_bytes(model.parameters())
        before -= sum(nbytes for what, nbytes in optimizer.memory_report()["device"].items() if what != "gradients")
        torch.accelerator.reset_peak_memory_stats()
        train_stack(model, optimizer, place, 4)
        place.finish()
        return torch.accelerator.max_memory_allocated() - before

    layers = len(stack(place))
    weights = total_bytes(stack(place).parameters())
    layer = weights // layers
    saved = peak("resident") - peak("stream")
    # On a real device: in backward, gradients that wait for the worker, and a few temporaries.
    spare = (weights if in_backward else 0) + 4 * layer if place.is_real else 0
    staging = 3 * 2 * layer
    assert 2 * weights - staging - spare <= saved <= 2 * weights + (4 * layer if place.is_real else 0)


def test_memory_is_counted_by_kind_and_purpose(place: Place) -> None:
    model = stack(place)
    weights = total_bytes(model.parameters())

    def report(**options: Any) -> dict[str, dict[str, int]]:
        optimizer = OffloadOptimizer(model.named_parameters(), lr=1e-3, **options)
        train_stack(model, optimizer, place, 2)
        resting = [v for s in optimizer.state.values() for v in s.values() if v.dim() and v.device.type == "cpu"]
        if place.is_real and options["strategy"] == "stream":
            assert resting and all(value.is_pinned() for value in resting)
        return optimizer.memory_report()

    stream = report(strategy="stream")
    assert set(stream["pinned_host"]) == {"optimizer_state"}
    assert sum(stream.get("host", {}).values()) <= 4 * len(model)  # step counters, where the CPU is the device
    assert 2 * weights <= stream["pinned_host"]["optimizer_state"] <= 4 * weights  # a power of two
    assert 0 < stream["device"]["staging"] <= 4 * 2 * weights // len(model)

    host = report(strategy="host", offload_gradients=True)
    assert set(host["pinned_host"]) == {"parameters", "gradients"}
    assert all(weights <= nbytes <= 2 * weights for nbytes in host["pinned_host"].values())
    assert 2 * weights <= host["host"]["optimizer_state"] <= 2 * weights + 8 * len(model)
    assert "staging" in report(strategy="host")["pinned_host"]


# Checkpoints


def skip_where_host_is_device(place: Place) -> None:
    if place.name == "simulated":
        pytest.skip("torch's load_state_dict moves states to the CPU, where the simulator's host memory is already")


@MANY
@pytest.mark.parametrize("after", choices("resident", "stream", "host")[::2], ids=name_of)
@pytest.mark.parametrize("before", choices("resident", "stream", "host")[::2], ids=name_of)
def test_a_checkpoint_moves_between_strategies(place: Place, before: dict[str, Any], after: dict[str, Any]) -> None:
    """The loaded states are those saved. Kernels of CPU and device round differently, so the rest is close."""
    if before["strategy"] != "resident" and after["strategy"] == "resident":
        skip_where_host_is_device(place)
    model, twin = (make_model(place) for _ in range(2))
    train(twin, Plain(twin, torch.optim.AdamW, False, **ADAMW), place, steps=range(6))

    params = [p for p in model.parameters() if p.requires_grad]
    first = OffloadOptimizer(params, model=model, **ADAMW, **before)
    train(model, first, place, steps=range(3))
    saved = first.state_dict()
    second = OffloadOptimizer(params, model=model, **ADAMW, **after)
    second.load_state_dict(saved)
    loaded = second.state_dict()
    assert loaded["state"].keys() == saved["state"].keys()
    for index, state in saved["state"].items():
        for key, value in state.items():
            assert torch.equal(loaded["state"][index][key].cpu(), value.cpu()), (index, key)
    del first
    train(model, second, place, steps=range(3, 6))
    assert_close(model, twin)
    if "host" not in (before["strategy"], after["strategy"]):
        assert_same(model, twin)


@pytest.mark.parametrize("before", choices("stream", "host")[::2], ids=name_of)
def test_a_checkpoint_goes_on_in_the_plain_optimizer(place: Place, before: dict[str, Any]) -> None:
    skip_where_host_is_device(place)
    model, twin = (make_model(place) for _ in range(2))
    train(twin, Plain(twin, torch.optim.AdamW, False, **ADAMW), place, steps=range(6))
    params = [p for p in model.parameters() if p.requires_grad]
    first = OffloadOptimizer(params, model=model, **ADAMW, **before)
    train(model, first, place, steps=range(3))
    plain = Plain(model, torch.optim.AdamW, False, **ADAMW)
    plain.base.load_state_dict(first.state_dict())
    del first
    gc.collect()
    train(model, plain, place, steps=range(3, 6))
    assert_close(model, twin)

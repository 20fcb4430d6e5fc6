"""With ``model=``, step() returns when the updates are queued, and the model's forward waits for what it uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from offload import OffloadOptimizer
from offload.simulation.accelerator import SimulatedAccelerator

WIDTH = 8
STRATEGIES = ["stream", "host"]


class Layers(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Block(nn.Linear):
    """torch.compile does not compile the forward of torch's own modules when they are called directly."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias))


class Blocks(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(WIDTH, WIDTH) for _ in range(3)])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.embed(torch.arange(2)))


class Outside(nn.Module):
    """Uses weights of modules that it never calls: a Linear's and those of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"linear": nn.Linear(WIDTH, WIDTH)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH))])

    def forward(self, x: Tensor) -> Tensor:
        linear = self.inner["linear"]
        x = nn.functional.linear(x, linear.weight, linear.bias)
        return nn.functional.linear(x * self.scales[0] * self.scales[1], self.blocks[0][0].weight)


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x


class Wrapped(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([checkpoint_wrapper(layer) for layer in self.layers])


def made(model_class: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model_class()


def inputs(seed: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, call: Any = None) -> None:
    for step in range(steps):
        (model if call is None else call)(inputs(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def attached(model: nn.Module, strategy: Any, **kwargs: Any) -> OffloadOptimizer:
    return OffloadOptimizer(model.parameters(), "torch.optim.AdamW", strategy=strategy, model=model, lr=1e-2, **kwargs)


def trained_plainly(model_class: Callable[[], nn.Module], steps: int = 3) -> nn.Module:
    model = made(model_class)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), steps)
    return model


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    for (name, a), (_, b) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(a, b), f"{name}: largest difference {(a - b).abs().max().item():.3e}"


def unfinished(optimizer: OffloadOptimizer) -> set[str]:
    """Units whose update is not queued on the device yet."""
    assert optimizer._machinery.worker is not None
    return {unit.name for unit, count in optimizer._machinery.worker._open.items() if count}


@pytest.fixture(params=["late", "early", 0, 1], ids=str)
def anyhow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedAccelerator]:
    """The simulated accelerator in several orders."""
    with SimulatedAccelerator(order=request.param) as simulator:
        monkeypatch.setattr("offload.machinery.runtime_for", lambda device: simulator)
        yield simulator


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_step_returns_when_the_updates_are_queued(simulated: Any, strategy: str) -> None:
    model = made(Layers)
    optimizer = attached(model, strategy)
    model(inputs(0)).sum().backward()
    optimizer.step()
    assert unfinished(optimizer) == {"layers.0", "layers.1", "layers.2"} and simulated.copied_bytes["down"] == 0
    optimizer.synchronize()
    assert not unfinished(optimizer) and simulated.copied_bytes["down"] > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_model_step_waits_for_all(simulated: Any, strategy: Any) -> None:
    model = made(Layers)
    optimizer = OffloadOptimizer(model.parameters(), strategy=strategy, lr=1e-2)
    model(inputs(0)).sum().backward()
    optimizer.step()
    assert not unfinished(optimizer)
    assert not torch.equal(model.layers[2].weight, made(Layers).layers[2].weight)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_forward_waits_for_its_own_unit_only(simulated: Any, strategy: str, compiled: bool) -> None:
    model = made(lambda: Layers(8))
    if compiled:
        for layer in model.layers:
            layer._compiled_call_impl = layer._call_impl  # what compile() would put there, without a compiler
    optimizer = attached(model, strategy)
    train(model, optimizer, 2)
    at: list[set[str]] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: at.append(unfinished(optimizer)))
    model(inputs(5))
    names = [f"layers.{index}" for index in range(8)]
    assert names[0] not in at[0] and names[7] in at[0] and names[6] in at[0], at[0]
    for index in range(8):
        assert names[index] not in at[index]
    assert sum(map(len, at)) >= 7


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model_class", [Layers, Tied, Outside, Checkpointed, Wrapped], ids=lambda m: m.__name__)
def test_equals_the_plain_optimizer(anyhow: Any, model_class: Any, strategy: str, in_backward: bool) -> None:
    model = made(model_class)
    optimizer = attached(model, strategy, update_in_backward=in_backward)
    train(model, optimizer, 4)
    optimizer.synchronize()
    assert_same(model, trained_plainly(model_class, 4))


READERS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "evaluation": lambda model: [model(inputs(9))],
    "state_dict": lambda model: list(model.state_dict().values()),
    "a submodule's state_dict": lambda model: list(model.layers[1].state_dict().values()),
    "a submodule's forward": lambda model: [model.layers[2](inputs(9))],
    "weights after forward": lambda model: [model(inputs(9)), model.layers[0].weight],
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reader", READERS)
def test_readers_see_what_step_did(anyhow: Any, reader: str, strategy: str) -> None:
    model = made(Layers)
    optimizer = attached(model, strategy)
    for _ in range(2):
        train(model, optimizer, 2)
        with torch.no_grad():
            actual = [value.clone() for value in READERS[reader](model)]
    reference = made(Layers)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        train(reference, plain, 2)
    with torch.no_grad():
        assert all(map(torch.equal, actual, READERS[reader](reference)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("part", ["model", "submodule"])
def test_loading_the_model_waits_and_is_kept(anyhow: Any, part: str, strategy: str) -> None:
    model, saved = made(Layers), copy.deepcopy(made(Layers).state_dict())
    optimizer = attached(model, strategy)
    train(model, optimizer, 2)
    (model if part == "model" else model.layers[0]).load_state_dict(
        saved if part == "model" else {"weight": saved["layers.0.weight"], "bias": saved["layers.0.bias"]}
    )
    assert torch.equal(model.layers[0].weight, saved["layers.0.weight"])
    train(model, optimizer, 1)
    optimizer.synchronize()
    reference = made(Layers)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    train(reference, plain, 2)
    if part == "model":
        reference.load_state_dict(saved)
    else:
        reference.layers[0].load_state_dict({"weight": saved["layers.0.weight"], "bias": saved["layers.0.bias"]})
    train(reference, plain, 1)
    assert_same(model, reference)


def test_tied_weights_are_one_unit_that_both_modules_wait_for(anyhow: Any) -> None:
    model = made(Tied)
    optimizer = attached(model, "host")
    assert [unit.name for unit in optimizer._machinery.engine.units] == ["embed"]
    train(model, optimizer, 2)
    actual = model.head(inputs(9))  # without the embedding's forward
    assert torch.equal(actual, trained_plainly(Tied, 2).head(inputs(9)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["temperature", "loss.temperature"])
def test_a_unit_that_the_model_holds_in_part_is_waited_for_by_step(anyhow: Any, strategy: Any, name: str) -> None:
    """Parameters beside the model, whose unit (top level: no module's name) may hold some of the model's as well."""

    class Scaled(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    seen = []
    for strategy_or_none in (strategy, None):
        model = made(Scaled)
        temperature = nn.Parameter(torch.ones(4))
        params = [*model.named_parameters(), (name, temperature)]
        optimizer: Any
        if strategy_or_none is None:
            optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
        else:
            optimizer = OffloadOptimizer(params, strategy=strategy_or_none, model=model, lr=1e-2)
        for step in range(2):
            (model(inputs(step)).sum() * temperature.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((temperature * 2).detach())
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])


def hooks_of(model: nn.Module) -> list[Any]:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    kinds += ("_load_state_dict_post_hooks", "_compiled_call_impl")
    found = [getattr(module, kind) for module in model.modules() for kind in kinds]
    found += [param._post_accumulate_grad_hooks for param in model.parameters()]
    return [hooks for hooks in found if hooks]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_go_with_the_optimizer(simulated: Any, strategy: str) -> None:
    model = made(Layers)
    compiled = model.layers[0]._compiled_call_impl = model.layers[0]._call_impl
    optimizer = attached(model, strategy)
    train(model, optimizer, 2)
    assert len(hooks_of(model)) > 10
    del optimizer
    assert hooks_of(model) == [compiled]
    assert_same(model, trained_plainly(Layers, 2))


class TestCompile:
    """Compiled regions hold no hook: one graph per region, made once."""

    @pytest.fixture(autouse=True)
    def _fresh(self) -> Iterator[None]:
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("first", ["compile", "optimizer"])
    def test_layers_compiled_in_place(self, threaded: Any, strategy: str, first: str) -> None:
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        model = made(Blocks)
        optimizer = attached(model, strategy) if first == "optimizer" else None
        for layer in model.layers:
            layer.compile(backend=counter, fullgraph=True)
        if optimizer is None:
            optimizer = attached(model, strategy)
        train(model, optimizer, 4)
        optimizer.synchronize()
        assert_same(model, trained_plainly(Blocks, 4))
        after = counter.frame_count
        assert 1 <= after <= 3  # layers share code
        train(model, optimizer, 2)
        assert counter.frame_count == after

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_the_model_compiled_in_place(self, threaded: Any, strategy: str) -> None:
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        model = made(Blocks)
        model.compile(backend=counter)
        optimizer = attached(model, strategy)
        train(model, optimizer, 4)
        optimizer.synchronize()
        assert_same(model, trained_plainly(Blocks, 4))
        after = counter.frame_count
        train(model, optimizer, 2)
        assert counter.frame_count == after

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_torch_compile_of_the_whole_model(self, threaded: Any, strategy: str) -> None:
        from torch._dynamo.testing import CompileCounter

        counter = CompileCounter()
        model = made(Blocks)
        optimizer = attached(model, strategy)
        compiled = torch.compile(model, backend=counter)
        train(model, optimizer, 4, compiled)
        optimizer.synchronize()
        assert_same(model, trained_plainly(Blocks, 4))
        after = counter.frame_count
        train(model, optimizer, 2, compiled)
        assert counter.frame_count == after and counter.op_count > 0

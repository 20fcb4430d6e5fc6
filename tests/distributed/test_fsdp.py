"""OffloadOptimizer over FSDP2's shards trains as FSDP2 with the plain optimizer does, to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from offload.engine.engine import Engine
from offload.engine.units import Unit
from tests.distributed.ranks import Ranks
from tests.distributed.training import (
    Case,
    Llama,
    device,
    differing,
    loss_of,
    made,
    optimizer_of,
    parts,
    sharded,
    states_of,
    train,
)

FUSED = (("fused", True),)


def cases(strategy: str) -> list[Case]:
    found = []
    for in_backward, gradients, accumulation, clip in itertools.product(
        (False, True), (False, True), (1, 2), (None, 0.5)
    ):
        if (in_backward and clip) or (gradients and strategy == "resident"):
            continue
        attached = not gradients or accumulation == 2
        found.append(Case(strategy, in_backward, gradients, attached, accumulation, clip, options=FUSED))
    return found


def plain_optimizer(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def compare_with_plain(kind: str, cases: list[Case]) -> list[str]:
    """What differs, by case."""
    found = []
    plain: dict[Any, Any] = {}
    for case in cases:
        key = case.accumulation, case.clip
        if key not in plain:
            model = made(lambda: sharded(Llama()))
            optimizer = plain_optimizer(model)
            norms = train(case, model, optimizer)
            plain[key] = [*norms, *parts(model.parameters()), *states_of(optimizer)]
        with device(kind):
            model = made(lambda: sharded(Llama()))
            optimizer = optimizer_of(case, model)
            norms = train(case, model, optimizer)
            got = [*norms, *parts(model.parameters()), *states_of(optimizer)]
        if problem := differing(got, plain[key]):
            found.append(f"{case}: {problem}")
    return found


SAMPLED = [("cpu", "resident", 2), ("threaded", "host", 2), ("threaded", "stream", 2)]
PRODUCT = itertools.product(("cpu", "threaded", "simulated"), ("resident", "stream", "host"), (2, 3, 4))
OTHERS = [each for each in PRODUCT if each not in SAMPLED and (each[0] == "cpu" or each[1] != "resident")]


@pytest.mark.parametrize(
    ("kind", "strategy", "count"), [*SAMPLED, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_training_equals_plain_fsdp2(ranks: Ranks, kind: str, strategy: str, count: int) -> None:
    for found in ranks.run(count, compare_with_plain, kind, cases(strategy)):
        assert found == []


# Quirks of models and meshes


class Unused(nn.Module):
    """A Llama with a frozen layer, a frozen bias, and a head that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = Llama(layers=3)
        self.spare = nn.Linear(16, 3)
        self.llama.layers[0].requires_grad_(False)
        self.llama.layers[1].out.bias.requires_grad_(False)
        self.layers = self.llama.layers

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.llama(tokens)


class Checkpointed(Llama):
    """Computes each layer's activations again in backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def prefetching() -> Any:
    model = sharded(Llama(layers=3))
    for layer, following in zip(model.layers, list(model.layers)[1:], strict=False):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    return model


def on_a_grid(*shape: int) -> Any:
    return sharded(Llama(), init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


def by_columns() -> Any:
    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.dim() == 2 else None

    return sharded(Llama(), shard_placement_fn=place)


class Repeated(Llama):
    """Runs each layer twice."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.head(self.norm(x))


def grouped() -> Any:
    """The norm and the head gathered together, as torchtitan does."""
    model = Llama()
    fully_shard([model.norm, model.head], reshard_after_forward=False)
    return sharded(model)


def from_meta() -> Any:
    """FSDP2 moves uneven shards to memory of its own at the first forward, after the optimizer was built."""
    with torch.device("meta"):
        model = sharded(Llama())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)
            param.to_local().mul_(torch.rand(param.to_local().shape))
    return model


class Parallel(nn.Module):
    """Cut by columns and by rows, as tensor parallelism does; its norm is repeated, and its gradients are summands."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 16).requires_grad_(False)
        self.before = nn.Sequential(nn.LayerNorm(16))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.size(1)
        if torch.__version__ < "2.13":  # the DTensors of 2.11 make no product of a sequence that was cut unevenly
            tokens = nn.functional.pad(tokens, (0, length % 2))
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.before(x))))
        return nn.functional.linear(x[:, :length], self.embed.weight)


def in_parallel(mesh: DeviceMesh | None = None) -> Any:
    plan = {
        "before": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "before.0": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    return parallelize_module(Parallel(), mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),)), plan)


def in_both() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    return fully_shard(in_parallel(mesh["tensor"]), mesh=mesh["shard"])


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MODELS: dict[str, Callable[[], Any]] = {
    "tied": lambda: sharded(Llama(tied=True)),
    "unused and frozen": lambda: sharded(Unused()),
    "kept after forward": lambda: sharded(Llama(), reshard_after_forward=False),
    "mixed precision": lambda: sharded(Llama(), mp_policy=BF16),
    "bf16": lambda: sharded(Llama().bfloat16()),
    "prefetching": prefetching,
    "checkpointed": lambda: sharded(Checkpointed()),
    "by columns": by_columns,
    "repeated": lambda: sharded(Repeated()),
    "grouped": grouped,
    "from meta": from_meta,
    "in parallel": in_parallel,
    "replicated": lambda: on_a_grid(2, 1),
    "one replica": lambda: on_a_grid(1, 2),
}
OF_FOUR: dict[str, Callable[[], Any]] = {
    "in both": in_both,
    "grid": lambda: on_a_grid(2, 2),
    "kept in part": lambda: sharded(Llama(), reshard_after_forward=2),
}
QUIRKS = [
    Case("stream", in_backward=True, options=FUSED),
    Case("host", offload_gradients=True, accumulation=2, clip=0.5, options=FUSED),
]


def compare_model(kind: str, name: str) -> list[str]:
    build = {**MODELS, **OF_FOUR}[name]
    found = []
    for case in QUIRKS:
        if name == "bf16":  # whose norms torch takes in bf16, and this in fp32
            case = replace(case, clip=None)
        if name in ("in parallel", "in both"):  # whose summands torch adds up in another order
            case = replace(case, accumulation=1, clip=None)
        seen = []
        for is_plain in (True, False):
            with nullcontext() if is_plain else device(kind):
                model = made(build)
                optimizer = (
                    torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
                    if is_plain
                    else optimizer_of(case, model)
                )
                norms = train(case, model, optimizer)
                seen.append([*norms, *parts(model.parameters()), *states_of(optimizer)])
        if problem := differing(seen[1], seen[0]):
            found.append(f"{case}: {problem}")
    return found


# Of tensor parallelism, DTensor finds out rules on the way, which the simulator takes for work.
KINDS = [
    pytest.param(
        name,
        2 if name in MODELS else 4,
        kind,
        marks=()
        if name in MODELS and kind == ("threaded" if name == "in parallel" else "simulated")
        else pytest.mark.slow,
    )
    for name in (*MODELS, *OF_FOUR)
    for kind in ("simulated", "threaded")
    if (name, kind) not in (("in parallel", "simulated"), ("in both", "simulated"))
]


@pytest.mark.parametrize(("name", "count", "kind"), KINDS)
def test_every_kind_of_model_trains_as_in_plain_fsdp2(ranks: Ranks, name: str, count: int, kind: str) -> None:
    for found in ranks.run(count, compare_model, kind, name):
        assert found == []


def compare_without_sync(kind: str) -> list[str]:
    """Accumulation of whole gradients: only the last micro-batch is reduced."""
    seen = []
    for is_plain in (True, False):
        with nullcontext() if is_plain else device(kind):
            model = made(lambda: sharded(Llama()))
            case = Case("stream", in_backward=True, options=FUSED)
            optimizer = plain_optimizer(model) if is_plain else optimizer_of(case, model)
            for step in range(3):
                for micro in range(2):
                    model.set_requires_gradient_sync(micro == 1)
                    loss_of(model, 10 * step + micro).backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append([*states_of(optimizer), *parts(model.parameters())])
    return [differing(*seen)]


def test_accumulation_of_whole_gradients(ranks: Ranks) -> None:
    assert ranks.run(2, compare_without_sync, "threaded") == [[""], [""]]


def compare_ddp(kind: str) -> list[str]:
    found = []
    for case in [Case("host", accumulation=2, clip=0.5, options=FUSED), Case("stream", options=FUSED)]:
        seen = []
        for is_plain in (True, False):
            with nullcontext() if is_plain else device(kind):
                model = DistributedDataParallel(made(Llama))
                optimizer = plain_optimizer(model) if is_plain else optimizer_of(case, model)
                norms = train(case, model, optimizer)
                seen.append([*norms, *parts(model.parameters()), *states_of(optimizer)])
        if problem := differing(seen[1], seen[0]):
            found.append(f"{case}: {problem}")
    return found


def test_ddp_trains_as_with_the_plain_optimizer(ranks: Ranks) -> None:
    for found in ranks.run(2, compare_ddp, "threaded"):
        assert found == []


def waited_for(kind: str) -> list[tuple[str, list[str]]]:
    """Of the forward after a step: the first parameter of what was gathered, and the units that were waited for."""
    gathered: list[tuple[str, list[str]]] = []
    waited: list[str] = []
    wait, gather = Engine.wait_to_gather, _fsdp_param_group.foreach_all_gather

    def wait_to_gather(engine: Engine, unit: Unit) -> None:
        waited.append(unit.name)
        wait(engine, unit)

    def foreach_all_gather(params: Any, *args: Any) -> Any:
        gathered.append((params[0]._param_fqn, list(waited)))
        waited.clear()
        return gather(params, *args)

    with device(kind), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "wait_to_gather", wait_to_gather)
        patch.setattr(_fsdp_param_group, "foreach_all_gather", foreach_all_gather)
        model = made(lambda: sharded(Llama()))
        optimizer = optimizer_of(Case("stream"), model)
        loss_of(model, 0).backward()
        optimizer.step()
        gathered.clear()
        waited.clear()
        loss_of(model, 1)
    return gathered


def test_each_gather_waits_for_its_own_layer_only(ranks: Ranks) -> None:
    for found in ranks.run(2, waited_for, "threaded"):
        assert found == [
            ("embed.weight", ["embed", "norm", "head"]),
            ("layers.0.norm1.weight", ["layers.0"]),
            ("layers.1.norm1.weight", ["layers.1"]),
        ]


def norms(name: str) -> list[tuple[float, float]]:
    """Of all gradients: ours, and from the whole tensors."""
    found = []
    for order in (2.0, 1.0, float("inf")):
        for case in (Case("stream"), Case("host", offload_gradients=True)):
            with device("threaded"):
                model = made({**MODELS, **OF_FOUR}[name])
                optimizer = optimizer_of(case, model)
                loss_of(model, 0).backward()
                if not case.offload_gradients:
                    gradients = [param.grad for param in model.parameters() if param.grad is not None]
                    whole = [gradient.full_tensor().double().flatten() for gradient in gradients]  # type: ignore[attr-defined]
                    expected = float(torch.linalg.vector_norm(torch.cat(whole), order))
                found.append((float(optimizer.grad_norm(order)), expected))
    return found


@pytest.mark.parametrize(
    ("name", "count"), [("in parallel", 2), *(pytest.param(n, 4, marks=pytest.mark.slow) for n in ("in both", "grid"))]
)
def test_norms_count_each_element_once(ranks: Ranks, name: str, count: int) -> None:
    for found in ranks.run(count, norms, name):
        for got, want in found:
            assert got == pytest.approx(want, rel=1e-6)

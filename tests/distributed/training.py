"""A small Llama under ``fully_shard``, and ways to train it, run on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from offload import OffloadOptimizer
from offload.simulation.accelerator import SimulatedAccelerator
from tests.conftest import ThreadedRuntime, play_device
from tests.distributed.streams import STREAMS, play_streams

DIM, VOCABULARY = 16, 5
"""The vocabulary leaves three ranks uneven parts, and the last of four an empty one."""

STEPS = 3


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.silu(self.up(self.norm2(x))))


class Llama(nn.Module):
    """``[batch, sequence]`` of tokens to logits."""

    def __init__(self, dim: int = DIM, layers: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList([Layer(dim) for _ in range(layers)])
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sharded(model: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """The model, each layer and the rest a group of FSDP2."""
    mesh = mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model: nn.Module, seed: int, *, per_rank: bool = True) -> Tensor:
    rank = torch.distributed.get_rank() if per_rank else 0
    tokens = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1000 * seed + rank))
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        accumulation: micro-batches of a step; each is reduced, and ranks add up their parts.
        clip: the largest norm of all gradients; None for any.
        options: of OffloadOptimizer.
    """

    strategy: str = "stream"
    in_backward: bool = False
    offload_gradients: bool = False
    attached: bool = True
    accumulation: int = 1
    clip: float | None = None
    base: str = "torch.optim.AdamW"
    options: tuple[tuple[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        flags = {
            "in backward": self.in_backward,
            "gradients": self.offload_gradients,
            "model": self.attached,
            f"x{self.accumulation}": self.accumulation > 1,
            "clip": self.clip is not None,
            self.base: True,
        }
        return " ".join([self.strategy, *(flag for flag, is_set in flags.items() if is_set)])


def optimizer_of(case: Case, model: nn.Module) -> OffloadOptimizer:
    return OffloadOptimizer(
        model.named_parameters(),
        case.base,
        strategy=case.strategy,  # type: ignore[arg-type]
        update_in_backward=case.in_backward,
        offload_gradients=case.offload_gradients,
        model=model if case.attached else None,
        lr=1e-2,
        **dict(case.options),
    )


def train(
    case: Case, model: Any, optimizer: Any, steps: int = STEPS, first: int = 0, *, same: bool = False
) -> list[Any]:
    """Train; the norms, if they are asked for. ``same``: every rank has the same data."""
    seen = []
    is_plain = not isinstance(optimizer, OffloadOptimizer)
    for step in range(first, first + steps):
        for micro in range(case.accumulation):
            is_last = micro == case.accumulation - 1
            with nullcontext() if is_plain or is_last else optimizer.accumulate():
                loss_of(model, 10 * step + micro, per_rank=not same).backward()
        if case.clip is not None:
            if is_plain:
                norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            else:
                norm = optimizer.clip_grad_norm_(case.clip)
            seen.append(norm.clone())
        optimizer.step()
        optimizer.zero_grad()
    if not is_plain:
        optimizer.synchronize()
    return seen


def parts(tensors: Any) -> list[Tensor]:
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in tensors]


def states_of(optimizer: Any) -> list[Tensor]:
    """All states, as this rank has them."""
    states = optimizer.state_dict()["state"]
    return parts(value for _, state in sorted(states.items()) for _, value in sorted(state.items()))


def differing(got: list[Tensor], want: list[Tensor]) -> str:
    """Which of the tensors differ in any bit; empty if none."""
    if len(got) != len(want):
        return f"{len(got)} tensors, not {len(want)}"
    pairs = enumerate(zip(got, want, strict=True))
    unequal = [index for index, (a, b) in pairs if a.shape != b.shape or not torch.equal(a, b)]
    return f"tensors {unequal} of {len(want)} differ" if unequal else ""


@contextmanager
def device(kind: str) -> Iterator[Any]:
    """Inside, the CPU plays a device: ``threaded``, ``simulated`` (threads of which run late, or ``early``); or it is
    itself: ``cpu``."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "threaded":
            play_device(patch, ThreadedRuntime())
            yield None
        elif kind in ("simulated", "early"):
            order: Any = "early" if kind == "early" else "late"
            with SimulatedAccelerator(order=order, streams=STREAMS) as simulator:
                play_device(patch, simulator)
                play_streams(patch, simulator)
                yield simulator
        else:
            yield None


def made(build: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build()

"""What forward and backward cost on this machine's CPU: small models trained for real, and the costs that explain them.

On a CPU no data sheet tells what operations reach. A model of plain torch is timed at several widths and micro-batches
whose work is counted as that of any run is (:mod:`offload.plan.work`); the seconds for each FLOP of a product and of
attention, each byte that other operations move and each operation are those that come nearest to all of the times.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.plan.work import Amount, count

FEATURES = ("products", "attention", "moved", "launches")

LAYERS, HEAD_DIM = 2, 32

SIZES = (
    (64, 1, 64, 512),
    (64, 8, 128, 512),
    (128, 4, 256, 2048),
    (128, 16, 256, 2048),
    (128, 2, 1024, 512),
    (256, 8, 256, 2048),
    (512, 2, 256, 2048),
    (512, 8, 128, 2048),
)
"""Width, sequences, tokens of each, vocabulary."""

TURNS = 3


@dataclass(frozen=True)
class Costs:
    """Seconds for one of each.

    Attributes:
        products: FLOP of a matrix product.
        attention: FLOP of attention.
        moved: byte that another operation reads or writes.
        launches: operation.
    """

    products: float
    attention: float
    moved: float
    launches: float

    def seconds(self, amount: Amount) -> float:
        """Of work on the CPU."""
        return sum(getattr(self, name) * getattr(amount, name) for name in FEATURES)


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_DIM
        self.norm, self.norm_after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        hidden = 11 * width // 4
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        h = self.norm(x)
        q, k, v = (each(h).view(batch, tokens, self.heads, HEAD_DIM) for each in self.qkv)
        q, k = _turned(q), _turned(k)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        h = self.norm_after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _turned(x: Tensor) -> Tensor:
    """As rotary embeddings do, in fp32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * 0.6 - odd * 0.8, odd * 0.6 + even * 0.8), dim=-1).flatten(-2).type_as(x)


class _Model(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(LAYERS))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def loss(self, batch: int, length: int) -> Tensor:
        tokens = torch.arange(batch * length).remainder(self.head.out_features).view(batch, length)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def training_costs(
    dtype: torch.dtype, *, sizes: Sequence[tuple[int, ...]] = SIZES, clock: Callable[[], float] = time.perf_counter
) -> Costs:
    """Of forward and backward on this CPU in a dtype, with torch's threads as they are; takes seconds.

    Args:
        dtype: of the parameters.
        sizes: as :data:`SIZES`.
        clock: seconds.
    """
    rows, times = [], []
    for width, batch, length, vocabulary in sizes:
        with torch.device("meta"):
            empty = _Model(width, vocabulary).to(dtype)
        step = functools.partial(empty.loss, batch, length)
        work = count(empty, list(empty.layers), step, batch=batch, length=length, fused_norms=False)
        rows.append([getattr(work.total, name) for name in FEATURES])
        with torch.random.fork_rng(devices=[]):
            model = _Model(width, vocabulary).to(dtype)
        times.append(statistics.median([_turn(model, batch, length, clock) for _ in range(TURNS + 1)][1:]))
    return Costs(*_least_squares(rows, times))


def _turn(model: _Model, batch: int, length: int, clock: Callable[[], float]) -> float:
    started = clock()
    model.loss(batch, length).backward()
    taken = clock() - started
    model.zero_grad()
    return taken


def _least_squares(rows: list[list[float]], times: list[float]) -> list[float]:
    """The costs, none below zero and the first above it, whose relative errors have the least sum of squares.

    Times that other processes on the machine disturbed can be explained best without any product, which would promise
    that a model of any width is as fast.
    """
    left = torch.tensor(rows, dtype=torch.float64) / torch.tensor(times, dtype=torch.float64)[:, None]
    scale = left.abs().amax(dim=0).clamp_min(1e-300)
    left, right = left / scale, torch.ones(len(times), 1, dtype=torch.float64)
    best: tuple[float, list[float]] | None = None
    number = left.shape[1]
    for size in range(number):
        for others in itertools.combinations(range(1, number), size):
            chosen = (0, *others)
            found = torch.linalg.lstsq(left[:, chosen], right, driver="gelsd").solution.squeeze(1)
            if (found < 0).any() or found[0] == 0:
                continue
            error = float((left[:, chosen] @ found - 1).square().sum())
            if best is None or error < best[0]:
                costs: list[Any] = [0.0] * number
                for index, value in zip(chosen, found.tolist(), strict=True):
                    costs[index] = value / float(scale[index])
                best = error, costs
    assert best is not None
    return best[1]

"""What forward and backward cost on this machine's CPU: small models trained for real, and the costs that explain them.

On a CPU no data sheet tells what operations reach. A model of plain torch is timed at several widths and micro-batches
whose work is counted as that of any run is (:mod:`offload.plan.work`). Products and attention are timed by themselves;
the seconds for each byte that other operations move and for each operation are those that come nearest to the rest.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from offload.plan.heap import MMAP_THRESHOLD_MAX
from offload.plan.work import Amount, count

LAYERS, HEAD_DIM = 2, 32

SIZES = (
    (64, 1, 64, 512),
    (64, 8, 128, 512),
    (128, 4, 256, 2048),
    (128, 16, 256, 1024),
    (128, 2, 1024, 512),
    (256, 8, 256, 2048),
    (512, 2, 256, 2048),
    (512, 8, 128, 2048),
)
"""Width, sequences, tokens of each, vocabulary. No tensor is as large as :data:`offload.plan.heap.MMAP_THRESHOLD_MAX`:
the pages of one that is are made anew each time, which takes as long as much work and is counted by itself."""

TURNS = 3


@dataclass(frozen=True)
class Costs:
    """Seconds for one of each.

    Attributes:
        products: FLOP of a matrix product.
        attention: FLOP of attention.
        moved: byte that another operation reads or writes.
        launches: operation.
        queries: FLOP of attention for each token of a sequence: what its kernel does once for a query, whatever the
            number of keys.
    """

    products: float
    attention: float
    moved: float
    launches: float
    queries: float = 0.0

    def seconds(self, amount: Amount, length: int) -> float:
        """Of work on the CPU, with sequences of so many tokens."""
        attention = (self.attention + self.queries / length) * amount.attention
        return self.products * amount.products + attention + self.moved * amount.moved + self.launches * amount.launches


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
    torch.empty(MMAP_THRESHOLD_MAX - 2**20, dtype=torch.uint8)  # what the C library is given back next, it keeps
    amounts: list[Amount] = []
    whole: list[float] = []
    inside: list[tuple[float, float]] = []
    for width, batch, length, vocabulary in sizes:
        with torch.device("meta"):
            empty = _Model(width, vocabulary).to(dtype)
        step = functools.partial(empty.loss, batch, length)
        work = count(empty, list(empty.layers), step, batch=batch, length=length, fused_norms=False)
        amounts.append(work.total)
        with torch.random.fork_rng(devices=[]):
            model = _Model(width, vocabulary).to(dtype)
        _turn(model, batch, length, clock)
        turns = [(_turn(model, batch, length, clock), _parts(model, batch, length, clock)) for _ in range(TURNS)]
        whole.append(statistics.median(seconds for seconds, _ in turns))
        products, attention = zip(*(parts for _, parts in turns), strict=True)
        inside.append((statistics.median(products), statistics.median(attention)))

    in_products, in_attention = zip(*inside, strict=True)
    others = [max(0.0, total - sum(parts)) for total, parts in zip(whole, inside, strict=True)]
    lengths = [length for _, _, length, _ in sizes]
    (products_cost,) = _least_squares([[each.products] for each in amounts], in_products, whole)
    attention_cost, queries_cost = _least_squares(
        [[each.attention, each.attention / length] for each, length in zip(amounts, lengths, strict=True)],
        in_attention,
        whole,
    )
    moved_cost, launches_cost = _least_squares([[each.moved, each.launches] for each in amounts], others, whole)
    return Costs(products_cost, attention_cost, moved_cost, launches_cost, queries_cost)


def _turn(model: _Model, batch: int, length: int, clock: Callable[[], float]) -> float:
    """Seconds of forward and backward."""
    started = clock()
    model.loss(batch, length).backward()
    taken = clock() - started
    model.zero_grad()
    return taken


def _parts(model: _Model, batch: int, length: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds that forward and backward spend in products, and in attention."""
    with _Timer(clock) as timer:
        model.loss(batch, length).backward()
    model.zero_grad()
    return timer.products, timer.attention


class _Timer(TorchDispatchMode):
    """Times products and attention, each operation by itself.

    Attributes:
        products: seconds.
        attention: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.products = self.attention = 0.0
        self._clock = clock

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = self._clock()
        out = func(*args, **(kwargs or {}))
        taken = self._clock() - started
        if "attention" in func.overloadpacket.__name__:
            self.attention += taken
        elif func.overloadpacket in flop_registry:
            self.products += taken
        return out


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float], whole: Sequence[float]) -> list[float]:
    """The costs, none below zero, whose errors, each as a share of the whole time, have the least sum of squares.

    Args:
        rows: amounts of a model's work.
        seconds: that this work took.
        whole: seconds of all of its work.
    """
    weights = 1 / torch.tensor(whole, dtype=torch.float64)[:, None]
    left, right = (
        weights * torch.tensor(rows, dtype=torch.float64),
        weights * torch.tensor(seconds, dtype=torch.float64)[:, None],
    )
    scale = left.abs().amax(dim=0).clamp_min(1e-300)
    left = left / scale
    number = left.shape[1]
    best, error = [0.0] * number, float(right.square().sum())
    for size in range(1, number + 1):
        for chosen in itertools.combinations(range(number), size):
            found = torch.linalg.lstsq(left[:, chosen], right, driver="gelsd").solution.squeeze(1)
            rest = float((left[:, chosen] @ found - right.squeeze(1)).square().sum())
            if (found >= 0).all() and rest < error:
                error, best = rest, [0.0] * number
                for index, value in zip(chosen, found.tolist(), strict=True):
                    best[index] = value / float(scale[index])
    return best

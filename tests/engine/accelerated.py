"""A model, a reference and a way to train for tests that run on a real accelerator and on the CPU that plays one."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import OffloadOptimizer
from offload.engine.runtime import AcceleratorRuntime, _StreamEvent
from tests.engine.sleeping import sleep

# cuBLAS reads it once, when it is first used; without it matrix products may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

IS_SANITIZED = "TORCH_CUDA_SANITIZER" in os.environ
STEPS = 4
LATE = 1.0
"""Milliseconds, far longer than any kernel here."""

ACCELERATOR = pytest.param(
    "accelerator",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator, and there is none here"),
    ],
)
PLACES = ["simulated", "threaded", ACCELERATOR]
MANY = pytest.mark.parametrize(
    "place", [pytest.param("simulated", marks=pytest.mark.slow), "threaded", ACCELERATOR], indirect=True
)
"""For tests of many combinations, which take the simulator a minute."""


@dataclass
class Place:
    """Where a test runs: ``simulated`` and ``threaded`` have the CPU play the device."""

    name: str
    device: str

    @property
    def is_real(self) -> bool:
        return self.name == "accelerator"

    def finish(self) -> None:
        """Let the device come to rest, and let go of what nobody holds."""
        gc.collect()
        if self.is_real:
            torch.accelerator.synchronize()

    def stream(self) -> AbstractContextManager[Any]:
        """A stream of the caller's own."""
        return torch.Stream(device=self.device) if self.is_real else nullcontext()


@contextmanager
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, kernels give the same bits each time, where torch has such."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param != "accelerator":
        request.getfixturevalue(request.param)
        yield Place(request.param, "cpu")
        return
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    if IS_SANITIZED:
        sanitize_threads(monkeypatch)
    with repeatable(monkeypatch):
        yield Place("accelerator", accelerator.type)
    torch.accelerator.synchronize()


def sanitize_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's sanitizer sees the kernels of the thread that started it; show it those of the engine's threads too."""
    import torch.cuda._sanitizer as sanitizer

    lock = threading.RLock()

    def locked(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with lock:
                return method(*args)

        return call

    for kept in (sanitizer.StreamSynchronizations, sanitizer._TensorsAccessed):
        for name, method in list(vars(kept).items()):
            if callable(method) and not name.startswith("__"):
                monkeypatch.setattr(kept, name, locked(method))
    wait = _StreamEvent.synchronize

    def told(self: _StreamEvent) -> None:
        # The engine asks whether an event is done, which the sanitizer does not see: to it, what comes after has not
        # waited. This returns at once, and is seen.
        wait(self)
        self.event.synchronize()

    monkeypatch.setattr(_StreamEvent, "synchronize", told)
    start = AcceleratorRuntime.start

    def watched(self: AcceleratorRuntime, work: Callable[[], None], name: str) -> Any:
        mode = object.__new__(sanitizer.CUDASanitizerDispatchMode)
        torch.utils._python_dispatch.TorchDispatchMode.__init__(mode)
        mode.event_handler = sanitizer.cuda_sanitizer.dispatch.event_handler

        def run() -> None:
            with mode:
                work()

        return start(self, run, name)

    monkeypatch.setattr(AcceleratorRuntime, "start", watched)


# A model with a tied embedding, tiny, large, frozen and unused parameters


class Slow(torch.autograd.Function):
    """Identity that keeps the compute stream busy, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sleep(LATE)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        sleep(LATE)
        return gradient


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Ids ``[batch, sequence]`` to a loss."""

    def __init__(self, dim: int = 32, layers: int = 3, vocabulary: int = 101) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(dim, dim)
        self.frozen = nn.Parameter(torch.ones(dim), requires_grad=False)
        self.is_slow = False
        self.is_checkpointed = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * self.frozen
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
            x = Slow.apply(x) if self.is_slow else x
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def make_model(place: Place, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return Model(**kwargs).to(place.device, dtype)


def ids(number: int, place: Place) -> Tensor:
    return torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(number)).to(place.device)


class Plain:
    """A plain optimizer with OffloadOptimizer's interface; ``on_host``: over parameters kept on the CPU."""

    def __init__(self, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], on_host: bool, **kwargs: Any):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.kept = [nn.Parameter(p.detach().cpu().clone()) for p in self.params] if on_host else self.params
        self.base = optimizer(self.kept, **kwargs)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.params, max_norm)

    @torch.no_grad()
    def step(self) -> None:
        for param, kept in zip(self.params, self.kept, strict=True):
            kept.grad = None if param.grad is None else param.grad.to(kept.device)
        self.base.step()
        for param, kept in zip(self.params, self.kept, strict=True):
            param.copy_(kept)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def synchronize(self) -> None:
        return None


def train(
    model: nn.Module,
    optimizer: Any,
    place: Place,
    *,
    steps: range = range(STEPS),
    accumulation: int = 1,
    clip: float | None = None,
) -> list[Tensor]:
    """Trains with another learning rate in each step; returns the norms, if gradients are clipped."""
    norms = []
    for step in steps:
        for group in optimizer.param_groups:
            lr = 1e-2 / (1 + step)
            group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else lr
        for part in range(accumulation):
            is_last = part == accumulation - 1
            with nullcontext() if is_last else optimizer.accumulate():
                (model(ids(step * accumulation + part, place)) / accumulation).backward()
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(clip))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return norms


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    for (name, a), (_, b) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(a, b), f"{name}: largest difference {(a - b).abs().max().item():.3e}"


def assert_close(actual: nn.Module, expected: nn.Module) -> None:
    for (name, a), (_, b) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}


def check_parity(
    place: Place,
    options: dict[str, Any],
    *,
    attached: bool = False,
    accumulation: int = 1,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[Any], None] = lambda model: None,
    **dims: int,
) -> None:
    """Trains two equal models; the same kernel on the same device updates both, so they stay equal bit for bit."""
    model, twin = (make_model(place, dtype, **dims) for _ in range(2))
    reference = Plain(twin, torch.optim.AdamW, options["strategy"] == "host", **ADAMW)
    train(twin, reference, place, accumulation=accumulation)
    prepare(model)
    own = {**ADAMW, **options, **({"model": model} if attached else {})}
    optimizer = OffloadOptimizer([p for p in model.parameters() if p.requires_grad], **own)
    train(model, optimizer, place, accumulation=accumulation)
    assert_same(model, twin)


def choices(*strategies: str) -> list[dict[str, Any]]:
    """Each strategy in backward and at step, with gradients on the device and on the host where that can be."""
    return [
        {"strategy": strategy, "update_in_backward": in_backward, "offload_gradients": offload_gradients}
        for strategy in strategies
        for in_backward in (False, True)
        for offload_gradients in (False, True)
        if not (offload_gradients and strategy == "resident")
    ]


def name_of(options: Any) -> str:
    if not isinstance(options, dict):
        return str(options)
    backward = "in backward" if options["update_in_backward"] else "at step"
    return f"{options['strategy']} {backward}{', offloaded gradients' if options['offload_gradients'] else ''}"


ALL = pytest.mark.parametrize("options", choices("resident", "stream", "host"), ids=name_of)
OFFLOADED = pytest.mark.parametrize("options", choices("stream", "host"), ids=name_of)
SOME = pytest.mark.parametrize(
    "options",
    [
        {"strategy": "stream", "update_in_backward": True, "offload_gradients": False},
        {"strategy": "host", "update_in_backward": True, "offload_gradients": True},
        {"strategy": "host", "update_in_backward": False, "offload_gradients": False},
    ],
    ids=name_of,
)

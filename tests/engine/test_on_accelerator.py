"""The engine against plain optimizers: the same tests on a real accelerator and on the CPU that plays one.

On the accelerator (``pytest -m gpu``) streams can be made late, and under ``TORCH_CUDA_SANITIZER=1`` every kernel of
every thread is checked for races; ``scripts/gpu_suite.py --part a`` does that.
"""

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
from offload.engine import units
from offload.engine.runtime import AcceleratorRuntime
from offload.engine.states import components
from offload.optim import AdamW
from offload.simulation.accelerator import RaceError
from tests.engine.sleeping import current, sleep

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
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    try:
        yield Place("accelerator", accelerator.type)
    finally:
        torch.use_deterministic_algorithms(False)
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


# The packed AdamW: one kernel's bits, wherever it runs

FORMATS = [("int8", "split"), ("bf16", "stochastic"), ("fp32", "split"), ("fp8", "none")]
PACKED: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "seed": 3}


class ClippedTo(Plain):
    """The packed AdamW, clipped by norms that are given, because a factor that differs in its last bit changes updates.
    They have to be those of the gradients, within the rounding of another order of addition."""

    def __init__(self, model: nn.Module, norms: list[Tensor], **kwargs: Any) -> None:
        super().__init__(model, AdamW, False, **kwargs)
        self.norms = iter(norms)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        norm = next(self.norms)
        expected = torch.nn.utils.get_total_norm([p.grad.float() for p in self.params if p.grad is not None])
        torch.testing.assert_close(norm.to(expected), expected, rtol=1e-5, atol=0)
        assert norm > 2 * max_norm  # so the limit binds
        self.base.gradient_scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm


def check_packed(
    place: Place,
    options: dict[str, Any],
    *,
    state_dtype: str = "int8",
    master: str = "split",
    accumulation: int = 1,
    clip: float | None = None,
    attached: bool = True,
    is_slow: bool = False,
) -> None:
    """Trains a bf16 model with its states resident and with the options; parameters and states stay equal to the last
    bit, also where one is updated on the device and the other on the CPU."""
    kwargs = {**PACKED, "state_dtype": state_dtype, "master": master}
    model, twin = (make_model(place, torch.bfloat16) for _ in range(2))
    model.is_slow = is_slow
    params, theirs = ([p for p in each.parameters() if p.requires_grad] for each in (model, twin))
    own = {**kwargs, **options, **({"model": model} if attached else {})}
    optimizer = OffloadOptimizer(params, "offload.optim.AdamW", **own)
    norms = train(model, optimizer, place, accumulation=accumulation, clip=clip)
    reference = ClippedTo(twin, norms, **kwargs)
    train(twin, reference, place, accumulation=accumulation, clip=clip)
    assert_same(model, twin)
    states, expected = optimizer.state, reference.base.state
    assert len(expected) == len(theirs) - 2  # of the linear layer that is not used
    for mine, other in zip(params, theirs, strict=True):
        if other not in expected:
            assert mine not in states
            continue
        assert states[mine].keys() == expected[other].keys()
        for key, value in expected[other].items():
            assert torch.equal(states[mine][key].cpu(), value.cpu()), key


@MANY
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("state_dtype", "master"), FORMATS)
@ALL
def test_packed_states_are_the_same_to_the_last_bit(
    place: Place,
    options: dict[str, Any],
    state_dtype: str,
    master: str,
    accumulation: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large tensors are cut, so that ranges of them are updated."""
    monkeypatch.setattr(units, "CHUNK_ELEMENTS", 1024)
    check_packed(place, options, state_dtype=state_dtype, master=master, accumulation=accumulation)


AT_STEP = [o for o in choices("stream", "host") if not o["update_in_backward"]]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("options", AT_STEP, ids=name_of)
def test_packed_updates_are_clipped_to_the_last_bit(place: Place, options: dict[str, Any], accumulation: int) -> None:
    check_packed(place, options, accumulation=accumulation, clip=0.1)


# Races


@contextmanager
def late_stream(stream: str, monkeypatch: pytest.MonkeyPatch, milliseconds: float = LATE) -> Iterator[None]:
    """Each piece of work on one of the engine's streams begins late."""
    copy, updating = AcceleratorRuntime.copy, AcceleratorRuntime.updating
    sleeping = torch.Stream()

    def late_copy(
        self: AcceleratorRuntime, dst: Tensor, src: Tensor, direction: Any, after: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        if direction == stream:
            # The copy streams are the engine's; one that waits for a stream that sleeps is as late.
            with current(sleeping):
                sleep(milliseconds)
                after = (*after, self.record())
        return copy(self, dst, src, direction, after, *args, **kwargs)

    @contextmanager
    def late_updating(self: AcceleratorRuntime, *args: Any, **kwargs: Any) -> Iterator[None]:
        with updating(self, *args, **kwargs):
            if stream == "update":
                sleep(milliseconds)
            yield

    with monkeypatch.context() as patch:
        patch.setattr(AcceleratorRuntime, "copy", late_copy)
        patch.setattr(AcceleratorRuntime, "updating", late_updating)
        yield


@pytest.mark.parametrize("place", [ACCELERATOR], indirect=True)
@pytest.mark.parametrize("stream", ["compute", "up", "down", "update"])
@pytest.mark.parametrize("attached", [False, True], ids=["", "model"])
@OFFLOADED
def test_late_streams(
    place: Place, options: dict[str, Any], attached: bool, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not wait for a stream that is late reads old values. The simulator makes every stream late."""
    with late_stream(stream, monkeypatch):
        check_parity(
            place,
            options,
            attached=attached,
            accumulation=2,
            prepare=lambda model: setattr(model, "is_slow", stream == "compute"),
        )


@pytest.mark.parametrize("place", [ACCELERATOR], indirect=True)
@pytest.mark.parametrize("stream", ["compute", "up", "down", "update"])
@OFFLOADED
def test_late_streams_with_packed_states(
    place: Place, options: dict[str, Any], stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accumulation, and clipped where that can be."""
    clip = 0.1 if options in AT_STEP else None
    with late_stream(stream, monkeypatch):
        check_packed(place, options, accumulation=2, clip=clip, is_slow=stream == "compute")


@pytest.mark.parametrize("place", ["simulated", ACCELERATOR], indirect=True)
@pytest.mark.parametrize("attached", [False, True], ids=["", "model"])
def test_a_missing_wait_shows(place: Place, attached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait for the update stream, the next forward reads parameters that are being updated."""
    options = {"strategy": "stream", "update_in_backward": False, "offload_gradients": False}
    if place.name == "simulated":
        monkeypatch.setattr("offload.simulation.accelerator.SimulatedAccelerator.wait", lambda self, event: None)
        with pytest.raises(RaceError):
            check_parity(place, options, attached=attached)
        return
    monkeypatch.setattr(AcceleratorRuntime, "wait", lambda self, event: None)
    with late_stream("update", monkeypatch, 20 * LATE), pytest.raises(Exception if IS_SANITIZED else AssertionError):
        check_parity(place, options, attached=attached)


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
    """Peak device memory falls by all states but the staging ring: four slots of a layer's states."""

    def peak(strategy: Any) -> int:
        model = stack(place)
        optimizer = OffloadOptimizer(
            model.named_parameters(), strategy=strategy, update_in_backward=in_backward, lr=1e-3, fused=True
        )
        train_stack(model, optimizer, place, 2)
        if not place.is_real:
            return sum(optimizer.memory_report()["device"].values())
        place.finish()
        before = torch.accelerator.memory_allocated() - total_bytes(model.parameters())
        before -= sum(optimizer.memory_report()["device"].values())
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
    staging = 4 * 2 * layer
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

"""One training run, by a plain optimizer and by OffloadOptimizer, from the same description; what both must share."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from offload.component import resolve
from offload.simulation.accelerator import SimulatedAccelerator
from tests.conftest import ThreadedRuntime, play_device  # type: ignore[import-not-found]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

TORCH_BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("torch.optim.AdamW", {"lr": 1e-2, "fused": True}),
    "AdamW-loop": ("torch.optim.AdamW", {"lr": 1e-2, "foreach": False, "amsgrad": True}),
    "Adam": ("torch.optim.Adam", {"lr": 1e-2, "fused": True}),
    # Not fused: on the CPU, torch 2.13's fused SGD reads uninitialised momentum for 16-bit parameters.
    "SGD": ("torch.optim.SGD", {"lr": 1e-1, "momentum": 0.9, "nesterov": True, "foreach": False}),
    "SGD-stateless": ("torch.optim.SGD", {"lr": 1e-1, "fused": True}),
    "Adafactor": ("torch.optim.Adafactor", {"lr": 1e-2}),
    "NAdam": ("torch.optim.NAdam", {"lr": 1e-2}),
    "RMSprop": ("torch.optim.RMSprop", {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    "Muon": ("torch.optim.Muon", {"lr": 1e-2}),
}

QUANTIZED_BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "torchao-AdamW8bit": ("torchao.optim.AdamW8bit", {"lr": 1e-2}),
    "torchao-AdamW4bit": ("torchao.optim.AdamW4bit", {"lr": 1e-2}),
    "torchao-AdamWFp8": ("torchao.optim.AdamWFp8", {"lr": 1e-2}),
    "bnb-AdamW8bit": ("bitsandbytes.optim.AdamW8bit", {"lr": 1e-2}),
    "bnb-Adam8bit": ("bitsandbytes.optim.Adam8bit", {"lr": 1e-2}),
}

PACKED_BASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"packed-{name}-{state_dtype}-{master}": (
        f"offload.optim.{name}",
        {"lr": 1e-2, "state_dtype": state_dtype, "master": master},
    )
    for name, state_dtype, master in [
        ("AdamW", "int8", "split"),
        ("AdamW", "bf16", "stochastic"),
        ("AdamW", "bf16", "split"),
        ("AdamW", "fp32", "split"),
        ("AdamW", "int8", "none"),
        ("Adam", "int8", "stochastic"),
    ]
}

BASES = {**TORCH_BASES, **QUANTIZED_BASES, **PACKED_BASES}


PLACEMENTS: dict[str, Any] = {
    "all": ".*",
    "pageable": [{"pattern": ".*", "memory": "host"}],
    # By name, or by position (group.index) where parameters have none.
    "some": [
        {"pattern": ".*", "memory": "pinned_host"},
        {"pattern": r".*/(branch\..*|layers\.0.*|0\.1|1\.0)", "memory": "device"},
    ],
}


@dataclass(frozen=True)
class Case:
    """A training run.

    Attributes:
        base: key of :data:`BASES`.
        dtype: of the parameters, key of :data:`DTYPES`.
        gradients: ``device``; ``host``, offloaded and summed in their own dtype; ``host fp32``, summed in fp32.
        naming: what the optimizer gets: ``bare`` parameters, ``named`` ones, or bare ones and the ``model``, whose
            forward then waits for the updates.
        device: ``cpu``, whatever device torch has chosen, as it is; ``threaded``, the CPU as a device with real
            threads; or an order of the simulated accelerator.
        measure: ask for the norm of the gradients in every step.
        branch: in which micro-batches, cyclically over the whole run, the model uses its side branch.
        lr_factors: of the steps, cyclically.
        zero: how gradients are dropped: ``optimizer``, ``model``, ``zeros`` (kept and zeroed), ``never``.
        is_tied: the head's weight is the embedding's.
        is_strided: one weight is the transpose of a contiguous tensor.
        placement: key of :data:`PLACEMENTS`, for strategies ``stream`` and ``auto``. With ``auto``, all that no rule of
            it matches goes another way in each step: resident, streamed, updated on the host.
        interlude: what the caller does between steps: ``none``, ``evaluate`` the model, read the ``state``.
        chunk: elements above which a tensor is cut; whole cache lines, as in earnest: the last bits of some 16-bit CPU
            kernels depend on how far an element is from a range's end. Packed states are cut at whole blocks.
    """

    base: str = "AdamW"
    strategy: str = "stream"
    in_backward: bool = False
    accumulation: int = 1
    clip: float | None = None
    dtype: str = "fp32"
    gradients: str = "device"
    naming: str = "model"
    device: str | int = "late"
    measure: bool = False
    branch: tuple[bool, ...] = (True, False, True, False, False)
    lr_factors: tuple[float, ...] = (1.0, 0.2, 2.0, 0.1)
    zero: str = "optimizer"
    chunk: int = 64
    dim: int = 12
    hidden: int = 20
    depth: int = 2
    is_tied: bool = True
    is_strided: bool = False
    placement: str = "all"
    interlude: str = "none"
    groups: int = 2
    steps: int = 3

    def __str__(self) -> str:
        default = asdict(Case())
        head = [self.base, self.strategy, "in backward" if self.in_backward else "at step", str(self.device)]
        rest = [
            f"{key}={value}"
            for key, value in asdict(self).items()
            if value != default[key] and key not in ("base", "strategy", "in_backward", "device")
        ]
        return " ".join(head + rest)

    @property
    def is_valid(self) -> bool:
        """Whether the combination has a meaning."""
        if self.placement != "all" and (self.strategy not in ("stream", "auto") or self.base == "SGD-stateless"):
            return False  # nothing to place
        if self.strategy == "resident" and (self.gradients != "device" or self.device != "cpu"):
            return False  # a resident update copies nothing, on any device
        # An update in backward frees the gradients, so that nothing stays to be zeroed or added to.
        return not (self.in_backward and (self.clip is not None or self.zero in ("zeros", "never")))

    @property
    def is_quantized(self) -> bool:
        return self.base in QUANTIZED_BASES

    @property
    def is_packed(self) -> bool:
        return self.base in PACKED_BASES

    @property
    def kwargs(self) -> dict[str, Any]:
        return BASES[self.base][1]

    def offloading(self) -> dict[str, Any]:
        """The arguments that are OffloadOptimizer's own."""
        choices: dict[str, Any] = {"strategy": self.strategy, "update_in_backward": self.in_backward}
        if self.gradients != "device":
            choices["offload_gradients"] = True
        if self.gradients == "host fp32":
            choices["accumulation_dtype"] = "fp32"
        if self.placement != "all":
            choices["offload_states"] = PLACEMENTS[self.placement]
        return choices


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int, matrices_only: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=not matrices_only)
        self.up = nn.Linear(dim, hidden, bias=not matrices_only)
        self.down = nn.Linear(hidden, dim, bias=not matrices_only)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """A language model with every kind of parameter: above the chunk size, tied, tiny, 0-dim, frozen, never used in
    forward, and used in some forwards only."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        matrices_only = case.base == "Muon"
        dim, hidden = case.dim, case.hidden
        if case.is_quantized:
            # torchao and bitsandbytes keep states of fewer than 4096 elements in fp32.
            dim, hidden = 32, 128
        elif case.is_packed:
            # Several blocks of 256 elements, and a last one that is short.
            dim, hidden = 33, 20
        self.embedding = nn.Embedding(17, dim)
        self.layers = nn.ModuleList(Block(dim, hidden, matrices_only) for _ in range(case.depth))
        self.unused = nn.Parameter(torch.randn(3, 5))
        self.branch = nn.Linear(dim, dim, bias=not matrices_only)
        self.frozen = nn.Parameter(torch.rand(1, dim), requires_grad=False)
        self.temperature = None if matrices_only else nn.Parameter(torch.ones(()))
        self.head = nn.Linear(dim, 17, bias=False)
        if case.is_strided:
            self.branch.weight = nn.Parameter(self.branch.weight.detach().clone().t())
        if case.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, use_branch: bool) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        if use_branch:
            x = x + self.branch(x)
        x = x * self.frozen
        return self.head(x if self.temperature is None else x * self.temperature)


def build_model(case: Case) -> TinyLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return TinyLM(case).to(DTYPES[case.dtype])


def param_groups(case: Case, model: nn.Module) -> list[dict[str, Any]]:
    """Groups of different ``lr`` and ``weight_decay``, over which a layer's parameters are spread."""
    groups: list[dict[str, Any]] = []
    for index in range(case.groups):
        options = {"lr": case.kwargs["lr"] / (1 + 2 * index), "weight_decay": 0.1 / (1 + index)}
        groups.append({"params": [], **options})
    for position, (name, param) in enumerate(model.named_parameters()):
        groups[position % case.groups]["params"].append((name, param) if case.naming == "named" else param)
    return [group for group in groups if group["params"]]


def between_steps(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if case.interlude == "evaluate":
        with torch.no_grad():
            model(torch.arange(3), True)
    elif case.interlude == "state":
        for state in optimizer.state_dict()["state"].values():
            for value in state.values():
                _own(value)


@dataclass
class Outcome:
    """What a run left: parameters by name, states by position, and each step's norm of all gradients."""

    params: dict[str, Tensor]
    states: dict[int, dict[str, Any]]
    norms: list[Tensor]


def set_lr(optimizer: torch.optim.Optimizer, initial: list[float], factor: float) -> None:
    """Change the learning rates as torch's schedulers do: in place where they are tensors."""
    for group, lr in zip(optimizer.param_groups, initial, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * factor)
        else:
            group["lr"] = lr * factor


def micro_batches(case: Case, step: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    generator = torch.Generator().manual_seed(step)
    for micro in range(case.accumulation):
        tokens = torch.randint(17, (2, 6), generator=generator, device="cpu")
        yield tokens[0], tokens[1], case.branch[(step * case.accumulation + micro) % len(case.branch)]


def backward(case: Case, model: nn.Module, batch: tuple[Tensor, Tensor, bool]) -> None:
    device = next(model.parameters()).device
    tokens, targets, use_branch = batch[0].to(device), batch[1].to(device), batch[2]
    loss = nn.functional.cross_entropy(model(tokens, use_branch).float(), targets)
    (loss / case.accumulation).backward()


def zero_gradients(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if case.zero == "optimizer":
        optimizer.zero_grad()
    elif case.zero == "model":
        model.zero_grad()
    elif case.zero == "zeros":
        optimizer.zero_grad(set_to_none=False)


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer, norms: list[Tensor]) -> Outcome:
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    states = optimizer.state_dict()["state"]
    return Outcome(params, {i: {k: _own(v) for k, v in state.items()} for i, state in states.items()}, norms)


def _own(value: Any) -> Any:
    if isinstance(value, dict):  # bitsandbytes saves the parts of a quantized state in a dict of their own
        return {key: _own(part) for key, part in value.items()}
    return [part.clone() for part in _plain(value)] if isinstance(value, Tensor) else value


def _plain(value: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor, or a tensor subclass such as torchao's 8-bit states, consists of."""
    if not hasattr(value, "__tensor_flatten__"):
        return [value.detach()]
    names, _ = value.__tensor_flatten__()
    return [part for name in names for part in _plain(getattr(value, name))]


def train_plain(case: Case) -> Outcome:
    """The reference: the base optimizer itself, torch's own clipping, sums in the case's dtype.

    A packed optimizer gets the factor of the clipping, instead of gradients that were rounded after they were scaled.
    """
    model = build_model(case)
    with torch.compiler.set_stance("force_eager"):
        optimizer = resolve(BASES[case.base][0], key="base")(param_groups(case, model), **case.kwargs)
        initial = [float(group["lr"]) for group in optimizer.param_groups]
        params = [param for param in model.parameters() if param.requires_grad]
        sums: dict[Tensor, Tensor] = {}
        norms = []
        for step in range(case.steps):
            set_lr(optimizer, initial, case.lr_factors[step % len(case.lr_factors)])
            for batch in micro_batches(case, step):
                backward(case, model, batch)
                if case.gradients == "host fp32":
                    for param in params:
                        if param.grad is not None:
                            sums[param] = sums.get(param, 0) + param.grad.float()
                            param.grad = None
            if case.gradients != "host fp32":
                sums = {param: param.grad for param in params if param.grad is not None}
            # Terms of the norm in the optimizer's order; the order of a sum decides its last bits.
            sums = {
                param: sums[param] for group in optimizer.param_groups for param in group["params"] if param in sums
            }
            # Stand-ins, because the gradient of a bf16 parameter cannot be fp32.
            holders = [nn.Parameter(torch.empty_like(gradient)) for gradient in sums.values()]
            for holder, gradient in zip(holders, sums.values(), strict=True):
                holder.grad = gradient
            norms.append(torch.nn.utils.get_total_norm([gradient.float() for gradient in sums.values()]))
            if case.clip is not None and case.is_packed:
                optimizer.gradient_scale = torch.clamp(case.clip / (norms[-1] + 1e-6), max=1.0)
            elif case.clip is not None:
                torch.nn.utils.clip_grads_with_norm_(holders, case.clip, norms[-1])
            for param, gradient in sums.items():
                param.grad = gradient.to(param.dtype)
            optimizer.step()
            zero_gradients(case, model, optimizer)
            if case.gradients == "host fp32":
                # The sums are what stays over steps.
                sums = sums if case.zero in ("zeros", "never") else {}
                for gradient in sums.values():
                    if case.zero == "zeros":
                        gradient.zero_()
                for param in params:
                    param.grad = None
        return outcome(model, optimizer, norms)


@contextlib.contextmanager
def playing(case: Case) -> Iterator[None]:
    """Inside, OffloadOptimizer sees the case's device and cuts tensors above the case's chunk size."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr("offload.engine.units.CHUNK_ELEMENTS", 1024 if case.is_quantized else case.chunk)
        # The device that is played has the host's kernels.
        patch.setattr("offload.machinery.is_same_everywhere", lambda base_class: True)
        if case.device == "threaded":
            play_device(patch, ThreadedRuntime())
        elif case.device != "cpu":
            # The simulator watches torch's operations, and a kernel's accesses to memory are none.
            patch.setattr("offload.optim.cpu.load", lambda: None)
            play_device(patch, stack.enter_context(SimulatedAccelerator(order=case.device)))
        yield


def build_offloaded(case: Case, model: nn.Module) -> OffloadOptimizer:
    attached = {"model": model} if case.naming == "model" else {}
    return OffloadOptimizer(
        param_groups(case, model), BASES[case.base][0], **case.offloading(), **attached, **case.kwargs
    )


def rearrange(optimizer: OffloadOptimizer, turn: int) -> None:
    """Send every portion another way than in the turn before, as far as ``auto`` may: three kinds go side by side."""
    auto = optimizer.auto
    if auto is None:
        return
    optimizer.synchronize()
    ways = {portion: (index + turn) % 3 for index, portion in enumerate(auto.portions()) if auto.is_free(portion)}
    for portion, way in ways.items():
        if portion.way == "resident" and way != 0:
            auto.lower(portion)
    auto.let_cpu_update([portion for portion, way in ways.items() if way == 1])
    for portion, way in ways.items():
        if portion.way == "stream" and way == 0:
            assert auto.lift(portion)


def run_backward(case: Case, model: nn.Module, optimizer: OffloadOptimizer, step: int) -> None:
    """All micro-batches of a step, all but the last of them marked."""
    for micro, batch in enumerate(micro_batches(case, step), 1):
        with optimizer.accumulate() if micro < case.accumulation else contextlib.nullcontext():
            backward(case, model, batch)


def train_offloaded(case: Case) -> Outcome:
    """The same through OffloadOptimizer."""
    with playing(case), torch.compiler.set_stance("force_eager"):
        model = build_model(case)
        optimizer = build_offloaded(case, model)
        initial = [float(group["lr"]) for group in optimizer.param_groups]
        norms = []
        for step in range(case.steps):
            set_lr(optimizer, initial, case.lr_factors[step % len(case.lr_factors)])
            run_backward(case, model, optimizer, step)
            if case.clip is not None:
                norms.append(optimizer.clip_grad_norm_(case.clip))
            elif case.measure:
                norms.append(optimizer.grad_norm())
            optimizer.step()
            zero_gradients(case, model, optimizer)
            between_steps(case, model, optimizer)
            rearrange(optimizer, step)
        optimizer.synchronize()
        return outcome(model, optimizer, [norm.clone() for norm in norms])


def assert_equal(actual: Outcome, expected: Outcome) -> None:
    """Parameters, states and, where the run asked for them, norms: bit for bit."""
    for name, param in expected.params.items():
        _assert_bits(name, [actual.params[name]], [param])
    _assert_states("states", actual.states, expected.states)
    for step, (norm, true_norm) in enumerate(zip(actual.norms, expected.norms, strict=False)):
        _assert_bits(f"norm of step {step}", [norm], [true_norm])


def _assert_states(name: str, actual: Any, expected: Any) -> None:
    if isinstance(expected, list):
        _assert_bits(name, actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), f"{name}: {list(actual)}, expected {list(expected)}"
        for key, value in expected.items():
            _assert_states(f"{name}.{key}", actual[key], value)
    else:
        assert actual == expected, f"{name}: {actual}, expected {expected}"


def _assert_bits(name: str, actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{name}: {a.dtype} {a.shape}, expected {b.dtype} {b.shape}"
        if not torch.equal(a, b):
            raise AssertionError(f"{name}: largest difference {(a.double() - b.double()).abs().max().item():.3e}")


# ---- covering designs

AXES: dict[str, list[Any]] = {
    "base": list(BASES),
    "strategy": ["resident", "stream", "host"],
    "in_backward": [False, True],
    "accumulation": [1, 3],
    "clip": [None, 0.5],
    "dtype": ["fp32", "bf16"],
    "gradients": ["device", "host", "host fp32"],
    "naming": ["bare", "named", "model"],
    "device": ["cpu", "threaded", "late", "early", 1],
    "measure": [False, True],
}

Target = tuple[tuple[str, Any], ...]


def targets_of(case: Case) -> Iterator[Target]:
    """The combinations of choices that a case covers: every strategy and schedule with every two other choices; of the
    two, one may be the base optimizer unless the other is the device or the naming."""
    others = [key for key in AXES if key not in ("strategy", "in_backward")]
    fixed = (("strategy", case.strategy), ("in_backward", case.in_backward))
    for a, b in combinations(others, 2):
        if "base" not in (a, b) or not {"device", "naming"} & {a, b}:
            yield (*fixed, (a, getattr(case, a)), (b, getattr(case, b)))


@functools.cache
def covering_cases(seed: int = 0) -> list[Case]:
    """Few cases that together cover whatever any valid case covers, found greedily."""
    rng = random.Random(seed)
    covered: set[Target] = set()
    cases = []
    for target in _all_targets():
        if target in covered:
            continue
        drawn = (_draw(rng, dict(target)) for _ in range(30))
        candidates = [case for case in drawn if case.is_valid]
        if not candidates:
            continue
        best = max(candidates, key=lambda case: len(set(targets_of(case)) - covered))
        covered |= set(targets_of(best))
        cases.append(best)
    return cases


def _all_targets() -> Iterable[Target]:
    found: dict[Target, None] = {}
    rng = random.Random(0)
    for strategy in AXES["strategy"]:
        for in_backward in AXES["in_backward"]:
            for a, b in combinations([key for key in AXES if key not in ("strategy", "in_backward")], 2):
                for x in AXES[a]:
                    for y in AXES[b]:
                        pinned = {"strategy": strategy, "in_backward": in_backward, a: x, b: y}
                        probe = _draw(rng, pinned)
                        target = (("strategy", strategy), ("in_backward", in_backward), (a, x), (b, y))
                        if target in set(targets_of(probe)):
                            found[target] = None
    return found


def _draw(rng: random.Random, pinned: dict[str, Any]) -> Case:
    """A random case; free axes are drawn so that the pinned ones stay possible."""
    choice = {key: pinned.get(key, rng.choice(values)) for key, values in AXES.items()}
    if choice["strategy"] == "resident":
        choice.update({key: value for key, value in (("device", "cpu"), ("gradients", "device")) if key not in pinned})
    if choice["in_backward"] and "clip" not in pinned:
        choice["clip"] = None
    return Case(**choice)


def every_case(**pinned: Any) -> Iterator[Case]:
    """All valid cases with the given choices."""
    keys = [key for key in AXES if key not in pinned]

    def extend(index: int, chosen: dict[str, Any]) -> Iterator[Case]:
        if index == len(keys):
            case = Case(**pinned, **chosen)
            if case.is_valid:
                yield case
            return
        for value in AXES[keys[index]]:
            yield from extend(index + 1, {**chosen, keys[index]: value})

    return extend(0, {})

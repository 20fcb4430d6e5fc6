"""OffloadOptimizer against the plain base optimizer, bit for bit: every strategy, schedule and kind of parameter.

Cases and references are in parity_cases.py. What is checked to be equal: parameters, states and gradient norms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import offload.engine.states
from offload import OffloadOptimizer
from offload.engine.base import Snapshots
from offload.engine.engine import Engine
from offload.engine.gradients import TakenGradient
from offload.engine.pipeline import Gradient
from offload.engine.shards import LocalParameters
from offload.engine.units import Slice
from offload.errors import UserError
from tests.engine.accelerated import repeatable
from tests.engine.parity_cases import (  # type: ignore[import-not-found]
    AXES,
    BASES,
    PACKED_BASES,
    PLACEMENTS,
    TORCH_BASES,
    Case,
    assert_equal,
    backward,
    build_model,
    build_offloaded,
    covering_cases,
    every_case,
    micro_batches,
    playing,
    run_backward,
    set_lr,
    train_offloaded,
    train_plain,
)


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_equals_the_plain_optimizer(case: Case) -> None:
    assert_equal(train_offloaded(case), train_plain(case))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["resident", "stream", "host"])
@pytest.mark.parametrize("base", BASES)
def test_equals_the_plain_optimizer_in_every_combination(base: str, strategy: str) -> None:
    """The devices take turns."""
    devices = ["cpu"] if strategy == "resident" else AXES["device"]
    for index, case in enumerate(every_case(base=base, strategy=strategy, device="cpu", measure=False)):
        case = replace(case, device=devices[index % len(devices)])
        try:
            assert_equal(train_offloaded(case), train_plain(case))
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("in_backward", [False, True], ids=["at step", "in backward"])
@pytest.mark.parametrize("strategy", ["resident", "stream"])
@pytest.mark.parametrize("base", BASES)
def test_equals_the_plain_optimizer_on_cuda(
    base: str, strategy: str, in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels, fed from the host. (Strategy host has others; test_on_accelerator.py compares it.)"""
    case = Case(base, strategy, in_backward, accumulation=2, device="cpu")
    with repeatable(monkeypatch), torch.device("cuda"):
        assert_equal(train_offloaded(case), train_plain(case))


def test_the_covering_design_covers() -> None:
    """Every strategy and schedule meets every other choice, and every parameter kind is above, below or beside the
    chunk size as its name says."""
    cases = covering_cases()
    for strategy, in_backward in itertools.product(("resident", "stream", "host"), (False, True)):
        here = [case for case in cases if (case.strategy, case.in_backward) == (strategy, in_backward)]
        assert {case.base for case in here} == set(BASES)
        assert {(case.accumulation, case.dtype) for case in here} == {
            (1, "fp32"),
            (1, "bf16"),
            (3, "fp32"),
            (3, "bf16"),
        }
        assert {case.clip for case in here} == ({None} if in_backward else {None, 0.5})
        if strategy != "resident":
            gradients, devices = ("device", "host", "host fp32"), ("cpu", "threaded", "late", "early", 1)
            met = {(case.gradients, case.device, case.accumulation) for case in here}
            assert {(g, d) for g, d, _ in met} == set(itertools.product(gradients, devices))
            assert {(g, a) for g, _, a in met} == set(itertools.product(gradients, (1, 3)))
    with playing(case := Case(naming="named")):
        optimizer = build_offloaded(case, build_model(case))
        pieces = {p: len(known) for p, known in optimizer._machinery.engine._pieces.items()}
        sizes = {(param.numel() > case.chunk, count > 1) for param, count in pieces.items()}
        assert sizes == {(True, True), (False, False)}


@pytest.mark.parametrize("device", ["late", "cpu"])
@pytest.mark.parametrize("strategy", ["stream", "host"])
def test_gradients_summed_in_bf16_are_rounded_as_they_arrive(strategy: str, device: str) -> None:
    """``accumulation_dtype=bf16`` with fp32 gradients: each sum is rounded, the addends are not."""
    case = Case("SGD-stateless", strategy, accumulation=3, branch=(True,), device=device)
    plain = build_model(case)
    sums: dict[Tensor, Tensor] = {}
    for batch in micro_batches(case, 0):
        backward(case, plain, batch)
        for param in plain.parameters():
            if param.grad is not None:
                sums[param] = (sums.get(param, 0) + param.grad).to(torch.bfloat16)
                param.grad = None
    for param, gradient in sums.items():
        param.grad = gradient.float()
    torch.optim.SGD(plain.parameters(), lr=1.0, fused=True).step()
    with playing(case):
        model = build_model(case)
        optimizer = OffloadOptimizer(
            model.parameters(),
            "torch.optim.SGD",
            lr=1.0,
            strategy=strategy,
            offload_gradients=True,
            accumulation_dtype="bf16",
        )
        run_backward(case, model, optimizer, 0)
        optimizer.step()
        optimizer.synchronize()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, expected), name


@pytest.mark.parametrize("in_backward", [False, True], ids=["at step", "in backward"])
@pytest.mark.parametrize("strategy", ["resident", "stream", "host"])
@pytest.mark.parametrize("base", ["AdamW", "AdamW-loop", "SGD"])
def test_transposed_parameters(base: str, strategy: str, in_backward: bool) -> None:
    """Fused kernels walk over memory, so that whatever they get has to lie there in the same order."""
    for device, accumulation in itertools.product(["cpu"] if strategy == "resident" else ["cpu", "late", 1], (1, 2)):
        # Whole vectors: what is left over at a tensor's end is rounded otherwise, and a host copy ends elsewhere.
        case = Case(
            base,
            strategy,
            in_backward,
            accumulation,
            device=device,
            dim=16,
            hidden=32,
            chunk=10**6,
            branch=(True,),
            is_strided=True,
        )
        assert_equal(train_offloaded(case), train_plain(case))


@pytest.mark.parametrize("device", ["late", "early", 5])
@pytest.mark.parametrize("in_backward", [False, True], ids=["at step", "in backward"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_states_that_rest_in_several_kinds_of_memory(placement: str, in_backward: bool, device: str | int) -> None:
    case = Case("AdamW", "stream", in_backward, device=device, placement=placement, branch=(True, False), hidden=16)
    assert_equal(train_offloaded(case), train_plain(case))


# ---- gradients and norms of updates in backward


IN_BACKWARD = [
    Case(strategy=strategy, in_backward=True, gradients=gradients, accumulation=accumulation, device=device)
    for strategy, gradients, device in [
        ("resident", "device", "cpu"),
        ("stream", "device", "late"),
        ("stream", "host", "late"),
        ("host", "device", "late"),
        ("host", "host", "early"),
        ("host", "host fp32", "cpu"),
    ]
    for accumulation in (1, 3)
]


@contextmanager
def after_backward(case: Case) -> Iterator[tuple[nn.Module, OffloadOptimizer]]:
    """A model and its optimizer, after the last backward of the second step, with the first step's parameters.

    Only in the first step does the engine not know which parameters are used, and waits for all of a unit.
    """
    with playing(case):
        model = build_model(case)
        optimizer = build_offloaded(case, model)
        set_lr(optimizer, [0.0] * case.groups, 0.0)
        run_backward(case, model, optimizer, 0)
        optimizer.step()
        optimizer.zero_grad()
        run_backward(case, model, optimizer, 0)
        yield model, optimizer
        optimizer.synchronize()


@pytest.mark.parametrize("case", IN_BACKWARD, ids=str)
def test_a_gradient_that_backward_consumed_cannot_be_touched(case: Case) -> None:
    with after_backward(replace(case, branch=(True,))) as (model, _):
        consumed = [param.grad for param in model.parameters() if param.grad is not None]
        assert len(consumed) == sum(p.requires_grad for p in model.parameters()) - 1  # one is never used
        for gradient in consumed:
            for touch in (lambda g: g.mul_(0.5), lambda g: g.norm(), lambda g: g + 1, lambda g: g.clone()):
                with pytest.raises(RuntimeError, match="the optimizer has already taken"):
                    touch(gradient)
        with pytest.raises(RuntimeError, match="the optimizer has already taken"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("case", IN_BACKWARD, ids=str)
def test_a_second_backward_before_step_names_accumulate(case: Case) -> None:
    with after_backward(case) as (model, optimizer):
        with pytest.raises(RuntimeError, match=r"already updated in this step.*with optimizer\.accumulate\(\)"):
            backward(case, model, next(micro_batches(case, 1)))
        optimizer.zero_grad()


@pytest.mark.parametrize("case", IN_BACKWARD, ids=str)
def test_clipping_with_an_update_in_backward_is_refused_by_name(case: Case) -> None:
    with after_backward(case) as (_, optimizer), pytest.raises(UserError, match="update_in_backward=False"):
        optimizer.clip_grad_norm_(1.0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", [*IN_BACKWARD, *(replace(case, in_backward=False) for case in IN_BACKWARD)], ids=str)
def test_norm_is_that_of_all_gradients(case: Case, dtype: str) -> None:
    """Against double precision, from gradients of single micro-batches that plain autograd made."""
    case = replace(case, dtype=dtype)
    plain = build_model(case)
    sums: dict[str, Tensor] = {}
    for batch in micro_batches(case, 0):
        if case.gradients == "host fp32":
            plain.zero_grad()
        backward(case, plain, batch)
        for name, param in plain.named_parameters():
            if param.grad is not None:
                before = sums[name] if case.gradients == "host fp32" and name in sums else 0
                sums[name] = before + param.grad.detach().double()
    true_norm = torch.cat([gradient.flatten() for gradient in sums.values()]).norm()
    with after_backward(case) as (_, optimizer):
        torch.testing.assert_close(optimizer.grad_norm().double(), true_norm, rtol=1e-6, atol=0)
        if not case.in_backward:
            largest = max(gradient.abs().max() for gradient in sums.values())
            torch.testing.assert_close(optimizer.grad_norm(float("inf")).double(), largest, rtol=1e-6, atol=0)
        optimizer.step()
        if case.in_backward:
            torch.testing.assert_close(optimizer.grad_norm().double(), true_norm, rtol=1e-6, atol=0)


# ---- drawn runs


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    """Any run that has a meaning."""
    base = draw(st.sampled_from([*TORCH_BASES, *PACKED_BASES]))
    strategy = draw(st.sampled_from(["stream", "host", "resident"]))
    can_place = strategy == "stream" and base != "SGD-stateless"
    in_backward = draw(st.booleans())
    is_resident = strategy == "resident"
    zero = ["optimizer", "model"] if in_backward else ["optimizer", "model", "zeros", "never"]
    clip = None if in_backward else draw(st.sampled_from([None, 1e-2, 0.5, 1e6]))
    if clip is not None:
        # Where gradients stay, torch would add to the clipped ones.
        zero.remove("never")
    return Case(
        base=base,
        strategy=strategy,
        in_backward=in_backward,
        accumulation=draw(st.integers(1, 4)),
        clip=clip,
        dtype=draw(st.sampled_from(["fp32", "bf16"])),
        gradients="device" if is_resident else draw(st.sampled_from(["device", "host", "host fp32"])),
        naming=draw(st.sampled_from(["model", "named", "bare"])),
        device="cpu" if is_resident else draw(st.sampled_from(["late", "early", "threaded", *range(8)])),
        measure=draw(st.booleans()),
        branch=tuple(draw(st.lists(st.booleans(), min_size=1, max_size=5))),
        lr_factors=tuple(draw(st.lists(st.sampled_from([1.0, 0.3, 2.0, 0.0]), min_size=1, max_size=4))),
        zero=draw(st.sampled_from(zero)),
        chunk=draw(st.sampled_from([64, 128, 256, 10**6])),
        dim=draw(st.integers(1, 16)),
        hidden=draw(st.integers(1, 24)),
        depth=draw(st.integers(0, 3)),
        is_tied=draw(st.booleans()),
        placement=draw(st.sampled_from([*PLACEMENTS])) if can_place else "all",
        interlude=draw(st.sampled_from(["none", "evaluate", "state"])),
        groups=draw(st.integers(1, 3)),
        steps=draw(st.integers(1, 4)),
    )


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_equals_the_plain_optimizer_in_drawn_runs(case: Case) -> None:
    assert_equal(train_offloaded(case), train_plain(case))


def loses_what_was_there(patch: pytest.MonkeyPatch) -> None:
    """What autograd adds to a gradient of the step before takes its place."""
    original = Engine._take_addend

    def take(engine: Engine, param: nn.Parameter, is_final: bool) -> bool:
        gradient = param.grad
        if isinstance(gradient, TakenGradient) and gradient.rest is not None:
            if gradient.on_host:
                gradient.wait()
            gradient.rest.zero_()
        return original(engine, param, is_final)

    patch.setattr(Engine, "_take_addend", take)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("naming", ["model", "named"])
@pytest.mark.parametrize(
    ("strategy", "gradients"),
    [("stream", "device"), ("stream", "host"), ("stream", "host fp32"), ("host", "device"), ("host", "host")],
)
def test_gradients_that_nobody_zeroes_add_up_over_steps(
    strategy: str, gradients: str, naming: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with torch. Where the step leaves a gradient on the device as it is, autograd adds to it by itself."""
    case = Case("AdamW", strategy, gradients=gradients, naming=naming, accumulation=accumulation, zero="never")
    case = replace(case, device="threaded", branch=(True,))
    expected = train_plain(case)
    assert_equal(train_offloaded(case), expected)
    if gradients != "device" or naming == "model":
        loses_what_was_there(monkeypatch)
        with pytest.raises(AssertionError, match="largest difference"):
            assert_equal(train_offloaded(case), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("gradients", ["host", "host fp32"])
@pytest.mark.parametrize("strategy", ["stream", "host"])
def test_the_norm_of_a_gradient_that_was_zeroed_where_it_rests(strategy: str, gradients: str, dtype: str) -> None:
    """A branch that the last step does not use keeps its zeros, and the norm that it had is forgotten."""
    case = Case(
        "AdamW", strategy, gradients=gradients, dtype=dtype, naming="model", zero="zeros", branch=(False, True), steps=3
    )
    case = replace(case, device="late", measure=True)
    assert_equal(train_offloaded(case), train_plain(case))


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_equals_the_plain_optimizer_in_many_drawn_runs(case: Case) -> None:
    assert_equal(train_offloaded(case), train_plain(case))


# ---- broken updates


def skip_update(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)


def skip_one_update(patch: pytest.MonkeyPatch) -> None:
    """The third call of the base optimizer: one piece of the first step, or a whole later step."""
    original, calls = torch.optim.AdamW.step, itertools.count()
    patch.setattr("offload.machinery.forecast", lambda *args: None)  # takes steps of its own
    patch.setattr(torch.optim.AdamW, "step", lambda self: None if next(calls) == 2 else original(self))


def double_update(patch: pytest.MonkeyPatch) -> None:
    original = torch.optim.AdamW.step
    patch.setattr(torch.optim.AdamW, "step", lambda self: (original(self), original(self)))


def stale_hyperparameters(patch: pytest.MonkeyPatch) -> None:
    """Those of the first update, for ever."""
    original, first = Snapshots.take, []

    def take(snapshots: Snapshots, groups: Any) -> Any:
        first.append(original(snapshots, groups))
        return first[0]

    patch.setattr(Snapshots, "take", take)
    patch.setattr(OffloadOptimizer, "_push_groups", lambda self: None)


def stale_gradient(patch: pytest.MonkeyPatch) -> None:
    """That of the step before; in the first step, the right one."""
    original, in_place, previous = Engine._gradient, Engine.gradients_in_place, {}

    def gradient(engine: Engine, param: nn.Parameter) -> Gradient | None:
        now = original(engine, param)
        if now is None:
            return None
        now.arrived().synchronize()
        mine = Gradient(now.values.clone())
        stale = previous.pop(param, mine)
        previous[param] = mine
        return stale

    @contextmanager
    def gradients_in_place(engine: Engine, base: torch.optim.Optimizer, parts: LocalParameters) -> Iterator[None]:
        with in_place(engine, base, parts):
            for param in engine._pieces:
                if param.grad is not None:
                    mine = param.grad.clone()
                    param.grad = previous.pop(param, mine)
                    previous[param] = mine
            yield

    patch.setattr(Engine, "_gradient", gradient)
    patch.setattr(Engine, "gradients_in_place", gradients_in_place)


def one_micro_batch_lost(patch: pytest.MonkeyPatch) -> None:
    """The first of each step."""
    original = Engine._gradient_ready

    def gradient_ready(engine: Engine, param: nn.Parameter) -> None:
        original(engine, param)
        if engine.accumulating:
            param.grad = None

    patch.setattr(Engine, "_gradient_ready", gradient_ready)


def scale_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "scale_gradients", lambda self, factor: None)


def copies_lost(direction: str) -> Callable[[pytest.MonkeyPatch], None]:
    def lose(patch: pytest.MonkeyPatch) -> None:
        from tests.conftest import ThreadedRuntime  # type: ignore[import-not-found]

        original = ThreadedRuntime.copy

        def copy(self: Any, dst: Tensor, src: Tensor, way: str, after: Any = (), name: str = "") -> Any:
            if way == direction:
                return self.record()
            return original(self, dst, src, way, after, name)

        patch.setattr(ThreadedRuntime, "copy", copy)

    return lose


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "update skipped": skip_update,
    "one update skipped": skip_one_update,
    "update doubled": double_update,
    "stale hyperparameters": stale_hyperparameters,
    "stale gradient": stale_gradient,
    "micro-batch lost": one_micro_batch_lost,
    "clipping lost": scale_lost,
    "copies up lost": copies_lost("up"),
    "copies down lost": copies_lost("down"),
}

FAMILIES = [
    Case(base="AdamW", strategy=strategy, in_backward=in_backward, gradients=gradients, accumulation=2, clip=clip)
    for strategy, gradients in [
        ("resident", "device"),
        ("stream", "device"),
        ("stream", "host"),
        ("host", "device"),
        ("host", "host"),
        ("host", "host fp32"),
    ]
    for in_backward, clip in [(False, 0.05), (True, None)]
]


def always_first_range(patch: pytest.MonkeyPatch) -> None:
    """A range is taken for the beginning of its parameter."""
    original = offload.engine.states.Entry
    patch.setattr("offload.engine.states.Entry", lambda *fields: replace(original(*fields), start=0))


def another_parameter(patch: pytest.MonkeyPatch) -> None:
    """A parameter's position is off by one."""
    original = offload.engine.states.Entry
    patch.setattr(
        "offload.engine.states.Entry",
        lambda group, position, *fields: original(group, position + 1, *fields),
    )


def blocks_shifted(patch: pytest.MonkeyPatch) -> None:
    """A range has the scale of the block before its own."""
    original = Slice.of

    def of(part: Slice, tensor: Tensor, block: int = 1) -> Tensor:
        first = part.start // block
        return tensor.view(-1)[first - 1 : first] if block > 1 and part.start else original(part, tensor, block)

    patch.setattr(Slice, "of", of)


def scale_not_folded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("offload.engine.base.scaled_gradients", lambda base, scale: nullcontext())
    patch.setattr("offload.engine.engine.scaled_gradients", lambda base, scale: nullcontext())


PACKED_MUTATIONS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "start lost": ("packed-AdamW-bf16-stochastic", always_first_range),
    "wrong position": ("packed-AdamW-bf16-split", another_parameter),
    "blocks shifted": ("packed-AdamW-int8-split", blocks_shifted),
    "scale not folded": ("packed-AdamW-int8-none", scale_not_folded),
}


@pytest.mark.parametrize("in_backward", [False, True], ids=["at step", "in backward"])
@pytest.mark.parametrize("strategy", ["stream", "host", "resident"])
@pytest.mark.parametrize("mutation", PACKED_MUTATIONS)
def test_parity_goes_red_when_ranges_and_scales_are_mistaken(
    mutation: str, strategy: str, in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, broken = PACKED_MUTATIONS[mutation]
    clip = None if in_backward else 0.05
    if mutation == "scale not folded" and clip is None:
        pytest.skip("clipping is refused")
    if strategy == "resident" and mutation != "scale not folded" and not (mutation == "wrong position" and in_backward):
        pytest.skip("it updates whole parameters, and at step all of them together")
    device = "cpu" if strategy == "resident" else "threaded"
    case = Case(base, strategy, in_backward, clip=clip, dtype="bf16", device=device, branch=(True,))
    expected = train_plain(case)
    assert_equal(train_offloaded(case), expected)
    broken(monkeypatch)
    with pytest.raises(AssertionError, match="largest difference"):
        assert_equal(train_offloaded(case), expected)


def mutations() -> Iterator[Any]:
    for case, mutation in itertools.product(FAMILIES, MUTATIONS):
        if mutation == "clipping lost" and case.clip is None:
            continue  # refused
        if "copies" in mutation and case.strategy == "resident":
            continue  # makes none
        if case.strategy == "resident" and mutation == "micro-batch lost" and not case.in_backward:
            continue  # autograd's own sum; the engine has no hand in it
        yield pytest.param(case, mutation, id=f"{mutation}-{case}")


@pytest.mark.parametrize(("case", "mutation"), mutations())
def test_parity_goes_red_when_the_update_is_broken(case: Case, mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(case, device="cpu" if case.strategy == "resident" else "threaded", branch=(True,))
    expected = train_plain(case)
    assert_equal(train_offloaded(case), expected)
    MUTATIONS[mutation](monkeypatch)
    with pytest.raises(AssertionError, match="largest difference"):
        assert_equal(train_offloaded(case), expected)

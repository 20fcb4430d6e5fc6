"""OffloadOptimizer against the plain base optimizer, elementwise; broken updates go red in engine/test_parity.py."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.optim
from offload import OffloadOptimizer
from offload.errors import UserError

STEPS = 20

Builder = Callable[..., OffloadOptimizer]

HOST = {"strategy": "host"}
HOST_GRADIENTS = {"strategy": "host", "offload_gradients": True}
STRATEGIES = [{"strategy": "resident"}, HOST, HOST_GRADIENTS]


def name(value: Any) -> str:
    return "-".join(str(v) for v in value.values()) if isinstance(value, dict) else str(value)


@pytest.fixture(params=["shared memory", "separate memory"])
def memory(request: pytest.FixtureRequest) -> str:
    """Runs a test with the CPU as it is, and as a device with late copies."""
    if request.param == "separate memory":
        request.getfixturevalue("simulated")
    return request.param


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 7)).to(
        dtype
    )


def batches(accumulation: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield [
            (
                torch.randint(50, (6,), generator=generator),
                torch.randint(7, (6,), generator=generator),
            )
            for _ in range(accumulation)
        ]


def backward(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], accumulation: int) -> None:
    inputs, targets = batch
    logits = model(inputs).float()
    (nn.functional.cross_entropy(logits, targets, reduction="sum") / (6 * accumulation)).backward()


def train_plain(
    optimizer_class: type[torch.optim.Optimizer], accumulation: int, clip: float | None, **kwargs: Any
) -> nn.Module:
    dtype = kwargs.pop("dtype", torch.float32)
    model = make_model(dtype)
    optimizer = optimizer_class(model.parameters(), **kwargs)
    for step in batches(accumulation):
        for batch in step:
            backward(model, batch, accumulation)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def train_offloaded(optimizer_class: str, accumulation: int, clip: float | None, **kwargs: Any) -> nn.Module:
    model = make_model(kwargs.pop("dtype", torch.float32))
    optimizer = OffloadOptimizer(model.parameters(), optimizer_class, **kwargs)
    for step in batches(accumulation):
        for batch in step[:-1]:
            with optimizer.accumulate():
                backward(model, batch, accumulation)
        backward(model, step[-1], accumulation)
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return model


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    for (key, a), (_, b) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(a, b), f"{key}: largest difference {(a - b).abs().max().item():.3e}"


@pytest.fixture(scope="module")
def trained_plainly() -> dict[str, nn.Module]:
    return {}


@pytest.fixture
def expected(
    trained_plainly: dict[str, nn.Module],
    optimizer_class: str,
    kwargs: dict[str, Any],
    accumulation: int,
    clip: float | None,
) -> nn.Module:
    """The same for every strategy and memory, so trained once."""
    key = str((optimizer_class, kwargs, accumulation, clip))
    if key not in trained_plainly:
        trained_plainly[key] = train_plain(getattr(torch.optim, optimizer_class), accumulation, clip, **kwargs)
    return trained_plainly[key]


@pytest.mark.parametrize("clip", [None, 0.5], ids=["no clip", "clip 0.5"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=name)
@pytest.mark.parametrize(
    ("optimizer_class", "kwargs"),
    [
        ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
        ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}),
        ("SGD", {"lr": 1e-1, "momentum": 0.9, "nesterov": True, "fused": True}),
        ("Adafactor", {"lr": 1e-2}),
        ("NAdam", {"lr": 1e-2}),
        ("RMSprop", {"lr": 1e-2}),
    ],
    ids=["AdamW-fused", "AdamW-loop", "SGD", "Adafactor", "NAdam", "RMSprop"],
)
def test_equals_the_plain_optimizer_bit_for_bit(
    expected: nn.Module,  # before the memory, which would watch it being trained
    memory: str,
    strategy: dict[str, Any],
    optimizer_class: str,
    kwargs: dict[str, Any],
    accumulation: int,
    clip: float | None,
) -> None:
    actual = train_offloaded(f"torch.optim.{optimizer_class}", accumulation, clip, **strategy, **kwargs)
    assert_same(actual, expected)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name)
def test_bf16_equals_the_plain_optimizer_bit_for_bit(memory: str, strategy: dict[str, Any]) -> None:
    kwargs = {"lr": 1e-2, "fused": True, "dtype": torch.bfloat16}
    assert_same(
        train_offloaded("torch.optim.AdamW", 3, None, **strategy, **kwargs),
        train_plain(torch.optim.AdamW, 3, None, **kwargs),
    )


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name)
def test_two_clip_values_give_two_trajectories(memory: str, strategy: dict[str, Any]) -> None:
    tight = train_offloaded("torch.optim.SGD", 1, 0.1, lr=0.1, **strategy)
    loose = train_offloaded("torch.optim.SGD", 1, 0.2, lr=0.1, **strategy)
    difference = [(a - b).abs().max() for a, b in zip(tight.parameters(), loose.parameters(), strict=True)]
    assert min(difference) > 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name)
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=STEPS + 1),
    ],
    ids=["LambdaLR", "CosineAnnealingLR", "OneCycleLR"],
)
def test_schedulers_and_groups(memory: str, strategy: dict[str, Any], scheduler: Any) -> None:
    def train(build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> nn.Module:
        model = make_model()
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        optimizer = build([{"params": decay, "weight_decay": 0.2}, {"params": rest, "lr": 3e-3}])
        schedule = scheduler(optimizer)
        for step in batches(1):
            backward(model, step[0], 1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return model

    expected = train(lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0, fused=True))
    actual = train(lambda g: OffloadOptimizer(g, lr=1e-2, weight_decay=0.0, fused=True, **strategy))
    assert_same(actual, expected)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name)
def test_tensor_learning_rate_is_read_at_update_time(memory: str, strategy: dict[str, Any]) -> None:
    def train(build: Callable[..., torch.optim.Optimizer]) -> nn.Module:
        model = make_model()
        lr = torch.tensor(1e-2)
        optimizer = build(model.parameters(), lr=lr, fused=True)
        for index, step in enumerate(batches(1)):
            lr.fill_(1e-2 / (1 + index))
            backward(model, step[0], 1)
            optimizer.step()
            optimizer.zero_grad()
        return model

    assert_same(train(lambda p, **k: OffloadOptimizer(p, **strategy, **k)), train(torch.optim.AdamW))


def one_step(optimizer: torch.optim.Optimizer, model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = (torch.randint(50, (6,), generator=generator), torch.randint(7, (6,), generator=generator))
    backward(model, batch, 1)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("target", [*STRATEGIES, None], ids=lambda v: "plain AdamW" if v is None else name(v))
@pytest.mark.parametrize("source", [*STRATEGIES, None], ids=lambda v: "plain AdamW" if v is None else name(v))
def test_state_moves_between_strategies_and_the_plain_optimizer(
    memory: str, source: dict[str, Any] | None, target: dict[str, Any] | None
) -> None:
    def build(model: nn.Module, strategy: dict[str, Any] | None) -> torch.optim.Optimizer:
        if strategy is None:
            return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return OffloadOptimizer(model.parameters(), lr=1e-2, fused=True, **strategy)

    model = make_model()
    optimizer = build(model, source)
    for seed in range(5):
        one_step(optimizer, model, seed)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    del optimizer
    reference = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    reference.load_state_dict(copy.deepcopy(saved))
    for seed in range(5, 10):
        one_step(reference, model, seed)

    resumed = make_model()
    resumed.load_state_dict(weights)
    optimizer = build(resumed, target)
    optimizer.load_state_dict(saved)
    for seed in range(5, 10):
        one_step(optimizer, resumed, seed)
    assert_same(resumed, model)


def test_loading_does_not_share_state_with_the_source() -> None:
    model, other = make_model(), make_model()
    source = OffloadOptimizer(model.parameters(), lr=1e-2)
    one_step(source, model, 0)
    target = OffloadOptimizer(other.parameters(), lr=1e-2)
    target.load_state_dict(source.state_dict())
    before = copy.deepcopy(source.state_dict()["state"][1]["exp_avg"])
    one_step(target, other, 1)
    assert torch.equal(source.state_dict()["state"][1]["exp_avg"], before)


def test_loading_keeps_the_dtype_of_states() -> None:
    model = make_model(torch.bfloat16)
    optimizer = OffloadOptimizer(model.parameters(), lr=1e-2)
    one_step(optimizer, model, 0)
    state = optimizer.state_dict()
    state["state"][1]["exp_avg"] = torch.full_like(state["state"][1]["exp_avg"], 1 / 3, dtype=torch.float32)
    optimizer.load_state_dict(state)
    loaded = optimizer.state_dict()["state"][1]["exp_avg"]
    assert loaded.dtype == torch.float32 and torch.equal(loaded, state["state"][1]["exp_avg"])


def test_loading_states_of_other_shapes_names_the_parameter() -> None:
    model = make_model()
    optimizer = OffloadOptimizer(model.named_parameters(), lr=1e-2)
    one_step(optimizer, model, 0)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"parameter 1\.weight has shape \(3,\), expected \(33, 24\)"):
        optimizer.load_state_dict(state)
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match=r"sizes \[6\].*sizes \[7\]"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("clip", ["torch", "optimizer", "scale"])
def test_a_taken_gradient_cannot_be_touched_silently(memory: str, clip: str) -> None:
    model = make_model()
    optimizer = OffloadOptimizer(model.parameters(), lr=1e-2, offload_gradients=True)
    backward(model, next(batches(1))[0], 1)
    if clip == "optimizer":
        assert optimizer.clip_grad_norm_(1.0) > 0
        return
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(max_norm\)"):
        if clip == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            for param in model.parameters():
                assert param.grad is not None
                param.grad.mul_(0.5)


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=name)
def test_rescaling_a_gradient_on_the_device_takes_effect(memory: str, strategy: dict[str, Any]) -> None:
    """A gradient that still rests on the device may be changed until step()."""
    models = [make_model(), make_model()]
    optimizers = [
        OffloadOptimizer(models[0].parameters(), "torch.optim.SGD", lr=0.1, fused=True, **strategy),
        torch.optim.SGD(models[1].parameters(), lr=0.1, fused=True),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in batches(1):
            backward(model, step[0], 1)
            for param in model.parameters():
                assert param.grad is not None
                param.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*models)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_without_zero_grad_and_with_zeroing(memory: str, strategy: dict[str, Any], set_to_none: bool) -> None:
    """As in torch: gradients stay until they are dropped or zeroed, by the optimizer or by the model."""
    models = [make_model(), make_model()]
    optimizers = [
        OffloadOptimizer(models[0].parameters(), "torch.optim.SGD", lr=0.1, fused=True, **strategy),
        torch.optim.SGD(models[1].parameters(), lr=0.1, fused=True),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        for index, step in enumerate(batches(1)):
            backward(model, step[0], 1)
            optimizer.step()
            if index % 3 == 1:
                optimizer.zero_grad(set_to_none=set_to_none)
            if index % 3 == 2:
                model.zero_grad(set_to_none=set_to_none)
    assert_same(*models)


def test_missing_gradients_and_frozen_parameters(memory: str) -> None:
    models = [make_model(), make_model()]
    for model in models:
        model[1].weight.requires_grad_(False)
    optimizers = [
        OffloadOptimizer(models[0].parameters(), lr=1e-2),
        torch.optim.AdamW(models[1].parameters(), lr=1e-2, fused=True),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        for seed in range(4):
            one_step(optimizer, model, seed)
        model[1].weight.requires_grad_(True)
        for seed in range(4, 8):
            one_step(optimizer, model, seed)
    assert_same(*models)


def test_a_parameter_group_added_later(memory: str) -> None:
    models = [make_model(), make_model()]
    optimizers = [
        OffloadOptimizer(models[0][:2].parameters(), lr=1e-2),
        torch.optim.AdamW(models[1][:2].parameters(), lr=1e-2, fused=True),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        one_step(optimizer, model, 0)
        optimizer.add_param_group({"params": model[3:].parameters(), "lr": 5e-3})
        for seed in range(4):
            one_step(optimizer, model, seed)
    assert_same(*models)
    assert len(optimizers[0].state_dict()["state"]) == len(optimizers[1].state_dict()["state"])


@pytest.mark.parametrize("strategy", ["stream", "host", "resident"])
def test_random_bits_depend_on_a_parameters_position_over_all_groups(
    threaded: Any, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Also with a group that is added later; stochastic rounding shows it. Some parameters have ranges."""
    monkeypatch.setattr("offload.engine.units.CHUNK_ELEMENTS", 256)
    models = [make_model(torch.bfloat16) for _ in range(3)]
    options = {"lr": 1e-2, "state_dtype": "bf16", "master": "stochastic"}

    def start(params: Any, is_plain: bool) -> torch.optim.Optimizer:
        if is_plain:
            return offload.optim.AdamW(params, **options)
        return OffloadOptimizer(params, "offload.optim.AdamW", strategy=strategy, **options)

    for model, is_plain in zip(models, [True, False, True], strict=True):
        optimizer = start(model[:2].parameters(), is_plain)
        one_step(optimizer, model, 0)
        later = [*model[3:].parameters()]
        if model is models[2]:
            later.reverse()
        optimizer.add_param_group({"params": later, "lr": 5e-3})
        for seed in range(3):
            one_step(optimizer, model, seed)
    assert_same(models[1], models[0])
    with pytest.raises(AssertionError):
        assert_same(models[2], models[0])


@pytest.mark.parametrize("in_closure", [False, True], ids=["before", "in closure"])
@pytest.mark.parametrize("strategy", ["stream", "host", "resident"])
def test_a_packed_optimizer_clips_while_it_updates(threaded: Any, strategy: str, in_closure: bool) -> None:
    """The factor multiplies in fp32, and for one step: no gradient is rounded for it, with any strategy."""
    options = {"lr": 1e-2, "state_dtype": "fp32", "master": "split"}
    models = [make_model(torch.bfloat16) for _ in range(2)]
    plain = offload.optim.AdamW(models[0].parameters(), **options)
    optimizer = OffloadOptimizer(models[1].parameters(), "offload.optim.AdamW", strategy=strategy, **options)
    for step, (batch,) in zip(range(3), batches(1), strict=False):
        backward(models[0], batch, 1)
        if step < 2:  # not in the last
            norm = torch.nn.utils.get_total_norm([p.grad.float() for p in models[0].parameters()])
            plain.gradient_scale = 0.1 / (norm + 1e-6)
        plain.step()
        plain.gradient_scale = None
        plain.zero_grad()

        def clipped(batch: Any = batch, clips: bool = step < 2) -> None:
            optimizer.zero_grad()
            backward(models[1], batch, 1)
            if clips:
                optimizer.clip_grad_norm_(0.1)

        if in_closure:
            optimizer.step(clipped)
        else:
            clipped()
            optimizer.step()
    assert_same(models[1], models[0])
    assert not hasattr(optimizer, "gradient_scale") and optimizer.base_optimizer.gradient_scale is None


class _StepsAtOnce(torch.optim.SGD):
    """Not known to update each parameter by itself."""


@pytest.mark.parametrize("accumulation_dtype", [None, "fp32"])
def test_clipping_an_optimizer_that_is_stepped_with_everything(threaded: Any, accumulation_dtype: Any) -> None:
    models = [make_model(torch.bfloat16) for _ in range(2)]
    plain = torch.optim.SGD(models[0].parameters(), lr=0.1, foreach=False)
    optimizer = OffloadOptimizer(
        models[1].parameters(),
        _StepsAtOnce,
        lr=0.1,
        foreach=False,
        offload_gradients=True,
        accumulation_dtype=accumulation_dtype,
    )
    for (batch,), _ in zip(batches(1), range(3), strict=False):
        for model in models:
            backward(model, batch, 1)
        norm = torch.nn.utils.get_total_norm([p.grad.float() for p in models[0].parameters()])
        torch.nn.utils.clip_grads_with_norm_(models[0].parameters(), 0.1, norm)
        plain.step()
        plain.zero_grad()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(models[1], models[0])


def test_tied_weights_are_updated_once(memory: str) -> None:
    def train(build: Callable[[nn.Module], torch.optim.Optimizer]) -> nn.Module:
        torch.manual_seed(0)
        embedding, head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        head.weight = embedding.weight
        model = nn.Sequential(embedding, head)
        optimizer = build(model)
        for seed in range(10):
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(7, (6,), generator=generator)
            nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    for strategy in STRATEGIES:
        assert_same(
            train(lambda m, s=strategy: OffloadOptimizer(m.parameters(), lr=1e-2, fused=True, **s)),  # type: ignore[misc]
            train(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)),
        )


@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=name)
def test_loading_parameters_behind_the_optimizer_is_detected(simulated: Any, strategy: dict[str, Any]) -> None:
    model = make_model()
    optimizer = OffloadOptimizer(model.named_parameters(), lr=1e-2, **strategy)
    model.load_state_dict(make_model().state_dict())
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight was changed.*sync_from_model"):
        one_step(optimizer, model, 0)
    optimizer.zero_grad()
    optimizer.sync_from_model()
    reference = make_model()
    one_step(optimizer, model, 0)
    one_step(torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True), reference, 0)
    assert_same(model, reference)


def test_moving_a_cpu_model_behind_the_optimizer() -> None:
    """Where nothing is copied, parameters may be given other memory, as with any torch optimizer."""
    models = [make_model(), make_model()]
    optimizers = [
        OffloadOptimizer(models[0].parameters(), lr=1e-2),
        torch.optim.AdamW(models[1].parameters(), lr=1e-2, fused=True),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        one_step(optimizer, model, 0)
        model.to(torch.float64).to(torch.float32)
        one_step(optimizer, model, 1)
    assert_same(*models)


def test_norm_counts_every_gradient_wherever_it_rests(memory: str) -> None:
    for strategy in STRATEGIES:
        models = [make_model(), make_model()]
        optimizer = OffloadOptimizer(models[0].parameters(), lr=1e-2, **strategy)
        for step in list(batches(2))[:2]:
            for model in models:
                model.zero_grad()
                for batch in step:
                    backward(model, batch, 2)
            expected = torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.01)
            assert torch.equal(optimizer.clip_grad_norm_(0.01), expected)
            torch.testing.assert_close(optimizer.grad_norm(), torch.tensor(0.01), rtol=1e-3, atol=0)
            optimizer.zero_grad()


def test_bf16_norm_is_that_of_the_fp32_values(memory: str) -> None:
    model = make_model(torch.bfloat16)
    optimizer = OffloadOptimizer(model.parameters(), lr=1e-2, offload_gradients=True)
    reference = make_model(torch.bfloat16)
    for m in (model, reference):
        backward(m, next(batches(1))[0], 1)
    exact = torch.cat([p.grad.double().flatten() for p in reference.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(optimizer.grad_norm().double(), exact, rtol=1e-6, atol=0)


def test_norm_after_a_clipped_step_is_that_of_the_clipped_gradients(memory: str) -> None:
    """As in torch, where clipping scales the gradients that stay until they are dropped."""
    model = make_model()
    optimizer = OffloadOptimizer(model.parameters(), lr=1e-2, offload_gradients=True)
    for seed in range(2):
        optimizer.clip_grad_norm_(0.01)
        one_step(optimizer, model, seed)
    backward(model, next(batches(1))[0], 1)
    assert optimizer.clip_grad_norm_(0.01) > 0.1
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm(), torch.tensor(0.01), rtol=1e-3, atol=0)


def test_non_finite_norm() -> None:
    model = make_model()
    optimizer = OffloadOptimizer(model.parameters(), lr=1e-2)
    backward(model, next(batches(1))[0], 1)
    model[1].weight.grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="nan"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_memory_report_counts_slabs_and_state(simulated: Any) -> None:
    model = make_model()
    optimizer = OffloadOptimizer(model.parameters(), lr=1e-2, offload_gradients=True)
    one_step(optimizer, model, 0)
    report = optimizer.memory_report()
    nbytes = sum(p.nbytes for p in model.parameters())
    for purpose in ("parameters", "gradients"):
        assert nbytes <= report["pinned_host"][purpose] <= 2 * (nbytes + 64 * 7)
    state = optimizer.state_dict()["state"].values()
    assert report["host"]["optimizer_state"] == sum(v.nbytes for s in state for v in s.values())


def test_each_step_moves_every_byte_once_each_way(simulated: Any) -> None:
    model = make_model()
    optimizer = OffloadOptimizer(model.parameters(), lr=1e-2)
    nbytes = sum(p.nbytes for p in model.parameters())
    one_step(optimizer, model, 0)
    assert simulated.copied_bytes == {"down": nbytes, "up": nbytes}


def test_a_failing_pin_falls_back_with_one_warning(simulated: Any) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nsecond line")

    simulated.empty_pinned = refuse
    model = make_model()
    with pytest.warns(UserWarning, match="out of memory") as warned:
        optimizer = OffloadOptimizer(model.parameters(), lr=1e-2)
    assert len(warned) == 1
    assert "pinned_host" not in optimizer.memory_report()
    one_step(optimizer, model, 0)


def test_optimizer_hooks_closure_and_defaults_behave_as_in_torch(memory: str) -> None:
    model = make_model()
    optimizer = OffloadOptimizer(model.parameters(), lr=1e-2, weight_decay=0.3)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["weight_decay"] == 0.3 and optimizer.param_groups[0]["weight_decay"] == 0.3
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda _, state: calls.append("state"))

    def closure() -> float:
        calls.append("closure")
        backward(model, next(batches(1))[0], 1)
        return 1.5

    assert optimizer.step(closure) == 1.5
    optimizer.state_dict()
    assert calls == ["pre", "closure", "post", "state"]
    assert set(optimizer.state) == set(model.parameters())
    assert optimizer.state[model[1].weight]["exp_avg"].shape == (33, 24)


def test_a_discarded_optimizer_leaves_no_hooks_behind() -> None:
    model = make_model()
    optimizer = OffloadOptimizer(model.parameters(), lr=1e-2, offload_gradients=True)
    del optimizer
    backward(model, next(batches(1))[0], 1)
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"strategy": "hots"}, "got 'hots', expected one of host, stream, resident, auto; did you mean host?"),
        ({"strategy": "resident", "offload_gradients": True}, "strategy=stream or host"),
        ({"optimizer_class": "torch.optim.Adamm"}, "torch.optim.Adam"),
        ({"optimizer_class": "torch.nn.Linear"}, "not a torch.optim.Optimizer"),
        ({"optimizer_class": "torch.optim.LBFGS"}, "strategy=resident"),
        ({"optimizer_class": "torch.optim.SparseAdam"}, "strategy=resident"),
        ({"optimizer_class": "offload.OffloadOptimizer"}, "cannot offload itself"),
    ],
    ids=lambda v: None if isinstance(v, str) else name(v),
)
def test_refusals_name_the_key_and_the_way_out(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        OffloadOptimizer(make_model().parameters(), **kwargs)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("optimizer.")


def test_lbfgs_without_a_closure_is_refused_by_name() -> None:
    model = make_model()
    optimizer = OffloadOptimizer(model.parameters(), torch.optim.LBFGS, strategy="resident")
    with pytest.raises(UserError, match=r"LBFGS needs a closure .* call step\(closure\)"):
        optimizer.step()


def test_lbfgs_with_a_closure_is_torchs() -> None:
    def train(build: Any) -> list[torch.Tensor]:
        model = make_model()
        (inputs, targets), *_ = next(batches(1))
        optimizer = build(model.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return [p.detach() for p in model.parameters()]

    ours = train(lambda params: OffloadOptimizer(params, torch.optim.LBFGS, strategy="resident", lr=0.1))
    assert all(map(torch.equal, ours, train(lambda params: torch.optim.LBFGS(params, lr=0.1))))


@pytest.mark.parametrize("strategy", ["resident", "host", "stream"])
def test_parameters_of_other_shapes_are_not_left_untrained_in_silence(strategy: Any) -> None:
    optimizer = OffloadOptimizer([nn.Parameter(torch.ones(2))], strategy=strategy, lr=0.1)
    other = nn.Parameter(torch.ones(3))
    optimizer.param_groups[0]["params"] = [other]
    other.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"are others \(one has the shape \(3,\).*build the Off"):
        optimizer.step()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("strategy", ["resident", "host", "stream", "auto"])
def test_parameters_that_were_exchanged_are_trained(
    threaded: Any, strategy: Any, in_backward: bool, in_place: bool
) -> None:
    """Between two steps: with their names, settings and states, as by load_state_dict(assign=True)."""

    def train(optimizer: Any, model: nn.Module) -> list[Tensor]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            if step == 2:
                model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
                for group, names in zip(optimizer.param_groups, (["weight"], ["bias"]), strict=True):
                    exchanged = [model.get_parameter(f"0.{name}") for name in names]
                    if isinstance(optimizer, OffloadOptimizer) and in_place:
                        group["params"][:] = exchanged
                    elif isinstance(optimizer, OffloadOptimizer):
                        group["params"] = exchanged
                    else:
                        for old, new in zip(group["params"], exchanged, strict=True):
                            optimizer.state[new] = optimizer.state.pop(old)
                        group["params"] = exchanged
            model(torch.full((2, 3), float(step))).square().sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        moments = [value.clone() for values in state.values() for _, value in sorted(values.items())]
        return [*(param.detach().clone() for param in model.parameters()), *moments]

    def made() -> tuple[nn.Module, list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2))
        named = list(model.named_parameters())
        return model, [{"params": named[:1], "weight_decay": 0.5}, {"params": named[1:]}]

    model, groups = made()
    wanted = train(torch.optim.AdamW(groups, lr=0.1, fused=True), model)
    model, groups = made()
    optimizer = OffloadOptimizer(
        groups, strategy=strategy, model=model, update_in_backward=in_backward, lr=0.1, fused=True
    )
    old = [weakref.ref(param) for param in model.parameters()]
    slabs = weakref.ref(optimizer._machinery.memory)
    assert all(map(torch.equal, train(optimizer, model), wanted))
    del groups
    gc.collect()
    assert slabs() is None and all(param() is None for param in old)


@pytest.mark.parametrize("strategy", ["resident", "host", "stream", "auto"])
def test_parameters_are_not_kept_where_shards_are_awaited(
    threaded: Any, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    """accelerate rids the groups of a model's parameters before it shards them one by one."""
    monkeypatch.setattr("offload.optimizer.awaits_sharding", lambda params: True)
    model = nn.Linear(3, 2)
    optimizer = OffloadOptimizer(
        model.named_parameters(), strategy=strategy, model=model, offload_states=".*", lr=0.1, fused=True
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert not any(optimizer.memory_report().values())
    whole = [weakref.ref(param) for param in model.parameters()]
    optimizer.param_groups[0]["params"][:] = [torch.empty(1), torch.empty(1)]
    model.weight, model.bias = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))
    gc.collect()
    assert [param() for param in whole] == [None, None]
    optimizer.param_groups[0]["params"] = list(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert float(model.bias.detach().sum()) == pytest.approx(1.8, rel=1e-2)


def test_config_signature_joins_both_classes() -> None:
    names = OffloadOptimizer.config_signature({"optimizer_class": "torch.optim.SGD"}).parameters
    assert {"strategy", "offload_gradients", "lr", "momentum", "nesterov"} <= set(names)
    assert "betas" not in names and "base_kwargs" not in names


def test_torchaos_offloader_refuses_cpu_parameters_by_name() -> None:
    from offload import TorchAOCPUOffloadOptimizer

    with pytest.raises(UserError, match=r"CUDA or XPU, got cpu; use optimizer=offload\.OffloadOptimizer"):
        TorchAOCPUOffloadOptimizer(make_model().parameters(), lr=1e-2)
    names = TorchAOCPUOffloadOptimizer.config_signature({}).parameters
    assert {"lr", "betas", "minimal_size", "offload_gradients"} <= set(names) and "strategy" not in names

"""Training loops that know nothing of offloading: they run unmodified and train what the plain optimizer trains."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from offload import OffloadOptimizer
from offload.simulation.accelerator import SimulatedAccelerator

STEPS = 6

Loop = dict[str, Any]

RESIDENT: Loop = {"strategy": "resident"}
STREAM: Loop = {"strategy": "stream"}
HOST: Loop = {"strategy": "host"}
ATTACHED: Loop = {"model": True}
IN_BACKWARD: Loop = {"update_in_backward": True}
OFFLOADED: Loop = {"offload_gradients": True}

AT_STEP = [RESIDENT, STREAM, HOST, STREAM | ATTACHED, HOST | ATTACHED]
EARLY = [
    RESIDENT | IN_BACKWARD,
    STREAM | IN_BACKWARD,
    HOST | IN_BACKWARD,
    STREAM | ATTACHED | IN_BACKWARD,
    HOST | ATTACHED | IN_BACKWARD,
]
HIDDEN = [
    STREAM | OFFLOADED,
    HOST | OFFLOADED,
    STREAM | ATTACHED | OFFLOADED,
    HOST | ATTACHED | OFFLOADED,
    HOST | ATTACHED | OFFLOADED | IN_BACKWARD,
]
LOOPS = AT_STEP + EARLY + HIDDEN


def label(loop: Loop) -> str:
    return " ".join(str(value) if key == "strategy" else key for key, value in loop.items())


@contextmanager
def machine_of(kind: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """The CPU as it is, or played as a device: ``late``, ``early`` or a seed on the simulator, or real threads."""
    if kind in ("cpu", "threads"):
        if kind == "threads":
            request.getfixturevalue("threaded")
        yield
        return
    with SimulatedAccelerator(order=int(kind[5:]) if kind.startswith("seed ") else kind) as simulator:  # type: ignore[arg-type]
        request.getfixturevalue("monkeypatch").setattr("offload.machinery.runtime_for", lambda device: simulator)
        yield


@pytest.fixture(params=["cpu", "late", "threads"])
def machine(request: pytest.FixtureRequest) -> Iterator[str]:
    with machine_of(request.param, request):
        yield request.param


@pytest.fixture(params=["cpu", "seed 1"])
def two_machines(request: pytest.FixtureRequest) -> Iterator[str]:
    with machine_of(request.param, request):
        yield request.param


class Head(nn.Module):
    """A head tied to the embedding, behind a layer with a bias that starts at zero."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embedding.embedding_dim)
        self.out = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
        self.out.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.norm(hidden))


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    embedding = nn.Embedding(13, 8)
    return nn.Sequential(embedding, nn.Linear(8, 11), nn.GELU(), nn.Linear(11, 8), Head(embedding)).to(dtype)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(13, (7,), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1))


def build(model: nn.Module, params: Any, loop: Loop | None, **kwargs: Any) -> torch.optim.Optimizer:
    """OffloadOptimizer as ``loop`` says, or the plain base optimizer for None."""
    base = kwargs.pop("optimizer_class", torch.optim.AdamW)
    if loop is None:
        return base(params, **kwargs)
    attached = {"model": model} if loop.get("model") else {}
    return OffloadOptimizer(params, base, **{**loop, "model": None, **attached, **kwargs})


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "lr": 3e-3}]


def values(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Copies of the parameters, after all queued updates."""
    if isinstance(optimizer, OffloadOptimizer):
        optimizer.synchronize()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        difference = (value - expected[name]).abs().max().item()
        assert torch.equal(value, expected[name]), f"{name}: largest difference {difference:.3e}"


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


# Learning-rate schedulers

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.8**step),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 2e-2, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=0, threshold=1.0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[3]
    ),
}


def train_scheduled(scheduler: str, loop: Loop | None) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Parameters after training, and each step's learning rates."""
    model = make_model()
    optimizer = build(model, groups_of(model), loop, lr=1e-2, fused=True)
    schedule = SCHEDULERS[scheduler](optimizer)
    rates = []
    for seed in range(STEPS):
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(*([loss.item()] if scheduler == "ReduceLROnPlateau" else []))
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return values(model, optimizer), rates


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("loop", LOOPS, ids=label)
def test_learning_rate_schedulers(two_machines: str, loop: Loop, scheduler: str) -> None:
    expected, expected_rates = train_scheduled(scheduler, None)
    actual, rates = train_scheduled(scheduler, loop)
    assert rates == expected_rates and len({tuple(rate) for rate in rates}) > 2
    assert_same(actual, expected)


@pytest.mark.parametrize("loop", [RESIDENT, STREAM | ATTACHED, HOST | ATTACHED], ids=label)
def test_a_scheduler_resumes_from_its_state(two_machines: str, loop: Loop) -> None:
    def train(loop: Loop | None, *, stop_at: int | None) -> dict[str, Tensor]:
        model = make_model()
        optimizer = build(model, model.parameters(), loop, lr=1e-2, fused=True)
        schedule = lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=STEPS + 1)
        for seed in range(STEPS):
            if seed == stop_at:
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), schedule.state_dict()])
                saved[1]["state"][0]["step"].item()  # the copy is made before the optimizer's memory is freed
                model = make_model()
                model.load_state_dict(saved[0])
                optimizer = build(model, model.parameters(), loop, lr=1e-2, fused=True)
                schedule = lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=STEPS + 1)
                optimizer.load_state_dict(saved[1])
                schedule.load_state_dict(saved[2])
            loss_of(model, seed).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return values(model, optimizer)

    expected = train(None, stop_at=None)
    assert_same(train(loop, stop_at=None), expected)
    assert_same(train(loop, stop_at=3), expected)


# torch.amp.GradScaler


def train_scaled(loop: Loop | None, *, clip: float | None) -> tuple[dict[str, Tensor], list[float], list[Tensor]]:
    """Parameters, the scale after each step, and the norms that clipping returned."""
    model = make_model()
    optimizer = build(model, groups_of(model), loop, lr=1e-2, fused=True)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    scales, norms = [], []
    for seed in range(STEPS):
        for micro_batch in range(2):
            loss = loss_of(model, 2 * seed + micro_batch) / 2
            overflow = float("inf") if seed == 2 else 1.0
            scaler.scale(loss * overflow).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).clone())
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return values(model, optimizer), scales, norms


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("clip", [None, 0.2], ids=["no clip", "clip 0.2"])
@pytest.mark.parametrize("loop", AT_STEP, ids=label)
def test_gradient_scaler(machine: str, loop: Loop, clip: float | None) -> None:
    """With accumulation, clipping of the unscaled gradients, and a step that an infinite gradient makes it skip."""
    expected, expected_scales, expected_norms = train_scaled(None, clip=clip)
    actual, scales, norms = train_scaled(loop, clip=clip)
    assert scales == expected_scales == [256, 512, 256, 256, 512, 512]
    assert_same(actual, expected)
    for norm, expected_norm in zip(norms, expected_norms, strict=True):
        assert torch.equal(norm, expected_norm) or (norm.isnan() and expected_norm.isnan())


@pytest.mark.parametrize("is_explicit", [True, False], ids=["unscale_", "step"])
@pytest.mark.parametrize("loop", EARLY + HIDDEN, ids=label)
def test_gradient_scaler_refuses_gradients_that_were_taken(two_machines: str, loop: Loop, is_explicit: bool) -> None:
    """Their scale cannot be taken back: the error names the settings under which it can."""
    model = make_model()
    optimizer = build(model, model.parameters(), loop, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(RuntimeError, match="offload_gradients=False and update_in_backward=False"):
        if is_explicit:
            scaler.unscale_(optimizer)
        else:
            scaler.step(optimizer)


# Lightning's loops, written out (lightning is not a dependency of this project)


def train_by_closure(loop: Loop | None, *, clip: float | None) -> tuple[dict[str, Tensor], list[float]]:
    """Lightning's automatic optimization: forward, zero_grad, backward and clipping run inside ``step(closure)``."""
    model = make_model()
    optimizer = build(model, groups_of(model), loop, lr=1e-2, fused=True)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for seed in range(STEPS):

        def closure(seed: int = seed) -> Tensor:
            loss = loss_of(model, seed)
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss

        losses.append(optimizer.step(closure).item())
        schedule.step()
    return values(model, optimizer), losses


@pytest.mark.parametrize("clip", [None, 0.2], ids=["no clip", "clip 0.2"])
@pytest.mark.parametrize("loop", LOOPS, ids=label)
def test_lightning_style_automatic_optimization(two_machines: str, loop: Loop, clip: float | None) -> None:
    if clip is not None and loop not in AT_STEP:
        model = make_model()
        optimizer = build(model, model.parameters(), loop)
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"optimizer\.clip_grad_norm_\(max_norm\)"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.zero_grad()
        return
    expected, expected_losses = train_by_closure(None, clip=clip)
    actual, losses = train_by_closure(loop, clip=clip)
    assert losses == expected_losses
    assert_same(actual, expected)


def train_alternately(loop: Loop | None) -> dict[str, Tensor]:
    """Lightning's manual optimization with two optimizers over parts of one model, each toggled for its turn.

    Toggling sets ``requires_grad`` of all parameters that the other optimizer alone has to False.
    """
    model = make_model()
    parts = [list(model[1].parameters()), [p for i in (0, 3, 4) for p in model[i].parameters()]]
    parts[1] = list(dict.fromkeys(parts[1]))
    optimizers = [build(model, part, loop, lr=lr, fused=True) for part, lr in zip(parts, (1e-2, 5e-3), strict=True)]
    for seed in range(2 * STEPS):
        turn = seed % 2 if seed < STEPS else int(seed % 3 == 0)
        for param in parts[1 - turn]:
            param.requires_grad_(False)
        loss = loss_of(model, seed)
        optimizers[turn].zero_grad()
        loss.backward()
        optimizers[turn].step()
        for param in parts[1 - turn]:
            param.requires_grad_(True)
    for optimizer in optimizers:
        values(model, optimizer)
    return values(model)


@pytest.mark.parametrize("loop", LOOPS, ids=label)
def test_lightning_style_manual_optimization_of_two_parts(two_machines: str, loop: Loop) -> None:
    assert_same(train_alternately(loop), train_alternately(None))


def train_with_frozen_phases(loop: Loop | None) -> dict[str, Tensor]:
    """Toggling within one optimizer: some of its parameters are frozen for some steps."""
    model = make_model()
    optimizer = build(model, model.parameters(), loop, lr=1e-2, fused=True)
    for seed in range(STEPS):
        model[1].weight.requires_grad_(seed not in (1, 2))
        model[3].requires_grad_(seed != 4)
        one_step(model, optimizer, seed)
    return values(model, optimizer)


@pytest.mark.parametrize("loop", LOOPS, ids=label)
def test_parameters_frozen_for_a_while(two_machines: str, loop: Loop) -> None:
    assert_same(train_with_frozen_phases(loop), train_with_frozen_phases(None))


# Hugging Face Trainer

ROWS = 24


def causal_lm() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=True,
        )
    )


def fit(
    loop: Loop | None,
    folder: Path,
    *,
    accumulation: int = 2,
    clip: float = 0.5,
    resume: Path | None = None,
    callbacks: Callable[[torch.optim.Optimizer], list[Any]] = lambda optimizer: [],
    own_norm: bool = False,
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Four steps of Trainer; returns the parameters and what it logged, its clocks left out.

    ``own_norm``: the norm that is logged is the optimizer's.
    """
    from transformers import Trainer, TrainingArguments

    model = causal_lm()
    optimizer = build(model, model.named_parameters(), loop, lr=1e-2, weight_decay=0.1, fused=True)
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=clip,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        data_seed=0,
    )
    tokens = torch.randint(32, (ROWS, 6), generator=torch.Generator().manual_seed(0))

    class NormOfOptimizer(Trainer):
        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
            return optimizer.grad_norm().item()  # type: ignore[attr-defined]

    trainer = (NormOfOptimizer if own_norm else Trainer)(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],  # type: ignore[arg-type]
        optimizers=(optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)),
        callbacks=callbacks(optimizer),
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    logged = [
        {key: value for key, value in entry.items() if key in ("loss", "grad_norm", "learning_rate", "step")}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return values(model, optimizer), logged


@pytest.fixture
def trainers_loss_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator takes 0-dim tensors made by ``torch.tensor`` for the host's; Trainer makes one on the device."""
    make = torch.tensor

    def tensor(data: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs and isinstance(data, float):
            return torch.full((), data, **kwargs)
        return make(data, **kwargs)

    monkeypatch.setattr(torch, "tensor", tensor)


@pytest.mark.parametrize("loop", AT_STEP, ids=label)
def test_trainer(trainers_loss_on_the_device: None, machine: str, loop: Loop, tmp_path: Path) -> None:
    """With accumulation, clipping and a schedule; what it logs (loss, norm, rate) is the same too."""
    expected, expected_log = fit(None, tmp_path / "plain")
    actual, log = fit(loop, tmp_path / "offloaded")
    assert len(log) == 4 and log == expected_log
    assert_same(actual, expected)


@pytest.mark.parametrize("loop", EARLY[-2:] + HIDDEN[-3:], ids=label)
def test_trainer_with_early_gradients(
    trainers_loss_on_the_device: None, two_machines: str, loop: Loop, tmp_path: Path
) -> None:
    """Without clipping, and with the norm from the optimizer, as Trainer measures it itself even where it does not
    clip; updates in backward, without accumulation."""
    settings: dict[str, Any] = {"clip": 0.0, "accumulation": 1 if "update_in_backward" in loop else 2}
    expected, expected_log = fit(None, tmp_path / "plain", **settings)
    actual, log = fit(loop, tmp_path / "offloaded", own_norm=True, **settings)
    for entry, expected_entry in zip(log, expected_log, strict=True):
        assert entry.pop("grad_norm") == pytest.approx(expected_entry.pop("grad_norm"), rel=1e-6)
    assert len(log) == 4 and log == expected_log
    assert_same(actual, expected)


@pytest.mark.parametrize(
    ("loop", "settings", "message"),
    [
        (STREAM | IN_BACKWARD, {"clip": 0.0, "accumulation": 2}, r"optimizer\.accumulate\(\)"),
        (HOST | IN_BACKWARD, {"clip": 0.5, "accumulation": 1}, "update_in_backward=False"),
        (HOST | OFFLOADED, {"clip": 0.5, "accumulation": 1}, "offload_gradients=False"),
        (HOST | OFFLOADED, {"clip": 0.0, "accumulation": 1}, "offload_gradients=False"),
    ],
    ids=["accumulation in backward", "clipping in backward", "clipping offloaded gradients", "norm it cannot see"],
)
def test_trainer_settings_that_cannot_work_are_refused(
    loop: Loop, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=message):
        fit(loop, tmp_path, **settings)


@pytest.mark.parametrize("target", [RESIDENT, STREAM | ATTACHED, HOST | ATTACHED, None], ids=lambda v: label(v or {}))
@pytest.mark.parametrize("source", [STREAM | ATTACHED, HOST | ATTACHED, None], ids=lambda v: label(v or {}))
def test_trainer_resumes(threaded: Any, source: Loop | None, target: Loop | None, tmp_path: Path) -> None:
    """From a checkpoint that Trainer wrote under one strategy, or the plain optimizer, under another."""
    expected, expected_log = fit(None, tmp_path / "plain")
    fit(source, tmp_path / "source")
    actual, log = fit(target, tmp_path / "target", resume=tmp_path / "source" / "checkpoint-2")
    assert log == expected_log
    assert_same(actual, expected)


def test_trainer_resumes_without_a_model_after_a_call(threaded: Any, tmp_path: Path) -> None:
    """Trainer loads the weights after the optimizer was made: without its model, that has to be told to it."""
    from transformers import TrainerCallback

    class Sync(TrainerCallback):
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.optimizer.sync_from_model()

    expected, _ = fit(HOST, tmp_path)
    with pytest.raises(RuntimeError, match=r"optimizer\.sync_from_model\(\)"):
        fit(HOST, tmp_path / "forgotten", resume=tmp_path / "checkpoint-2")
    actual, _ = fit(HOST, tmp_path / "told", resume=tmp_path / "checkpoint-2", callbacks=lambda o: [Sync(o)])
    assert_same(actual, expected)


# What else is done with an optimizer


@pytest.mark.parametrize("loop", LOOPS, ids=label)
def test_editing_parameter_groups(two_machines: str, loop: Loop) -> None:
    """Also right after step(), while the update may not have run yet."""

    def train(loop: Loop | None) -> dict[str, Tensor]:
        model = make_model()
        optimizer = build(model, groups_of(model), loop, lr=torch.tensor(1e-2), fused=True)
        for seed in range(STEPS):
            loss_of(model, seed).backward()
            optimizer.step()
            first, second = optimizer.param_groups
            first["lr"].mul_(0.7)
            first["betas"] = (0.9 - 0.1 * seed, 0.99)
            second["lr"] = 2e-2 / (1 + seed)
            second["weight_decay"] += 0.1
            optimizer.zero_grad()
        return values(model, optimizer)

    assert_same(train(loop), train(None))


@pytest.mark.parametrize("loop", [*AT_STEP, *EARLY[1:3], *HIDDEN[:2]], ids=label)
def test_adding_a_group_right_after_a_step(machine: str, loop: Loop) -> None:
    def train(loop: Loop | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model = make_model()
        early = [*model[0].parameters(), *model[1].parameters()]
        optimizer = build(model, early, loop, lr=1e-2, fused=True)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.add_param_group({"params": [*model[3].parameters(), *model[4].norm.parameters()], "lr": 5e-3})  # type: ignore[union-attr]
        model.zero_grad()
        for seed in range(1, STEPS):
            one_step(model, optimizer, seed)
        return values(model, optimizer), optimizer.state_dict()

    actual, state = train(loop)
    expected, expected_state = train(None)
    assert_same(actual, expected)
    assert state["param_groups"] == expected_state["param_groups"]


@pytest.mark.parametrize("loop", [RESIDENT, STREAM | ATTACHED, HOST | ATTACHED], ids=label)
def test_hooks_of_this_optimizer(machine: str, loop: Loop) -> None:
    def train(loop: Loop | None) -> tuple[dict[str, Tensor], list[str]]:
        model = make_model()
        optimizer = build(model, model.parameters(), loop, lr=1e-2, fused=True)
        calls: list[str] = []

        def warm_up(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            calls.append("before step")
            optimizer.param_groups[0]["lr"] = 1e-3 * len(calls)

        handle = optimizer.register_step_pre_hook(warm_up)
        optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
        optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before state_dict"))
        optimizer.register_state_dict_post_hook(lambda _, state: state | {"extra": 1})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "extra"})
        optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after load_state_dict"))
        for seed in range(3):
            one_step(model, optimizer, seed)
        state = optimizer.state_dict()
        assert state["extra"] == 1
        optimizer.load_state_dict(state)
        handle.remove()
        one_step(model, optimizer, 3)
        return values(model, optimizer), calls

    actual, calls = train(loop)
    expected, expected_calls = train(None)
    assert calls == expected_calls and len(calls) == 9
    assert_same(actual, expected)


@pytest.mark.parametrize("loop", [RESIDENT, STREAM, HOST, HOST | IN_BACKWARD], ids=label)
def test_global_step_hooks_run_once_per_step(machine: str, loop: Loop) -> None:
    """Hooks on all optimizers of the process see this one, and not the base optimizer that it runs."""
    seen: list[torch.optim.Optimizer] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer)),
    ]
    try:
        model = make_model()
        optimizer = build(model, model.parameters(), loop, lr=1e-2)
        one_step(model, optimizer, 0)
        values(model, optimizer)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [optimizer, optimizer]


ZEROING: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "one in place": lambda model, optimizer: model[1].weight.grad.zero_(),  # type: ignore[index]
    "nothing": lambda model, optimizer: None,
}


@pytest.mark.parametrize("zeroing", ZEROING)
@pytest.mark.parametrize("loop", AT_STEP + HIDDEN[:4], ids=label)
def test_ways_to_zero_gradients(two_machines: str, loop: Loop, zeroing: str) -> None:
    """What is neither dropped nor zeroed is added to, as in torch."""

    def train(loop: Loop | None) -> dict[str, Tensor]:
        model = make_model()
        optimizer = build(model, model.parameters(), loop, optimizer_class=torch.optim.SGD, lr=0.1, fused=True)
        for seed in range(4):
            loss_of(model, seed).backward()
            optimizer.step()
            ZEROING[zeroing](model, optimizer)
        return values(model, optimizer)

    assert_same(train(loop), train(None))


def train_and_discard(loop: Loop | None, *, with_schedule: bool) -> dict[str, Tensor]:
    model = make_model()
    optimizer = build(model, model.parameters(), loop, lr=1e-2, fused=True)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5) if with_schedule else None
    for seed in range(3):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()
    del optimizer, schedule
    if with_schedule:
        gc.collect()
    return values(model)


@pytest.mark.parametrize("loop", LOOPS, ids=label)
def test_an_optimizer_discarded_right_after_step_loses_no_update(machine: str, loop: Loop) -> None:
    assert_same(train_and_discard(loop, with_schedule=False), train_and_discard(None, with_schedule=False))


@pytest.mark.parametrize("loop", [STREAM | ATTACHED, HOST | ATTACHED | IN_BACKWARD], ids=label)
def test_an_optimizer_discarded_with_its_scheduler_loses_no_update(machine: str, loop: Loop) -> None:
    """A scheduler wraps ``step``, so that only the garbage collector frees the optimizer."""
    assert_same(train_and_discard(loop, with_schedule=True), train_and_discard(None, with_schedule=True))


def test_representation_names_the_hyperparameters() -> None:
    model = make_model()
    text = repr(build(model, groups_of(model), HOST, lr=0.125))
    assert text.startswith("OffloadOptimizer (") and "lr: 0.125" in text and "Parameter Group 1" in text


@pytest.mark.parametrize("copier", [copy.deepcopy, pickle.dumps, copy.copy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("loop", [RESIDENT, STREAM | ATTACHED, HOST], ids=label)
def test_copying_and_pickling_is_refused(machine: str, loop: Loop, copier: Callable[[Any], Any]) -> None:
    """A copy would have neither the hooks nor the thread: the error names what to save instead."""
    model = make_model()
    optimizer = build(model, model.parameters(), loop, lr=1e-2)
    one_step(model, optimizer, 0)
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copier(optimizer)
    values(model, optimizer)


# Errors and interrupts


class Failing(torch.optim.SGD):
    """Raises in the update after ``GOOD`` updates."""

    per_parameter = True
    elementwise = True
    good = 0

    def step(self, closure: Any = None) -> Any:
        type(self).good -= 1
        if type(self).good < 0:
            raise ValueError("the kernel failed")
        return super().step(closure)


NEXT_CALLS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "step": lambda model, optimizer: (give_gradients(model), optimizer.step()),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),  # type: ignore[attr-defined]
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "state": lambda model, optimizer: optimizer.state,
    "forward": lambda model, optimizer: loss_of(model, 0),
    "model.state_dict": lambda model, optimizer: model.state_dict(),
    "sync_from_model": lambda model, optimizer: optimizer.sync_from_model(),  # type: ignore[attr-defined]
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict(
        torch.optim.SGD(model.parameters()).state_dict()
    ),
}


def give_gradients(model: nn.Module) -> None:
    """Gradients without a forward, which would wait."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize(
    ("kind", "call"),
    # Another step() does not wait, so it raises only where the worker failed before it.
    [
        ("early", "step"),
        *((kind, call) for kind in ("late", "early", "threads") for call in NEXT_CALLS if call != "step"),
    ],
)
@pytest.mark.parametrize("loop", [STREAM | ATTACHED, HOST | ATTACHED], ids=label)
def test_an_error_in_the_worker_is_raised_by_the_next_call(
    kind: str, request: pytest.FixtureRequest, loop: Loop, call: str
) -> None:
    with machine_of(kind, request):
        model = make_model()
        Failing.good = 2
        optimizer = build(model, model.parameters(), loop, optimizer_class=Failing, lr=0.1)
        loss_of(model, 0).backward()
        optimizer.step()
        with pytest.raises(ValueError, match="the kernel failed"):
            NEXT_CALLS[call](model, optimizer)
        with pytest.raises(ValueError, match="the kernel failed"):
            optimizer.state_dict()
        del optimizer  # ends the worker; a thread that stays would be told by the simulator


@pytest.mark.parametrize("loop", [*AT_STEP[1:3], *EARLY, *HIDDEN], ids=label)
def test_an_error_in_the_update_surfaces_without_a_model_too(machine: str, loop: Loop) -> None:
    """In backward, in step() or, with a model, at the next call; and not only once."""
    model = make_model()
    Failing.good = 0
    optimizer = build(model, model.parameters(), loop, optimizer_class=Failing, lr=0.1)
    with pytest.raises(ValueError, match="the kernel failed"):
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.synchronize()  # type: ignore[attr-defined]


@pytest.mark.parametrize("loop", [STREAM | ATTACHED, HOST | ATTACHED], ids=label)
def test_an_error_nobody_asked_for_is_told_at_the_end(threaded: Any, loop: Loop) -> None:
    model = make_model()
    Failing.good = 0
    optimizer = build(model, model.parameters(), loop, optimizer_class=Failing, lr=0.1)
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="the kernel failed"):
        del optimizer
        gc.collect()


@pytest.mark.parametrize("dtype", [None, "fp32"])
@pytest.mark.parametrize("kind", ["late", "threads"])
def test_an_error_while_gradients_are_summed_on_the_host(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    """The accumulating thread's errors surface too; nobody waits for it for ever."""
    monkeypatch.setattr(
        "offload.engine.accumulation.HostGradients._work_once",
        lambda self: (_ for _ in ()).throw(ValueError("no memory")),
    )
    with machine_of(kind, request):
        model = make_model(torch.bfloat16)
        optimizer = build(model, model.parameters(), HOST | OFFLOADED, lr=0.1, accumulation_dtype=dtype)
        with pytest.raises(ValueError, match="no memory"):
            for seed in range(2):
                loss_of(model, seed).backward()
            optimizer.step()


INTERRUPTED = """
import sys, threading, torch
from torch import nn
import offload.optimizer
from offload import OffloadOptimizer
from offload.engine.runtime import HostRuntime

class Separate(HostRuntime):
    shares_memory = False
    def copy(self, dst, src, direction, after=(), name=""):
        torch.autograd.graph.increment_version(dst)
        dst.data.copy_(src.data)
        return self.record()

offload.machinery.runtime_for = lambda device: Separate()
release = threading.Event()
main = threading.main_thread()

def is_waiting():
    frame = sys._current_frames()[main.ident]
    while frame is not None:
        if frame.f_code.co_name == "wait" and frame.f_code.co_filename == threading.__file__:
            return True
        frame = frame.f_back
    return False

class Slow(torch.optim.SGD):
    per_parameter = True
    told = False
    def step(self, closure=None):
        while not release.wait(0.01):
            if not Slow.told and is_waiting():
                Slow.told = True
                print("waiting", flush=True)
        return super().step(closure)

model = nn.Linear(3, 2)
plain = nn.Linear(3, 2)
plain.load_state_dict(model.state_dict())
attached = {"model": model} if sys.argv[2] == "model" else {}
optimizer = OffloadOptimizer(model.parameters(), Slow, lr=0.5, strategy=sys.argv[1], **attached)
reference = torch.optim.SGD(plain.parameters(), lr=0.5)
for m in (model, plain):
    m(torch.ones(4, 3)).square().sum().backward()
reference.step()
try:
    optimizer.step()
    if sys.argv[3] == "forward":
        model(torch.ones(4, 3))
except KeyboardInterrupt:
    print("interrupted", flush=True)
release.set()
optimizer.synchronize()
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))
print("updated", flush=True)
"""


@pytest.mark.parametrize(
    ("strategy", "attached", "call"),
    [("stream", "model", "forward"), ("host", "alone", "step")],
)
def test_an_interrupt_reaches_a_thread_that_waits(strategy: str, attached: str, call: str) -> None:
    """Ctrl-C while the caller waits for the worker raises KeyboardInterrupt there; nothing hangs, no update is lost."""
    command = [sys.executable, "-c", INTERRUPTED, strategy, attached, call]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert process.stdout.readline() == "waiting\n", process.stderr.read()
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert output == "interrupted\nupdated\n", errors
    assert process.returncode == 0, errors

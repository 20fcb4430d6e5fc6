"""Groups by regular expressions train what separate plain optimizers train, whatever the strategy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import offload.optim
from offload import OffloadOptimizer
from offload.errors import UserError
from offload.simulation.accelerator import SimulatedAccelerator

STEPS = 5
MATRICES, VECTORS, EMBEDDING = r"layers\..*weight", r".*(norm|bias).*", r"embed.*|head\.weight"

STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "resident"},
    {"strategy": "stream"},
    {"strategy": "host"},
    {"strategy": "host", "offload_gradients": True, "accumulation_dtype": "fp32"},
    {"strategy": "stream", "offload_gradients": True, "model": True},
]
IN_BACKWARD: list[dict[str, Any]] = [
    {**settings, "update_in_backward": True} for settings in (*STRATEGIES[:3], {"strategy": "host", "model": True})
]


def label(settings: dict[str, Any]) -> str:
    return " ".join(str(value) if key == "strategy" else key for key, value in settings.items())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def loss_of(model: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(13, (7,), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1))


def chosen(model: nn.Module, pattern: str) -> list[nn.Parameter]:
    import re

    return [param for name, param in model.named_parameters() if re.fullmatch(pattern, name)]


PACKED = {"optimizer_class": "offload.optim.AdamW", "state_dtype": "bf16", "master": "split"}

MIXES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    # What the front door is given, and the groups by pattern.
    "one class": (
        {"optimizer_class": "torch.optim.AdamW", "lr": 1e-2, "weight_decay": 0.3, "fused": True},
        [{"params": VECTORS, "weight_decay": 0.0}, {"params": EMBEDDING, "lr": 3e-3, "betas": [0.8, 0.9]}],
    ),
    "Muon and AdamW": (
        {"optimizer_class": "torch.optim.Muon", "lr": 2e-2, "weight_decay": 0.2},
        [
            {"params": VECTORS, "optimizer_class": "torch.optim.AdamW", "lr": 1e-2, "weight_decay": 0.0, "fused": True},
            {"params": EMBEDDING, "optimizer_class": "torch.optim.AdamW", "lr": 3e-3, "fused": True},
        ],
    ),
    "Muon and packed AdamW": (
        {"optimizer_class": "torch.optim.Muon", "lr": 2e-2},
        [{"params": f"{VECTORS}|{EMBEDDING}", "lr": 1e-2, "weight_decay": 0.0, **PACKED}],
    ),
}


PARTS = {
    "one class": [MATRICES, VECTORS, EMBEDDING],
    "Muon and AdamW": [MATRICES, VECTORS, EMBEDDING],
    "Muon and packed AdamW": [MATRICES, f"{VECTORS}|{EMBEDDING}"],
}


def plain(mix: str, model: nn.Module) -> list[tuple[torch.optim.Optimizer, list[nn.Parameter]]]:
    """Separate optimizers that the mix is to equal, and the parameters that each of them is not to update."""
    vectors, embedding, matrices = (chosen(model, pattern) for pattern in (VECTORS, EMBEDDING, MATRICES))
    if mix == "one class":
        groups = [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0},
            {"params": embedding, "lr": 3e-3, "betas": (0.8, 0.9)},
        ]
        return [(torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.3, fused=True), [])]
    if mix == "Muon and AdamW":
        return [
            (torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.2), []),
            (torch.optim.AdamW(vectors, lr=1e-2, weight_decay=0.0, fused=True), []),
            (torch.optim.AdamW(embedding, lr=3e-3, weight_decay=0.2, fused=True), []),
        ]
    # The packed optimizer's random bits depend on a parameter's position over all groups: Muon's are there too.
    everything = [*matrices, *chosen(model, f"{VECTORS}|{EMBEDDING}")]
    packed = offload.optim.AdamW(everything, lr=1e-2, weight_decay=0.0, state_dtype="bf16")
    return [(torch.optim.Muon(matrices, lr=2e-2), []), (packed, matrices)]


def build(model: nn.Module, mix: str, settings: dict[str, Any]) -> OffloadOptimizer:
    base, groups = MIXES[mix]
    attached = {"model": model} if settings.get("model") else {}
    return OffloadOptimizer(
        model.named_parameters(), **base, param_groups=groups, **{**settings, "model": None, **attached}
    )


def train_plain(mix: str, *, clip: float | None, accumulation: int) -> dict[str, Tensor]:
    model = Model()
    optimizers = plain(mix, model)
    schedules = [lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step) for optimizer, _ in optimizers]
    for step in range(STEPS):
        for micro in range(accumulation):
            (loss_of(model, 10 * step + micro) / accumulation).backward()
        if clip is not None:
            # In the order of the groups: a norm's last bit depends on it.
            nn.utils.clip_grad_norm_([p for part in PARTS[mix] for p in chosen(model, part)], clip)
        for optimizer, others in optimizers:
            for param in others:
                param.grad = None
            optimizer.step()
        model.zero_grad()
        for schedule in schedules:
            schedule.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def train(
    mix: str, settings: dict[str, Any], *, clip: float | None, accumulation: int, resume: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """``resume``: after the third step go on in a new optimizer with these settings."""
    model = Model()
    optimizer = build(model, mix, settings)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    first = [group["lr"] for group in optimizer.param_groups]
    for step in range(STEPS):
        for micro in range(accumulation - 1):
            with optimizer.accumulate():
                (loss_of(model, 10 * step + micro) / accumulation).backward()
        (loss_of(model, 10 * step + accumulation - 1) / accumulation).backward()
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [lr * 0.8 ** (step + 1) for lr in first]
        if resume is not None and step == 2:
            state = optimizer.state_dict()
            weights = copy.deepcopy(model.state_dict())
            model = Model()
            model.load_state_dict(weights)
            optimizer = build(model, mix, resume)
            saved = schedule.state_dict()
            schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
            optimizer.load_state_dict(state)
            schedule.load_state_dict(saved)
    optimizer.synchronize()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), f"{name}: {(value - expected[name]).abs().max().item():.3e}"


@pytest.fixture(params=["cpu", "late"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "cpu":
        yield request.param
        return
    monkeypatch.setattr("offload.engine.units.CHUNK_ELEMENTS", 64)
    with SimulatedAccelerator(order="late") as simulator:
        monkeypatch.setattr("offload.machinery.runtime_for", lambda device: simulator)
        yield request.param


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("settings", [*STRATEGIES, *IN_BACKWARD], ids=label)
def test_equals_separate_plain_optimizers(machine: str, settings: dict[str, Any], mix: str) -> None:
    clip = None if settings.get("update_in_backward") else 0.4
    expected = train_plain(mix, clip=clip, accumulation=2)
    assert_same(train(mix, settings, clip=clip, accumulation=2), expected)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("others", [STRATEGIES[1], STRATEGIES[4]], ids=label)
@pytest.mark.parametrize("settings", STRATEGIES[:3], ids=label)
def test_state_moves_between_strategies(
    machine: str, settings: dict[str, Any], others: dict[str, Any], mix: str
) -> None:
    expected = train_plain(mix, clip=0.4, accumulation=1)
    assert_same(train(mix, settings, clip=0.4, accumulation=1, resume=others), expected)


def test_groups_state_paths_and_memory(machine: str) -> None:
    """What no entry matches comes first; states are told apart by name in ``offload_states`` and counted."""
    model = Model()
    optimizer = build(
        model,
        "Muon and AdamW",
        {"strategy": "stream", "offload_states": ["momentum_buffer/layers.*", "exp_avg/norm.*"]},
    )
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names == [
        ["layers.0.weight", "layers.1.weight"],
        ["layers.0.bias", "layers.1.bias", "norm.weight", "norm.bias", "head.bias"],
        ["embed.weight", "head.weight"],
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [2e-2, 1e-2, 3e-3]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0, 0.2]
    assert "betas" not in optimizer.param_groups[0] and "momentum" not in optimizer.param_groups[1]
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.synchronize()
    count = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in chosen(model, MATRICES))
    states = sum(p.numel() * 4 for p in chosen(model, MATRICES))
    states += 2 * 4 * (count - matrices) + 4 * len(names[1] + names[2])
    report = optimizer.memory_report()
    held = sum(purposes.get("optimizer_state", 0) for purposes in report.values())
    assert states <= held <= states + 64 * 20  # host memory is aligned


@pytest.mark.parametrize(
    ("base", "groups", "message"),
    [
        ({}, {"params": ".*"}, "optimizer.param_groups: expected a list"),
        ({}, [{"lr": 1.0}], "optimizer.param_groups.0: expected {params: <regular expression on names>"),
        ({}, [{"params": "("}], "optimizer.param_groups.0.params: '(' is not a regular expression"),
        ({}, [{"params": "embedd.*"}], "optimizer.param_groups.0.params: 'embedd.*' matches no parameter"),
        ({}, [{"params": "embedd.*"}], "such as embed.weight"),
        (
            {},
            [{"params": ".*bias"}, {"params": "head.bias"}],
            "optimizer.param_groups.1.params: all that 'head.bias' matches, such as head.bias, belongs to "
            "optimizer.param_groups.0",
        ),
        ({}, [{"params": ".*", "weigth_decay": 0.0}], "param_groups.0.weigth_decay: torch.optim.AdamW does not take"),
        ({}, [{"params": ".*", "weigth_decay": 0.0}], "did you mean weight_decay?"),
        ({}, [{"params": ".*", "optimizer_clas": "x"}], "did you mean optimizer_class?"),
        ({}, [{"params": ".*", "lr": "fast"}], "param_groups.0.lr: expected a number, such as 0.001, got 'fast'"),
        ({}, [{"params": ".*", "optimizer_class": "torch.optim.Mun"}], "optimizer.param_groups.0.optimizer_class"),
        ({}, [{"params": ".*bias", "optimizer_class": "torch.optim.LBFGS"}], "torch.optim.LBFGS needs a closure"),
        (
            {"optimizer_class": "torch.optim.Muon"},
            [{"params": ".*bias", "lr": 1.0}],
            "torch.optim.Muon updates matrices",
        ),
        (
            {"optimizer_class": "torchao.optim.AdamW8bit"},
            [{"params": ".*bias", "block_size": 64}],
            "param_groups.0.block_size: torchao.optim.AdamW8bit takes it once for all of its groups",
        ),
    ],
)
def test_refusals(base: dict[str, Any], groups: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        OffloadOptimizer(Model().named_parameters(), **{"lr": 1e-3, **base}, param_groups=groups)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_refusals_of_parameters() -> None:
    model, groups = Model(), [{"params": ".*bias", "lr": 1.0}]
    with pytest.raises(UserError, match="have no names to match"):
        OffloadOptimizer(model.parameters(), param_groups=groups)
    with pytest.raises(UserError, match="are in groups already"):
        OffloadOptimizer([{"params": list(model.parameters()), "lr": 1.0}], param_groups=groups, model=model)
    optimizer = OffloadOptimizer(model.parameters(), param_groups=groups, model=model)
    assert [len(group["params"]) for group in optimizer.param_groups] == [5, 4]


def test_a_state_of_other_classes_is_refused() -> None:
    model = Model()
    optimizer = build(model, "Muon and packed AdamW", {"strategy": "host"})
    base, groups = MIXES["one class"]
    two = [{"params": f"{VECTORS}|{EMBEDDING}", "lr": 1.0}]
    other = OffloadOptimizer(model.named_parameters(), **base, param_groups=two)
    with pytest.raises(ValueError, match=r"group 0 of the state to load is of one class for all groups, here it is of"):
        optimizer.load_state_dict(other.state_dict())


def test_a_group_added_later_is_of_the_first_class(machine: str) -> None:
    model = Model()
    model.extra = nn.Parameter(torch.ones(4, 4))
    base, groups = MIXES["Muon and AdamW"]
    named = [(name, param) for name, param in model.named_parameters() if name != "extra"]
    optimizer = OffloadOptimizer(named, **base, param_groups=groups, strategy="stream")
    optimizer.add_param_group({"params": [("extra", model.extra)], "lr": 0.5})
    assert optimizer.param_groups[-1]["optimizer_class"] == "torch.optim.Muon"
    assert (optimizer.param_groups[-1]["momentum"], optimizer.param_groups[-1]["lr"]) == (0.95, 0.5)
    with pytest.raises(UserError, match="expected one of torch.optim.Muon, torch.optim.AdamW"):
        optimizer.add_param_group(
            {"params": [("more", nn.Parameter(torch.ones(2)))], "optimizer_class": "torch.optim.SGD"}
        )

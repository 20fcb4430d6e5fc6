"""Optimizer state on its way: between strategies, the plain optimizer, files and torch.distributed.checkpoint.

The last part covers, in tests of our own, what torchao's ``test/test_low_bit_optim.py`` checks of its CPU offload
optimizer.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.optim
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import offload.optim
from offload import OffloadOptimizer
from offload.simulation.accelerator import Rates, SimulatedAccelerator

Strategy = dict[str, Any]

RESIDENT: Strategy = {"strategy": "resident"}
STREAM: Strategy = {"strategy": "stream"}
HOST: Strategy = {"strategy": "host"}
ATTACHED: Strategy = {"model": True}
IN_BACKWARD: Strategy = {"update_in_backward": True}
OFFLOADED: Strategy = {"offload_gradients": True}
PARTLY = STREAM | {
    "offload_states": [
        ".*",
        {"pattern": ".*avg/.*bias", "memory": "device"},
        {"pattern": "exp_avg_sq/1.*", "memory": "host"},
    ]
}

WAYS: list[Strategy | None] = [
    RESIDENT,
    STREAM | ATTACHED,
    STREAM | ATTACHED | IN_BACKWARD,
    HOST | ATTACHED,
    HOST | OFFLOADED | IN_BACKWARD,
    None,
]


def label(strategy: Strategy | None) -> str:
    if strategy is None:
        return "plain"
    return " ".join(str(value) if key == "strategy" else key for key, value in strategy.items())


@contextmanager
def device(order: Any, monkeypatch: pytest.MonkeyPatch, rates: Rates | None = None) -> Iterator[SimulatedAccelerator]:
    """The CPU played as a device, with threads and copies in that order."""
    with SimulatedAccelerator(rates, order=order) as simulator, monkeypatch.context() as patch:
        patch.setattr("offload.machinery.runtime_for", lambda device: simulator)
        yield simulator


@pytest.fixture(params=["cpu", "late", "threads"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "late":
        with device("late", monkeypatch):
            yield request.param
        return
    if request.param == "threads":
        request.getfixturevalue("threaded")
    yield request.param


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors above 32 elements are huge."""
    monkeypatch.setattr("offload.engine.units.CHUNK_ELEMENTS", 32)


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 11), nn.GELU(), nn.LayerNorm(11), nn.Linear(11, 13)).to(
        dtype
    )


def build(
    model: nn.Module, strategy: Strategy | None, base: type[torch.optim.Optimizer] | None = None, **kwargs: Any
) -> Any:
    """OffloadOptimizer over the named parameters, or the plain base optimizer for None."""
    if base is None:
        base, kwargs = torch.optim.AdamW, {"lr": 1e-2, "fused": True, **kwargs}
    if strategy is None:
        return base(model.named_parameters(), **kwargs)
    attached = {"model": model} if strategy.get("model") else {}
    return OffloadOptimizer(model.named_parameters(), base, **{**strategy, "model": None, **attached, **kwargs})


def loss_of(model: nn.Module, seed: int, scale: float = 1.0) -> Tensor:
    tokens = torch.randint(13, (7,), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1)) * scale


def train(model: nn.Module, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, OffloadOptimizer):
        optimizer.synchronize()


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """``(path, leaf)`` of nested dicts and lists."""
    if isinstance(value, (dict, list, tuple)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(entry, f"{path}/{key}")
    else:
        yield path, value


def plain(value: Tensor) -> list[Tensor]:
    """The tensors that a tensor subclass is made of, or the tensor itself."""
    if not hasattr(value, "__tensor_flatten__"):
        return [value]
    return [getattr(value, name) for name in value.__tensor_flatten__()[0]]


def assert_same_state(actual: Any, expected: Any) -> None:
    """Same structure, and every tensor of the same type, dtype and values."""
    ours, theirs = dict(flat(actual)), dict(flat(expected))
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        other = theirs[path]
        if not isinstance(value, Tensor):
            assert value == other, path
            continue
        assert type(value) is type(other) and value.shape == other.shape, path
        for a, b in zip(plain(value), plain(other), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape, f"{path}: {a.dtype} {b.dtype}"
            assert torch.equal(a, b), f"{path}: values differ"


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    for (name, a), (_, b) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(a, b), f"{name}: largest difference {(a - b).abs().max().item():.3e}"


def through_a_file(value: Any) -> Any:
    """As read back from what torch.save wrote, in the safe way."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_exchange(
    source: Strategy | None, target: Strategy | None, *, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> None:
    """Three steps under ``source``, a file, three steps under ``target``: always the plain optimizer's state."""
    reference = make_model(dtype)
    plain_optimizer = build(reference, None, **kwargs)
    train(reference, plain_optimizer, range(3))
    expected = copy.deepcopy(plain_optimizer.state_dict())

    model = make_model(dtype)
    optimizer = build(model, source, **kwargs)
    train(model, optimizer, range(3))
    saved = through_a_file([optimizer.state_dict(), model.state_dict()])
    assert_same_state(saved[0], expected)

    resumed = make_model(dtype, seed=1)
    resumed.load_state_dict(saved[1])
    optimizer = build(resumed, target, **kwargs)
    optimizer.load_state_dict(saved[0])
    assert_same_state(saved[0], expected)  # loading leaves alone what it loads
    if target is not None:
        assert_same_state(optimizer.state_dict(), expected)
    train(resumed, optimizer, range(3, 6))
    train(reference, plain_optimizer, range(3, 6))
    assert_same(resumed, reference)
    assert_same_state(optimizer.state_dict(), plain_optimizer.state_dict())


@pytest.mark.parametrize("target", WAYS, ids=label)
@pytest.mark.parametrize("source", WAYS, ids=label)
def test_a_checkpoint_moves_between_strategies(machine: str, source: Strategy | None, target: Strategy | None) -> None:
    check_exchange(source, target)


ROUND = [(STREAM | ATTACHED, HOST), (HOST, STREAM), (RESIDENT, STREAM), (PARTLY, None), (None, PARTLY), (HOST, None)]

BASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "foreach": False}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2, "foreach": False}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    "SGD without state": (torch.optim.SGD, {"lr": 0.1, "foreach": False}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "foreach": False}),
}


@pytest.mark.parametrize(("source", "target"), ROUND[:3] + [(None, STREAM), (STREAM, None)], ids=label)
@pytest.mark.parametrize("base", BASES)
def test_states_of_every_kind(machine: str, base: str, source: Strategy | None, target: Strategy | None) -> None:
    """Several moments, counters and products beside them, factored moments, and no state at all."""
    optimizer_class, kwargs = BASES[base]
    check_exchange(source, target, base=optimizer_class, **kwargs)


@pytest.mark.parametrize(("source", "target"), ROUND, ids=label)
def test_states_of_which_some_rest_on_the_device(
    machine: str, source: Strategy | None, target: Strategy | None
) -> None:
    check_exchange(source, target)


@pytest.mark.parametrize(("source", "target"), ROUND, ids=label)
def test_states_of_tensors_in_chunks(
    chunks: None, machine: str, source: Strategy | None, target: Strategy | None
) -> None:
    check_exchange(source, target, dtype=torch.bfloat16)


class Wide(nn.Sequential):
    """Large enough for torchao to keep its states in few bits, with a small part that stays as it is."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64, bias=False))


def wide_steps(model: nn.Module, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        batch = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, OffloadOptimizer):
        optimizer.synchronize()


# offload.optim.AdamW


FORMATS: dict[str, dict[str, Any]] = {
    "int8 split": {"state_dtype": "int8", "master": "split"},
    "int8 split24": {"state_dtype": "int8", "master": "split24"},
    "bf16 split": {"state_dtype": "bf16", "master": "split"},
    "fp32 split": {"state_dtype": "fp32", "master": "split"},
    "bf16 stochastic": {"state_dtype": "bf16", "master": "stochastic"},
    "int8 none": {"state_dtype": "int8", "master": "none"},
}

PACKED_WAYS: list[Strategy | None] = [
    RESIDENT,
    STREAM | ATTACHED,
    STREAM | ATTACHED | IN_BACKWARD,
    STREAM | {"offload_states": [{"pattern": ".*_sq.*", "memory": "host"}]},
    HOST | ATTACHED,
    None,
]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors above 512 elements, two blocks of packed states, are huge."""
    monkeypatch.setattr("offload.engine.units.CHUNK_ELEMENTS", 512)


class Packable(nn.Sequential):
    """Matrices of 2.5 blocks, vectors of less than one; one parameter is used late."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(16, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 16))
        self.late = nn.Parameter(torch.zeros(3))
        self.to(dtype)


def packed_steps(model: Packable, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        batch = torch.randn(5, 16, generator=generator).to(next(model.parameters()).dtype)
        loss = nn.functional.mse_loss(model(batch), batch)
        if seed >= 2:
            loss = loss + model.late.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, OffloadOptimizer):
        optimizer.synchronize()


def build_packed(model: nn.Module, strategy: Strategy | None, form: str) -> Any:
    return build(model, strategy, offload.optim.AdamW, lr=1e-2, **FORMATS[form])


def packed_run(
    strategy: Strategy | None, form: str, seeds: range, state: Any = None, weights: Any = None
) -> tuple[Packable, Any]:
    model = Packable()
    if weights is not None:
        model.load_state_dict(weights)
    optimizer = build_packed(model, strategy, form)
    if state is not None:
        optimizer.load_state_dict(state)
    packed_steps(model, optimizer, seeds)
    return model, optimizer


@pytest.mark.parametrize("target", range(len(PACKED_WAYS)))
@pytest.mark.parametrize("source", range(len(PACKED_WAYS)))
def test_packed_states_move_between_strategies(
    machine: str, blocks: None, monkeypatch: pytest.MonkeyPatch, source: int, target: int
) -> None:
    """Formats take turns."""
    if machine == "late":
        # The simulator watches torch's operations, and a kernel's accesses to memory are none.
        monkeypatch.setattr("offload.optim.cpu.load", lambda: None)
    form = [*FORMATS][(source + target) % len(FORMATS)]
    reference, expected = packed_run(None, form, range(2))
    model, optimizer = packed_run(PACKED_WAYS[source], form, range(2))
    saved, weights = through_a_file([optimizer.state_dict(), model.state_dict()])
    assert_same_state(saved, expected.state_dict())
    resumed, optimizer = packed_run(PACKED_WAYS[target], form, range(2, 4), saved, weights)
    packed_steps(reference, expected, range(2, 4))
    assert_same(resumed, reference)
    assert_same_state(optimizer.state_dict(), expected.state_dict())


@pytest.mark.parametrize("new", FORMATS)
@pytest.mark.parametrize("old", FORMATS)
def test_packed_states_move_between_formats(threaded: Any, blocks: None, old: str, new: str) -> None:
    """As the packed optimizer itself converts them; also over states that there were. Strategies take turns."""
    strategies = [RESIDENT, STREAM, STREAM | ATTACHED | IN_BACKWARD, HOST]
    strategy = strategies[([*FORMATS].index(old) + 2 * [*FORMATS].index(new)) % len(strategies)]
    model, optimizer = packed_run(STREAM, old, range(2))
    saved, weights = through_a_file([optimizer.state_dict(), model.state_dict()])
    reference, expected = packed_run(None, new, range(2, 4), saved, weights)
    assert {group["state_dtype"] for group in expected.param_groups} == {FORMATS[new]["state_dtype"]}
    resumed, optimizer = packed_run(strategy, new, range(2, 4), saved, weights)
    assert_same(resumed, reference)
    assert_same_state(optimizer.state_dict(), expected.state_dict())

    pinned = optimizer.memory_report().get("pinned_host")
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    if "model" not in strategy:
        optimizer.sync_from_model()
    packed_steps(resumed, optimizer, range(2, 4))
    assert_same(resumed, reference)
    assert optimizer.memory_report().get("pinned_host") == pinned  # in the memory of those before


@pytest.mark.parametrize("strategy", [RESIDENT, STREAM | ATTACHED, HOST], ids=label)
@pytest.mark.parametrize("form", ["int8 split", "fp32 split", "bf16 stochastic"])
def test_packed_states_come_from_torch_and_go_there(threaded: Any, blocks: None, form: str, strategy: Strategy) -> None:
    """fp32 training, with masters, goes on in a packed format, and back: as without offloading, and to torch."""
    full = Packable(torch.float32)
    torch_optimizer = torch.optim.AdamW(full.parameters(), lr=1e-2)
    packed_steps(full, torch_optimizer, range(2))
    saved = offload.optim.from_plain(torch_optimizer.state_dict(), full.parameters())
    reference, expected = packed_run(None, form, range(2, 4), saved, full.state_dict())
    model, optimizer = packed_run(strategy, form, range(2, 4), saved, full.state_dict())
    assert_same(model, reference)
    assert_same_state(optimizer.state_dict(), expected.state_dict())

    back, expected_back = offload.optim.to_plain(optimizer), offload.optim.to_plain(expected)
    assert_same_state(back, expected_back)
    if form == "fp32 split":
        masters = [state["master"] for state in back["state"].values()]
        for master, param in zip(masters, model.parameters(), strict=True):
            assert torch.equal(master.bfloat16(), param) and not torch.equal(master, param.float())
    again = Packable(torch.float32)
    plain_again = torch.optim.AdamW(again.parameters(), lr=1e-2)
    plain_again.load_state_dict(back)
    packed_steps(again, plain_again, range(1))


BYTES = {"int8 none": 2 + 8 / 256, "int8 split": 4 + 8 / 256, "bf16 split": 6.0, "fp32 split": 10.0}


@pytest.mark.parametrize(
    "strategy",
    [RESIDENT, STREAM | {"offload_states": [{"pattern": ".*", "memory": "host"}]}, HOST],
    ids=["resident", "stream", "host"],
)
@pytest.mark.parametrize("form", BYTES)
def test_bytes_of_packed_states(threaded: Any, form: str, strategy: Strategy) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, dtype=torch.bfloat16) for _ in range(3)))
    optimizer = build(model, strategy, offload.optim.AdamW, lr=1e-2, **FORMATS[form])
    model(torch.randn(2, 128, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    report = optimizer.memory_report()
    held = sum(purposes.get("optimizer_state", 0) for purposes in report.values())
    assert held / sum(p.numel() for p in model.parameters()) == pytest.approx(BYTES[form], rel=0.01)


@pytest.fixture
def eagerly() -> Iterator[None]:
    """torchao compiles its update; without that it needs no compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize(
    ("source", "target"),
    [(STREAM | ATTACHED, HOST), (HOST, STREAM), (STREAM, None), (None, STREAM | IN_BACKWARD)],
    ids=label,
)
@pytest.mark.parametrize("base", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao_states_in_few_bits(
    eagerly: None, machine: str, base: str, source: Strategy | None, target: Strategy | None
) -> None:
    optimizer_class = getattr(torchao.optim, base)
    models, optimizers = [Wide(), Wide()], []
    for model, strategy in zip(models, [None, source], strict=True):
        optimizers.append(build(model, strategy, optimizer_class, lr=1e-3))
        wide_steps(model, optimizers[-1], range(2))
    saved = through_a_file(optimizers[1].state_dict())
    expected = optimizers[0].state_dict()
    kinds = {type(state["exp_avg"]) for state in expected["state"].values()}
    assert len(kinds) == 2  # the subclass for the matrices, a tensor for the bias
    assert_same_state(saved["state"], expected["state"])

    resumed = Wide()
    resumed.load_state_dict(models[1].state_dict())
    optimizer = build(resumed, target, optimizer_class, lr=1e-3)
    optimizer.load_state_dict(saved)
    assert_same_state(optimizer.state_dict()["state"], expected["state"])
    wide_steps(resumed, optimizer, range(2, 4))
    wide_steps(models[0], optimizers[0], range(2, 4))
    assert_same(resumed, models[0])


@pytest.mark.parametrize("target", [RESIDENT, STREAM, HOST, STREAM | ATTACHED | IN_BACKWARD], ids=label)
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_fp32_moments_of_bf16_weights(
    machine: str, target: Strategy, is_cut: bool, request: pytest.FixtureRequest
) -> None:
    """torch would cast a loaded moment to the weight's dtype; here it stays in its own, and is trained with in it."""
    if is_cut:
        request.getfixturevalue("chunks")
    kwargs = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    models = [make_model(torch.bfloat16) for _ in range(2)]
    reference = torch.optim.SGD(models[0].parameters(), **kwargs)
    train(models[0], reference, range(1))
    for state in reference.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].float() * (1 + 2**-12)
    models[1].load_state_dict(models[0].state_dict())
    optimizer = build(models[1], target, torch.optim.SGD, **kwargs)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])
    for model, each in zip(models, [reference, optimizer], strict=True):
        train(model, each, range(1, 4))
    assert_same(models[1], models[0])
    assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"])
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("moment", ["before forward", "after forward", "after backward", "after step"])
@pytest.mark.parametrize(
    "strategy",
    [
        STREAM,
        STREAM | ATTACHED,
        STREAM | ATTACHED | IN_BACKWARD,
        STREAM | ATTACHED | OFFLOADED,
        HOST | ATTACHED,
        PARTLY,
    ],
    ids=label,
)
@pytest.mark.parametrize("order", ["late", "early", 0, 1])
def test_loading_in_the_middle_of_a_run(
    monkeypatch: pytest.MonkeyPatch, chunks: None, order: Any, strategy: Strategy, moment: str
) -> None:
    """Also where the states that are replaced were brought to the device ahead of their update."""
    donor = make_model(seed=2)
    donor_optimizer = build(donor, None, lr=3e-3)
    train(donor, donor_optimizer, range(10, 14))
    other = donor_optimizer.state_dict()

    def run(strategy: Strategy | None) -> tuple[nn.Module, Any]:
        model = make_model()
        optimizer = build(model, strategy)
        for seed in range(6):
            if seed == 3 and moment == "before forward":
                optimizer.load_state_dict(copy.deepcopy(other))
            loss = loss_of(model, seed)
            if seed == 3 and moment == "after forward":
                optimizer.load_state_dict(copy.deepcopy(other))
            loss.backward()
            # In backward, the update comes before what is loaded after it.
            if seed == 3 and moment == "after backward" and "update_in_backward" not in (strategy or {}):
                optimizer.load_state_dict(copy.deepcopy(other))
            optimizer.step()
            if seed == 3 and moment == "after step":
                optimizer.load_state_dict(copy.deepcopy(other))
            optimizer.zero_grad()
        return model, optimizer

    if moment == "after backward" and "update_in_backward" in strategy:
        pytest.skip("the update in backward is over by then; `after step` covers it")
    expected, expected_optimizer = run(None)
    with device(order, monkeypatch):
        actual, optimizer = run(strategy)
        optimizer.synchronize()
        assert_same(actual, expected)
        assert_same_state(optimizer.state_dict()["state"], expected_optimizer.state_dict()["state"])


@pytest.mark.parametrize("strategy", [STREAM | ATTACHED, HOST, RESIDENT], ids=label)
def test_a_state_that_does_not_fit_changes_nothing(machine: str, strategy: Strategy) -> None:
    models = [make_model(), make_model()]
    optimizers = [build(models[0], strategy), build(models[1], None)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2))
    wrong = copy.deepcopy(optimizers[1].state_dict())
    wrong["state"][2]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"parameter 1\.bias has shape \(3,\), expected \(11,\)"):
        optimizers[0].load_state_dict(wrong)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2, 4))
    assert_same(*models)


@pytest.mark.parametrize("strategy", [RESIDENT, STREAM | ATTACHED, HOST | ATTACHED], ids=label)
def test_a_copy_of_the_state_stays_as_it_is(machine: str, strategy: Strategy) -> None:
    model, reference = make_model(), make_model()
    optimizer, plain_optimizer = build(model, strategy), build(reference, None)
    for each, its_optimizer in ((model, optimizer), (reference, plain_optimizer)):
        train(each, its_optimizer, range(2))
    copied = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    assert_same_state(copied, plain_optimizer.state_dict())
    assert not torch.equal(copied["state"][1]["exp_avg"], optimizer.state_dict()["state"][1]["exp_avg"])


# torch.distributed.checkpoint


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("target", WAYS, ids=label)
@pytest.mark.parametrize("source", [RESIDENT, STREAM | ATTACHED, HOST | ATTACHED | IN_BACKWARD, None], ids=label)
def test_distributed_checkpoints_state_dict(
    machine: str, source: Strategy | None, target: Strategy | None, flatten: bool
) -> None:
    """get_optimizer_state_dict returns the plain optimizer's, which set_optimizer_state_dict takes anywhere."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    models = [make_model(), make_model()]
    optimizers = [build(models[0], None), build(models[1], source)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2))
    expected, saved = (
        get_optimizer_state_dict(model, optimizer, options=options)
        for model, optimizer in zip(models, optimizers, strict=True)
    )
    assert_same_state(saved, expected)
    saved, weights = copy.deepcopy([saved, get_model_state_dict(models[1])])

    resumed = make_model(seed=1)
    set_model_state_dict(resumed, weights)
    optimizer = build(resumed, target)
    set_optimizer_state_dict(resumed, optimizer, saved, options=options)
    assert_same_state(get_optimizer_state_dict(resumed, optimizer, options=options), expected)
    train(resumed, optimizer, range(2, 4))
    train(models[0], optimizers[0], range(2, 4))
    assert_same(resumed, models[0])


@pytest.mark.parametrize("strategy", WAYS[:5], ids=label)
def test_distributed_checkpoint_asks_an_optimizer_without_state(machine: str, strategy: Strategy) -> None:
    """It makes the state by a step with gradients and a rate of zero; the weights stay."""
    model, untouched = make_model(), make_model()
    optimizer = build(model, strategy)
    state = get_optimizer_state_dict(model, optimizer)
    optimizer.synchronize()
    assert_same(model, untouched)
    assert_same_state(state, get_optimizer_state_dict(untouched, build(untouched, None)))


@pytest.mark.parametrize(
    ("source", "target"), [(STREAM | ATTACHED, HOST), (HOST, STREAM), (None, STREAM), (STREAM, None)], ids=label
)
def test_distributed_checkpoint_in_files(
    threaded: Any, tmp_path: Path, source: Strategy | None, target: Strategy | None
) -> None:
    model = make_model(torch.bfloat16)
    optimizer = build(model, source)
    train(model, optimizer, range(2))
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)

    resumed = make_model(torch.bfloat16, seed=1)
    other = build(resumed, target)
    loaded = {"model": get_model_state_dict(resumed), "optimizer": get_optimizer_state_dict(resumed, other)}
    checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(resumed, loaded["model"])
    set_optimizer_state_dict(resumed, other, loaded["optimizer"])
    if isinstance(other, OffloadOptimizer):
        other.sync_from_model()
    assert_same_state(get_optimizer_state_dict(resumed, other), get_optimizer_state_dict(model, optimizer))
    for each, its_optimizer in ((model, optimizer), (resumed, other)):
        train(each, its_optimizer, range(2, 4))
    assert_same(resumed, model)


# What torchao's tests check of its CPU offload optimizer


OFFLOADING = [STREAM, HOST, STREAM | ATTACHED, HOST | ATTACHED]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("gradients", [{}, OFFLOADED, OFFLOADED | IN_BACKWARD, IN_BACKWARD], ids=label)
@pytest.mark.parametrize("strategy", OFFLOADING, ids=label)
def test_parity_with_offloaded_gradients_and_accumulation(
    machine: str, strategy: Strategy, gradients: Strategy, accumulation: int
) -> None:
    """torchao's offloads gradients only without accumulation. One layer is frozen."""

    def run(strategy: Strategy | None) -> nn.Module:
        model = make_model()
        model[1].requires_grad_(False)
        optimizer = build(model, strategy, weight_decay=0.3)
        for step in range(4):
            for micro_batch in range(accumulation - 1):
                if strategy is None:
                    loss_of(model, 2 * step + micro_batch, 1 / accumulation).backward()
                else:
                    with optimizer.accumulate():
                        loss_of(model, 2 * step + micro_batch, 1 / accumulation).backward()
            loss_of(model, 2 * step + accumulation, 1 / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
        if strategy is not None:
            optimizer.synchronize()
        return model

    actual = run(strategy | gradients)
    assert_same(actual, run(None))
    assert torch.equal(actual[1].weight, make_model()[1].weight)


@pytest.mark.parametrize("strategy", OFFLOADING, ids=label)
def test_two_optimizers_go_on_alike_after_one_was_loaded_into_the_other(machine: str, strategy: Strategy) -> None:
    """Both trained before, on different data; afterwards both run at the same time, bit for bit the same."""
    models = [make_model(), make_model(seed=1)]
    optimizers = [build(model, strategy) for model in models]
    train(models[0], optimizers[0], range(3))
    train(models[1], optimizers[1], range(20, 22))
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    optimizers[1].sync_from_model()
    for seed in range(3, 6):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in optimizers:
        optimizer.synchronize()
    assert_same(*models)
    assert_same_state(optimizers[1].state_dict(), optimizers[0].state_dict())
    train(models[0], optimizers[0], range(6, 7))
    with pytest.raises(AssertionError, match="largest difference"):
        assert_same(*models)  # the two share nothing


@pytest.mark.parametrize("strategy", [*OFFLOADING, HOST | ATTACHED | IN_BACKWARD], ids=label)
def test_groups_with_rates_of_their_own_that_change(machine: str, strategy: Strategy) -> None:
    """Each group's ``lr`` is honoured, and so is a change of it through ``param_groups``; 0 stands still."""

    def run(strategy: Strategy | None) -> tuple[nn.Module, nn.Module]:
        model = make_model()
        groups: list[dict[str, Any]] = [
            {"params": model[0].parameters(), "lr": 0.0, "weight_decay": 0.5},
            {"params": list(model[1].parameters()) + list(model[3].parameters()), "lr": 3e-2},
            {"params": model[4].parameters()},
        ]
        attached = {} if strategy is None or not strategy.get("model") else {"model": model}
        optimizer: Any = (
            torch.optim.AdamW(groups, lr=1e-3, fused=True)
            if strategy is None
            else OffloadOptimizer(groups, lr=1e-3, **{**strategy, "model": None, **attached})
        )
        train(model, optimizer, range(2))
        before = copy.deepcopy(model)
        optimizer.param_groups[1]["lr"] = 0.0
        optimizer.param_groups[2]["lr"] = 5e-2
        train(model, optimizer, range(2, 4))
        return before, model

    (before, after), (expected_before, expected_after) = run(strategy), run(None)
    assert_same(before, expected_before)
    assert_same(after, expected_after)
    assert torch.equal(after[0].weight, make_model()[0].weight) and torch.equal(after[1].weight, before[1].weight)
    assert not torch.equal(after[4].weight, before[4].weight)


SLOW_LINK = Rates(up=1e3, down=1e3, device=1e9, host=1e9)
SLOW_UPDATE = Rates(up=1e9, down=1e9, device=1e3, host=1e3)


@pytest.mark.parametrize("rates", [SLOW_LINK, SLOW_UPDATE], ids=["slow link", "slow update"])
@pytest.mark.parametrize("seconds", [0.0, 1e3], ids=["fast layers", "slow layers"])
@pytest.mark.parametrize("gradients", [{}, OFFLOADED, IN_BACKWARD, OFFLOADED | IN_BACKWARD], ids=label)
@pytest.mark.parametrize("strategy", OFFLOADING, ids=label)
def test_long_transfers_and_short_compute(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy, gradients: Strategy, seconds: float, rates: Rates
) -> None:
    """What is not waited for is read too early where transfers take long; the simulator also finds it by its clocks.

    The reference runs before, alone, so that nothing it waits for hides what this run does not.
    """
    reference = make_model()
    train(reference, build(reference, None), range(4))
    with device("time", monkeypatch, rates) as simulator:
        model = make_model()
        for layer in model:
            layer.register_forward_pre_hook(lambda *_: simulator.compute(seconds, "layer"))
        optimizer = build(model, strategy | gradients)
        train(model, optimizer, range(4))
        assert_same(model, reference)
        assert simulator.finish() > 4 * 5 * seconds

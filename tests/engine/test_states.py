"""Where optimizer states rest, how they lie there, and that loading keeps dtype, place and memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from offload.engine import units
from offload.engine.memory import HostMemory, padded
from offload.engine.placement import Placement
from offload.engine.runtime import HostRuntime
from offload.engine.states import Layout, States, components, rebuild
from offload.engine.units import Unit, build_units

RULES = [".*", {"pattern": "exp_avg/.*norm.*", "memory": "device"}]


class Pair(Tensor):
    """A tensor subclass made of codes and a scale, as torchao's 8-bit states are."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, shape: Any) -> Pair:
        pair: Pair = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        pair.codes, pair.scale = codes, scale
        return pair

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, shape: Any, stride: Any) -> Pair:
        return cls(inner["codes"], inner["scale"], shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


class Device(HostRuntime):
    shares_memory = False


def pair(*shape: int) -> Pair:
    count = torch.Size(shape).numel()
    return Pair(torch.arange(count, dtype=torch.uint8).reshape(shape), torch.tensor([0.5]), shape)


def made(rules: Any = ".*", **params: nn.Parameter) -> tuple[States, torch.optim.Optimizer, Unit]:
    base = torch.optim.SGD(params.values(), lr=0.1)
    states = States(base, lambda param: param, Placement(rules), HostMemory(Device()))
    members = [(p, f"m.{name}", 0, position) for position, (name, p) in enumerate(params.items())]
    (unit,) = build_units(members, named=True, can_cut=True)
    return states, base, unit


def rest(states: States, unit: Unit, values: dict[str, dict[str, Any]]) -> None:
    for piece in unit.pieces:
        states.rest([(part, {}, dict(values[part.name])) for part in piece.slices], Tensor.copy_)


def test_components_and_rebuild() -> None:
    value = pair(2, 3)
    assert components(torch.ones(2)) and [c.dtype for c in components(value)] == [torch.uint8, torch.float32]
    again = rebuild(value, iter([value.codes + 1, value.scale]))
    assert isinstance(again, Pair) and torch.equal(again.codes, value.codes + 1) and again.shape == (2, 3)


def test_states_of_a_piece_lie_side_by_side_and_move_in_one_copy() -> None:
    states, base, unit = made(a=nn.Parameter(torch.zeros(5)), b=nn.Parameter(torch.zeros(2, 3)))
    values = {
        "m.a": {"step": torch.tensor(1.0), "exp_avg": torch.full((5,), 1.0), "exp_avg_sq": torch.full((5,), 2.0)},
        "m.b": {"exp_avg": torch.full((2, 3), 3.0), "exp_avg_sq": pair(2, 3)},
    }
    rest(states, unit, values)
    layout = states.layout(unit.pieces[0])
    assert len(layout.runs) == 1 and layout.nbytes == sum(map(padded, (20, 20, 24, 6, 4)))
    assert len(layout.staged) == 4  # scalars are not worth a copy
    assert states.layout(unit.pieces[0]) is layout

    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for host, offset in layout.runs:
        buffer[offset : offset + host.numel()] = host
    for part in unit.pieces[0].slices:
        staged = states.staged(part, layout, buffer)
        for key, value in values[part.name].items():
            assert all(map(torch.equal, components(staged[key]), components(value)))
            resting = base.state[part.param][key]
            if value.dim():
                assert components(staged[key])[0].data_ptr() != components(resting)[0].data_ptr()
                assert type(resting) is type(value)
            else:
                assert staged[key] is resting


def test_rules_split_a_layout() -> None:
    rules = [".*", {"pattern": "exp_avg_sq/m.a", "memory": "device"}, {"pattern": ".*/m.b", "memory": "host"}]
    states, base, unit = made(rules, a=nn.Parameter(torch.zeros(5)), b=nn.Parameter(torch.zeros(6)))
    on_device = torch.ones(5)
    both = {"exp_avg": torch.ones(6), "exp_avg_sq": torch.ones(6)}
    rest(states, unit, {"m.a": {"exp_avg": torch.ones(5), "exp_avg_sq": on_device}, "m.b": both})
    layout = states.layout(unit.pieces[0])
    assert [(s.slice.name, s.key) for s in layout.staged] == [
        ("m.a", "exp_avg"),
        ("m.b", "exp_avg"),
        ("m.b", "exp_avg_sq"),
    ]
    assert len(layout.runs) == 2  # two kinds of memory
    assert base.state[unit.params[0]]["exp_avg_sq"] is on_device


def test_a_replaced_state_gets_a_new_layout() -> None:
    states, base, unit = made(a=nn.Parameter(torch.zeros(5)))
    rest(states, unit, {"m.a": {"exp_avg": torch.ones(5)}})
    before = states.layout(unit.pieces[0])
    assert states.layout(unit.pieces[0]) is before
    base.state[unit.params[0]]["exp_avg"] = torch.full((5,), 7.0)
    states.forget_layouts()
    after = states.layout(unit.pieces[0])
    assert after is not before and torch.equal(after.runs[0][0].view(torch.float32), torch.full((5,), 7.0))


@pytest.mark.parametrize("attached", [False, True], ids=["", "model"])
def test_a_state_that_the_caller_replaces_is_used(simulated: Any, attached: bool) -> None:
    """Also where its old values were on their way up already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    twin = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    twin.load_state_dict(model.state_dict())
    ours = OffloadOptimizer(
        model.named_parameters(), strategy="stream", lr=1e-2, model=model if attached else None, fused=True
    )
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        for each, optimizer in ((model, ours), (twin, plain)):
            each(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"].clone().mul_(0.5)
    ours.synchronize()
    for actual, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(actual, expected)


def test_ranges_of_a_large_parameter_share_one_resting_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "CHUNK_ELEMENTS", 4)
    param = nn.Parameter(torch.zeros(2, 5))
    states, base, unit = made(w=param)
    assert len(unit.pieces) == 3
    for number, piece in enumerate(unit.pieces):
        (part,) = piece.slices
        assert states.layout(piece).nbytes == 0 and states.staged(part, Layout(), torch.empty(0)) == {}
        now = {"step": torch.tensor(1.0), "exp_avg": torch.full((part.numel,), float(number))}
        states.rest([(part, {}, now)], Tensor.copy_)
    assert base.state[param]["exp_avg"].flatten().tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 2
    assert base.state[param]["exp_avg"].shape == (2, 5) and base.state[param]["step"] == 1
    first, second = (states.staged(p.slices[0], Layout(), torch.empty(0))["step"] for p in unit.pieces[:2])
    assert first is not second  # an update of one range does not count for another
    assert [states.layout(piece).nbytes for piece in unit.pieces] == [64, 64, 64]


class Blockwise(torch.optim.SGD):
    """Has a state with one element for four of the parameter."""

    state_block = {"scale": 4, "other_scale": 4}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("rules", [".*", "values/.*", []], ids=str)
def test_ranges_of_states_with_one_element_for_a_block(
    monkeypatch: pytest.MonkeyPatch, rules: Any, order: tuple[int, ...]
) -> None:
    monkeypatch.setattr(units, "CHUNK_ELEMENTS", 8)
    param = nn.Parameter(torch.zeros(2, 9))
    base = Blockwise([param], lr=0.1)
    states = States(base, lambda param: param, Placement(rules), HostMemory(Device()))
    (unit,) = build_units([(param, "m.w", 0, 0)], named=True, can_cut=True, block=4)
    assert [piece.numel for piece in unit.pieces] == [8, 8, 2]
    for number, piece in enumerate(unit.pieces):
        (part,) = piece.slices
        blocks = -(-part.numel // 4)
        now = {
            "values": torch.full((part.numel,), float(number)),
            "scale": torch.arange(blocks) + 10.0 * number,
            "other_scale": torch.arange(blocks) + 100.0 * (number + 1),
        }
        states.rest([(part, {}, now)], Tensor.copy_)
    state = base.state[param]
    assert state["scale"].tolist() == [0.0, 1.0, 10.0, 11.0, 20.0]
    assert state["other_scale"].tolist() == [100.0, 101.0, 200.0, 201.0, 300.0]
    assert state["values"].shape == (2, 9)

    buffers = []
    for piece in unit.pieces:
        layout = states.layout(piece)
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for host, offset in layout.runs:
            buffer[offset : offset + host.numel()] = host
        buffers.append(buffer)
        (part,) = piece.slices
        staged = states.staged(part, layout, buffer)
        assert staged["scale"].tolist() == state["scale"][part.start // 4 :][: -(-part.numel // 4)].tolist()
        for value in staged.values():
            value.add_(1000.0)
    # Down in any order: no piece brings along what is another's.
    for index in order:
        for host, offset in states.layout(unit.pieces[index]).runs:
            host.copy_(buffers[index][offset : offset + host.numel()])
    assert state["scale"].tolist() == [1000.0, 1001.0, 1010.0, 1011.0, 1020.0]
    assert state["other_scale"].tolist() == [1100.0, 1101.0, 1200.0, 1201.0, 1300.0]
    states.publish()
    assert set(base.state[param]) == {"values", "scale", "other_scale"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def trained(steps: int, dtype: torch.dtype = torch.float32, **kwargs: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    net = Net().to(dtype)
    plain = kwargs.pop("plain", False)
    optimizer: Any
    if plain:
        optimizer = torch.optim.AdamW(net.named_parameters(), lr=1e-2, fused=True)
    else:
        optimizer = OffloadOptimizer(net.named_parameters(), strategy="stream", lr=1e-2, **kwargs)
    train(net, optimizer, steps)
    return net, optimizer


def train(net: Net, optimizer: Any, steps: int) -> None:
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        net(torch.randn(2, 6, generator=generator).to(net.linear.weight.dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("rules", [".*", RULES, "exp_avg_sq/.*", [{"pattern": ".*", "memory": "host"}], []], ids=str)
def test_every_placement_equals_the_plain_optimizer(simulated: Any, rules: Any) -> None:
    net, optimizer = trained(4, offload_states=rules)
    reference, plain = trained(4, plain=True)
    for (name, a), (_, b) in zip(net.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        for key, value in plain.state[b].items():
            assert torch.equal(optimizer.state[a][key], value), f"{key}/{name}"


def test_memory_report_follows_the_rules(simulated: Any) -> None:
    def report(rules: Any) -> dict[str, int]:
        _, optimizer = trained(2, offload_states=rules)
        kinds = optimizer.memory_report()
        return {kind: purposes["optimizer_state"] for kind, purposes in kinds.items() if "optimizer_state" in purposes}

    moments = 4 * (36 + 6 + 6 + 6)
    pinned = report(".*")
    assert pinned["pinned_host"] >= 2 * moments

    def unpinned(kinds: dict[str, int]) -> int:
        return kinds.get("device", 0) + kinds.get("host", 0)  # the played device's tensors are the CPU's

    norms = report(RULES)
    assert unpinned(norms) - unpinned(pinned) == 2 * 6 * 4  # exp_avg of weight and bias
    pageable = report([{"pattern": ".*", "memory": "host"}])
    assert "pinned_host" not in pageable and pageable["host"] >= 2 * moments
    nothing = report([])
    assert "pinned_host" not in nothing and sum(nothing.values()) >= 2 * moments


@pytest.mark.parametrize("rules", [".*", RULES], ids=str)
def test_loading_reuses_memory_and_keeps_the_values(simulated: Any, rules: Any) -> None:
    net, optimizer = trained(3, offload_states=rules)
    places = {key: value.data_ptr() for key, value in optimizer.state[net.linear.weight].items() if value.dim()}
    saved = copy.deepcopy(optimizer.state_dict())
    before = optimizer.memory_report()
    train(net, optimizer, 2)
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert {k: v.data_ptr() for k, v in optimizer.state[net.linear.weight].items() if v.dim()} == places
    assert optimizer.memory_report()["pinned_host"] == before["pinned_host"]
    for index, state in saved["state"].items():
        for key, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][index][key], value)


def test_loading_keeps_another_dtype_and_its_memory_kind(simulated: Any) -> None:
    net, optimizer = trained(2, torch.bfloat16)
    saved = copy.deepcopy(optimizer.state_dict())
    third = torch.full((6, 6), 1 / 3)  # not a bf16 number
    saved["state"][0]["exp_avg"] = third.clone()
    pinned = optimizer.memory_report()["pinned_host"]["optimizer_state"]
    optimizer.load_state_dict(saved)
    loaded = optimizer.state[net.linear.weight]["exp_avg"]
    assert loaded.dtype == torch.float32 and torch.equal(loaded, third)
    assert optimizer.memory_report()["pinned_host"]["optimizer_state"] >= pinned
    assert optimizer.state[net.linear.weight]["exp_avg_sq"].dtype == torch.bfloat16

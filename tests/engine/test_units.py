"""What is updated together, how it is named, and how it is cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from offload.engine import units
from offload.engine.units import Unit, build_units, clean_name, flat_bytes, unit_of


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(float(torch.Size(shape).numel())).reshape(shape))


def built(*named: tuple[str, nn.Parameter], is_named: bool = True, can_cut: bool = True) -> list[Unit]:
    return build_units(
        [(p, name, 0, position) for position, (name, p) in enumerate(named)], named=is_named, can_cut=can_cut
    )


def sizes(unit: Unit) -> list[list[tuple[str, int, int]]]:
    return [[(part.name, part.start, part.stop) for part in piece.slices] for piece in unit.pieces]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "CHUNK_ELEMENTS", 16)


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("layers.0.attn.q_proj.weight", "layers.0.attn.q_proj.weight"),
        ("layers.0._checkpoint_wrapped_module.attn.weight", "layers.0.attn.weight"),
        ("_orig_mod.layers.0.attn.weight", "layers.0.attn.weight"),
        ("_orig_mod.layers.0._checkpoint_wrapped_module._orig_mod.mlp.w1.weight", "layers.0.mlp.w1.weight"),
        ("module.layers.0.weight", "layers.0.weight"),
        ("_fsdp_wrapped_module.layers.1._fsdp_wrapped_module.norm.scale", "layers.1.norm.scale"),
        ("layers.0._checkpoint_wrapped_module", "layers.0"),
        ("submodule.weight", "submodule.weight"),
        ("my_orig_module.weight", "my_orig_module.weight"),
        ("weight", "weight"),
        ("", ""),
    ],
)
def test_names_lose_what_wrappers_put_in(name: str, clean: str) -> None:
    assert clean_name(name) == clean


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("layers.3.attn.q_proj.weight", "layers.3"),
        ("layers.3.mlp.experts.7.w1.weight", "layers.3"),
        ("layers.31.attn.q_proj.lora_a.weight", "layers.31"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", "base_model.model.model.layers.0"),
        ("0.weight", "0"),  # nn.Sequential
        ("2.0.weight", "2"),
        ("tok_embeddings.weight", "tok_embeddings"),
        ("model.norm.scale", "model.norm"),
        ("layers.3._checkpoint_wrapped_module.attn.weight", "layers.3"),
        ("scale", ""),
        ("0", ""),  # a parameter list's own entry is no module
    ],
)
def test_a_unit_is_a_numbered_module_or_the_module_itself(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_units_of_a_real_model_with_wrappers_equal_those_without() -> None:
    def names(model: nn.Module) -> list[str]:
        return [unit.name for unit in built(*model.named_parameters())]

    layers = [nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(3)]
    plain = nn.ModuleDict({"layers": nn.ModuleList(layers), "head": nn.Linear(2, 2)})
    wrapped = nn.ModuleDict(
        {"layers": nn.ModuleList([checkpoint_wrapper(layer) for layer in layers]), "head": nn.Linear(2, 2)}
    )
    assert names(plain) == names(wrapped) == ["layers.0", "layers.1", "layers.2", "head"]


def test_units_come_in_the_order_of_their_first_parameter() -> None:
    found = built(("b.weight", param(2)), ("a.weight", param(3)), ("b.bias", param(1)))
    assert [unit.name for unit in found] == ["b", "a"]
    assert [[p.numel() for p in unit.params] for unit in found] == [[2, 1], [3]]


def test_without_a_models_names_each_parameter_is_a_unit() -> None:
    assert [unit.name for unit in built(("0.0", param(2)), ("0.1", param(2)), is_named=False)] == ["0.0", "0.1"]


@pytest.mark.usefixtures("small_chunks")
def test_small_parameters_share_a_piece_up_to_the_limit() -> None:
    (unit,) = built(("m.a", param(10)), ("m.b", param(7)), ("m.c", param(6)), ("m.d", param(16)), ("m.e", param(9)))
    assert sizes(unit) == [[("m.a", 0, 10), ("m.c", 0, 6)], [("m.b", 0, 7), ("m.e", 0, 9)], [("m.d", 0, 16)]]
    assert all(piece.numel <= 16 and piece.unit is unit for piece in unit.pieces)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("count", [17, 31, 32, 33, 48, 100])
def test_a_large_parameter_is_cut_into_ranges_that_cover_it_once(count: int) -> None:
    large = param(count)
    (unit,) = built(("m.w", large))
    ranges: Sequence[units.Slice] = [part for piece in unit.pieces for part in piece.slices]
    assert len(unit.pieces) == len(ranges) == -(-count // 16)
    assert torch.equal(torch.cat([part.of(large.detach()) for part in ranges]), large.detach())
    assert [part.is_last for part in ranges] == [False] * (len(ranges) - 1) + [True]
    assert not any(part.is_whole for part in ranges) and all(part.numel <= 16 for part in ranges)


@pytest.mark.usefixtures("small_chunks")
def test_what_cannot_be_cut_stays_whole() -> None:
    (unit,) = built(("m.w", param(40)), can_cut=False)
    assert sizes(unit) == [[("m.w", 0, 40)]]
    (unit,) = built(("m.w", nn.Parameter(torch.zeros(8, 5).t())))  # a flat view would be a copy
    assert sizes(unit) == [[("m.w", 0, 40)]]


def test_a_range_is_a_view_of_what_has_the_parameters_shape() -> None:
    (unit,) = built(("m.w", param(4, 6)))
    part = units.Slice(unit.params[0], "m.w", 0, 0, 5, 11)
    other = torch.zeros(4, 6)
    part.of(other).fill_(1.0)
    assert other.flatten().nonzero().flatten().tolist() == [5, 6, 7, 8, 9, 10]
    with pytest.raises(RuntimeError, match="view"):
        part.of(torch.zeros(6, 4).t())
    whole = unit.pieces[0].slices[0]
    assert whole.is_whole and whole.is_last and whole.of(other) is other


def test_ranges_begin_at_whole_blocks(small_chunks: None) -> None:
    """With scales for 12 elements each, 16 elements at most are 12."""
    (unit,) = build_units([(param(40), "m.w", 0, 3)], named=True, can_cut=True, block=12)
    parts = [part for piece in unit.pieces for part in piece.slices]
    assert [(part.position, part.start, part.stop) for part in parts] == [
        (3, 0, 12),
        (3, 12, 24),
        (3, 24, 36),
        (3, 36, 40),
    ]
    scales = torch.arange(4.0)
    assert [part.of(scales, 12).tolist() for part in parts] == [[0.0], [1.0], [2.0], [3.0]]
    (unit,) = build_units([(param(40), "m.w", 0, 0)], named=True, can_cut=True, block=100)
    assert [sizes(unit)] == [[[("m.w", 0, 40)]]]


def test_groups_are_kept_and_pieces_named_for_traces() -> None:
    (unit,) = build_units([(param(2), "m.0.a", 0, 0), (param(2), "m.0.b", 1, 1)], named=True, can_cut=True)
    assert [part.group for part in unit.pieces[0].slices] == [0, 1]
    assert unit.pieces[0].name == "m.0: m.0.a"


def test_flat_bytes_is_a_view() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    flat = flat_bytes(tensor)
    assert flat.shape == (12,) and flat.dtype == torch.uint8
    flat.fill_(0x3F)
    assert (tensor != 0).all()

"""Batches: their order, what is counted, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.overrides import TorchFunctionMode

from offload import torchao_shim
from offload.data import packing
from offload.data.batches import Batch, Batches, Collate, PackedCollate, build_batches, document_mask
from offload.data.collate import padded_collate_sft
from offload.errors import UserError
from offload.simulation.accelerator import SimulatedAccelerator
from offload.training.step import count_steps


def pad(samples: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(len(sample["tokens"]) for sample in samples)
    return {
        name: torch.tensor([sample[name] + [fill] * (longest - len(sample[name])) for sample in samples])
        for name, fill in (("tokens", 0), ("labels", -100))
    }


DATA = [{"tokens": [i + 1] * (i % 4 + 2), "labels": [-100] + [i + 1] * (i % 4 + 1)} for i in range(23)]


def batches(**options: Any) -> Batches:
    options = {"batch_size": 4, "shuffle": True, "seed": 3, **options}
    return Batches(DATA, Collate(pad, None, -100), **options)  # type: ignore[arg-type]


def ids(loader: Batches, epoch: int, start: int = 0) -> list[list[int]]:
    return [[int(row[0]) for row in batch.inputs["tokens"]] for batch in loader.epoch(epoch, start)]


def test_an_epoch_can_be_entered_anywhere() -> None:
    whole = ids(batches(), 1)
    assert len(whole) == len(batches()) == 5
    assert [ids(batches(), 1, start) for start in range(6)] == [whole[start:] for start in range(6)]


@pytest.mark.parametrize(("ranks", "each"), [(2, 2), (4, 1), (3, 2)])
def test_processes_share_the_batches_that_one_would_have(ranks: int, each: int) -> None:
    whole = batches(batch_size=ranks * each)
    shares = [batches(batch_size=each, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert {len(share) for share in shares} == {len(whole)}
    for start in (0, 2):
        dealt = [ids(share, 1, start) for share in shares]
        assert [sum(parts, []) for parts in zip(*dealt, strict=True)] == ids(whole, 1, start)


def test_processes_that_no_sample_is_left_for_get_one_that_does_not_count() -> None:
    """23 samples in batches of 3 x 4: the last one has 11, and one of 2 x 10 has 3, for the first process alone."""
    for ranks, each in ((3, 4), (2, 10)):
        options = {"drop_last": False, "shuffle": False}
        (want,) = list(batches(batch_size=ranks * each, **options).epoch(0))[-1:]
        last = [list(batches(batch_size=each, rank=rank, ranks=ranks, **options).epoch(0)) for rank in range(ranks)]
        assert len({len(share) for share in last}) == 1
        assert sum(share[-1].num_labels for share in last) == want.num_labels
        assert sum(share[-1].num_tokens for share in last) == want.num_tokens
        for share in last:
            assert int((share[-1].labels != -100).sum()) == share[-1].num_labels
    assert [share[-1].num_labels == 0 for share in last] == [False, True]


def test_order_depends_on_seed_and_epoch_and_nothing_else() -> None:
    torch.manual_seed(1)
    first = ids(batches(), 0)
    torch.manual_seed(2)
    assert ids(batches(), 0) == first
    assert ids(batches(), 1) != first and ids(batches(seed=4), 0) != first
    assert sorted(sum(first, [])) != sum(first, [])


def test_an_epoch_is_as_long_as_its_order_where_a_row_that_comes_several_times_is_left_out() -> None:
    loader = batches(mixture=[(23, 2.0)])
    loader.leave_out([3])
    assert loader.num_samples == 44 == len(loader.order(0)) == len(loader.order(1))


def test_loading_leaves_the_run_s_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    ids(batches(), 0)
    assert torch.equal(torch.rand(3), expected)


def test_what_does_not_fill_a_batch() -> None:
    assert sum(len(b) for b in ids(batches(shuffle=False), 0)) == 20
    assert sum(ids(batches(shuffle=False, drop_last=False), 0), []) == list(range(1, 24))


def test_a_token_s_label_is_the_next_one() -> None:
    batch = Collate(pad, None, -100)([DATA[1], DATA[4]])
    assert isinstance(batch, Batch)
    assert batch.inputs["tokens"].tolist() == [[2, 2, 2], [5, 5, 0]]
    assert batch.labels.tolist() == [[2, 2, -100], [5, -100, -100]]
    assert (batch.num_tokens, batch.num_labels, batch.sample_length) == (5, 3, 2.5)


def test_padding_of_our_packs_is_not_counted() -> None:
    """Also where the token that pads is one of a sample's: the pack tells how many pad it."""
    sample = {"tokens": [1, 7, 0], "labels": [-100, 7, 0]}
    collate = Collate(PackedCollate(masks=False, has_flex_attention=False), 0, -100)
    batch = collate([packing.packed(samples, 8, pad_id=0) for samples in ([sample, sample], [sample])])
    assert isinstance(batch, Batch)
    assert batch.labels.tolist() == [[7, 0, -100, 7, 0, -100, -100, -100], [7, 0] + [-100] * 6]
    assert (batch.num_tokens, batch.num_labels) == (9, 6)


def test_padding_is_not_counted() -> None:
    batch = next(batches(shuffle=False).epoch(0))
    assert batch.inputs["tokens"].shape == (4, 5)
    assert batch.num_tokens == 2 + 3 + 4 + 5 and batch.sample_length == 3.5
    assert batch.num_labels == int((batch.labels != -100).sum()) == 1 + 2 + 3 + 4


def test_padding_of_packs_is_not_counted() -> None:
    tokens = torch.tensor([[4, 5, 0, 6, 2, 0, 0, 0]])
    pack = {"tokens": tokens, "labels": tokens.clone(), "input_pos": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    collate = Collate(lambda samples: {**pack, "labels": pack["labels"].clone()}, 0, -100)
    batch = collate([{"tokens": tokens[0]}])
    assert batch.num_tokens == 5 and batch.sample_length == 2.5


# ------------------------------------------------------------------------------------------- to the device


class Calls(TorchFunctionMode):
    """Records how tensors are moved."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[dict[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            self.moves.append({"from": args[0], "to": args[1], **(kwargs or {})})
        return func(*args, **(kwargs or {}))


def test_a_batch_is_copied_without_waiting_for_the_device() -> None:
    batch = next(batches(shuffle=False).epoch(0))
    with Calls() as calls:
        moved = batch.to(torch.device("meta"))
    assert len(calls.moves) == 2 and all(move["non_blocking"] for move in calls.moves)
    assert moved.labels.is_meta and moved.inputs["tokens"].is_meta and moved.num_labels == batch.num_labels
    assert batch.to(torch.device("cpu")) is batch


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_for_a_device_are_page_locked(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Every tensor of them, by whatever loads them; played, because page-locking needs an accelerator."""
    locked: list[int] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        locked.append(copy.data_ptr())
        return copy

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    made = list(batches(shuffle=False, pin_memory=True, num_workers=workers).epoch(0))
    assert len(made) == 5
    for batch in made:
        assert {batch.labels.data_ptr(), batch.inputs["tokens"].data_ptr()} <= set(locked)
    locked.clear()
    next(batches(shuffle=False, num_workers=workers).epoch(0))
    assert locked == []


def test_every_tensor_of_a_batch_is_page_locked_and_the_rest_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)
    zero = torch.zeros(1, dtype=torch.int64)
    batch = Batch({"tokens": zero, "mask": None}, zero, 5, 4, 2.5, documents=zero).pin_memory()
    assert batch == Batch({"tokens": zero + 1, "mask": None}, zero + 1, 5, 4, 2.5, documents=zero + 1)


PACKS = [
    {
        "tokens": torch.arange(256),
        "labels": torch.arange(256),
        "input_pos": torch.arange(256),
        "seq_lens": torch.tensor(n),
    }
    for n in ([3, 130, 123], [256], [1, 127, 128])
]


def packed(has_flex_attention: bool) -> Batch:
    torchao_shim.install()
    return Collate(PackedCollate(True, has_flex_attention), 0, -100)([dict(pack) for pack in PACKS])


def test_packs_are_collated_as_torchtune_does() -> None:
    torchao_shim.install()
    from torchtune.data import padded_collate_packed

    expected = padded_collate_packed([dict(pack) for pack in PACKS])
    del expected["labels"]
    batch = packed(has_flex_attention=False)
    assert batch.documents is None and batch.inputs.keys() == expected.keys()
    assert all(torch.equal(batch.inputs[name], expected[name]) for name in expected)


def test_packs_without_a_mask_tell_where_documents_end() -> None:
    inputs = Collate(PackedCollate(False, False), 0, -100)([dict(pack) for pack in PACKS]).inputs
    ends = inputs["document_ends"]
    assert ends.dtype == torch.int32 and ends.tolist() == [0, 3, 133, 256, 512, 513, 640, 768]
    assert inputs["longest_document"] == 256 and "mask" not in inputs
    assert Collate(PackedCollate(False, False), 0, -100)([dict(PACKS[0])]).inputs["longest_document"] == 130


def test_samples_are_padded_as_torchtune_does() -> None:
    torchao_shim.install()
    from torchtune import data

    samples = [
        {"tokens": [5, 6, 7], "labels": [-100, 6, 7]},
        {"tokens": [], "labels": []},
        {"tokens": [9], "labels": [9]},
        {"tokens": torch.arange(2), "labels": [1, 2]},
    ]
    expected = data.padded_collate_sft(samples, padding_idx=3, ignore_idx=-7)
    made = padded_collate_sft(samples, padding_idx=3, ignore_idx=-7)
    assert made.keys() == expected.keys() and made["tokens"].shape == (4, 3)
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor) and made[name].dtype == tensor.dtype


def test_the_mask_for_flex_attention_is_the_dense_one_and_made_without_waiting() -> None:
    batch = packed(has_flex_attention=True)
    assert "mask" not in batch.inputs and batch.documents is not None
    with SimulatedAccelerator() as device:
        mask = document_mask(batch.documents)
        assert device.host_waits == []
    assert isinstance(mask, BlockMask)
    dense = create_mask(mask.mask_mod, 3, 1, 256, 256, device="cpu")
    expected = packed(has_flex_attention=False).inputs["mask"]
    assert torch.equal(dense[:, 0], expected)
    # Blocks of 128 that hold anything.
    blocks = expected.view(3, 2, 128, 2, 128).any(dim=4).any(dim=2)
    assert torch.equal(mask.to_dense()[:, 0].bool(), blocks) and not blocks.all()


def test_the_mask_is_made_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    monkeypatch.setattr("offload.data.batches.document_mask", made.append)
    moved = packed(has_flex_attention=True).to(torch.device("meta"))
    assert len(made) == 1 and made[0].is_meta and moved.inputs["mask"] is None


@pytest.mark.parametrize(
    ("device", "locked", "flex"), [("cpu", False, False), ("cuda", True, True), ("xpu", True, False)]
)
@pytest.mark.parametrize("supported", [True, False])
def test_batches_suit_their_device(
    monkeypatch: pytest.MonkeyPatch, device: str, locked: bool, flex: bool, supported: bool
) -> None:
    """Also on a machine that has CUDA and trains on the CPU."""
    torchao_shim.install()
    from torchtune.datasets import PackedDataset

    class Packs(PackedDataset):  # type: ignore[misc]
        def __init__(self) -> None:
            self.packs, self.padding_idx = PACKS, 0

        def __getitem__(self, index: int) -> dict[str, Any]:
            return dict(PACKS[index])

    made: dict[str, Any] = {}
    loader = torch.utils.data.DataLoader
    monkeypatch.setattr("offload.data.batches.open_dataset", lambda *_: Packs())
    monkeypatch.setattr("torchtune.utils._import_guard._SUPPORTS_FLEX_ATTENTION", supported)
    monkeypatch.setattr(
        "offload.data.batches.DataLoader", lambda *a, **k: made.update(k) or loader(*a, **{**k, "pin_memory": False})
    )
    section = OmegaConf.create({"_component_": "any"})
    built = build_batches(
        section, None, key="dataset", collate_fn="", ignore_index=-100, device=torch.device(device), batch_size=3,
        shuffle=False, seed=0,
    )  # fmt: skip
    batch = next(iter(built.epoch(0)))
    assert made["pin_memory"] is locked
    assert (batch.documents is not None) == (flex and supported) != ("mask" in batch.inputs)


def test_steps_per_epoch() -> None:
    def steps(**options: Any) -> int:
        defaults = {"batches_per_epoch": 10, "num_samples": 40, "batch_size": 4, "accumulation": 3, "max_steps": None}
        return count_steps(**{**defaults, **options})

    assert (steps(), steps(max_steps=2), steps(max_steps=9), steps(accumulation=10)) == (3, 2, 3, 1)
    with pytest.raises(UserError, match="40 samples"):
        steps(accumulation=11)

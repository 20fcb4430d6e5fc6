"""Batches: their order, what is counted, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.errors import UserError
from offload.training.data import Batches, Collate
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


def test_order_depends_on_seed_and_epoch_and_nothing_else() -> None:
    torch.manual_seed(1)
    first = ids(batches(), 0)
    torch.manual_seed(2)
    assert ids(batches(), 0) == first
    assert ids(batches(), 1) != first and ids(batches(seed=4), 0) != first
    assert sorted(sum(first, [])) != sum(first, [])


def test_loading_leaves_the_run_s_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    ids(batches(), 0)
    assert torch.equal(torch.rand(3), expected)


def test_what_does_not_fill_a_batch() -> None:
    assert sum(len(b) for b in ids(batches(shuffle=False), 0)) == 20
    assert sum(ids(batches(shuffle=False, drop_last=False), 0), []) == list(range(1, 24))


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


def test_steps_per_epoch() -> None:
    def steps(**options: Any) -> int:
        defaults = {"batches_per_epoch": 10, "num_samples": 40, "batch_size": 4, "accumulation": 3, "max_steps": None}
        return count_steps(**{**defaults, **options})

    assert (steps(), steps(max_steps=2), steps(max_steps=9), steps(accumulation=10)) == (3, 2, 3, 1)
    with pytest.raises(UserError, match="40 samples"):
        steps(accumulation=11)

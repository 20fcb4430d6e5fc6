"""Large tensors pass a step at a time between memory and a checkpoint's files, from a source that reuses its memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from offload.checkpoints import shared_states
from offload.checkpoints.shared_states import SavedStates, split, write_from
from offload.distributed.world import World
from offload.models import shares
from offload.models.shares import WeightFile, begin_files, empty_like, read_share, write_share
from offload.models.weight_files import WeightFiles

STEP = 96


class Reusing:
    """A source that gives values in one buffer, whoever asked for what before."""

    def __init__(self, **named: Tensor) -> None:
        self.sizes: list[int] = []
        self.order: list[str] = []
        self._named = named
        self._left = dict(named)

    @contextlib.contextmanager
    def reading(self, tensor: Tensor) -> Iterator[Tensor]:
        (name,) = (name for name, each in self._named.items() if _lies_in(tensor, each))
        assert name in self._left, "it is read after it was done with"
        if self.order[-1:] != [name]:
            self.order.append(name)
        self.sizes.append(tensor.nbytes)
        lent = tensor.detach().clone()
        yield lent
        lent.view(-1).view(torch.uint8).fill_(0xAB)

    def done(self, tensor: Tensor) -> None:
        (name,) = (name for name, each in self._named.items() if each.data_ptr() == tensor.data_ptr())
        del self._left[name]

    def position(self, tensor: Tensor) -> float:
        return 0.0

    def close(self) -> None:
        assert not self._left


def _lies_in(part: Tensor, whole: Tensor) -> bool:
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes


def in_files(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of ``rows`` two tensors, ``plain`` as it is, and one that is computed of two."""
    found: dict[str, Tensor] = {}
    if (rows := weights.get("rows")) is not None:
        found |= {"rows.0": rows[:5], "rows.1": rows[5:]}
    if (plain := weights.get("plain")) is not None:
        found["plain"] = plain
    if "left" in weights and "right" in weights:
        found["joined"] = torch.cat([weights["left"], weights["right"]], dim=1)
    return found


def in_model(files: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if "rows.0" in files and "rows.1" in files:
        found["rows"] = torch.cat([files["rows.0"], files["rows.1"]])
    if (plain := files.get("plain")) is not None:
        found["plain"] = plain
    if (joined := files.get("joined")) is not None:
        found |= {"left": joined[:, :3].contiguous(), "right": joined[:, 3:].contiguous()}
    return found


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "rows": torch.randn(13, 7),
        "plain": torch.randn(70).bfloat16(),
        "left": torch.randn(6, 3),
        "right": torch.randn(6, 5),
    }


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "STEP_BYTES", STEP)
    monkeypatch.setattr(shared_states, "STEP_BYTES", STEP)


@pytest.fixture
def small_writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The system writes less than it was given; how much at once."""
    pwrite, written = os.pwrite, []

    def few(descriptor: int, memory: Any, offset: int) -> int:
        written.append(pwrite(descriptor, memory[:40], offset))
        return written[-1]

    monkeypatch.setattr(os, "pwrite", few)
    return written


def test_weights_are_written_and_read_a_step_at_a_time(
    small_steps: None, small_writes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = weights()
    empty = empty_like(model)
    targets = in_files(empty)
    files = [WeightFile("a.safetensors", {name: targets[name] for name in ("rows.0", "plain")}),
             WeightFile("b.safetensors", {name: targets[name] for name in ("rows.1", "joined")})]  # fmt: skip
    plan = begin_files(tmp_path, files, empty, in_files)
    source, synced = Reusing(**model), []
    monkeypatch.setattr(shares, "sync", synced.append)
    write_share(tmp_path, plan, model, in_files, source=source)
    source.close()
    assert len(synced) == 2, "each file is forced to the disk"
    wholes = {model[name].nbytes for name in ("left", "right")}  # what is computed needs its sources whole
    assert max(size for size in source.sizes if size not in wholes) <= STEP and len(source.sizes) > 6
    assert max(small_writes) <= 40
    want = in_files(model)
    got = {**load_file(tmp_path / "a.safetensors"), **load_file(tmp_path / "b.safetensors")}
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)

    read: list[int] = []
    params = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    params["plain"] = torch.zeros(140, dtype=torch.bfloat16)[::2]  # not contiguous
    with WeightFiles(sorted(tmp_path.glob("*.safetensors"))) as stored:
        take = stored.read

        def noted(name: str, start: int = 0, count: int | None = None) -> Tensor:
            read.append(0 if count is None else count * stored.empty[name].element_size())
            return take(name, start, count)

        monkeypatch.setattr(stored, "read", noted)
        read_share(params, stored, in_model)
    assert all(torch.equal(params[name], tensor) for name, tensor in model.items())
    assert max(read) <= STEP


def test_a_range_of_a_tensor_is_read_where_it_begins(small_steps: None, tmp_path: Path) -> None:
    whole = torch.arange(100.0).view(20, 5)
    plan = begin_files(
        tmp_path, [WeightFile("a.safetensors", empty_like({"whole": whole}))], empty_like({"whole": whole}), dict
    )
    write_share(tmp_path, plan, {"whole": whole}, dict)
    params = {"head": torch.zeros(7, 5), "tail": torch.zeros(13, 5)}

    def cut(files: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"head": files["whole"][:7], "tail": files["whole"][7:]}

    with WeightFiles([tmp_path / "a.safetensors"]) as stored:
        read_share(params, stored, cut)
    assert torch.equal(torch.cat([params["head"], params["tail"]]), whole)


def test_only_what_is_in_a_file_is_read_of_a_weight(small_steps: None, tmp_path: Path) -> None:
    model = {"rows": torch.randn(13, 7)}
    empty = empty_like(model)

    def last(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"last": given["rows"][11:]}

    plan = begin_files(tmp_path, [WeightFile("a.safetensors", last(empty))], empty, last)
    source = Reusing(**model)
    write_share(tmp_path, plan, model, last, source=source)
    assert torch.equal(load_file(tmp_path / "a.safetensors")["last"], model["rows"][11:])
    assert sum(source.sizes) < model["rows"].nbytes / 2


def test_the_next_updates_weights_are_written_first(tmp_path: Path) -> None:
    model = weights()
    empty = empty_like(model)
    positions = {"plain": 0.0, "left": 3.0, "right": 1.0, "rows": 2.0}
    plan = begin_files(tmp_path, [WeightFile("a.safetensors", in_files(empty))], empty, in_files, positions.__getitem__)
    source = Reusing(**model)
    write_share(tmp_path, plan, model, in_files, source=source)
    assert source.order == ["plain", "left", "right", "rows"], "what is computed comes with the first of its sources"


def test_states_are_written_a_step_at_a_time_and_read_whole(small_steps: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    states = {
        0: {"exp_avg": torch.randn(13, 7), "exp_avg_sq": torch.randint(256, (13, 7), dtype=torch.uint8), "step": 3},
        1: {"exp_avg": torch.randn(3, 50), "exp_avg_sq": torch.randn(1, 2), "step": 4},
        2: {"exp_avg": torch.randn(97), "exp_avg_sq": torch.randn(24), "step": 5},
    }
    rest, shared = split(states, lambda tensor: True)
    order = sorted(shared, reverse=True)
    source = Reusing(**shared)
    write_from(tmp_path, {name: shared[name] for name in order}, source, World())
    source.close()
    assert source.order == order, "in the order that was asked for"
    row = 50 * 4
    assert max(source.sizes) == row and max(size for size in source.sizes if size != row) <= STEP
    assert sum(source.sizes) == sum(tensor.nbytes for tensor in shared.values())
    saved = SavedStates(tmp_path, rest)
    assert list(saved) == [0, 1, 2]
    for index, state in states.items():
        got = saved[index]
        assert got.keys() == state.keys() and got["step"] == state["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            assert got[key].dtype == state[key].dtype and torch.equal(got[key], state[key])

"""A checkpoint that is not what was written is found, named and passed over; permissions, fsync, chosen folders."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import durable
from offload.checkpoints import folders
from offload.checkpoints import manager as checkpoint
from offload.checkpoints import manifest as checkpoint_manifest
from offload.checkpoints import state as recipe_state
from offload.checkpoints.manager import CheckpointManager
from offload.checkpoints.manifest import DamagedCheckpoint
from offload.checkpoints.sums import checksum, checksum_of
from offload.errors import UserError
from offload.models.torchtune.checkpoint import TorchtuneFormat
from tests.checkpoints.test_manager import section, write_base  # type: ignore[import-not-found]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("sums") / "base"
    write_base(folder, "LLAMA2")
    return folder


@pytest.fixture
def manager(base: Path, tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out")


def save(manager: CheckpointManager, *steps: int) -> list[Path]:
    model = manager.format.load_base()
    return [manager.save(s, model=model, recipe_state={"step": s, "t": torch.full((3000,), float(s))}) for s in steps]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_the_checksum_is_xxh3(tmp_path: Path) -> None:
    # https://github.com/Cyan4973/xxHash/blob/v0.8.2/tests/sanity_test_vectors.h: no bytes, seed 0
    assert checksum_of(b"") == "xxh3_64:2d06800538d394c2"
    content = os.urandom(9 * 2**20 + 3)  # more than two blocks
    (tmp_path / "file").write_bytes(content)
    assert checksum(tmp_path / "file") == checksum_of(content)


def test_the_sum_taken_while_writing_is_the_files(tmp_path: Path) -> None:
    state = {"a": torch.rand(100_000), "b": [1, "x", torch.zeros(0)], "c": torch.rand(7, 5).T}
    assert recipe_state.write(recipe_state.Prepared(state).value, tmp_path / "state") == checksum(tmp_path / "state")


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("model-00001-of-00001.safetensors", -4000),
        ("model-00001-of-00001.safetensors", 20),
        ("recipe_state.pt", -5000),
        ("recipe_state.pt", 200),
        ("config.json", 5),
        ("model.safetensors.index.json", 5),
    ],
)
def test_a_flipped_bit_anywhere_is_found(manager: CheckpointManager, name: str, at: int) -> None:
    (path,) = save(manager, 1)
    manager.load(path)
    flip(path / name, at)
    with pytest.raises(DamagedCheckpoint, match=f"{name} is not what was written"):
        manager.load(path)


def test_any_flipped_bit_of_the_manifest_is_found(manager: CheckpointManager) -> None:
    (path,) = save(manager, 12)
    file = path / "checkpoint.json"
    content = file.read_bytes()
    expected = checkpoint_manifest.read(path)
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        file.write_bytes(changed)
        try:
            found = checkpoint_manifest.read(path)
        except UserError:
            continue
        assert found == expected  # only space between the members may change


def test_a_damaged_newest_checkpoint_is_passed_over_and_deleted_first(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out", keep_last_n=2)
    first, second = save(manager, 1, 2)
    flip(second / "model-00001-of-00001.safetensors", 20)  # the header, in its right size
    with caplog.at_level(logging.WARNING):
        found = manager.load_newest()
    assert found is not None and found[0] == first and found[1].recipe_state["step"] == 1
    (line,) = caplog.messages
    assert "step_2 is damaged: model-00001-of-00001.safetensors is not what was written" in line
    assert "download" not in line
    save(manager, 3)
    assert sorted(path.name for path in manager.output_dir.iterdir()) == ["step_1", "step_3"]


def test_nothing_is_found_where_all_are_damaged(manager: CheckpointManager) -> None:
    for path in save(manager, 1, 2):
        flip(path / "recipe_state.pt", 300)
    assert manager.load_newest() is None


def test_a_damaged_checkpoint_that_is_saved_again_is_kept_as_the_others_are(base: Path, tmp_path: Path) -> None:
    manager = CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out", keep_last_n=2)
    _, second = save(manager, 1, 2)
    flip(second / "recipe_state.pt", 300)
    assert manager.load_newest() is not None
    save(manager, 2, 3)
    assert sorted(path.name for path in manager.output_dir.iterdir()) == ["step_2", "step_3"]


def left_by_another(manager: CheckpointManager, name: str, purpose: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a process that is gone called a folder."""
    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "getpid", lambda: 2**22 + 1)  # above any process id
        return folders.sibling(manager.output_dir / name, purpose)


def test_a_checkpoint_that_was_set_aside_is_resumed_from(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that was killed while it put another one in its place."""
    _, second = save(manager, 1, 2)
    second.rename(left_by_another(manager, "step_2", "old", monkeypatch))
    found = manager.load_newest()
    assert found is not None and found[0] == second and found[1].recipe_state["step"] == 2


def test_room_for_a_checkpoint_is_made_of_what_dead_processes_left(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_by_another(manager, "step_1", "tmp", monkeypatch)
    left.mkdir()
    seen: list[bool] = []
    monkeypatch.setattr(checkpoint, "free_bytes", lambda folder: seen.append(left.exists()))
    save(manager, 2)
    assert seen == [False]


@pytest.mark.parametrize("left_out", [False, True])
def test_all_that_a_checkpoint_has_needs_room(left_out: bool, manager: CheckpointManager, monkeypatch: Any) -> None:
    """Weights, states of the optimizer in files of their own and in the recipe's, an adapter for peft and to resume."""
    tensors = {name: torch.zeros(10_000) for name in ("model", "adapter", "shared", "own")}
    optimizer = {"state": {0: {"exp_avg": tensors["shared"], "exp_avg_sq": tensors["own"]}}, "param_groups": []}
    nbytes = sum(tensor.nbytes for tensor in (*tensors.values(), tensors["adapter"])) - (40_000 if left_out else 0)
    monkeypatch.setattr(checkpoint, "free_bytes", lambda folder: nbytes + 20_000 + checkpoint._SPARE_BYTES)
    given: Any = (1, {"w": tensors["model"]}, {"optimizer": optimizer}, {"w": tensors["adapter"]}, {})
    with pytest.raises(UserError, match="the disk is too full; it needs") if left_out else contextlib.nullcontext():
        manager._begin(*given, is_apart=lambda tensor: tensor is tensors["shared"])


def test_all_is_on_the_disk_before_a_checkpoint_gets_its_name(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[set[str]] = []
    fsync_tree = folders.fsync_tree

    def noted(folder: Path) -> None:
        assert not (manager.output_dir / "step_1").exists()
        forced.append({path.name for path in folder.iterdir()})
        fsync_tree(folder)

    monkeypatch.setattr(folders, "fsync_tree", noted)
    (path,) = save(manager, 1)
    assert forced == [{each.name for each in path.iterdir()}]


def test_a_checkpoint_without_checksums_is_read(manager: CheckpointManager) -> None:
    (path,) = save(manager, 1)
    manifest = json.loads((path / "checkpoint.json").read_text())
    del manifest["checksums"], manifest["checksum"]
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    assert manager.load(path).recipe_state["step"] == 1
    flip(path / "model-00001-of-00001.safetensors", 20)
    with pytest.raises(DamagedCheckpoint, match="resume from another checkpoint"):
        manager.load(path)


def test_a_chosen_checkpoint(manager: CheckpointManager, base: Path, tmp_path: Path) -> None:
    first, second = save(manager, 1, 2)
    assert manager.load_chosen("step_1")[1].step == 1
    assert manager.load_chosen(str(second))[0] == second
    save(
        CheckpointManager(TorchtuneFormat(section(base)), first), 9
    )  # a checkpoint with others in it is one all the same
    assert manager.load_chosen("step_1")[1].step == 1
    with pytest.raises(UserError, match="no folder step_3, neither in .*step_1, step_2"):
        manager.load_chosen("step_3")
    with pytest.raises(UserError, match="no such user"):
        manager.load_chosen("~nobody-of-that-name/x")
    with pytest.raises(UserError, match=rf"a run's folder, expected .* \(step_1, step_2\): give {second}, the newest"):
        manager.load_chosen(str(manager.output_dir))


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_follow_the_umask(manager: CheckpointManager, mask: int) -> None:
    before = os.umask(mask)
    try:
        (path,) = save(manager, 1)
    finally:
        os.umask(before)
    for file in path.iterdir():
        if file.suffix in (".safetensors", ".pt"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask, file


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_fsync(
    manager: CheckpointManager, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    durable._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        paths = save(manager, 1, 2)
    assert [manager.load(path).step for path in paths] == [1, 2]
    assert len(caplog.messages) == 1 and "cannot force data to the disk" in caplog.messages[0]


def test_another_failure_of_fsync_is_told(manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match="cannot save .*Input/output error"):
        save(manager, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", "expected the path"), ("~nobody-of-that-name/x", "no such user"), ("a\0b", "expected the path")],
)
def test_an_output_dir_that_is_no_path(base: Path, given: Any, expected: str) -> None:
    with pytest.raises(UserError, match=f"^output_dir: .*{expected}"):
        CheckpointManager(TorchtuneFormat(section(base)), given)


def test_no_probe_is_left_by_a_kill(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is there while writing is tried would stay."""
    seen: list[str] = []

    def list_and_sync(folder: Path) -> None:
        seen.extend(path.name for path in folder.iterdir())

    import tempfile

    real = tempfile.TemporaryFile

    def listed(*args: Any, **kwargs: Any) -> Any:
        file = real(*args, **kwargs)
        list_and_sync(Path(kwargs["dir"]))
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", listed)
    CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out")
    assert seen == []

"""A checkpoint that is written beside training is the one that would have been written at once."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from offload.checkpoints.manifest import difference, read
from offload.checkpoints.shared_states import SavedStates
from offload.engine.copy_on_write import Snapshot
from tests.recipes.conftest import Workspace  # type: ignore[import-not-found]

BESIDE = "enable_async_checkpointing=True"
OFTEN = ("max_steps_per_epoch=4", "save_every_n_steps=1")
LORA = "lora_finetune_single_device"
IN_BACKWARD = ("optimizer.update_in_backward=True", "clip_grad_norm=null")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing is read of a snapshot before training wants to update something; bytes that were kept meanwhile."""
    kept: list[int] = []
    wanted: dict[Snapshot, threading.Event] = {}
    reading, before_update = Snapshot.reading, Snapshot.before_update

    @contextlib.contextmanager
    def late_reading(self: Snapshot, tensor: Tensor) -> Iterator[Tensor]:
        event = wanted.setdefault(self, threading.Event())
        event.wait(0.3)  # after the last one comes no update
        event.set()
        time.sleep(1e-3)
        with reading(self, tensor) as values:
            yield values

    def noted(self: Snapshot, key: Any) -> None:
        wanted.setdefault(self, threading.Event()).set()
        before_update(self, key)
        kept.append(self._room.used)

    monkeypatch.setattr(Snapshot, "reading", late_reading)
    monkeypatch.setattr(Snapshot, "before_update", noted)
    return kept


def models_differ(one: Path, other: Path) -> list[str]:
    names = {path.relative_to(one) for path in one.rglob("*") if path.suffix in (".safetensors", ".json", ".model")}
    names.discard(Path("checkpoint.json"))
    assert any(name.suffix == ".safetensors" for name in names)
    return [str(name) for name in sorted(names) if (one / name).read_bytes() != (other / name).read_bytes()]


def is_whole(folder: Path) -> bool:
    manifest = read(folder)
    return difference(folder, manifest, manifest.sums) is None


def state_of(folder: Path) -> dict[str, Any]:
    assert is_whole(folder)
    content: dict[str, Any] = torch.load(folder / "recipe_state.pt", weights_only=True)
    state: dict[str, Any] = content["recipe_state"]
    if SavedStates.are_in(folder):
        state["optimizer"]["state"] = dict(SavedStates(folder, state["optimizer"]["state"]))
    return {"adapter": content["adapter"], **{key: state[key] for key in state if key != "config"}}


def assert_equal(one: Any, other: Any, where: str = "state") -> None:
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}[{key}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}[{index}]")
    else:
        assert one == other, where


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer.strategy=host", "optimizer.offload_gradients=True"),
        ("optimizer.strategy=stream", *IN_BACKWARD, "gradient_accumulation_steps=2"),
        ("optimizer.strategy=resident", "optimizer.optimizer_class=offload.optim.AdamW", "async_checkpoint_gib=0.125"),
    ],
    ids=["host", "stream in backward", "resident int8"],
)
def test_a_checkpoint_holds_one_step_and_resumes_bit_for_bit(
    overrides: tuple[str, ...], workspace: Workspace, tmp_path: Path, late: list[int]
) -> None:
    at_once = workspace.run(tmp_path / "at_once", *OFTEN, *overrides)
    assert at_once.status == 0, at_once.err
    beside = workspace.run(tmp_path / "beside", *OFTEN, *overrides, BESIDE)
    assert beside.status == 0, beside.err
    assert max(late) > 0
    for step in range(1, 5):
        name = f"step_{step}"
        assert models_differ(tmp_path / "at_once" / name, tmp_path / "beside" / name) == []
        assert_equal(state_of(tmp_path / "beside" / name), state_of(tmp_path / "at_once" / name))
    resumed = workspace.run(
        tmp_path / "resumed", *OFTEN, *overrides, f"resume_from_checkpoint={tmp_path / 'beside' / 'step_2'}"
    )
    assert resumed.status == 0, resumed.err
    assert models_differ(tmp_path / "at_once" / "step_4", tmp_path / "resumed" / "step_4") == []
    assert_equal(state_of(tmp_path / "resumed" / "step_4"), state_of(tmp_path / "at_once" / "step_4"))


def test_updates_wait_where_there_is_no_room(
    workspace: Workspace, tmp_path: Path, late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = "offload.training.saving.reserve_snapshot"
    monkeypatch.setattr(reserve, lambda optimizer, gib: optimizer.reserve_snapshot(1 << 13))
    at_once = workspace.run(tmp_path / "at_once", *OFTEN)
    beside = workspace.run(tmp_path / "beside", *OFTEN, BESIDE)
    assert at_once.status == beside.status == 0, beside.err
    assert max(late) <= 1 << 13
    for step in range(1, 5):
        name = f"step_{step}"
        assert models_differ(tmp_path / "at_once" / name, tmp_path / "beside" / name) == []
        assert_equal(state_of(tmp_path / "beside" / name), state_of(tmp_path / "at_once" / name))


def test_tied_weights_of_transformers(workspace: Workspace, tmp_path: Path, late: list[int]) -> None:
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(workspace.path / "base", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    for name in ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"):
        if (workspace.path / "base" / name).exists():
            (tmp_path / "base" / name).write_bytes((workspace.path / "base" / name).read_bytes())
    config = yaml.safe_load(workspace.config("full_finetune_single_device").read_text())
    del config["checkpointer"]
    path = str(tmp_path / "base")
    config["model"] = {"_component_": "offload.models.huggingface.from_pretrained", "path": path}
    here = Workspace(tmp_path / "hf", workspace.recipes, workspace.capture)
    here.path.mkdir()
    here.config("full_finetune_single_device").write_text(yaml.safe_dump(config))
    runs = [here.run(tmp_path / name, *OFTEN, *more) for name, more in (("at_once", ()), ("beside", (BESIDE,)))]
    assert [run.status for run in runs] == [0, 0], runs[1].err
    for step in range(1, 5):
        name = f"step_{step}"
        assert models_differ(tmp_path / "at_once" / name, tmp_path / "beside" / name) == []
        assert_equal(state_of(tmp_path / "beside" / name), state_of(tmp_path / "at_once" / name))


@pytest.mark.parametrize("library", ["torchtune", "transformers"])
def test_merged_weights_are_those_of_their_step(
    library: str, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = workspace
    if library == "transformers":
        config = yaml.safe_load(workspace.config(LORA).read_text())
        del config["checkpointer"], config["evaluation"]
        path = str(workspace.path / "base")
        config["model"] = {"_component_": "offload.models.huggingface.from_pretrained", "path": path}
        config["adapter"] = {"_component_": "peft.LoraConfig", "r": 4, "target_modules": ["q_proj", "v_proj"]}
        config["adapter"] |= {"modules_to_save": ["lm_head"], "use_dora": True}
        here = Workspace(tmp_path / "hf", workspace.recipes, workspace.capture)
        here.path.mkdir()
        here.config(LORA).write_text(yaml.safe_dump(config))
    at_once = here.run(tmp_path / "at_once", *OFTEN, recipe=LORA)
    pwrite = os.pwrite

    def late(*arguments: Any) -> int:
        time.sleep(5e-3)
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", late)
    beside = here.run(tmp_path / "beside", *OFTEN, BESIDE, "optimizer=torch.optim.AdamW", recipe=LORA)
    assert at_once.status == beside.status == 0, at_once.err + beside.err
    for step in range(1, 5):
        name = f"step_{step}"
        assert models_differ(tmp_path / "at_once" / name, tmp_path / "beside" / name) == []
        assert_equal(state_of(tmp_path / "beside" / name)["adapter"], state_of(tmp_path / "at_once" / name)["adapter"])


def test_a_disk_that_fills_up_meanwhile_is_told_between_steps(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, main = os.pwrite, threading.main_thread()
    failing = threading.Event()

    def fail(*arguments: Any) -> int:
        if threading.current_thread() is not main and (tmp_path / "run" / "step_1").exists() and not failing.is_set():
            failing.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", fail)
    result = workspace.run(tmp_path / "run", "save_every_n_steps=1", BESIDE, "keep_last_n=1")
    assert result.status == 2 and failing.is_set()
    (error,) = result.errors()
    assert "No space left on device" in error and "step_2" in error and "earlier checkpoints are untouched" in error
    (saved,) = (tmp_path / "run").glob("*step_*")
    assert f"saved {saved} before stopping" in result.err  # the disk has room again
    assert is_whole(saved) and read(saved).step > 2


def test_an_older_checkpoint_goes_when_the_newer_is_whole(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present: list[list[str]] = []
    pwrite, run = os.pwrite, tmp_path / "run"

    def noted(*arguments: Any) -> int:
        present.append(sorted(path.name for path in run.glob("step_*")))
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", noted)
    result = workspace.run(run, "max_steps_per_epoch=3", "save_every_n_steps=1", BESIDE, "keep_last_n=1")
    assert result.status == 0, result.err
    assert [names for names, after in zip(present, [*present[1:], None], strict=True) if names != after] == [
        [],
        ["step_1"],
        ["step_2"],
    ]
    assert [path.name for path in run.glob("*step_*")] == ["step_3"]


def test_the_end_waits_and_tells_how_far_it_is(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.training.saving.TOLD_AFTER", 0.01)
    pwrite = os.pwrite

    def slow(*arguments: Any) -> int:
        time.sleep(5e-3)
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", slow)
    result = workspace.run(tmp_path / "run", "max_steps_per_epoch=2", BESIDE)
    assert result.status == 0, result.err
    assert "waiting for step_2: " in result.out + result.err and "MiB are written" in result.out + result.err
    assert read(tmp_path / "run" / "step_2").step == 2


def test_other_optimizers_are_refused(workspace: Workspace, tmp_path: Path) -> None:
    result = workspace.run(tmp_path / "run", BESIDE, "optimizer=torch.optim.AdamW")
    assert result.status == 2 and not (tmp_path / "run").exists()
    (error,) = result.errors()
    assert "enable_async_checkpointing: torch.optim.AdamW" in error and "optimizer=offload.OffloadOptimizer" in error

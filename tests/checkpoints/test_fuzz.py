"""Damaged and forged checkpoints: one line or a good checkpoint, never a traceback, a hang, code that runs or a file
that changes."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.checkpoints import manifest as checkpoint_manifest
from offload.checkpoints import state as recipe_state
from offload.checkpoints.manager import CheckpointManager, Loaded
from offload.device import random_state, set_random_state
from offload.distributed import world as processes
from offload.errors import UserError
from offload.models.torchtune.checkpoint import TorchtuneFormat
from offload.training.resume import check_fields, put_back, put_back_random
from tests.checkpoints.test_manager import section, write_base  # type: ignore[import-not-found]

CPU = torch.device("cpu")
SECONDS = 20  # for one input; all of them together take seconds
ODD = (
    None, True, False, 0, -1, 2**31, 2**63, 2**200, 1.5, float("nan"), float("inf"), "", "x", "\0", "../../x",
    "/etc/passwd", b"", b"x", (), [], {}, [[]], {"a": []}, {0: 1}, {"": {}}, [None] * 3, 1j, torch.zeros(0),
    torch.zeros(3), torch.tensor(float("nan")), torch.zeros(2, 2, dtype=torch.int64), torch.ones(5, dtype=torch.uint8),
    torch.float32, torch.Size([2]), torch.zeros(3).to_sparse(),
)  # fmt: skip
ODD_JSON = (None, True, 0, -1, 1.5, 1e400, 2**70, "", "x", "../../x", "/etc/passwd", "\0", [], {}, [[]], {"a": {}})


class World:
    """A run's folder with two checkpoints, the newer of which is changed, and what a resumed run loads it into."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        write_base(folder / "base", "LLAMA2")
        self.canary = folder / "canary"
        self.manager = CheckpointManager(TorchtuneFormat(section(folder / "base")), folder / "out")
        self.weights = self.manager.format.load_base()
        self.optimizers: list[Callable[[Any], torch.optim.Optimizer]] = [
            lambda params: torch.optim.AdamW(params, lr=1e-3),
            lambda params: offload.OffloadOptimizer(params, "torch.optim.AdamW", strategy="host", lr=1e-3),
            lambda params: offload.OffloadOptimizer(
                params, "offload.optim.AdamW", strategy="stream", state_dtype="int8", lr=1e-3
            ),
        ]
        for step in (1, 2):
            self.newest = self.manager.save(step, model=self.weights, recipe_state=self._state(step))
        self.good = {path: path.read_bytes() for path in self.newest.rglob("*") if path.is_file()}
        self.older = self._content(self.manager.output_dir / "step_1")

    def _build(self, which: int) -> tuple[torch.optim.Optimizer, Any]:
        params = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5))]
        optimizer = self.optimizers[which](params)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def _state(self, step: int) -> dict[str, Any]:
        optimizer, scheduler = self._build(0)
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        return {
            "epoch": 0,
            "step_in_epoch": step,
            "global_step": step,
            "tokens_seen": 100 * step,
            "seed": 1,
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": scheduler.state_dict(),
            "random": random_state(CPU),
            "config": {"batch_size": 2, "optimizer": {"lr": 1e-3}},
        }

    def seal(self) -> None:
        """Makes what is there look as if it had been written so."""
        manifest = self.newest / "checkpoint.json"
        manifest.unlink(missing_ok=True)
        checkpoint_manifest.write(self.newest, step=2, sequence=2, sums={})

    def heal(self) -> None:
        """Puts the newer checkpoint back."""
        for path in self.newest.rglob("*"):
            if path.is_symlink() or path.is_file():
                path.unlink()
        for path in sorted(self.newest.rglob("*"), reverse=True):
            path.rmdir()
        for path, content in self.good.items():
            path.write_bytes(content)

    @staticmethod
    def _content(folder: Path) -> dict[str, bytes | str]:
        return {
            str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
            for path in folder.rglob("*")
        }

    def try_to_resume(self, which: int) -> str:
        """What a run does with the folder; returns how it went."""
        before = self._content(self.manager.output_dir)
        generators = random_state(CPU)
        try:
            found = self.manager.load_newest()
            assert found is not None, "the older checkpoint is good"
            path, loaded = found
            assert isinstance(loaded, Loaded) and loaded.model is not None
            check_fields(loaded.recipe_state, path)
            optimizer, scheduler = self._build(which)
            put_back(loaded.recipe_state, optimizer, scheduler, path)
            put_back_random(loaded.recipe_state, CPU, path, processes.World())
            outcome = path.name
        except UserError as error:
            assert len(str(error).splitlines()) == 1, str(error)
            outcome = "refused"
        finally:
            set_random_state(generators, CPU)
        assert self._content(self.manager.output_dir) == before
        assert not self.canary.exists()
        return outcome


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(autouse=True)
def _watched(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL)

    def hung(*_: Any) -> None:
        raise AssertionError(f"took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, hung)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def some_file(world: World, rng: random.Random) -> Path:
    return rng.choice(sorted(world.good))


def truncate(world: World, rng: random.Random) -> None:
    path = some_file(world, rng)
    path.write_bytes(world.good[path][: rng.randrange(len(world.good[path]))])


def flip_bits(world: World, rng: random.Random) -> None:
    path = some_file(world, rng)
    content = bytearray(world.good[path])
    start = rng.choice((0, 0, rng.randrange(len(content))))  # headers are at the start
    for _ in range(rng.choice((1, 1, 2, 20))):
        content[min(len(content) - 1, start + rng.randrange(1 + len(content) // 4))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def change_files(world: World, rng: random.Random) -> None:
    path = some_file(world, rng)
    kind = rng.randrange(6)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(b"")
    elif kind == 2:
        path.unlink()
        path.mkdir()
    elif kind == 3:
        path.unlink()
        path.symlink_to(path)
    elif kind == 4:
        path.write_bytes(rng.randbytes(rng.choice((1, 8, 1000, len(world.good[path])))))
    else:
        (world.newest / rng.choice(("extra", "model-00002-of-00002.safetensors", "a.bin"))).write_bytes(b"extra")


def change_json(value: Any, rng: random.Random, odd: tuple[Any, ...]) -> Any:
    """``value`` with something in it replaced, removed or added."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
        key = rng.choice(list(value) if isinstance(value, dict) else list(range(len(value))))
        copy = value.copy()
        action = rng.random()
        if action < 0.15:
            del copy[key]
        elif action < 0.25 and isinstance(copy, dict):
            other = rng.choice([item for item in odd if isinstance(item, str)])
            copy[other] = copy.pop(key)
        else:
            copy[key] = change_json(copy[key], rng, odd)
        return copy
    if isinstance(value, tuple):
        changed = change_json(list(value), rng, odd)
        return tuple(changed) if isinstance(changed, list) else changed
    return rng.choice(odd)


def forge_manifest(world: World, rng: random.Random) -> None:
    path = world.newest / "checkpoint.json"
    content = change_json(json.loads(world.good[path]), rng, ODD_JSON)
    if isinstance(content, dict) and rng.random() < 0.7:
        content["checksum"] = checkpoint_manifest._own_checksum(content)
    text = json.dumps(content)
    if rng.random() < 0.1:
        text = rng.choice(("[" * 100_000, '{"a":' * 50_000, "NaN", "", "\ufeff{}", '{"format": 1e999}'))
    path.write_text(text)


def forge_state(world: World, rng: random.Random) -> None:
    path = world.newest / "recipe_state.pt"
    content = recipe_state.read(path)
    for _ in range(rng.choice((1, 1, 3))):
        content = change_json(content, rng, ODD) if isinstance(content, dict) else content
    path.unlink()  # the tensors of `content` are mapped from it
    torch.save(content, path)
    world.seal()


class Evil:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: Path, how: int) -> None:
        self._canary, self._how = canary, how

    def __reduce__(self) -> Any:
        name = str(self._canary)
        return (
            (os.mkdir, (name,)),
            (os.system, (f"mkdir {name}",)),
            (exec, (f"import os; os.mkdir({name!r})",)),
            (torch.hub.load, (name, "x")),
            (eval, (f"__import__('os').mkdir({name!r})",)),
        )[self._how]


def forge_code(world: World, rng: random.Random) -> None:
    path = world.newest / "recipe_state.pt"
    content = recipe_state.read(path)
    evil = Evil(world.canary, rng.randrange(5))
    target = rng.choice((content, content["recipe_state"], content["recipe_state"]["optimizer"]))
    target[rng.choice(list(target))] = evil
    path.unlink()
    if rng.random() < 0.3:
        path.write_bytes(pickle.dumps(content if rng.random() < 0.5 else evil))
    else:
        torch.save(content, path)
    world.seal()


def forge_pickle(world: World, rng: random.Random) -> None:
    """Another program for the unpickler, in a whole archive."""
    path = world.newest / "recipe_state.pt"
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in parts if name.endswith("data.pkl"))
    program = bytearray(parts[name])
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(program))
        program[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    parts[name] = bytes(program)
    if rng.random() < 0.2:
        del parts[rng.choice(list(parts))]
    with zipfile.ZipFile(path, "w") as archive:
        for part, content in parts.items():
            archive.writestr(part, content)
    world.seal()


def forge_weights(world: World, rng: random.Random) -> None:
    (path,) = (path for path in world.good if path.suffix == ".safetensors")
    content = world.good[path]
    length = struct.unpack("<Q", content[:8])[0]
    header = change_json(json.loads(content[8 : 8 + length]), rng, ODD_JSON)
    text = json.dumps(header).encode()
    size = rng.choice((len(text), len(text), len(text), 0, 2**63, len(text) + 7))
    path.write_bytes(struct.pack("<Q", size) + text + content[8 + length :])
    world.seal()


def damage_and_seal(world: World, rng: random.Random) -> None:
    rng.choice((truncate, flip_bits))(world, rng)
    world.seal()


KINDS = (
    truncate, flip_bits, change_files, forge_manifest, forge_state, forge_code, forge_pickle, forge_weights,
    damage_and_seal,
)  # fmt: skip


def fuzz(world: World, count: int, seed: int) -> dict[str, dict[str, int]]:
    seen: dict[str, dict[str, int]] = {}
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        kind = KINDS[number % len(KINDS)]
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            kind(world, rng)
            outcome = world.try_to_resume(rng.randrange(len(world.optimizers)))
        except BaseException as error:
            raise AssertionError(f"input {number} of seed {seed} ({kind.__name__})") from error
        finally:
            world.heal()
        outcomes = seen.setdefault(kind.__name__, {})
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert world._content(world.manager.output_dir / "step_1") == world.older
    return seen


def test_what_nobody_changed_is_resumed(world: World) -> None:
    for which in range(len(world.optimizers)):
        assert world.try_to_resume(which) == "step_2"


def test_some_hundred_damaged_and_forged_checkpoints(world: World) -> None:
    seen = fuzz(world, 270, seed=0)
    assert seen.keys() == {kind.__name__ for kind in KINDS}
    # Damage without a forged checksum is always found, unless it left the manifest's meaning as it was.
    assert seen["truncate"].get("step_2", 0) <= 1 and seen["flip_bits"].get("step_2", 0) <= 2, seen
    assert seen["forge_code"].keys() == {"step_1"}, seen


@pytest.mark.slow
def test_ten_thousand_damaged_and_forged_checkpoints(world: World) -> None:
    fuzz(world, 10_000, seed=1)

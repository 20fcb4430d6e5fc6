"""Malformed base checkpoints: each is refused in one line, or makes the model that it describes; nothing is written."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from offload import torchao_shim
from offload.checkpoints.manager import CheckpointManager
from offload.config.loading import instantiate
from offload.errors import UserError
from offload.models.torchtune.architecture import check_architecture, fill_from_base
from offload.models.torchtune.building import load_weights
from offload.models.torchtune.checkpoint import TorchtuneFormat

torchao_shim.install()

from torchtune.models.convert_weights import tune_to_hf  # noqa: E402
from torchtune.models.llama2 import llama2  # noqa: E402

CONFIG = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}
SECONDS = 20  # of one input, on a machine that is busy with others

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "8",
    "silu", "../../etc/passwd", "/etc/passwd", "a\nb", "\x00", "x" * 5000, [], {}, [1, 2], [[]], {"a": 1}, [None],
    {"rope_type": "llama3", "factor": "x"}, {"rope_type": []}, {"type": "yarn", "factor": 0}, {"rope_theta": -1},
]  # fmt: skip


def write_valid(folder: Path) -> dict[str, bytes]:
    """A checkpoint of a thousand weights; returns its files."""
    folder.mkdir()
    torch.manual_seed(0)
    model = llama2(
        vocab_size=16, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=8, max_seq_len=8, intermediate_dim=12
    )
    weights = {n: t.contiguous() for n, t in tune_to_hf(model.state_dict(), num_heads=2, num_kv_heads=1, dim=8).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "original_repo_id.json").write_text('{"repo_id": "a/b"}')
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def mutated(value: Any, rng: random.Random) -> Any:
    """``value`` with something in it exchanged, removed, added or nested, at a random place."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, rng.choice(["", "__metadata__", "x" * 300, "\x00", "head_dim"]): rng.choice(ODD)}
            case 2:
                return {rng.choice(["a", f"{key}2"]) if k == key else k: v for k, v in value.items()}
            case _:
                return {**value, key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [mutated(each, rng) if i == index else each for i, each in enumerate(value)]
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 1000, -value, value])
    return rng.choice(ODD)


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    noise = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
    return rng.choice(
        [
            data[:at],
            data[at:],
            data[:at] + noise + data[at:],
            data[:at] + noise + data[at + len(noise) :],
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b"\xff\xfe" + data,
            b"9" * 10_000,
            noise,
            b"",
        ]
    )


def mutate_header(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, tensors = data[8 : 8 + length], data[8 + length :]
    match rng.randrange(4):
        case 0:
            header = mutated_bytes(header, rng)
            length = len(header)
        case 1:
            length = rng.choice([0, 1, 2**63, 2**64 - 1, length - 1, length + 1, len(data)])
        case 2:
            file.write_bytes(mutated_bytes(data, rng))
            return
        case _:
            header = json.dumps(mutated(json.loads(header), rng)).encode()
            length = len(header)
    file.write_bytes(struct.pack("<Q", length) + header + tensors)


def malform(folder: Path, rng: random.Random) -> str:
    """Spoils a valid checkpoint; returns what was done."""
    name = rng.choice(["config.json"] * 4 + ["model.safetensors"] * 4 + ["model.safetensors.index.json"] * 2)
    if rng.random() < 0.05:
        name = "original_repo_id.json"
    file = folder / name
    if name == "model.safetensors":
        mutate_header(file, rng)
    elif rng.random() < 0.3:
        file.write_bytes(mutated_bytes(file.read_bytes(), rng))
    else:
        value = json.loads(file.read_text())
        for _ in range(rng.choice([1, 1, 2, 3])):
            value = mutated(value, rng)
        file.write_text(json.dumps(value))
    return f"{name}: {file.read_bytes()[:300]!r}"


def use(folder: Path, out: Path, rng: random.Random) -> None:
    """What a recipe does with it, short of reserving memory for the model."""
    section = {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(folder)}
    weights_of = TorchtuneFormat({**section, "model_type": rng.choice(["LLAMA2", "LLAMA3", "PHI3_MINI"])})
    CheckpointManager(weights_of, out)
    component = rng.choice(["llama2.llama2", "llama3.llama3", "llama3_2.llama3_2"])
    model = OmegaConf.create({"model": {"_component_": f"torchtune.models.{component}"}}).model
    fill_from_base(model, weights_of.base)
    with torch.device("meta"):
        built = instantiate(model)
    check_architecture(built, model, weights_of.base)
    weights = weights_of.load_base()
    load_weights(built.to_empty(device="cpu"), weights, source=str(folder))


@pytest.fixture
def alarm() -> Iterator[Callable[[int], int]]:
    def ring(*_: Any) -> None:
        raise AssertionError(f"not done in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    yield signal.alarm
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("inputs", [range(200), pytest.param(range(200, 10_200), marks=pytest.mark.slow)], ids=len)
def test_one_line_and_nothing_written(
    inputs: range, alarm: Callable[[int], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # torchtune's after each file, half a second of each input
    refused = 0
    out = tmp_path / "out"
    valid = write_valid(tmp_path / "base")
    for seed in inputs:
        rng = random.Random(seed)
        for name, content in valid.items():
            (tmp_path / "base" / name).write_bytes(content)
        done = malform(tmp_path / "base", rng)
        files = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
        alarm(SECONDS)
        try:
            use(tmp_path / "base", out, rng)
        except UserError as error:
            refused += 1
            assert all(len(line) < 3000 and line.isprintable() for line in error.lines), (seed, done, error)
        except Exception as error:
            raise AssertionError(f"input {seed}, {done}") from error
        alarm(0)
        assert {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()} == files, (seed, done)
        assert not out.exists() or not any(out.iterdir()), (seed, done)
        assert {path.name for path in tmp_path.iterdir()} <= {"base", "out"}, (seed, done)
    assert refused > len(inputs) / 2


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    write_valid(tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload()}, tmp_path / "base" / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot read the weights"):
        use(tmp_path / "base", tmp_path / "out", random.Random(1))
    assert not (tmp_path / "executed").exists()

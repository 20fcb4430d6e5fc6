"""Rows and tokenizers' files that nobody thought of: one line or a run, never a traceback, a hang, code or files.

The inputs are seeded; a failure names its number, which alone reproduces it.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from offload import torchao_shim
from offload.data.batches import build_batches
from offload.data.tokenizers import build_tokenizer
from offload.errors import UserError
from tests.data.tokenizer_files import sentencepiece_model  # type: ignore[import-not-found]

FEW, MANY = 300, 10_000
SECONDS = 20

TEXTS = (
    "", " ", "\n", "a", "What is it?", "\x00", "\ufeff", "\u202e", "é" * 30, "👩‍👩‍👧‍👦" * 9, "\ud800", "𝕳𝖊𝖑𝖑𝖔",
    "a\r\nb\tc", "0" * 400, "{}", "{0}", "{input}", "{0.__class__.__mro__}", "%s%n", "${tokenizer.path}",
    "${oc.env:HOME}", "<s></s>", "[INST]", "<|begin_of_text|>", "__import__('os').system('touch executed')",
    "$(touch executed)", "!!python/object/apply:os.system", "None", "null", "NaN", "-100", "word " * 500,
)  # fmt: skip
NUMBERS = (None, True, False, 0, -1, 1.5, float("nan"), float("inf"), 2**53, -(2**63), 10**30)
NAMES = ("input", "output", "instruction", "conversations", "messages", "text", "from", "value", "role", "content", "")


class Raw(list[Any]):
    """Rows in memory in place of ``datasets``' table; most inputs go this way, which takes a tenth of the time."""

    @property
    def column_names(self) -> list[str]:
        return [str(name) for name in self[0]] if self and isinstance(self[0], dict) else []


def in_memory(rows: list[Any], *_: Any, **__: Any) -> Raw:
    return Raw(rows)


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place in which nothing may be written, a process that may not start another or connect, and a time limit."""
    import datasets

    torchao_shim.install()
    for name in ("cwd", "tmp", "given"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    executed: list[Any] = []

    def forbidden(*arguments: Any, **_: Any) -> Any:
        executed.append(arguments)
        raise OSError("forbidden")

    monkeypatch.setattr(os, "system", forbidden)
    monkeypatch.setattr(subprocess, "Popen", forbidden)
    monkeypatch.setattr(socket.socket, "connect", forbidden)

    def hang(*_: Any) -> None:
        raise KeyboardInterrupt(f"longer than {SECONDS} s")  # which nothing takes for a fault of the data

    handler = signal.signal(signal.SIGALRM, hang)
    yield tmp_path / "given"
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)
    assert executed == [] and list((tmp_path / "cwd").iterdir()) == [] and list((tmp_path / "tmp").iterdir()) == []


def outcome(attempt: Callable[[], Any], number: int) -> str:
    """``fine`` or the lines of the error; anything but a UserError fails the test."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        attempt()
        return "fine"
    except UserError as error:
        assert error.lines and all(line.strip() for line in error.lines), f"input {number}: {error!r}"
        assert all(len(line) < 1000 for line in error.lines), f"input {number}: {str(error)[:2000]}"
        return str(error)
    except BaseException as error:
        raise AssertionError(f"input {number}: {type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# ---------------------------------------------------------------------------------------------------------------- rows


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(12 if depth < 4 else 9)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind < 9:
        return rng.choice(NUMBERS)
    if kind < 10:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 11:
        return {rng.choice(NAMES): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    deep: Any = rng.choice(TEXTS)
    for _ in range(rng.choice((3, 60, 400))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return deep


def messages(rng: random.Random) -> Any:
    first, second = rng.choice([("from", "value"), ("role", "content")])
    roles = ("human", "gpt", "system", "user", "assistant", "ipython", "tool", None, 3, "")
    turns = []
    for turn in range(rng.randrange(5)):
        role = ("human", "gpt")[turn % 2] if first == "from" else ("user", "assistant")[turn % 2]
        turns.append({first: role, second: rng.choice(TEXTS)})
    for turn in turns:
        if rng.random() < 0.2:
            turn[rng.choice([first, second, "masked", "tool_calls"])] = rng.choice([*roles, *TEXTS, value(rng)])
    return turns if rng.random() < 0.9 else value(rng)


SECTIONS: list[tuple[dict[str, Any], Callable[[random.Random], dict[str, Any]]]] = [
    ({"_component_": "torchtune.datasets.instruct_dataset"},
     lambda rng: {"input": rng.choice(TEXTS), "output": rng.choice(TEXTS)}),
    ({"_component_": "torchtune.datasets.instruct_dataset", "column_map": {"input": "text", "output": "é"}},
     lambda rng: {"text": rng.choice(TEXTS), "é": rng.choice(TEXTS)}),
    ({"_component_": "torchtune.datasets.alpaca_dataset"},
     lambda rng: {"instruction": rng.choice(TEXTS), "input": rng.choice(TEXTS), "output": rng.choice(TEXTS)}),
    ({"_component_": "torchtune.datasets.chat_dataset", "conversation_style": "sharegpt",
      "conversation_column": "conversations"}, lambda rng: {"conversations": messages(rng)}),
    ({"_component_": "torchtune.datasets.chat_dataset", "conversation_style": "openai",
      "conversation_column": "messages"}, lambda rng: {"messages": messages(rng)}),
    ({"_component_": "torchtune.datasets.text_completion_dataset"}, lambda rng: {"text": rng.choice(TEXTS)}),
]  # fmt: skip


def rows_input(rng: random.Random) -> tuple[dict[str, Any], list[Any]]:
    section, row = rng.choice(SECTIONS)
    rows: list[Any] = []
    for _ in range(rng.randrange(1, 7)):
        one = row(rng)
        if rng.random() < 0.3:
            one[rng.choice([*one, *NAMES])] = value(rng)
        if rng.random() < 0.1:
            one.pop(rng.choice(list(one)))
        rows.append(one)
    return {**section, "packed": rng.random() < 0.4}, rows


def tokenizer_of(component: str, **arguments: Any) -> Any:
    return build_tokenizer(OmegaConf.create({"tokenizer": {"_component_": component, **arguments}}).tokenizer)


def read(section: dict[str, Any], tokenizer: Any, skips: bool) -> None:
    """Everything that a run does with data, but for the model."""
    batches = build_batches(
        OmegaConf.create({"dataset": section}).dataset, tokenizer, key="dataset", ignore_index=-100,
        collate_fn="torchtune.data.padded_collate_sft", skips_bad_rows=skips, batch_size=2, shuffle=True, seed=0,
        drop_last=False,
    )  # fmt: skip
    made = sum(len(batch.labels) for batch in batches.epoch(0))
    assert made == batches.num_samples > 0


def try_rows(count: int, folder: Path, seed: int) -> list[str]:
    model, path = folder / "tokenizer.model", folder / "rows.jsonl"
    model.write_bytes(sentencepiece_model())
    lengths = (1, 8, 64, 64, 64, 4096)
    tokenizers = {
        length: tokenizer_of("torchtune.models.llama2.llama2_tokenizer", path=str(model), max_seq_len=length)
        for length in set(lengths)
    }
    told = []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        section, rows = rows_input(rng)
        section = {**section, "source": "json", "split": "train", "data_files": str(path)}
        tokenizer, skips = tokenizers[rng.choice(lengths)], rng.random() < 0.5
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text[: rng.randrange(len(text))] if rng.random() < 0.3 else text)
        with pytest.MonkeyPatch.context() as patch:
            if number % 10:
                for module in ("_sft", "_text_completion"):
                    patch.setattr(f"torchtune.datasets.{module}.load_dataset", functools.partial(in_memory, rows))
            told.append(outcome(functools.partial(read, section, tokenizer, skips), number))
    return told


def test_rows(quiet: Path) -> None:
    told = try_rows(FEW, quiet, seed=0)
    # It tries what can be used and what cannot.
    assert 0.1 * FEW < told.count("fine") < 0.9 * FEW and len(set(told)) > FEW / 5


@pytest.mark.slow
def test_many_rows(quiet: Path) -> None:
    try_rows(MANY, quiet, seed=1)


# ---------------------------------------------------------------------------------------------------------- tokenizers

TIKTOKEN = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)) + b"aGVsbG8= 256\n"
VOCABULARY = json.dumps({chr(i): i for i in range(33, 127)} | {"Ġ": 200, "He": 201, "ll": 202}).encode()
MERGES = b"#version: 0.2\nH e\nl l\n"
TOKENIZER_JSON = json.dumps(
    {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, "Hello": 3}, "unk_token": "<unk>"},
    }
).encode()  # fmt: skip
CONFIG = b'{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "bos_token_id": 1, "eos_token_id": 2}'

Files = dict[str, Callable[[], bytes]]
TOKENIZERS: list[tuple[str, Files]] = [
    ("torchtune.models.llama2.llama2_tokenizer", {"path": sentencepiece_model}),
    ("torchtune.models.phi3.phi3_mini_tokenizer", {"path": sentencepiece_model}),
    ("torchtune.models.gemma.gemma_tokenizer", {"path": sentencepiece_model}),
    ("torchtune.models.mistral.mistral_tokenizer", {"path": sentencepiece_model}),
    ("torchtune.models.llama3.llama3_tokenizer", {"path": lambda: TIKTOKEN}),
    ("torchtune.models.qwen2_5.qwen2_5_tokenizer", {"path": lambda: VOCABULARY, "merges_file": lambda: MERGES}),
    (
        "torchtune.modules.transforms.tokenizers.HuggingFaceBaseTokenizer",
        {"tokenizer_json_path": lambda: TOKENIZER_JSON, "tokenizer_config_json_path": lambda: CONFIG},
    ),
]


def damaged(rng: random.Random, content: bytes) -> bytes:
    kind = rng.randrange(9)
    if kind == 0:
        return content[: rng.randrange(len(content))]
    if kind == 1:
        return rng.randbytes(rng.choice((0, 1, 7, 500, 20_000)))
    if kind == 2:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 3, 50))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if kind == 3:
        start, end = sorted(rng.sample(range(len(content)), 2))
        return content[:start] + content[end:] if rng.random() < 0.5 else content[:end] + content[start:]
    if kind == 4:
        return json.dumps(value(rng)).encode()
    if kind == 5:
        lines = content.split(b"\n")
        rng.shuffle(lines)
        return b"\n".join(lines)
    if kind == 6:
        other = rng.choice([each for _, files in TOKENIZERS for each in files.values()])
        return other()
    if kind == 7:
        return rng.choice(
            (b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe" * 50, b"\n" * 1000, b"x" * 10**6, b"a b c\n", b"a\n")
        )
    return content


def encode(component: str, **files: Any) -> None:
    tokenizer = tokenizer_of(component, **files)
    for text in ("Hello", "a b"):
        assert isinstance(tokenizer.encode(text, add_bos=True, add_eos=True), list)


def try_tokenizers(count: int, folder: Path, seed: int) -> list[str]:
    paths = ("", "/nope", str(folder), "\x00", "~", 3, "${a}")
    told = []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        component, files = TOKENIZERS[number % len(TOKENIZERS)]
        given: dict[str, Any] = {}
        for name, whole in files.items():
            (folder / name).write_bytes(damaged(rng, whole()))
            given[name] = str(folder / name) if rng.random() < 0.95 else rng.choice(paths)
        told.append(outcome(functools.partial(encode, component, **given), number))
    return told


@pytest.mark.parametrize(("component", "files"), TOKENIZERS)
def test_what_is_damaged_is_whole_before(quiet: Path, component: str, files: Files) -> None:
    for name, whole in files.items():
        (quiet / name).write_bytes(whole())
    encode(component, **{name: str(quiet / name) for name in files})


def test_tokenizers(quiet: Path) -> None:
    told = try_tokenizers(FEW, quiet, seed=0)
    assert 0.1 * FEW < told.count("fine") < 0.9 * FEW


@pytest.mark.slow
def test_many_tokenizers(quiet: Path) -> None:
    try_tokenizers(MANY, quiet, seed=1)

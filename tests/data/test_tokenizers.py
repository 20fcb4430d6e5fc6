"""What a run says about a tokenizer whose files are missing, damaged, of another kind, or of another path."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from offload.data.tokenizers import build_tokenizer
from offload.errors import UserError
from tests.data.tokenizer_files import sentencepiece_model  # type: ignore[import-not-found]

LLAMA2 = "torchtune.models.llama2.llama2_tokenizer"
LLAMA3 = "torchtune.models.llama3.llama3_tokenizer"
PHI3 = "torchtune.models.phi3.phi3_mini_tokenizer"
QWEN = "torchtune.models.qwen2_5.qwen2_5_tokenizer"
HUGGING_FACE = "torchtune.modules.transforms.tokenizers.HuggingFaceBaseTokenizer"
BYTES = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))


def built(component: str, **arguments: Any) -> Any:
    return build_tokenizer(OmegaConf.create({"tokenizer": {"_component_": component, **arguments}}).tokenizer)


def refused(component: str, **arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        built(component, **arguments)
    assert len(caught.value.lines) == 1
    return str(caught.value)


@pytest.mark.parametrize("component", [LLAMA2, LLAMA3, PHI3])
def test_a_missing_file(component: str, tmp_path: Path) -> None:
    assert refused(component, path="/nope").startswith("tokenizer.path: there is no file /nope; ")
    assert "did you mean" not in refused(component, path="/nope")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    there = f"did you mean {tmp_path}/tokenizer.model?"
    assert f"is a folder, expected a file; {there}" in refused(component, path=str(tmp_path))
    assert there in refused(component, path=f"{tmp_path}/tokeniser.model")
    assert "there is no file https://x/y" in refused(component, path="https://x/y")


def test_every_file_of_a_tokenizer_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    assert refused(QWEN, path=f"{tmp_path}/vocab.json", merges_file="/m").startswith(
        "tokenizer.merges_file: there is no"
    )
    assert refused(HUGGING_FACE, tokenizer_json_path="/n").startswith("tokenizer.tokenizer_json_path: there is no")


DAMAGED: list[tuple[str, bytes]] = [
    (LLAMA2, b""), (LLAMA2, b"{}"), (LLAMA2, bytes(range(256))), (PHI3, BYTES),
    (LLAMA3, b""), (LLAMA3, b"{}"), (LLAMA3, BYTES + b"aGk= -5\n"), (LLAMA3, BYTES + b"aGk= 9999999999999\n"),
]  # fmt: skip


@pytest.mark.parametrize(("component", "content"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file(tmp_path: Path, component: str, content: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    line = refused(component, path=str(path))
    assert line.startswith(f"tokenizer.path={path}: {component} cannot read it (") and "another kind" in line


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (BYTES + b"aGk= 7\n", "7 is the number of two tokens"),
        (BYTES[: len(BYTES) // 2].rpartition(b"\n")[0], "of the 256 bytes have no token"),
    ],
    ids=["twice", "half"],
)
def test_a_tiktoken_file_at_which_its_code_would_panic(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: bytes, told: str
) -> None:
    """A panic is no Exception, and prints the Rust code's stack; of bytes without a token only at some text."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    assert told in refused(LLAMA3, path=str(path)) and "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize("keep", [10, 0.5, 0.99])
def test_half_a_sentencepiece_model(tmp_path: Path, keep: float) -> None:
    whole = sentencepiece_model()
    path = tmp_path / "tokenizer.model"
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    assert "cannot read it" in refused(LLAMA2, path=str(path))
    path.write_bytes(whole)
    assert built(LLAMA2, path=str(path)).encode("a") == built(LLAMA2, path=str(path)).encode("a")


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0}))
    (tmp_path / "merges.txt").write_text("")
    line = refused(QWEN, path=f"{tmp_path}/vocab.json", merges_file=f"{tmp_path}/merges.txt")
    assert "gives no token for some of the text 'Hello'" in line and "vocab.json" in line and "merges.txt" in line
    for content in ("[1]", '{"a"', '{"a": {}}', "\udcff".encode(errors="surrogateescape").decode(errors="replace")):
        (tmp_path / "vocab.json").write_text(content)
        assert "cannot read it" in refused(QWEN, path=f"{tmp_path}/vocab.json", merges_file=f"{tmp_path}/merges.txt")


def test_a_tokenizer_that_changed_at_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken's own cache goes by path: it would give the old one, and leave a copy in the temporary folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    path = tmp_path / "tokenizer.model"
    path.write_bytes(BYTES)
    first = built(LLAMA3, path=str(path)).encode("hi")
    path.write_bytes(BYTES + base64.b64encode(b"hi") + b" 256\n")
    assert built(LLAMA3, path=str(path)).encode("hi") != first
    assert list((tmp_path / "tmp").iterdir()) == [] and "TIKTOKEN_CACHE_DIR" not in os.environ


def test_arguments_are_blamed_for_what_they_do(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_model())
    line = refused(LLAMA2, path=str(path), max_seq_length=3)
    assert "max_seq_length" in line and "cannot read it" not in line
    assert "tokenizer.nope" in refused(LLAMA2, path="${tokenizer.nope}")


class Folder:
    """A tokenizer that takes a folder, and one that breaks."""

    eos_id, pad_id = 2, 0

    def __init__(self, path: str) -> None:
        if not os.path.isdir(path):
            raise UserError(f"path: the folder {path} does not exist")
        if os.path.basename(path) == "broken":
            raise KeyError("model")

    def encode(self, text: str) -> list[int]:
        return [1, len(text), 2]


def test_what_other_tokenizers_take_for_a_path_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "folders", sys.modules[__name__])
    assert built("folders.Folder", path=str(tmp_path)).encode("ab") == [1, 2, 2]
    assert refused("folders.Folder", path="/nope") == "tokenizer.path: the folder /nope does not exist"
    (tmp_path / "broken").mkdir()
    assert refused("folders.Folder", path=str(tmp_path / "broken")) == (
        "tokenizer: folders.Folder cannot be built: KeyError: 'model'"
    )

"""Paths as users write them: what ``~`` is, and what is said where it is nothing."""

from __future__ import annotations

import json
import pwd
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from offload.cli.main import main
from offload.config.loading import instantiate
from offload.data.source import data_files, open_dataset
from offload.data.tokenizers import build_tokenizer
from offload.errors import UserError
from offload.paths import expanded
from tests.data.tokenizer_files import sentencepiece_model  # type: ignore[import-not-found]

LLAMA2 = "torchtune.models.llama2.llama2_tokenizer"
ROWS = {"_component_": "torchtune.datasets.instruct_dataset", "source": "json", "split": "train"}


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME, and a user without an entry in /etc/passwd: a container run under any number."""

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    for name in ("HOME", "HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def node(**section: Any) -> Any:
    return OmegaConf.create({"part": section}).part


def test_files_in_the_home_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped configs name ~/models; a shell leaves the tilde of dataset.data_files=~/x.jsonl."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    assert build_tokenizer(node(_component_=LLAMA2, path="~/tokenizer.model")).encode("a")
    with pytest.raises(UserError, match=rf"did you mean {tmp_path}/tokenizer.model\?"):
        build_tokenizer(node(_component_=LLAMA2, path="~/tokeniser.model"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input": "a", "output": "b"}) + "\n")
    for section in ({"data_files": "~/rows.jsonl"}, {"data_files": "~/r*.jsonl"},
                    {"data_dir": "~/", "data_files": "rows.jsonl"}):  # fmt: skip
        assert data_files(node(**ROWS, **section)) == [str(rows)]


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_it_is_said() -> None:
    said = "no home folder is known .*: set HOME, or give the whole path$"
    with pytest.raises(UserError, match=f"^output_dir: ~/x: {said}"):
        expanded("~/x", "output_dir")
    with pytest.raises(UserError, match=f"^part.log_dir: ~/x: {said}"):
        instantiate(node(_component_="torchtune.training.metric_logging.DiskLogger", log_dir="~/x"))
    with pytest.raises(UserError, match=f"^part.path: ~/t.model: {said}"):
        build_tokenizer(node(_component_=LLAMA2, path="~/t.model"))
    with pytest.raises(UserError, match=f"^part.data_files: ~/x.jsonl: {said}"):
        open_dataset(node(**ROWS, data_files="~/x.jsonl"), None, "part", lambda rows: rows)
    with pytest.raises(UserError, match="no such user on this machine: give the whole path$"):
        expanded("~nobody-of-that-name/x", "output_dir")


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_no_data_set_is_kept_in_a_folder_called_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "a", "output": "b"}) + "\n")
    with pytest.raises(UserError, match="^part: no home folder is known .*: set HOME, or HF_HOME"):
        open_dataset(node(**ROWS, data_files="rows.jsonl"), None, "part", lambda rows: rows)
    assert [each.name for each in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize(
    "words",
    [
        ["validate", "llama2_7b_offload"],
        ["compare", "~/runs"],
        ["compare", "~nobody-of-that-name/runs"],
        ["cp", "tiny_llama_offload", "~/x.yaml"],
    ],
)
def test_a_command_without_a_home_folder_ends_with_a_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert ("no such user" if "~nobody" in words[1] else "no home folder is known") in line

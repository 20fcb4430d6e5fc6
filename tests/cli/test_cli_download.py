"""``tune download``: what is asked of the Hub, what is left on the disk, what is said when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from offload.cli import handover
from offload.cli.main import main


@pytest.fixture
def hub(monkeypatch):
    """A Hub that has one small repository, and records what it was asked."""
    asked = []

    def snapshot_download(repo_id, *, local_dir, ignore_patterns, token):
        asked.append((repo_id, Path(local_dir), ignore_patterns, token))
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        Path(local_dir, "config.json").write_text("{}")
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return asked


def test_files_arrive_with_the_name_of_their_repository(hub, tmp_path, capsys):
    folder = tmp_path / "model"
    assert main(["download", "someone/llama", "--output-dir", str(folder)]) == 0
    assert hub == [("someone/llama", folder, None, None)]
    assert json.loads((folder / "original_repo_id.json").read_text()) == {"repo_id": "someone/llama"}
    assert str(folder / "config.json") in capsys.readouterr().out


def test_the_file_with_the_repositorys_name_is_the_one_torchtune_reads():
    from offload import torchao_shim
    from offload.cli import download

    torchao_shim.install()
    from torchtune.training.checkpointing._utils import REPO_ID_FNAME

    assert f"{REPO_ID_FNAME}.json" == download._REPO_ID_FILE


def test_options_reach_the_hub(hub, tmp_path, monkeypatch):
    words = ["download", "someone/llama", "--output-dir", str(tmp_path)]
    monkeypatch.setenv("HF_TOKEN", "from-the-environment")
    main([*words, "--ignore-patterns", "*.bin", "--ignore-patterns", "*.pth"])
    main([*words, "--hf-token", "given"])
    assert [call[2:] for call in hub] == [(["*.bin", "*.pth"], "from-the-environment"), (None, "given")]


def _http(error: type[Exception]) -> Exception:
    request = httpx.Request("GET", "https://huggingface.co")
    return error("boom\nand a second line", response=httpx.Response(401, request=request))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (lambda: _http(errors.GatedRepoError), "is gated: https://huggingface.co/someone/llama"),
        (lambda: _http(errors.RepositoryNotFoundError), "no model someone/llama"),
        (lambda: _http(errors.HfHubHTTPError), "download of someone/llama failed: boom and a second line"),
        (lambda: errors.LocalEntryNotFoundError("no\nnetwork"), "failed: no network"),
        (lambda: errors.HFValidationError("bad name"), "repo_id: bad name"),
        (lambda: OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_failures_are_one_line_and_status_2(monkeypatch, tmp_path, capsys, error, said):
    def snapshot_download(*args, **kwargs):
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert main(["download", "someone/llama", "--output-dir", str(tmp_path / "model")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert said in err
    assert not (tmp_path / "model").exists()


def test_kaggle_goes_to_torchtune(monkeypatch):
    calls = []
    monkeypatch.setattr(handover, "torchtune", lambda arguments: calls.append(list(arguments)) or 0)
    assert main(["download", "a/b/pytorch/1b", "--source", "kaggle", "--kaggle-username", "me"]) == 0
    assert calls == [["download", "a/b/pytorch/1b", "--source", "kaggle", "--kaggle-username", "me"]]
    assert main(["download", "a/b/pytorch/1b", "--source", "kaggle", "--output-dir", "x"]) == 2
    assert len(calls) == 1

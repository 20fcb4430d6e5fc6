"""``tune push``: what is handed to the Hub, and what is said when that fails. No network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from offload.checkpoints.manager import STATE_NAME
from offload.checkpoints.manifest import MANIFEST_NAME
from offload.checkpoints.shared_states import STATES_DIR
from offload.cli.main import main
from offload.cli.push import RUN_FILES, RUN_FOLDER


class FakeApi:
    """Records what it is asked; what it uploads is what huggingface_hub's own filter lets through."""

    calls: list[tuple[str, dict[str, Any]]] = []
    failure: Exception | None = None

    def __init__(self, token: str | None = None) -> None:
        self.token = token

    def create_repo(self, repo_id: str, **options: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.calls.append(("create_repo", {"repo_id": repo_id, "token": self.token, **options}))

    def create_branch(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_branch", {"repo_id": repo_id, **options}))

    def upload_folder(self, *, folder_path: Path, ignore_patterns: list[str], **options: Any) -> Any:
        names = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()]
        sent = huggingface_hub.utils.filter_repo_objects(names, ignore_patterns=ignore_patterns)
        self.calls.append(("upload_folder", {"files": sorted(sent), **options}))
        return type("Commit", (), {"commit_url": "https://huggingface.co/me/tiny/commit/1"})()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    monkeypatch.setattr(FakeApi, "calls", [])
    monkeypatch.setattr(FakeApi, "failure", None)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return FakeApi.calls


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "step_8"
    (folder / "adapter").mkdir(parents=True)
    (folder / STATES_DIR).mkdir()
    for name in ("model-00001-of-00001.safetensors", "config.json", "tokenizer.model", *RUN_FILES,
                 "adapter/adapter_model.safetensors", "adapter/adapter_config.json",
                 f"{STATES_DIR}/.metadata", f"{STATES_DIR}/__0_0.distcp"):  # fmt: skip
        (folder / name).write_text("x")
    return folder


def test_the_model_is_uploaded_without_what_only_resuming_needs(
    hub: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(checkpoint), "me/tiny"]) == 0
    assert hub == [
        ("create_repo", {"repo_id": "me/tiny", "token": None, "private": None, "exist_ok": True}),
        (
            "upload_folder",
            {
                "files": ["config.json", "model-00001-of-00001.safetensors", "tokenizer.model"],
                "repo_id": "me/tiny",
                "revision": None,
                "commit_message": "Upload step_8",
            },
        ),
    ]
    assert capsys.readouterr().out.splitlines()[-1] == "https://huggingface.co/me/tiny/commit/1"


def test_options_reach_the_hub(hub: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "from-the-environment")
    words = ["--private", "--revision", "try", "--message", "First"]
    assert main(["push", str(checkpoint / "adapter"), "me/tiny", *words]) == 0
    (_, made), (_, branch), (_, uploaded) = hub
    assert made["private"] is True and made["token"] == "from-the-environment"
    assert branch == {"repo_id": "me/tiny", "branch": "try", "exist_ok": True}
    assert uploaded["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert (uploaded["revision"], uploaded["commit_message"]) == ("try", "First")


def test_the_names_are_those_that_a_checkpoint_has() -> None:
    assert set(RUN_FILES) == {STATE_NAME, MANIFEST_NAME}
    assert RUN_FOLDER == STATES_DIR


def test_what_is_no_checkpoint_is_refused_before_anything_is_asked(
    hub: Any, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(checkpoint / "nowhere"), "me/tiny"]) == 2
    assert main(["push", str(checkpoint.parent), "me/tiny"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: there is no folder {checkpoint / 'nowhere'}")
    assert lines[1] == f"error: {checkpoint.parent} holds no weights (*.safetensors); did you mean {checkpoint}?"
    assert hub == []


def _http(status: int) -> Exception:
    response = httpx.Response(status, request=httpx.Request("POST", "https://huggingface.co"))
    return errors.HfHubHTTPError("boom\nand more", response=response)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_http(403), "me/tiny: the Hub refuses to write there (403)"),
        (_http(401), "`hf auth login`"),
        (_http(500), "upload to me/tiny failed: boom and more; the same command tries again"),
        (errors.LocalTokenNotFoundError("x"), "nobody is logged in"),
        (errors.HFValidationError("bad name"), "repo_id: bad name"),
        (OSError(5, "Input/output error"), "Input/output error"),
    ],
)
def test_failures_are_one_line_and_status_2(
    hub: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    error: Exception, said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(FakeApi, "failure", error)
    assert main(["push", str(checkpoint), "me/tiny"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line


@pytest.mark.parametrize("is_offline", [True, False])
def test_a_hub_that_cannot_be_reached_is_one_line(
    is_offline: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client, against a closed port."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if is_offline else "0")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    command = [sys.executable, "-m", "offload", "push", str(checkpoint), "me/tiny"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: upload to me/tiny failed: ") and "hf_x" not in line

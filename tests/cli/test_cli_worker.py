"""One of torchrun's processes, before its recipe: where it finds its libraries, and Ctrl-C meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from offload import _startup, streams
from offload.cli import main as command
from offload.cli import worker

HERE = str(Path(worker.__file__).parents[2])


@pytest.fixture(autouse=True)
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What recipes were given, and the places to find libraries then."""
    calls: list[Any] = []

    def execute(recipe: Path, words: list[str]) -> int:
        calls.append((recipe, words, list(sys.path)))
        return 7

    monkeypatch.setattr(command, "execute", execute)
    monkeypatch.setattr(_startup, "disarm", lambda: calls.append("torchtune is torchtune"))
    monkeypatch.setattr(streams, "open_missing", lambda: calls.append("streams"))
    monkeypatch.setattr(sys, "argv", ["worker.py", "recipe.py", "--config", "a.yaml", "seed=1"])
    return calls


@pytest.mark.parametrize("is_first", [True, False])
def test_a_file_of_the_users_hides_no_library(
    is_first: bool, executed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m` puts the folder that it is called in first; what PYTHONPATH says stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/elsewhere"] if is_first else ["/elsewhere", str(tmp_path)])
    assert worker.main() == 7
    found = ["/elsewhere"] if is_first else ["/elsewhere", str(tmp_path)]
    assert executed == [
        "torchtune is torchtune",
        "streams",
        (Path("recipe.py"), ["--config", "a.yaml", "seed=1"], found),
    ]


def test_a_checkout_that_is_not_installed_finds_itself(executed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", [HERE, "/elsewhere"])
    assert worker.main() == 7 and executed[-1][2] == [HERE, "/elsewhere"]


def test_ctrl_c_while_libraries_are_imported_is_told_by_who_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_startup, "disarm", interrupted)
    assert worker.main() == 130

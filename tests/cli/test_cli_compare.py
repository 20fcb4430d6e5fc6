"""``tune compare``: what is printed and written, and what is no run."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from offload.cli.main import main


@pytest.fixture
def runs(tmp_path: Path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name, rate in (("a", 50.0), ("b", 100.0)):
        (tmp_path / name).mkdir()
        rows = [{"step": step, "loss": 3.0 - step, "tokens_seen": 10 * step, "tokens_per_second": rate}
                for step in (1, 2)]  # fmt: skip
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / name / "run.json").write_text(json.dumps({"label": f"label of {name}"}))
    return ["a", "b"]


def test_it_prints_a_table_and_writes_a_page_and_a_picture(runs, tmp_path: Path, capsys) -> None:
    assert main(["compare", *runs]) == 0
    out = capsys.readouterr().out
    assert "A  label of a  (a)" in out and "100 (2.00x)" in out
    assert out.endswith("page     compared.html\npicture  compared.png\n")
    assert (tmp_path / "compared.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "compared.png").read_bytes().startswith(b"\x89PNG")


def test_out_names_both_files(runs, tmp_path: Path, capsys) -> None:
    assert main(["compare", *runs, "--out", "deep/lr1.5"]) == 0
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["lr1.5.html", "lr1.5.png"]
    assert main(["compare", *runs, "--out", "deep/x.html"]) == 0
    assert (tmp_path / "deep" / "x.png").exists() and not (tmp_path / "deep" / "x.html.html").exists()


def test_a_folder_whose_name_is_no_text_is_in_the_page(runs, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "a").rename(tmp_path / "caf\udce9")
    assert main(["compare", "caf\udce9", "--out", "page"]) == 0
    assert "caf?" in (tmp_path / "page.html").read_text() and "(caf\\udce9)" in capsys.readouterr().out


def test_without_matplotlib_the_page_is_written_all_the_same(runs, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["compare", *runs]) == 0
    assert "picture  needs matplotlib: pip install matplotlib" in capsys.readouterr().out
    assert (tmp_path / "compared.html").exists() and not (tmp_path / "compared.png").exists()


def test_a_reader_that_leaves_the_table_finds_the_page(runs, tmp_path: Path, monkeypatch) -> None:
    """As ``tune compare … | head`` does."""

    def leaves(*args: Any) -> str:
        raise BrokenPipeError

    monkeypatch.setattr("offload.comparison.table.render", leaves)
    with contextlib.suppress(BrokenPipeError):
        main(["compare", *runs, "--out", str(tmp_path / "found")])
    assert (tmp_path / "found.html").is_file() and (tmp_path / "found.png").is_file()


def test_json_has_the_same_numbers_and_writes_nothing(runs, tmp_path: Path, capsys) -> None:
    assert main(["compare", *runs, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["speed"]["tokens per second"] == [50.0, 100.0]
    assert [run["label"] for run in content["runs"]] == ["label of a", "label of b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: there is no run; give its output_dir or metrics.jsonl; did you mean a b?"),
        (["."], ".: there is no run; give its output_dir or metrics.jsonl; did you mean a b?"),
        (["a", "--out", "a/run.json/x"], "--out: cannot write a/run.json/x: File exists"),
        ([], "the following arguments are required: RUN; see `tune compare --help`"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, runs, capsys) -> None:
    assert main(["compare", *arguments]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"

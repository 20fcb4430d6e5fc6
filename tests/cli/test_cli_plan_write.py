"""``tune plan --write``: a config that a run takes as it is, with the settings that fit a machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from offload.cli import registry, write_config
from offload.cli.main import main
from offload.training.ranking import Choice

MACHINE = ("--gpu", "RTX 3060", "--ram", "16GiB")


def test_the_config_is_the_best_line_of_the_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    words = [
        "plan",
        "--config",
        "tiny_llama_offload",
        *MACHINE,
        "optimizer.lr=0.125",
        "--write",
        str(tmp_path / "mine"),
    ]
    assert main(words) == 0
    told = capsys.readouterr().out
    rows = [line.split(maxsplit=3) for line in told.partition("GPU    host  GiB\n")[2].splitlines()]
    speed, *_, changes = next(row for row in rows if len(row) == 4 and not row[3].endswith("*"))
    assert told.rstrip().endswith(f"\n  tune run full_finetune_single_device --config {file}")
    assert f"wrote {file}: tiny_llama_offload with optimizer.lr=0.125 {changes}\n" in told
    before = (registry.configs_dir() / "tiny_llama_offload.yaml").read_text(encoding="utf-8")
    after = file.read_text(encoding="utf-8")
    head, *rest = after.splitlines()[:3]
    assert head == f"# tiny_llama_offload with optimizer.lr=0.125 {changes}." and f"{speed} tok/s" in rest[0]
    # Comments stay: beside the head, lines differ where a value does.
    kept = set(before.splitlines()) & set(after.splitlines())
    assert len(kept) >= len(set(before.splitlines())) - len(changes.split()) - 1
    assert main(["validate", str(file)]) == 0
    assert main(["plan", "--config", str(file), *MACHINE]) == 0
    # A tiny model's work is not quite in proportion to its tokens.
    again = re.search(r"^speed: ([\d,]+) tok/s", capsys.readouterr().out, re.M)
    assert again and int(again[1].replace(",", "")) == pytest.approx(int(speed.replace(",", "")), rel=0.03)
    assert main(words) == 2 and "exists already" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == after


def test_where_nothing_fits_nothing_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    command = ["plan", "--config", "tiny_llama_offload", "optimizer.strategy=resident", "--vram", "470MiB"]
    assert main([*command, "--write", str(file)]) == 1
    assert "nothing is written" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--vram", "8GiB", "--write", "{}/nowhere/mine"], "nowhere does not exist: make it"),
        (["device=cpu", "--write", "{}/mine"], "--write: for which card?"),
        (["--vram", "8GiB", "--write", ""], "--write: got ''"),
    ],
)
def test_mistakes(words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--config", "tiny_llama_offload", *(word.replace("{}", str(tmp_path)) for word in words)]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_one_that_keeps_the_formats_comes_before_one_that_is_faster() -> None:
    rounding, own = Choice(("optimizer.master=stochastic",), None), Choice(("batch_size=4",), None)  # type: ignore[arg-type]
    assert write_config.best_of([rounding, own]) is own
    assert write_config.best_of([rounding]) is rounding and write_config.best_of([]) is None

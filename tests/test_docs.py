"""README and docs/: what they point at is there, and the configuration keys that they name are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from offload.cli.main import main
from offload.config.elsewhere import HERE

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(page: Path) -> str:
    """A page without its fenced code, where brackets are no links."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Where a page's links and pictures point, but for addresses of the web."""
    targets = re.findall(r"\]\(([^()\s]+)\)", prose(page))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), flags=re.MULTILINE):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    for target in links(page):
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            wrong.append(f"{target}: no such file")
        elif fragment and (there.suffix != ".md" or fragment not in anchors(there)):
            wrong.append(f"{target}: no such heading")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# What is `here`, and [there](there.md)\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    good = "[a](there.md#what-is-here-and-there) [b](there.md#twice-1) ![c](there.md) [d](https://example.org/x)"
    page.write_text(f"{good} [e](gone.md) [f](there.md#twice-2) [g](#gone)\n\n```\n[h](code.md)\n```\n")
    assert broken(page) == ["gone.md: no such file", "there.md#twice-2: no such heading", "#gone: no such heading"]


def test_every_page_is_reached_from_readme() -> None:
    reached, queue = {ROOT / "README.md"}, [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        for target in links(page):
            there = (page.parent / target.partition("#")[0]).resolve()
            if there.suffix == ".md" and there not in reached:
                reached.add(there)
                queue.append(there)
    assert set(PAGES) <= reached


def other_trainers() -> list[list[str]]:
    """The rows of docs/configuration.md's table of other trainers' keys: the code of each cell."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\|(.+)\|$", page.partition("## If you come from")[2].partition("\n## ")[0], flags=re.MULTILINE)
    return [[*cells[:3], cells[-1]] for cells in (row.split("|") for row in rows[2:])]


def test_the_table_of_other_trainers_and_the_hints_agree() -> None:
    for *theirs, ours in other_trainers():
        for name in re.findall(r"`(\w+)[`:]", " ".join(theirs)):
            if name in HERE:
                assert HERE[name] in ours, f"{name} is {HERE[name]} in the hint, and in the table: {ours}"
    missing = [
        name
        for *theirs, _ in other_trainers()
        for name in re.findall(r"`(\w+)`", " ".join(theirs))
        if name not in HERE and name not in ("data_files", "path", "dataset", "chat_template", "optimizer")
    ]
    # What is called the same here, or is found by its name inside a section.
    same = {
        "attn_implementation",
        "load_in_4bit",
        "gradient_accumulation_steps",
        "lr_scheduler",
        "resume_from_checkpoint",
    }
    assert set(missing) <= same


def unread(keys: set[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The keys that nothing reads where a model of transformers is trained, whole or with an adapter."""
    found = set()
    for key in keys:
        config = "hf_qlora" if key.startswith("adapter") else "hf_offload"
        capsys.readouterr()
        assert main(["validate", config, f"+{key}=-"]) == 2
        said = capsys.readouterr().err
        if "nothing reads" in said or "does not take" in said:
            found.add(key)
    return found


def test_keys_that_the_table_and_the_hints_name_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    table = " ".join(row[-1] for row in other_trainers())
    named = {*HERE.values(), *re.findall(r"`((?:\w+\.)*\w+)(?:=\w+)?`", table)} - {
        "hf_qlora",
        "val_set_size",
        "val_size",
    }
    assert len(named) > 30
    assert unread(named, capsys) == set()
    assert unread({"adapter.rank", "dataset.pack", "steps"}, capsys) == {"adapter.rank", "dataset.pack", "steps"}


@pytest.mark.parametrize(("theirs", "ours"), [("learning_rate", "optimizer.lr"), ("lora_r", "adapter.r")])
def test_a_key_of_another_trainer_is_told_its_name_here(
    capsys: pytest.CaptureFixture[str], theirs: str, ours: str
) -> None:
    assert main(["validate", "hf_lora", f"{theirs}=1"]) == 2
    assert f"error: {theirs}: nothing reads this key; it is called {ours} here\n" in capsys.readouterr().err


def test_a_key_that_nothing_here_stands_for_is_told_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "tiny_llama_offload", "log_peak_memory_stats=True"]) == 2
    said = "nothing reads this key; remove it: peak memory is always logged"
    assert f"error: log_peak_memory_stats: {said}\n" in capsys.readouterr().err

"""offload.config.yaml_files and config_interpolation: what no configuration needs is refused, and at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from offload.config.loading import load_config
from offload.config.yaml_files import LARGEST_FILE, MOST_LEVELS
from offload.errors import UserError


def doubling(reference: str, last: str) -> str:
    """Forty keys, each of which names the next one twice."""
    lines = [f"k{n}: {reference.replace('NEXT', str(n + 1))}" for n in range(40)]
    return "\n".join([*lines, last.replace("LAST", "40")]) + "\n"


def aliases(line: str) -> str:
    """Ten anchors, each of which repeats the one before nine times."""
    letters = "abcdefghijk"
    rows = [
        line.replace("THIS", this).replace("BEFORE", ",".join([f"*{before}"] * 9))
        for before, this in zip(letters, letters[1:], strict=False)
    ]
    return "\n".join(["a: &a {x: 1}", *rows]) + "\n"


REFUSED = {
    "a set": ("a: !!set {x: 1}", "!!set"),
    "a timestamp": ("a: !!timestamp 2020-01-01", "!!timestamp"),
    "bytes": ("a: !!binary aGk=", "!!binary"),
    "an object of Python": ("a: !!python/object/apply:os.getcwd []", "python/object"),
    "no integer": ("a: !!int many", "'many' is no int"),
    "no boolean": ("a: !!bool maybe", "'maybe' is no bool"),
    "an integer that Python does not read": (f"a: {'9' * 5000}", "is no int"),
    "200 levels": ("a: " + "[" * 200 + "]" * 200, f"deeper than {MOST_LEVELS} levels"),
    "200 levels of blocks": ("".join("  " * level + "a:\n" for level in range(200)), "deeper than"),
    "aliases of aliases": (aliases("THIS: &THIS [BEFORE]"), "aliases"),
    "merges of merges": (aliases("THIS: &THIS {<<: [BEFORE]}"), "aliases"),
    "a doubling text": (doubling("${kNEXT}${kNEXT}", "kLAST: x"), "k0: interpolations"),
    "a doubling section": (doubling("{a: '${kNEXT}', b: '${kNEXT}'}", "kLAST: x"), "k0.a: interpolations"),
    "a doubling name": (doubling("${x.k${nNEXT}}${x.k${nNEXT}}", "x: {k1: '${k1}'}"), "interpolation"),
    "a doubling whole name": (doubling("${${nNEXT}}${${nNEXT}}", "nLAST: x"), "interpolations"),
    "a doubling selection": (doubling("'${oc.select:${nNEXT}}${oc.select:${nNEXT}}'", "nLAST: x"), "interpolations"),
    "a doubling text to decode": (doubling("'${oc.decode:${kNEXT}}'", "kLAST: x"), "interpolations"),
    "sections that contain themselves": ("a: {x: '${a}', y: '${a}'}", "a.x: interpolations"),
    "a text that contains itself": ("a: ${a}", "Recursive"),
    "many interpolations": ("b: 1\na: '" + "${b}" * 5000 + "'", "a: interpolations"),
    "nested interpolations": ("b: 1\na: " + "${" * 300 + "b" + "}" * 300, "a: interpolations"),
    "a large file": ("a: " + "x" * LARGEST_FILE, "larger than 1 MiB"),
}


@dataclass
class Settings:
    a: dict[str, Any]


def refusal(build: Callable[[], object]) -> str:
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        build()
    assert time.monotonic() - started < 3
    return caught.value.lines[0]


@pytest.mark.parametrize(("text", "said"), REFUSED.values(), ids=REFUSED)
def test_what_no_configuration_needs_is_refused_at_once(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    line = refusal(lambda: load_config(path, [], notes=[]))
    assert said in line
    assert str(path) in line


@pytest.mark.parametrize("text", ["!!set {x: 1}", "[" * 200, "&x [*x]", "!!int many", "{a: !!timestamp 2020-01-01}"])
def test_an_override_is_held_to_the_same(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: {b: 1}\n")
    line = refusal(lambda: load_config(path, [f"a={text}"], notes=[], schema=Settings))
    assert line.startswith("override a=")


def test_what_a_configuration_may_have(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    many = "".join(f"k{n}: ${{base}}/${{name}}\n" for n in range(300))
    path.write_text(
        "base: &b {x: 1}\nother: {<<: *b, y: 2}\nname: !!str 5\ndate: 2020-01-01\nwhich: x\nnamed: ${base.${which}}\n"
        + many.replace("${base}", "${base.x}")
    )
    cfg = load_config(path, [], notes=[])
    assert cfg.other == {"x": 1, "y": 2}
    assert (cfg.name, cfg.date, cfg.named, cfg.k299) == ("5", "2020-01-01", 1, "1/5")

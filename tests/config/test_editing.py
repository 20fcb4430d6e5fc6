"""Other values in a YAML text: read again it is what was wanted, and every other line is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from offload.cli import registry
from offload.config.editing import with_values
from offload.config.yaml_files import Loader
from offload.errors import UserError

TEXT = """\
# head
batch_size: 1  # sequences per forward

optimizer:
  _component_: offload.OffloadOptimizer  # ours
  lr: 2.0e-5
  betas: [0.9, 0.95]  # two
  # the last line of the section
# ---- next ----
data:
- path: a.jsonl
- path: b.jsonl
name: "a: b"
seed:
"""


def read(text: str) -> Any:
    return yaml.load(text, Loader=Loader)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"batch_size": 4}, {"batch_size: 1  # sequences per forward": "batch_size: 4  # sequences per forward"}),
        ({"seed": 3}, {"seed:": "seed: 3"}),
        ({"name": None}, {'name: "a: b"': "name: null"}),
        ({"name": "12"}, {'name: "a: b"': "name: '12'"}),
        ({"batch_size": True}, {"batch_size: 1  # sequences per forward": "batch_size: True  # sequences per forward"}),
        ({"optimizer": {"_component_": "offload.OffloadOptimizer", "lr": 1e-5, "betas": [0.9, 0.99]}},
         {"  lr: 2.0e-5": "  lr: 1.0e-05", "  betas: [0.9, 0.95]  # two": "  betas: [0.9, 0.99]  # two"}),
        ({"optimizer": {"_component_": "torch.optim.SGD", "momentum": 0.9}},
         {"  _component_: offload.OffloadOptimizer  # ours": "  _component_: torch.optim.SGD  # ours",
          "  lr: 2.0e-5": None, "  betas: [0.9, 0.95]  # two": "  momentum: 0.9"}),
        ({"data": None}, {"data:": "data: null", "- path: a.jsonl": None, "- path: b.jsonl": None}),
        ({"data": [{"path": "c"}]}, {"data:": "data: [{path: c}]", "- path: a.jsonl": None, "- path: b.jsonl": None}),
    ],
)  # fmt: skip
def test_a_value_changes_where_it_stands(changes: dict[str, Any], lines: dict[str, str | None]) -> None:
    tree = {**read(TEXT), **changes}
    found = with_values(TEXT, tree)
    assert read(found) == tree
    expected = [lines.get(line, line) for line in TEXT.splitlines()]
    assert found.splitlines() == [line for line in expected if line is not None]


def test_new_keys_go_to_the_end_of_their_section() -> None:
    tree = read(TEXT)
    tree["optimizer"]["weight_decay"] = 0.0
    tree["tags"] = ["a", "b"]
    lines = with_values(TEXT, tree).splitlines()
    assert lines[lines.index("  betas: [0.9, 0.95]  # two") + 1] == "  weight_decay: 0.0"
    assert lines[-1] == "tags: [a, b]"
    without_end = with_values("a: 1", {"a": 1, "b": {}})
    assert without_end == "a: 1\nb: {}\n"


def test_values_that_aliases_repeat_are_refused() -> None:
    with pytest.raises(UserError, match="aliases"):
        with_values("a: &x {b: 1}\nc: *x\n", {"a": {"b": 1}, "c": {"b": 2}})


@pytest.mark.parametrize("name", [name for name in registry.our_configs() if "generate" not in name])
def test_shipped_configs_keep_their_comments(name: str) -> None:
    path = registry.our_configs()[name]
    text = path.read_text(encoding="utf-8")
    tree = read(text)
    assert with_values(text, tree) == text
    tree["batch_size"] = 77
    tree["optimizer"] = {**tree["optimizer"], "lr": 0.125}
    found = with_values(text, tree)
    changed = [line for line, before in zip(found.splitlines(), text.splitlines(), strict=True) if line != before]
    assert len(changed) == 2 and read(found) == tree

"""YAML files as plain containers, with line numbers; and keys in nested containers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from offload.component import nearest
from offload.errors import UserError

KeyPath = tuple[str | int, ...]


class Loader(yaml.SafeLoader):
    """YAML as OmegaConf reads it (1e-5 is a float, no dates), with a key given twice as an error.

    Integers with leading zeros stay text: YAML 1.1 would read ``00010`` as octal, and where it occurs it
    counts checkpoint files.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Before construction, where a merge (<<) puts what it overrides beside what overrides it.
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                problem = f"{key.value} is given twice: keep this or line {seen[key.value]}"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen[key.value] = key.start_mark.line + 1
        return node


_REPLACED_TAGS = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp"}

Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The file as plain containers, and the line (from 1) of each key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = None
        if path.parent.is_dir():
            near = nearest(path.name, (each.name for each in path.parent.glob("*.y*ml")))
        hint = f"; did you mean {path.parent / near}?" if near else "; `tune ls` lists the configs"
        raise UserError(f"config file {path} does not exist{hint}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"config file {path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"config file {path} cannot be read: {error.strerror}") from None
    try:
        loader = Loader(text)
        try:
            node = loader.get_single_node()
            tree = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{path}, {yaml_problem(error)}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    if not isinstance(tree, dict):
        kind = "nothing" if tree is None else "a list" if isinstance(tree, list) else repr(tree)[:60]
        raise UserError(f"config file {path}: expected `key: value` lines, got {kind}")
    lines: dict[KeyPath, int] = {}
    assert node is not None  # there is a tree
    _collect_lines(node, (), lines, set())
    try:
        # Integers stay: a component may want a mapping from numbers.
        wrong = [at for at, _ in walk(tree) if not isinstance(at[-1], (str, int)) or isinstance(at[-1], bool)]
    except RecursionError:
        raise UserError(f"{path}: an anchor (&name) contains a reference to itself (*name): remove it") from None
    problems = [
        f"{path}: key {dotted(at)} is a {type(at[-1]).__name__} in YAML, expected text: put it in quotes"
        for at in wrong
    ]
    if problems:
        raise UserError("\n".join(problems))
    return tree, lines


def yaml_problem(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "not valid YAML"
    if "'\\t'" in problem:
        problem = "a tab in the indentation: YAML wants spaces"
    elif "mapping values are not allowed" in problem:
        problem = "a second `:` or wrong indentation: quote the value, or align the key with those above it"
    where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
    return f"{where}: {problem}"


def _collect_lines(node: yaml.Node, at: KeyPath, lines: dict[KeyPath, int], inside: set[int]) -> None:
    if id(node) in inside:
        return
    inside = inside | {id(node)}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*at, key.value)
            lines[here] = key.start_mark.line + 1
            _collect_lines(value, here, lines, inside)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            here = (*at, index)
            lines[here] = value.start_mark.line + 1
            _collect_lines(value, here, lines, inside)


def index_in(container: Any, part: str | int) -> Any:
    """``part`` as ``container`` is indexed with it."""
    return int(part) if isinstance(container, list) and str(part).isdigit() else part


def exists_at(tree: Any, at: KeyPath) -> bool:
    for part in at:
        index = index_in(tree, part)
        if isinstance(tree, dict):
            found = index in tree
        else:
            found = isinstance(tree, list) and isinstance(index, int) and index < len(tree)
        if not found:
            return False
        tree = tree[index]
    return True


def get_at(tree: Any, at: KeyPath) -> Any:
    for part in at:
        tree = tree[index_in(tree, part)]
    return tree


def walk(tree: Any, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every key of nested plain containers with its value, outer ones first."""
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield (*at, key), value
            yield from walk(value, (*at, key))


def dotted(at: KeyPath) -> str:
    return ".".join(str(part) for part in at)

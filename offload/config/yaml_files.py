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


LARGEST_FILE = 2**20
"""Bytes of a configuration file."""

MOST_VALUES = 10_000
"""Values of a configuration, each as often as aliases (``*name``) repeat it."""

MOST_LEVELS = 32
"""Levels of a configuration. OmegaConf gives up at about 100 without a word that helps."""


class Loader(yaml.SafeLoader):
    """YAML as OmegaConf reads it (1e-5 is a float, no dates), with a key given twice as an error.

    Integers with leading zeros stay text: YAML 1.1 would read ``00010`` as octal, and where it occurs it
    counts checkpoint files. What a configuration has no use for is an error: tags such as ``!!set``, more than
    :data:`MOST_LEVELS` levels, more than :data:`MOST_VALUES` values.
    """

    _level = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        self._level += 1
        if self._level > MOST_LEVELS:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {MOST_LEVELS} levels", mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        # What aliases repeat is one object here, and many wherever the values are walked.
        if _num_values(node, {}) > MOST_VALUES:
            problem = f"aliases (*name) make more than {MOST_VALUES:,} values of this: write fewer"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in _TAGS:
            short = node.tag.replace("tag:yaml.org,2002:", "!!")
            problem = f"the tag {short} has no meaning in a configuration: remove it"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError):  # `!!int many`; an integer of more digits than Python reads
            kind = node.tag.rpartition(":")[2]
            problem = f"{str(node.value)[:40]!r} is no {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

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


_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map")}


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Values in a tree of nodes, aliases counted as what they stand for."""
    if id(node) not in known:
        known[id(node)] = 0  # what meets itself on the way down finds this
        children = []
        if isinstance(node, yaml.MappingNode):
            children = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        known[id(node)] = 1 + sum(_num_values(each, known) for each in children)
    elif known[id(node)] == 0:
        problem = "an anchor (&name) contains a reference to itself (*name): remove it"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return known[id(node)]


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
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
        text = content.decode("utf-8") if len(content) <= LARGEST_FILE else None
    except FileNotFoundError:
        near = None
        if path.parent.is_dir():
            near = nearest(path.name, (each.name for each in path.parent.glob("*.y*ml")))
        hint = f"; did you mean {path.parent / near}?" if near else "; `tune ls` lists the configs"
        raise UserError(f"config file {path} does not exist{hint}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"config file {path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise UserError(f"config file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if text is None:
        raise UserError(f"config file {path} is larger than {LARGEST_FILE >> 20} MiB, which no configuration is")
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
    if not isinstance(tree, dict):
        kind = "nothing" if tree is None else "a list" if isinstance(tree, list) else repr(tree)[:60]
        raise UserError(f"config file {path}: expected `key: value` lines, got {kind}")
    lines: dict[KeyPath, int] = {}
    assert node is not None  # there is a tree
    _collect_lines(node, (), lines)
    # Integers stay: a component may want a mapping from numbers.
    wrong = [at for at, _ in walk(tree) if not isinstance(at[-1], (str, int)) or isinstance(at[-1], bool)]
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


def _collect_lines(node: yaml.Node, at: KeyPath, lines: dict[KeyPath, int]) -> None:
    pairs: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        pairs = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        pairs = [(index, value, value) for index, value in enumerate(node.value)]
    for part, marked, value in pairs:
        here = (*at, part)
        lines[here] = marked.start_mark.line + 1
        _collect_lines(value, here, lines)


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

"""Other values in a YAML text, whose comments and layout stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from offload.config.yaml_files import Loader
from offload.errors import UserError


@dataclass(frozen=True)
class _Edit:
    """Text in place of what is between two positions."""

    start: int
    end: int
    text: str


def with_values(text: str, tree: Mapping[str, Any]) -> str:
    """A YAML text with the values of ``tree``: those that differ are replaced where they stand, keys that it lacks go
    to the end of their section, and lines of keys that ``tree`` lacks are gone.

    Args:
        text: of a configuration, a mapping.
        tree: plain containers.

    Raises:
        UserError: the text repeats values by aliases (``*name``), of which one cannot be changed alone.
    """
    root = yaml.compose(text, Loader=Loader)
    assert isinstance(root, yaml.MappingNode)
    for edit in sorted(_edits(text, root, tree), key=lambda edit: -edit.start):
        text = text[: edit.start] + edit.text + text[edit.end :]
    try:
        is_whole = yaml.load(text, Loader=Loader) == tree
    except yaml.YAMLError:  # an anchor that was replaced
        is_whole = False
    if not is_whole:
        raise UserError("the config repeats values by aliases (*name): write them out")
    return text


def _edits(text: str, node: yaml.MappingNode, tree: Mapping[str, Any]) -> Iterator[_Edit]:
    values = _values(node)
    there = {key.value: (key, value) for key, value in node.value}
    for name, (key, value) in there.items():
        if name not in tree:
            yield _without(text, key, value)
        elif values[name] == tree[name] and type(values[name]) is type(tree[name]):
            continue
        elif _is_block(value) and isinstance(tree[name], dict):
            yield from _edits(text, value, tree[name])
        elif _is_block(value):
            end = _end_of_block(text, key, value)
            yield _Edit(key.start_mark.index, end, f"{name}: {_written(tree[name])}\n")
        else:
            start, end = value.start_mark.index, value.end_mark.index
            yield _Edit(start, end, (" " if start == end else "") + _written(tree[name]))  # `key:` is a null
    new = [name for name in tree if name not in there]
    if new:
        key, last = node.value[-1]
        at = _end_of_block(text, key, last)
        indent = " " * key.start_mark.column
        before = "" if text[:at].endswith("\n") else "\n"
        yield _Edit(at, at, before + "".join(f"{indent}{name}: {_written(tree[name])}\n" for name in new))


def _values(node: yaml.Node) -> Any:
    loader = Loader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _is_block(node: yaml.Node) -> bool:
    """A mapping or a list with a line for each entry."""
    return isinstance(node, yaml.CollectionNode) and not node.flow_style


def _without(text: str, key: yaml.Node, value: yaml.Node) -> _Edit:
    """Nothing in place of a key's lines."""
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    return _Edit(start, _end_of_block(text, key, value), "")


def _end_of_block(text: str, key: yaml.Node, value: yaml.Node) -> int:
    """Where the line after a key's last one begins. A block's own end is behind the comments that follow it."""
    while _is_block(value) and value.value:
        last = value.value[-1]
        key, value = last if isinstance(value, yaml.MappingNode) else (last, last)
    at = max(key.end_mark.index, value.end_mark.index)
    if not isinstance(value, yaml.ScalarNode) or value.style not in ("|", ">"):
        end = text.find("\n", at)
        return len(text) if end < 0 else end + 1
    return at


def _written(value: Any) -> str:
    """On one line, as the shipped configs have it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value)
    written = yaml.safe_dump(value, default_flow_style=True, width=2**16, sort_keys=False, allow_unicode=True)
    return written.removesuffix("\n").removesuffix("\n...")

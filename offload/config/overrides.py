"""Overrides from the command line: ``key=value``, ``+key=value``, ``~key``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import yaml

from offload import component as components
from offload.component import nearest
from offload.config.schema import (
    FREE,
    UNKNOWN_KEY,
    arguments_of,
    fits,
    holds_component,
    parameter_for,
    resolve,
    slot_of,
)
from offload.config.yaml_files import KeyPath, Loader, dotted, exists_at, get_at, index_in, yaml_problem
from offload.errors import UserError


@dataclasses.dataclass
class _Typed:
    """An override that sets a key."""

    text: str  # as the user wrote it
    value: str  # what stands behind the '='
    new: bool  # the file had no such key
    added: bool  # written with '+'


_SHAPE = "expected key=value, +key=value or ~key"


def apply_overrides(overrides: Sequence[str], tree: dict[str, Any], schema: type | None) -> dict[KeyPath, _Typed]:
    """Applies the overrides to ``tree``; returns those that set a key."""
    typed: dict[KeyPath, _Typed] = {}
    problems: list[str] = []
    overrides = _without_spaced(overrides, problems)
    for text in overrides:
        try:
            _apply_one(text, tree, schema, typed)
        except UserError as error:
            problems.append(str(error))
    # Judged at the end, when the components are those that the run will have.
    for at, each in typed.items():
        if each.new and not each.added and exists_at(tree, at) and slot_of(schema, tree, at) is FREE:
            problems.append(
                f"{dotted(at)}: the config has no such key and nothing tells whether it is read; "
                f"write +{each.text} to add it"
            )
    if problems:
        raise UserError("\n".join(problems))
    return typed


def _without_spaced(overrides: Sequence[str], problems: list[str]) -> list[str]:
    """Without what was written as ``key = value`` or ``key: value``, which a shell takes apart."""
    left: list[str] = []
    words = list(overrides)
    while words:
        word, after = words.pop(0), words[:2]
        if after[:1] == ["="] and len(after) == 2 and "=" not in word:
            key, value, taken = word, after[1], 2
        elif after and after[0].startswith("=") and len(after[0]) > 1 and "=" not in word:
            key, value, taken = word, after[0][1:], 1
        elif after and word[-1:] in (":", "=") and "=" not in word[:-1] + after[0] and after[0][:1] != "~":
            key, value, taken = word[:-1], after[0], 1
        else:
            left.append(word)
            continue
        del words[:taken]
        problems.append(f"override {' '.join([word, *after[:taken]])}: write {key}={value}, without spaces")
    return left


def _apply_one(text: str, tree: dict[str, Any], schema: type | None, typed: dict[KeyPath, _Typed]) -> None:
    if text.startswith("--"):
        name = text.lstrip("-") or "key"
        raise UserError(f"override {text}: {_SHAPE}, without dashes: {name if '=' in name else f'{name}=value'}")
    removes, adds = text.startswith("~"), text.startswith("+")
    name, equals, value = text[1 if removes or adds else 0 :].partition("=")
    name = name.strip()
    at = _parse_key(name, text)
    if removes:
        if equals:
            raise UserError(f"override {text}: ~{name} removes the key and takes no value")
        _remove(tree, at)
        for other in [other for other in typed if other[: len(at)] == at]:
            del typed[other]
        return
    if not equals:
        raise UserError(f"override {text}: {_SHAPE}")
    if adds and exists_at(tree, at):
        raise UserError(f"override {text}: the config has {name} already: write {name}={value} to change it")

    parsed = _parse_value(value, text, schema, tree, at)
    new = not exists_at(tree, at)
    current = None if new else get_at(tree, at)
    # Only the first of several overrides of one key finds the file as it was.
    new = typed[at].new if at in typed else new
    is_component = isinstance(current, dict) and "_component_" in current
    if isinstance(parsed, str) and "${" not in parsed and (is_component or holds_component(schema, tree, at)):
        if not isinstance(current, dict):
            _set(tree, at, {}, text)
        at = (*at, "_component_")
    for other in [other for other in typed if len(other) > len(at) and other[: len(at)] == at]:
        del typed[other]  # replaced as a whole
    _set(tree, at, parsed, text)
    typed[at] = _Typed(text=text.lstrip("+"), value=value, new=new, added=adds)


def _parse_key(name: str, text: str) -> KeyPath:
    """``a.0.b`` and ``a[0].b`` -> ("a", "0", "b"); list positions become numbers when they are looked up."""
    name = re.sub(r"\[(\d+)\]", r".\1", name)
    parts = name.split(".")
    if not all(parts) or any(character in name for character in " []{}"):
        raise UserError(f"override {text}: {_SHAPE}, with a key such as optimizer.lr")
    return tuple(parts)


def _parse_value(text: str, override: str, schema: type | None, tree: dict[str, Any], at: KeyPath) -> Any:
    if text == "None":
        return None  # as torchtune's command line reads it
    if text == "":
        return ""
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        slot = slot_of(schema, tree, at)
        if slot is not FREE and slot is not UNKNOWN_KEY and fits(slot, text):
            return text
        reason = yaml_problem(error) if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise UserError(
            f"override {override}: the value is not YAML ({' '.join(reason.split())}); quote it for plain "
            f"text: '{dotted(at)}=\"...\"'"
        ) from None


def _set(tree: dict[str, Any], at: KeyPath, value: Any, override: str) -> None:
    container: Any = tree
    for depth, part in enumerate(at):
        here = dotted(at[:depth])
        index = index_in(container, part)
        if isinstance(container, list) and not (isinstance(index, int) and index < len(container)):
            raise UserError(
                f"override {override}: {here} is a list of {len(container)}; expected a position from 0 to "
                f"{len(container) - 1}, got {part}"
            )
        if depth == len(at) - 1:
            container[index] = value
            return
        if isinstance(container, dict) and container.get(part) is None:
            container[part] = {}
        inner = container[index]
        if not isinstance(inner, (dict, list)):
            raise UserError(
                f"override {override}: {dotted(at[: depth + 1])} is {inner!r}, which has no key {at[depth + 1]!r}"
            )
        container = inner


def _remove(tree: dict[str, Any], at: KeyPath) -> None:
    for depth in range(len(at)):
        if not exists_at(tree, at[: depth + 1]):
            container = get_at(tree, at[:depth])
            names = [str(each) for each in container] if isinstance(container, dict) else []
            near = nearest(str(at[depth]), names)
            hint = f"; did you mean ~{dotted((*at[:depth], near))}?" if near else ", so drop this override"
            raise UserError(f"override ~{dotted(at)}: the config has no key {dotted(at[: depth + 1])}{hint}")
    container = get_at(tree, at[:-1])
    del container[index_in(container, at[-1])]


def take_text_where_only_text_fits(tree: dict[str, Any], typed: dict[KeyPath, _Typed], schema: type | None) -> None:
    """``name=2024`` for a key that wants text is the text "2024"; null stays null."""
    for at, each in typed.items():
        if not exists_at(tree, at):
            continue
        parsed = get_at(tree, at)
        if parsed is None or isinstance(parsed, str):
            continue
        slot = slot_of(schema, tree, at)
        if slot is FREE or slot is UNKNOWN_KEY or fits(slot, parsed) or not fits(slot, each.value):
            continue
        _set(tree, at, each.value, each.text)


def drop_what_swapped_components_do_not_take(
    tree: dict[str, Any], original: dict[str, Any], typed: dict[KeyPath, _Typed], notes: list[str]
) -> None:
    for at in dict.fromkeys(at[:-1] for at in typed if len(at) > 1):
        section = get_at(tree, at) if exists_at(tree, at) else None
        before = get_at(original, at) if exists_at(original, at) else None
        if not (isinstance(section, dict) and isinstance(before, dict) and "_component_" in section):
            continue
        swapped = section["_component_"] != before.get("_component_")
        try:
            component = resolve(section["_component_"])
            if not swapped and not hasattr(component, "config_signature"):
                continue  # what it takes does not depend on what it is given
            takes = components.signature_of(component, arguments_of(section))
        except UserError:
            continue  # check_config reports it
        try:
            took = components.signature_of(resolve(before["_component_"]), arguments_of(before))
        except (UserError, KeyError):
            took = None  # not installed here, say: then nothing tells a typo from an argument
        dropped = [
            name
            for name in arguments_of(before)
            if name in section
            and not any(other[: len(at) + 1] == (*at, name) for other in typed)
            and parameter_for(takes, name) is None
            and (took is None or parameter_for(took, name) is not None)
        ]
        if dropped:
            values = ", ".join(f"{name}={_flow(section.pop(name))}" for name in dropped)
            causes = [
                f"{other[-1]}={_flow(section[other[-1]])}"
                for other in typed
                if other[:-1] == at and other[-1] != "_component_" and other[-1] in section
            ]
            who = str(section["_component_"])
            if not swapped and causes:
                who += f" with {', '.join(causes)}"
            notes.append(f"{dotted(at)}: {who} does not take {values} of the config file: dropped")


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()

"""What a recipe reads, for people: every key of its schema with type, default and meaning."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from offload.config.schema import Above, AtLeast, AtMost, describe, hints_of, members_of, section_type
from offload.config.yaml_files import KeyPath, dotted

_MEANING_COLUMN, _WIDTH = 6, 110


def meanings_of(schema: type) -> dict[str, str]:
    """The text under each key in the source of a schema and of the classes that it derives from.

    A text that stands behind a key as documentation of an attribute (PEP 258) leaves nothing in the class, so the
    source is read; a key without one, or a class without a source, has no entry.
    """
    found: dict[str, str] = {}
    for each in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(each))
        except (OSError, TypeError):
            continue
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)
        for statement, behind in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(behind, ast.Expr)
                and isinstance(behind.value, ast.Constant)
                and isinstance(behind.value.value, str)
            ):
                found[statement.target.id] = " ".join(behind.value.value.split())
    return found


def describe_keys(schema: type) -> str:
    """Every key of a schema, in its order, sections opened: a line of name, type and default, then the meaning."""
    lines: list[str] = []
    for at, field, annotation, meaning in _keys(schema, ()):
        lines.append(f"  {dotted(at)}: {_type(annotation)}{_default(field)}")
        lines += textwrap.wrap(
            meaning, _WIDTH, initial_indent=" " * _MEANING_COLUMN, subsequent_indent=" " * _MEANING_COLUMN
        )
    return "\n".join(lines)


def _keys(schema: type, at: KeyPath) -> Iterator[tuple[KeyPath, dataclasses.Field[Any], Any, str]]:
    hints, meanings = hints_of(schema), meanings_of(schema)
    for field in dataclasses.fields(schema):
        here = (*at, field.name)
        yield here, field, hints[field.name], meanings.get(field.name, "")
        section = section_type(hints[field.name])
        if section is not None:
            yield from _keys(section, here)


def _type(annotation: Any) -> str:
    text = describe(annotation)
    _, markers = members_of(annotation)
    bounds = [each.text for each in markers if isinstance(each, (AtLeast, AtMost, Above))]
    return f"{text}, {', '.join(bounds)}" if bounds else text


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return " (required)"
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    return f" = {shown}"

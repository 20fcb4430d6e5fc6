"""Interpolations, ``${key}`` and ``${resolver:argument}``: their errors, and values without side effects."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from offload.component import nearest
from offload.errors import UserError
from offload.training.config_schema import Missing, Unknown
from offload.training.config_yaml import KeyPath, dotted, walk

# `${name:...}`: a resolver. OmegaConf's own are named oc.*, cost nothing and have no effects; any other one
# may download or prepare files, so that a check never calls it.
_CUSTOM_RESOLVER = re.compile(r"(?<!\\)\$\{\s*(?!oc\.)([A-Za-z_][\w.]*)\s*:")

# The key that `${key}`, `${.key}`, `${oc.select:key}` or `${oc.dict.values:key}` reads; of `${key.${other}}`
# its start.
_REFERENCE = re.compile(r"(?<!\\)\$\{\s*(?:oc\.(?:select|dict\.\w+)\s*:\s*)?(\.*[\w.\[\]-]+)(?!\s*:|[\w.])")

Place = Callable[[KeyPath], str]
"""Where a key's value was written, for messages."""

_LATER = "\0known when the run starts\0"

UNKNOWN = Unknown()
MISSING = Missing()


def grammar_problems(tree: Any, place: Place) -> list[str]:
    problems = []
    for at, value in walk(tree):
        if not isinstance(value, str) or "${" not in value:
            continue
        try:
            OmegaConf.create({"value": value})
        except GrammarParseError:
            problems.append(
                f"{dotted(at)}: {value!r} is not a valid interpolation ({place(at)}): write ${{key}}, "
                "or \\${ for the plain characters"
            )
            continue
        for name in _CUSTOM_RESOLVER.findall(value):
            if not OmegaConf.has_resolver(name):
                near = nearest(name, _resolver_names())
                hint = f"; did you mean ${{{near}:...}}?" if near else ": remove it, or write \\${ for text"
                problems.append(f"{dotted(at)}: there is no resolver {name!r} ({place(at)}){hint}")
    return problems


def _resolver_names() -> list[str]:
    from omegaconf.basecontainer import BaseContainer

    return list(getattr(BaseContainer, "_resolvers", {}))


def resolved_tree(cfg: DictConfig, problems: list[str], place: Place | None = None) -> dict[str, Any]:
    """Plain containers with interpolations resolved; ``UNKNOWN`` and ``MISSING`` where there is no value."""
    raw = OmegaConf.to_container(cfg, resolve=False)
    safe = OmegaConf.create(_without_custom_resolvers(raw))
    assert isinstance(safe, DictConfig)
    names = [dotted(at) for at, _ in walk(raw)]
    tree = _resolve_values(safe, (), problems, place, names)
    assert isinstance(tree, dict)
    return tree


def _without_custom_resolvers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_custom_resolvers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_custom_resolvers(each) for each in value]
    if isinstance(value, str) and _CUSTOM_RESOLVER.search(value):
        return _LATER
    return value


_DEEPEST = 50


def _resolve_values(
    node: DictConfig | ListConfig, at: KeyPath, problems: list[str], place: Place | None, names: list[str]
) -> dict[Any, Any] | list[Any]:
    def value_of(key: Any) -> Any:
        here = (*at, key)
        where = f" ({place(here)})" if place else ""
        try:
            value = node[key]
        except (MissingMandatoryValue, InterpolationToMissingValueError):
            return MISSING
        except OmegaConfBaseException as error:
            problems.append(f"{dotted(here)}: {interpolation_problem(error, node, key, names)}{where}")
            return UNKNOWN
        except RecursionError:  # omegaconf 2.3 does not notice `a: ${a}`
            problems.append(f"{dotted(here)}: Recursive interpolation{where}: write a value")
            return UNKNOWN
        if isinstance(value, (DictConfig, ListConfig)):
            if len(here) > _DEEPEST:
                problems.append(f"{dotted(here[:3])}...: the interpolation contains itself{where}")
                return UNKNOWN
            return _resolve_values(value, here, problems, place, names)
        return UNKNOWN if isinstance(value, str) and _LATER in value else value

    if isinstance(node, ListConfig):
        return [value_of(index) for index in range(len(node))]
    keys: list[Any] = list(node)
    return {key: value_of(key) for key in keys}


def interpolation_problem(error: OmegaConfBaseException, node: Any, key: Any, names: list[str]) -> str:
    raw = OmegaConf.to_container(node, resolve=False)
    text = raw[key] if isinstance(raw, (dict, list)) else ""
    if isinstance(error, InterpolationKeyError):
        found = re.search(r"Interpolation key '([^']*)'", str(error))
        name = found.group(1) if found else str(text)
        near = nearest(name.lstrip("."), names)
        hint = f"; did you mean ${{{near}}}?" if near else "; set that key, or write the value itself"
        return f"{text!r} refers to {name!r}, which the config does not have{hint}"
    if isinstance(error, UnsupportedInterpolationType):
        return f"{text!r} uses a resolver that does not exist"
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", reason).strip('"')
    return f"{text!r} cannot be resolved: {reason}"


def user_error_in(error: BaseException) -> UserError | None:
    """The UserError that a resolver raised, which OmegaConf wraps once or more."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, UserError):
        seen = seen.__cause__ or seen.__context__
    return seen


def referenced_keys(cfg: DictConfig) -> set[KeyPath]:
    """Keys that an interpolation somewhere in the configuration reads."""
    raw = OmegaConf.to_container(cfg, resolve=False)
    found: set[KeyPath] = set()
    for at, value in walk(raw):
        if not isinstance(value, str):
            continue
        for name in _REFERENCE.findall(value):
            ups = len(name) - len(name.lstrip("."))
            # One dot is the section that holds the key, each further one the section around it.
            base = at[: len(at) - ups] if ups else ()
            parts = re.sub(r"\[([^\]]*)\]", r".\1", name.strip(".")).split(".")
            found.add((*base, *parts))
    return found

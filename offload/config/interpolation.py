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
from offload.config.schema import Missing, Unknown
from offload.config.yaml_files import KeyPath, dotted, exists_at, get_at, walk
from offload.errors import UserError

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


# `${${key}}`, `${oc.select:${key}}`, `${oc.decode:...}`: what it reads is known only when it is resolved.
_ANYTHING = re.compile(r"\$\{\s*(?:oc\.[\w.]+\s*:\s*)?[\"']?\$\{|\$\{\s*oc\.(?:decode|create)\b")

MOST_WORK = 30_000
"""Units of work that resolving a configuration may take, below ten seconds: 10 for each interpolation, repeated with
all that it leads to, 1 for each value and for each 100 characters. OmegaConf keeps no result. An interpolation that may
read anything counts a third."""


def grammar_problems(tree: Any, place: Place) -> list[str]:
    known: dict[KeyPath, int] = {}
    if _work(tree, (), known) > MOST_WORK:
        texts = [at for at, value in walk(tree) if isinstance(value, str)]
        worst = max(texts, key=lambda at: known.get(at, 0))
        return [
            f"{dotted(worst)}: interpolations lead to too many values, or to what contains them ({place(worst)}): "
            "write the values themselves"
        ]
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


def _work(tree: Any, at: KeyPath, known: dict[KeyPath, int]) -> int:
    """What it takes to resolve the value at ``at``, in units of :data:`MOST_WORK`; rather too much than too little."""
    if at in known:
        return known[at]
    known[at] = 0  # for what refers to itself, which resolving finds out at once
    value = get_at(tree, at)
    work = 1
    if isinstance(value, str):
        text = value.replace("\\", "")  # a resolver may take what is escaped for it
        work += len(text) // 100 + 10 * text.count("${") + MOST_WORK // 3 * len(_ANYTHING.findall(text))
        for found in _REFERENCE.finditer(text):
            target = _target(found.group(1), at)
            is_whole = exists_at(tree, target) and not text.startswith("${", found.end())
            while not exists_at(tree, target):
                target = target[:-1]
            if is_whole and known.get(target) == 0 and not isinstance(get_at(tree, target), str):
                work += MOST_WORK  # a section that contains itself
            work += _work(tree, target, known)
    elif isinstance(value, (dict, list)):
        parts = value if isinstance(value, dict) else range(len(value))
        work += sum(_work(tree, (*at, part), known) for part in parts)
    known[at] = work
    return work


def _target(name: str, at: KeyPath) -> KeyPath:
    """The key that ``${name}`` in the value at ``at`` reads."""
    ups = len(name) - len(name.lstrip("."))
    # One dot is the section that holds the key, each further one the section around it.
    base = at[: len(at) - ups] if ups else ()
    return (*base, *(part for part in re.sub(r"\[([^\]]*)\]", r".\1", name.strip(".")).split(".") if part))


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


def tree_of(section: DictConfig) -> dict[str, Any]:
    """:func:`resolved_tree` of the whole configuration that a section is part of."""
    root = section._get_root()
    assert isinstance(root, DictConfig)
    return resolved_tree(root, [])


def is_known(section: DictConfig, tree: dict[str, Any]) -> bool:
    """Whether every value in a section can be had without calling a resolver of ours, by :func:`tree_of` it."""
    key = str(section._get_full_key(None)).replace("[", ".").replace("]", "")
    return not any(isinstance(value, Unknown) for _, value in walk(get_at(tree, tuple(key.split(".")))))


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
        except MissingMandatoryValue:
            return MISSING
        except InterpolationToMissingValueError:
            return UNKNOWN  # it is told of the key that is missing
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
            found.add(_target(name, at))
    return found

"""Parameter groups by regular expressions on parameters' names: ``OffloadOptimizer(…, param_groups=[…])``."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from offload.base_class import base_class_of, path_of, with_fused
from offload.component import nearest
from offload.engine.units import clean_name
from offload.errors import UserError
from offload.mixed import CLASS, Kinds, mixed_class
from offload.refusals import check_base

KEY = "optimizer.param_groups"

SHARED = ("lr", "weight_decay")
"""What a group with a class of its own takes from the others' settings; all else means another thing there."""


@dataclass(frozen=True, eq=False)
class Rule:
    """One entry.

    Attributes:
        key: what messages call it.
        pattern: matched against whole names.
        kind: the optimizer class of the group.
        options: hyperparameters of the group, those that it shares with the other groups included.
    """

    key: str
    pattern: re.Pattern[str]
    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]


def choose_base(
    base_class: type[torch.optim.Optimizer],
    base_kwargs: dict[str, Any],
    groups: list[dict[str, Any]],
    entries: Sequence[Any],
    names: Mapping[Tensor, str],
    *,
    strategy: str,
    update_in_backward: bool,
) -> tuple[type[torch.optim.Optimizer], dict[str, Any], list[dict[str, Any]]]:
    """The base optimizer's class, what it is built with, and its groups: one class as it is, several as one.

    Args:
        base_class: of parameters that no entry matches.
        base_kwargs: what it is built with.
        groups: as the caller gave them.
        entries: see :func:`read_rules`.
        names: the parameters' names, for those that ``groups`` gives none.
        strategy: of the OffloadOptimizer.
        update_in_backward: of the same.

    Raises:
        UserError: for entries that mean nothing, and for classes that cannot update their groups in that way.
    """
    kinds: Kinds = {path_of(base_class): (base_class, base_kwargs)}
    if entries:
        rules = read_rules(entries, base_class, base_kwargs)
        kinds, groups = _grouped(rules, _named(groups, names), base_class, base_kwargs)
    is_alone = len(kinds) == 1
    built = {}
    for path, (kind, kwargs) in kinds.items():
        mine = groups if is_alone else [group for group in groups if group[CLASS] == path]
        check_base(kind, kwargs, mine, strategy=strategy, update_in_backward=update_in_backward, is_alone=is_alone)
        built[path] = kind, kwargs if strategy == "resident" else with_fused(kind, mine, dict(kwargs))
    if not is_alone:
        return mixed_class(built), {}, groups
    ((kind, kwargs),) = built.values()
    return kind, dict(kwargs), [{key: value for key, value in group.items() if key != CLASS} for group in groups]


def read_rules(
    entries: Sequence[Any], base_class: type[torch.optim.Optimizer], base_kwargs: Mapping[str, Any]
) -> list[Rule]:
    """The rules of ``param_groups``.

    Args:
        entries: mappings with ``params``, a regular expression; the rest are hyperparameters of what it matches, and
            ``optimizer_class``, where that is not ``base_class``.
        base_class: of parameters that no rule matches.
        base_kwargs: what ``base_class`` is built with.

    Raises:
        UserError: for an entry that cannot be read, a class that cannot be found, or a hyperparameter that it does not
            take.
    """
    if not isinstance(entries, (list, tuple)):
        raise UserError(f"{KEY}: expected a list of {{params: <regular expression>, ...}}, got {entries!r}")
    return [_rule(entry, f"{KEY}.{index}", base_class, base_kwargs) for index, entry in enumerate(entries)]


def _rule(entry: Any, key: str, base_class: type[torch.optim.Optimizer], base_kwargs: Mapping[str, Any]) -> Rule:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("params"), str):
        raise UserError(
            f"{key}: expected {{params: <regular expression on names>, weight_decay: 0.0, ...}}, got {entry!r}"
        )
    try:
        pattern = re.compile(entry["params"])
    except re.error as error:
        raise UserError(f"{key}.params: {entry['params']!r} is not a regular expression: {error}") from error
    options = {name: value for name, value in entry.items() if name not in ("params", "optimizer_class")}
    kind = base_class
    if "optimizer_class" in entry:
        kind = base_class_of(entry["optimizer_class"], key=f"{key}.optimizer_class")
    parameters = inspect.signature(kind).parameters
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    known = [name for name in parameters if name != "params"]
    for name, value in options.items():
        if name not in known and not is_open:
            near = nearest(name, [*known, "optimizer_class"])
            hint = f"did you mean {near}?" if near else f"it takes {', '.join(known)}"
            raise UserError(f"{key}.{name}: {path_of(kind)} does not take {name!r}; {hint}")
        default = parameters[name].default if name in parameters else None
        if isinstance(default, tuple) and isinstance(value, list):
            options[name] = tuple(value)
        elif isinstance(default, float) and not isinstance(value, (Real, Tensor)):
            raise UserError(f"{key}.{name}: expected a number, such as {default:g}, got {value!r}")
    if kind is not base_class:
        shared = {name: base_kwargs[name] for name in SHARED if name in base_kwargs and name in known}
        options = {**shared, **options}
    return Rule(key, pattern, kind, options)


def _grouped(
    rules: Sequence[Rule],
    named: Iterable[tuple[str, nn.Parameter]],
    base_class: type[torch.optim.Optimizer],
    base_kwargs: Mapping[str, Any],
) -> tuple[Kinds, list[dict[str, Any]]]:
    """The optimizer classes that the rules ask for, and the parameter groups.

    Returns:
        By each class's dotted path, the class and what it is built with; and the groups, with named parameters and the
        path of their class: first what no rule matches, then each rule's. The first rule that matches decides.

    Raises:
        UserError: for a rule that is left with no parameter, naming the nearest one; for a setting that a class takes
            once for all of its groups and that differs between them.
    """
    kinds: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {}
    groups = []
    for rule, members in _assign(rules, named):
        kind, options = (base_class, {}) if rule is None else (rule.kind, rule.options)
        path = path_of(kind)
        only_once = _taken_once(kind, options)
        if path not in kinds:
            kinds[path] = kind, dict(base_kwargs) if kind is base_class else only_once
        common = kinds[path][1]
        for name, value in only_once.items():
            if name not in common or common[name] != value:
                assert rule is not None
                raise UserError(
                    f"{rule.key}.{name}: {path} takes it once for all of its groups; give it as optimizer.{name}, or "
                    "the same in each of them"
                )
        groups.append({CLASS: path, **{k: v for k, v in options.items() if k not in only_once}, "params": members})
    return kinds, groups


def _taken_once(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that a class takes when it is built, and not for each group."""
    if not options:
        return {}
    of_groups = kind([nn.Parameter(torch.zeros(2, 2))], **options).param_groups[0]
    return {name: value for name, value in options.items() if name not in of_groups}


def _assign(rules: Sequence[Rule], named: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[Rule | None, list[Any]]]:
    """``(rule, its named parameters)``, where there are any."""
    matched: dict[Rule | None, list[Any]] = {None: [], **{rule: [] for rule in rules}}
    names = []
    for name, param in named:
        names.append(clean_name(name))
        rule = next((rule for rule in rules if rule.pattern.fullmatch(names[-1])), None)
        matched[rule].append((name, param))
    for rule in rules:
        if not matched[rule]:
            _refuse_empty(rule, rules, names)
    return [(rule, members) for rule, members in matched.items() if members]


def _refuse_empty(rule: Rule, rules: Sequence[Rule], names: Sequence[str]) -> None:
    pattern = rule.pattern.pattern
    taken = next((name for name in names if rule.pattern.fullmatch(name)), None)
    if taken is not None:
        first = next(other.key for other in rules if other.pattern.fullmatch(taken))
        raise UserError(
            f"{rule.key}.params: all that {pattern!r} matches, such as {taken}, belongs to {first}, the first that "
            "matches; put the narrower pattern first"
        )
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)[0]
    raise UserError(
        f"{rule.key}.params: {pattern!r} matches no parameter that is trained; patterns match whole names, such as "
        f"{near}: use `.*` in place of a part that varies"
    )


def _named(groups: list[dict[str, Any]], names: Mapping[Tensor, str]) -> list[tuple[str, nn.Parameter]]:
    """Parameters with their names, which patterns are matched against.

    Args:
        groups: as the caller gave them.
        names: those of the model, if it is known.

    Raises:
        UserError: for parameters in groups already, or without names.
    """
    if len(groups) != 1 or set(groups[0]) != {"params"}:
        raise UserError(f"{KEY}: the parameters are in groups already; give parameters, or groups without param_groups")
    named = []
    for entry in groups[0]["params"]:
        name, param = entry if isinstance(entry, tuple) else (names.get(entry), entry)
        if name is None:
            raise UserError(f"{KEY}: parameters have no names to match; give model.named_parameters(), or model=")
        named.append((name, param))
    return named

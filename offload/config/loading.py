"""Configurations: a YAML file, overrides from the command line, and a schema that says what is read.

A recipe declares what it reads as a dataclass, its *schema*::

    @dataclass(kw_only=True)
    class Settings:
        output_dir: str
        batch_size: Annotated[int, AtLeast(1)] = 1
        dtype: Literal["fp32", "bf16"] = "bf16"
        clip_grad_norm: float | None = None
        optimizer: Annotated[Component, Passes("params")]
        dataset: Annotated[Component | list[Component], Passes("tokenizer")]
        evaluation: Evaluation | None = None        # another dataclass: a section

:func:`load_and_check` then gives the configuration and a ``Settings``, or one :class:`UserError` that lists
every
problem: a key that nothing reads, a value of the wrong type, a component that cannot be found or does not
take an argument. Nothing is instantiated for that. :func:`instantiate` builds a component afterwards.

A *component* is a section with ``_component_``, the dotted path of what to build; the section's other keys
are its keyword arguments. Those are checked against the component's signature, and their values where the
annotation is made of int, float, bool, str, Literal, list, tuple, dict and unions of these; any other
annotation accepts everything, as does a component that has no signature (some are written in C).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from offload import component as components
from offload.component import LocalModuleError, nearest
from offload.config import translation
from offload.config.elsewhere import USUAL, component_here, key_here, of_builder
from offload.config.interpolation import (
    MISSING,
    grammar_problems,
    interpolation_problem,
    referenced_keys,
    resolved_tree,
    user_error_in,
)
from offload.config.overrides import (
    apply_overrides,
    drop_what_swapped_components_do_not_take,
    take_text_where_only_text_fits,
)
from offload.config.schema import (
    Above,
    AtLeast,
    AtMost,
    Component,
    DottedPath,
    Makes,
    Missing,
    Passes,
    Unknown,
    annotation_of,
    arguments_of,
    coerced,
    component_annotation,
    describe,
    fits,
    hints_of,
    members_of,
    parameter_for,
    resolve,
    section_type,
    type_problem,
)
from offload.config.yaml_files import KeyPath, dotted, read_yaml, walk
from offload.errors import UserError
from offload.paths import with_home

S = TypeVar("S")


def load_config(path: Path, overrides: Sequence[str], *, notes: list[str], schema: type | None = None) -> DictConfig:
    """The YAML file with the overrides applied, interpolations not yet resolved.

    Overrides, in the order given:

    - ``key=value`` sets a key, at any depth (``optimizer.lr=1e-5``, ``dataset.0.split=train``). The value is
      everything behind the first ``=``, read as YAML; where only text fits the key it is taken as it stands.
    - ``key=dotted.path`` where the key is a component, and ``key._component_=dotted.path``, swap the
      component. Keyword arguments of the file that the new one does not take are dropped, and a line in
      ``notes`` says so; likewise after another override that changes what the component takes
      (``optimizer.optimizer_class=...``). What was typed is never dropped.
    - ``~key`` removes a key of the file.
    - ``+key=value`` adds a key that the file does not have. It is needed only where nothing tells which keys
      there are, as inside a component with ``**kwargs``; a key that the schema or the component's signature
      knows may be given without it.

    Args:
        path: the YAML file.
        overrides: from the command line.
        notes: lines for the user are appended.
        schema: the recipe's dataclass. Without it the names of new keys are not judged here
            (:func:`check_config` judges all), and ``key=dotted.path`` is a swap only where the file has a
            component already.

    Raises:
        UserError: a missing or malformed file, a malformed override, a key that cannot be set or removed, an
            interpolation that leads nowhere; with the file and line where it comes from the file.
    """
    original, lines = read_yaml(Path(path))
    tree = copy.deepcopy(original)
    typed = apply_overrides(overrides, tree, schema)
    take_text_where_only_text_fits(tree, typed, schema)
    drop_what_swapped_components_do_not_take(tree, original, typed, notes)
    _register_resolvers()

    def place(key: KeyPath) -> str:
        text = next((each.text for at, each in typed.items() if key[: len(at)] == at), None)
        if text is not None:
            return f"override {text}"
        line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
        return f"{path}, line {line}" if line else str(path)

    problems = grammar_problems(tree, place)
    if not problems:
        cfg = OmegaConf.create(tree)
        assert isinstance(cfg, DictConfig)
        resolved_tree(cfg, problems, place)
    if problems:
        raise UserError("\n".join(problems))
    return cfg


def _register_resolvers() -> None:
    # Late, and here rather than at import: whoever loads a config needs it, nobody else does.
    from offload import tiny

    tiny.register_resolvers()


def check_config(cfg: DictConfig, schema: type) -> None:
    """Checks a configuration against a recipe's schema, and every component in it against its signature.

    Nothing is instantiated. A value that a custom resolver gives (``${tiny_llama:train}``) is not computed
    and passes. Where no other problem is found, the schema's ``__post_init__``, if it has one, judges what no
    single key shows; it must not look at the machine, since a configuration may be checked on another one.

    Raises:
        UserError: all problems found, one per line.
    """
    problems: list[str] = []
    tree = resolved_tree(cfg, problems)
    if translation.is_of_another_trainer(tree):
        raise UserError("\n".join(translation.problems(tree)))
    referenced = referenced_keys(cfg)
    _check_section(tree, schema, (), referenced, problems)
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    if hasattr(schema, "__post_init__") and not _has_unknown(tree, schema):
        to_settings(cfg, schema)


def _has_unknown(tree: Mapping[str, Any], schema: type) -> bool:
    """Whether a value that the settings hold themselves, outside components, is known only to a run."""
    for name, annotation in hints_of(schema).items():
        value = tree.get(name)
        section = section_type(annotation)
        if isinstance(value, dict) and section is not None and "_component_" not in value:
            if _has_unknown(value, section):
                return True
        elif isinstance(value, Unknown) or (
            Component not in members_of(annotation)[0] and any(isinstance(v, Unknown) for _, v in walk(value))
        ):
            return True
    return False


def _check_section(
    tree: Mapping[str, Any], schema: type, at: KeyPath, referenced: set[KeyPath], problems: list[str]
) -> None:
    hints = hints_of(schema)
    for name, value in tree.items():
        name = str(name)
        here = (*at, name)
        if name in hints:
            continue
        if any(used[: len(here)] == here for used in referenced):
            if isinstance(value, Missing):
                problems.append(f"{dotted(here)}: required: set {dotted(here)}")
            _check_free(value, here, problems)
            continue
        elsewhere = [] if at else _sections_that_take(name, tree) or _sections_that_take(of_builder(name), tree)
        if elsewhere:
            hint = f"did you mean {' or '.join(elsewhere)}?"
        else:
            hint = (None if at else key_here(name, hints)) or _rename(name, here, hints)
        problems.append(f"{dotted(here)}: nothing reads this key; {hint}")
    for field in dataclasses.fields(schema):
        here = (*at, field.name)
        value = tree.get(field.name, MISSING)
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if isinstance(value, Missing):
            # A default stands in for a key left out, not for one that the file marks with ???.
            if required or field.name in tree:
                problems.append(f"{dotted(here)}: required: {_how_to_set(here, hints[field.name])}")
            continue
        _check_value(value, hints[field.name], here, referenced, problems)


def _sections_that_take(name: str | None, tree: Mapping[str, Any]) -> list[str]:
    """Keys called ``name`` inside sections: those that are there, else those that a component would take."""
    if name is None:
        return []
    there = [dotted(at) for at, _ in walk(tree) if len(at) > 1 and at[-1] == name]
    if there:
        return there
    found = []
    for key, section in tree.items():
        if isinstance(section, dict) and isinstance(section.get("_component_"), str):
            try:
                component = resolve(section["_component_"])
                parameter = components.signature_of(component, arguments_of(section)).parameters.get(name)
            except UserError:
                continue
            if parameter is not None and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                found.append(f"{key}.{name}")
    return found


def _rename(name: str, here: KeyPath, valid: Mapping[str, Any]) -> str:
    if "." in name and name.partition(".")[0] in valid:
        first, _, rest = name.partition(".")
        return f"in a file keys nest: write `{rest}:` indented below `{first}:`"
    near = nearest(name, valid)
    if near is not None:
        return f"did you mean {dotted((*here[:-1], near))}?"
    if not valid:
        return "there are no keys here: remove it"
    # A longer list helps nobody: what is meant is not near any of it.
    return f"remove it, or use one of: {', '.join(sorted(valid))}" if len(valid) <= 20 else "remove it"


def _taken_by_the_usual(name: str, at: KeyPath, kind: str, path: Any) -> str | None:
    usual = USUAL.get(kind, path)
    if usual == path:
        return None
    # Its own, not those of what it builds: every optimizer's arguments are OffloadOptimizer's too.
    found = inspect.signature(resolve(usual)).parameters.get(name)
    if found is None or found.kind is inspect.Parameter.VAR_KEYWORD:
        return None
    return f"{usual} does: {dotted(at)}={usual}"


def _how_to_set(here: KeyPath, annotation: Any) -> str:
    if Component in members_of(annotation)[0]:
        return f"set {dotted(here)}._component_ to the dotted path of a component"
    return f"set {dotted(here)} ({describe(annotation)})"


def _check_value(value: Any, annotation: Any, at: KeyPath, referenced: set[KeyPath], problems: list[str]) -> None:
    key = dotted(at)
    members, markers = members_of(annotation)
    if isinstance(value, Unknown):
        return
    if isinstance(value, dict) and Component in members:
        if "_component_" in value:
            passes = next((each for each in markers if isinstance(each, Passes)), Passes())
            makes = next((each for each in markers if isinstance(each, Makes)), None)
            _check_component(value, at, passes, problems, makes)
            return
        if section_type(annotation) is None:
            near = nearest("_component_", value)
            problems.append(
                f"{key}: expected _component_, the dotted path of what to build"
                + (f"; did you mean _component_ by {near}?" if near else f": set {key}._component_")
            )
            return
    if isinstance(value, dict) and (section := section_type(annotation)) is not None:
        _check_section(value, section, at, referenced, problems)
        return
    entry = component_annotation(annotation)
    if isinstance(value, list) and entry is not None:
        if not value:
            problems.append(f"{key}: expected at least one component, got an empty list")
        for index, each in enumerate(value):
            _check_value(each, entry, (*at, index), referenced, problems)
        return
    if not fits(annotation, value):
        written = component_here(key, value) if isinstance(value, str) and Component in members else None
        way = f"{value!r} is no component; did you mean {written}?" if written else type_problem(annotation, value)
        problems.append(f"{key}: {way}")
        return
    for marker in markers:
        if isinstance(marker, (AtLeast, AtMost, Above)) and isinstance(value, (int, float)):
            wrong = marker.problem(value)
            if wrong is not None:
                problems.append(f"{key}: {wrong}")
        elif isinstance(marker, DottedPath) and isinstance(value, str):
            try:
                _callable(value, key)
            except LocalModuleError:
                pass
            except UserError as error:
                problems.append(str(error))
    _check_free(value, at, problems)


def _check_free(value: Any, at: KeyPath, problems: list[str]) -> None:
    """Components inside values of which nothing else is known."""
    if isinstance(value, dict) and "_component_" in value:
        _check_component(value, at, Passes(), problems)
    elif isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            _check_free(each, (*at, key), problems)


def _callable(path: Any, key: str) -> Any:
    component = resolve(path, key)
    if not callable(component):
        kind = "a module" if inspect.ismodule(component) else f"a {type(component).__name__}"
        raise UserError(f"{key}: {path} is {kind}, expected a class or a function, such as {path}.<name>")
    return component


def _check_component(
    section: Mapping[str, Any], at: KeyPath, passes: Passes, problems: list[str], makes: Makes | None = None
) -> None:
    """Adds what stands between a section and the call that it describes."""
    key, path, arguments = dotted(at), section["_component_"], arguments_of(section)
    for name, value in arguments.items():
        _check_free(value, (*at, name), problems)
    if isinstance(path, Unknown):
        return
    if isinstance(path, Missing):
        problems.append(f"{key}._component_: required: set it to the dotted path of what to build")
        return
    kind = next((str(part) for part in reversed(at) if not str(part).isdigit()), "")
    written = component_here(kind, path) if isinstance(path, str) else None
    if written is not None:
        problems.append(f"{key}: {path!r} is no component; did you mean {written}?")
        return
    if isinstance(path, str) and kind in USUAL and "." not in path:
        problems.append(f"{key}._component_: expected a full dotted path such as {USUAL[kind]}, got {path!r}")
        return
    try:
        component = _callable(path, f"{key}._component_")
        wrong = makes.problem(component, path) if makes is not None else None
        if wrong is not None:
            problems.append(f"{key}._component_: {wrong}")
            return
        known = {name: value for name, value in arguments.items() if not isinstance(value, (Unknown, Missing))}
        if len(known) < len(arguments) and hasattr(component, "config_signature"):
            return  # what it takes may depend on what is not known yet
        signature = components.signature_of(component, known, asked=arguments)
    except LocalModuleError:
        return
    except UserError as error:
        problems += [_within(key, line, arguments) for line in error.lines]
        return

    parameters = signature.parameters
    consumed, too_many = _consumed(signature, passes.positional)
    if too_many:
        problems.append(
            f"{key}._component_: {path} does not take by position what the recipe passes to it "
            f"({', '.join(passes.positional)}): choose a component that does"
        )
        return
    for name in passes.keywords:
        if parameter_for(signature, name) is None or name in consumed:
            problems.append(
                f"{key}._component_: {path} does not take {name!r}, which the recipe passes to it: "
                "choose a component that does"
            )
    settable = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        and name not in consumed
        and name not in passes.keywords
    }
    for name, value in arguments.items():
        here = (*at, name)
        if name in consumed or name in passes.keywords:
            problems.append(f"{dotted(here)}: the recipe sets this itself: remove it")
            continue
        parameter = parameter_for(signature, name)
        if parameter is None:
            builders = of_builder(name)
            hint = (
                f"it is called {dotted((*at, builders))} here"
                if builders in settable
                else key_here(name, {"dataset", "model", "optimizer", "tokenizer", str(at[0])})
                or _taken_by_the_usual(name, at, kind, path)
                or _rename(name, here, settable)
            )
            problems.append(f"{dotted(here)}: {path} does not take {name!r}; {hint}")
        elif isinstance(value, Missing):
            problems.append(f"{dotted(here)}: required: set {dotted(here)} ({describe(annotation_of(parameter))})")
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD and not fits(annotation_of(parameter), value):
            problems.append(f"{dotted(here)}: {type_problem(annotation_of(parameter), value)}")
    given = {*arguments, *passes.keywords, *passes.optional_keywords}
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        and name not in consumed
        and name not in given
    ]
    if missing:
        names = ", ".join(dotted((*at, name)) for name in missing)
        problems.append(f"{names}: {path} requires {'it' if len(missing) == 1 else 'them'}: set {names}")


def _consumed(signature: inspect.Signature, positional: Sequence[Any]) -> tuple[set[str], bool]:
    """The parameters that positional arguments fill, and whether there are too few of them."""
    names = [
        name
        for name, each in signature.parameters.items()
        if each.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    takes_any = any(e.kind is inspect.Parameter.VAR_POSITIONAL for e in signature.parameters.values())
    return set(names[: len(positional)]), len(positional) > len(names) and not takes_any


def _within(key: str, line: str, arguments: Mapping[str, Any]) -> str:
    """An error line from inside a section, with the section in front of the argument that it names."""
    if line.startswith(f"{key}.") or line.startswith(f"{key}:"):
        return line
    name = line.partition(":")[0]
    # A data set for evaluation, or one of several, knows itself as `dataset`.
    usual = next((part for part in reversed(key.split(".")) if not part.isdigit()), key)
    if name.startswith(f"{usual}.") and usual not in arguments:
        rest = re.sub(rf"(?<![\w./]){re.escape(usual)}\.(?=\w+=)", f"{key}.", line.removeprefix(usual))
        return f"{key}{rest}"
    return f"{key}.{line}" if name.partition(".")[0] in arguments else f"{key}: {line}"


def to_settings(cfg: DictConfig, schema: type[S]) -> S:
    """The schema's dataclass filled from the configuration.

    Interpolations are resolved. Sections become their dataclass, component sections stay (with their
    interpolations, so that nothing is prepared before it is used), an integer becomes a float where a float
    is wanted, lists become lists or tuples.

    Args:
        cfg: a configuration that :func:`check_config` accepts.

    Raises:
        UserError: a value that was not known to the check does not fit, or a resolver failed, or the schema's
            ``__post_init__`` says so.
    """
    return _to_section(cfg, schema, ())


def _to_section(node: DictConfig, schema: type[S], at: KeyPath) -> S:
    values: dict[str, Any] = {}
    present = list(node)  # `name in node` would resolve it
    for name, annotation in hints_of(schema).items():
        if name not in present:
            continue
        try:
            value = node[name]
        except OmegaConfBaseException as error:
            if (raised := user_error_in(error)) is not None:
                raise raised from None
            reason = interpolation_problem(error, node, name, [])
            raise UserError(f"{dotted((*at, name))}: {reason}") from error
        values[name] = _to_value(value, annotation, (*at, name))
    return schema(**values)


def _to_value(value: Any, annotation: Any, at: KeyPath) -> Any:
    members, _ = members_of(annotation)
    if isinstance(value, DictConfig):
        if Component in members and "_component_" in list(value):  # `in value` would resolve it
            return value
        section = section_type(annotation)
        if section is not None:
            return _to_section(value, section, at)
    if isinstance(value, ListConfig) and component_annotation(annotation) is not None:
        return [value[index] for index in range(len(value))]
    if isinstance(value, (DictConfig, ListConfig)):
        value = OmegaConf.to_container(value, resolve=True)
    if not fits(annotation, value):
        raise UserError(f"{dotted(at)}: {type_problem(annotation, value)}")
    return coerced(value, annotation)


def load_and_check(path: Path, overrides: Sequence[str], schema: type[S], notes: list[str]) -> tuple[DictConfig, S]:
    """:func:`load_config`, :func:`check_config` and :func:`to_settings`; raises their UserErrors."""
    cfg = load_config(path, overrides, notes=notes, schema=schema)
    check_config(cfg, schema)
    return cfg, to_settings(cfg, schema)


def check_without_effects(path: Path, overrides: Sequence[str], schema: type[S], notes: list[str]) -> S | None:
    """:func:`load_and_check` for what does not run: None in place of settings that a resolver, which may prepare files,
    would have to give.
    """
    cfg = load_config(path, overrides, notes=notes, schema=schema)
    check_config(cfg, schema)
    return None if _has_unknown(resolved_tree(cfg, []), schema) else to_settings(cfg, schema)


def instantiate(
    node: DictConfig | Mapping[str, Any] | None,
    *args: Any,
    _optional_: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Builds the component that a section describes.

    Sections with ``_component_`` among the arguments are built first, innermost ones before. A list becomes a
    tuple where the parameter's annotation or default is a tuple, an integer a float where a float is wanted.

    Args:
        node: the section; None gives None, as ``section=null`` means.
        args: passed by position, before what the section has.
        _optional_: keyword arguments passed only where the component takes them and the section has them not.
        kwargs: passed always; they win over the section's.

    Raises:
        UserError: names the section. The path does not resolve, the arguments do not fit, an interpolation
            cannot be resolved, or building raised ValueError, TypeError, ImportError or an error about a
            file. The original exception is its ``__cause__``.
    """
    if node is None:
        return None
    if isinstance(node, DictConfig):
        # OmegaConf writes dataset1 for dataset[1] itself, and dataset[1].path for what is in it.
        key = re.sub(r"\[(\d+)\]", r".\1", node._get_full_key("_")).removesuffix("_").rstrip(".") or "config"
        try:
            section = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            if (raised := user_error_in(error)) is not None:
                raise raised from None
            at = getattr(error, "full_key", None) or key
            missing = isinstance(error, (MissingMandatoryValue, InterpolationToMissingValueError))
            reason = "required: set it" if missing else str(error).splitlines()[0]
            raise UserError(f"{at}: {reason}") from error
    else:
        key, section = "config", dict(node)
    return _build(section, key, args, kwargs, _optional_ or {})


def _build(
    section: Any, key: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], optional: Mapping[str, Any]
) -> Any:
    if not isinstance(section, dict) or "_component_" not in section:
        raise UserError(f"{key}: expected _component_, the dotted path of what to build: set {key}._component_")
    path = section["_component_"]
    component = _callable(path, f"{key}._component_")
    given = arguments_of(section)
    arguments = {name: _build_nested(value, f"{key}.{name}") for name, value in given.items()}
    arguments.update(kwargs)
    try:
        signature = components.signature_of(component, arguments)
    except UserError as error:
        raise UserError("\n".join(_within(key, line, arguments) for line in error.lines)) from error
    for name, value in optional.items():
        if name not in arguments and parameter_for(signature, name) is not None:
            arguments[name] = value
    for name in given:
        parameter = signature.parameters.get(name)
        if parameter is not None and name not in kwargs:
            value = coerced(arguments[name], annotation_of(parameter))
            # Many signatures have no annotations, bitsandbytes' among them.
            is_tuple = isinstance(value, list) and isinstance(parameter.default, tuple)
            arguments[name] = tuple(value) if is_tuple else value
    try:
        signature.bind(*args, **arguments)
    except TypeError as error:
        raise UserError(f"{key}: {path}: {error}; it takes {_takes(signature)}") from error
    try:
        return component(*args, **arguments)
    except UserError as error:
        raise UserError("\n".join(_within(key, line, arguments) for line in error.lines)) from error
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        named = f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error)
        raise UserError(f"{key}: {path}: {' '.join(named.split())}") from error
    except (ValueError, TypeError, ImportError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"{key}: {path} refused its arguments: {type(error).__name__}: {text}") from error


def _takes(signature: inspect.Signature) -> str:
    return ", ".join(signature.parameters) or "no arguments"


def _build_nested(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        if "_component_" in value:
            return _build(value, key, (), {}, {})
        return {name: _build_nested(each, f"{key}.{name}") for name, each in value.items()}
    if isinstance(value, list):
        return [_build_nested(each, f"{key}.{index}") for index, each in enumerate(value)]
    # A shell leaves the tilde in key=~/models/x, and in a file nobody else would see to it.
    return with_home(value, key) if isinstance(value, str) and value.startswith("~/") else value

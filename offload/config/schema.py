"""What a recipe reads from its configuration, and which values fit: markers, annotations, signatures."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import os
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NewType, Union

import yaml
from omegaconf import DictConfig

from offload import component as components
from offload.component import nearest
from offload.config.yaml_files import KeyPath, Loader, exists_at, get_at, index_in
from offload.errors import UserError

Component = NewType("Component", DictConfig)
"""The type of a schema field that holds a component; the settings have its section, not the built object."""


class Passes:
    """What the recipe itself hands to a component, so that the configuration need not and must not.

    Args:
        positional: names, for messages, of what is passed by position.
        keywords: passed always. A configuration that sets one is told to remove it.
        optional_keywords: passed only where the component takes them and the configuration does not set them
            (see :func:`instantiate`).
    """

    def __init__(
        self,
        *positional: str,
        keywords: tuple[str, ...] = (),
        optional_keywords: tuple[str, ...] = (),
    ) -> None:
        self.positional = positional
        self.keywords = keywords
        self.optional_keywords = optional_keywords


class Makes:
    """What the component under a key has to be, as far as that can be told without building it.

    Args:
        what: for messages, such as ``an optimizer``.
        base: dotted path of the class that it derives from.
        or_has: a method that does instead.
    """

    def __init__(self, what: str, base: str, or_has: str | None = None) -> None:
        self.what, self.base, self.or_has = what, base, or_has

    def problem(self, component: Any, path: str) -> str | None:
        made = components.returned_type(component)
        if made is None or made is object:
            return None
        base = components.resolve(self.base)
        # Not issubclass, which protocols refuse, nor hasattr: every class has __call__, that of its type.
        if base in made.__mro__ or any(self.or_has in vars(each) for each in made.__mro__):
            return None
        if made is not component and made in base.__mro__:
            return None  # the annotation promises less than the function may return
        kind = "is" if made is component else f"returns {made.__qualname__}, which is"
        return f"{path} {kind} not {self.what}: expected a class that derives from {self.base}, or what makes one"


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """``Annotated[int, AtLeast(1)]``: the smallest value that makes sense."""

    minimum: float

    @property
    def text(self) -> str:
        return f"at least {self.minimum}"

    def problem(self, value: float) -> str | None:
        # Written so that nan is a problem too.
        return None if value >= self.minimum else f"expected {self.text}, got {value}"


@dataclasses.dataclass(frozen=True)
class AtMost:
    """``Annotated[int, AtMost(2**32 - 1)]``: the largest value that is taken."""

    maximum: float

    @property
    def text(self) -> str:
        return f"at most {self.maximum}"

    def problem(self, value: float) -> str | None:
        return None if value <= self.maximum else f"expected {self.text}, got {value}"


@dataclasses.dataclass(frozen=True)
class Above:
    """``Annotated[float, Above(0)]``: the value must be greater."""

    bound: float

    @property
    def text(self) -> str:
        return f"more than {self.bound}"

    def problem(self, value: float) -> str | None:
        return None if value > self.bound else f"expected {self.text}, got {value}"


class DottedPath:
    """``Annotated[str, DottedPath()]``: the text names an object, which must exist and be callable."""


class Unknown:
    """A value that only a run knows, or that another problem already covers."""

    def __repr__(self) -> str:
        return "a value known later"


class Missing:
    """OmegaConf's ``???``: a key that the user has to set."""


_NONE = type(None)


def members_of(annotation: Any) -> tuple[list[Any], list[Any]]:
    """The alternatives of an annotation, unions and ``Annotated`` opened; and the markers found there."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        inner, *markers = typing.get_args(annotation)
        members, more = members_of(inner)
        return members, [*markers, *more]
    if origin is Union or origin is types.UnionType:
        members, markers = [], []
        for each in typing.get_args(annotation):
            some, more = members_of(each)
            members += some
            markers += more
        return members, markers
    return [_NONE if annotation is None else annotation], []


def fits(annotation: Any, value: Any) -> bool:
    """Whether a value as YAML gives it can be meant by the annotation; True where that cannot be told."""
    if isinstance(value, Unknown) or (isinstance(value, dict) and "_component_" in value):
        return True
    members, _ = members_of(annotation)
    # YAML cannot write these: beside other types they neither accept nor excuse a value.
    possible = [each for each in members if not _never_in_yaml(each)]
    return not possible or any(_fits_member(each, value) for each in possible)


def _never_in_yaml(annotation: Any) -> bool:
    if annotation is type or typing.get_origin(annotation) is type:
        return True
    return (getattr(annotation, "__module__", ""), getattr(annotation, "__name__", "")) in {
        ("torch", "Tensor"),
        ("torch", "dtype"),
        ("torch", "device"),
    }


def _fits_member(annotation: Any, value: Any) -> bool:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is _NONE:
        return value is None
    if annotation is bool or annotation is str:
        return isinstance(value, annotation)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in args)
    if annotation is list or origin is list:
        return isinstance(value, list) and all(fits(args[0], each) for each in value if args)
    if annotation is tuple or origin is tuple:
        if not isinstance(value, list):
            return False
        if not args:
            return True
        if len(args) == 2 and args[1] is Ellipsis:
            return all(fits(args[0], each) for each in value)
        return len(value) == len(args) and all(map(fits, args, value))
    if annotation is dict or origin is dict:
        return isinstance(value, dict)
    if annotation is Component or dataclasses.is_dataclass(annotation):
        return isinstance(value, dict)
    return True


def describe(annotation: Any) -> str:
    members = [each for each in members_of(annotation)[0] if not _never_in_yaml(each)]
    texts: list[str] = []
    for each in members:
        origin, args = typing.get_origin(each), typing.get_args(each)
        if each is _NONE:
            text = "null"
        elif each is str:
            text = "text"
        elif each is bool:
            text = "true or false"
        elif origin is Literal:
            text = " or ".join(map(str, args))
        elif each is Component:
            text = "a component"
        elif dataclasses.is_dataclass(each):
            text = "a section"
        elif origin is list:
            text = f"a list of {describe(args[0])}"
        elif origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
            text = f"a list of {len(args)}: {', '.join(map(describe, args))}"
        elif each is list or each is tuple or origin is tuple:
            text = "a list"
        elif each is dict or origin in (dict, collections.abc.Mapping):
            text = "a mapping"
        elif origin is collections.abc.Sequence:
            text = "a list"
        elif inspect.isclass(origin or each) and issubclass(origin or each, os.PathLike):
            text = "a path"
        else:
            text = getattr(each, "__name__", str(each))
        if text not in texts:
            texts.append(text)
    if "null" in texts:  # last, where it reads best
        texts.remove("null")
        texts.append("null")
    return " or ".join(texts)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"a section with {', '.join(map(str, value)) or 'nothing in it'}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def type_problem(annotation: Any, value: Any) -> str:
    """What is wrong with a value that does not fit."""
    message = f"expected {describe(annotation)}, got {_shown(value)}"
    members, _ = members_of(annotation)
    choices = [str(a) for each in members if typing.get_origin(each) is Literal for a in typing.get_args(each)]
    near = nearest(str(value), choices) if choices else None
    if near:
        return f"{message}; did you mean {near}?"
    for each in members:
        if typing.get_origin(each) is list and isinstance(value, list):
            inner = typing.get_args(each)[0]
            wrong = next((entry for entry in value if not fits(inner, entry)), None)
            if wrong is not None and len(value) > 1:
                return f"{message}; {type_problem(inner, wrong)}"
    if isinstance(value, str) and Component in members:
        return f"{message}: write _component_: {value} indented below the key"
    if isinstance(value, str) and value.lower() in ("none", "null", "nil") and _NONE in members:
        return f"{message}: write null, without quotes"
    if isinstance(value, str) and not isinstance(yaml.load(value or "''", Loader=Loader), str):
        return f"{message}, which is quoted text: remove the quotes"
    if str in members and isinstance(value, (int, float)):
        return f"{message}: put it in quotes"
    return message


def coerced(value: Any, annotation: Any) -> Any:
    """int -> float and list -> tuple where only the latter is wanted."""
    members, _ = members_of(annotation)
    if isinstance(value, int) and not isinstance(value, bool) and float in members and int not in members:
        return float(value)
    if isinstance(value, list):
        origins = [(typing.get_origin(each) or each, typing.get_args(each)) for each in members]
        for origin, args in origins:
            if origin is list:
                return [coerced(each, args[0]) for each in value] if args else value
        for origin, args in origins:
            if origin is tuple:
                if not args:
                    return tuple(value)
                inner = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
                return tuple(coerced(each, kind) for each, kind in zip(value, inner, strict=False))
    return value


def hints_of(schema: type) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(schema)]
    hints = typing.get_type_hints(schema, include_extras=True)
    return {name: hints[name] for name in names}


def section_type(annotation: Any) -> type | None:
    for each in members_of(annotation)[0]:
        if inspect.isclass(each) and dataclasses.is_dataclass(each):
            return each
    return None


def _is_component_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) is list and Component in members_of(typing.get_args(annotation)[0])[0]


def component_annotation(annotation: Any) -> Any:
    """The annotation for one entry of a list of components, with the markers around the list."""
    members, markers = members_of(annotation)
    for each in members:
        if _is_component_list(each):
            inner = typing.get_args(each)[0]
            for marker in markers:
                inner = Annotated[inner, marker]
            return inner
    return None


def resolve(path: Any, key: str | None = None) -> Any:
    if isinstance(path, str) and path.startswith("torchtune."):
        from offload import torchao_shim

        torchao_shim.install()
    return components.resolve(path, key=key)


def arguments_of(section: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in section.items() if name != "_component_"}


def parameter_for(signature: inspect.Signature, name: str) -> inspect.Parameter | None:
    """The parameter that a keyword argument goes to; the one that collects the rest where there is one."""
    found = signature.parameters.get(name)
    if found is not None and found.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    ):
        return found
    for each in signature.parameters.values():
        if each.kind is inspect.Parameter.VAR_KEYWORD:
            return each
    return None


def annotation_of(parameter: inspect.Parameter) -> Any:
    if parameter.annotation is inspect.Parameter.empty:
        return Any
    if parameter.default is None:
        try:
            return parameter.annotation | None  # `x: int = None` is common
        except TypeError:
            return Any  # an annotation that is no type
    return parameter.annotation


class _NoSlot:
    """What :func:`slot_of` says where it has no annotation."""


FREE = _NoSlot()  # anything may stand here
UNKNOWN_KEY = _NoSlot()  # nothing reads this


def slot_of(schema: type | None, tree: Any, at: KeyPath) -> Any:
    """The annotation of a key, or ``FREE`` or ``UNKNOWN_KEY``.

    A component that cannot be resolved makes its keys unknown: that problem is told first, by check_config.
    """
    annotation: Any = schema
    node = tree
    for depth, part in enumerate(at):
        if isinstance(node, dict) and "_component_" in node and depth != 0:
            if part == "_component_":
                annotation = str
            else:
                try:
                    component = resolve(node["_component_"])
                    signature = components.signature_of(component, arguments_of(node))
                except UserError:
                    return UNKNOWN_KEY
                parameter = parameter_for(signature, str(part))
                if parameter is None:
                    return UNKNOWN_KEY
                annotation = FREE if parameter.kind is inspect.Parameter.VAR_KEYWORD else annotation_of(parameter)
        elif annotation is None or annotation is FREE:
            # No schema: nothing can be said, and check_config will.
            annotation = FREE if annotation is FREE else None
        elif (section := section_type(annotation)) is not None:
            hints = hints_of(section)
            if str(part) not in hints:
                return UNKNOWN_KEY
            annotation = hints[str(part)]
        elif str(part).isdigit() and component_annotation(annotation) is not None:
            annotation = component_annotation(annotation)
        elif Component in members_of(annotation)[0]:
            annotation = Any  # check_config says that `_component_` is missing
        else:
            annotation = FREE
        index = index_in(node, part)
        node = get_at(node, (index,)) if exists_at(node, (index,)) else None
    return Any if annotation is None else annotation


def holds_component(schema: type | None, tree: Any, at: KeyPath) -> bool:
    slot = slot_of(schema, tree, at)
    if slot is FREE or slot is UNKNOWN_KEY:
        return False
    members = members_of(slot)[0]
    return Component in members and str not in members

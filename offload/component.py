"""Dotted path -> object, and what keyword arguments that object takes; with errors that help.

A *component* is anything callable that a configuration names by its dotted path: a class, a function, a
``functools.partial``. Nothing here imports torch; the packages that a path names are imported when it is
resolved.
"""

from __future__ import annotations

import builtins
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from offload.errors import UserError

# Builders of packaged data set formats whose configuration fields `datasets.load_dataset` takes as keyword
# arguments when the source is that format, or a hub repository that holds files of that format.
_DATASET_FORMATS = ("json", "csv", "text", "parquet")

# Named once, because torchtune's data set builders all call the parameter that they forward so.
_FORWARDED_TO_LOAD_DATASET = "load_dataset_kwargs"

_OPEN_SIGNATURE = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``name`` most likely meant, or None where none is close.

    Case is ignored. For dotted names only whole names are compared.
    """
    by_lower: dict[str, str] = {}
    for candidate in sorted(candidates):
        by_lower.setdefault(candidate.lower(), candidate)
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


class LocalModuleError(UserError):
    """A path leads into the current folder, from which :func:`installed_only` imports nothing."""


_skipped: list[str] | None = None  # within installed_only()


@contextlib.contextmanager
def installed_only() -> Iterator[list[str]]:
    """Within it nothing is imported from the current folder; yields the paths that would have been, as they come."""
    global _skipped
    folder, before, outer = os.getcwd(), list(sys.path), _skipped
    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) != folder]
    _skipped = []
    try:
        yield _skipped
    finally:
        _skipped = outer
        sys.path[:] = before


def _is_of_the_library(name: str | None) -> bool:
    return name is not None and name.partition(".")[0] in sys.stdlib_module_names


def _is_local(name: str) -> bool:
    return any(os.path.exists(name + suffix) for suffix in ("", ".py"))


def resolve(path: str, *, key: str | None = None) -> Any:
    """The object that a dotted path names, importing what it takes.

    Modules in the current folder are found too, after the installed ones. Python's standard library is not: nothing
    in it can be meant, and some of it does harm when it is called, or imported.

    Args:
        path: such as ``torch.optim.AdamW``.
        key: the configuration key that holds the path; it opens the error line.

    Raises:
        UserError: the path is malformed or leads into the standard library, a package is not installed, a name does
            not exist (with the nearest one that does), or importing a module failed (with the error that it raised and
            where).
        LocalModuleError: within :func:`installed_only`, the path leads into the current folder.
    """
    prefix = f"{key}: " if key else ""
    if not isinstance(path, str):
        raise UserError(f"{prefix}expected a dotted path such as torch.optim.AdamW, got {path!r}")
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise UserError(f"{prefix}expected a full dotted path such as torch.optim.AdamW, got {path!r}")

    if _is_of_the_library(parts[0]):
        raise UserError(f"{prefix}{path} is part of Python's standard library, which has nothing for a configuration")
    if _skipped is None:
        folder = os.getcwd()
        if folder not in sys.path:
            sys.path.append(folder)
    elif parts[0] not in sys.modules and importlib.util.find_spec(parts[0]) is None and _is_local(parts[0]):
        _skipped.append(path)
        raise LocalModuleError(f"{prefix}{path} is of the current folder, from which nothing is imported here")

    found: Any = _import(parts[0], path, prefix)
    for depth in range(1, len(parts)):
        parent, name = ".".join(parts[:depth]), parts[depth]
        try:
            found = getattr(found, name)
            # What a package imported for itself: torch.os.system.
            origin = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None)
            is_plain = isinstance(found, ModuleType) or inspect.isclass(found) or inspect.isroutine(found)
            if is_plain and _is_of_the_library(origin):
                there = ".".join(parts[: depth + 1])
                raise UserError(
                    f"{prefix}{there} is part of Python's standard library ({origin}), which has nothing for a "
                    "configuration"
                )
            continue
        except UserError:
            raise
        except AttributeError:
            pass
        except Exception as error:  # a module's lazy attribute that fails to import
            raise UserError(f"{prefix}loading {parent}.{name} failed: {_reason(error)}") from error
        if isinstance(found, ModuleType) and hasattr(found, "__path__"):
            submodule = _import(f"{parent}.{name}", path, prefix, missing_ok=True)
            if submodule is not None:
                found = submodule
                continue
        raise UserError(f"{prefix}{_no_such_name(found, parent, name, parts[depth + 1 :])}")
    return found


def _import(name: str, path: str, prefix: str, *, missing_ok: bool = False) -> Any:
    """The module ``name``; None where it does not exist and ``missing_ok``."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            # The module is there; something that it imports is not.
            raise UserError(
                f"{prefix}importing {name} failed: {_reason(error)}"
                + (f": pip install {error.name.partition('.')[0]}" if error.name else "")
            ) from error
        if missing_ok:
            return None
        rest = path[len(name) :]
        near = nearest(name, _top_level_modules())
        if near is not None and near != name:
            raise UserError(f"{prefix}no package {name!r} is installed; did you mean {near}{rest}?") from error
        raise UserError(
            f"{prefix}{name} is not installed: pip install {name} "
            f"(a module of your own is found from the folder that holds {name}.py)"
        ) from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{prefix}importing {name} failed: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """``TypeName: message (file, line)`` on one line; the last place outside the import machinery."""
    text = " ".join(str(error).split())
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):
        return described  # its message names file and line already
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    frames = [f for f in frames if f.filename != __file__]
    if not frames or isinstance(error, ModuleNotFoundError):
        return described
    return f"{described} ({frames[-1].filename}, line {frames[-1].lineno})"


def _top_level_modules() -> set[str]:
    """Names that ``import`` finds. Only error messages ask: listing the folders takes some milliseconds."""
    names = set(sys.modules) | {module.name for module in pkgutil.iter_modules()}
    names -= sys.stdlib_module_names
    return {name for name in names if "." not in name and not name.startswith("_")}


def _no_such_name(parent: Any, parent_path: str, name: str, rest: list[str]) -> str:
    names = {each for each in dir(parent) if not each.startswith("_")}
    if isinstance(parent, ModuleType):
        names.update(each.name for each in pkgutil.iter_modules(getattr(parent, "__path__", [])))
    if not rest:
        # What is wanted is something callable: a class or function is a better guess than a submodule.
        callables = {each for each in names if callable(inspect.getattr_static(parent, each, None))}
        near = nearest(name, callables) or nearest(name, names)
    else:
        near = nearest(name, names)
    message = f"{parent_path} has no {name!r}"
    if near is not None:
        return f"{message}; did you mean {'.'.join([parent_path, near, *rest])}?"
    if isinstance(parent, ModuleType) and getattr(parent, "__file__", None) is None:
        # A folder without code takes the place of a package that is not installed (a run's ./wandb does).
        where = next(iter(getattr(parent, "__path__", [])), "")
        package = parent_path.partition(".")[0]
        return f"{message}: {parent_path} is only the folder {where}; pip install {package}"
    return f'{message}; python -c "import {parent_path}; help({parent_path})" lists what it has'


def returned_type(component: Any) -> type | None:
    """The class that building ``component`` gives: itself, or what a function's annotation says; None if unknown."""
    if inspect.isclass(component):
        return component
    annotation = getattr(inspect.unwrap(component), "__annotations__", {}).get("return")
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, {"__builtins__": builtins, **_namespace(component)})
        except Exception:
            return None
    return annotation if inspect.isclass(annotation) else None


def signature_of(
    component: Callable[..., Any], kwargs: Mapping[str, Any], *, asked: Collection[str] | None = None
) -> inspect.Signature:
    """The arguments that ``component`` takes when it is given ``kwargs``, without ``self``.

    Three things go beyond :func:`inspect.signature`:

    - A class or function may say itself what it takes: its attribute ``config_signature``, called with
      ``kwargs``, returns the signature. Wrappers whose ``**kwargs`` go to a class that ``kwargs`` names use
      it.
    - ``**load_dataset_kwargs``, as torchtune's data set builders have it, becomes the arguments of
      ``datasets.load_dataset`` and the fields of the json, csv, text and parquet readers.
    - Annotations that are strings are evaluated where that is possible, and dropped where it is not.

    A component without a signature (some are written in C) gives ``(*args, **kwargs)``: everything is
    accepted.

    Args:
        component: a class or a function.
        kwargs: that it is given.
        asked: names that the answer is wanted for; None for all. ``datasets``, which takes half a second to import, is
            asked for those that the component does not name itself.

    Raises:
        UserError: from ``config_signature``.
    """
    custom = getattr(component, "config_signature", None)
    if custom is not None:
        signature = custom(kwargs)
        if not isinstance(signature, inspect.Signature):
            raise TypeError(f"{custom!r} must return an inspect.Signature, not {signature!r}")
        return _without_string_annotations(signature, _namespace(component))
    try:
        signature = inspect.signature(component)
    except (ValueError, TypeError):
        return _OPEN_SIGNATURE
    signature = _without_string_annotations(signature, _namespace(component))
    if asked is not None and signature.parameters.keys() >= set(asked):
        return signature
    return _with_load_dataset(signature, kwargs)


def _namespace(component: Any) -> dict[str, Any]:
    """The globals in which the component's string annotations were written."""
    while hasattr(component, "func"):  # functools.partial
        component = component.func
    function: Any = component
    if inspect.isclass(component):
        function = component.__init__ if inspect.isfunction(component.__init__) else component.__new__
    elif not hasattr(function, "__globals__") and not inspect.ismethod(function):
        function = type(component).__call__
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    return getattr(function, "__globals__", {})


def _without_string_annotations(signature: inspect.Signature, namespace: dict[str, Any]) -> inspect.Signature:
    # One at a time: typing.get_type_hints gives up on all of them for one name imported under TYPE_CHECKING.
    parameters = []
    for parameter in signature.parameters.values():
        annotation = parameter.annotation
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, {"__builtins__": builtins, **namespace})
            except Exception:
                annotation = inspect.Parameter.empty
        parameters.append(parameter.replace(annotation=annotation))
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def _with_load_dataset(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> inspect.Signature:
    parameters = dict(signature.parameters)
    forwarded = parameters.get(_FORWARDED_TO_LOAD_DATASET)
    if forwarded is None or forwarded.kind is not inspect.Parameter.VAR_KEYWORD:
        return signature
    if importlib.util.find_spec("datasets") is None:
        return signature
    del parameters[_FORWARDED_TO_LOAD_DATASET]
    source = kwargs.get("source")
    if source is None and "source" in parameters:
        source = parameters["source"].default
    for name, parameter in _load_dataset_parameters(source).items():
        parameters.setdefault(name, parameter)
    return signature.replace(parameters=list(parameters.values()))


def _load_dataset_parameters(source: Any) -> dict[str, inspect.Parameter]:
    """What ``datasets.load_dataset(source, ...)`` takes, as keyword-only parameters with defaults."""
    import dataclasses

    datasets = importlib.import_module("datasets")
    optional = {}
    signature = inspect.signature(inspect.unwrap(datasets.load_dataset))
    for name, parameter in signature.parameters.items():
        if name == "path" or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue  # the builder passes `path` itself
        optional[name] = parameter
    # A packaged source has its own reader's fields; a hub repository may hold files of any of these formats.
    for format in [source] if source in _DATASET_FORMATS else _DATASET_FORMATS:
        module = importlib.import_module(f"datasets.packaged_modules.{format}.{format}")
        for config in vars(module).values():
            if inspect.isclass(config) and issubclass(config, datasets.BuilderConfig):
                # Each reader's configuration is a dataclass.
                for field in dataclasses.fields(config):  # type: ignore[arg-type]
                    optional.setdefault(field.name, inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY))
    return {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in optional}

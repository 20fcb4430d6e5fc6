"""What the code uses of torch is there in the torch that is installed: names and arguments, also where the code runs
on devices alone."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from offload import torchao_shim

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("offload", "recipes", "scripts") for path in (ROOT / folder).rglob("*.py"))
ROOTS = ("torch", "triton", "torchao")

torchao_shim.install()


def aliases(tree: ast.AST) -> dict[str, str]:
    """The names that a file gives to what it imports of ROOTS."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] in ROOTS:
                    names[each.asname or each.name.split(".")[0]] = (
                        each.name if each.asname else each.name.split(".")[0]
                    )
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in ROOTS:
            names.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(parts)])


def find(name: str) -> Any:
    """The object of a dotted name, or of its beginning up to one that is neither module nor class.

    Raises:
        AttributeError: there is none.
    """
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=1):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[: index + 1]))
            except ImportError:
                raise AttributeError(name) from None
        if not isinstance(found, ModuleType | type):
            return None
        found = getattr(found, part)
    return found


def mistakes(text: str) -> Iterator[str]:
    tree = ast.parse(text)
    names = aliases(tree)
    used = {name for node in ast.walk(tree) if (name := dotted(node, names)) is not None}
    for name in sorted(used | set(names.values())):
        try:
            if not name.startswith("torch.ops."):
                find(name)
        except AttributeError as error:
            yield f"{name}: {error}"
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = dotted(call.func, names)
        words = [word.arg for word in call.keywords]
        if name is None or None in words or any(isinstance(each, ast.Starred) for each in call.args):
            continue
        try:
            function = find(name)
            signature = inspect.signature(function) if inspect.isfunction(function) else None
            if signature is not None:
                signature.bind(*call.args, **dict.fromkeys(map(str, words)))
        except AttributeError:
            continue
        except TypeError as error:
            yield f"line {call.lineno}: {name}: {error}"


def test_names_and_arguments() -> None:
    found = {str(path.relative_to(ROOT)): list(mistakes(path.read_text())) for path in SOURCES}
    assert {path: told for path, told in found.items() if told} == {}


def test_a_name_and_an_argument_that_are_not_there() -> None:
    text = "import torch\nfrom torch import nn as n\ntorch.accelerator.nothing()\nn.Linear\ntorch.cuda.device_count(3)"
    assert [mistake.split(":")[0] for mistake in mistakes(text)] == ["torch.accelerator.nothing", "line 5"]


# What is reached through a variable, or written in C++ and told by a stub.

THROUGH_MODULE = {
    "mem_get_info": ("device",),
    "memory_reserved": ("device",),
    "max_memory_reserved": ("device",),
    "memory_stats": ("device",),
    "reset_peak_memory_stats": ("device",),
    "get_per_process_memory_fraction": ("device",),
    "memory._record_memory_history_impl": ("max_entries",),
    "memory._dump_snapshot": ("filename",),
}
"""Of ``torch.cuda``."""


@pytest.mark.parametrize("name", THROUGH_MODULE)
def test_functions_of_a_device_s_module(name: str) -> None:
    assert set(THROUGH_MODULE[name]) <= set(inspect.signature(find(f"torch.cuda.{name}")).parameters)


STUB = {
    "Stream": {"__new__": {"device", "stream_id", "device_index", "device_type"}, "wait_event": {"event"},
               "record_event": set(), "synchronize": set(), "query": set(), "__enter__": set()},
    "Event": {"__new__": {"device", "enable_timing"}, "record": {"stream"}, "query": set(), "elapsed_time": {"other"},
              "synchronize": set(), "wait": {"stream"}},
}  # fmt: skip


@pytest.mark.parametrize("kind", STUB)
def test_streams_and_events(kind: str) -> None:
    tree = ast.parse((Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text())
    (stub,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    told: dict[str, set[str]] = {}
    for each in stub.body:
        if isinstance(each, ast.FunctionDef):
            arguments = each.args.posonlyargs + each.args.args + each.args.kwonlyargs
            told.setdefault(each.name, set()).update(one.arg for one in arguments)
    for method, wanted in STUB[kind].items():
        assert method in told and wanted <= told[method] and hasattr(getattr(torch, kind), method)


def test_counters_of_page_locked_memory() -> None:
    text = torch.cuda.host_memory_stats.__doc__ or ""
    assert '"allocated_bytes.{current,peak' in text and '"host_alloc_time.{total' in text

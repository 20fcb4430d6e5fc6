"""The import graph keeps DESIGN.md's one-way rule, and what must stay light stays light.

``LEVELS`` has the rooms. A module imports from its own room, from any room below, and from the leaves (errors,
component, streams), which everything may use. The two libraries that models come from are each known to one room alone;
the others, and the recipes, see a model through ``offload.models.protocol`` and get it from ``offload.models.source``.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

LEVELS = {
    "cli": 9,
    "comparison": 8,
    "training": 8,
    "checkpoints": 7,
    "metrics": 7,
    "data": 6,
    "models": 5,
    "config": 4,
    "plan": 3,
    "optimizer": 2,
    "simulation": 2,
    "distributed": 1,
    "engine": 1,
    "optim": 1,
    "leaf": 0,
}
LEAVES = {
    f"offload.{name}"
    for name in ("errors", "component", "streams", "durable", "device", "host_memory", "paths", "tiny", "torchao_shim")
}
# These load the rest when it is asked for, never when they are imported themselves.
DOORS = {"offload", "offload.__main__", "offload._startup"}
# What every start of Python or every answer of the command imports.
LIGHT = (
    "offload.__init__",
    "offload.__main__",
    "offload._startup",
    "offload.cli",
    "offload.errors",
    "offload.component",
    "offload.streams",
)


class Import(NamedTuple):
    module: str  # dotted name of what is imported
    late: bool  # inside a function, so only when that runs
    line: int


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package: dotted name to file."""
    found = {}
    for path in sorted((ROOT / "offload").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def recipes() -> dict[str, Path]:
    return {f"recipes.{path.stem}": path for path in sorted((ROOT / "recipes").glob("*.py"))}


def imports(path: Path, package: str = "") -> Iterator[Import]:
    """Every import in a file but those for type checkers; relative ones are resolved against ``package``."""

    def visit(node: ast.AST, late: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children: list[ast.AST] = list(node.orelse)
        else:
            children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, late, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], base]).rstrip(".")
            for name in node.names:
                whole = f"{base}.{name.name}"
                # `from offload import optimizer` imports a module, `from x import Name` a name.
                yield Import(whole if whole in modules() else base, late, node.lineno)
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in children:
            yield from visit(child, late)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False)


def room(module: str) -> str:
    if module in LEAVES:
        return "leaf"
    parts = module.split(".")
    # Modules directly in the package are the optimizer's: its front door and its peers.
    return parts[1] if len(parts) > 1 and (ROOT / "offload" / parts[1]).is_dir() else "optimizer"


def library_room(module: str) -> str | None:
    """``torchtune`` or ``huggingface`` for what is behind the door of models."""
    parts = [*module.split("."), ""]
    return parts[2] if parts[:2] == ["offload", "models"] and parts[2] in ("torchtune", "huggingface") else None


def may_look_behind(module: str, imported: str) -> bool:
    # Data sets of torchtune's are packed and masked by torchtune.
    return module == "offload.models.source" or (
        imported == "offload.models.torchtune.datasets" and module.startswith("offload.data.")
    )


def violations(module: str, path: Path) -> list[str]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for imported in imports(path, package):
        where = f"{path.relative_to(ROOT)}:{imported.line} imports {imported.module}"
        top = imported.module.split(".")[0]
        if module in DOORS:
            if top == "offload" and imported.module not in DOORS and not imported.late and module != "offload.__main__":
                found.append(f"{where}: not before it is needed")
            continue
        mine = room(module)
        if top == "offload":
            if imported.module in DOORS:
                if mine != "cli":
                    found.append(f"{where}: name the module that has it")
                continue
            behind = library_room(imported.module)
            if behind not in (None, library_room(module)) and not may_look_behind(module, imported.module):
                found.append(f"{where}: a model comes from offload.models.source, whichever library it is of")
            theirs = room(imported.module)
            if theirs != mine and LEVELS[theirs] >= LEVELS[mine]:
                found.append(f"{where}: {mine} does not import {theirs}")
        elif top == "torchtune" and not (
            imported.late and (module.startswith("offload.models.torchtune") or mine == "cli")
        ):
            found.append(f"{where}: torchtune belongs to models.torchtune, where it is asked for")
        elif top in ("transformers", "peft") and not (
            imported.late
            and (module.startswith("offload.models.huggingface") or (top == "transformers" and mine == "data"))
        ):
            found.append(
                f"{where}: {top} belongs to models.huggingface (its tokenizers to data), where it is asked for"
            )
        elif top in ("recipes", "configs", "tests", "scripts"):
            found.append(f"{where}: not part of the package")
    return found


def test_no_two_files_import_each_other():
    """But for the start-up hook, which loads the command when Python has already started."""
    graph = {
        module: {
            found.module for found in imports(path, module if path.name == "__init__.py" else module.rpartition(".")[0])
        }
        for module, path in modules().items()
    }
    both = {tuple(sorted((a, b))) for a in graph for b in graph[a] & set(graph) if a in graph[b] and a != b}
    assert both == {("offload._startup", "offload.cli.main")}


def test_every_module_is_in_a_known_room():
    rooms = {room(module) for module in modules() if module not in DOORS}
    assert rooms <= set(LEVELS)
    assert {"cli", "training", "optimizer", "engine", "leaf"} <= rooms


@pytest.mark.parametrize("module", modules())
def test_imports_run_one_way(module):
    assert violations(module, modules()[module]) == []


@pytest.mark.parametrize(
    ("module", "line", "refused"),
    [
        ("offload.engine.x", "from offload.optimizer import OffloadOptimizer", True),
        ("offload.engine.x", "from offload.training import metrics", True),
        ("offload.engine.x", "from ..training.metrics import MetricLog", True),
        ("offload.engine.x", "def f():\n    import torchtune", True),
        ("offload.engine.x", "import offload", True),
        ("offload.data.x", "from offload.training.step import evaluate", True),
        ("offload.data.x", "import torchtune", True),
        ("offload.data.x", "from transformers import AutoTokenizer", True),
        ("offload.data.x", "def f():\n    from transformers import AutoTokenizer", False),
        ("offload.data.x", "def f():\n    import peft", True),
        ("offload.data.x", "from offload.component import nearest", False),
        (
            "offload.engine.x",
            "import torch\nfrom offload.errors import UserError\nfrom . import runtime",
            False,
        ),
        ("offload.optimizer", "from offload.engine.runtime import Runtime", False),
        ("offload.optimizer", "from torchtune import training", True),
        ("offload.training.x", "from offload.optimizer import OffloadOptimizer", False),
        ("offload.training.x", "def f():\n    import torchtune", True),
        ("offload.training.x", "from offload.models.source import find_source", False),
        ("offload.training.x", "def f():\n    from offload.models.torchtune import TorchtuneModel", True),
        ("offload.training.x", "from offload.models.huggingface.loading import from_pretrained", True),
        ("offload.data.x", "from offload.models.torchtune.datasets import is_packed", False),
        ("offload.data.x", "from offload.models.torchtune.lora import prepare_adapter", True),
        ("offload.models.source", "from offload.models.huggingface import from_pretrained", False),
        ("offload.models.torchtune.x", "from offload.models.huggingface.head import Head", True),
        ("offload.models.torchtune.x", "from offload.models.torchtune.lora import merge", False),
        ("offload.models.protocol", "from offload.models.torchtune.lora import merge", True),
        ("offload.models.torchtune.x", "def f():\n    from torchtune import modules", False),
        ("offload.models.torchtune.x", "from torchtune import modules", True),
        ("offload.training.x", "from offload.cli import registry", True),
        ("offload.models.huggingface.x", "def f():\n    import transformers", False),
        ("offload.models.huggingface.x", "import transformers", True),
        ("offload.training.x", "def f():\n    import peft", True),
        ("offload.errors", "from offload.engine import runtime", True),
        ("offload.cli.x", "def f():\n    import torchtune", False),
        ("offload.cli.x", "import torchtune", True),
        ("offload._startup", "import offload.cli.main", True),
        ("offload._startup", "def f():\n    import offload.cli.main", False),
        ("offload.engine.x", "if TYPE_CHECKING:\n    from offload.cli import registry", False),
    ],
)
def test_the_rule_itself(tmp_path, monkeypatch, module, line, refused):
    path = ROOT / "offload" / "engine" / "x.py"  # named in messages only
    monkeypatch.setattr(Path, "read_text", _only(path, line, Path.read_text))
    assert bool(violations(module, path)) == refused


def _only(path: Path, text: str, read_text):
    return lambda self, *args, **kwargs: text if self == path else read_text(self, *args, **kwargs)


@pytest.mark.parametrize("recipe", recipes())
def test_recipes_import_neither_each_other_nor_the_command_nor_a_library_of_models(recipe):
    names = {path.stem for path in recipes().values()}
    found = [
        f"line {imported.line}: {imported.module}"
        for imported in imports(recipes()[recipe])
        if imported.module.split(".")[0] in {"recipes", "torchtune", "transformers", "peft", *names}
        or imported.module.startswith("offload.cli")
        or library_room(imported.module) is not None
    ]
    assert found == []


@pytest.mark.parametrize(
    "module",
    [module for module in modules() if f"{module}.".startswith(tuple(f"{m}." for m in LIGHT)) or module == "offload"],
)
def test_what_every_start_imports_is_light(module):
    """Only the standard library and this package, outside of functions."""
    path = modules()[module]
    heavy = [
        f"line {imported.line}: {imported.module}"
        for imported in imports(path, module)
        if not imported.late and imported.module.split(".")[0] not in {*sys.stdlib_module_names, "offload"}
    ]
    assert heavy == []


def test_the_optimizer_needs_no_torchtune():
    """``import offload`` loads nothing, and its optimizer trains where torchtune cannot be imported."""
    program = """
import sys
import offload
assert "torch" not in sys.modules, "import offload must not load torch"
for name in ("torchtune", "torchao", "omegaconf", "wandb", "datasets", "transformers"):
    sys.modules[name] = None  # importing it raises ImportError
import torch
p = torch.nn.Parameter(torch.ones(4))
opt = offload.OffloadOptimizer([p], "torch.optim.SGD", lr=0.5)
p.sum().backward()
opt.step()
opt.synchronize()
print(p.tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[0.5, 0.5, 0.5, 0.5]\n"), done.stderr


def test_a_name_that_the_package_lacks():
    import offload

    with pytest.raises(AttributeError, match="OffloadOptimiser"):
        offload.OffloadOptimiser  # noqa: B018
    assert set(offload.__all__) <= set(dir(offload))

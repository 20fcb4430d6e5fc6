"""Which recipes and configs there are, and what a name or path on the command line means.

Ours are files: every ``*.py`` in the recipes folder is a recipe, every ``*.yaml`` under the configs folder a
config. A checkout uses its own ``recipes/`` and ``configs/``; in a wheel they lie inside the package.
torchtune's are read from the table in its ``_recipe_registry.py``, whose text is parsed rather than imported,
because importing any of torchtune takes seconds.

A recipe that both have (``full_finetune_single_device``) is ours under its plain name, and torchtune's as
``torchtune/full_finetune_single_device``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from offload.errors import UserError

THEIRS = "torchtune/"

SINGLE_DEVICE, DISTRIBUTED = "_single_device", "_distributed"
"""How the names of recipes end, and of configs for the latter."""

_PACKAGE = Path(__file__).resolve().parent.parent


class RecipeRef(NamedTuple):
    """A recipe: ours, torchtune's, or a file of the user's (``ours`` too: it is run the way ours are)."""

    path: Path
    ours: bool
    name: str  # without the prefix "torchtune/"; for a file, its path as given
    distributed: bool = False  # takes torchrun's options


class ConfigRef(NamedTuple):
    """A config: ours, torchtune's, or a file of the user's (``shipped`` is False)."""

    path: Path
    ours: bool
    name: str
    shipped: bool = True


class TorchtuneRecipe(NamedTuple):
    path: Path
    distributed: bool
    configs: dict[str, Path]


def _folder(name: str) -> Path:
    inside = _PACKAGE / name  # a wheel
    return inside if inside.is_dir() else _PACKAGE.parent / name  # a checkout


def recipes_dir() -> Path:
    """The folder of our recipes."""
    return _folder("recipes")


def configs_dir() -> Path:
    """The folder of our configs."""
    return _folder("configs")


def our_recipes() -> dict[str, Path]:
    """Our recipes: name to file; those for one device first, which a config that both take is for."""
    paths = sorted(recipes_dir().glob("*.py"), key=lambda path: (path.stem.endswith(DISTRIBUTED), path.stem))
    return {path.stem: path for path in paths if not path.name.startswith("_")}


def our_configs() -> dict[str, Path]:
    """Our configs: name (path below the configs folder without suffix) to file."""
    root = configs_dir()
    found = {path.relative_to(root).with_suffix("").as_posix(): path for path in root.rglob("*.yaml")}
    return {name: found[name] for name in sorted(found, key=_by_size)}


def _by_size(name: str) -> list[tuple[int, str]]:
    """Sorts names with numbers in them as people do: 0_6b, 1_7b, 4b, 14b."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def recipe_of_config(name: str) -> str:
    """The recipe that one of our configs is for, from its name's ending: ``<model>_<method>[_distributed]``."""
    name, kind = (name.removesuffix(DISTRIBUTED), DISTRIBUTED) if name.endswith(DISTRIBUTED) else (name, SINGLE_DEVICE)
    method = name.rpartition("_")[2]
    if method == "generate":
        return "generate"
    return f"lora_finetune{kind}" if method.endswith("lora") else f"full_finetune{kind}"


@cache
def torchtune_recipes() -> dict[str, TorchtuneRecipe]:
    """torchtune's recipes by name, in its own order; none where torchtune is not installed.

    Nothing of torchtune is imported: its registry is a table of literals.
    """
    import ast

    for entry in sys.path:
        registry = Path(entry or ".", "torchtune", "_recipe_registry.py")
        if registry.is_file():
            break
    else:
        return {}
    recipes = registry.parent.parent / "recipes"
    configs = recipes / "configs"
    found = {}
    for call in ast.walk(ast.parse(registry.read_text(encoding="utf-8"))):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Recipe"):
            continue
        fields = {keyword.arg: keyword.value for keyword in call.keywords}
        listed = fields["configs"]
        assert isinstance(listed, ast.List)
        names = {}
        for config in listed.elts:
            assert isinstance(config, ast.Call)
            values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in config.keywords}
            path = configs / values["file_path"]
            if path.is_file():  # the table names one that torchtune's wheel does not have
                names[values["name"]] = path
        found[ast.literal_eval(fields["name"])] = TorchtuneRecipe(
            path=recipes / ast.literal_eval(fields["file_path"]),
            distributed=ast.literal_eval(fields["supports_distributed"]),
            configs=names,
        )
    return found


def torchtune_configs() -> dict[str, Path]:
    """torchtune's configs: name to file."""
    return {name: path for recipe in torchtune_recipes().values() for name, path in recipe.configs.items()}


def find_recipe(name: str, *, config: ConfigRef | None = None) -> RecipeRef:
    """The recipe that ``name`` means: a recipe's name, or the path of a Python file with or without ``.py``.

    A name that both packages have means torchtune's recipe when ``config`` is one that torchtune ships.

    Raises:
        UserError: no such recipe; names the nearest one.
    """
    ours, theirs = our_recipes(), torchtune_recipes()
    file = _file(name, ".py")
    if file is not None and _is_path(name, ".py"):
        return RecipeRef(file, ours=True, name=name)
    plain = name.removesuffix(".py")
    theirs_name = plain.removeprefix(THEIRS)
    wanted_theirs = plain.startswith(THEIRS) or plain not in ours
    if config is not None and config.shipped and not config.ours:
        wanted_theirs = True
    if wanted_theirs and theirs_name in theirs:
        return RecipeRef(theirs[theirs_name].path, False, theirs_name, theirs[theirs_name].distributed)
    if plain in ours:
        return RecipeRef(ours[plain], ours=True, name=plain, distributed=plain.endswith(DISTRIBUTED))
    if file is not None:
        return RecipeRef(file, ours=True, name=name)
    raise _not_found("recipe", name, ".py", [*ours, *(_listed_name(n) for n in theirs), *theirs])


def find_config(name: str) -> ConfigRef:
    """The config that ``name`` means: a config's name, or the path of a YAML file with or without ``.yaml``.

    Raises:
        UserError: no such config; names the nearest one.
    """
    file = _file(name, ".yaml")
    if file is not None and _is_path(name, ".yaml"):
        return ConfigRef(file, ours=True, name=name, shipped=False)
    ours, theirs = our_configs(), torchtune_configs()
    plain = name.removesuffix(".yaml").removesuffix(".yml")
    if plain in ours:
        return ConfigRef(ours[plain], ours=True, name=plain)
    theirs_name = plain.removeprefix(THEIRS)
    if theirs_name in theirs:
        return ConfigRef(theirs[theirs_name], ours=False, name=theirs_name)
    if file is not None:
        return ConfigRef(file, ours=True, name=name, shipped=False)
    raise _not_found("config", name, ".yaml", [*ours, *theirs])


def find_any(name: str) -> tuple[Path, bool]:
    """The file of the recipe or config that ``name`` means, and whether it is a config.

    A name of both kinds means the recipe.

    Raises:
        UserError: neither; names the nearest of all.
    """
    if not name.endswith((".yaml", ".yml")):
        try:
            recipe = find_recipe(name)
        except UserError:
            pass
        else:
            if recipe.path.suffix == ".py":
                return recipe.path, False
    try:
        return find_config(name).path, True
    except UserError:
        names = [known for recipe_name, configs in listing() for known in (recipe_name, *configs)]
        raise _not_found("recipe or config", name, ".yaml", names) from None


def _listed_name(name: str) -> str:
    return THEIRS + name if name in our_recipes() else name


def listing() -> list[tuple[str, list[str]]]:
    """Every recipe with its configs, ours first, named as a command line takes them."""
    ours: dict[str, list[str]] = {name: [] for name in our_recipes()}
    for config in our_configs():
        ours.setdefault(recipe_of_config(config), []).append(config)
    theirs = [(_listed_name(name), list(recipe.configs)) for name, recipe in torchtune_recipes().items()]
    return [*ours.items(), *theirs]


def _is_path(name: str, suffix: str) -> bool:
    """Whether ``name`` is written as a path, which then goes before a recipe or config of the same name."""
    return name.endswith((suffix, ".yml")) or name.startswith((".", "~", os.sep)) or os.path.isabs(name)


def _file(name: str, suffix: str) -> Path | None:
    path = Path(os.path.expanduser(name))
    for candidate in (path, Path(f"{path}{suffix}")):
        if candidate.is_file():
            return candidate.absolute()
    return None


def _not_found(kind: str, name: str, suffix: str, candidates: Iterable[str]) -> UserError:
    from offload.component import nearest

    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return UserError(f"{name} is a folder; a {kind} is a name from `tune ls` or the path of a {suffix} file")
    candidates = list(candidates)
    # A path that leads nowhere may have been meant as a name, and its last part is what was misspelt.
    near = nearest(name.removesuffix(suffix), candidates) or nearest(path.stem, candidates)
    hint = f"did you mean {near}?" if near else f"see `tune ls`, or give the path of a {suffix} file"
    what = "file" if _is_path(name, suffix) else kind
    return UserError(f"no {what} {name!r}: {hint}")


def single_device(recipe: str, options: Sequence[str]) -> str:
    """That a recipe does not run in several processes, and which one does."""
    from offload.component import nearest

    known = {*our_recipes(), *torchtune_recipes()}
    sister = recipe.replace(SINGLE_DEVICE, DISTRIBUTED)
    near = sister if sister in known else nearest(sister, [name for name in known if name.endswith("_distributed")])
    other = f"use {near}" if near and sister != recipe else "choose a *_distributed recipe"
    return f"{recipe} runs on one device: leave out {' '.join(options)}, or {other}"

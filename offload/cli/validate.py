"""``tune validate``: is this config well-formed for its recipe?"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from offload.cli import registry
from offload.errors import UserError


def validate(name: str, overrides: Sequence[str], *, recipe: str | None = None) -> int:
    """Checks the config ``name`` with ``overrides`` and prints the outcome; returns 0.

    Nothing is imported from the current folder but a recipe that is named by its path.

    Args:
        name: a config's name or path.
        overrides: as on a ``tune run`` line.
        recipe: the recipe to check against. By default the one that a config of ours is for; for a file, that
            of our recipes in whose eyes it has the fewest problems.

    Raises:
        UserError: the problems, one per line.
    """
    from offload.component import installed_only

    with installed_only() as local:
        status = _validate(name, overrides, recipe, local)
    return status


def _validate(name: str, overrides: Sequence[str], recipe: str | None, local: list[str]) -> int:
    config = registry.find_config(name)
    chosen = registry.find_recipe(recipe, config=config) if recipe is not None else None
    if (config.shipped and not config.ours) or (chosen is not None and not chosen.ours):
        return _validate_by_torchtune(config.path, overrides)

    if chosen is not None:
        candidates = [chosen]
    elif config.shipped:
        candidates = [registry.find_recipe(registry.recipe_of_config(config.name))]
    else:
        candidates = [registry.find_recipe(recipe_name) for recipe_name in registry.our_recipes()]

    failures: list[tuple[registry.RecipeRef, UserError]] = []
    for candidate in candidates:
        notes: list[str] = []
        try:
            check(candidate, config.path, overrides, notes)
        except UserError as error:
            failures.append((candidate, error))
            continue
        for note in notes:
            print(note)
        for path in dict.fromkeys(local):
            print(f"{path} is of the current folder, from which `tune validate` imports nothing: it was not checked")
        print(f"OK: {name} is well-formed for {candidate.name}")
        return 0

    best, problems = min(failures, key=lambda failure: len(failure[1].lines))
    if len(candidates) > 1:
        raise UserError(f"{problems}\nchecked as a config of {best.name}: --recipe NAME chooses another recipe")
    raise problems


def check(recipe: registry.RecipeRef, config: Path, overrides: Sequence[str], notes: list[str]) -> None:
    """Checks one config against the ``Settings`` that a recipe file declares, and by its class's own ``check``.

    Raises:
        UserError: the problems, one per line.
    """
    from offload.config.loading import check_without_effects
    from offload.tiny import register_resolvers
    from offload.training.launch import quieten_libraries

    quieten_libraries()
    schema, classes = _schema_of(recipe)
    if schema is None:
        raise UserError(f"{recipe.name} declares no class Settings, so it has nothing to check against")
    register_resolvers()
    settings = check_without_effects(config, overrides, schema, notes)
    if settings is None:
        return
    for each in classes:
        each.check(settings, notes=notes)


def check_here(recipe: registry.RecipeRef, config: Path, overrides: Sequence[str]) -> None:
    """Checks what every process of a run on this machine will check again, before there are several.

    Raises:
        UserError: the problems, one per line.
    """
    from offload.config.loading import load_and_check
    from offload.training.launch import as_override, quieten_libraries

    quieten_libraries()
    if "Settings" not in recipe.path.read_text(encoding="utf-8"):  # a script that only its own run may execute
        return
    schema, classes = _schema_of(recipe)
    if schema is None:
        return
    settings: Any
    _, settings = load_and_check(config, [as_override(word) for word in overrides], schema, [])
    for each in classes:
        each.check(settings)


def _schema_of(recipe: registry.RecipeRef) -> tuple[type | None, list[Any]]:
    """A recipe file's ``Settings``, None where it has none; and its classes that read them and check more."""
    module = load_recipe(recipe.path)
    schema = getattr(module, "Settings", None)
    members = [each for each in vars(module).values() if isinstance(each, type)]
    return schema, [each for each in members if getattr(each, "Settings", None) is schema and hasattr(each, "check")]


def recipe_class(recipe: registry.RecipeRef) -> Any:
    """The class of a recipe that trains, which reads its settings and checks them.

    Raises:
        UserError: its file has none.
    """
    schema, classes = _schema_of(recipe)
    if schema is None or not classes:
        raise UserError(f"{recipe.name} declares no class Settings, so its configs cannot be read")
    return classes[0]


def load_recipe(path: Path) -> ModuleType:
    """Loads a recipe's file as a module, without running it."""
    import sys

    from offload import torchao_shim

    torchao_shim.install()

    if path.parent != registry.recipes_dir() and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what a recipe of the user's, named on the command line, imports
    spec = importlib.util.spec_from_file_location(f"offload_recipe_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up to evaluate annotations.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _validate_by_torchtune(config: Path, overrides: Sequence[str]) -> int:
    if overrides:
        raise UserError(
            f"overrides cannot be checked for torchtune's recipes (torchtune's check takes a file alone): "
            f"leave out {' '.join(overrides)}"
        )
    from offload.cli.handover import torchtune

    return torchtune(["validate", str(config)])

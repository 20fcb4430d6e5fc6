"""``tune run RECIPE --help``: what a recipe does, and every key that it reads."""

from __future__ import annotations

import inspect

from offload.cli import registry
from offload.cli.validate import load_recipe
from offload.errors import UserError

_TEXT = """\
usage: tune run {name} --config CONFIG [key=value ...]

{summary}

keys, of the config or as key=value (optimizer.lr=1e-5 reaches into sections):
{keys}

A component is a section with _component_, the dotted path of a class or function; the section's other keys are its
arguments, and a wrong one is told with those that it takes. `tune run --help` tells how to override,
`tune cat CONFIG` shows a config, `tune ls {name}` lists them.
"""


def text(recipe: registry.RecipeRef) -> str:
    """The help of one of our recipes, or of a file of the user's that is one.

    Raises:
        UserError: it declares no ``Settings``.
    """
    module = load_recipe(recipe.path)
    schema = getattr(module, "Settings", None)
    if schema is None:
        raise UserError(f"{recipe.name} declares no class Settings, so there are no keys to list")
    from offload.config.help import describe_keys

    summary = next(iter(inspect.cleandoc(module.__doc__ or "").splitlines()), f"Runs {recipe.path}.")
    return _TEXT.format(name=recipe.name, summary=summary, keys=describe_keys(schema)).rstrip()

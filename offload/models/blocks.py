"""Which parts of a model can be apart from the rest."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def untied(modules: Iterable[nn.Module], params: Iterable[nn.Parameter]) -> list[nn.Module]:
    """Those of ``modules`` that have parameters, and none of ``params``, such as an embedding that is the head too."""
    elsewhere = set(params)
    owned = [(module, set(module.parameters())) for module in modules]
    return [module for module, mine in owned if mine and not mine & elsewhere]

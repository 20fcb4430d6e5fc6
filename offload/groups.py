"""Parameter groups as callers give them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameter groups with ``params`` as a list; entries may be ``(name, parameter)``."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of parameters or of groups, got a single Tensor")
    entries = list(params)
    if not entries:
        raise ValueError("optimizer got an empty parameter list")
    if not isinstance(entries[0], dict):
        entries = [{"params": entries}]
    groups = []
    for group in entries:
        members = group["params"]
        groups.append(dict(group, params=[members] if isinstance(members, Tensor) else list(members)))
    return groups


def tensors_of(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    entries = [entry for group in groups for entry in group["params"]]
    return [entry[1] if isinstance(entry, tuple) else entry for entry in entries]

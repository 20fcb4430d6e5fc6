"""One label per run that tells the optimizer, so that runs can be grouped by what was compared.

offload.optim.AdamW int8 split, stream in backward
torch.optim.AdamW bf16, plain
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from offload.device import DTYPES


def optimizer_facts(optimizer: torch.optim.Optimizer, section: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What tells one optimizer from another in a comparison.

    Args:
        optimizer: as it trains.
        section: its section of the configuration, if there is one.

    Returns:
        ``class``: of the base optimizer, by its shortest dotted path; ``strategy``: of
        :class:`offload.OffloadOptimizer`, ``plain`` for an optimizer that works by itself, or the name of another
        project's offloader; ``in_backward`` and ``offload_gradients``; ``state_dtype`` and ``master``, None where they
        are not known.
    """
    base = getattr(optimizer, "base_optimizer", optimizer)
    # With optimizer.param_groups, several classes may be one base optimizer.
    name, strategy = (
        "+".join(getattr(base, "kinds", [_shortest_path(type(base))])),
        getattr(optimizer, "strategy", None),
    )
    if strategy is None:
        strategy = "plain"
        if section is not None and "optimizer_class" in section:  # a door to another project's offloader
            name, strategy = str(section["optimizer_class"]), str(section["_component_"]).rpartition(".")[2]
    groups = optimizer.param_groups
    state_dtype = _in_all(groups, "state_dtype")
    if state_dtype is None and name.startswith("torch.optim."):  # they keep states in the dtype of their parameters
        dtypes = {param.dtype for group in groups for param in group["params"]}
        state_dtype = "+".join(short for short, dtype in DTYPES.items() if dtype in dtypes) or None
    return {
        "class": name,
        "strategy": strategy,
        "in_backward": bool(getattr(optimizer, "update_in_backward", False)),
        "offload_gradients": bool(section is not None and section.get("offload_gradients")),
        "state_dtype": state_dtype,
        "master": _in_all(groups, "master"),
    }


def label_of(facts: Mapping[str, Any]) -> str:
    """:func:`optimizer_facts` in one line."""
    what = [facts["class"], facts["state_dtype"], facts["master"]]
    how = facts["strategy"] + (" in backward" if facts["in_backward"] else "")
    parts = [" ".join(part for part in what if part), how]
    if facts["offload_gradients"]:
        parts.append("gradients offloaded")
    return ", ".join(parts)


def _in_all(groups: list[dict[str, Any]], option: str) -> str | None:
    values = {str(group[option]) for group in groups if group.get(option) is not None}
    return "+".join(sorted(values)) or None


def _shortest_path(cls: type) -> str:
    """``torch.optim.AdamW``, not ``torch.optim.adamw.AdamW``."""
    parts = cls.__module__.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        if getattr(sys.modules.get(module), cls.__name__, None) is cls:
            return f"{module}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"

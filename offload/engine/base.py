"""Running a base optimizer on part of its parameters, with states that lie wherever the caller put them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Hyperparameters = Sequence[Mapping[str, Any]]
"""One mapping per parameter group: what the group holds beside its parameters."""


@dataclass
class Entry:
    """One tensor to update in place.

    Attributes:
        group: index of its parameter group.
        tensor: the values, of any shape; a range of a parameter is a parameter to the base optimizer.
        gradient: same shape, dtype and device.
        state: what the base optimizer keeps for it; changed in place, filled on the first step.
    """

    group: int
    tensor: Tensor
    gradient: Tensor
    state: dict[str, Any]


def snapshot(groups: Sequence[Mapping[str, Any]]) -> Hyperparameters:
    """The groups' hyperparameters as they are now; tensors (a tensor ``lr``) are copied."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k not in ("params", "param_names")}
        for group in groups
    ]


def step_alone(base: torch.optim.Optimizer, *closure: Callable[[], Any]) -> Any:
    """``base.step(*closure)`` without the hooks that are registered for all optimizers: the caller's optimizer is the
    one that steps, and runs them itself."""
    step = type(base).step
    if getattr(step, "hooked", False):  # by torch.optim.Optimizer._patch_step_function
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step(base, *closure)


class PartialStep:
    """Steps a base optimizer over a few tensors, leaving its own groups and state alone.

    It works on a second instance that shares everything else with the first, so that one thread can step
    while another reads the optimizer.
    """

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._base = object.__new__(type(base))
        self._base.__dict__.update(base.__dict__)

    def __call__(self, entries: Sequence[Entry], groups: Hyperparameters) -> None:
        """Update every entry with its gradient; states change in place.

        Args:
            entries: what to update.
            groups: hyperparameters to update with.
        """
        members: dict[int, list[nn.Parameter]] = defaultdict(list)
        states: defaultdict[Tensor, Any] = defaultdict(dict)
        for entry in entries:
            param = nn.Parameter(entry.tensor)
            param.grad = entry.gradient
            members[entry.group].append(param)
            states[param] = entry.state
        self._base.param_groups = [dict(groups[index], params=params) for index, params in members.items()]
        self._base.state = states
        try:
            step_alone(self._base)
        finally:
            self._base.param_groups, self._base.state = [], defaultdict(dict)

"""Running a base optimizer on part of its parameters, with states that lie wherever the caller put them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.units import in_layout_of

Hyperparameters = Sequence[Mapping[str, Any]]
"""One mapping per parameter group: what the group holds beside its parameters."""


@dataclass
class Entry:
    """One tensor to update in place.

    Attributes:
        group: index of its parameter group.
        position: index of its parameter over all groups.
        start: first element, where it is a range of its parameter.
        has_blocks: states with one element for each block of the parameter's may be kept; not where ranks share the
            parameter and are cut within blocks.
        tensor: the values, of any shape; a range of a parameter is a parameter to the base optimizer.
        gradient: same shape and device, of any floating-point dtype.
        state: what the base optimizer keeps for it; changed in place, filled on the first step.
    """

    group: int
    position: int
    start: int
    tensor: Tensor
    gradient: Tensor
    state: dict[str, Any]
    has_blocks: bool = True


def state_blocks(base_class: type[torch.optim.Optimizer]) -> Mapping[str, int]:
    """Elements of a parameter for one element of a state, by the state's key; for states that have fewer."""
    blocks: Mapping[str, int] = getattr(base_class, "state_block", {})
    return blocks


class Snapshots:
    """The groups' hyperparameters as they are at a moment; the same object again while nothing has changed."""

    def __init__(self) -> None:
        self._seen: list[dict[str, Any]] = []
        self._taken: Hyperparameters = []

    def take(self, groups: Sequence[Mapping[str, Any]]) -> Hyperparameters:
        """The hyperparameters now; tensors (a tensor ``lr``) are copied."""
        options = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
        seen = [{k: (v, v._version) if isinstance(v, Tensor) else v for k, v in group.items()} for group in options]
        if not _are_equal(seen, self._seen):
            self._seen = seen
            self._taken = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in g.items()} for g in options]
        return self._taken


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two nested values are the same; tensors only if they are one."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    return bool(a == b)


def step_alone(base: torch.optim.Optimizer, *closure: Callable[[], Any]) -> Any:
    """``base.step(*closure)`` without the hooks that are registered for all optimizers: the caller's optimizer is the
    one that steps, and runs them itself."""
    step = type(base).step
    if getattr(step, "hooked", False):  # by torch.optim.Optimizer._patch_step_function
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step(base, *closure)


@contextmanager
def scaled_gradients(base: torch.optim.Optimizer, scale: Tensor | None) -> Iterator[None]:
    """Inside, a step of ``base`` multiplies gradients by ``scale``.

    Args:
        base: of a class that folds, see :class:`PartialStep`.
        scale: 0-dim, on the gradients' device or the host; None for 1.
    """
    base.gradient_scale = scale  # type: ignore[attr-defined]
    try:
        yield
    finally:
        base.gradient_scale = None  # type: ignore[attr-defined]


def place(param: Any, position: int, start: int, *, has_blocks: bool) -> None:
    """Tell a base optimizer, by attributes of what is a parameter to it, which part of the caller's it is.

    ``offload_range``: ``(position, start)``, the caller's parameter over all groups and the first element there.
    ``offload_has_blocks``: :attr:`Entry.has_blocks`.
    """
    param.offload_range = (position, start)
    param.offload_has_blocks = has_blocks


class PartialStep:
    """Steps a base optimizer over a few tensors, leaving its own groups and state alone.

    It works on a second instance that shares everything else with the first, so that one thread can step
    while another reads the optimizer. To that instance a parameter has what :func:`place` gives it.

    Attributes:
        folds: the base optimizer multiplies gradients by its attribute ``gradient_scale`` while it updates; its class
            says so by an attribute ``folds_gradient_scale = True``.
    """

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.folds = bool(getattr(type(base), "folds_gradient_scale", False))
        self._base = object.__new__(type(base))
        self._base.__dict__.update(base.__dict__)
        # A base optimizer that consists of others has them step on one thread at a time.
        apart = getattr(self._base, "apart", None)
        if apart is not None:
            apart()

    def apart(self) -> PartialStep:
        """The same for another thread."""
        return PartialStep(self._base)

    def __call__(self, entries: Sequence[Entry], groups: Hyperparameters, scale: Tensor | None = None) -> None:
        """Update every entry with its gradient; states change in place.

        Args:
            entries: what to update.
            groups: hyperparameters to update with.
            scale: 0-dim factor of the gradients. The base optimizer applies it if it folds; else gradients change.
        """
        members: dict[int, list[nn.Parameter]] = defaultdict(list)
        states: defaultdict[Tensor, Any] = defaultdict(dict)
        for entry in entries:
            param = nn.Parameter(entry.tensor)
            place(param, entry.position, entry.start, has_blocks=entry.has_blocks)
            gradient = entry.gradient if self.folds or scale is None else entry.gradient.mul_(scale)
            # Rounded after it was scaled; and fused kernels walk over memory.
            param.grad = in_layout_of(gradient.to(entry.tensor.dtype), entry.tensor)
            members[entry.group].append(param)
            states[param] = entry.state
        self._base.param_groups = [dict(groups[index], params=params) for index, params in members.items()]
        self._base.state = states
        try:
            with scaled_gradients(self._base, scale) if self.folds else nullcontext():
                step_alone(self._base)
        finally:
            self._base.param_groups, self._base.state = [], defaultdict(dict)

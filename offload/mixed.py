"""Several optimizer classes as one base optimizer: each parameter group is updated by the class that it names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from offload.base_class import (
    is_elementwise,
    is_foreseeable,
    is_per_parameter,
    is_same_everywhere,
    launches_on_default_stream,
    path_of,
)
from offload.engine.base import scaled_gradients, step_alone
from offload.errors import UserError
from offload.loading import load
from offload.optim import unpacked

CLASS = "optimizer_class"
"""Key of a group that names its class by a dotted path."""

Kinds = Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any]]]
"""Dotted path to class, and what that is built with."""


class MixedOptimizer(torch.optim.Optimizer):
    """Steps each group by an optimizer of the class that its ``optimizer_class`` names.

    States and groups are those of the classes; a group has the hyperparameters of its own class and no others. Made by
    :func:`mixed_class`.

    Args:
        params: groups, each with ``optimizer_class``.
    """

    kinds: ClassVar[Kinds] = {}
    owns_loaded_states = True
    converts_loaded_states = False
    folds_gradient_scale = False

    gradient_scale: Tensor | None = None
    """0-dim factor for the gradients of the next steps, where all classes fold it."""

    def __init__(self, params: Any) -> None:
        self._members: dict[str, torch.optim.Optimizer] = {}
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, completed with the defaults of its class: the first of all, if it names none.

        Raises:
            UserError: for a class that no group had when the optimizer was built.
            ValueError: from its class, for hyperparameters that it refuses.
        """
        path = param_group.setdefault(CLASS, next(iter(self.kinds)))
        if path not in self.kinds:
            raise UserError(f"optimizer_class: got {path!r}, expected one of {', '.join(self.kinds)} in a new group")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            member = self._build(group)
        except Exception:
            self.param_groups.pop()
            raise
        group.update((key, value) for key, value in member.param_groups[0].items() if key != "params")
        member.param_groups = []
        self._members.setdefault(group[CLASS], member)

    def _build(self, group: Mapping[str, Any]) -> torch.optim.Optimizer:
        """An optimizer of a group's class over that group alone."""
        kind, kwargs = self.kinds[group[CLASS]]
        return kind([{key: value for key, value in group.items() if key not in (CLASS, "param_names")}], **kwargs)

    def apart(self) -> None:
        """Have members of one's own, of which other copies of this object know nothing."""
        members = {}
        for path, member in self._members.items():
            members[path] = object.__new__(type(member))
            members[path].__dict__.update(member.__dict__)
        self._members = members

    @contextmanager
    def _each(self) -> Iterator[list[torch.optim.Optimizer]]:
        """Inside, the members have their groups and their parameters' states."""
        for path, member in self._members.items():
            member.param_groups = [group for group in self.param_groups if group[CLASS] == path]
            member.state = self.state
        try:
            yield [member for member in self._members.values() if member.param_groups]
        finally:
            for member in self._members.values():
                member.param_groups, member.state = [], defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [param for group in self.param_groups for param in group["params"]]
        # Random bits depend on the position over all groups, which a member does not know.
        placed = [(param, at) for at, param in enumerate(params) if not hasattr(param, "offload_range")]
        for param, position in placed:
            param.offload_range = (position, 0)
        try:
            with self._each() as members:
                for member in members:
                    if self.folds_gradient_scale:
                        with scaled_gradients(member, self.gradient_scale):
                            step_alone(member)
                    else:
                        step_alone(member)
        finally:
            for param, _ in placed:
                del param.offload_range
        return loss

    def train(self) -> None:
        """See :meth:`offload.OffloadOptimizer.train`."""
        self._switch("train")

    def eval(self) -> None:
        """See :meth:`offload.OffloadOptimizer.train`."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        with self._each() as members:
            for member in members:
                getattr(member, mode, _nothing)()

    def load_state_dict(self, state_dict: Mapping[str, Any], states_on: torch.device | None = None) -> None:
        """Load what :meth:`state_dict` gave; each class loads its own groups.

        Args:
            state_dict: with groups of the same sizes and classes.
            states_on: where loaded states go; each parameter's own device by default.

        Raises:
            ValueError: where a group was updated by another class.
        """
        loaded: defaultdict[Any, Any] = defaultdict(dict)
        groups = []
        for index, (saved, group) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=True)):
            if saved.get(CLASS) != group[CLASS]:
                before = saved.get(CLASS, "one class for all groups")
                raise ValueError(f"group {index} of the state to load is of {before}, here it is of {group[CLASS]}")
            options = {key: value for key, value in saved.items() if key not in (CLASS, "param_names")}
            states = {key: state_dict["state"][key] for key in saved["params"] if key in state_dict["state"]}
            part: dict[str, Any] = {"state": states, "param_groups": [options]}
            member = self._build(group)
            if not getattr(member, "owns_loaded_states", False):
                part = unpacked(part, group["params"])
            load(member, part, on_host=states_on is not None)
            loaded.update(member.state)
            names = {"param_names": group["param_names"]} if "param_names" in group else {}
            groups.append({**member.param_groups[0], **names, CLASS: group[CLASS]})
        self.__setstate__({"state": loaded, "param_groups": groups})


def _nothing() -> None:
    return None


def mixed_class(kinds: Kinds) -> type[MixedOptimizer]:
    """A :class:`MixedOptimizer` of those classes, which may do what all of them may.

    Raises:
        UserError: for classes whose states cannot be told apart.
    """
    classes = [kind for kind, _ in kinds.values()]
    blocks: dict[str, int] = {}
    for kind in classes:
        for key, block in getattr(kind, "state_block", {}).items():
            if blocks.setdefault(key, block) != block:
                raise UserError(
                    f"optimizer.param_groups: {' and '.join(map(path_of, classes))} keep states {key!r} in blocks of "
                    "different sizes; use one of them"
                )
    attributes = {
        "kinds": dict(kinds),
        "per_parameter": all(map(is_per_parameter, classes)),
        "foreseeable": all(map(is_foreseeable, classes)),
        "same_on_every_device": all(map(is_same_everywhere, classes)),
        "launches_on_default_stream": any(map(launches_on_default_stream, classes)),
        "converts_loaded_states": all(getattr(kind, "owns_loaded_states", False) for kind in classes),
        "folds_gradient_scale": all(getattr(kind, "folds_gradient_scale", False) for kind in classes),
        "state_block": blocks,
    }
    return type("MixedOptimizer", (MixedOptimizer,), attributes)


def cuttable_groups(base: torch.optim.Optimizer) -> set[int]:
    """The groups of a base optimizer whose large tensors may be updated in ranges."""
    kinds = base.kinds if isinstance(base, MixedOptimizer) else None
    classes = [type(base) if kinds is None else kinds[group[CLASS]][0] for group in base.param_groups]
    return {index for index, kind in enumerate(classes) if is_elementwise(kind)}

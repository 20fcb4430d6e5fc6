"""Parameters that somebody puts into an optimizer's groups after it was built, in place of those that are there.

accelerate shards a model by FSDP2 when it prepares it together with an optimizer, whose groups it first rids of the
parameters, so that they can be freed one by one, and then gives the sharded ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from offload.engine.shards import is_distributed
from offload.engine.units import clean_name


def awaits_sharding(params: Iterable[Tensor]) -> bool:
    """Whether accelerate was set up to shard a model by FSDP2, and has not sharded these parameters yet."""
    states = sys.modules.get("accelerate.state")
    if states is None or not states.is_initialized() or any(map(is_distributed, params)):
        return False
    return bool(getattr(states.AcceleratorState(), "is_fsdp2", False))


class Group(dict[str, Any]):
    """A parameter group that tells when it is given other parameters."""

    def __init__(self, group: Mapping[str, Any], exchanged: Callable[[], None]) -> None:
        super().__init__(group)
        self._exchanged = exchanged

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "params":
            self._exchanged()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


@dataclass(frozen=True)
class _Member:
    path: str
    label: str
    is_named: bool
    shape: tuple[int, ...]


class Members:
    """What the parameters of an optimizer are called. It survives them, by their positions over all groups.

    Attributes:
        paths: the parameters' names in state paths.
        labels: what messages call them.
    """

    def __init__(self) -> None:
        self.paths: dict[Tensor, str] = {}
        self.labels: dict[Tensor, str] = {}
        self._named: set[Tensor] = set()
        self._members: list[list[_Member]] = []

    def add(self, groups: Iterable[Mapping[str, Any]], names: Mapping[Tensor, str]) -> None:
        """Name the parameters of more groups: by the names that their entries have, or by ``names``, else by their
        positions."""
        for group in groups:
            index, members = len(self._members), []
            for position, entry in enumerate(group["params"]):
                param = entry[1] if isinstance(entry, tuple) else entry
                name = entry[0] if isinstance(entry, tuple) else names.get(param)
                path, label = f"{index}.{position}", f"parameter {position} of group {index}"
                if name is not None:
                    path, label = clean_name(name), f"parameter {name}"
                else:
                    label += f" (shape {tuple(param.shape)})"
                members.append(_Member(path, label, name is not None, tuple(param.shape)))
            self._members.append(members)
            self._put([entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]], members)

    def _put(self, params: Sequence[Tensor], members: Sequence[_Member]) -> None:
        for param, member in zip(params, members, strict=True):
            self.paths[param], self.labels[param] = member.path, member.label
            if member.is_named:
                self._named.add(param)

    def are_named(self, params: Iterable[Tensor]) -> bool:
        """Whether names, rather than positions, are known of all."""
        return all(param in self._named for param in params)

    def fit(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether groups have parameters of the same shapes as these in the same places."""
        shapes = [
            [tuple(p.shape) if isinstance(p, nn.Parameter) else None for p in group["params"]] for group in groups
        ]
        return shapes == [[member.shape for member in members] for members in self._members]

    def forget(self) -> None:
        """Let go of the parameters."""
        for known in (self.paths, self.labels, self._named):
            known.clear()  # in place: others have them too

    def exchange(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Call the parameters of ``groups``, which fit, what those before them were called."""
        self.forget()
        for group, members in zip(groups, self._members, strict=True):
            self._put(group["params"], members)

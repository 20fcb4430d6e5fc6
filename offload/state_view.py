"""A base optimizer's state by the caller's parameters."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from offload.engine.host import HostCopies
from offload.engine.shards import LocalParameters


class StateView(MutableMapping[Any, Any]):
    """The base optimizer's state, looked up by the caller's parameters instead of what it updates for them."""

    def __init__(self, base: torch.optim.Optimizer, resting: HostCopies | LocalParameters) -> None:
        self._base, self._resting = base, resting

    def __getitem__(self, param: Any) -> Any:
        return self._base.state[self._resting.of(param)]

    def __setitem__(self, param: Any, value: Any) -> None:
        self._base.state[self._resting.of(param)] = value

    def __delitem__(self, param: Any) -> None:
        del self._base.state[self._resting.of(param)]

    def __contains__(self, param: object) -> bool:
        return isinstance(param, nn.Parameter) and self._resting.of(param) in self._base.state

    def __iter__(self) -> Iterator[Any]:
        return (self._resting.device(host) for host in self._base.state)

    def __len__(self) -> int:
        return len(self._base.state)

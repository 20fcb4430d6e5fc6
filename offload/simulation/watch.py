"""Sees every torch operation of one thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload.simulation.threads import SimulatedThread

_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Watch(TorchDispatchMode):
    """Tells of every torch operation of one thread.

    Args:
        thread: whose operations, where they are not silent.
        tell: called with the thread, the operation, its arguments and its result.
    """

    def __init__(self, thread: SimulatedThread, tell: Callable[[SimulatedThread, Any, Any, Any, Any], None]) -> None:
        super().__init__()
        self._thread, self._tell = thread, tell

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside, and torch's guard against it costs as much as the rest."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A subclass goes first, and what it does with its inner tensors comes back here.
        for kind in types:
            if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
                return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._thread.silent:
            self._tell(self._thread, func, args, kwargs, result)
        return result


def host_needs_result(func: Any, args: Sequence[Any]) -> bool:
    """Whether the host needs an operation's result, a value or a shape: a device's stream is waited for."""
    operation = func.overloadpacket.__name__
    if operation == "index":
        # Positions tell the result's shape, a mask has to be counted.
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return operation == "is_nonzero" or not _WAITING_TAGS.isdisjoint(func.tags)


_VIEWS = {"alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes",
          "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}  # fmt: skip
"""Operations whose result is never new memory. Others that are said to be views copy where they have to, among them
``reshape`` and ``contiguous``, which a tensor subclass calls as they are."""


@functools.cache
def is_view(func: Any) -> bool:
    """Whether an operation touches no memory."""
    return func.namespace == "aten" and func.overloadpacket.__name__ in _VIEWS

"""Running a model on tensors that have shapes and no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_T = TypeVar("_T")


class DiffersOnMetaError(RuntimeError):
    """Autograd does other work for tensors on the meta device than for those of a device."""


def without_memory(module: nn.Module, run: Callable[[], _T]) -> _T:
    """What ``run`` makes of forward and backward of a module on the meta device.

    A model that asks meta tensors for values, or for which ``run`` raises :class:`DiffersOnMetaError`, runs again on
    fake tensors of the CPU, which take three times as long.

    Args:
        module: on the meta device; on the CPU afterwards where that took fake tensors. Its gradients are gone.
        run: makes inputs where the module's parameters are; may be called twice.
    """
    try:
        return run()
    except RuntimeError:
        pass
    finally:
        _drop_gradients(module)
    return _with_fake_tensors(module, run)


def _with_fake_tensors(module: nn.Module, run: Callable[[], _T]) -> _T:
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            _replace_tensors(module)
            return run()
    finally:
        _drop_gradients(module)


def _drop_gradients(module: nn.Module) -> None:
    for param in module.parameters():
        param.grad = None


def _replace_tensors(module: nn.Module) -> None:
    """Replace a model's tensors by fake ones of the CPU; transformers' masks ask meta tensors for values."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for each in module.modules():
        slots: tuple[dict[str, Any], ...] = (each._parameters, each._buffers)
        for tensors in slots:
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    made[id(old)] = (
                        nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new,
                        old,
                    )
                tensors[name] = made[id(old)][0]

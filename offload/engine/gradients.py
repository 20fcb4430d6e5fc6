"""The marker that stands in ``parameter.grad`` for a gradient the engine has taken to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class TakenGradient(Tensor):
    """Stands for a gradient that the engine has taken: right shape, dtype and device, no memory.

    Any use outside backward (scaling, clipping, taking the norm) raises instead of doing nothing, because
    the values are elsewhere. During backward autograd adds the next micro-batch's gradient to it; the
    addend is kept in :attr:`arrived` for the engine's hook. Zeroing zeroes the values where they rest.

    Attributes:
        rest: the values, in the parameter's shape; None once an update in backward has consumed them.
        on_host: ``rest`` is in host memory.
        arrived: the addend that autograd delivered since the engine last looked, or None.
        wait: called before the values are zeroed; blocks until nothing is added to them any more.
    """

    rest: Tensor | None
    on_host: bool
    arrived: Tensor | None
    wait: Callable[[], None]

    @staticmethod
    def __new__(
        cls, like: Tensor, rest: Tensor | None, *, on_host: bool = False, wait: Callable[[], None]
    ) -> TakenGradient:
        marker: TakenGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, strides=like.stride()
        )
        marker.rest = rest
        marker.on_host = on_host
        marker.arrived = None
        marker.wait = wait
        return marker

    def __repr__(self) -> str:  # type: ignore[override]
        where = "consumed" if self.rest is None else "resting on the host" if self.on_host else "taken by step()"
        return f"TakenGradient(shape={tuple(self.shape)}, dtype={self.dtype}, {where})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0]
        if isinstance(first, cls):
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward and func in (aten.add_.Tensor, aten.add.Tensor):
                first.arrived = args[1].detach()
                return first
            if func is aten.zero_.default:
                first.wait()
                if first.rest is not None:
                    first.rest.zero_()
                return first
            if func is aten.detach.default:
                return first
        raise RuntimeError(
            f"{func.name().split('::')[-1].split('.')[0]} on a gradient that the optimizer has already taken "
            "would have no effect. Clip with optimizer.clip_grad_norm_(max_norm), normalise the loss before "
            "backward(), or build the optimizer with offload_gradients=False and update_in_backward=False. In Hugging "
            "Face's Trainer, which clips gradients itself: class MyTrainer(offload.OffloadTrainerMixin, Trainer)."
        )

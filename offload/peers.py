"""Other projects' offloading optimizers behind the same dotted-string door, so that runs can be compared."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from offload.base_class import base_class_of
from offload.errors import UserError
from offload.groups import as_groups
from offload.optimizer import OffloadOptimizer


class TorchAOCPUOffloadOptimizer(torch.optim.Optimizer):
    """torchao's ``CPUOffloadOptimizer`` with its base optimizer given as a dotted path.

    Calling this class returns torchao's own object, extended only by refusals: what torchao would silently
    train over (clipping, which would scale gradients that were copied already; accumulation with offloaded
    gradients, which would lose all but the last) raises here by name.

    Source: https://github.com/pytorch/ao/tree/main/torchao/optim#optimizer-cpu-offload

    Args:
        params: parameters or parameter groups on a CUDA or XPU device.
        optimizer_class: the base optimizer, as a dotted path or a class.
        offload_gradients: free each gradient on the device once it is copied.
        minimal_size: tensors with fewer elements stay on the device.
        **base_kwargs: passed on to the base optimizer.

    Raises:
        UserError: without CUDA or XPU, for parameters elsewhere, and for the combinations above.
    """

    def __new__(  # type: ignore[misc]
        cls,
        params: Iterable[Any],
        optimizer_class: str | type[torch.optim.Optimizer] = "torch.optim.AdamW",
        *,
        offload_gradients: bool = False,
        minimal_size: int = 4096,
        **base_kwargs: Any,
    ) -> torch.optim.Optimizer:
        groups = as_groups(params)
        devices = {_param(entry).device.type for group in groups for entry in group["params"]}
        if not devices <= {"cuda", "xpu"}:
            raise UserError(
                f"optimizer: offload.TorchAOCPUOffloadOptimizer needs parameters on CUDA or XPU, got "
                f"{', '.join(sorted(devices))}; use optimizer=offload.OffloadOptimizer, which runs anywhere"
            )
        plain = [dict(group, params=[_param(entry) for entry in group["params"]]) for group in groups]
        return _torchao_class()(
            plain,
            base_class_of(optimizer_class),
            offload_gradients=offload_gradients,
            minimal_size=minimal_size,
            **base_kwargs,
        )

    @classmethod
    def config_signature(cls, kwargs: Mapping[str, Any]) -> inspect.Signature:
        """See :meth:`offload.OffloadOptimizer.config_signature`."""
        own = inspect.signature(cls.__new__).parameters
        offload = OffloadOptimizer.config_signature(kwargs)
        mine = [offload.parameters["params"], offload.parameters["optimizer_class"]]
        mine += [own["offload_gradients"], own["minimal_size"]]
        base = inspect.signature(base_class_of(kwargs.get("optimizer_class", "torch.optim.AdamW")))
        names = {parameter.name for parameter in mine}
        mine += [p for p in offload.parameters.values() if p.name in base.parameters and p.name not in names]
        return offload.replace(parameters=sorted(mine, key=lambda p: p.kind))


def _param(entry: Any) -> Tensor:
    return entry[1] if isinstance(entry, tuple) else entry


def _torchao_class() -> Any:
    """torchao's class with refusals; made on first use, because importing torchao takes a second."""
    from torchao.optim import CPUOffloadOptimizer

    class TorchAOOffload(CPUOffloadOptimizer):
        def __init__(self, *args: Any, offload_gradients: bool = False, **kwargs: Any) -> None:
            super().__init__(*args, offload_gradients=offload_gradients, **kwargs)
            self._offload_gradients = offload_gradients

        def check_training(self, *, gradient_accumulation_steps: int, clip_grad_norm: float | None) -> None:
            """Refuse, before the first step, the settings that torchao would silently train over."""
            if clip_grad_norm is not None:
                self.clip_grad_norm_(clip_grad_norm)
            if gradient_accumulation_steps > 1 and self._offload_gradients:
                raise UserError(
                    "gradient_accumulation_steps: torchao's CPUOffloadOptimizer with offload_gradients=True keeps "
                    "only the last micro-batch's gradients; set optimizer.offload_gradients=False, "
                    "gradient_accumulation_steps=1, or optimizer=offload.OffloadOptimizer"
                )

        def clip_grad_norm_(self, max_norm: float) -> Tensor:
            raise UserError(
                f"clip_grad_norm: torchao's CPUOffloadOptimizer copies gradients during backward, so clipping to "
                f"{max_norm} would have no effect; set clip_grad_norm=null or optimizer=offload.OffloadOptimizer"
            )

    return TorchAOOffload

"""Hugging Face's ``Trainer`` with offloaded gradients and updates in backward: a mixin for it and its subclasses.

It needs neither transformers nor accelerate to be imported: it overrides what ``Trainer`` calls in each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from offload.errors import UserError
from offload.optimizer import OffloadOptimizer


class OffloadTrainerMixin:
    """Lets ``Trainer`` accumulate, clip and measure gradients that an :class:`offload.OffloadOptimizer` has taken.

    ``Trainer`` scales ``param.grad`` in place, which cannot reach gradients on the host or ones that backward has used
    up already. This mixin marks every micro-batch but the last, and asks the optimizer for the norm and the clipping.
    With another optimizer it changes nothing. Written for transformers 5; works with ``trl.SFTTrainer`` too.

    Example::

        class Trainer(OffloadTrainerMixin, transformers.Trainer):
            pass

        optimizer = OffloadOptimizer(model.named_parameters(), strategy="stream", offload_gradients=True, model=model)
        Trainer(model=model, optimizers=(optimizer, None), args=args, train_dataset=data).train()

    Raises:
        UserError: from ``train()``, for ``max_grad_norm`` above 0 (Trainer's default is 1.0) with
            ``update_in_backward=True``.
    """

    optimizer: Any
    args: Any
    accelerator: Any

    def _offloaded(self) -> OffloadOptimizer | None:
        """The offloading optimizer below accelerate's wrappers; None where there is another."""
        optimizer = self.optimizer
        while not isinstance(optimizer, OffloadOptimizer) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        return optimizer if isinstance(optimizer, OffloadOptimizer) else None

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """As ``Trainer``'s: forward and backward of a micro-batch."""
        optimizer = self._offloaded()
        if optimizer is not None and optimizer.update_in_backward and self.args.max_grad_norm:
            raise UserError(
                f"max_grad_norm: got {self.args.max_grad_norm}, but update_in_backward=True updates each layer before "
                "the norm of all gradients is known, so it cannot be limited; set max_grad_norm=0 in the training "
                "arguments, or build the optimizer with update_in_backward=False"
            )
        is_final = self.accelerator.sync_gradients
        with nullcontext() if optimizer is None or is_final else optimizer.accumulate():
            loss: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        optimizer = self._offloaded()
        if optimizer is None:
            norm: Tensor = super()._clip_grad_norm(model)  # type: ignore[misc]
            return norm
        self.accelerator.unscale_gradients()
        return optimizer.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Any:
        optimizer = self._offloaded()
        if grad_norm is None and optimizer is not None:
            self.accelerator.unscale_gradients()
            grad_norm = optimizer.grad_norm()
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]

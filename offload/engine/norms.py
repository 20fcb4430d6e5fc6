"""Norms of gradients, and the factor that clips them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from offload.engine.gradients import TakenGradient
from offload.engine.shards import gradient_of, summed_norms

LOW_PRECISION = (torch.bfloat16, torch.float16)


def tensor_norms(gradients: Sequence[Tensor], norm_type: float = 2.0) -> list[Tensor]:
    """Norm of each gradient as a 0-dim tensor where the gradient lies, accumulated and returned in fp32 for 16-bit
    gradients; one launch for many."""
    norms: dict[int, Tensor] = {}
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, gradient in enumerate(gradients):
        alike[gradient.device, gradient.dtype].append(index)
    for (_, dtype), indices in alike.items():
        as_dtype = torch.float32 if dtype in LOW_PRECISION else None
        found = torch._foreach_norm([gradients[index] for index in indices], norm_type, dtype=as_dtype)
        norms.update(zip(indices, found, strict=True))
    return [norms[index] for index in range(len(gradients))]


def total_norm(norms: list[Tensor], norm_type: float, *, error_if_nonfinite: bool = False) -> Tensor:
    """Norm of the concatenation of all gradients from their single norms, as torch.nn.utils.get_total_norm.

    Args:
        norms: 0-dim tensors, on any devices; the result lies where the first one does.
        norm_type: the p of the p-norm; may be ``inf``.
        error_if_nonfinite: raise RuntimeError where the result is nan or infinite; reads it, and so waits for the
            device.
    """
    if not norms:
        return torch.tensor(0.0, dtype=torch.float32)
    device = norms[0].device
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so it cannot be clipped."
        )
    return total


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor | None:
    """The factor that brings ``norm`` down to ``max_norm``, 1 where it is smaller; None for no limit.

    The epsilon is that of torch.nn.utils.clip_grads_with_norm_, so that results agree bit for bit.
    """
    if max_norm == float("inf"):
        return None
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class Norms:
    """Norms of one step's gradients; those of gradients that leave early are taken as they leave.

    Attributes:
        measure: somebody will ask; without it no norm is taken early.
    """

    def __init__(self) -> None:
        self.measure = True
        self._known: dict[nn.Parameter, Tensor] = {}
        self._sources: dict[nn.Parameter, TakenGradient] = {}
        self._is_over = False

    def end_step(self, *, keep: bool) -> None:
        """The step is over. ``keep``: until the next gradient comes, its norms may still be asked for."""
        if keep:
            self._is_over = True
        else:
            self.clear()

    def begin(self) -> None:
        """A gradient has come."""
        if self._is_over:
            self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._sources.clear()
        self._is_over = False

    def leave(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Take the norms of device gradients that an update or a copy is about to consume."""
        if self.measure:
            self._known.update(zip(gradients, tensor_norms(list(gradients.values())), strict=True))

    def taken_early(self) -> list[Tensor]:
        """The norms of gradients that have left."""
        return list(self._known.values())

    def left(self, param: nn.Parameter, marker: TakenGradient) -> None:
        """The gradient rests where ``marker`` says."""
        self._sources[param] = marker

    def changed(self, param: nn.Parameter) -> None:
        """The gradient is another one now."""
        self._known.pop(param, None)

    def of(
        self,
        params: Iterable[nn.Parameter],
        norm_type: float,
        *,
        names: Mapping[Tensor, str],
        on_host: Callable[[nn.Parameter], Tensor | None],
        settle: Callable[[], None],
    ) -> list[Tensor]:
        """Norm of each parameter's gradient over all ranks, where it was taken or is now, 0-dim.

        Args:
            params: those without a gradient are left out.
            norm_type: p of the p-norm.
            names: what messages call each parameter.
            on_host: the norm of order 2 that was taken where the gradient rests on the host.
            settle: blocks until gradients lie where they rest.

        Raises:
            RuntimeError: for a gradient that is gone and whose norm was not taken.
        """
        norms: dict[nn.Parameter, Tensor] = {}
        here: dict[nn.Parameter, Tensor] = {}
        settled = False
        for param in params:
            gradient = gradient_of(param)
            if gradient is None:
                continue
            norms[param] = gradient  # keeps the order
            if not isinstance(gradient, TakenGradient):
                here[param] = gradient
                continue
            marker = self._sources.get(param, gradient)
            if norm_type == 2.0:
                known = self._known.get(param)
                known = on_host(param) if known is None and marker.on_host else known
                if known is not None:
                    norms[param] = known
                    continue
            if marker.rest is None:
                raise RuntimeError(
                    f"the gradient of {names[param]} was consumed by update_in_backward=True; of such gradients "
                    "only the norm of order 2 is known, until the next backward, and where the optimizer's "
                    "measure_grad_norm was True in this one"
                )
            if not settled:
                settle()
                settled = True
            here[param] = marker.rest
        norms.update(zip(here, tensor_norms(list(here.values()), norm_type), strict=True))
        return summed_norms(norms, norm_type)

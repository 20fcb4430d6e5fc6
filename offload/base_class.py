"""Base optimizers: found by their dotted path, and what the engine may do with each class."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from offload.component import resolve
from offload.errors import UserError
from offload.groups import tensors_of

log = logging.getLogger(__name__)

PER_PARAMETER_PACKAGES = ("torch.optim.", "torchao.optim.", "bitsandbytes.optim.")
"""Packages whose optimizers update each parameter from its own gradient and state alone, so that the engine may
update them one by one. Another class says so by an attribute ``per_parameter = True``; without it, it is stepped once
with everything."""

FORESEEABLE_PACKAGES = (*PER_PARAMETER_PACKAGES, "offload.optim.")
"""Packages whose optimizers may be tried on a small parameter, to see what states they keep before the first step.
Another class says so by an attribute ``foreseeable = True``; without it, host memory for its states is page-locked when
its first updates make them."""

DEFAULT_STREAM_PACKAGES = ("bitsandbytes.",)
"""Packages whose kernels run on the device's default stream, whichever stream is current. Another class says so by an
attribute ``launches_on_default_stream = True``."""

ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Optimizers that treat each element alone, so that a large tensor may be updated in ranges. Another class says so by
an attribute ``elementwise = True``."""

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose ``fused=True`` makes one pass over memory instead of one per operation, on the CPU too."""

FUSED_IN_FP32_ONLY = (torch.optim.SGD,)
"""Of them, those whose CPU kernel is wrong for 16-bit parameters: torch 2.13's SGD reads momentum that nobody wrote."""


NAMING_PACKAGES = ("torch.optim", "torchao.optim", "bitsandbytes.optim", "offload.optim", "schedulefree")
"""Packages that name their optimizers' classes; these lie in modules below."""


def public_path(path: str) -> str:
    """The dotted path by which a package names a class that lies in one of its modules."""
    package = next((package for package in NAMING_PACKAGES if path.startswith(f"{package}.")), None)
    return path if package is None else f"{package}.{path.rpartition('.')[2]}"


def path_of(base_class: type) -> str:
    """The dotted path of a class."""
    return public_path(f"{base_class.__module__}.{base_class.__qualname__}")


def base_class_of(
    optimizer_class: str | type[torch.optim.Optimizer], *, key: str = "optimizer.optimizer_class"
) -> type[torch.optim.Optimizer]:
    """The optimizer class that a dotted path or a class names; UserError where there is none."""
    resolved = optimizer_class
    if isinstance(optimizer_class, str):
        resolved = resolve(optimizer_class, key=key)
    if not (isinstance(resolved, type) and issubclass(resolved, torch.optim.Optimizer)):
        raise UserError(
            f"{key}: {optimizer_class!r} is not a torch.optim.Optimizer class; give the "
            "dotted path of one, such as torch.optim.AdamW"
        )
    if "optimizer_class" in inspect.signature(resolved).parameters:
        raise UserError(f"{key}: {resolved.__name__} cannot offload itself; name the base optimizer")
    return resolved


def is_per_parameter(base_class: type[torch.optim.Optimizer]) -> bool:
    """Whether it updates each parameter from its own gradient and state alone."""
    return _is_of(base_class, PER_PARAMETER_PACKAGES) or bool(getattr(base_class, "per_parameter", False))


def is_elementwise(base_class: type[torch.optim.Optimizer]) -> bool:
    """Whether it treats each element alone."""
    return base_class in ELEMENTWISE or bool(getattr(base_class, "elementwise", False))


def is_foreseeable(base_class: type[torch.optim.Optimizer]) -> bool:
    """Whether it may be tried on a small parameter."""
    return _is_of(base_class, FORESEEABLE_PACKAGES) or bool(getattr(base_class, "foreseeable", False))


def launches_on_default_stream(base_class: type[torch.optim.Optimizer]) -> bool:
    """Whether its kernels run on the device's default stream, whichever is current."""
    return _is_of(base_class, DEFAULT_STREAM_PACKAGES) or bool(getattr(base_class, "launches_on_default_stream", False))


def is_same_everywhere(base_class: type[torch.optim.Optimizer]) -> bool:
    """Whether an update on the CPU gives the bits of one on a device, as it says by an attribute
    ``same_on_every_device = True``."""
    return bool(getattr(base_class, "same_on_every_device", False))


def needs_closure(base_class: type[torch.optim.Optimizer]) -> bool:
    """Whether its ``step`` cannot do without a closure that computes the loss anew."""
    closure = inspect.signature(base_class.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _is_of(base_class: type[torch.optim.Optimizer], packages: tuple[str, ...]) -> bool:
    return f"{base_class.__module__}.".startswith(packages)


def with_fused(
    base_class: type[torch.optim.Optimizer], groups: list[dict[str, Any]], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """``kwargs`` with ``fused=True``, where the class has it and nobody chose an implementation."""
    chosen = {"fused", "foreach", "capturable", "differentiable"}
    groups_choose = any(chosen & group.keys() for group in groups)
    floating = all(param.is_floating_point() for param in tensors_of(groups))
    if base_class in FUSED_IN_FP32_ONLY:
        floating = all(param.dtype in (torch.float32, torch.float64) for param in tensors_of(groups))
    if base_class not in FUSED or chosen & kwargs.keys() or groups_choose or not floating:
        return kwargs
    log.info("%s: fused=True, one pass over host memory per step", base_class.__name__)
    return {**kwargs, "fused": True}

"""What a base optimizer will keep for a parameter, known before its first step from one step on a small parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.base import place, state_blocks, step_alone
from offload.engine.shards import has_blocks, local
from offload.engine.units import Slice, components

LARGE, SMALL = 3 * 2**12, 2**8
"""Elements of the small parameters. The large one has room for blocks of up to 4096."""

THRESHOLD = 2**12
"""Elements below which quantized optimizers (torchao's, bitsandbytes') keep states in the parameter's dtype or fp32."""


@dataclass(frozen=True)
class Component:
    """A plain tensor of a state.

    Attributes:
        block: elements of the parameter for each of its own; 0: the size is ``shape``, whatever the parameter's.
        is_like: it has the parameter's shape.
    """

    dtype: torch.dtype
    block: int
    is_like: bool
    shape: torch.Size

    def of(self, param: Tensor) -> Tensor:
        """The tensor that a parameter gets, on the meta device."""
        shape: Any = self.shape
        if self.is_like:
            shape = param.shape
        elif self.block:
            shape = (-(-param.numel() // self.block),)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def elements(self, part: Slice) -> int:
        """Elements of it that belong to a slice of a parameter."""
        if self.is_like:
            return part.numel
        return -(-part.numel // self.block) if self.block else self.shape.numel()

    @property
    def density(self) -> float:
        """Bytes for each element of a parameter."""
        return self.dtype.itemsize / self.block if self.block else self.dtype.itemsize if self.is_like else 0.0


@dataclass(frozen=True)
class Form:
    """A state: its key and the tensors that it is made of."""

    key: str
    components: tuple[Component, ...]


Kind = tuple[int, torch.dtype, bool, bool]
"""What decides over a parameter's states: its number of dimensions, its dtype, whether it is small, and whether it has
blocks (:attr:`offload.engine.base.Entry.has_blocks`)."""

Forecast = dict[Kind, list[Form]]


def kind_of(param: Tensor, block: int = 1) -> Kind:
    """``block``: elements of the parameter for one of the base optimizer's states."""
    return param.dim(), param.dtype, local(param).numel() < THRESHOLD, has_blocks(param, block)


def probe_shape(dim: int, is_small: bool) -> tuple[int, ...]:
    """Of a small parameter with so many dimensions: SMALL or LARGE elements, one where it has no dimension."""
    count = SMALL if is_small else LARGE
    return (count,) * dim if dim < 2 else (*(1,) * (dim - 2), 4, count // 4)


def stand_in(param: Tensor, device: torch.device | str = "cpu") -> nn.Parameter:
    """A small parameter of the same kind, zeros: what an optimizer keeps for it tells what it keeps for ``param``."""
    dim, dtype, is_small, *_ = kind_of(param)
    return nn.Parameter(torch.zeros(probe_shape(dim, is_small), dtype=dtype, device=device))


def forecast(
    base_class: type[torch.optim.Optimizer],
    kwargs: Mapping[str, Any],
    params: Iterable[nn.Parameter],
    options: Mapping[str, Any] | None = None,
) -> Forecast | None:
    """The states of parameters of one group, whose ``options`` may decide what is kept.

    None where the class does not run on small parameters on the CPU (its kernels are for another device): nothing can
    be said before the first real step then.
    """
    found: Forecast = {}
    block = math.lcm(*state_blocks(base_class).values())
    for kind in sorted({kind_of(param, block) for param in params}, key=str):
        dim, dtype, is_small, whole_blocks = kind
        probe = nn.Parameter(torch.zeros(probe_shape(dim, is_small), dtype=dtype, device="cpu"))
        probe.grad = torch.zeros_like(probe)
        place(probe, 0, 0, has_blocks=whole_blocks)
        try:
            # Neither a compiler nor the caller's random numbers: some optimizers round stochastically.
            with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices=[]):
                base = base_class([{**(options or {}), "params": [probe]}], **kwargs)
                step_alone(base)
        except Exception:
            return None
        states = base.state[probe].items()
        found[kind] = [Form(k, tuple(forms_of(v, probe))) for k, v in states if isinstance(v, Tensor)]
    return found


def forms_of(value: Tensor, probe: Tensor) -> Iterator[Component]:
    """What a state of ``probe``, which has no other number of elements than LARGE or SMALL, is made of."""
    for part in components(value):
        blocks = probe.numel() // part.numel() if part.numel() else 0
        is_blocked = blocks > 1 and part.dim() == 1 and part.numel() * blocks == probe.numel()
        is_power = blocks & (blocks - 1) == 0
        yield Component(part.dtype, blocks if is_blocked and is_power else 0, part.shape == probe.shape, part.shape)

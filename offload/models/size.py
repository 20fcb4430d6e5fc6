"""How large a model is, as the arithmetic of a step sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Size:
    """What a model's arithmetic per token depends on.

    Attributes:
        frozen: parameters without a gradient that every token is multiplied with.
        trainable: those with one.
        layers: layers with attention.
        heads: query heads of a layer.
        head_dim: of each.
    """

    frozen: float
    trainable: float
    layers: int
    heads: int
    head_dim: int


def num_elements(weight: torch.Tensor) -> int:
    """Of a weight; of one that bitsandbytes or torchao packed into fewer bits, as many as it stands for."""
    state = getattr(weight, "quant_state", None)  # bitsandbytes'; torchao's have their logical shape
    return weight.numel() if state is None else math.prod(state.shape)


def matmul_parameters(
    model: nn.Module, *, tied: torch.Tensor | None = None, share: Callable[[str], float] = lambda name: 1.0
) -> tuple[float, float]:
    """Numbers of ``(frozen, trainable)`` parameters that every token is multiplied with.

    Matrices of every module but :class:`torch.nn.Embedding`; one that an embedding shares with the output
    layer is multiplied with once and counts. Vectors (norms, biases) do not count. A 4-bit weight counts by
    its logical shape.

    Args:
        model: whose parameters are counted.
        tied: an embedding's weight that is the head's too, where the head is no module.
        share: of the tokens that a parameter, by its name, is multiplied with: experts see some of them.
    """
    looked_up: dict[int, tuple[str, torch.Tensor]] = {}
    multiplied: dict[int, tuple[str, torch.Tensor]] = {}
    for prefix, module in model.named_modules():
        kind = looked_up if isinstance(module, nn.Embedding) else multiplied
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                kind[id(parameter)] = (f"{prefix}.{name}", parameter)
    if tied is not None:
        multiplied[id(tied)] = ("", tied)
    frozen = trainable = 0.0
    for name, parameter in multiplied.values():
        count = num_elements(parameter) * share(name)
        if parameter.requires_grad:
            trainable += count
        else:
            frozen += count
    return frozen, trainable

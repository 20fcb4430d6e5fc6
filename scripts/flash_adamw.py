"""FlashOptim's AdamW (Databricks, 2026) in torch operations, on any device: a reference for the studies.

Written after what https://github.com/databricks/flashoptim documents; its own kernels need CUDA. First moments are
companded, ``y = 2 x / (1 + |x|)`` of their share ``x`` of the largest, in int8; of second moments the square root's
share is stored in uint8; groups of 32 share an fp16 scale per moment. A bf16 weight has 8 or 16 bits beside it: its
error as a share of half the distance to its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

GROUP = 32
SMALLEST = 1e-12


class FlashAdamW(torch.optim.Optimizer):
    """AdamW over bf16 or fp32 parameters, whose sizes are multiples of 32.

    Args:
        master_weight_bits: 24 or 32 for bf16 parameters, or None.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        master_weight_bits: int | None = 24,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bits": master_weight_bits}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every parameter."""
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            zeros = torch.zeros(param.numel() // GROUP, GROUP)
            state["step"] = 0
            state["m"] = encode_first(zeros)
            state["v"] = encode_second(zeros)
            if group["bits"] and param.dtype == torch.bfloat16:
                state["error"] = torch.zeros_like(param, dtype=torch.int8 if group["bits"] == 24 else torch.int16)
        state["step"] += 1
        (beta1, beta2), step, lr = group["betas"], state["step"], group["lr"]
        gradient = param.grad.float().view(-1, GROUP)
        m = decode_first(*state["m"]) * beta1 + gradient * (1 - beta1)
        v = decode_second(*state["v"]) * beta2 + gradient * gradient * (1 - beta2)
        weight = self.weights(param) * (1 - lr * group["weight_decay"])
        denominator = (v / (1 - beta2**step)).sqrt() + group["eps"]
        weight -= lr * (m / (1 - beta1**step) / denominator).view_as(param)
        param.copy_(weight)
        if "error" in state:
            largest = torch.iinfo(state["error"].dtype).max
            share = ((weight - param.float()) / half_step(param)).clamp(-1, 1) * largest
            state["error"].copy_(torch.copysign((share.abs() + 0.5).floor(), share))
        state["m"], state["v"] = encode_first(m), encode_second(v)

    def weights(self, param: Tensor) -> Tensor:
        """With all the precision that is kept of them, in fp32."""
        error = self.state[param].get("error")
        if error is None:
            return param.detach().float().clone()
        return param.detach().float() + error.float() / torch.iinfo(error.dtype).max * half_step(param)


def half_step(param: Tensor) -> Tensor:
    """Half the distance of bf16 numbers to their next larger neighbours."""
    exponent = (param.detach().view(torch.int16).to(torch.int32) >> 7 & 0xFF).clamp(min=1) - 127
    return torch.ldexp(torch.ones_like(param, dtype=torch.float32), exponent - 8)


def encode_first(m: Tensor) -> tuple[Tensor, Tensor]:
    """int8 ``[groups, 32]`` and fp16 ``[groups, 1]``."""
    scale = m.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST)
    share = m / scale
    return (2 * share / (1 + share.abs()) * 127 + 0.5).floor().to(torch.int8), scale.half()


def decode_first(code: Tensor, scale: Tensor) -> Tensor:
    """The inverse of :func:`encode_first`."""
    share = code.float() / 127
    return share / (2 - share.abs()) * scale.float()


def encode_second(v: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 ``[groups, 32]`` and fp16 ``[groups, 1]``."""
    root = v.sqrt()
    scale = root.amax(dim=1, keepdim=True).clamp(min=SMALLEST)
    return (root / scale * 255 + 0.5).floor().to(torch.uint8), scale.half()


def decode_second(code: Tensor, scale: Tensor) -> Tensor:
    """The inverse of :func:`encode_second`."""
    return (code.float() / 255 * scale.float()).square()

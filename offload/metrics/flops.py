"""Model FLOPs utilisation (MFU): how much of the card's peak goes into the model's own arithmetic.

MFU is defined by Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section 4.1 and
appendix B (https://arxiv.org/abs/2204.02311): observed tokens per second, times the FLOPs that the model
needs per token, over the peak FLOP/s of the hardware. Only the FLOPs that the mathematics of the step asks
for are counted. A forward that activation checkpointing runs a second time is not progress and is not counted
(that would be HFU), and neither are the optimizer, the embedding look-up, norms and activation functions.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.plan.peaks import TERA, find_card


def peak_flops(device: torch.device | str) -> float | None:
    """Peak dense bf16 FLOP/s of a device; None where it is not known (a CPU, a card not in the table)."""
    device = torch.device(device)
    module: Any = getattr(torch, device.type, None)
    if device.type == "cpu" or not hasattr(module, "get_device_name"):
        return None
    card = find_card(module.get_device_name(device))
    return None if card is None else card.bf16_tflops * TERA


def flops_per_token(
    trainable: float,
    frozen: float = 0,
    *,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    seq_len: float,
    causal: bool = False,
) -> float:
    """FLOPs that one training step (forward and backward) needs per token.

    PaLM appendix B: ``6 N + 12 L H Q T``. A multiply-add is two FLOPs. Each weight is used once in the
    forward and twice in the backward, for the gradient of its input and for its own: 6 FLOPs per parameter
    and token. A frozen weight (LoRA's base model) needs no gradient of its own: 4. The second term is the
    product of queries with keys and of probabilities with values: 4 H Q T per layer in the forward, twice
    that in the backward.

    PaLM counts the whole T x T matrix although a causal model needs its lower half, and so does almost every
    published MFU; so do we unless ``causal=True``.

    Args:
        trainable: parameters with a gradient that are multiplied with every token
            (:func:`offload.models.size.matmul_parameters`).
        frozen: those without one.
        num_layers: L.
        num_heads: H, query heads.
        head_dim: Q.
        seq_len: T, tokens that a token may attend to; for packed data the mean length of the packed samples.
        causal: count the lower half of the attention matrix only.
    """
    attention = 12.0 * num_layers * num_heads * head_dim * seq_len
    return 6.0 * trainable + 4.0 * frozen + (attention / 2 if causal else attention)


def mfu(tokens_per_second: float, flops_per_token: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation, 0 to 1; None where the peak is not known.

    Args:
        tokens_per_second: tokens that are not padding.
        flops_per_token: see :func:`flops_per_token`.
        peak: FLOP/s, see :func:`peak_flops`.
    """
    return None if not peak else tokens_per_second * flops_per_token / peak

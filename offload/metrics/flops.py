"""Model FLOPs utilisation (MFU): how much of the card's peak goes into the model's own arithmetic.

MFU is defined by Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section 4.1 and
appendix B (https://arxiv.org/abs/2204.02311): observed tokens per second, times the FLOPs that the model
needs per token, over the peak FLOP/s of the hardware. Only the FLOPs that the mathematics of the step asks
for are counted. A forward that activation checkpointing runs a second time is not progress and is not counted
(that would be HFU), and neither are the optimizer, the embedding look-up, norms and activation functions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

TERA = 1e12


@dataclass(frozen=True)
class Card:
    """One row of the table of peaks.

    Attributes:
        name: the card.
        pattern: regular expression searched, ignoring case, in the device's name as torch reports it.
        bf16_tflops: dense bf16 matrix multiplication with fp32 accumulation, in 1e12 FLOP/s.
        source: where the number is from.
        note: how the number follows from the source, where the source does not print it as such.
    """

    name: str
    pattern: str
    bf16_tflops: float
    source: str
    note: str = ""


_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
_RTX_BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_COMPARE = "https://www.nvidia.com/en-us/geforce/graphics-cards/compare/"
_SPARSE = "half of the number printed, which is with 2:4 sparsity"
# GeForce cards accumulate bf16 products in fp32 at half the rate of fp16 with fp16 accumulation; PyTorch's
# matrix multiplications use fp32. An Ada GeForce's "AI TOPS" are fp8 with fp16 accumulation and sparsity:
# twice for fp8, twice for the accumulation, twice for sparsity. (RTX 4090: 1321 / 8 = 165.1, the whitepaper
# prints 165.2.)
_AI_TOPS_ADA = "AI TOPS / 8: {} are for fp8 with fp16 accumulation and 2:4 sparsity"

# The first row whose pattern matches wins: variants come before the card that they are a variant of. Laptop
# cards and cards whose peak no maker states are left out: no MFU is better than a wrong one.
PEAKS: tuple[Card, ...] = (
    Card("GeForce RTX 3090", r"RTX 3090(?! Ti)", 71.0, _GA102, "appendix A"),
    Card("GeForce RTX 4060 Ti", r"RTX 4060 Ti", 44.1, _COMPARE, _AI_TOPS_ADA.format(353)),
    Card("GeForce RTX 4070 Ti SUPER", r"RTX 4070 Ti SUPER", 88.2, _COMPARE, _AI_TOPS_ADA.format(706)),
    Card("GeForce RTX 4080", r"RTX 4080(?! SUPER)", 97.5, _ADA, "the 16 GB card"),
    Card("GeForce RTX 4080 SUPER", r"RTX 4080 SUPER", 104.5, _COMPARE, _AI_TOPS_ADA.format(836)),
    Card("GeForce RTX 4090", r"RTX 4090(?! D)", 165.2, _ADA),
    Card("GeForce RTX 5090", r"RTX 5090(?! D)", 209.5, _RTX_BLACKWELL),
    Card("GeForce RTX 5080", r"RTX 5080", 112.6, _RTX_BLACKWELL),
    Card("RTX A6000", r"RTX A6000", 154.8, _GA102, "appendix C"),
    Card(
        "RTX 6000 Ada",
        r"RTX 6000 Ada",
        364.2,
        "https://www.nvidia.com/en-us/products/workstations/rtx-6000/",
        "AI TOPS / 4: 1457 are for fp8 with 2:4 sparsity",
    ),
    Card("A10", r"\bA10\b", 125.0, "https://www.nvidia.com/en-us/data-center/products/a10-gpu/"),
    Card("A40", r"\bA40\b", 149.7, "https://www.nvidia.com/en-us/data-center/a40/"),
    Card("A100", r"\bA100\b", 312.0, "https://www.nvidia.com/en-us/data-center/a100/"),
    Card("L4", r"\bL4\b", 121.0, "https://www.nvidia.com/en-us/data-center/l4/", _SPARSE),
    Card("L40S", r"\bL40S\b", 362.05, "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"),
    Card("L40", r"\bL40\b", 181.05, "https://www.nvidia.com/en-us/data-center/l40/"),
    Card("H100 NVL", r"\bH100 NVL\b", 835.5, "https://www.nvidia.com/en-us/data-center/h100/", _SPARSE),
    Card("H100 PCIe", r"\bH100 PCIe\b", 756.0, "https://www.nvidia.com/en-us/data-center/h100/", _SPARSE),
    Card("H100 SXM", r"\bH100\b", 989.4, "https://www.nvidia.com/en-us/data-center/h100/", _SPARSE),
    Card("H200 NVL", r"\bH200 NVL\b", 835.5, "https://www.nvidia.com/en-us/data-center/h200/", _SPARSE),
    Card("H200 SXM", r"\bH200\b", 989.4, "https://www.nvidia.com/en-us/data-center/h200/", _SPARSE),
    Card(
        "B200",
        r"\bB200\b",
        2250.0,
        "https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703",
        _SPARSE,
    ),
    Card(
        "Instinct MI210",
        r"\bMI210\b",
        181.0,
        "https://www.amd.com/en/products/accelerators/instinct/mi200/mi210.html",
    ),
    # Some drivers call both cards "MI250X / MI250"; the MI250 is slower.
    Card(
        "Instinct MI250X",
        r"\bMI250X\b(?! */)",
        191.5,
        "https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html",
        "half of the module's 383: to torch each of its two dies is a device",
    ),
    Card(
        "Instinct MI300X",
        r"\bMI300X\b",
        1307.4,
        "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    ),
)


def find_card(device_name: str) -> Card | None:
    """The row for a device name such as ``torch.cuda.get_device_name()`` gives; None if there is none."""
    if re.search(r"laptop|max-q|mobile|\bMIG\b", device_name, re.IGNORECASE):
        return None  # lower clocks under the same name, or a slice of a card
    for card in PEAKS:
        if re.search(card.pattern, device_name, re.IGNORECASE):
            return card
    return None


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

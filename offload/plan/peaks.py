"""What the makers of cards state of their arithmetic: dense bf16 products with fp32 accumulation."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
_AI_TOPS_BLACKWELL = "AI TOPS / 16: {} are for fp4 with fp16 accumulation and 2:4 sparsity"
_CORES = "4 FLOPs for each of {} cores at a boost clock of {} GHz"

# The first row whose pattern matches wins: variants come before the card that they are a variant of. Laptop
# cards and cards whose peak no maker states are left out: no MFU is better than a wrong one.
PEAKS: tuple[Card, ...] = (
    Card("GeForce RTX 3060", r"RTX 3060(?! Ti)", 25.5, _COMPARE, _CORES.format(3584, 1.78)),
    Card("GeForce RTX 3080 Ti", r"RTX 3080 Ti", 68.2, _COMPARE, _CORES.format(10240, 1.665)),
    Card("GeForce RTX 3080", r"RTX 3080", 59.5, _GA102, "appendix A, the 10 GB card"),
    Card("GeForce RTX 3090 Ti", r"RTX 3090 Ti", 80.0, _COMPARE, _CORES.format(10752, 1.86)),
    Card("GeForce RTX 3090", r"RTX 3090", 71.0, _GA102, "appendix A"),
    Card("GeForce RTX 4060 Ti", r"RTX 4060 Ti", 44.1, _COMPARE, _AI_TOPS_ADA.format(353)),
    Card("GeForce RTX 4060", r"RTX 4060", 30.2, _COMPARE, _AI_TOPS_ADA.format(242)),
    Card("GeForce RTX 4070 SUPER", r"RTX 4070 SUPER", 71.0, _COMPARE, _AI_TOPS_ADA.format(568)),
    Card("GeForce RTX 4070 Ti SUPER", r"RTX 4070 Ti SUPER", 88.2, _COMPARE, _AI_TOPS_ADA.format(706)),
    Card("GeForce RTX 4070 Ti", r"RTX 4070 Ti", 80.1, _COMPARE, _AI_TOPS_ADA.format(641)),
    Card("GeForce RTX 4070", r"RTX 4070", 58.2, _COMPARE, _AI_TOPS_ADA.format(466)),
    Card("GeForce RTX 4080", r"RTX 4080(?! SUPER)", 97.5, _ADA, "the 16 GB card"),
    Card("GeForce RTX 4080 SUPER", r"RTX 4080 SUPER", 104.5, _COMPARE, _AI_TOPS_ADA.format(836)),
    Card("GeForce RTX 4090", r"RTX 4090(?! D)", 165.2, _ADA),
    Card("GeForce RTX 5090", r"RTX 5090(?! D)", 209.5, _RTX_BLACKWELL),
    Card("GeForce RTX 5080", r"RTX 5080", 112.6, _RTX_BLACKWELL),
    Card("GeForce RTX 5060 Ti", r"RTX 5060 Ti", 47.4, _COMPARE, _AI_TOPS_BLACKWELL.format(759)),
    Card("GeForce RTX 5070 Ti", r"RTX 5070 Ti", 87.9, _COMPARE, _AI_TOPS_BLACKWELL.format(1406)),
    Card("GeForce RTX 5070", r"RTX 5070", 61.7, _COMPARE, _AI_TOPS_BLACKWELL.format(988)),
    Card("RTX A4000", r"RTX A4000", 76.7, "https://www.nvidia.com/en-us/design-visualization/rtx-a4000/", _SPARSE),
    Card("RTX A5000", r"RTX A5000", 111.1, "https://www.nvidia.com/en-us/design-visualization/rtx-a5000/", _SPARSE),
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

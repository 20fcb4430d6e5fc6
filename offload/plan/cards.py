"""Known cards by name: the memory that a process can have on each, how fast that is, and the link to the host."""

from __future__ import annotations

import re
from dataclasses import dataclass

from offload.component import nearest
from offload.errors import UserError
from offload.plan import peaks

GIB = 2**30

SHARE, KEPT = 0.97, 0.37
"""Of a card's nominal memory, what torch reports as its total where nobody was seen to report it, and the GiB that the
driver keeps at least: the cards below without error correction report all but 0.36 to 0.4 GiB up to 24 GiB (7.63 of 8,
11.63 of 12), and 0.98 of 32."""


@dataclass(frozen=True)
class Card:
    """A card that trains.

    Attributes:
        name: as its maker writes it.
        nominal: GB on the box; GiB in fact.
        source: of ``nominal``, or of ``reported``.
        bandwidth: of its memory, GB/s.
        link: PCIe generation and lanes.
        reported: GiB, what torch reports as the total; None where nobody was seen to say it.
        sheet: its maker's page, where that is not ``source``.
    """

    name: str
    nominal: int
    source: str
    bandwidth: int
    link: tuple[int, int] = (4, 16)
    reported: float | None = None
    sheet: str = ""

    @property
    def flops(self) -> float:
        """Of dense bf16 products with fp32 accumulation, a second, as its maker states them."""
        row = peaks.find_card(self.name)
        assert row is not None
        return row.bf16_tflops * peaks.TERA

    @property
    def memory(self) -> int:
        """Bytes for all processes together."""
        return int((self.reported or min(self.nominal * SHARE, self.nominal - KEPT)) * GIB)


_GEFORCE = "https://www.nvidia.com/en-us/geforce/graphics-cards/{}/"
_CENTRE = "https://www.nvidia.com/en-us/data-center/{}/"
_STATION = "https://www.nvidia.com/en-us/design-visualization/{}/"
_TOTALS = "torch's total on such a card, as its messages have it; of which machine was not kept"

CARDS = (
    Card("RTX 3060 12GB", 12, _TOTALS, 360, reported=11.63, sheet=_GEFORCE.format("30-series/rtx-3060-3060ti")),
    Card("RTX 3080 10GB", 10, _GEFORCE.format("30-series/rtx-3080-3080ti"), 760),
    Card("RTX 3080 Ti", 12, _GEFORCE.format("30-series/rtx-3080-3080ti"), 912),
    Card("RTX 3090", 24, _GEFORCE.format("30-series/rtx-3090-3090ti"), 936),
    Card("RTX 3090 Ti", 24, _GEFORCE.format("30-series/rtx-3090-3090ti"), 1008),
    Card("RTX 4060", 8, _TOTALS, 272, link=(4, 8), reported=7.63, sheet=_GEFORCE.format("40-series/rtx-4060-4060ti")),
    Card("RTX 4060 Ti 8GB", 8, _GEFORCE.format("40-series/rtx-4060-4060ti"), 288, link=(4, 8)),
    Card("RTX 4060 Ti 16GB", 16, _GEFORCE.format("40-series/rtx-4060-4060ti"), 288, link=(4, 8)),
    Card("RTX 4070", 12, _GEFORCE.format("40-series/rtx-4070-family"), 504),
    Card("RTX 4070 SUPER", 12, _GEFORCE.format("40-series/rtx-4070-family"), 504),
    Card("RTX 4070 Ti", 12, _GEFORCE.format("40-series/rtx-4070-family"), 504),
    Card("RTX 4070 Ti SUPER", 16, _GEFORCE.format("40-series/rtx-4070-family"), 672),
    Card("RTX 4080", 16, _GEFORCE.format("40-series/rtx-4080-family"), 717),
    Card("RTX 4080 SUPER", 16, _TOTALS, 736, reported=15.60, sheet=_GEFORCE.format("40-series/rtx-4080-family")),
    Card(
        "RTX 4090",
        24,
        "https://github.com/ali-vilab/VGen/issues/104",
        1008,
        reported=23.64,
        sheet=_GEFORCE.format("40-series/rtx-4090"),
    ),
    Card("RTX 5060 Ti 8GB", 8, _GEFORCE.format("50-series/rtx-5060-family"), 448, link=(5, 8)),
    Card("RTX 5060 Ti 16GB", 16, _GEFORCE.format("50-series/rtx-5060-family"), 448, link=(5, 8)),
    Card("RTX 5070", 12, _GEFORCE.format("50-series/rtx-5070-family"), 672, link=(5, 16)),
    Card("RTX 5070 Ti", 16, _GEFORCE.format("50-series/rtx-5070-family"), 896, link=(5, 16)),
    Card("RTX 5080", 16, _GEFORCE.format("50-series/rtx-5080"), 960, link=(5, 16)),
    Card("RTX 5090", 32, _TOTALS, 1792, link=(5, 16), reported=31.36, sheet=_GEFORCE.format("50-series/rtx-5090")),
    Card(
        "RTX A4000",
        16,
        "https://github.com/DengKaiCQ/VGGT-Long/issues/6",
        448,
        reported=15.61,
        sheet=_STATION.format("rtx-a4000"),
    ),
    Card(
        "RTX A5000",
        24,
        "https://github.com/Magicboomliu/Accelerator-Simple-Template/issues/7",
        768,
        reported=23.67,
        sheet=_STATION.format("rtx-a5000"),
    ),
    Card("RTX A6000", 48, _STATION.format("rtx-a6000"), 768),
    # With error correction on, as it was there.
    Card(
        "RTX 6000 Ada",
        48,
        "https://github.com/DINGYANB/MTVCrafter/issues/21",
        960,
        reported=44.43,
        sheet=_STATION.format("rtx-6000"),
    ),
    # These have error correction on unless told otherwise.
    Card("L4", 24, "https://github.com/ArcInstitute/evo2/issues/190", 300, reported=22.03, sheet=_CENTRE.format("l4")),
    Card("L40S", 48, _TOTALS, 864, reported=44.40, sheet=_CENTRE.format("l40s")),
    Card(
        "A10",
        24,
        "https://github.com/zai-org/CogVLM/issues/236",
        600,
        reported=21.99,
        sheet=_CENTRE.format("products/a10-gpu"),
    ),
    Card(
        "A100 40GB",
        40,
        "https://github.com/TianheWu/CoSeR/issues/10",
        1555,
        reported=39.50,
        sheet=_CENTRE.format("a100"),
    ),
    Card(
        "A100 80GB",
        80,
        "https://github.com/HiDream-ai/VAREdit/issues/6",
        2039,
        reported=79.25,
        sheet=_CENTRE.format("a100"),
    ),
    Card("H100", 80, _TOTALS, 3350, link=(5, 16), reported=79.10, sheet=_CENTRE.format("h100")),
    Card("H200", 141, _CENTRE.format("h200"), 4800, link=(5, 16)),
)


def find_card(name: str) -> Card:
    """The card that a name means, however it is written: ``RTX 4070 Ti SUPER``, ``4070tisuper``, ``NVIDIA L4``.

    Raises:
        UserError: there is no such card here; it names the nearest.
    """
    known = {_plain(card.name): card for card in CARDS}
    wanted = _plain(name)
    if wanted in known:
        return known[wanted]
    sizes = [card for plain, card in known.items() if wanted and re.fullmatch(rf"{wanted}\d+gb", plain)]
    if len(sizes) == 1:
        return sizes[0]
    if sizes:
        raise UserError(f"--gpu: there are {' and '.join(card.name for card in sizes)}: say which")
    near = nearest(wanted, known)
    hint = f"did you mean {known[near].name!r}? " if near else ""
    raise UserError(f"--gpu: {name!r} is no card that is known here; {hint}--vram 16GiB takes any amount of memory")


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for word in ("nvidia", "geforce", "rtx", "tensorcore", "generation"):
        plain = plain.replace(word, "")
    return plain

"""Machines to predict for: a card of the table in a host, or this one as `tune doctor` measured it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from offload.plan.cards import CARDS, Card
from offload.plan.efficiency import FP32, HOST, LINK, MEMORY, SHARES
from offload.plan.workload import GB, LAUNCH, PIN, Machine

LANES = {3: 0.985 * GB, 4: 1.969 * GB, 5: 3.938 * GB}
"""Bytes a second of one lane by PCIe generation: 8, 16 and 32 GT/s in a code of 128 of 130 bits
(https://pcisig.com/faq?field_category_value%5B%5D=pci_express_3.0)."""

DESKTOP, SERVER = 51.2 * GB, 307.2 * GB
"""Of the host's memory where nobody tells: two channels of DDR4-3200, eight of DDR5-4800."""

WORKSTATION, TWO_SOCKETS = 204.8 * GB, 614.4 * GB
"""The same of a host of several cards: eight channels of DDR4-3200, twice eight of DDR5-4800."""

PACKED_BYTES = {"packed int8 split": 14.06, "packed int8 split24": 12.06, "packed bf16 split": 18.0,
                "packed fp32 split": 26.0}  # fmt: skip
"""Host memory that the update of a bf16 parameter reads and writes, in bytes: gradient once, the rest twice."""


IN_SERVERS = ("A100", "Hopper")
"""Kinds of cards that come in servers, and with NVLink."""


def kind_of(card: Card) -> str:
    """One of :data:`SHARES`."""
    for name, (pattern, _) in SHARES.items():
        if re.search(pattern, card.name):
            return name
    raise LookupError(card.name)


def machine_of_card(card: Card, *, ram_bandwidth: float | None = None, fp32: bool = False, cards: int = 1) -> Machine:
    """A card in a host.

    Args:
        card: of the table.
        ram_bandwidth: of the host's memory as its modules are sold, bytes per second; None: a desktop's, or a server's
            for a card of a data centre.
        fp32: products are in fp32, not bf16.
        cards: that the host has.
    """
    kind = kind_of(card)
    generation, lanes = card.link
    link = LINK * LANES[generation] * lanes
    assumed = (SERVER, TWO_SOCKETS) if kind in IN_SERVERS else (DESKTOP, WORKSTATION)
    host = ram_bandwidth or assumed[cards > 1]
    flops = SHARES[kind][1] * card.flops / (FP32[kind] if fp32 else 1.0)
    return Machine(card.name, flops, link, link, MEMORY * card.bandwidth * GB, HOST * host, PIN, LAUNCH)


def machine_of_rates(name: str, rates: Mapping[str, Any], card: Card | None) -> Machine:
    """What was measured on a machine with an accelerator (:mod:`offload.plan.rates`).

    Products reach what they were measured to reach: a kernel alone, which heat and power hold back in training. Where
    the card is known its published share is kept.

    Args:
        name: of the device.
        rates: by name.
        card: of the table; None for one that is not there.
    """
    flops = float(rates["matmul"])
    if card is not None:
        flops = min(flops, SHARES[kind_of(card)][1] * card.flops)
    # Both directions at once, as training uses them.
    both = float(rates["each_of_both"])
    packed = rates.get("cpu_adamw", {})
    updates = [PACKED_BYTES[kind] * rate for kind, rate in packed.items() if kind in PACKED_BYTES]
    host = min([float(rates["host_copy"]), *updates[:1]])
    locking = rates.get("page_locking") or {}
    pin = 2**30 / locking["seconds_per_gib"] if locking.get("seconds_per_gib") else PIN
    up, down = max(both, 0.5 * float(rates["up"])), max(both, 0.5 * float(rates["down"]))
    # The CPU's update may be bounded by its cores, and what the link was measured at it has of the memory.
    modules = max(float(rates["host_copy"]), up + down)
    return Machine(name, flops, up, down, float(rates["device_copy"]), host, pin, LAUNCH, modules)


def card_named(device_name: str) -> Card | None:
    """The card that torch names so; of two sizes of memory the first. None where it is not in the table."""
    if re.search(r"laptop|max-q|\bMIG\b", device_name, re.IGNORECASE):
        return None
    for card in CARDS:
        if re.search(rf"\b{re.escape(_stem(card.name))}\b(?! *(Ti|SUPER|D)\b)", device_name):
            return card
    return None


def _stem(name: str) -> str:
    return re.sub(r" \d+GB$", "", name)

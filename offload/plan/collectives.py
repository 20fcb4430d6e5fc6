"""Several cards in one host or more: how they reach each other, what that takes, and what they share."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from offload.plan.cards import Card
from offload.plan.machines import kind_of
from offload.plan.workload import DATA_CENTRE, GB, LAUNCH, MACHINES, PIN, Machine
from offload.simulation.sharing import COLLECTIVE, Sharing

THROUGH_HOST = 0.7
"""Of what a copy gets of the link, NCCL's bus bandwidth where cards cannot reach each other's memory and every byte is
written to host memory by one and read by the next. Four RTX 5090 on PCIe 5.0 reach 35 GB/s of 50
(https://github.com/NVIDIA/nccl/issues/1639). Eight in the same host reach 28 GB/s: 75 % of the data sheet's 614 GB/s of
its 16 channels of DDR5-4800 leave 28.8 for each to be written and read."""

NVLINK = 0.8
"""The same of NVLink's data sheet, an assumption; an all-gather of 70B weights takes 1.4 % of a step here."""


NETWORK = 0.8
"""The same of what a host's adapters carry each way. Two hosts with eight of 100 Gbit/s reached 75 GB/s, which NCCL's
authors found a little low (https://github.com/NVIDIA/nccl/issues/495)."""

ETHERNET = 1.25 * GB
"""Bytes a second each way between hosts whose cards have no NVLink, where nobody tells: 10 Gbit/s, an assumption."""


@dataclass(frozen=True)
class System:
    """Cards in one host, or in several alike.

    Attributes:
        name: what tables call it.
        machine: one card, with the link and the host's memory to itself.
        bus: bytes per second that each card sends, and receives, in a collective (bus bandwidth:
            https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
        through_host: collectives go over the links to the host, and through its memory.
        hosts: number of them.
        network: bytes per second that collectives send, and receive, between one host and the others.
    """

    name: str
    machine: Machine
    bus: float
    through_host: bool
    hosts: int = 1
    network: float = math.inf

    def rank(self, ranks: int) -> Machine:
        """One of so many cards of a host: its memory bandwidth is divided among them."""
        return dataclasses.replace(self.machine, host=self.machine.host / ranks)

    def bus_of(self, rings: int) -> float:
        """Bytes per second that each card of a ring sends, and receives.

        A ring that goes through several hosts enters and leaves each of them once, so that what its slowest connection
        gives, a card's or the network's, is what all of it gets.

        Args:
            rings: that leave each host at the same time; 0 for one within a host.
        """
        return self.bus if not rings else min(self.bus, self.network / rings)

    def seconds(self, collective: str, nbytes: int, ranks: int, *, rings: int = 0) -> float:
        """Of a collective with nothing beside it but its likes.

        Args:
            collective: torch's name for it.
            nbytes: of the whole tensor: what an all-gather makes, what a reduce-scatter is given.
            ranks: that take part.
            rings: as of :meth:`bus_of`.
        """
        sent = nbytes * (ranks - 1) / ranks  # in a ring, and received
        return (2 if collective == "all_reduce" else 1) * sent / self.bus_of(rings)

    def shares(self, ranks: int, *, rings: int = 0) -> dict[str, float]:
        """What collectives take of each direction of a rank's link, and of its share of the host's memory; ``ranks`` of
        a host, ``rings`` as of :meth:`bus_of`."""
        machine, bus = self.rank(ranks), self.bus_of(rings)
        if not self.through_host:
            return {"up": 0.0, "down": 0.0, "host": 0.0}
        return {"up": bus / machine.up, "down": bus / machine.down, "host": 2 * bus / machine.host}

    def sharing(self, ranks: int) -> Sharing:
        """What one rank's copies, updates on the CPU and collectives use together, while the others do the same."""
        machine = self.rank(ranks)
        # One communicator does one thing at a time, whatever streams its work is queued on.
        collective = {"collectives": 1.0, **{name: share for name, share in self.shares(ranks).items() if share}}
        return Sharing(
            {
                "up": {"up": 1.0, "host": machine.up / machine.host},
                "down": {"down": 1.0, "host": machine.down / machine.host},
                "host": {"host": 1.0},
                COLLECTIVE: collective,
            }
        )


NVLINKS = {"A100": 300 * GB, "Hopper": 450 * GB}
"""Bytes a second each way of a card's NVLinks together (https://www.nvidia.com/en-us/data-center/nvlink/)."""


ADAPTERS = {"A100": 25 * GB, "Hopper": 50 * GB}
"""Bytes a second each way of the network adapter that a card's server has for each card, where nobody tells: 200 Gbit/s
in a DGX A100, 400 in a DGX H100 (https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html)."""


def network_of(card: Card | None, cards: int) -> float:
    """Bytes per second each way between a host and the others, as it is assumed.

    Args:
        card: of the hosts.
        cards: of each.
    """
    adapter = None if card is None else ADAPTERS.get(kind_of(card))
    return ETHERNET if adapter is None else cards * adapter


def system_of(machine: Machine, card: Card | None, *, hosts: int = 1, network: float = math.inf) -> System:
    """Several cards of one kind.

    Args:
        machine: one of them, with the host's memory to itself.
        card: its row of the table; None for one that is not there, whose collectives go through the host.
        hosts: that have them.
        network: bytes per second each way that a host's adapters carry.
    """
    link = None if card is None else NVLINKS.get(kind_of(card))
    between = NETWORK * network if hosts > 1 else math.inf
    if link is None:
        copied = min(machine.up, machine.down)  # what a card is sent, it sends on
        return System(machine.name, machine, THROUGH_HOST * copied, True, hosts, between)
    return System(machine.name, machine, NVLINK * link, False, hosts, between)


_RTX4090 = dataclasses.replace(MACHINES["rtx4090"], name="RTX 4090, 8 channels of DDR4-3200", host=204.8 * GB * 0.75)

# https://resources.nvidia.com/en-us-dgx-systems/ai-enterprise-dgx: two processors of eight channels each.
_H100 = Machine(
    "H100, 16 channels of DDR5-4800", 989e12 * DATA_CENTRE, 50 * GB, 50 * GB, 3350 * GB * 0.85, 614.4 * GB * 0.75, PIN,
    LAUNCH,
)  # fmt: skip

SYSTEMS = {
    "rtx4090": System("RTX 4090, PCIe 4.0 through the host", _RTX4090, THROUGH_HOST * _RTX4090.up, True),
    "h100": System("H100, NVLink", _H100, NVLINK * 450 * GB, False),
}

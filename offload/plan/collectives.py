"""Several cards in one host: how they reach each other, what that takes, and what they share."""

from __future__ import annotations

import dataclasses
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


@dataclass(frozen=True)
class System:
    """Cards in one host.

    Attributes:
        name: what tables call it.
        machine: one card, with the link and the host's memory to itself.
        bus: bytes per second that each card sends, and receives, in a collective (bus bandwidth:
            https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
        through_host: collectives go over the links to the host, and through its memory.
    """

    name: str
    machine: Machine
    bus: float
    through_host: bool

    def rank(self, ranks: int) -> Machine:
        """One of so many cards: the host's memory bandwidth is divided among them."""
        return dataclasses.replace(self.machine, host=self.machine.host / ranks)

    def seconds(self, collective: str, nbytes: int, ranks: int) -> float:
        """Of a collective with nothing beside it.

        Args:
            collective: torch's name for it.
            nbytes: of the whole tensor: what an all-gather makes, what a reduce-scatter is given.
            ranks: that take part.
        """
        sent = nbytes * (ranks - 1) / ranks  # in a ring, and received
        return (2 if collective == "all_reduce" else 1) * sent / self.bus

    def shares(self, ranks: int) -> dict[str, float]:
        """What collectives take of each direction of a rank's link, and of its share of the host's memory."""
        machine = self.rank(ranks)
        if not self.through_host:
            return {"up": 0.0, "down": 0.0, "host": 0.0}
        return {"up": self.bus / machine.up, "down": self.bus / machine.down, "host": 2 * self.bus / machine.host}

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


def system_of(machine: Machine, card: Card | None) -> System:
    """Several cards of one kind in a host.

    Args:
        machine: one of them, with the host's memory to itself.
        card: its row of the table; None for one that is not there, whose collectives go through the host.
    """
    link = None if card is None else NVLINKS.get(kind_of(card))
    if link is None:
        return System(machine.name, machine, THROUGH_HOST * machine.up, True)
    return System(machine.name, machine, NVLINK * link, False)


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

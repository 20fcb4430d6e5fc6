"""By which of a host's network interfaces its processes reach those of other hosts, and how fast these are."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"
"""Where gloo is told; by itself it takes the address that the host's own name leads to."""

INFINIBAND = Path("/sys/class/infiniband")
"""InfiniBand's and RoCE's adapters, all of which NCCL uses where there are any."""


def choose(store: Any) -> None:
    """Tell gloo the interface where a host's own name leads back to itself, as Debian writes it into ``/etc/hosts``
    (127.0.1.1): nobody else could answer. What the user has set stays.

    Args:
        store: that all processes share, of this life of theirs.
    """
    host = os.environ.get("GROUP_RANK")  # torchrun's number of this one; 0 has MASTER_ADDR
    if host is None or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return
    if host != "0":
        mine = address_towards(os.environ["MASTER_ADDR"])
        if os.environ.get("LOCAL_RANK") == "0":
            store.set(f"address/{host}", mine)
    if VARIABLE in os.environ or not leads_home(socket.gethostname()):
        return
    if host == "0":
        mine = address_towards(store.get("address/1").decode())
    if name := interface_of(mine):
        os.environ[VARIABLE] = name


def leads_home(name: str) -> bool:
    """Whether a host's name leads to its loopback interface, or nowhere, which gloo takes for the same."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return ipaddress.ip_address(str(found[0][4][0])).is_loopback


def address_towards(host: str) -> str:
    """This host's address on the way to another one, which is sent nothing; empty where there is no way."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect(address)
            return str(asked.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str | None:
    """The name of this host's interface with an address; None for none, and for the loopback interface."""
    if not address or ipaddress.ip_address(address).is_loopback:
        return None
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if any(each.address == address for each in addresses)), None)


def speed() -> float | None:
    """Bytes per second each way of the adapters between this host and the others, as the system tells it: of those that
    NCCL uses, or of the interface that leads to the others; None where it does not, as a virtual machine's."""
    gbits = sum(map(_port_gbits, INFINIBAND.glob("*/ports/*")))
    if not gbits:
        names = os.environ.get(VARIABLE) or interface_of(address_towards(os.environ.get("MASTER_ADDR", ""))) or ""
        found = psutil.net_if_stats()
        gbits = sum(found[name].speed / 1e3 for name in names.split(",") if name in found)
    return gbits * 1e9 / 8 or None


def _port_gbits(port: Path) -> float:
    try:
        is_active = "ACTIVE" in (port / "state").read_text()  # 4: ACTIVE
        return float((port / "rate").read_text().split()[0]) if is_active else 0.0  # 400 Gb/sec (4X NDR)
    except (OSError, ValueError, IndexError):
        return 0.0

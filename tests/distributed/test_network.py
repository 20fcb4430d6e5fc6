"""Which interface gloo is told; ``test_hosts.py`` has two hosts that need it."""

from __future__ import annotations

import socket
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from offload.cli import torchrun
from offload.distributed import network

Address = namedtuple("Address", "address")
INTERFACES = {"lo": [Address("127.0.0.1")], "eth0": [Address("02:00:00:00:00:01"), Address("10.0.0.1")]}


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two hosts, with two processes each, whose own name leads to itself."""
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "first"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(network.VARIABLE, "")
    monkeypatch.delenv(network.VARIABLE)
    monkeypatch.setattr(network, "leads_home", lambda name: True)
    monkeypatch.setattr(network, "address_towards", lambda host: {"first": "10.0.0.1", "10.0.0.2": "10.0.0.1"}[host])
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: INTERFACES)


@pytest.mark.parametrize("group", ["0", "1"])
def test_gloo_is_told_the_interface_that_leads_to_the_others(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", group)
    store = dist.HashStore()
    if group == "0":
        store.set("address/1", "10.0.0.2")
    network.choose(store)
    assert network.os.environ[network.VARIABLE] == "eth0"
    assert store.get("address/1") == (b"10.0.0.2" if group == "0" else b"10.0.0.1")


def test_a_host_says_its_address_under_its_own_number_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "2")
    store = dist.HashStore()
    for local_rank in ("1", "0"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        network.choose(store)
        assert store.check(["address/2"]) is (local_rank == "0") and not store.check(["address/1"])
    assert store.get("address/2") == b"10.0.0.1"


@pytest.mark.parametrize(
    "variables",
    [{network.VARIABLE: "mine"}, {"LOCAL_WORLD_SIZE": "4"}, {"MASTER_ADDR": "10.0.0.2", "name leads": "elsewhere"}],
)
def test_what_is_set_or_found_stays(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GROUP_RANK": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(network, "leads_home", lambda name: "name leads" not in variables)
    network.choose(dist.HashStore())
    assert network.os.environ.get(network.VARIABLE) == variables.get(network.VARIABLE)


@pytest.mark.parametrize(("found", "is_home"), [("127.0.1.1", True), ("10.0.0.1", False), (None, True)])
def test_where_a_host_s_name_leads(found: str | None, is_home: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def look_up(*_: object, **__: object) -> list[tuple[object, ...]]:
        if found is None:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert network.leads_home("a") is is_home


def test_loopback_leads_to_nobody() -> None:
    assert network.interface_of("127.0.0.1") is None and network.interface_of("10.0.0.9") is None
    assert network.interface_of("10.0.0.1") == "eth0"


@pytest.mark.parametrize(
    ("given", "endpoint", "expected"),
    [
        ("", "10.0.0.1:29500", "timeout=900,join_timeout=900,read_timeout=900,is_host=true"),
        ("timeout=5", "10.0.0.2:29500", "timeout=5,join_timeout=5,read_timeout=5"),
        # Where torch finds that by itself, a second launcher of this host that comes to it joins the first.
        ("", "127.0.0.1:29500", "timeout=900,join_timeout=900,read_timeout=900"),
        ("join_timeout=7,is_host=0", "10.0.0.1", "join_timeout=7,is_host=0,timeout=900,read_timeout=900"),
    ],
)
def test_how_long_hosts_wait_and_which_one_they_meet_at(given: str, endpoint: str, expected: str) -> None:
    arguments = SimpleNamespace(rdzv_conf=given, rdzv_backend="c10d", rdzv_endpoint=endpoint)
    assert torchrun._meeting(arguments) == expected
    assert torchrun._meeting(SimpleNamespace(rdzv_conf=given, rdzv_backend="static")).startswith(given or "timeout=900")


Stats = namedtuple("Stats", "speed")


@pytest.mark.parametrize(("variable", "gbits"), [(None, 25), ("eth1", 10), ("eth0,eth1", 35), ("veth0", None)])
def test_the_speed_of_the_interface_that_leads_to_the_others(
    variable: str | None, gbits: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(network, "INFINIBAND", tmp_path)
    stats = {"lo": Stats(0), "eth0": Stats(25_000), "eth1": Stats(10_000), "veth0": Stats(0)}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    if variable is not None:
        monkeypatch.setenv(network.VARIABLE, variable)
    assert network.speed() == (None if gbits is None else gbits * 1e9 / 8)


def test_the_speed_of_all_active_infiniband_adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "INFINIBAND", tmp_path)
    ports = {"mlx5_0": ("4: ACTIVE", "400 Gb/sec (4X NDR)"), "mlx5_1": ("4: ACTIVE", "200 Gb/sec (4X HDR)"),
             "mlx5_2": ("1: DOWN", "10 Gb/sec (4X SDR)"), "mlx5_3": ("4: ACTIVE", "")}  # fmt: skip
    for name, (state, rate) in ports.items():
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    assert network.speed() == 600e9 / 8

"""``tune run --nnodes 2`` on two hosts: network and process namespaces of this machine, one shared folder."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.distributed.test_failures import Job

pytestmark = pytest.mark.slow

NAMES = ("hosta", "hostb")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
MEETING = "--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint hosta:29500 --rdzv_id run"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Network:
    """Two hosts with a cable between them. What runs on one has its own name, processes and network.

    ``spaces`` are the names of their network namespaces.
    """

    def __init__(self, folder: Path) -> None:
        self.spaces = [f"{name}-{os.getpid()}" for name in NAMES]
        self.hosts = [folder / f"{name}.txt" for name in NAMES]
        self.name({name: dict(zip(NAMES, ADDRESSES, strict=True)) for name in NAMES})

    def name(self, known: dict[str, dict[str, str]]) -> None:
        """What each host knows of names."""
        for path, names in zip(self.hosts, known.values(), strict=True):
            path.write_text(
                "\n".join(f"{address} {name}" for name, address in {"localhost": "127.0.0.1", **names}.items()) + "\n"
            )

    def build(self) -> None:
        for space in self.spaces:
            ip("netns", "add", space)
        ends = [["netns", space, "type", "veth"] for space in self.spaces]
        ip("link", "add", "cable", *ends[0], "peer", "name", "cable", *ends[1][:2])
        for space, address in zip(self.spaces, ADDRESSES, strict=True):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", space, "link", "set", device, "up")

    def remove(self) -> None:
        for space in self.spaces:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)

    def cut(self) -> None:
        ip("-n", self.spaces[1], "link", "set", "cable", "down")

    def prefix(self, host: int) -> tuple[str, ...]:
        """Of a command that runs on a host."""
        enter = f'mount --bind {shlex.quote(str(self.hosts[host]))} /etc/hosts && hostname {NAMES[host]} && exec "$@"'
        return (
            *("ip", "netns", "exec", self.spaces[host]),
            *("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child=SIGTERM", "--mount-proc"),
            *("sh", "-c", enter, "sh"),
        )


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "mount", "hostname"))):
        pytest.skip("plays two hosts as root, with ip (iproute2), unshare and mount (util-linux), and hostname")
    network = Network(tmp_path)
    try:
        network.build()
    except subprocess.CalledProcessError as error:
        network.remove()
        pytest.skip(f"no network namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}")
    try:
        yield network
    finally:
        network.remove()


@contextlib.contextmanager
def jobs(network: Network, folder: Path, options: str, *overrides: str) -> Iterator[list[Job]]:
    """The same command on both hosts."""
    started: list[Job] = []
    try:
        for host, name in enumerate(NAMES):
            (folder / name).mkdir()
            where = f"output_dir={folder / 'run'}"
            started.append(Job(folder / name, f"{MEETING} {options}", *overrides, where, prefix=network.prefix(host)))
            started[-1].out = folder / "run"
        yield started
    finally:
        for job in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [*psutil.Process(job.process.pid).children(recursive=True), job.process]:
                    process.kill()
            job.process.wait()


def worker(job: Job) -> psutil.Process:
    """The process that trains there."""
    for process in psutil.Process(job.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "offload.cli.worker" in process.cmdline():
                return process
    raise AssertionError(job.log)


def train(both: list[Job]) -> None:
    first = both[0]
    first.wait_for(lambda: (first.out / "step_2").exists() and max(first.steps(), default=0) >= 3)
    assert all(job.process.poll() is None for job in both), [job.log for job in both]


def losses(job: Job) -> list[float]:
    return [json.loads(line)["loss"] for line in (job.out / "metrics.jsonl").read_text().splitlines()]


def test_they_train_as_two_processes_of_one_host(network: Network, tmp_path: Path) -> None:
    with jobs(network, tmp_path, "", "max_steps_per_epoch=4") as both:
        assert [job.wait() for job in both] == [0, 0], [job.log for job in both]
    alone = tmp_path / "alone"
    alone.mkdir()
    job = Job(alone, "--nproc_per_node 2", "max_steps_per_epoch=4")
    assert job.wait() == 0, job.log
    assert len(losses(job)) == 4 and losses(both[0]) == losses(job)
    ours, theirs = (load_file(run.out / "step_4/model-00001-of-00001.safetensors") for run in (both[0], job))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize("endpoint", ["hosta", ADDRESSES[0]])
def test_hosts_whose_own_names_lead_to_themselves(endpoint: str, network: Network, tmp_path: Path) -> None:
    """As Debian writes them into /etc/hosts: neither torchrun nor gloo would find the way by itself."""
    network.name(
        {"hosta": {"hosta": "127.0.1.1", "hostb": ADDRESSES[1]}, "hostb": {"hosta": ADDRESSES[0], "hostb": "127.0.1.1"}}
    )
    options = f"--rdzv_endpoint {endpoint}:29500"
    with jobs(network, tmp_path, options, "max_steps_per_epoch=2") as both:
        assert [job.wait() for job in both] == [0, 0], [job.log for job in both]


def test_a_killed_rank_is_named_on_both_hosts(network: Network, tmp_path: Path) -> None:
    with jobs(network, tmp_path, "", "max_steps_per_epoch=500") as both:
        train(both)
        worker(both[1]).kill()
        assert [job.wait() for job in both] == [1, 2], [job.log for job in both]
    (here,), (there,) = both[0].errors(), both[1].errors()
    assert here.startswith("error: rank 1 of 2 on hostb: the process (") and "it was killed, which hostb itself" in here
    assert there.startswith("error: rank 1 on hostb (process ") and "SIGKILL" in there


def test_they_go_on_from_the_checkpoint(network: Network, tmp_path: Path) -> None:
    with jobs(network, tmp_path, "--max-restarts 1", "max_steps_per_epoch=8") as both:
        train(both)
        worker(both[1]).kill()
        assert [job.wait() for job in both] == [0, 0], [job.log for job in both]
    assert "restart 1 of at most 1, after a process failed: going on from " in both[0].log
    assert both[0].steps() == list(range(1, 9))


def test_a_host_that_is_out_of_reach_ends_the_run(network: Network, tmp_path: Path) -> None:
    """Without a word: no connection is closed, and TCP would try for a quarter of an hour."""
    with jobs(network, tmp_path, "", "max_steps_per_epoch=500", "collective_timeout_minutes=0.2") as both:
        train(both)
        network.cut()
        since = time.monotonic()
        assert [job.wait() for job in both] == [1, 1], [job.log for job in both]
        assert time.monotonic() - since < 120
    (there,), (here, torchrun) = both[0].errors(), both[1].errors()
    assert there.startswith("error: rank 1 of 2 on hostb: ") and there.endswith("that host is down or out of reach")
    assert here.startswith("error: rank 0 of 2 on hosta: ") and "cannot be reached any more" in here
    assert torchrun == "error: torchrun: the host at hosta:29500 does not answer any more"
    assert list((tmp_path / "hostb").glob("torchelastic_*")) == []

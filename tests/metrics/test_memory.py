"""Memory metrics: the right counters, in GiB, under the same keys on every device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.metrics import memory
from offload.metrics.memory import GIB, host_peak_bytes, peak_memory, reset_peak

KEYS = {
    "memory/device_peak_active_gib",
    "memory/device_peak_allocated_gib",
    "memory/device_peak_reserved_gib",
    "memory/host_rss_peak_gib",
    "memory/host_pinned_gib",
}


def run(script: str, *arguments: str) -> list[int]:
    """Runs Python in a process of its own and returns the integers it prints."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return [int(word) for word in done.stdout.split()]


def test_on_the_cpu_the_device_keys_are_there_and_zero() -> None:
    values = peak_memory("cpu", pinned_bytes=3 * GIB // 2)
    assert set(values) == KEYS
    assert values["memory/device_peak_active_gib"] == 0.0
    assert values["memory/device_peak_allocated_gib"] == 0.0
    assert values["memory/device_peak_reserved_gib"] == 0.0
    assert values["memory/host_pinned_gib"] == 1.5
    assert values["memory/host_rss_peak_gib"] == pytest.approx(host_peak_bytes() / GIB, rel=0.05)
    reset_peak("cpu")


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_on_an_accelerator_the_allocator_is_asked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def statistics(device: torch.device) -> dict[str, int]:
        asked.append(("stats", device))
        return {
            "active_bytes.all.peak": 3 * GIB,
            "allocated_bytes.all.peak": 2 * GIB,
            "reserved_bytes.all.peak": 4 * GIB,
            "active_bytes.all.current": 7 * GIB,
        }

    module = getattr(torch, kind)
    monkeypatch.setattr(module, "memory_stats", statistics)
    monkeypatch.setattr(module, "reset_peak_memory_stats", lambda device: asked.append(("reset", device)))
    values = peak_memory(f"{kind}:1")
    assert values["memory/device_peak_active_gib"] == 3.0
    assert values["memory/device_peak_allocated_gib"] == 2.0
    assert values["memory/device_peak_reserved_gib"] == 4.0
    assert values["memory/host_rss_peak_gib"] > 0
    reset_peak(f"{kind}:1")
    assert asked == [("stats", torch.device(kind, 1)), ("reset", torch.device(kind, 1))]


# Bytes are touched, so that they are resident, and let go before the peak is read.
GROW = """
from offload.metrics.memory import host_peak_bytes, _getrusage_peak_bytes
before = host_peak_bytes()
block = bytearray(b"x") * (200 * 2**20)
del block
print(before, host_peak_bytes(), _getrusage_peak_bytes())
"""


def test_the_host_peak_is_a_peak_and_in_bytes() -> None:
    before, after, from_getrusage = run(GROW)
    assert 180 * 2**20 < after - before < 260 * 2**20
    assert 2**24 < before < 2**34, "a Python with torch: more than 16 MiB, less than 16 GiB"
    # More than ours where the process that started this one was bigger; the same unit in any case.
    assert 0.95 * after < from_getrusage < 2**36


def test_without_proc_the_peak_comes_from_getrusage(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    assert host_peak_bytes() == memory._getrusage_peak_bytes() > 2**24


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_getrusage_counts_kib_on_linux_and_bytes_on_macos(
    platform: str, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        ru_maxrss = 5_000_000

    usage: Callable[[int], Usage] = lambda who: Usage()  # noqa: E731
    monkeypatch.setattr("resource.getrusage", usage)
    monkeypatch.setattr(sys, "platform", platform)
    assert memory._getrusage_peak_bytes() == 5_000_000 * unit


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_peak_of_the_process_that_started_us_is_not_ours() -> None:
    """getrusage inherits it over exec: a run started by a big notebook would report the notebook's peak."""
    big_parent = """
import subprocess, sys
block = bytearray(b"x") * (700 * 2**20)
child = "from offload.metrics.memory import host_peak_bytes; print(host_peak_bytes())"
subprocess.run([sys.executable, "-c", child], check=True)
"""
    (peak,) = run(big_parent)
    assert peak < 600 * 2**20

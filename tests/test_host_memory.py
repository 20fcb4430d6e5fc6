"""What holds a process to less memory than the machine has: control groups as the kernel lays them out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import offload.host_memory as memory_of_host
from offload.host_memory import (
    GIB,
    HostMemory,
    Use,
    allowance,
    cgroup_limit,
    host_memory,
    oom_kills,
    use_of_this_process,
)


def group(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")
    return folder


def test_the_least_limit_of_all_groups_around_holds(tmp_path: Path) -> None:
    root = group(tmp_path / "cgroup")
    group(root / "slice", memory__max=8 * GIB, memory__current=3 * GIB, memory__stat=f"anon 5\ninactive_file {GIB}")
    group(root / "slice" / "job", memory__max="max", memory__current=GIB)
    (tmp_path / "self").write_text("0::/slice/job\n")
    assert cgroup_limit(root, tmp_path / "self") == (8 * GIB, 2 * GIB)


def test_in_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    root = group(tmp_path / "cgroup", memory__max=4 * GIB, memory__current=GIB)
    (tmp_path / "self").write_text("0::/docker/0123abc\n")
    assert cgroup_limit(root, tmp_path / "self") == (4 * GIB, GIB)


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    root = group(tmp_path / "cgroup")
    group(root / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=9 * GIB)
    group(root / "memory" / "job", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    (tmp_path / "self").write_text("4:cpu,cpuacct:/x\n7:memory:/job\n")
    assert cgroup_limit(root, tmp_path / "self") == (2 * GIB, GIB)


def test_no_limit_and_no_groups_are_none(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path, tmp_path / "missing") == (None, 0)
    root = group(tmp_path / "cgroup", memory__max="max", memory__current=GIB)
    (tmp_path / "self").write_text("0::/\n")
    assert cgroup_limit(root, tmp_path / "self") == (None, 0)


@pytest.mark.parametrize(("limit", "usable"), [(None, 10), (20, 10), (8, 6), (1, 0)])
def test_what_is_usable_is_the_lesser_of_both(limit: int | None, usable: int) -> None:
    memory = HostMemory(total=16, available=10, limit=limit, used_of_limit=2, locked_limit=None, is_wsl=False)
    assert memory.usable == usable
    assert replace(memory, used_of_limit=0).usable >= usable


def test_this_process_has_memory() -> None:
    memory = host_memory()
    assert 0 < memory.usable <= memory.available <= memory.total


def test_kills_of_the_kernel_are_counted_in_both_versions(tmp_path: Path) -> None:
    root = group(tmp_path / "cgroup")
    group(root / "job", memory__events="low 0\nhigh 3\noom 2\noom_kill 2\noom_group_kill 0")
    (tmp_path / "self").write_text("0::/job\n")
    assert oom_kills(root, tmp_path / "self") == 2
    group(root / "memory" / "old", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 5")
    (tmp_path / "self").write_text("7:memory:/old\n")
    assert oom_kills(root, tmp_path / "self") == 5
    assert oom_kills(root, tmp_path / "missing") is None


def test_what_is_mapped_and_not_resident_counts_where_the_address_space_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use = Use(resident=2 * GIB, mapped=5 * GIB)
    monkeypatch.setattr(memory_of_host, "_limit", lambda name: None)
    free = allowance(use)
    assert free > 2 * GIB
    monkeypatch.setattr(memory_of_host, "_limit", lambda name: 6 * GIB)
    assert allowance(use) == min(free, 3 * GIB)
    monkeypatch.setattr(memory_of_host, "_limit", lambda name: 4 * GIB)  # less than is mapped: it was set later
    assert allowance(use) == 2 * GIB
    assert 0 < use_of_this_process().resident <= use_of_this_process().mapped

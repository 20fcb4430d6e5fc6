"""A machine's rates are kept for that machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.plan import profile
from offload.plan.profile import FORMAT, Profile, profile_path, read_profile, write_profile
from offload.plan.rates import GIB, copy_rates, cpu_adamw_rates, host_memory_rates, locking, matmul_rate


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_read_on_the_same_machine_only(cache: Path) -> None:
    assert read_profile({"device": "A"}) is None
    written = Profile({"device": "A"}, {"up": 25e9})
    assert write_profile(written) == cache / "tune-offload" / "machine.json"
    assert read_profile({"device": "A"}) == written
    assert read_profile({"device": "B"}) is None
    assert [path.name for path in profile_path().parent.iterdir()] == ["machine.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 0}', '{"format": 1, "machine": {"device": "A"}}'])
def test_a_damaged_one_is_none(content: str, cache: Path) -> None:
    write_profile(Profile({"device": "A"}, {}))
    profile_path().write_text(content)
    assert read_profile({"device": "A"}) is None


def test_one_of_another_format_is_none() -> None:
    path = write_profile(Profile({"device": "A"}, {"up": 25e9}))
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    assert read_profile({"device": "A"}) is None


def test_one_that_cannot_be_written_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile, "sync", full)
    with pytest.raises(OSError, match="No space"):
        write_profile(Profile({"device": "A"}, {}))
    assert list(profile_path().parent.iterdir()) == []


def test_where_it_lies_without_a_cache_of_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_path() == tmp_path / ".cache" / "tune-offload" / "machine.json"


def test_rates_are_numbers_of_this_machine() -> None:
    size = 2**20
    copies = copy_rates("cpu", size)
    assert set(copies) == {"up", "down", "each_of_both", "pageable_up", "pageable_down", "device_copy"}
    numbers = [*copies.values(), *host_memory_rates(size).values(), *cpu_adamw_rates(2**16).values(),
               matmul_rate("cpu", 64)]  # fmt: skip
    assert all(1e3 < number < 1e15 for number in numbers)


def test_page_locking_stops_where_it_is_refused() -> None:
    kept: list[int] = []

    def lock(nbytes: int) -> bytes:
        if len(kept) == 3:
            raise RuntimeError("CUDA error: out of memory\nmore")
        kept.append(nbytes)
        return b""

    found = locking(8, lock=lock)
    assert kept == [GIB] * 3
    assert found["locked_gib"] == 3 and found["refused"] == "CUDA error: out of memory"
    kept.clear()
    assert locking(2, lock=lock)["refused"] is None

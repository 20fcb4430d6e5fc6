"""What is told of a process that was killed: by whom as far as the kernel tells, and what takes less memory."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload.cli import killed, registry
from offload.cli.killed import advice_for, status_of
from offload.distributed import watch
from offload.host_memory import kernel_killed, who_killed

RECIPE = "full_finetune_distributed"


def failure(code: int, pid: int = 11, at: int = 0, file: str = "/nowhere") -> Any:
    name = signal.Signals(-code).name if code < 0 else ""
    return SimpleNamespace(error_file=file, exitcode=code, pid=pid, timestamp=at, signal_name=lambda: name)


@pytest.mark.parametrize(
    ("before", "now", "says", "advises"),
    [
        (3, 4, "the kernel killed it because the host's memory ran out", True),
        (None, None, "probably the host's memory ran out", True),
        (None, 4, "probably the host's memory ran out", True),
        (3, 3, "not by the kernel for want of memory, which counts such kills", False),
    ],
)
def test_who_killed_it(
    before: int | None, now: int | None, says: str, advises: bool, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(killed, "oom_kills", lambda: now)
    assert who_killed(before, now) == says and (kernel_killed(before, now) is not False) is advises
    asked: list[str] = []

    def advice() -> Sequence[str]:
        asked.append("once")
        return ["what saves most, one by one:"]

    failures = {0: failure(1), 1: failure(-signal.SIGKILL, 4711)}
    assert status_of(failures, before, advice) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("error: rank 1 on ") and "(process 4711) was ended by SIGKILL" in first and says in first
    assert first.endswith("The same command with resume_from_checkpoint=auto goes on from the last checkpoint")
    assert rest == (["what saves most, one by one:"] if advises else []) and len(asked) == advises


def test_other_ends_are_told_without_advice(capsys: pytest.CaptureFixture[str]) -> None:
    def advice() -> Sequence[str]:
        raise AssertionError

    assert status_of({0: failure(-signal.SIGSEGV)}, 0, advice) == 1
    assert "was ended by SIGSEGV, and with it the run. The same" in capsys.readouterr().err
    assert status_of({0: failure(-signal.SIGBUS)}, 0, advice) == 2
    assert "/dev/shm" in capsys.readouterr().err
    assert status_of({0: failure(3)}, 0, advice) == 3 and not capsys.readouterr().err


def test_processes_that_torchrun_ends_are_not_what_ended_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """It sends SIGTERM to those that are left when one has saved and gone, or has died."""
    last = {0: failure(-signal.SIGTERM), 1: failure(128 + signal.SIGTERM)}
    assert status_of(last, 0, list) == 143 and not capsys.readouterr().err
    assert status_of({0: failure(-signal.SIGTERM), 1: failure(-signal.SIGSEGV)}, 0, list) == 1
    assert "error: rank 1 on " in capsys.readouterr().err
    assert status_of({0: failure(-signal.SIGTERM)}, 0, list) == 143
    assert "was ended by SIGTERM" in capsys.readouterr().err
    slow = {1: failure(128 + signal.SIGTERM), 0: failure(-signal.SIGKILL, at=30)}
    assert status_of(slow, 0, list) == 143 and not capsys.readouterr().err
    killed_first = {1: failure(-signal.SIGKILL), 0: failure(-signal.SIGKILL, at=31)}
    assert status_of(killed_first, 0, list) == 2
    assert "error: rank 1 on " in capsys.readouterr().err


def test_a_run_that_was_stopped_is_not_ended_by_who_crashes_on_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL):
        assert status_of({0: failure(-number), 1: failure(143), 2: failure(143)}, 0, list) == 143
        assert status_of({0: failure(-number, at=2), 1: failure(130)}, 0, list) == 130
        assert not capsys.readouterr().err
        assert status_of({0: failure(143, at=2), 1: failure(-number)}, 0, list) in (1, 2)
        assert "error: rank 1 on " in capsys.readouterr().err


def test_the_first_of_several_ends_is_the_run_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of({0: failure(3, at=5), 1: failure(1, at=2)}, 0, list) == 1
    answered = {0: failure(143, at=1), 1: failure(143, at=9), 2: failure(-signal.SIGSEGV, at=5)}
    assert status_of(answered, 0, list) == 143
    assert status_of({1: failure(1), 0: failure(-signal.SIGKILL, at=29)}, 0, list) == 1  # 30 s, in whole seconds
    assert not capsys.readouterr().err
    assert status_of({0: failure(-signal.SIGHUP)}, 0, list) == 129


def test_who_crashes_when_all_is_done_has_ended_as_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun sees it a second before those whom it sends a signal then."""
    files = [tmp_path / str(rank) / "error.json" for rank in range(3)]
    for file in files[:2]:
        file.parent.mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        watch.note_end(143)
    crashed, well, other = (str(file) for file in files)
    for code in (-signal.SIGABRT, -signal.SIGSEGV):
        first = failure(code, file=crashed)
        assert status_of({0: first}, 0, list) == 143
        assert status_of({0: first, 1: failure(143, at=2, file=well)}, 0, list) == 143
        assert status_of({0: first, 2: failure(-signal.SIGTERM, at=2, file=other)}, 0, list) == 143
        assert not capsys.readouterr().err
    assert status_of({0: failure(-signal.SIGABRT, file=crashed), 2: failure(-signal.SIGSEGV, file=other)}, 0, list) == 1
    assert "error: rank 2 on " in capsys.readouterr().err
    assert status_of({2: failure(-signal.SIGABRT, file=other)}, 0, list) == 1


def test_the_status_is_that_of_the_process_that_told(tmp_path: Path) -> None:
    """torchrun may end it meanwhile."""
    file = tmp_path / "error.json"
    file.write_text("{}")
    assert status_of({0: failure(-signal.SIGTERM, file=str(file)), 1: failure(2, file=str(file))}, 0, list) == 2
    assert status_of({0: failure(-signal.SIGTERM, file=str(file)), 1: failure(2)}, 0, list) == 1


def test_advice_that_fails_takes_nothing_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def advice() -> Sequence[str]:
        raise MemoryError

    monkeypatch.setattr(killed, "oom_kills", lambda: 1)
    assert status_of({2: failure(-signal.SIGKILL)}, 0, advice) == 2
    assert "rank 2" in capsys.readouterr().err


def test_the_budget_is_that_of_one_process_in_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    path: Path = registry.our_configs()["tiny_llama_offload_distributed"]
    words = ["device=cpu", "checkpointer.checkpoint_dir=/nowhere", "batch_size=16", "loss=torch.nn.CrossEntropyLoss"]
    lines = advice_for(registry.find_recipe(RECIPE), path, words, 2, 1)
    assert "of the host's memory at its fullest moment, where it can have " in lines[0]
    assert any(line.startswith("host ") and "weights" in line for line in lines)
    assert "what saves most, one by one:" in lines and any("batch_size=" in line for line in lines)

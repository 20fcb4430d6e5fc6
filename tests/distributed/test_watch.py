"""A process learns of its peers' ends: of those that say why, of those that are killed, fall silent or stand still."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload.distributed import watch, world
from offload.distributed.watch import DIED, HANGS, RAISED, Watch
from offload.distributed.world import World
from offload.training import restart

SECONDS = 10.0
"""In which something has to be noticed."""


@contextmanager
def watched(rank: int, store: Any, size: int = 2) -> Iterator[Watch]:
    one = Watch(rank, size, store)
    one.start()
    try:
        yield one
    finally:
        one.leave()
        one.close()


@contextmanager
def peer(store: Any, rank: int = 1, **beat: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that gives no sign of life but its first."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        store.set(f"beat/{rank}", json.dumps({"time": 0.0, "still": 0.0, "at": "model.py:1 (forward)", **beat}))
        who = {"host": Watch(0, 2, store).host, "pid": process.pid, "space": watch._process_space()}
        store.set(f"who/{rank}", json.dumps(who))
        try:
            yield process
        finally:
            process.kill()


def failure_of(one: Watch) -> watch.Failure | None:
    until = time.monotonic() + SECONDS
    while one.failure is None and time.monotonic() < until:
        time.sleep(0.05)
    return one.failure


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INTERVAL", 0.1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def exchange_error() -> RuntimeError:
    """An error that comes out of torch.distributed."""
    try:
        dist.distributed_c10d._get_default_group()
    except ValueError as error:
        return RuntimeError("Connection closed by peer").with_traceback(error.__traceback__)
    raise AssertionError("the tests have a process group")


def test_the_first_error_is_the_run_s(capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    with watched(0, store) as zero, watched(1, store) as one:
        assert one.report(2, "dataset: the disk is gone").rank == 1
        assert zero.cause(exchange_error()) == watch.Failure(1, one.host, 2, RAISED, "dataset: the disk is gone")
        assert zero.report(1, "Connection closed by peer").rank == 1 and one.cause(ValueError()) is None
    assert capfd.readouterr().err == ""  # rank 1 tells it itself, on this host


def test_another_host_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    with watched(0, store) as zero:
        store.set("failure", json.dumps(vars(watch.Failure(1, "far", 2, RAISED, "dataset: the disk is gone"))))
        assert failure_of(zero) is not None
        time.sleep(0.2)
    assert capfd.readouterr().err == "error: rank 1 of 2 on far: dataset: the disk is gone\n"


def test_an_error_of_its_own_has_no_other_cause() -> None:
    store = dist.HashStore()
    with watched(0, store) as zero, watched(1, store):
        assert zero.cause(ValueError("mine")) is None and zero.cause(RuntimeError("mine")) is None


def test_a_killed_process_is_noticed_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    with peer(store) as process, watched(0, store) as zero:
        assert not zero.is_broken()
        process.kill()
        failure = failure_of(zero)
        time.sleep(0.2)
    assert failure is not None and (failure.rank, failure.kind, failure.status) == (1, DIED, 1)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: rank 1 of 2 on {failure.host}: the process ({process.pid}) was killed")


STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_store_that_answers_no_more_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    """As when the cable is pulled: nothing says that the connection is gone."""
    command = [sys.executable, "-c", STORE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        try:
            with watched(1, store) as one:
                one.limit(1.0)
                assert not one.is_broken()
                server.send_signal(signal.SIGSTOP)
                failure = failure_of(one)
                time.sleep(0.5)
        finally:
            server.kill()
    assert failure is not None and (failure.rank, failure.status, failure.kind) == (0, 1, DIED)
    assert "that host or its torchrun is gone" in capfd.readouterr().err


def test_one_that_left_in_good_order_is_not_missed() -> None:
    store = dist.HashStore()
    with peer(store) as process, watched(0, store) as zero:
        assert not zero.is_broken()
        store.set("left/1", "")
        process.kill()
        process.wait()
        time.sleep(0.5)
        assert zero.failure is None


def test_torchrun_tells_of_the_killed_unless_it_starts_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for most, lines in ((0, 0), (1, 1)):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(most))
        store = dist.HashStore()
        with peer(store) as process, watched(0, store) as zero:
            assert not zero.is_broken()
            process.kill()
            assert failure_of(zero) is not None
            time.sleep(0.2)
        assert len(capfd.readouterr().err.splitlines()) == lines
        assert (tmp_path / "error.json").exists() == bool(lines)


def test_a_silent_process_is_named_and_ended(capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    with peer(store, still=0.0, waits=False) as process, watched(0, store) as zero:
        zero.limit(1.0)
        failure = failure_of(zero)
        assert process.wait(SECONDS) == -9
        time.sleep(0.2)
    assert failure is not None and (failure.rank, failure.kind) == (1, HANGS)
    assert "has given no sign of life for 1 s: its state is 'sleeping'" in capfd.readouterr().err


def test_where_nothing_moves_the_one_that_does_not_wait_is_named() -> None:
    store = dist.HashStore()
    waiting, stuck = peer(store, 1, still=100.0, waits=True), peer(store, 2, still=100.0, waits=False)
    with waiting, stuck, watched(0, store, 3) as zero:
        zero._posture.look = lambda now: (100.0, "world.py:1", True)  # type: ignore[method-assign]
        zero._posture.still, zero._posture.waits = 100.0, True
        zero._stillness = 50.0
        failure = failure_of(zero)
    assert failure is not None and (failure.rank, failure.kind) == (2, HANGS)
    assert failure.reason.endswith("at model.py:1 (forward)") and "collective_timeout_minutes" in failure.reason


def test_one_that_works_while_the_others_wait_is_left_alone() -> None:
    store = dist.HashStore()
    with peer(store, still=100.0, waits=True), watched(0, store) as zero:
        zero._stillness = 50.0
        time.sleep(0.5)
        assert zero.failure is None


def test_a_thread_that_waits_stands_still_and_one_that_works_moves() -> None:
    import threading

    ends, waiting = threading.Event(), threading.Thread(target=lambda: ends.wait())
    waiting.start()
    postures = watch._Posture(waiting.ident), watch._Posture(threading.main_thread().ident)
    time.sleep(0.1)
    begun = time.monotonic()
    for posture in postures:
        posture.look(begun)
    time.sleep(0.3)
    stills = [posture.look(time.monotonic())[0] for posture in postures]
    ends.set()
    waiting.join()
    assert stills[0] >= 0.3 and stills[1] == 0.0


class _Manifest:
    def __init__(self, sequence: int) -> None:
        self.sequence = sequence


def test_a_restart_goes_on_from_what_its_job_saved_and_from_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: dict[Path, int] = {tmp_path / "step_500": 7}
    monkeypatch.setattr(restart, "active", lambda: object())
    monkeypatch.setattr(restart, "whole_checkpoints", lambda folder: list(there))
    monkeypatch.setattr(restart, "read_manifest", lambda path: _Manifest(there[path]))
    monkeypatch.setattr(restart, "next_sequence", lambda folder: max(there.values()) + 1)
    monkeypatch.setattr(world, "_notes", dist.HashStore())
    alone = World()
    assert restart.find_restart(alone, tmp_path) is None
    assert restart.find_restart(alone, tmp_path) == restart.Restart(has_saved=False, has_reported=False)
    restart.note_report(alone)
    assert restart.find_restart(alone, tmp_path) == restart.Restart(has_saved=False, has_reported=True)
    there[tmp_path / "step_2"] = 8
    assert restart.find_restart(alone, tmp_path) == restart.Restart(has_saved=True, has_reported=True)


def test_a_restart_says_how_often_and_where_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    again = restart.Restart(has_saved=True, has_reported=True)
    begins = "restart 1 of at most 3, after a process failed: going on from "
    assert again.line(Path("run/step_2")) == f"{begins}run/step_2"
    assert again.line(None) == f"{begins}the beginning: no checkpoint was saved"


def test_a_world_that_torchrun_did_not_start_has_no_restarts(tmp_path: Path) -> None:
    assert restart.find_restart(World(), tmp_path) is None and World.noted("anything") is None
    assert os.environ.get("TORCHELASTIC_RUN_ID") is None


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_others_share_is_not_begun_again(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the middle of it, and would meet its first collective with one of their own that comes later."""
    from contextlib import nullcontext

    from offload.data.batches import Batch
    from offload.training import step

    class Auto:
        has_lifted = True

        def make_room(self) -> bool:
            return True

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    optimizer.auto = Auto()  # type: ignore[attr-defined]
    calls: list[int] = []

    def loss(inputs: Any, labels: Any, num_labels: int) -> torch.Tensor:
        calls.append(num_labels)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return weight.sum()

    batch = Batch(inputs={}, labels=torch.ones(1, 1, dtype=torch.long), num_tokens=1, num_labels=1, sample_length=1.0)
    monkeypatch.setattr(step, "current", lambda: World(0, size))
    with nullcontext() if size == 1 else pytest.raises(torch.OutOfMemoryError):
        step.forward_backward(loss, [batch], optimizer, nullcontext(), measures_norm=False)  # type: ignore[arg-type]
    assert len(calls) == (2 if size == 1 else 1)

"""What the watch makes of what it reads, turn by turn, at times that the tests choose: no thread runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import psutil
import pytest
import torch.distributed as dist

from offload.distributed import watch
from offload.distributed.watch import DIED, HANGS, RAISED, SILENCE, Failure, Watch, _Peer

FAR = "another host"


def watch_of(rank: int, size: int = 3, heard: Mapping[int, float] | None = None) -> Watch:
    """A watch that last heard of its peers at these times."""
    one = Watch(rank, size, dist.HashStore())
    for other, at in (heard or {}).items():
        one._peers[other] = _Peer(FAR, 7, None, at, {})
    return one


class Closes:
    """An event that comes after so many seconds, which nobody waits for."""

    def __init__(self, after: float) -> None:
        self.left = after

    def wait(self, seconds: float) -> bool:
        self.left -= seconds
        return self.left <= 0

    def is_set(self) -> bool:
        return self.left <= 0


def test_a_limit_above_the_longest_silence_leaves_that() -> None:
    one = watch_of(0)
    one.limit(10 * SILENCE)
    assert (one._stillness, one._silence) == (10 * SILENCE, SILENCE)
    one.limit(5.0)
    assert (one._stillness, one._silence) == (5.0, 5.0)


@pytest.mark.parametrize(
    ("rank", "heard", "named"),
    [
        (0, {1: 100.0, 2: 0.0}, 2),
        (0, {1: 100.0, 2: 100.0}, None),
        (1, {0: 0.0, 2: 100.0}, 0),
        (1, {0: 100.0, 2: 0.0}, None),  # which rank 0 sees to
    ],
)
def test_rank_0_listens_to_all_and_all_to_rank_0(rank: int, heard: dict[int, float], named: int | None) -> None:
    one = watch_of(rank, heard=heard)
    found = one._silent(SILENCE + 1)
    assert found is None if named is None else found is not None and (found.rank, found.kind) == (named, HANGS)
    if named is not None:
        one._store.set(f"left/{named}", "")
        assert one._silent(SILENCE + 1) is None


@pytest.mark.parametrize(("joined", "named"), [((), 1), ((1,), 2), ((1, 2), None)])
def test_who_does_not_join_is_named(joined: tuple[int, ...], named: int | None) -> None:
    one = watch_of(0)
    now = one._began + watch.JOINING
    for rank in joined:
        one._peers[rank] = _Peer(FAR, 7, None, now, {})
    assert one._silent(now) is None
    found = one._silent(now + 1)
    assert (found and found.rank) == named


def test_silence_while_this_process_was_stopped_itself_is_nobodys() -> None:
    one = watch_of(0, 2)
    beat = {"still": 0.0, "at": "", "waits": True}
    one._store.set("beat/1", json.dumps(beat))
    one._peers[1] = _Peer(FAR, 7, None, time.monotonic() - 2 * SILENCE, beat)
    one._turn_at -= SILENCE
    one._turn()
    assert one.failure is None and one._silent(time.monotonic()) is None


@pytest.mark.parametrize("turns", [True, False])
def test_the_guard_ends_a_process_whose_store_does_not_answer_and_no_other(
    turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = watch_of(1)
    one._silence, one._stillness = 5 * watch.INTERVAL, 1e9
    ended: list[Failure] = []
    monkeypatch.setattr(one, "_end", ended.append)

    class Turns(Closes):
        def wait(self, seconds: float) -> bool:
            one._turn_at += turns
            return super().wait(seconds)

    one._closes = Turns(20 * watch.INTERVAL)  # type: ignore[assignment]
    one._guard()
    assert len(ended) == (not turns) and one._has_store is turns
    assert turns or (ended[0] is one.failure and ended[0].kind == DIED and "no answer for 6 s" in ended[0].reason)


def test_a_process_whose_torchrun_is_gone_is_asked_to_leave_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = watch_of(0, 1)
    asked: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: asked.append(number))
    one._turn()
    assert asked == []
    adopted_by = one._parent + 1
    monkeypatch.setattr(os, "getppid", lambda: adopted_by)
    one._turn()
    one._turn()
    assert asked == [signal.SIGTERM]


@pytest.mark.parametrize("space", ["here", "of another container"])
def test_a_process_of_another_container_is_not_looked_up(space: str) -> None:
    one = watch_of(0, 2)
    who = {"host": one.host, "pid": os.getpid(), "space": watch._process_space() if space == "here" else space}
    one._store.set("beat/1", "{}")
    one._store.set("who/1", json.dumps(who))
    one._find_peers(0.0)
    assert (one._peers[1].process is not None) is (space == "here")


def test_signs_of_life_differ_and_only_rank_0_reads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    zero, one, two = (Watch(rank, 3, store) for rank in range(3))
    for each in (zero, one, two):
        monkeypatch.setattr(each._posture, "look", lambda now: (0.0, "train.py:1 (main)", False))
        store.set(f"who/{each.rank}", json.dumps({"host": FAR, "pid": 1, "space": ""}))
        each._beat(1.0)
    for each in (zero, one):
        each._find_peers(1.0)
    for each in (zero, two):
        each._beat(2.0)
    for each in (zero, one):
        each._find_peers(2.0)
    assert {rank: peer.heard for rank, peer in zero._peers.items()} == {1: 1.0, 2: 2.0}
    assert one._peers[0].heard == 2.0 and one._peers[2].beat == {}


def test_one_that_says_why_before_it_goes_was_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = watch_of(0, 2, {1: 0.0})
    monkeypatch.setattr(_Peer, "is_dead", lambda self: True)
    found = one._dead()
    assert found is not None and (found.rank, found.kind) == (1, DIED)
    told = Failure(1, FAR, 2, RAISED, "dataset: the disk is gone")
    one._publish(told)
    assert one._dead() == told
    one._store.set("left/1", "")
    assert one._dead() is None


def test_one_that_is_left_alone_may_stand_still() -> None:
    one = watch_of(0, 2)
    one._posture.still = 1e9
    assert one._still() is None
    one._peers[1] = _Peer(FAR, 7, None, 0.0, {"still": 1e9, "at": "", "waits": True})
    assert one._still() is not None
    one._store.set("left/1", "")
    assert one._still() is None


@pytest.mark.parametrize(("rank", "silent", "named"), [(0, 2, 2), (0, None, None), (1, 0, 0), (1, 2, None)])
def test_who_fell_silent_just_now(rank: int, silent: int | None, named: int | None) -> None:
    now = time.monotonic()
    others = {other: now - (60 if other == silent else 0) for other in range(3) if other != rank}
    found = watch_of(rank, heard=others)._missing()
    assert (found and found.rank) == named


@contextmanager
def process_of_this_host(code: str, is_stopped: bool) -> Iterator[_Peer]:
    """A peer that gives no sign of life, once it is at work."""
    command = [sys.executable, "-c", f"print(flush=True)\n{code}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        known = psutil.Process(process.pid)
        try:
            if is_stopped:
                process.send_signal(signal.SIGSTOP)
                while known.status() != psutil.STATUS_STOPPED:
                    time.sleep(0.01)
            yield _Peer("here", process.pid, known, 0.0, {"still": 0.0})
        finally:
            process.kill()


WORKS, SLEEPS = "while True: pass", "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("code", "is_stopped", "is_slow"), [(WORKS, False, True), (SLEEPS, False, False), (WORKS, True, False)]
)
def test_a_slow_process_is_not_taken_to_hang(code: str, is_stopped: bool, is_slow: bool) -> None:
    """It has not come to give a sign of life on a host with too much to do, but gets its turns there."""
    one = watch_of(0, 2)
    beat = json.dumps({"still": 0.0, "at": "", "waits": False})
    one._store.set("beat/1", beat)
    with process_of_this_host(code, is_stopped) as peer:
        assert peer.process is not None
        peer.beat = json.loads(beat)
        one._peers[1] = peer
        began = time.monotonic()
        one._turn_at = began + SILENCE + 1
        one._find_peers(began)
        while is_slow and peer.process.cpu_times().user < 0.5:
            time.sleep(0.05)
        peer.heard, peer.worked = began, one._turn_at - (1 if is_stopped else 10)
        one._find_peers(one._turn_at)
        missing, silent = one._missing(), one._silent(one._turn_at)
        assert (missing is None) is (silent is None) is is_slow
        assert one._is_slow() is is_slow
        # One that works and never says so is in an endless loop.
        one._stillness = SILENCE
        found = one._silent(one._turn_at)
        assert found is not None and (found.rank, found.kind) == (1, HANGS)


def test_an_exchange_that_failed_waits_for_word_of_a_slow_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        looks = 0

        def status(self) -> str:
            self.looks += 1
            return psutil.STATUS_RUNNING if self.looks < 40 else psutil.STATUS_STOPPED

    monkeypatch.setattr(watch, "INTERVAL", 0.02)
    one, process = watch_of(0, 2), Process()
    now = one._turn_at
    one._peers[1] = _Peer("here", 7, cast("psutil.Process", process), now - 60, {}, worked=now)
    with pytest.raises(RuntimeError) as caught:
        within_exchange(mistake)
    assert one.cause(caught.value) is None and process.looks > 40
    assert one._reported is not None and one._reported.rank == 1


def test_a_little_work_beside_the_main_thread_s_does_not_count() -> None:
    class Process:
        used = 0.0

        def cpu_times(self) -> Any:
            return self.used, 0.0

        def status(self) -> str:
            return psutil.STATUS_SLEEPING

    one, process = watch_of(0, 2), Process()
    beat = {"still": 0.0, "at": "", "waits": False}
    one._store.set("beat/1", json.dumps(beat))
    peer = one._peers[1] = _Peer("here", 7, cast("psutil.Process", process), 0.0, {})
    one._find_peers(0.0)
    for share, works in ((0.005, False), (0.05, True), (0.005, False)):
        for second in range(20):
            process.used += share
            one._find_peers(float(second))
            assert peer.heard == 0.0
        assert peer.works(19.0) is works
        peer.worked = 0.0


def test_what_this_process_has_not_looked_at_is_nobodys_silence() -> None:
    """Its own thread had no turn for a while, and nobody's sign of life was read."""
    now = time.monotonic()
    one = watch_of(0, heard={1: now - 60, 2: now - 60})
    one._turn_at = now - 59
    assert one._missing() is None
    one._turn_at = now
    assert one._missing() is not None


@pytest.mark.parametrize(
    ("after", "leaves", "ends"),
    [
        (watch.GRACE / 2, False, "by itself"),
        (watch.GRACE + watch.CLOSING / 2, True, "by itself"),
        (watch.GRACE + watch.CLOSING / 2, False, "after its will"),
        (watch.GRACE + 2 * watch.CLOSING, True, "at once"),
    ],
)
def test_how_long_a_process_has_to_leave(
    after: float, leaves: bool, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = watch_of(1)
    done: list[str] = []
    one.last_will = lambda: done.append("after its will")
    one._closes = Closes(after)  # type: ignore[assignment]
    if leaves:
        one.leave()
    monkeypatch.setattr(os, "_exit", lambda status: done.append(f"status {status}"))
    one._end(Failure(1, one.host, 3, RAISED, ""))
    assert done == {"by itself": [], "at once": ["status 3"], "after its will": ["after its will", "status 3"]}[ends]


def test_a_host_tells_a_failure_once(capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    for rank in (1, 2):
        Watch(rank, 3, store)._tell(Failure(0, FAR, 1, HANGS, "it stands still"))
    assert capfd.readouterr().err == f"error: rank 0 of 3 on {FAR}: it stands still\n"


def test_who_is_killed_elsewhere_is_told_here_though_torchrun_tells(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for host, lines in ((FAR, 1), (watch_of(1).host, 0)):
        watch_of(1)._tell(Failure(0, host, 1, DIED, "the process was killed"))
        assert len(capfd.readouterr().err.splitlines()) == lines


def deep(calls: int, function: Any) -> Any:
    return function() if not calls else deep(calls - 1, function)


EXCHANGE: dict[str, Any] = {}
exec(compile("def call(function): return function()", "torch/distributed/called.py", "exec"), EXCHANGE)


def within_exchange(function: Any) -> Any:
    return EXCHANGE["call"](function)


def mistake() -> None:
    raise RuntimeError("Connection closed by peer")


def test_an_error_comes_from_an_exchange_that_is_near() -> None:
    def raised(function: Any) -> BaseException:
        with pytest.raises(RuntimeError) as caught:
            function()
        return caught.value

    assert watch._is_in_exchange(raised(lambda: deep(20, lambda: within_exchange(mistake))))
    assert not watch._is_in_exchange(raised(lambda: within_exchange(lambda: deep(20, mistake))))


def test_a_thread_waits_in_an_exchange_that_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: dict[int, FrameType] = {}

    def look() -> bool:
        frames[1] = sys._getframe()
        return posture.look(0.0)[2]

    posture = watch._Posture(1)
    monkeypatch.setattr(sys, "_current_frames", lambda: frames)
    assert deep(20, lambda: within_exchange(look)) is True
    assert within_exchange(lambda: deep(20, look)) is False


def test_what_torchrun_was_told_first_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for line in ("the cause", "what came of it"):
        watch.note_for_torchrun(line)
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "the cause"


def test_nobody_watches_afterwards() -> None:
    with watch.watching(watch_of(0, 1)) as one:
        assert watch.active() is one
    assert watch.active() is None

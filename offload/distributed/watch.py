"""Sees to it that no process of a run waits for another one that is gone.

A thread in each process writes a sign of life to the store that torchrun keeps, every second, and reads those of the
others. The first process that raises an error, dies, falls silent or stands still is written there as the run's
:class:`Failure`. All the others learn it within seconds, tell it once on each host, and leave: by the error that their
next exchange raises, or, where they are stuck in one, by ending the process.

What counts as standing still: the main threads of *all* processes have been at the same instruction for as long as
:meth:`Watch.limit` allows. A process that works for long while the others wait for it (it writes a checkpoint) moves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from offload.host_memory import oom_kills, who_killed

INTERVAL = 1.0
"""Seconds between two signs of life."""

SILENCE = 120.0
"""Seconds without one after which a process is taken to be gone: it is stopped, or its host is."""

STILLNESS = 30 * 60.0
"""Seconds that all processes may stand still: PyTorch's own limit for a collective of gloo."""

JOINING = 15 * 60.0
"""Seconds that processes may start apart from each other: torchrun's own limit for hosts."""

GRACE = 10.0
"""Seconds that a process has to leave by itself once a failure is known; torchrun kills it 30 s after it sees one."""

CLOSING = 45.0
"""Seconds more for one that has begun to close its logs (wandb uploads)."""

LATE = 4
"""Signs of life in a row that a process misses where it is late, not only between two of them."""

SLOWEST = 30.0
"""Seconds for which an error of an exchange waits for a word of a process that is late and works."""

BUSY = 0.02
"""Share of a CPU from which on a process works, if for nothing else than its next sign of life. On a loaded host one
that is ready to run gets more; helper threads of one that hangs (NCCL's, a logger's) take less."""

DIED, HANGS, RAISED = "died", "hangs", "raised"


@dataclass(frozen=True)
class Failure:
    """What ended a run.

    Attributes:
        rank: of the process that failed first.
        host: where it ran.
        status: with which all the others end.
        kind: ``died``: it was killed; ``hangs``; ``raised``: it tells its error itself, on its own host.
        reason: a line without the rank; empty for ``raised`` where the error is one of the program.
    """

    rank: int
    host: str
    status: int
    kind: str
    reason: str = ""


@dataclass
class _Peer:
    """What is known of another process.

    Attributes:
        host: its name.
        process: itself, where it shares this one's host.
        pid: there.
        beat: its last sign of life; ``still``: seconds at one instruction; ``at``: which; ``waits``: in an exchange.
        heard: when that came.
        worked: until when it took its share of a CPU, as far as that can be seen from here.
        used: seconds of a CPU that it had taken by then.
    """

    host: str
    pid: int
    process: psutil.Process | None
    heard: float
    beat: dict[str, Any]
    worked: float = 0.0
    used: float = 0.0

    def look(self, now: float, *, is_heard: bool) -> None:
        """See how much it works."""
        if is_heard:
            self.heard = now
        if self.process is None:
            return
        with contextlib.suppress(psutil.Error):
            user, system = self.process.cpu_times()[:2]
            if is_heard or user + system - self.used >= BUSY * (now - self.worked):
                self.worked, self.used = now, user + system

    def works(self, now: float) -> bool:
        """Whether it has been at work lately, and so is slow where no sign of life comes: its host has too much to do,
        or it computes and lets no other thread have a turn."""
        if self.process is None or now - self.worked > LATE * INTERVAL:
            return False
        try:
            return bool(self.process.status() != psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def is_dead(self) -> bool:
        if self.process is None:
            return False
        try:
            return not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


class Watch:
    """The thread that watches over one process's peers.

    Args:
        rank: of this process.
        size: of the world.
        store: a connection of its own to the store that all processes share.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size = rank, size
        self.host = socket.gethostname()
        self.last_will: Callable[[], None] | None = None
        """Called before the process is ended from here, in its main thread's place: closes what is open."""
        self._store = store
        self._silence, self._stillness = SILENCE, STILLNESS
        self._peers: dict[int, _Peer] = {}
        self._failure: Failure | None = None
        self._reported: Failure | None = None
        self._is_known, self._wakes, self._turned = threading.Event(), threading.Event(), threading.Event()
        self._closes, self._leaves = threading.Event(), threading.Event()
        self._posture = _Posture(threading.main_thread().ident)
        self._parent = os.getppid()
        self._kills = oom_kills()
        self._began = self._turn_at = time.monotonic()
        self._has_store = True
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # ------------------------------------------------------------------------------- for the main thread

    def start(self) -> None:
        """Announce this process to the others, and begin to watch them."""
        self._beat(time.monotonic())
        who = {"host": self.host, "pid": os.getpid(), "space": _process_space()}
        self._store.set(f"who/{self.rank}", json.dumps(who))
        self._thread.start()
        threading.Thread(target=self._guard, name="watch's guard", daemon=True).start()

    def limit(self, seconds: float) -> None:
        """All processes may stand still for so long, and one be silent, if that is less than :data:`SILENCE`."""
        self._stillness, self._silence = seconds, min(SILENCE, seconds)

    @property
    def stillness(self) -> float:
        """Seconds for which all processes may stand still."""
        return self._stillness

    @property
    def failure(self) -> Failure | None:
        """What ended the run, as far as this process knows."""
        return self._failure

    def is_broken(self) -> bool:
        """Whether a process failed; looks now."""
        self._turned.clear()
        self._wakes.set()
        self._turned.wait(INTERVAL)
        return self._failure is not None

    def report(self, status: int, reason: str) -> Failure:
        """This process failed, and is the one to tell it if it was the first; returns the failure that was."""
        mine = Failure(self.rank, self.host, status, RAISED, reason)
        self._reported = mine
        self._wakes.set()
        self._is_known.wait(5 * INTERVAL)
        return self._failure or mine

    def cause(self, error: BaseException) -> Failure | None:
        """The failure of another process that an error here comes from; None where it is this one's own.

        Where an exchange failed, this waits for a few seconds: who is gone is known a little later, and on a host with
        too much to do, later yet.
        """
        is_exchange = isinstance(error, RuntimeError) and _is_in_exchange(error)
        self.is_broken()
        begun = time.monotonic()
        until = begun + 5 * INTERVAL
        while is_exchange and self._failure is None and time.monotonic() < until:
            self._is_known.wait(INTERVAL / 4)
            if self._is_slow():
                until = min(begun + SLOWEST, time.monotonic() + INTERVAL)
        if self._failure is None and is_exchange:
            self._reported = self._missing()
            if self._reported is not None:
                self._wakes.set()
                self._is_known.wait(5 * INTERVAL)
        failure = self._failure
        return None if failure is None or failure.rank == self.rank else failure

    def leave(self) -> None:
        """The main thread is on its way out and closes what is open."""
        self._leaves.set()

    def close(self) -> None:
        """This process has left in good order, whatever its status."""
        self._closes.set()
        self._wakes.set()
        self._thread.join(5 * INTERVAL)

    # --------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._closes.is_set():
            try:
                self._turn()
            except Exception as error:  # the store is gone
                self._turned.set()
                if self._closes.is_set() or self._leaves.is_set():  # whoever keeps it has left before
                    return
                if self._parent_is_gone():  # torchrun was killed, and with it went the store
                    os.kill(os.getpid(), signal.SIGTERM)  # save and leave, as it would have asked
                    return
                self._failure = self._failure or self._alone(str(error).splitlines()[0][:120])
            self._turned.set()
            if self._failure is not None:
                self._is_known.set()
                self._end(self._failure)
                break
            self._wakes.wait(INTERVAL)
            self._wakes.clear()
        with contextlib.suppress(Exception):
            self._store.set(f"left/{self.rank}", "")

    def _guard(self) -> None:
        """Ends this process where the store does not answer, which nothing else may be asked for meanwhile: TCP takes a
        quarter of an hour to find out that a host went without a word."""
        turn, waited = self._turn_at, 0.0
        while not self._closes.wait(INTERVAL):
            waited = waited + INTERVAL if self._turn_at == turn else 0.0
            turn = self._turn_at
            if waited > self._silence and self._failure is None:
                self._has_store = False
                self._failure = self._alone(f"no answer for {waited:.0f} s")
                self._is_known.set()
                self._end(self._failure)
                return

    @staticmethod
    def _alone(why: str) -> Failure:
        reason = (
            f"the store through which processes know of each other cannot be reached any more ({why}): that host or "
            "its torchrun is gone"
        )
        return Failure(0, os.environ.get("MASTER_ADDR", ""), 1, DIED, reason)

    def _turn(self) -> None:
        now = time.monotonic()
        if now - self._turn_at > self._silence / 2:  # this process was stopped itself, and has not listened
            for peer in self._peers.values():
                peer.heard = now
        self._turn_at = now
        self._beat(now)
        self._find_peers(now)
        if self._parent_is_gone():
            self._parent = os.getppid()
            os.kill(os.getpid(), signal.SIGTERM)
        self._failure = self._read()
        if self._failure is None:
            mine = self._reported or self._dead() or self._silent(now) or self._still()
            if mine is not None:
                self._failure = self._publish(mine)

    def _beat(self, now: float) -> None:
        still, at, waits = self._posture.look(now)
        self._store.set(f"beat/{self.rank}", json.dumps({"time": now, "still": still, "at": at, "waits": waits}))

    def _find_peers(self, now: float) -> None:
        for rank in range(self.size):
            if rank == self.rank or rank in self._peers or not self._store.check([f"who/{rank}"]):
                continue
            who = json.loads(self._store.get(f"who/{rank}"))
            process = None
            if (who["host"], who["space"]) == (self.host, _process_space()):
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(who["pid"])
            self._peers[rank] = _Peer(who["host"], who["pid"], process, now, {})
        watched = self._peers if self.rank == 0 else {0} & self._peers.keys()
        if watched:
            beats = self._store.multi_get([f"beat/{rank}" for rank in watched])
            for rank, text in zip(watched, beats, strict=True):
                beat, peer = json.loads(text), self._peers[rank]
                peer.look(now, is_heard=beat != peer.beat)
                peer.beat = beat

    def _read(self) -> Failure | None:
        if not self._store.check(["failure"]):
            return None
        return Failure(**json.loads(self._store.get("failure")))

    def _publish(self, failure: Failure) -> Failure:
        """The first one stands."""
        return Failure(**json.loads(self._store.compare_set("failure", "", json.dumps(asdict(failure)))))

    def _here(self) -> Iterable[tuple[int, _Peer]]:
        return ((rank, peer) for rank, peer in self._peers.items() if not self._store.check([f"left/{rank}"]))

    def _dead(self) -> Failure | None:
        for rank, peer in list(self._peers.items()):
            if not peer.is_dead() or self._store.check([f"left/{rank}"]):
                continue
            told = self._read()  # it may have said why and gone since
            if told is not None:
                return told
            reason = (
                f"the process ({peer.pid}) was killed: {who_killed(self._kills, oom_kills())}. The same command with "
                "resume_from_checkpoint=auto goes on from the last checkpoint"
            )
            return Failure(rank, peer.host, 1, DIED, reason)
        return None

    def _silent(self, now: float) -> Failure | None:
        """Rank 0 listens to all, all to rank 0. One that works and does not come to say so has as long as one that
        stands still."""
        if self.rank == 0 and now - self._began > JOINING and len(self._peers) < self.size - 1:
            missing = next(rank for rank in range(1, self.size) if rank not in self._peers)
            return Failure(missing, "another host", 1, HANGS, f"it did not join within {JOINING / 60:.0f} minutes")
        for rank, peer in self._peers.items():
            silence = now - peer.heard
            is_silent = (self.rank == 0 or rank == 0) and silence > self._silence
            is_slow = is_silent and silence <= self._stillness and peer.works(now)
            if is_silent and not is_slow and not self._store.check([f"left/{rank}"]):
                return self._silence_of(rank, peer, now)
        return None

    def _silence_of(self, rank: int, peer: _Peer, now: float) -> Failure:
        state = f"either it was killed, which {peer.host} itself tells, or that host is down or out of reach"
        if peer.process is not None:
            with contextlib.suppress(psutil.Error):
                state = f"its state is '{peer.process.status()}'"
        reason = f"the process ({peer.pid}) has given no sign of life for {now - peer.heard:.0f} s: {state}"
        return Failure(rank, peer.host, 1, HANGS, reason)

    def _still(self) -> Failure | None:
        """Rank 0 sees whether nothing moves, anywhere."""
        if self.rank != 0:
            return None
        mine = self._posture
        beats: dict[int, dict[str, Any]] = {0: {"still": mine.still, "at": mine.at, "waits": mine.waits}}
        beats.update((rank, peer.beat) for rank, peer in self._here())
        if len(beats) < 2 or min(beat["still"] for beat in beats.values()) < self._stillness:
            return None
        return self._blamed(beats, f"no process has moved for {self._stillness / 60:.3g} minutes")

    def _late(self) -> list[tuple[int, _Peer]]:
        """Those that this process listens to and did not hear of the last times it looked: rank 0 to all, all to it."""
        heard = self._turn_at - LATE * INTERVAL
        return [(rank, peer) for rank, peer in self._peers.items() if 0 in (self.rank, rank) and peer.heard < heard]

    def _missing(self) -> Failure | None:
        """Who fell silent just now, and is not only slow."""
        now = self._turn_at
        for rank, peer in self._late():
            if not peer.works(now):
                return self._silence_of(rank, peer, now)
        return None

    def _is_slow(self) -> bool:
        """Whether one is late that works."""
        return any(peer.works(self._turn_at) for _, peer in self._late())

    def _blamed(self, beats: dict[int, dict[str, Any]], reason: str) -> Failure:
        """The first of those that are not in an exchange themselves."""
        rank = next((rank for rank, beat in sorted(beats.items()) if not beat["waits"]), 0)
        host, pid = (self.host, os.getpid()) if rank == self.rank else (self._peers[rank].host, self._peers[rank].pid)
        text = (
            f"{reason} (collective_timeout_minutes), and it is where they do not wait for each other: process {pid} at "
            f"{beats[rank]['at']}"
        )
        return Failure(rank, host, 1, HANGS, text)

    # ------------------------------------------------------------------------------------------ the end

    def _end(self, failure: Failure) -> None:
        if failure.rank != self.rank:
            self._tell(failure)
        peer = self._peers.get(failure.rank)
        if failure.kind == HANGS and peer is not None and peer.process is not None:
            with contextlib.suppress(psutil.Error):
                peer.process.kill()  # frees those that wait for it, and torchrun would wait 30 s to do it
        if self._closes.wait(GRACE) or (self._leaves.is_set() and self._closes.wait(CLOSING)):
            return
        will = self.last_will
        if will is not None and not self._leaves.is_set():
            closing = threading.Thread(target=_quietly, args=(will,), daemon=True)
            closing.start()
            closing.join(GRACE)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(failure.status)

    def _tell(self, failure: Failure) -> None:
        is_here = failure.host == self.host
        if is_here and (failure.kind == RAISED or (failure.kind == DIED and torchrun_tells())):
            return
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # where the store is gone, and with it what the others say
        if self._has_store:
            with contextlib.suppress(Exception):
                is_first = int(self._store.add(f"said on {self.host}", 1)) == 1
        if not is_first:
            return
        line = f"{name_of(failure.rank, self.size, failure.host)}: {failure.reason or 'it failed, and says there why'}"
        note_for_torchrun(line)
        with contextlib.suppress(OSError):
            os.write(2, f"error: {line}\n".encode())  # the main thread may hold the lock of sys.stderr

    def _parent_is_gone(self) -> bool:
        return os.getppid() != self._parent


class _Posture:
    """Where a thread is, and since when.

    Attributes:
        still: seconds that it has been at one instruction, as of the last look.
        at: which: the innermost of its lines that is not PyTorch's or Python's.
        waits: it is in an exchange between processes.
    """

    def __init__(self, thread: int | None) -> None:
        self._thread = thread
        self._last: tuple[tuple[int, int], ...] = ()
        self._since = time.monotonic()
        self.still, self.at, self.waits = 0.0, "", False

    def look(self, now: float) -> tuple[float, str, bool]:
        """(still, at, waits)"""
        frame: FrameType | None = sys._current_frames().get(self._thread or 0)
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        posture = tuple((id(each.f_code), each.f_lasti) for each in frames)
        if posture != self._last:
            self._last, self._since = posture, now
        self.still = now - self._since
        self.waits = any(_is_exchange(each) for each in frames[:8])
        self.at = next((_place(each) for each in frames if not _is_foreign(each)), "")
        return self.still, self.at, self.waits


_EXCHANGES = (os.path.join("torch", "distributed") + os.sep, os.path.join("distributed", "world.py"))


def _is_exchange(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in _EXCHANGES)


def _is_foreign(frame: FrameType) -> bool:
    return os.sep + "site-packages" + os.sep in frame.f_code.co_filename or "/lib/python" in frame.f_code.co_filename


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_in_exchange(error: BaseException) -> bool:
    """Whether an error comes out of an exchange between processes, or of a collective in forward or backward."""
    if type(error) is not RuntimeError and not type(error).__name__.startswith("Dist"):
        return False
    traceback = error.__traceback__
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    # Backward runs collectives from C++: then PyTorch's autograd is the innermost frame.
    return any(_is_exchange(each) or "autograd" in each.f_code.co_filename for each in frames[-8:])


def _process_space() -> str:
    """What tells processes apart that have the same number in different containers."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _quietly(function: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        function()


def name_of(rank: int, size: int, host: str) -> str:
    """How messages call a process."""
    return f"rank {rank} of {size} on {host}"


def restarts() -> tuple[int, int]:
    """How often torchrun has started the processes again, and how often it may at most."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def torchrun_tells() -> bool:
    """Whether it is torchrun that tells of a process which was killed: it does unless it starts all of them again."""
    count, most = restarts()
    return "TORCHELASTIC_RUN_ID" in os.environ and count >= most


def note_for_torchrun(line: str) -> None:
    """Leave word for torchrun that this was told, and what."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or os.path.exists(path):
        return
    extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": line, "extraInfo": extra}}, file)


_END = "end"


def note_end(status: int) -> None:
    """Leave word for torchrun that this process has done all it had to: it may crash yet of a thread of a library that
    still runs while Python and that library are taken apart."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        with contextlib.suppress(OSError):
            Path(path).with_name(_END).write_text(str(status), encoding="utf-8")


def noted_end(error_file: str) -> int | None:
    """The status with which :func:`note_end` says that a process was about to end."""
    try:
        return int(Path(error_file).with_name(_END).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


_active: Watch | None = None


def active() -> Watch | None:
    """The watch of this process; None where torchrun did not start it."""
    return _active


@contextlib.contextmanager
def watching(watch: Watch) -> Any:
    """Inside, ``watch`` is :func:`active`."""
    global _active
    watch.start()
    _active = watch
    try:
        yield watch
    finally:
        watch.close()
        _active = None

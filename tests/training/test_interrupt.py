"""SIGINT and SIGTERM: once to finish in order, twice to leave at once. In processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload.training.interrupt import Interrupt

ROOT = Path(__file__).parents[2]
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Runs Python code with ``Interrupt`` imported, up to its first line of output, ``ready``."""
    children: list[subprocess.Popen[str]] = []

    def run(code: str) -> subprocess.Popen[str]:
        head = "import os, signal, sys, threading, time\nfrom offload.training.interrupt import Interrupt\n"
        head += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup
        # Python 3.12 and later warn of a fork beside threads, of which Interrupt has one, where __main__ itself forks.
        threads = "ignore:This process (pid=:DeprecationWarning"
        child = subprocess.Popen(
            [sys.executable, "-W", threads, "-c", head + textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
        children.append(child)
        # A read from a child that says nothing must not hang the suite.
        killer = threading.Timer(60, child.kill)
        killer.daemon = True
        killer.start()
        assert child.stdout is not None
        line = child.stdout.readline()
        if line != "ready\n":
            child.kill()
            pytest.fail(f"{line}{child.communicate()}")
        return child

    yield run
    for child in children:
        child.kill()
        child.communicate()


STEPS = """
    with Interrupt() as interrupt:
        print("ready", flush=True)
        for step in range(200):
            time.sleep(0.05)  # a step
            if interrupt.signum is not None:
                print("saved after", interrupt.signum)
                break
    sys.exit(interrupt.exit_code)
"""


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_one_signal_lets_the_step_finish(signum: signal.Signals, status: int, start: Start) -> None:
    child = start(STEPS)
    child.send_signal(signum)
    out, err = child.communicate(timeout=20)
    assert out == f"saved after {int(signum)}\n"
    assert err.strip() == (f"{signum.name}: finishing the step and saving; once more to exit at once without saving")
    assert child.returncode == status


def test_a_terminal_that_is_closed_is_no_second_signal(start: Start) -> None:
    """The kernel and the shell each send it."""
    child = start(STEPS.replace("    sys.exit", "    time.sleep(0.5)  # logs are closed\n    sys.exit"))
    for pause in (0.0, 0.01, 0.3):
        time.sleep(pause)
        child.send_signal(signal.SIGHUP)
    out, _ = child.communicate(timeout=20)
    assert (out, child.returncode) == (f"saved after {int(signal.SIGHUP)}\n", 129)


def test_no_signal(start: Start) -> None:
    child = start('with Interrupt() as i: print("ready", flush=True)\nsys.exit(i.exit_code)')
    out, err = child.communicate(timeout=20)
    assert (out, err, child.returncode) == ("", "", 0)


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGINT, signal.SIGTERM, 143),
    ],
)
@pytest.mark.parametrize("busy", ["python", "c"])
def test_the_second_signal_ends_at_once(
    first: signal.Signals, second: signal.Signals, status: int, busy: str, start: Start
) -> None:
    if busy == "python":
        work = "time.sleep(30)"
    else:
        # In C, and taken up again after a signal without Python's handler getting a turn.
        signal_setup = "[signal.siginterrupt(number, False) for number in (signal.SIGINT, signal.SIGTERM)]"
        call = "ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)"
        work = f"import ctypes; {signal_setup}; {call}"
    child = start(f"""
        sys.stdout.write("buffered ")
        with Interrupt():
            os.write(1, b"ready\\n")
            {work}
            print("not reached")
    """)
    time.sleep(0.5)
    child.send_signal(first)
    assert child.stderr is not None
    assert child.stderr.readline() == "\n" and "finishing the step" in child.stderr.readline()
    began = time.monotonic()
    child.send_signal(second)
    out, err = child.communicate(timeout=20)
    assert time.monotonic() - began < 3
    assert (out, err, child.returncode) == ("buffered ", "", status)


@pytest.mark.parametrize(("pause", "status"), [(0.0, 0), (1.2, 143)])
def test_of_several_processes_a_copy_of_the_first_signal_is_not_a_second_one(
    pause: float, status: int, start: Start
) -> None:
    """Slurm signals each process of a job, and torchrun passes its own one on to them."""
    child = start(f"""
        from offload.distributed.world import World
        with Interrupt(world=World(0, 2)) as interrupt:
            print("ready", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep({pause})
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
            sys.exit(0 if interrupt.signum == signal.SIGTERM else 1)
        """)
    child.communicate(timeout=60)
    assert child.returncode == status


def test_handlers_are_restored() -> None:
    def mine(number: int, frame: object) -> None:
        pass

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, mine)
    try:
        with Interrupt() as interrupt:
            assert signal.getsignal(signal.SIGTERM) == interrupt._on_signal
            assert signal.getsignal(signal.SIGINT) == interrupt._on_signal
            with Interrupt() as inner:
                os.kill(os.getpid(), signal.SIGTERM)
                assert inner.signum == signal.SIGTERM
            assert signal.getsignal(signal.SIGTERM) == interrupt._on_signal
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
        assert signal.set_wakeup_fd(-1) == -1
        with pytest.raises(ZeroDivisionError), Interrupt():
            raise ZeroDivisionError
        assert signal.getsignal(signal.SIGTERM) is mine
        assert not [thread for thread in threading.enumerate() if thread.name == "interrupt"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_flag_is_set_when_kill_returns(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupt() as interrupt:
        assert interrupt.signum is None and interrupt.exit_code == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.signum == signal.SIGINT and interrupt.exit_code == 130
    assert capfd.readouterr().err.count("SIGINT: finishing the step") == 1


def test_nothing_happens_in_another_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with Interrupt() as interrupt:
            seen.append((signal.getsignal(signal.SIGTERM), interrupt.signum, interrupt.exit_code))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, None, 0)]
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_signal_stays_ignored(start: Start) -> None:
    child = start("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + textwrap.dedent(STEPS))
    child.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=20)
    assert (out, child.returncode) == ("saved after 15\n", 143)
    assert "SIGINT" not in err


def test_workers_outlive_a_ctrl_c_and_do_not_signal_the_parent(start: Start) -> None:
    child = start("""
        with Interrupt() as interrupt:
            pids = []
            for _ in range(2):
                pid = os.fork()
                if pid == 0:
                    print("ready" if not pids else "", end="\\n" if not pids else "", flush=True)
                    if pids:  # a worker with a handler of its own
                        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
                    time.sleep(60)
                    os._exit(0)
                pids.append(pid)
            time.sleep(0.5)
            for pid in pids:
                os.kill(pid, signal.SIGINT)
            time.sleep(0.3)
            print([os.waitpid(pid, os.WNOHANG)[0] for pid in pids])
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
            time.sleep(0.3)
            print(interrupt.signum)
    """)
    out, err = child.communicate(timeout=20)
    assert (out, err) == ("[0, 0]\n[-15, 7]\nNone\n", "")


def test_the_block_is_left_at_once_while_workers_live(start: Start) -> None:
    """They have the wake-up socket too, so closing it here ends nobody's wait for its end of file."""
    child = start("""
        parent = os.getpid()
        with Interrupt():
            for _ in range(2):
                if os.fork() == 0:
                    os.close(1)
                    os.close(2)
                    while os.getppid() == parent:  # ends with the test, however that ends
                        time.sleep(0.05)
                    os._exit(0)
            print("ready", flush=True)
        print("left with", os.waitpid(-1, os.WNOHANG)[0], "workers ended")
    """)
    out, err = child.communicate(timeout=5)
    assert (out, err, child.returncode) == ("left with 0 workers ended\n", "", 0)

"""Starts a recipe as several processes, by torchrun (:mod:`torch.distributed.run`) with all its options."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from offload.cli import registry
from offload.cli.killed import advice_for, status_of
from offload.errors import UserError, first_line
from offload.host_memory import oom_kills

if TYPE_CHECKING:
    import psutil

PATIENCE = 24 * 3600
"""Seconds that processes, which save a checkpoint first, have to end after a signal; torchrun would give them 30."""

MEETING = 15 * 60
"""Seconds that hosts wait for each other."""

_LAST_SECONDS = 5.0
"""Seconds that they have after a second one."""

UNATTENDED = 30.0
"""Seconds after which torchrun, which looks after its processes ten times a second, is taken to wait for a host that is
gone."""


def launch(options: Sequence[str], recipe: registry.RecipeRef, config: Path, rest: Sequence[str]) -> int:
    """Checks a config, then runs a recipe with it in as many processes as torchrun's options say; returns the status.

    A signal goes on to all processes: they save and end; a second one ends them at once. The terminal reaches this
    process alone, since torchrun gives each of the others a session of its own.

    Args:
        options: torchrun's, as on its own command line.
        recipe: of ours, or a file of the user's.
        config: the file.
        rest: overrides.

    Raises:
        UserError: a mistake in any of them, or hosts that do not meet.
    """
    from offload.cli.validate import check_here
    from offload.training.launch import as_override

    arguments = _parse(options)
    check_here(recipe, config, rest)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    arguments.module, arguments.training_script = True, "offload.cli.worker"
    arguments.training_script_args = [str(recipe.path), "--config", str(config), *rest]
    # torchrun takes over also what `nohup` or a script told this process to ignore.
    arguments.signals_to_handle = ",".join(
        name
        for name in arguments.signals_to_handle.split(",")
        if signal.getsignal(getattr(signal, name, signal.SIGTERM)) is not signal.SIG_IGN
    )
    processes = run.determine_local_world_size(arguments.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    _, hosts = run.parse_min_max_nnodes(arguments.nnodes)
    where = arguments.rdzv_endpoint or f"{arguments.master_addr}:{arguments.master_port or 29500}"
    if hosts == 1:
        arguments.local_addr = arguments.local_addr or "localhost"  # a host's own name need not be known to it
    else:
        print(f"waiting for {arguments.nnodes} hosts to meet at {where}", flush=True)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the processes tell what went wrong
    sys.stdout.flush()
    kills = oom_kills()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ending_at_second_signal())
        stack.enter_context(_hung_up_once(arguments))
        stack.enter_context(_patiently(arguments))
        scratch = None
        if arguments.log_dir is None:  # where processes leave word of their errors; torchrun would leave it behind
            scratch = arguments.log_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchelastic_"))
        if hosts > 1:
            stack.enter_context(_ending_unattended(where, scratch))
        try:
            if hosts > 1:
                arguments.rdzv_conf = _meeting(arguments)
            run.run(arguments)
        except SignalException as signalled:
            return 128 + int(signalled.sigval)
        except ChildFailedError as error:
            words = [as_override(word) for word in rest]
            return status_of(error.failures, kills, lambda: advice_for(recipe, config, words, processes, hosts))
        except (RuntimeError, ValueError, RendezvousError) as error:
            raise UserError(f"torchrun: {_mended(error, arguments, hosts)}") from error
    return 0


def _meeting(arguments: Any) -> str:
    """``--rdzv_conf`` such that hosts wait equally long for each other in each of torchrun's ways to meet, and that the
    host of the endpoint is known by any of its addresses."""
    from torch.distributed.elastic.rendezvous import utils

    conf = utils._parse_rendezvous_config(arguments.rdzv_conf)
    seconds = conf.setdefault("timeout", str(MEETING))
    if arguments.rdzv_backend == "c10d":
        conf.setdefault("join_timeout", seconds)
        conf.setdefault("read_timeout", seconds)  # also how long a host may be started before the endpoint's
        host, _ = utils.parse_rendezvous_endpoint(arguments.rdzv_endpoint, default_port=29400)
        # Torch asks what its own name resolves to, which on Debian is 127.0.1.1.
        if _is_mine(host) and not utils._matches_machine_hostname(host):
            conf.setdefault("is_host", "true")
    return ",".join(f"{key}={value}" for key, value in conf.items())


def _is_mine(address: str) -> bool:
    import psutil

    return any(address == each.address for found in psutil.net_if_addrs().values() for each in found)


def _mended(error: Exception, arguments: Any, hosts: int) -> str:
    """What went wrong while processes were started, and the way out."""
    said = first_line(error)
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return f"another program has the port ({said}): choose another with --master_port or --rdzv_endpoint"
    if hosts > 1:
        return (
            f"{type(error).__name__}: {said}: {arguments.nnodes} hosts have to be started with the same --nnodes and "
            "the same --rdzv_endpoint (or --master_addr and --master_port) of one of them, which the others can "
            "reach; --rdzv_conf timeout=SECONDS is how long they wait for each other"
        )
    return f"{type(error).__name__}: {said}"


@contextlib.contextmanager
def _ending_at_second_signal() -> Iterator[None]:
    """Inside, the second signal ends this process and its children: torchrun would wait for them again.

    The numbers of signals come through a descriptor, so that the handlers stay torchrun's.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        with reader:
            numbers = [reader.recv(1), reader.recv(1)]  # nothing, once the other end is closed
        if numbers[1]:
            _end_children(numbers[0][0])
            os._exit(128 + numbers[1][0])

    threading.Thread(target=watch, name="second signal", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()


@contextlib.contextmanager
def _hung_up_once(arguments: Any) -> Iterator[None]:
    """Inside, the first SIGHUP is passed on to the processes as torchrun passes it, and others are not heard: when a
    terminal is closed, the kernel and the shell each send one, and the second would end the processes while they save.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    names = arguments.signals_to_handle.split(",")
    if "SIGHUP" not in names or threading.current_thread() is not threading.main_thread():
        yield
        return
    arguments.signals_to_handle = ",".join(name for name in names if name != "SIGHUP")

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise SignalException(f"process {os.getpid()} got SIGHUP", sigval=signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextlib.contextmanager
def _patiently(arguments: Any) -> Iterator[None]:
    """Inside, processes that torchrun passed a signal on to have the user's ``--shutdown-timeout`` or :data:`PATIENCE`
    to end; that of PyTorch 2.11, which has no such option, would kill them after 30 seconds."""
    from unittest import mock

    from torch.distributed.elastic.multiprocessing.api import PContext

    if hasattr(arguments, "shutdown_timeout"):
        if arguments.shutdown_timeout is None:
            arguments.shutdown_timeout = PATIENCE
        yield
        return
    close = PContext.close

    def end(processes: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        close(processes, death_sig, timeout if death_sig is None else PATIENCE)

    with mock.patch.object(PContext, "close", end):
        yield


@contextlib.contextmanager
def _ending_unattended(where: str, scratch: str | None) -> Iterator[None]:
    """Inside, this process ends some time after its children where torchrun does not notice that they did: it waits for
    the store of a host that went without a word, as long as TCP does.

    Args:
        where: that store is.
        scratch: a folder to remove.
    """
    import psutil

    is_over = threading.Event()

    def watch() -> None:
        ended_at = None
        while not is_over.wait(1.0):
            children = psutil.Process().children()
            if not children or any(_is_running(child) for child in children):
                ended_at = None
            elif ended_at is None:
                ended_at = time.monotonic()
            elif time.monotonic() - ended_at > UNATTENDED:
                print(f"error: torchrun: the host at {where} does not answer any more", file=sys.stderr, flush=True)
                if scratch is not None:
                    shutil.rmtree(scratch, ignore_errors=True)
                os._exit(1)

    threading.Thread(target=watch, name="unattended", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _is_running(process: psutil.Process) -> bool:
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _end_children(first: int) -> None:
    import psutil

    # Another than the first: the same one would be taken for its copy.
    second = signal.SIGINT if first == signal.SIGTERM else signal.SIGTERM
    children = psutil.Process().children(recursive=True)
    for process in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(second)
    _, left = psutil.wait_procs(children, timeout=_LAST_SECONDS)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def processes(options: Sequence[str]) -> tuple[int, int]:
    """Processes of each host, and hosts, at most.

    Args:
        options: torchrun's; none of them for one process.

    Raises:
        UserError: a mistake in them.
    """
    if not options:
        return 1, 1
    from torch.distributed import run

    arguments = _parse(options)
    try:
        return run.determine_local_world_size(arguments.nproc_per_node), run.parse_min_max_nnodes(arguments.nnodes)[1]
    except (RuntimeError, ValueError) as error:
        raise UserError(f"torchrun: {type(error).__name__}: {first_line(error)}") from error


def _parse(options: Sequence[str]) -> Any:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    known = {option for action in parser._actions for option in action.option_strings}

    def refuse(message: str) -> NoReturn:
        from offload.component import nearest

        wrong = next((word for word in options if word.startswith("-") and word.partition("=")[0] not in known), None)
        near = nearest(wrong.partition("=")[0], sorted(known)) if wrong else None
        hint = f"; did you mean {near}?" if near else "; `torchrun --help` lists its options"
        raise UserError(f"torchrun: {f'unknown option {wrong}' if wrong else message}{hint}")

    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args([*options, "recipe"])

"""What a launcher tells of a process that ended without a word: which one, what ended it, what takes less memory."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli import registry
from offload.host_memory import kernel_killed, oom_kills, who_killed

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_ANSWERED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Statuses of a process that was told to stop and did (:mod:`offload.training.interrupt`)."""

_PATIENCE = 30
"""Seconds that torchrun gives processes to end on SIGTERM (``PContext.close``); it tells whole seconds."""

_SHARED = "; most often shared memory ran out (/dev/shm: docker run --shm-size)"


def status_of(failures: Mapping[int, ProcessFailure], kills: int | None, advice: Callable[[], Sequence[str]]) -> int:
    """The status of a run whose processes failed; tells of one that was killed, if the others have not.

    Args:
        failures: by rank.
        kills: :func:`offload.host_memory.oom_kills` when the run began.
        advice: lines that follow, where it may have been for want of memory.
    """
    from offload.distributed.watch import noted_end

    told = [failure for failure in failures.values() if os.path.isfile(failure.error_file)]
    if told:
        return next((failure.exitcode for failure in told if failure.exitcode > 0), 1)
    ends = {rank: end for rank, each in failures.items() if (end := noted_end(each.error_file)) is not None}
    if any(failures[rank].exitcode < 0 for rank in ends):
        # Nothing was left to do for it, or for any other, since all go together.
        still = {rank: each for rank, each in failures.items() if rank not in ends}
        failures = {rank: each for rank, each in still.items() if not _ended_by_torchrun(each, failures)}
        if not failures:
            return max(ends.values())
    # torchrun looks at all of them at once, and the others may have followed the killed one by then.
    by_itself = {rank: failure for rank, failure in failures.items() if not _ended_by_torchrun(failure, failures)}
    first = by_itself or failures
    # Before one leaves so, all of them have saved: what another ends of on its way out ends no run.
    answered = min((each.timestamp for each in first.values() if each.exitcode in _ANSWERED), default=math.inf)
    killed = [(rank, each) for rank, each in first.items() if each.exitcode < 0 and each.timestamp < answered]
    if not killed:
        by_time = sorted(first.values(), key=lambda failure: failure.timestamp)
        return next(each.exitcode for each in by_time if each.exitcode > 0)
    rank, failure = killed[0]
    number = -failure.exitcode
    now = oom_kills()
    why = f"; {who_killed(kills, now)}" if number == signal.SIGKILL else _SHARED if number == signal.SIGBUS else ""
    print(
        f"error: rank {rank} on {socket.gethostname()} (process {failure.pid}) was ended by {failure.signal_name()}, "
        f"and with it the run{why}. The same command with resume_from_checkpoint=auto goes on from the last checkpoint",
        file=sys.stderr,
    )
    if number == signal.SIGKILL and kernel_killed(kills, now) is not False:
        with contextlib.suppress(Exception):  # a run that cannot be planned
            for line in advice():
                print(line, file=sys.stderr)
    if number in (signal.SIGKILL, signal.SIGBUS):
        return 2
    return 128 + number if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) else 1


def _ended_by_torchrun(failure: ProcessFailure, failures: Mapping[int, ProcessFailure]) -> bool:
    """Whether torchrun ended a process because another one was gone: with SIGTERM, or where that does not help, with
    SIGKILL."""
    if failure.exitcode == -signal.SIGKILL:
        return failure.timestamp - min(each.timestamp for each in failures.values()) >= _PATIENCE - 1
    return bool(failure.exitcode == -signal.SIGTERM)


def advice_for(
    recipe: registry.RecipeRef, config: Path, overrides: Sequence[str], processes: int, hosts: int
) -> list[str]:
    """The budget of one process of a run, and what would save most of the host's memory.

    Args:
        recipe: of ours.
        config: the file.
        overrides: of the command line.
        processes: of this host.
        hosts: that have as many each.
    """
    from offload.cli.validate import recipe_class
    from offload.device import find_device
    from offload.distributed.world import World
    from offload.host_memory import host_memory
    from offload.training.advice import Advisor, settings_of_file
    from offload.training.budgeting import process_of_a_run

    kind: Any = recipe_class(recipe)
    settings = settings_of_file(kind, config, overrides)
    device, _ = find_device(settings(()).device)
    room = host_memory().usable // max(1, processes)
    advisor = Advisor(kind, settings, world=World(size=hosts * processes, local_size=processes))
    return advisor.lines(device, of_device=False, used=process_of_a_run(), room=room)

"""Processes that play ranks: started once, each with one thread, and given functions to run together."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.garbage import freeze_libraries

TIMEOUT = 120.0
"""Seconds after which ranks are taken to hang."""

AFTER_AN_ERROR = 5.0
"""Seconds that the other ranks have to come to the same end."""


class Ranks:
    """Runs functions of a module on as many processes as are asked for, in a process group of gloo."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._calls = itertools.count()

    def run(self, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on every rank of ``count``; what each returns, pickled on the way.

        Raises:
            RuntimeError: with the first rank's error and its traceback, or where ranks hang.
        """
        while len(self._processes) < count:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._processes.append((process, here))
        store = Path(self._folder.name) / f"store{next(self._calls)}"
        running = self._processes[:count]
        for rank, (_, connection) in enumerate(running):
            connection.send_bytes(pickle.dumps((rank, count, str(store), function, args)))
        results: list[Any] = [None] * count
        waiting = set(range(count))
        errors: dict[int, str] = {}
        until = time.monotonic() + TIMEOUT
        while waiting and time.monotonic() < until:
            for rank in sorted(waiting):
                process, connection = running[rank]
                if connection.poll(0.005):
                    try:
                        is_good, results[rank] = pickle.loads(connection.recv_bytes())
                    except EOFError:
                        is_good, results[rank] = False, f"the process ended with status {process.exitcode}"
                    waiting.remove(rank)
                    if not is_good:
                        errors[rank] = results[rank]
                        until = min(until, time.monotonic() + AFTER_AN_ERROR)
        if waiting:
            self.close()
        if errors:
            rank, error = min(errors.items())
            raise RuntimeError(f"rank {rank} of {count} (ranks with errors: {sorted(errors)}):\n{error}")
        if waiting:
            raise RuntimeError(f"ranks {sorted(waiting)} of {count} hang")
        return results

    def close(self) -> None:
        """End the processes; the next :meth:`run` starts others."""
        for process, connection in self._processes:
            connection.close()
            process.terminate()
            process.join()
        self._processes.clear()


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            call = connection.recv_bytes()
            connection.send_bytes(pickle.dumps(_answer(call)))
            freeze_libraries()


def _answer(call: bytes) -> tuple[bool, Any]:
    import torch

    try:
        rank, count, store, function, args = pickle.loads(call)
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        try:
            return True, function(*args)
        finally:
            torch.distributed.destroy_process_group()
    except BaseException:
        return False, traceback.format_exc()

"""Folders that appear whole or not at all: temporary names, fsync, rename, and the removal of leftovers.

Next to ``step_20`` these names can exist for a while, or for good when a process was killed. They start with
a dot and carry their owner, ``<pid>@<host>``:

====================  =====================================================================================
``.step_20.tmp-…``    being written
``.step_20.old-…``    the earlier ``step_20``, set aside while a new one takes its place
``.step_20.del-…``    being deleted
====================  =====================================================================================
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from offload.durable import sync

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"\.(step_\d+)\.(tmp|old|del)-(\d+)@(.+)")
# A leftover of another machine (a shared file system, an earlier container) cannot be asked for its process.
_FOREIGN_LEFTOVER_SECONDS = 24 * 3600


def step_folders(parent: Path) -> Iterator[tuple[int, Path]]:
    """The pairs (n, ``parent/step_<n>``), in no particular order."""
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            yield int(match[1]), path


def sibling(folder: Path, purpose: Literal["tmp", "old", "del"]) -> Path:
    """The hidden name beside ``folder`` for this process and ``purpose``."""
    return folder.with_name(f".{folder.name}.{purpose}-{os.getpid()}@{socket.gethostname()}")


def clean(parent: Path) -> None:
    """Removes what dead processes left in ``parent`` and puts back a folder that one had set aside.

    Call it only while this process itself writes nothing into ``parent``.
    """
    if not parent.is_dir():
        return
    for path in list(parent.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if not match or not _abandoned(path, int(match[3]), match[4]):
            continue
        home = parent / match[1]
        if match[2] == "old" and not home.exists():
            # Killed between the two renames of `publish`.
            with contextlib.suppress(OSError):
                os.rename(path, home)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _abandoned(path: Path, pid: int, host: str) -> bool:
    if host == socket.gethostname():
        if pid == os.getpid():
            return True  # of an earlier process with the same number
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False
    try:
        times = [path.stat().st_mtime, *(entry.stat().st_mtime for entry in path.rglob("*"))]
    except OSError:
        return False  # somebody is at work in it
    return time.time() - max(times) > _FOREIGN_LEFTOVER_SECONDS


def fsync_tree(folder: Path) -> None:
    """Forces every file and folder under ``folder``, and itself, to the disk."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            _fsync(os.path.join(root, name))
        _fsync(root)


def _fsync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path) -> None:
    """Gives a finished folder its name, in place of an earlier folder of that name.

    After a kill at any moment either the earlier folder or the new one is there, at the latest once
    :func:`clean` has run.
    """
    aside = None
    if final.exists():
        aside = sibling(final, "old")
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except OSError:
        if aside is not None:
            os.rename(aside, final)
        raise
    _fsync(final.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def delete(folder: Path) -> None:
    """Deletes a folder, renaming it first so that no half of it is ever found under its name.

    A failure is logged: what remains is removed by a later :func:`clean`.
    """
    doomed = sibling(folder, "del")
    try:
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        logger.warning("could not delete the old checkpoint %s: %s", folder, error)

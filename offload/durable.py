"""Forcing what was written to the disk, as far as its file system can."""

from __future__ import annotations

import errno
import functools
import logging
import os

logger = logging.getLogger(__name__)

# What file systems say that have no fsync (FUSE, some network and container mounts).
_CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def sync(descriptor: int) -> None:
    """``fsync``; where the file system has none, one warning in its place.

    Raises:
        OSError: if the data could not be written.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        _warn_once()


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "the file system of output_dir cannot force data to the disk (fsync): a loss of power may cost what was "
        "saved last"
    )

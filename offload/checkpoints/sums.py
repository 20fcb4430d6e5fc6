"""Checksums of a checkpoint's files: xxh3_64, which is faster than any disk and finds a single flipped bit."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import xxhash

_BLOCK = 4 * 2**20


def checksum(path: Path) -> str:
    """``xxh3_64:<16 hexadecimal digits>`` of a file's content."""
    digest = xxhash.xxh3_64()
    block = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return _text(digest)


def checksum_of(content: bytes) -> str:
    """The same of bytes in memory."""
    return _text(xxhash.xxh3_64(content))


class SummingFile:
    """A file to write to, front to back, that adds up what it is given: no second reading.

    Args:
        file: opened in binary mode.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = xxhash.xxh3_64()

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        self._digest.update(data)
        return written

    def flush(self) -> None:
        self._file.flush()

    @property
    def checksum(self) -> str:
        return _text(self._digest)


def _text(digest: xxhash.xxh3_64) -> str:
    return f"xxh3_64:{digest.hexdigest()}"

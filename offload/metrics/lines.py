"""Lines for the user beside a progress bar."""

from __future__ import annotations

import sys
from typing import TextIO

from offload.distributed.world import current


def say(line: str, *, stream: TextIO | None = None) -> None:
    """Prints a line (to stdout unless told otherwise) without tearing a progress bar that is being shown. Of several
    processes the main one does."""
    if not current().is_main:
        return
    stream = stream or sys.stdout
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:
        print(line, file=stream, flush=True)
    else:
        tqdm.tqdm.write(line, file=stream)
        stream.flush()

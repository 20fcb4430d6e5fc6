"""One of the processes that torchrun starts.

::

    python -m offload.cli.worker RECIPE.py --config PATH [key=value ...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    """Runs the recipe; returns the exit status."""
    here = os.getcwd()
    if sys.path[:1] == [here] and Path(__file__).parents[2] != Path(here):
        del sys.path[0]  # `python -m` puts it first, where a file of the user's would hide a library of its name
    try:
        from offload import _startup, streams
        from offload.cli.main import execute

        _startup.disarm()
        streams.open_missing()
        return execute(Path(sys.argv[1]), sys.argv[2:])
    except KeyboardInterrupt:  # while libraries are imported; the process that started this one tells
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""The index of a model whose weights are in several files."""

from __future__ import annotations

import json
from pathlib import Path


def indexed_files(index: Path) -> tuple[str, ...]:
    """The names of the files beside an index that its ``weight_map`` names, in order.

    Raises:
        ValueError: if it is no such index, or names what is not a file of its folder.
        OSError: it cannot be read.
    """
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if names and all(name and name == Path(name).name and name.isprintable() for name in names):
            return tuple(sorted(names))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it is not an index of weight files") from error
    raise ValueError("its weight_map does not name files of the folder")

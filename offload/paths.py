"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from offload.errors import UserError


def expanded(path: str | os.PathLike[str], key: str) -> Path:
    """A path with ``~`` and ``~user`` in full.

    Args:
        path: of what is there, or is yet to be made.
        key: that gives it, for messages.

    Raises:
        UserError: it is none, or this user may not look there.
    """
    text = os.fspath(path)
    if not text.strip() or "\0" in text:
        raise UserError(f"{key}: got {text!r}, expected the path of a file or folder")
    shown = ascii(text)[1:-1] if len(text) < 200 else f"{ascii(text)[1:100]}…"
    try:
        whole = Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{key}: {shown}: there is no such user on this machine: give the whole path") from error
    try:
        whole.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, UnicodeError) as error:  # too long, a loop of links, forbidden
        reason = getattr(error, "strerror", None) or "not a name that a file can have"
        raise UserError(f"{key}: {shown}: {reason}: give another path") from error
    return whole

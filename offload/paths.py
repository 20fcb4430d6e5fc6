"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from offload.errors import UserError

NO_HOME = "no home folder is known (HOME is not set, and this user has no entry in /etc/passwd)"


def with_home(path: str | os.PathLike[str], key: str) -> str:
    """A path or pattern with ``~`` and ``~user`` in full; whether anything is there is not looked at.

    Args:
        path: as the user wrote it.
        key: that gives it, for messages.

    Raises:
        UserError: there is no such user, or no home folder is known.
    """
    text = os.fspath(path)
    whole = os.path.expanduser(text)
    if whole.startswith("~"):
        problem = f"{NO_HOME}: set HOME, or" if whole.split("/")[0] == "~" else "there is no such user on this machine:"
        raise UserError(f"{key}: {_shown(text)}: {problem} give the whole path")
    return whole


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
    whole = Path(with_home(text, key))
    try:
        whole.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, UnicodeError) as error:  # too long, a loop of links, forbidden
        reason = getattr(error, "strerror", None) or "not a name that a file can have"
        raise UserError(f"{key}: {_shown(text)}: {reason}: give another path") from error
    return whole


def _shown(text: str) -> str:
    """A path for a message, whatever characters it has."""
    return ascii(text)[1:-1] if len(text) < 200 else f"{ascii(text)[1:100]}…"

"""A machine's measured rates, kept in the user's cache so that they are measured once: ``tune doctor`` writes them."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offload.durable import sync

FORMAT = 1


AT_REST = 0.9
"""Of its cores, what a process gets at least where nothing else works."""


def busy(rates: Mapping[str, Any]) -> str:
    """What stood in the way of measuring, and the way out; empty where nothing did, or it is not known.

    Args:
        rates: of a profile.
    """
    had = rates.get("cores_had", 1.0)
    if had >= AT_REST:
        return ""
    return (
        f"other programs, or a limit, had {1 - had:.0%} of the cores then: predicted steps are too long; measure again "
        "at rest with `tune doctor`"
    )


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Profile:
    """What was measured, and on what.

    Attributes:
        machine: what a profile holds for: processor, cores, device, driver, torch. Another machine's, or the same one's
            with another card, is no profile of this one.
        rates: of :mod:`offload.plan.rates`, by name.
        date: of the measurement, ISO 8601.
    """

    machine: dict[str, Any]
    rates: dict[str, Any]
    date: str = field(default_factory=_now)


def origin(profile: Profile) -> str:
    """What measured a profile, when, and whether to measure again, in words."""
    note = busy(profile.rates)
    return f"`tune doctor` measured on {profile.date[:10]}" + (f" ({note})" if note else "")


def profile_path() -> Path:
    """``~/.cache/tune-offload/machine.json``, or below ``XDG_CACHE_HOME``; OSError where there is neither."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "tune-offload" / "machine.json"
    except RuntimeError as error:  # no HOME, and a user without an entry, as in a container
        raise FileNotFoundError("there is no home folder: set XDG_CACHE_HOME") from error


def write_profile(profile: Profile) -> Path:
    """Keeps it, whole or not at all; OSError where that cannot be done."""
    path = profile_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **asdict(profile)}, file, indent=2)
            file.flush()
            sync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_profile(machine: dict[str, Any]) -> Profile | None:
    """What was measured on ``machine``; None where nothing was, or on another one."""
    try:
        content = json.loads(profile_path().read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["machine"] != machine:
            return None
        return Profile(content["machine"], content["rates"], content["date"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

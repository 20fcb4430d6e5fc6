"""``checkpoint.json``: which files make a checkpoint, how large they are and their checksums.

A folder ``step_<n>`` is a checkpoint if it has one and the files have the sizes noted there: that is cheap, and asked
of every folder. The checksums are compared before anything is read (:func:`verify`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from offload.checkpoints import folders as checkpoint_folders
from offload.checkpoints.sums import checksum, checksum_of
from offload.errors import UserError

logger = logging.getLogger(__name__)

MANIFEST_NAME = "checkpoint.json"
FORMAT = 1


class DamagedCheckpoint(UserError):
    """A checkpoint that is incomplete, or does not hold what was written. An earlier one may be good."""


@dataclass(frozen=True)
class Manifest:
    """What ``checkpoint.json`` says.

    Attributes:
        step: the step after which the checkpoint was saved.
        sequence: counts the checkpoints of a folder in the order in which they were saved.
        sizes: bytes of each file, by its path in the folder.
        sums: checksums, likewise; empty where an earlier version of this program wrote none.
    """

    step: int
    sequence: int
    sizes: Mapping[str, int]
    sums: Mapping[str, str]


def write(folder: Path, *, step: int, sequence: int, sums: Mapping[str, str]) -> None:
    """Writes the manifest of all files in ``folder``.

    Args:
        folder: holds everything but the manifest.
        step: as in :class:`Manifest`, and so ``sequence``.
        sums: checksums that are known already; the others are computed here.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    content = {
        "format": FORMAT,
        "step": step,
        "sequence": sequence,
        "files": {name: path.stat().st_size for name, path in paths.items()},
        "checksums": {name: sums.get(name) or checksum(path) for name, path in paths.items()},
    }
    content["checksum"] = _own_checksum(content)
    (folder / MANIFEST_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are there in the sizes noted.

    Raises:
        DamagedCheckpoint: if the manifest is damaged, or a file is missing or has another size.
        UserError: if the folder is no checkpoint.
    """
    if not folder.is_dir():
        raise UserError(f"there is no checkpoint {folder}")
    path = folder / MANIFEST_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format"]
        if version != FORMAT:
            raise UserError(
                f"{folder} was written by another version of tune-offload (format {version!r}, this is {FORMAT})"
            )
        manifest = _parse(content)
    except FileNotFoundError as error:
        raise UserError(f"{folder} is not a checkpoint of a run: it has no {MANIFEST_NAME}") from error
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: resume from another checkpoint") from error
    for name, size in manifest.sizes.items():
        file = folder / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{folder} is incomplete: {name} is missing: resume from another checkpoint")
        if file.stat().st_size != size:
            raise DamagedCheckpoint(
                f"{folder} is damaged: {name} has {file.stat().st_size} bytes, {size} were written: resume "
                "from another checkpoint"
            )
    return manifest


def difference(folder: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """Compares checksums of files with the manifest's; reads every byte once.

    Args:
        folder: of the checkpoint.
        manifest: its.
        names: of the files.

    Returns:
        What to say of the first that differs or cannot be read; None if they are as they were written.
    """
    for name in names:
        expected = manifest.sums[name]
        try:
            found = checksum(folder / name)
        except OSError as error:
            return f"{folder} is damaged: {name} cannot be read ({error.strerror}): resume from another checkpoint"
        if found != expected:
            return (
                f"{folder} is damaged: {name} is not what was written (its checksum differs): resume from another "
                "checkpoint"
            )
    return None


_told: set[str] = set()


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's ``output_dir`` whose files are all there, in the order in which they were saved.

    Of each of the others a line is told, once.
    """
    found = []
    for step, path in sorted(checkpoint_folders.step_folders(folder)):
        try:
            found.append((read(path).sequence, step, path))
        except UserError as error:
            if str(error) not in _told:
                _told.add(str(error))
                logger.warning("skipped: %s", error)
    return [path for _, _, path in sorted(found)]


def next_sequence(folder: Path) -> int:
    """The number that the next checkpoint in ``folder`` gets."""
    checkpoints = whole_checkpoints(folder)
    return read(checkpoints[-1]).sequence + 1 if checkpoints else 1


def _parse(content: Mapping[str, Any]) -> Manifest:
    """Raises KeyError, TypeError or ValueError for what :func:`write` does not write."""
    step, sequence = (_count(content[key]) for key in ("step", "sequence"))
    files, sums = content["files"], content.get("checksums", {})
    if not isinstance(files, dict) or not isinstance(sums, dict):
        raise TypeError("files and checksums are objects")
    for name in files:
        if "\0" in name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name} is not in the checkpoint")
    if "checksum" in content or sums:
        if content["checksum"] != _own_checksum(content) or sums.keys() != files.keys():
            raise ValueError("the manifest is not what was written")
        if not all(isinstance(text, str) for text in sums.values()):
            raise TypeError("checksums are texts")
    return Manifest(step, sequence, {name: _count(size) for name, size in files.items()}, sums)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def _own_checksum(content: Mapping[str, Any]) -> str:
    """Of the manifest's other members, however they are set in the file."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return checksum_of(json.dumps(rest, sort_keys=True).encode())

"""Which folder a path means, and what to do where it is no model's."""

from __future__ import annotations

import re
from pathlib import Path

from offload.component import nearest
from offload.errors import UserError

DOWNLOADS = Path("~/models")
"""Where ``tune download`` puts a model by itself, in a folder of its name."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def check_is_models(given: str, folder: Path) -> None:
    """Refuse what is no folder with a ``config.json``, and name the one that was meant or the way to it.

    Args:
        given: as the user wrote it.
        folder: the same, absolute.

    Raises:
        UserError: it is none.
    """
    if folder.is_file():
        raise UserError(f"model.path: {folder} is a file: give the folder that it lies in, model.path={folder.parent}")
    if not folder.is_dir():
        raise UserError(f"model.path: there is no folder {folder}: {_way_to(given, folder)}")
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"model.path: {folder} holds an adapter: give the folder of the model that it belongs to")
    inside = [each.parent for pattern in ("*", "snapshots/*") for each in folder.glob(f"{pattern}/config.json")]
    if inside:
        newest = max(inside, key=lambda each: (each / "config.json").stat().st_mtime)
        raise UserError(f"model.path: {folder} has no config.json: did you mean model.path={newest}?")
    raise UserError(f"model.path: {folder} has no config.json: it is not a model in Hugging Face's format")


def _way_to(given: str, folder: Path) -> str:
    siblings = [each.name for each in folder.parent.glob("*/")] if folder.parent.is_dir() else []
    near = nearest(folder.name, siblings)
    if near:
        return f"did you mean model.path={folder.parent / near}?"
    if _HUB_ID.fullmatch(given) and not folder.parent.is_dir():
        downloaded = DOWNLOADS / folder.name
        if (downloaded.expanduser() / "config.json").is_file():
            return f"did you mean model.path={downloaded}?"
        return f"download it with `tune download {given}`, and give model.path={downloaded}"
    return f"download one with `tune download OWNER/MODEL --output-dir {folder}`"

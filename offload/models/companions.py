"""The small files which belong to a model besides its weights and ``config.json``: tokenizer, generation settings,
licence, and the code of models that bring their own."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".spm", ".jinja", ".py")
_NAMES = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY).*", re.IGNORECASE)
_LIMIT = 100 * 2**20  # bytes; Gemma's tokenizer.json, the largest around, has 33 MiB
_EXCEPTIONS = (
    "config.json",
    "adapter_config.json",
    "checkpoint.json",
    "trainer_state.json",
    "ft_config.json",
)


def companions(directory: Path) -> list[str]:
    """Relative names of those files; nothing of other subfolders, no weights, no hidden files, nothing huge."""
    names = [path.name for path in directory.iterdir() if _is_companion(path)]
    # torchtune's Llama 3 tokenizer reads this one.
    if (directory / "original" / "tokenizer.model").is_file():
        names.append("original/tokenizer.model")
    return sorted(names)


def copy_companions(directory: Path, target: Path) -> None:
    """Copies :func:`companions` into ``target``, following links; warns where the folder is gone."""
    try:
        for name in companions(directory):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(directory / name, target / name)
    except FileNotFoundError as error:
        # Hours into a run, weights without a tokenizer beat no weights.
        logger.warning("%s is gone: %s is saved without its tokenizer files", error.filename, target)


def _is_companion(path: Path) -> bool:
    if path.name.startswith(".") or path.name.endswith(".index.json") or path.name in _EXCEPTIONS:
        return False
    if path.suffix not in _SUFFIXES and not _NAMES.fullmatch(path.name):
        return False
    return path.is_file() and path.stat().st_size <= _LIMIT

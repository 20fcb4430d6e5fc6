"""The model of a run before a weight is read: from the files that name its sizes, and the tokenizer that has to fit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from offload.component import LocalModuleError
from offload.config.interpolation import is_known
from offload.data.tokenizers import build_tokenizer
from offload.models.protocol import CausalLM
from offload.models.source import files_of, find_source
from offload.training.settings import TrainSettings

_TOKENIZERS = ("torchtune.", "offload.")
"""Packages whose tokenizers read files and do no more."""


def outline(
    settings: TrainSettings, dtype: torch.dtype, tree: dict[str, Any], *, adapts: bool, notes: list[str] | None
) -> CausalLM | None:
    """The model as the run will train it, on the meta device; None where it cannot be had.

    That is where a resolver prepares its files, where its weights are packed in 4 bits, and where it brings code of its
    own, which runs in the run alone.

    Args:
        settings: that the schema accepts.
        dtype: of the parameters.
        tree: the configuration's values.
        adapts: an adapter trains, and not the whole model.
        notes: where given, files may be elsewhere: it gets a line about those that are not here. The tokenizer is
            opened too.

    Raises:
        UserError: as a run does, but for what only the weights tell.
    """
    model, checkpointer, adapter = settings.model, settings.checkpointer, getattr(settings, "adapter", None)
    if not all(section is None or is_known(section, tree) for section in (model, checkpointer, adapter)):
        return None
    with contextlib.suppress(LocalModuleError):
        tokenizer = None if notes is None else _tokenizer(settings.tokenizer, tree, notes)
        files = files_of(model, checkpointer)
        if files is None:
            return None
        key, folder = files
        if notes is not None and folder is not None and _is_absent(folder):
            notes.append(f"{key}: there is no folder {folder} here: what depends on its files was not checked")
            return None
        meta = torch.device("meta")
        return find_source(model, checkpointer, adapter, tokenizer, meta, dtype, lambda line: None).outline(
            adapts=adapts
        )
    return None


def _tokenizer(section: DictConfig, tree: dict[str, Any], notes: list[str]) -> Any:
    """The tokenizer, where its files are here; None where they are not, or where building it could do anything."""
    path = str(section.get("_component_"))
    is_reader = path.startswith(_TOKENIZERS) and "tokenizer" in path.rpartition(".")[2].lower()
    if not is_reader or not is_known(section, tree):
        return None
    for name in map(str, section):
        value = section[name]
        is_file = name in ("path", "merges_file") or name.endswith("_path")
        if is_file and value is not None and _is_absent(value):
            notes.append(f"tokenizer.{name}: there is no {value} here: the tokenizer was not checked")
            return None
    return build_tokenizer(section)


def _is_absent(path: Any) -> bool:
    """Whether there is nothing at a path, which could be one on another machine."""
    try:
        return bool(str(path).strip()) and not Path(str(path)).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False  # it is none anywhere

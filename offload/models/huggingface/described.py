"""A model of transformers by its description alone: before its weights are here, or any of its files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import DictConfig
from torch import nn

from offload.config.loading import instantiate
from offload.models.huggingface import published
from offload.models.huggingface.adapter import AdaptedModel
from offload.models.huggingface.loading import auto_class, read_config
from offload.models.huggingface.model import HuggingFaceModel
from offload.models.huggingface.quantized import packed_weights
from offload.models.protocol import Packed


def describe(
    section: DictConfig, adapter: DictConfig | None, dtype: torch.dtype, *, adapts: bool
) -> tuple[HuggingFaceModel, Packed] | None:
    """The model on the meta device, and those of its weights that are in 4 bits: stored so, or by ``load_in_4bit``.

    Its dimensions are those of ``config.json`` in the folder, else those that are published for the repository that the
    folder is named after; None where there are neither.

    Args:
        section: the model's.
        adapter: one of peft's configurations.
        dtype: of the parameters.
        adapts: an adapter trains, and not the whole model.

    Raises:
        UserError: config.json cannot be read, or no adapter fits.
    """
    folder = Path(str(section.path)).expanduser()
    if (folder / "config.json").is_file():
        config = read_config(folder, bool(section.get("trust_remote_code")))
    else:
        known = {each.repository.split("/")[1]: each.config for each in published.MODELS.values()}
        if folder.name not in known:
            return None
        config = published.config_of(known[folder.name])
    with torch.device("meta"), _without_initial_values():
        module: Any = auto_class(config).from_config(config, dtype=dtype)
    packed = packed_weights(module, folder, load_in_4bit=bool(section.get("load_in_4bit")))
    model = HuggingFaceModel(module)
    if adapts and adapter is not None:
        model = AdaptedModel(model, instantiate(adapter))
    return model, packed


@contextlib.contextmanager
def _without_initial_values() -> Iterator[None]:
    """Modules draw no numbers for tensors that have no memory, which takes longer than making them."""
    with contextlib.ExitStack() as stack:
        for kind in (nn.Linear, nn.Embedding, nn.Conv2d, nn.LayerNorm):
            stack.enter_context(mock.patch.object(kind, "reset_parameters", lambda self: None))
        yield

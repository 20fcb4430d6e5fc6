"""The door to the models: which library a ``model`` section means. Nothing else asks that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from offload.component import resolve
from offload.errors import UserError
from offload.models.huggingface import described as huggingface_described
from offload.models.huggingface import from_pretrained
from offload.models.huggingface import source as huggingface
from offload.models.huggingface.answers import HuggingFaceAnswerer
from offload.models.protocol import Answerer, CausalLM, ModelSource, Packed, Sampling, SavedRuns
from offload.models.torchtune import described as torchtune_described
from offload.models.torchtune import source as torchtune
from offload.models.torchtune.answers import TorchtuneAnswerer
from offload.models.torchtune.architecture import BUILDER_ARGUMENTS

PASSED = (*BUILDER_ARGUMENTS, "device", "dtype")
"""Arguments that a model need not have from its section: a recipe, or the base checkpoint's config.json, has them."""

__all__ = [
    "PASSED",
    "check_divisible",
    "check_section",
    "describe",
    "empty_model",
    "files_of",
    "find_answerer",
    "find_source",
]

Tell = Callable[[str], object]


def _is_of_transformers(model: DictConfig) -> bool:
    component = resolve(str(model["_component_"]), key="model._component_")
    return component is from_pretrained


def check_section(section: DictConfig, device: torch.device, dtype: torch.dtype, *, adapts: bool) -> None:
    """Refuse a ``model`` section before anything is read.

    Args:
        section: the component and its arguments.
        device: trains.
        dtype: of the parameters.
        adapts: an adapter trains, and not the whole model.

    Raises:
        UserError: names the key.
    """
    if _is_of_transformers(section):
        huggingface.check_section(section, device, dtype, adapts=adapts)


def check_divisible(section: DictConfig) -> None:
    """Refuse a ``model`` section whose weights several processes cannot divide.

    Raises:
        UserError: they are in 4 bits of bitsandbytes.
    """
    if _is_of_transformers(section) and (section.get("load_in_4bit") or not huggingface.is_plain_in_files(section)):
        raise UserError(
            "model: weights in 4 bits of bitsandbytes cannot be divided among processes: use "
            "lora_finetune_single_device, a model in 16 bits, or one of torchtune's qlora_* builders"
        )


def empty_model(section: DictConfig, dtype: torch.dtype, *, adapts: bool) -> nn.Module | None:
    """The model that a section describes by its arguments alone, on the meta device; None where a folder has it.

    Args:
        section: the component.
        dtype: of the parameters.
        adapts: an adapter trains, and not the whole model.

    Raises:
        UserError: it cannot be trained so.
    """
    return None if _is_of_transformers(section) else torchtune.empty_model(section, dtype, adapts=adapts)


def describe(
    section: DictConfig, adapter: DictConfig | None, dtype: torch.dtype, *, adapts: bool
) -> tuple[CausalLM, Packed] | None:
    """The model that trains, on the meta device, and those of its weights that are in 4 bits.

    No weight has to be there. None where nothing here tells the model's sizes.

    Args:
        section: the model's.
        adapter: of a transformers model that is trained so.
        dtype: of the parameters.
        adapts: an adapter trains, and not the whole model.

    Raises:
        UserError: it cannot be trained so.
    """
    if _is_of_transformers(section):
        return huggingface_described.describe(section, adapter, dtype, adapts=adapts)
    return torchtune_described.describe(section, dtype, adapts=adapts)


def masks_documents(section: DictConfig) -> bool:
    """As :class:`ModelSource` says, of the one for a ``model`` section."""
    of = huggingface.HuggingFaceSource if _is_of_transformers(section) else torchtune.TorchtuneSource
    return bool(of.masks_documents)


def files_of(model: DictConfig, checkpointer: DictConfig | None) -> tuple[str, Any] | None:
    """The key and the folder of the files that have a model's sizes, where reading them is enough to know it."""
    if not _is_of_transformers(model):
        return "checkpointer.checkpoint_dir", None if checkpointer is None else checkpointer.get("checkpoint_dir")
    return ("model.path", model.get("path")) if huggingface.is_told_by_its_files(model) else None


def find_source(
    model: DictConfig,
    checkpointer: DictConfig | None,
    adapter: DictConfig | None,
    tokenizer: Any,
    device: torch.device,
    dtype: torch.dtype,
    tell: Tell,
) -> ModelSource:
    """The source that the ``model`` section names.

    Args:
        model: the section of that name.
        checkpointer: the section of that name: a torchtune model has it, and no other.
        adapter: the section of that name: of a transformers model that is trained so.
        tokenizer: the run's; its vocabulary has to fit.
        device: where the model goes.
        dtype: of its parameters.
        tell: called with each line for the user.

    Raises:
        UserError: where the sections do not go together.
    """
    if _is_of_transformers(model):
        if checkpointer is not None:
            raise UserError(
                "checkpointer: a model of transformers reads and writes its own format; remove the section, and give "
                "the folder as model.path"
            )
        return huggingface.HuggingFaceSource(model, adapter, tokenizer, device, dtype, tell)
    if checkpointer is None:
        raise UserError(
            "checkpointer is missing: a torchtune model needs checkpointer._component_="
            "torchtune.training.FullModelHFCheckpointer, checkpointer.checkpoint_dir and checkpointer.model_type"
        )
    if adapter is not None:
        raise UserError(
            "adapter: is for models of transformers; torchtune's lora_* builders take lora_rank, lora_alpha and "
            "lora_attn_modules in model: remove the section"
        )
    return torchtune.TorchtuneSource(model, checkpointer, tokenizer, device, dtype, tell)


def find_answerer(
    model: DictConfig,
    checkpointer: DictConfig | None,
    make_tokenizer: Callable[[Path | None], Any],
    *,
    sampling: Sampling,
    base: Path | None,
    saved: SavedRuns,
    device: torch.device,
    dtype: torch.dtype,
    tell: Tell,
) -> Answerer:
    """The model that ``model`` and ``checkpointer`` name, with its weights: a run's, a checkpoint's, a downloaded one.

    Args:
        model: the section of that name.
        checkpointer: the section of that name, for a torchtune model.
        make_tokenizer: makes the tokenizer, of the folder that it is told, or as the configuration says.
        sampling: how tokens are chosen.
        base: of a checkpoint that is an adapter alone; None: where its training had it.
        saved: reads what training runs left.
        device: where the model goes.
        dtype: of its parameters.
        tell: called with each line for the user.

    Raises:
        UserError: there is no such model.
    """
    options: dict[str, Any] = {"sampling": sampling, "base": base, "saved": saved}
    options |= {"device": device, "dtype": dtype, "tell": tell}
    if _is_of_transformers(model):
        return HuggingFaceAnswerer(model, make_tokenizer, **options)
    if checkpointer is None:
        raise UserError("checkpointer is missing: a torchtune model is read from checkpointer.checkpoint_dir")
    return TorchtuneAnswerer(model, checkpointer, make_tokenizer, **options)

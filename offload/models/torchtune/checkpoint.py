"""Checkpoints of torchtune's models in Hugging Face's format."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload import torchao_shim
from offload.errors import UserError, first_line, raise_shortage
from offload.models.companions import copy_companions
from offload.models.safetensors_header import read_safetensors_header
from offload.models.safetensors_layout import lay_out
from offload.models.shares import WeightFile
from offload.models.tensors import host_tensors
from offload.models.torchtune import base_checkpoint, peft_adapter
from offload.models.torchtune.conversion import to_hugging_face, with_gemma2_norms_exchanged

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"

# Bytes in one weight file. Only one at a time is held in host memory when the model is on an accelerator.
SHARD_BYTES = 4 * 2**30
# The only biases among the models here are those of Qwen2's q, k and v projections.
_BIASED_MAGNITUDE = re.compile(r"\.[qkv]_proj\.magnitude$")


class TorchtuneFormat:
    """A :class:`offload.models.protocol.ModelFormat`: torchtune's names in memory, Hugging Face's on the disk.

    Args:
        section: the config's ``checkpointer``: ``_component_: torchtune.training.FullModelHFCheckpointer``,
            ``checkpoint_dir``, ``model_type``, optionally ``checkpoint_files``.

    Raises:
        UserError: if the base checkpoint is incomplete or damaged.
    """

    key = "checkpointer.checkpoint_dir"

    def __init__(self, section: Mapping[str, Any]) -> None:
        torchao_shim.install()
        self.base = base_checkpoint.read_base(section)
        self.directory = self.base.directory
        self._torchtune: Any = None

    def prepare(self, output_dir: Path) -> None:
        # Made once: the base checkpoint's weight files may be gone by the time a checkpoint is saved.
        self._torchtune = self._checkpointer(self.directory, self.base.files, output_dir)
        self._output_dir = output_dir

    def load_base(self) -> dict[str, Tensor]:
        """The base model's weights under torchtune's names, on the CPU, in the files' dtypes.

        Raises:
            UserError: if they cannot be read or do not belong to ``model_type`` and ``config.json``.
        """
        return self._load(self._torchtune, self.directory)

    def load(self, folder: Path, files: Sequence[str]) -> dict[str, Tensor]:
        return self._load(self._checkpointer(folder, files, self._output_dir), folder)

    def _checkpointer(self, directory: Path, files: Sequence[str], output_dir: Path) -> Any:
        from torchtune.training import FullModelHFCheckpointer

        checkpointer = FullModelHFCheckpointer(
            checkpoint_dir=str(directory),
            checkpoint_files=list(files),
            model_type=self.base.model_type,
            output_dir=str(output_dir),
        )
        checkpointer._config = self.base.config
        return checkpointer

    def _load(self, checkpointer: Any, directory: Path) -> dict[str, Tensor]:
        try:
            with quiet_torchtune():
                model = checkpointer.load_checkpoint()["model"]
        except MemoryError:
            raise
        except Exception as error:  # torchtune raises Exception itself for a key that it does not know
            # What torchtune says of a file that it cannot read is only that; the cause says more.
            raise_shortage(error)
            cause = error.__cause__ if isinstance(error, ValueError) else None
            reason = first_line(cause or error)
            raise UserError(
                f"cannot read the weights in {directory} as checkpointer.model_type={self.base.model_type}: {reason} "
                "(check model_type and config.json, or download the files again)"
            ) from error
        if self.base.model_type == "GEMMA2":
            model = with_gemma2_norms_exchanged(model)
        if self.base.config["tie_word_embeddings"]:
            # Some files repeat the embedding as lm_head; torchtune's tied models have no such parameter.
            model.pop("output.weight", None)
        return model

    def write_model(self, folder: Path, weights: Mapping[str, Tensor], written: Callable[[Path], None]) -> None:
        """As the protocol says; a shard at a time, with their index."""
        shards = _shards(weights, SHARD_BYTES)
        staging = folder / "staging"
        nothing = folder / "nothing"
        nothing.mkdir()
        weight_map = {}
        total = 0
        for number, names in enumerate(shards, 1):
            with _pointed_at(self._torchtune, output_dir=staging, checkpoint_dir=nothing), quiet_torchtune():
                tensors = host_tensors(weights, names)
                if self.base.model_type == "GEMMA2":
                    tensors = with_gemma2_norms_exchanged(tensors)
                self._torchtune.save_checkpoint({"model": tensors}, epoch=0)
                del tensors
            (file,) = staging.glob("epoch_0/*.safetensors")
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            os.rename(file, folder / name)
            written(folder / name)
            for key, entry in read_safetensors_header(folder / name).items():
                weight_map[key] = name
                total += entry["data_offsets"][1] - entry["data_offsets"][0]
        shutil.rmtree(staging)
        nothing.rmdir()
        # torchtune's own index lists the names of the base checkpoint, written or not.
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
        self._write_companions(folder, weights)

    def begin_model(self, folder: Path, empty: Mapping[str, Tensor]) -> list[WeightFile]:
        shards = _shards(empty, SHARD_BYTES)
        files = []
        weight_map = {}
        for number, names in enumerate(shards, 1):
            tensors = self.in_files({name: empty[name] for name in names})
            files.append(WeightFile(f"model-{number:05}-of-{len(shards):05}.safetensors", tensors))
            weight_map.update(dict.fromkeys(lay_out(tensors)[1], files[-1].name))
        total = sum(tensor.nbytes for file in files for tensor in file.tensors.values())
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
        self._write_companions(folder, empty)
        return files

    def in_files(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return to_hugging_face(weights, self.base.model_type, self.base.config)

    def _write_companions(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        config = json.loads(self.base.config_text)
        # transformers loads in the dtype told here: fp32 weights would be rounded to a base model's bf16.
        dtype = _main_dtype(weights)
        for key in ("dtype", "torch_dtype"):
            if key in config:
                config[key] = dtype
        _write_json(folder / "config.json", config)
        copy_companions(self.directory, folder)

    def write_adapter(self, folder: Path, adapter: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        if self.base.model_type in peft_adapter.UNSUPPORTED_TYPES:
            logger.warning(
                "peft has no counterpart for adapters of %s, whose projections Hugging Face's model fuses: "
                "the adapter is in the checkpoint's recipe state only",
                self.base.model_type,
            )
            return
        if self.base.model_type == "QWEN2" and any(_BIASED_MAGNITUDE.search(name) for name in adapter):
            logger.warning(
                "torchtune's DoRA scales the biases of q, k and v too, peft's and merged weights do not: "
                "used there, %s gives other results than in training",
                folder,
            )
        peft_adapter.write(
            folder,
            host_tensors(adapter, list(adapter)),
            config,
            base_model=self.base.name_or_path,
            model_type=self.base.model_type,
            config=self.base.config,
        )


class _OneFile(dict[str, str]):
    """Sends every tensor to the same weight file."""

    def __missing__(self, key: str) -> str:
        return "0001"


@contextlib.contextmanager
def _pointed_at(checkpointer: Any, *, output_dir: Path, checkpoint_dir: Path) -> Iterator[None]:
    """Directs one call of ``save_checkpoint``.

    ``checkpoint_dir`` is an empty folder, since torchtune copies all that is in it, subfolders included.
    """
    before = checkpointer._output_dir, checkpointer._checkpoint_dir, checkpointer._weight_map
    checkpointer._output_dir, checkpointer._checkpoint_dir = output_dir, checkpoint_dir
    checkpointer._weight_map = _OneFile()
    try:
        yield
    finally:
        checkpointer._output_dir, checkpointer._checkpoint_dir, checkpointer._weight_map = before


@contextlib.contextmanager
def quiet_torchtune() -> Iterator[None]:
    """Without torchtune's own log lines below a warning."""
    chatty = logging.getLogger("torchtune.utils._logging")
    level = chatty.level
    chatty.setLevel(logging.WARNING)
    try:
        yield
    finally:
        chatty.setLevel(level)


def _shards(model: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Cuts the model's names, in order, into shards of at most ``limit`` bytes where possible.

    A layer stays whole, because conversions fuse tensors of one layer.
    """
    groups: dict[str, list[str]] = {}
    for name in model:
        parts = name.split(".")
        # layers.<n>.…: one group; anything else: a group of its own
        groups.setdefault(".".join(parts[:2]) if parts[0] == "layers" else name, []).append(name)
    shards: list[list[str]] = []
    room = 0
    for names in groups.values():
        size = sum(model[name].numel() * model[name].element_size() for name in names)
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1] += names
        room -= size
    return shards


def _main_dtype(model: Mapping[str, Tensor]) -> str:
    """The floating dtype of most of the model's elements, as ``config.json`` writes it: ``bfloat16``."""
    elements: dict[torch.dtype, int] = {}
    for tensor in model.values():
        if tensor.is_floating_point():
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.numel()
    return str(max(elements, key=lambda dtype: elements[dtype])).removeprefix("torch.")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""Checkpoints of transformers' models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from offload.engine.units import clean_name
from offload.models.companions import copy_companions
from offload.models.huggingface import shares
from offload.models.huggingface.model import HuggingFaceModel
from offload.models.shares import WeightFile

# Bytes in one weight file. Only one at a time is copied to the host when the model is on an accelerator.
SHARD_BYTES = 4 * 2**30


class HuggingFaceFormat:
    """A :class:`offload.models.protocol.ModelFormat`: what ``save_pretrained`` writes and ``from_pretrained`` reads.

    Args:
        directory: of the base model.

    Attributes:
        model: the model whose weights are written; set when it is there.
    """

    key = "model.path"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model: HuggingFaceModel | None = None

    def prepare(self, output_dir: Path) -> None:
        return None

    def load(self, folder: Path, files: Sequence[str]) -> None:
        return None

    def write_model(self, folder: Path, weights: Mapping[str, Tensor], written: Callable[[Path], None]) -> None:
        assert self.model is not None
        self.model.save(folder, weights, max_shard_bytes=SHARD_BYTES)
        copy_companions(self.directory, folder)
        for file in sorted(folder.glob("*.safetensors")):
            written(file)

    def begin_model(self, folder: Path, empty: Mapping[str, Tensor]) -> list[WeightFile]:
        assert self.model is not None
        named = {clean_name(name): tensor for name, tensor in empty.items()}
        files = shares.begin(self.model.in_checkpoints, folder, named, SHARD_BYTES)
        copy_companions(self.directory, folder)
        return files

    def in_files(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert self.model is not None
        return shares.in_files(self.model.in_checkpoints, {clean_name(name): weights[name] for name in weights})

    def write_adapter(self, folder: Path, adapter: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        from peft import PeftConfig
        from safetensors.torch import save_file

        from offload.models.tensors import host_tensors

        folder.mkdir()
        save_file(host_tensors(adapter, adapter), folder / "adapter_model.safetensors", metadata={"format": "pt"})
        PeftConfig.from_peft_type(**config).save_pretrained(str(folder))

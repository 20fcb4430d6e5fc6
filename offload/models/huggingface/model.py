"""A causal language model of transformers, as the recipes see it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.units import clean_name
from offload.models.blocks import untied
from offload.models.huggingface.head import Head
from offload.models.huggingface.packs import Packs
from offload.models.huggingface.quantized import is_in_4bit
from offload.models.size import Size, matmul_parameters

OTHER_TOWERS = ("vision", "audio")
"""How the keys of a configuration begin that describe what reads something else than tokens."""


class HuggingFaceModel:
    """A :class:`offload.models.protocol.CausalLM` around any model that ``AutoModelForCausalLM`` makes.

    Where the class holds more than a language model (``…ForConditionalGeneration``: towers for images and sound), the
    rest is frozen and carried along, so that a checkpoint has all that the original had.

    Args:
        module: the model, with its weights.
        name_or_path: where it came from: a folder, or a repository of the hub.
        dequantized: the format of its folder's weights, where they became plain ones; None where they were.
        tried: the same model before an adapter was put into it, whose trial of the head holds for this one too.

    Attributes:
        frozen: names of the submodules that are not part of the language model.
        is_in_4bit: it has weights in 4 bits, which cannot be trained.
    """

    def __init__(
        self,
        module: Any,
        *,
        name_or_path: str | None = None,
        dequantized: str | None = None,
        tried: HuggingFaceModel | None = None,
    ) -> None:
        self.module: nn.Module = module
        self.dequantized = dequantized
        self.is_in_4bit = any(is_in_4bit(part) for part in module.modules())
        self.name_or_path = name_or_path or module.config.name_or_path
        self._model = module
        self._packs = Packs(module)
        self.frozen = _freeze_other_towers(module)
        self._head = Head(module, module.config.get_text_config())
        if tried is None:
            self.has_separate_head = self._head.is_whole(self._device)
        else:
            self.has_separate_head, self._head.changes = tried.has_separate_head, tried._head.changes
        if self._device.type != "meta":
            self.settle()

    def settle(self) -> None:
        self._packs.settle()

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def max_seq_len(self) -> int | None:
        limit: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        return limit

    def size(self) -> Size:
        config = self._model.config.get_text_config()
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        experts = experts or getattr(config, "n_routed_experts", None)
        chosen = getattr(config, "num_experts_per_tok", None)

        def share(name: str) -> float:
            if any(f".{tower}." in f".{name}" for tower in self.frozen):
                return 0.0
            is_expert = ".experts." in name and "shared" not in name
            return chosen / experts if is_expert and chosen and experts else 1.0

        frozen, trainable = matmul_parameters(self.module, share=share)
        kinds = getattr(config, "layer_types", None)
        attending = [kind for kind in kinds or () if "attention" in kind and "linear" not in kind]
        heads = getattr(config, "num_attention_heads", None) or 0
        head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        layers = len(attending) if kinds else config.num_hidden_layers
        return Size(frozen, trainable, layers, heads, head_dim)

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding."""
        return int(self._model.get_input_embeddings().weight.shape[0])

    def hidden(self, inputs: Mapping[str, Any]) -> Tensor:
        return self._packs.call(self._head.input_of, inputs)

    def head(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self._head.module.parameters())

    def logits(self, inputs: Mapping[str, Any]) -> Tensor:
        return self._packs.call(lambda arguments: self._model(**arguments).logits, inputs)

    def check_packs(self) -> None:
        self._packs.check()

    def checkpoint_activations(self) -> None:
        """As the protocol says.

        Raises:
            ValueError: for a class that does not support it.
        """
        enable = getattr(self._model, "activation_checkpointing_enable", None)
        if enable is None:  # transformers < 5.20
            enable = self._model.gradient_checkpointing_enable
        enable({"use_reentrant": False})

    def offload_activations(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = torch.autograd.graph.save_on_cpu(
            pin_memory=self._device.type != "cpu", device_type=self._device.type
        )
        return context

    def _layers(self) -> Iterator[nn.Module]:
        for name, module in self.module.named_modules():
            parent, _, last = name.rpartition(".")
            if last.isdigit() and not any(part.isdigit() for part in parent.split(".")):
                yield module

    def blocks(self) -> list[nn.Module]:
        return untied([self._model.get_input_embeddings(), *self._layers()], self.head_parameters())

    def compile_layers(self) -> None:
        for module in self._layers():
            module.compile()

    @property
    def in_checkpoints(self) -> Any:
        """The model of transformers whose weights are saved."""
        return self._model

    def save(self, folder: Path, weights: Mapping[str, Tensor], *, max_shard_bytes: int) -> None:
        """Write weights, under the names of :attr:`module`, in the format that the model came in."""
        save_pretrained(self._model, folder, weights, max_shard_bytes)


def save_pretrained(model: Any, folder: Path, weights: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    """``model.save_pretrained`` of other weights, with conversions (experts that were fused) on the host."""
    # Where it is not recorded how the weights were read, transformers goes by the model's family.
    converts = getattr(model, "_weight_conversions", None) != []
    model.save_pretrained(
        folder,
        state_dict={clean_name(name): tensor.cpu() if converts else tensor for name, tensor in weights.items()},
        max_shard_size=max_shard_bytes,
    )


def _freeze_other_towers(model: Any) -> list[str]:
    """Freeze what does not belong to the language model; returns the names of those submodules."""
    text = model.config.get_text_config()
    kinds = {type(getattr(model.config, key)) for key in model.config.sub_configs if key.startswith(OTHER_TOWERS)}
    towers = {
        name: module
        for name, module in model.named_modules()
        if name and type(getattr(module, "config", None)) in kinds - {type(text)}
    }
    if text is model.config:
        towers = {name: model.get_submodule(name) for name in (_with_projection(model, tower) for tower in towers)}
    inside = tuple(f"{name}." for name in towers)
    frozen = {name: None for name in towers if not name.startswith(inside)}
    if text is not model.config:
        language = {id(module) for module in model.get_decoder().modules()}
        language |= {id(module) for module in (model.get_output_embeddings(), model.get_input_embeddings()) if module}
        kept = {id(p) for module in model.modules() if id(module) in language for p in module.parameters(recurse=False)}
        for name, param in model.named_parameters():
            if id(param) not in kept and not name.startswith(inside):
                param.requires_grad_(False)
                frozen[name.removeprefix("model.").split(".")[0]] = None
    for tower in towers.values():
        tower.requires_grad_(False)
    return list(dict.fromkeys(name.rpartition(".")[2] for name in frozen))


def _with_projection(model: Any, tower: str) -> str:
    """The outermost module around a tower that is no part of the language model: beside the tower it has what projects
    the tower's output to the width of the embeddings (Phi-4 multimodal)."""
    embeddings = {id(module) for module in (model.get_output_embeddings(), model.get_input_embeddings())}
    while parent := tower.rpartition(".")[0]:
        around = model.get_submodule(parent)
        if isinstance(around, nn.ModuleList) or embeddings & {id(module) for module in around.modules()}:
            break
        tower = parent
    return tower

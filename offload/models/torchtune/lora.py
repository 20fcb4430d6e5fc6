"""What LoRA, DoRA and QLoRA add to a model: which parameters train, and what a checkpoint holds of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX

from offload.engine.shards import local
from offload.errors import UserError
from offload.models.adapter import fitting_adapter
from offload.models.merging import MergedWeights, kept
from offload.models.torchtune.building import load_weights


def prepare_adapter(model: nn.Module) -> None:
    """Leave only the adapter trainable; before any weight is read.

    Args:
        model: built by one of torchtune's ``lora_*`` builders.

    Raises:
        UserError: for a model without an adapter, or with one that cannot be used after training.
    """
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    adapter = get_adapter_params(model)
    if not adapter:
        raise UserError(
            "model: it has no LoRA layers to train; use a lora_* builder such as "
            "torchtune.models.llama2.lora_llama2_7b with lora_attn_modules, or the recipe full_finetune_single_device"
        )
    if any(layer.lora_a.out_features < 1 for _, layer in _lora_layers(model)):
        raise UserError("model.lora_rank: expected at least 1: a LoRA layer of rank 0 trains nothing")
    biased = [name for name, layer in _lora_layers(model) if hasattr(layer, "magnitude") and layer.bias is not None]
    if biased:
        modules = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in biased}))
        raise UserError(
            f"model.use_dora: DoRA cannot train layers that have a bias ({modules}): torchtune scales the bias by "
            "DoRA's magnitudes, peft and merged weights do not, so the result would not be the model that was trained; "
            "set model.use_dora=False, or leave them out of model.lora_attn_modules"
        )
    set_trainable_params(model, adapter)


def draw_adapter(model: nn.Module) -> None:
    """Begin an adapter that changes nothing, by the run's seed: the same on any device and in any number of processes.

    Args:
        model: after :func:`prepare_adapter`. If it is on the meta device its adapter comes to the CPU, all of it.
    """
    generator = torch.Generator().manual_seed(torch.initial_seed())
    with torch.no_grad():
        for _, layer in _lora_layers(model):
            for part, is_random in ((layer.lora_a, True), (layer.lora_b, False)):
                values = torch.zeros(part.weight.shape)
                if is_random:
                    nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)  # torchtune's
                if part.weight.is_meta:
                    part.weight = nn.Parameter(values.to(part.weight.dtype))
                else:
                    part.weight.copy_(values)


def load_base_weights(model: nn.Module, weights: Mapping[str, Tensor], *, source: str) -> None:
    """Load the frozen base model; the adapter starts as one that changes nothing.

    Args:
        model: after :func:`prepare_adapter`.
        weights: the base model's, by torchtune's names; quantised on the way in where the model is.
        source: where they come from, for messages.

    Raises:
        UserError: for weights that do not fit the model.
    """
    load_weights(model, {**weights, **adapter_weights(model)}, source=source)
    for _, layer in _lora_layers(model):
        if hasattr(layer, "initialize_dora_magnitude"):
            # The magnitudes start as the norms of the loaded weights' rows.
            layer.initialize_dora_magnitude()


def load_adapter(model: nn.Module, adapter: Mapping[str, Tensor] | None) -> None:
    """Load a checkpoint's adapter, all of it, into a model that has its base weights.

    Args:
        model: after :func:`load_base_weights`.
        adapter: by torchtune's names; None for a checkpoint that has none.

    Raises:
        UserError: where it is not the adapter of a model like this.
    """
    model.load_state_dict(fitting_adapter(adapter, adapter_weights(model), key="model"), strict=False)


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors by torchtune's names, where they are."""
    from torchtune.modules.peft import get_adapter_params

    return {_plain(name): param.detach() for name, param in get_adapter_params(model).items()}


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """Rank, alpha, dropout and layers of a model's adapter, for peft."""
    layers = dict(_lora_layers(model))
    first = next(iter(layers.values()))
    rank = first.lora_a.out_features
    return {
        "r": rank,
        "lora_alpha": first.scaling * rank if hasattr(first, "scaling") else first.alpha,
        "lora_dropout": getattr(first.dropout, "p", 0.0),
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in layers}),
    }


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from torchtune.modules.peft import DoRALinear, LoRALinear

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear | DoRALinear))


def merged_weights(model: nn.Module, *, goes_on: bool = False) -> MergedWeights:
    """The model with its adapter merged in, by torchtune's names; what is merged is on the CPU.

    4-bit weights come out in the adapter's dtype.

    ``goes_on``: the adapter trains on while they are asked for, and is merged as it is now.
    """
    return _Merged(model, goes_on)


class _Merged(MergedWeights):
    def __init__(self, model: nn.Module, goes_on: bool) -> None:
        adapter = adapter_weights(model)
        self._dtype = next(iter(adapter.values())).dtype
        self._config = adapter_config(model)
        # Not state_dict(): torchtune rounds 4-bit weights to bf16 there, whatever the model computes in.
        self._params = {_plain(name): param.detach() for name, param in model.named_parameters()}
        self._names = [name for name in self._params if name not in adapter]
        if goes_on:
            self._params |= {name: kept(tensor) for name, tensor in adapter.items()}

    def merged_from(self, name: str) -> list[Tensor]:
        tensors = [self._params[each] for each in self._beside(name)]
        return [self._params[name], *tensors] if tensors or is_nf4(local(self._params[name])) else []

    def _beside(self, name: str) -> list[str]:
        """Names of an adapter's tensors that change a weight."""
        module = name.removesuffix(".weight")
        beside = (f"{module}.{part}" for part in ("lora_a.weight", "lora_b.weight", "magnitude"))
        return [each for each in beside if each in self._params]

    def made(self, name: str, wholes: Mapping[Tensor, Tensor]) -> Tensor:
        param = self._params[name]
        if param not in wholes:
            return param
        beside = self._beside(name)
        weights = {each: self.read(wholes[self._params[each]]) for each in (name, *beside)}
        if not beside:
            return weights[name]
        from torchtune.modules.peft import get_merged_lora_ckpt

        weights[name] = weights[name].clone()  # torchtune adds in place; on the CPU this is the live weight
        with torch.no_grad():
            merged = get_merged_lora_ckpt(weights, rank=self._config["r"], alpha=self._config["lora_alpha"])
        result: Tensor = merged[name]
        return result

    @property
    def empty(self) -> dict[str, Tensor]:
        """All of them on the meta device, without making one."""
        params = ((name, self._params[name]) for name in self._names)
        return {
            name: torch.empty(param.shape, dtype=self._dtype if is_nf4(local(param)) else param.dtype, device="meta")
            for name, param in params
        }

    def copies(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.device, int]:
        # As it was read, the copy that torchtune adds to, and what it adds; with magnitudes the sum twice more.
        has_magnitudes = any(name.endswith(".magnitude") for name in self._params)
        return torch.device("cpu"), 5 if has_magnitudes else 3

    def read(self, part: Tensor) -> Tensor:
        return (part.to(self._dtype) if is_nf4(part) else part.detach()).cpu()


def is_nf4(tensor: Tensor) -> bool:
    """Whether a weight is in 4 bits."""
    from torchao.dtypes.nf4tensor import NF4Tensor

    return isinstance(tensor, NF4Tensor)


def _plain(name: str) -> str:
    """A parameter's name without what the wrapper for activation checkpointing puts into it."""
    return name.replace(_CHECKPOINT_PREFIX, "")

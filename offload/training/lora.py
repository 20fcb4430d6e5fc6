"""What LoRA, DoRA and QLoRA add to a model: which parameters train, and what a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import UserError
from offload.training.model import load_weights


def load_base_weights(model: nn.Module, weights: Mapping[str, Tensor], *, source: str) -> None:
    """Load the frozen base model, and leave only the adapter trainable.

    Args:
        model: built by one of torchtune's ``lora_*`` builders.
        weights: the base model's, by torchtune's names; quantised on the way in where the model is.
        source: where they come from, for messages.

    Raises:
        UserError: for a model without an adapter, or weights that do not fit it.
    """
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    adapter = get_adapter_params(model)
    if not adapter:
        raise UserError(
            "model: it has no LoRA layers to train; use a lora_* builder such as "
            "torchtune.models.llama2.lora_llama2_7b with lora_attn_modules, or the recipe full_finetune_single_device"
        )
    set_trainable_params(model, adapter)
    missing = {name: param.detach() for name, param in model.named_parameters() if name in adapter}
    load_weights(model, {**weights, **missing}, source=source)
    for _, layer in _lora_layers(model):
        if hasattr(layer, "initialize_dora_magnitude"):
            # The magnitudes start as the norms of the loaded weights' rows.
            layer.initialize_dora_magnitude()


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors by torchtune's names, where they are."""
    from torchtune.modules.peft import get_adapter_params

    return {name: param.detach() for name, param in get_adapter_params(model).items()}


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


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model with its adapter merged in, by torchtune's names, on the CPU. The live model is not touched."""
    from torchtune.modules.peft import get_merged_lora_ckpt

    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    for name in [name for name in weights if name.endswith(".lora_a.weight")]:
        # torchtune adds in place; on the CPU this tensor is the live weight.
        base = name.replace(".lora_a.weight", ".weight")
        weights[base] = weights[base].clone()
    config = adapter_config(model)
    with torch.no_grad():
        return get_merged_lora_ckpt(weights, rank=config["r"], alpha=config["lora_alpha"])

"""What LoRA, DoRA and QLoRA add to a model: which parameters train, and what a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig
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
    from torchtune.modules.peft import DoRALinear, get_adapter_params, set_trainable_params

    adapter = get_adapter_params(model)
    if not adapter:
        raise UserError(
            "model: it has no LoRA layers to train; use a lora_* builder such as torchtune.models.llama2.lora_llama2_7b "
            "with lora_attn_modules, or the recipe full_finetune_single_device"
        )
    set_trainable_params(model, adapter)
    missing = {name: tensor for name, tensor in model.state_dict().items() if name in adapter}
    load_weights(model, {**weights, **missing}, source=source)
    for module in model.modules():
        if isinstance(module, DoRALinear):
            # The magnitudes start as the norms of the loaded weights' rows.
            module.initialize_dora_magnitude()


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors by torchtune's names, where they are."""
    from torchtune.modules.peft import get_adapter_params

    return {name: param.detach() for name, param in get_adapter_params(model).items()}


def adapter_config(section: DictConfig) -> dict[str, Any]:
    """Rank, alpha and layers of the adapter that a ``model`` section describes, for peft."""
    from torchtune.modules.peft import get_lora_module_names

    return {
        "r": section.lora_rank,
        "lora_alpha": section.lora_alpha,
        "lora_dropout": section.get("lora_dropout", 0.0),
        "target_modules": get_lora_module_names(
            list(section.lora_attn_modules),
            section.get("apply_lora_to_mlp", False),
            section.get("apply_lora_to_output", False),
        ),
    }


def merged_weights(model: nn.Module, section: DictConfig) -> dict[str, Tensor]:
    """The model with its adapter merged in, by torchtune's names, on the CPU. The live model is not touched."""
    from torchtune.modules.peft import get_merged_lora_ckpt

    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    for name in [name for name in weights if name.endswith(".lora_a.weight")]:
        # torchtune adds in place; on the CPU this tensor is the live weight.
        base = name.replace(".lora_a.weight", ".weight")
        weights[base] = weights[base].clone()
    with torch.no_grad():
        return get_merged_lora_ckpt(weights, rank=section.lora_rank, alpha=section.lora_alpha)

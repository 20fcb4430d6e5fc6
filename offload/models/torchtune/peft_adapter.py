"""Writing LoRA and DoRA adapters of torchtune's models in the form that ``peft`` loads.

torchtune 0.6.1's own conversion leaves three things to mend: it permutes the rows of Qwen2's q and k
projections although the model needs no permutation, does not permute DoRA's magnitudes of q and k although
the others need it, and does not say ``use_dora`` or ``task_type`` in the configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"

# Phi-3 fuses q, k, v and gate, up into one projection each in Hugging Face's model: an adapter of one part
# has no counterpart there.
UNSUPPORTED_TYPES = ("PHI3_MINI", "PHI4")
# These keep Hugging Face's order of rotary dimensions; the others are stored in Meta's (interleaved) order.
_UNPERMUTED_TYPES = ("QWEN2",)

_PARTS = {
    ".lora_a.weight": ".lora_A.weight",
    ".lora_b.weight": ".lora_B.weight",
    ".magnitude": ".lora_magnitude_vector",
}
_MODULES = {
    "q_proj": "q_proj",
    "k_proj": "k_proj",
    "v_proj": "v_proj",
    "output_proj": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "output": "lm_head",
}


def peft_weights(adapter: Mapping[str, Tensor], model_type: str, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Renames a torchtune adapter's tensors to peft's names, rows of q and k in Hugging Face's order.

    Args:
        adapter: torchtune's names, e.g. ``layers.0.attn.q_proj.lora_a.weight`` ``[rank, in]``,
            ``...lora_b.weight`` ``[out, rank]``, ``...magnitude`` ``[out]``.
        model_type: name of torchtune's ``ModelType``.
        config: the model's ``config.json``.

    Raises:
        ValueError: for a tensor which is no part of a LoRA or DoRA adapter.
    """
    from torchtune.models.convert_weights import _FROM_HF, get_mapped_key

    to_hf = {tune: hf for hf, tune in _FROM_HF.items() if tune is not None}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    result = {}
    for name, tensor in adapter.items():
        part = next((part for part in _PARTS if name.endswith(part)), None)
        if part is None:
            raise ValueError(f"{name} is no part of a LoRA or DoRA adapter")
        module = name[: -len(part)]
        hf_module = get_mapped_key(f"{module}.weight", to_hf).removesuffix(".weight")
        num_heads = heads.get(module.rpartition(".")[2])
        if num_heads is not None and part != ".lora_a.weight" and model_type not in _UNPERMUTED_TYPES:
            tensor = _interleaved_to_halves(tensor, num_heads)
        result[f"base_model.model.{hf_module}{_PARTS[part]}"] = tensor.contiguous()
    return result


def _interleaved_to_halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorders the rows of each head from rotary pairs (0, 1, 0, 1, …) to halves (0, 0, …, 1, 1, …).

    ``tensor``: ``[num_heads * head_dim, ...]``.
    """
    rows = tensor.shape[0]
    pairs = tensor.reshape(num_heads, rows // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(tensor.shape)


def peft_config(adapter: Mapping[str, Tensor], adapter_config: Mapping[str, Any], base_model: str) -> dict[str, Any]:
    """The contents of ``adapter_config.json``.

    Args:
        adapter: torchtune's names.
        adapter_config: ``r``, ``lora_alpha``, ``target_modules`` (torchtune's names: ``q_proj``,
            ``output_proj``, ``w1`` …) and any other field of peft's ``LoraConfig``. Not modified.
        base_model: Hugging Face repository or folder of the base model.

    Raises:
        ValueError: for a missing field or an unknown module.
    """
    missing = [key for key in ("r", "lora_alpha", "target_modules") if key not in adapter_config]
    if missing:
        raise ValueError(f"adapter_config lacks {', '.join(missing)}")
    unknown = [name for name in adapter_config["target_modules"] if name not in _MODULES]
    if unknown:
        raise ValueError(f"adapter_config names unknown target_modules: {', '.join(unknown)}")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "use_dora": any(name.endswith(".magnitude") for name in adapter),
        **adapter_config,
        "base_model_name_or_path": base_model,
    }
    config["target_modules"] = list(dict.fromkeys(_MODULES[name] for name in adapter_config["target_modules"]))
    return config


def write(
    folder: Path,
    adapter: Mapping[str, Tensor],
    adapter_config: Mapping[str, Any],
    *,
    base_model: str,
    model_type: str,
    config: Mapping[str, Any],
) -> None:
    """Writes ``adapter_model.safetensors`` and ``adapter_config.json`` into ``folder``."""
    folder.mkdir()
    save_file(peft_weights(adapter, model_type, config), folder / WEIGHTS_NAME, metadata={"format": "pt"})
    text = json.dumps(peft_config(adapter, adapter_config, base_model), indent=2)
    (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")

"""Names and shapes of weights, between Hugging Face's files and torchtune's models.

torchtune's checkpointer has the same functions, bound to whole files; these take any part of a model, which is what a
process reads or writes of one that it has a share of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_PHI3 = ("PHI3_MINI", "PHI4")


def to_torchtune(tensors: Mapping[str, Tensor], model_type: str, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of a Hugging Face checkpoint as those of torchtune's model.

    Args:
        tensors: by name; those that a conversion joins or splits have to come together.
        model_type: name of torchtune's ``ModelType``.
        config: a checked ``config.json``.
    """
    from torchtune.models import convert_weights
    from torchtune.models.gemma2._convert_weights import gemma2_hf_to_tune
    from torchtune.models.phi3._convert_weights import phi3_hf_to_tune
    from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune

    heads = _heads(config)
    is_tied = config["tie_word_embeddings"]
    if model_type in _PHI3:
        is_grouped = heads["num_heads"] != heads["num_kv_heads"]
        model = phi3_hf_to_tune(dict(tensors), **(heads if is_grouped else dict.fromkeys(heads)))
    elif model_type == "QWEN2":
        model = qwen2_hf_to_tune(dict(tensors), **heads, tie_word_embeddings=is_tied)
    elif model_type == "GEMMA2":
        model = gemma2_hf_to_tune(dict(tensors), **heads, head_dim=config.get("head_dim"))
        model = with_gemma2_norms_exchanged(model)
    else:
        model = convert_weights.hf_to_tune(dict(tensors), **heads, head_dim=config.get("head_dim"))
    if is_tied:
        # Some files repeat the embedding as lm_head; torchtune's tied models have no such parameter.
        model.pop("output.weight", None)
    return model


def to_hugging_face(tensors: Mapping[str, Tensor], model_type: str, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The inverse of :func:`to_torchtune`."""
    from torchtune.models import convert_weights
    from torchtune.models.gemma2._convert_weights import gemma2_tune_to_hf
    from torchtune.models.phi3._convert_weights import phi3_tune_to_hf
    from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf

    heads = _heads(config)
    model: dict[str, Tensor]
    if model_type in _PHI3:
        model = phi3_tune_to_hf(dict(tensors))
    elif model_type == "QWEN2":
        model = qwen2_tune_to_hf(dict(tensors), **heads, tie_word_embeddings=config["tie_word_embeddings"])
    elif model_type == "GEMMA2":
        tensors = with_gemma2_norms_exchanged(tensors)
        model = gemma2_tune_to_hf(tensors, **heads, head_dim=config.get("head_dim"))
    else:
        model = convert_weights.tune_to_hf(dict(tensors), **heads, head_dim=config.get("head_dim"))
    return model


def with_gemma2_norms_exchanged(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames the norms before and after each MLP into one another.

    torchtune 0.6.1 reads and writes Hugging Face's ``pre_feedforward_layernorm`` as the norm after the MLP
    and ``post_feedforward_layernorm`` as the one before it
    (https://github.com/meta-pytorch/torchtune/issues/2850).
    """
    other = {"mlp_norm": "mlp_scale", "mlp_scale": "mlp_norm"}
    return {".".join(other.get(part, part) for part in name.split(".")): model[name] for name in model}


def _heads(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "dim": config["hidden_size"],
    }

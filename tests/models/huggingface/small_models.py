"""The models that configs are named after, a few thousand parameters large."""

from __future__ import annotations

from typing import Any

_SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "image_size": 28,
    "mm_tokens_per_image": 1,
    "sliding_window": 16,
}


def scaled_down(values: dict[str, Any], words: int) -> dict[str, Any]:
    """``config.json`` of a model a few thousand parameters large, tied, grouped and windowed as the given one.

    Args:
        values: of the large one.
        words: of the vocabulary.
    """
    small = {
        key: scaled_down(value, words) if isinstance(value, dict) else (value and _SMALL.get(key, value))
        for key, value in values.items()
    }
    if "vocab_size" in small:
        few = values["num_key_value_heads"] < values["num_attention_heads"]
        small |= {"vocab_size": words, "num_key_value_heads": 2 if few else 4, "max_position_embeddings": 4096}
        small |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return small

"""Small random models of many of transformers' decoder families, each with what is odd about its family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 96

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"sliding_window": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
        **_MLA,
    },
    "ernie4_5": {},
    "exaone4": {},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
        "lm_head_multiplier": 0.5,
    },
    "gemma": {},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8, "final_logit_softcapping": 0.5},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "glm4": {},
    "gpt2": _GPT2,
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "logits_scaling": 4.0,
        **_MAMBA,
    },
    "helium": {},
    "hunyuan_v1_dense": {},
    "jamba": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "llama": {},
    "llama4_text": {
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "moe_layers": [1],
        "attention_chunk_size": 8,
    },
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nanochat": {},
    "nemotron": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": 4},
}

_VISION = {
    "gemma3": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 1,
    },
}


def make(family: str) -> Any:
    """A model of a family with random fp32 weights, biases and norms among them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {**COMMON, **FAMILIES.get(family, {})}
    if family in _VISION:
        kind = type(AutoConfig.for_model(family))
        text = type(AutoConfig.for_model(family).get_text_config())(**options)
        config = kind(text_config=text.to_dict(), **_VISION[family])
    else:
        config = AutoConfig.for_model(family, **options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.02)
    return model


def save(family: str, folder: Path) -> Any:
    """The model of a family, saved into a folder as its publisher would have."""
    model = make(family)
    model.save_pretrained(folder)
    return model

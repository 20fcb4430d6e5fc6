"""Small random models of transformers' families, each with what is odd about its family.

A family's configuration class is shrunk field by field, by the names that transformers' classes share; what a family
needs besides, and what makes its oddities show in a model this small, is in :data:`FAMILIES`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 96


def _names(text: str) -> list[str]:
    return text.split()


_SIZES: dict[int, str] = {
    1: "n_group topk_group n_groups mamba_n_groups n_shared_experts num_nextn_predict_layers",
    2: """depth num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers num_key_value_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok
        moe_topk moe_k""",
    4: """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads linear_num_heads
        swa_num_attention_heads index_n_heads num_experts n_routed_experts num_local_experts moe_num_experts
        sliding_window sliding_window_size window_size mamba_chunk_size chunk_size""",
    8: """head_dim swa_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim
        qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels dim_head mamba_d_head mamba_head_dim mamba_d_state
        ssm_state_size state_size mamba_n_heads mamba_num_heads hidden_size_per_layer_input query_pre_attn_scalar
        index_topk block_multiple_of""",
    16: """moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size
        moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank
        o_lora_rank router_hidden_size adapter_rank laurel_rank""",
    32: """hidden_size d_model n_embd emb_dim embedding_size input_embedding_size output_embedding_size embed_dim
        word_embed_proj_dim mamba_d_ssm out_hidden_size num_position_embeddings
        position_embedding_size""",
    48: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner dff dim_ff d_inner ffn_hidden_size
        intermediate_size_mlp dense_intermediate_size""",
    128: """max_position_embeddings n_positions n_ctx max_seq_len context_length original_max_position_embeddings
        max_source_positions max_target_positions""",
    VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
}
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "is_decoder": True}

_OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
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
    },
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
        "lm_head_multiplier": 0.5,
    },
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8, "final_logit_softcapping": 0.5},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "logits_scaling": 4.0,
    },
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
    "llama4_text": {
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "moe_layers": [1],
        "attention_chunk_size": 8,
    },
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": {"sliding_window": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
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
    "starcoder2": {"sliding_window": 4},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "rwkv": {"rescale_every": 0},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_dt_rank": 4},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "roc_bert": {"pronunciation_vocab_size": 32, "shape_vocab_size": 32},
    "longcat_flash": {"zero_expert_num": 2},
    "gemma4_text": {"global_head_dim": 16},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "reformer": {
        "axial_pos_embds": False,
        "hidden_dropout_prob": 0.0,  # it seeds its dropout from the clock
        "local_attention_probs_dropout_prob": 0.0,
        "attention_head_size": 8,
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "attn_layers": ["local", "local"],
        "feed_forward_size": 48,
    },
    **{
        family: {
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
        }
        for family in ("glm46v", "glm4v", "glm_ocr", "qwen2_vl", "qwen2_5_vl", "paddleocr_vl")
    },
    "blt": {
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
        "global_config": {"hidden_size": 64, "encoder_cross_output_size": 64},
        "encoder_hash_byte_group_vocab": 32,
    },
    "emu3": {
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "codebook_size": 32},
        "vocabulary_map": {"<image>": 90, "<|extra_200|>": 91, "<|visual token 000000|>": 92},
    },
    **{
        family: {
            "backbone_hidden_size": 32,
            "text_config": {
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 0,
                "num_kv_shared_layers": 2,
            },
        }
        for family in ("gemma4_assistant", "gemma4_unified_assistant")
    },
    "gemma4": {"vision_config": {"global_head_dim": 8}},
    "dots3_note": {"text_config": {"num_key_value_heads": 4}},
    "youtu": {"pad_token_id": None},  # transformers zeroes the padding token's embedding whenever it loads one
    "minicpm3": {"dim_model_base": 16},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
}

CAUSAL = _names("""
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation big_bird
    bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom blt camembert codegen cohere cohere2
    cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
    diffllama doge dots1 dots3_note_text electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1
    falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text
    gemma4_unified gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2
    gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
    inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2
    lfm2_moe lfm3 llama llama4 llama4_text longcat_flash mamba mamba2 marian mbart megatron-bert mellum
    mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama
    modernbert-decoder moshi moss_transcribe_diarize mpt mvp nanochat nemotron nemotron_h olmo olmo2 olmo3
    olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3 phi4_multimodal phimoe plbart prophetnet qwen2
    qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp
    qwen4_exp_text recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert roformer rwkv seed_oss
    smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet
    xlstm xmod youtu zamba zamba2 zaya
""")
"""What ``AutoModelForCausalLM`` knows by this name."""

WRAPPED = _names("""
    aria aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid exaone4_5 glm46v glm4v glm_ocr
    glmasr hyperclovax_vision_v2 idefics2 idefics3 internvl kimi_k25 kosmos-2.5 lfm2_vl lfm3_vl lighton_ocr
    llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3
    mistral4 mistral_large4 muse_glimmer ovis2 paddleocr_vl pp_chart2table qianfan_ocr qwen2_5_vl qwen2_audio
    qwen2_vl qwen3_asr qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm step3p7 unlimited_ocr video_llama_3
    video_llava vipllava voxtral
""")
"""What holds a language model beside towers for images and sound, and ``AutoModelForMultimodalLM`` alone knows."""

FAMILIES = {name: _OPTIONS.get(name, {}) for name in sorted(CAUSAL + WRAPPED)}

REFUSED = {
    "blip-2": "missing 1 required positional argument: 'pixel_values'",
    "cpmant": "looks ahead",
    "diffusion_gemma": "cannot be called with tokens alone",
    "gemma3n": "requires the timm library",
    "gemma4_assistant": "hidden_size_per_layer_input must be 0",
    "gemma4_unified_assistant": "layer types producing a cache",
    "idefics": "pixel_values",
    "instructblip": "pixel_values",
    "kosmos-2": "pixel_values",
    "musicgen": "'MusicgenConfig' object has no attribute",
    "musicgen_melody": "'MusicgenMelodyConfig' object has no attribute",
    "paligemma": "looks ahead",
    "pix2struct": "flattened_patches",
    "pp_formulanet": "is no causal language model",
    "t5gemma2": "cannot be called with tokens alone",
    "udop": "Bbox is required",
    "vision-encoder-decoder": "pixel_values",
}
"""What is said of families that cannot be trained, or not where this was written."""

IN_SUITE = _names("""
    deepseek_v3 gemma3 gpt_oss hrm_text prophetnet qwen2_vl qwen3_next zamba2
""")
"""Odd ones that are tried each time; all the others are slow."""


def config(family: str, kind: Any = None, **options: Any) -> Any:
    """A family's configuration, of a model as small as its class allows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family] if kind is None else kind
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    small = {name: size for name, size in SMALL.items() if name in fields}
    if "kv_lora_rank" in fields:  # latent attention: a key for each query
        small["num_key_value_heads"] = small["num_attention_heads"]
    nested = {name: options.pop(name, {}) for name in kind.sub_configs}
    for name, values in nested.items():
        part = kind.sub_configs[name]
        if not dataclasses.is_dataclass(part):  # any configuration: as by default
            part = type(getattr(kind(), name))
        small[name] = config("", part, **values).to_dict()
    return kind(**{**small, **options})


def make(family: str) -> Any:
    """A model of a family with random fp32 weights, biases and norms among them."""
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    name = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}[family]
    options = FAMILIES.get(family) or _OPTIONS.get(family, {})
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(config(family, **options), dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.02)
    return model


def save(family: str, folder: Path) -> Any:
    """The model of a family, saved into a folder as its publisher would have."""
    model = make(family)
    model.save_pretrained(folder)
    return model

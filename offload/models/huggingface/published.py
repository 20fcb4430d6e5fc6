"""The models that configs are named after: what their publishers' ``config.json`` says of their dimensions.

Dimensions are those of ``https://huggingface.co/<repository>/blob/main/config.json``, as
https://github.com/Lightning-AI/litgpt/blob/main/litgpt/config.py (Qwen3, Llama, Gemma 3, Phi-4) and the defaults of
transformers' configuration classes (SmolLM3, OLMo 3, gpt-oss but for layers and experts) repeat them. The number of
parameters is from elsewhere, so that one checks the other: the total that the Hub shows for the safetensors files, for
Qwen3 less the tied head that is stored a second time (as in
https://github.com/keras-team/keras-hub/blob/master/keras_hub/src/models/qwen3/qwen3_presets.py).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Published:
    """A model on the Hub.

    Attributes:
        repository: on https://huggingface.co.
        parameters: of the whole model.
        config: what ``config.json`` says of its architecture.
        besides: of the parameters, those of other towers than the language model.
    """

    repository: str
    parameters: int
    config: dict[str, Any] = field(repr=False)
    besides: int = 0


def _model(kind: str, layers: int, hidden: int, heads: tuple[int, int, int], ffn: int, words: int, **more: Any) -> Any:
    """``config.json`` of one model; heads are those of queries, those of keys and values, and the size of one."""
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": ffn,
        "vocab_size": words,
        **more,
    }


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool) -> Any:
    return _model("qwen3", layers, hidden, (heads, 8, 128), ffn, 151936, tie_word_embeddings=tied)


def _llama3(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool) -> Any:
    return _model("llama", layers, hidden, (heads, 8, hidden // heads), ffn, 128256, tie_word_embeddings=tied)


def _gemma3(layers: int, hidden: int, heads: tuple[int, int], ffn: int) -> Any:
    text = _model("gemma3_text", layers, hidden, (*heads, 256), ffn, 262208, sliding_window=1024)
    vision = {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": 27,
        "hidden_size": 1152,
        "num_attention_heads": 16,
        "intermediate_size": 4304,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    }
    return {"model_type": "gemma3", "text_config": text, "vision_config": vision, "mm_tokens_per_image": 256}


MODELS = {
    "qwen3_0_6b": Published("Qwen/Qwen3-0.6B", 596_049_920, _qwen3(28, 1024, 16, 3072, tied=True)),
    "qwen3_1_7b": Published("Qwen/Qwen3-1.7B", 1_720_574_976, _qwen3(28, 2048, 16, 6144, tied=True)),
    "qwen3_4b": Published("Qwen/Qwen3-4B", 4_022_468_096, _qwen3(36, 2560, 32, 9728, tied=True)),
    "qwen3_8b": Published("Qwen/Qwen3-8B", 8_190_735_360, _qwen3(36, 4096, 32, 12288, tied=False)),
    "qwen3_14b": Published("Qwen/Qwen3-14B", 14_768_307_200, _qwen3(40, 5120, 40, 17408, tied=False)),
    "qwen3_32b": Published("Qwen/Qwen3-32B", 32_762_123_264, _qwen3(64, 5120, 64, 25600, tied=False)),
    "llama3_1_8b": Published(
        "meta-llama/Meta-Llama-3.1-8B-Instruct", 8_030_261_248, _llama3(32, 4096, 32, 14336, tied=False)
    ),
    "llama3_1_70b": Published(
        "meta-llama/Meta-Llama-3.1-70B-Instruct", 70_553_706_496, _llama3(80, 8192, 64, 28672, tied=False)
    ),
    "llama3_2_1b": Published("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, _llama3(16, 2048, 32, 8192, tied=True)),
    "llama3_2_3b": Published("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824, _llama3(28, 3072, 24, 8192, tied=True)),
    "gemma3_1b": Published(
        "google/gemma-3-1b-it",
        999_885_952,
        _model("gemma3_text", 26, 1152, (4, 1, 256), 6912, 262144, sliding_window=512),
    ),
    "gemma3_4b": Published(
        "google/gemma-3-4b-it", 4_300_079_472, _gemma3(34, 2560, (8, 4), 10240), besides=419_816_304
    ),
    "gemma3_12b": Published(
        "google/gemma-3-12b-it", 12_187_325_040, _gemma3(48, 3840, (16, 8), 15360), besides=421_290_864
    ),
    "mistral_small_24b": Published(
        "mistralai/Mistral-Small-24B-Instruct-2501",
        23_572_403_200,
        _model("mistral", 40, 5120, (32, 8, 128), 32768, 131072, sliding_window=None),
    ),
    "phi4": Published("microsoft/phi-4", 14_659_507_200, _model("phi3", 40, 5120, (40, 10, 128), 17920, 100352)),
    "smollm3_3b": Published(
        "HuggingFaceTB/SmolLM3-3B", 3_075_098_624, _model("smollm3", 36, 2048, (16, 4, 128), 11008, 128256)
    ),
    "olmo3_7b": Published(
        "allenai/Olmo-3-7B-Instruct",
        7_298_011_136,
        _model("olmo3", 32, 4096, (32, 32, 128), 11008, 100278, sliding_window=4096),
    ),
    "gpt_oss_20b": Published(
        "openai/gpt-oss-20b",
        20_914_757_184,
        _model(
            "gpt_oss",
            24,
            2880,
            (64, 8, 64),
            2880,
            201088,
            num_local_experts=32,
            num_experts_per_tok=4,
            sliding_window=128,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
    ),
}


def config_of(values: dict[str, Any]) -> Any:
    """The configuration of transformers that ``config.json`` with these values gives."""
    from transformers import AutoConfig

    given = deepcopy(values)
    return AutoConfig.for_model(given.pop("model_type"), **given)

"""The model against config.json: judged by what transformers computes, and by the published models' values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file

from offload import torchao_shim
from offload.checkpoints.manager import CheckpointManager
from offload.cli import registry
from offload.config.loading import instantiate, load_config
from offload.errors import UserError
from offload.models.torchtune import TorchtuneModel
from offload.models.torchtune.architecture import (
    cap_logits,
    check_architecture,
    context_notes,
    fill_from_base,
)
from offload.models.torchtune.base_checkpoint import BaseCheckpoint, read_base
from offload.models.torchtune.checkpoint import TorchtuneFormat
from offload.models.vocabulary import check_vocabulary
from offload.training.loss import LinearCrossEntropyLoss, SummedLoss

torchao_shim.install()

SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
GEMMA = {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
# (torchtune's model type and builder, config.json)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama2": ("LLAMA2", "llama2.llama2", {"model_type": "llama"}),
    "llama3": ("LLAMA3", "llama3.llama3", {"model_type": "llama", "rope_theta": 5e5}),
    "llama3_1": ("LLAMA3", "llama3_1.llama3_1", {"model_type": "llama", "rope_theta": 5e5}),
    "llama3_2": ("LLAMA3_2", "llama3_2.llama3_2", {"model_type": "llama", "tie_word_embeddings": True}),
    "mistral": ("MISTRAL", "mistral.mistral", {"model_type": "mistral", "sliding_window": None}),
    "qwen2": ("QWEN2", "qwen2.qwen2", {"model_type": "qwen2", "tie_word_embeddings": True}),
    "phi3": ("PHI3_MINI", "phi3.phi3", {"model_type": "phi3"}),
    "gemma": ("GEMMA", "gemma.gemma", {"model_type": "gemma", **GEMMA}),
    "gemma2": (
        "GEMMA2",
        "gemma2.gemma2",
        {
            "model_type": "gemma2",
            **GEMMA,
            "query_pre_attn_scalar": 16,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
}


def write_checkpoint(folder: Path, family: str, **changes: Any) -> BaseCheckpoint:
    """A tiny model that transformers made and saved; ``changes`` are to config.json alone, made afterwards."""
    import transformers

    model_type, _, config = FAMILIES[family]
    torch.manual_seed(0)
    values = {**SIZES, **config}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**{"model_type": values.pop("model_type"), **values})
    )
    for name, parameter in model.named_parameters():
        is_head = "embed_tokens" in name or "lm_head" in name
        if parameter.dim() > 1:
            parameter.data.normal_(0, 1.0 if is_head else 0.3)
    folder.mkdir()
    tied = values.get("tie_word_embeddings", family.startswith("gemma"))
    weights = {n: t.contiguous() for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**SIZES, **config, **changes}))
    section = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(folder),
        "model_type": model_type,
    }
    return read_base(section)


def changed(base: BaseCheckpoint, folder: Path, **changes: Any) -> BaseCheckpoint:
    """The same weights with another config.json."""
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(base.directory / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**json.loads(base.config_text), **changes}))
    section = {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(folder)}
    return read_base({**section, "model_type": base.model_type})


def component(family: str, **arguments: Any) -> DictConfig:
    return OmegaConf.create({"_component_": f"torchtune.models.{FAMILIES[family][1]}", **arguments})


def build(section: DictConfig, base: BaseCheckpoint) -> tuple[Any, list[str]]:
    notes = fill_from_base(section, base)
    return instantiate(OmegaConf.create({"model": section}).model), notes


def largest_difference(model: Any, base: BaseCheckpoint, out: Path) -> float:
    """Between the logits of ``model`` with the base's weights and those of transformers."""
    import transformers

    section = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(base.directory),
        "model_type": base.model_type,
    }
    cap_logits(model)
    model.load_state_dict(CheckpointManager(TorchtuneFormat(section), out).format.load_base())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base.directory, attn_implementation="eager").eval()
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float((theirs(tokens).logits - model.eval()(tokens)).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bare_builder_takes_everything_from_config_json(family: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", family)
    section = component(family)
    model, (note,) = build(section, base)
    check_architecture(model, section, base)
    assert largest_difference(model, base, tmp_path / "out") < 1e-4
    assert "embed_dim=32" in note and str(tmp_path / "base" / "config.json") in note
    assert fill_from_base(section, base) == []  # nothing is left to fill


# What fits the weights' shapes, and computes something else.
CHANGES: dict[str, dict[str, Any]] = {
    "eps": {"rms_norm_eps": 1e-2},
    "rope_theta": {"rope_theta": 123.0},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}, "rope_theta": None},
    "rope_scaling": {"rope_scaling": SCALED},
    "rope_scaling_factor": {"rope_scaling": {**SCALED, "factor": 4.0}},
    "high_freq_factor": {"rope_scaling": {**SCALED, "high_freq_factor": 8.0}},
    "heads": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
    "activation": {"hidden_act": "relu", "hidden_activation": "relu"},
    "silu": {"hidden_act": "swish"},
    "window": {"sliding_window": 12},
    "attention_cap": {"attn_logit_softcapping": 1.0},
    "final_cap": {"final_logit_softcapping": 1.0},
    "scalar": {"query_pre_attn_scalar": 5},
}


# The others share their modules with these.
SAMPLED = ("llama3_1", "qwen2", "gemma2")


@pytest.mark.parametrize("family", [f if f in SAMPLED else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_refused_is_what_transformers_computes_differently(family: str, tmp_path: Path) -> None:
    """Each change of config.json under a model that was built without it."""
    right = write_checkpoint(tmp_path / "base", family)
    section = component(family)
    fill_from_base(section, right)
    refused = set()
    for name, change in CHANGES.items():
        base = changed(right, tmp_path / name, **change)
        model = instantiate(OmegaConf.create({"model": section}).model)
        try:
            check_architecture(model, section, base)
        except UserError:
            refused.add(name)
            if family == "phi3" and "rope_scaling" in change:
                continue  # transformers does not read that
            assert largest_difference(model, base, tmp_path / "out") > 1e-3, name
            continue
        if family in ("mistral", "phi3") and name == "window":
            continue  # no builder of torchtune has a window: context_notes tells
        assert largest_difference(model, base, tmp_path / "out") < 1e-4, name
    assert {"eps", "rope_theta", "rope_parameters", "rope_scaling", "heads"} <= refused
    assert ("silu" in refused) == (family == "gemma")  # all others have it, or read hidden_activation
    if family == "gemma2":
        assert {"window", "attention_cap", "final_cap", "scalar", "activation"} <= refused


@pytest.mark.parametrize(
    ("family", "argument", "value", "expected"),
    [
        ("llama2", "num_heads", 8, "set model.num_heads=4"),
        ("llama2", "norm_eps", 1e-2, "set model.norm_eps=1e-05"),
        ("llama2", "rope_base", 5e5, "set model.rope_base=10000"),
        ("llama3_1", "scale_factor", 8, "set model.scale_factor=1"),
        ("llama3_2", "tie_word_embeddings", False, "set model.tie_word_embeddings=True"),
        ("qwen2", "rope_base", 5e5, "set model.rope_base=10000"),
        ("gemma2", "hidden_capping_value", 50.0, "set model.hidden_capping_value=2"),
        ("gemma2", "query_pre_attn_scalar", 8, "set model.query_pre_attn_scalar=16"),
    ],
)
def test_an_explicit_value_that_differs_is_refused_with_the_override(
    family: str, argument: str, value: Any, expected: str, tmp_path: Path
) -> None:
    base = write_checkpoint(tmp_path / "base", family)
    section = component(family, **{argument: value})
    model, _ = build(section, base)
    assert section[argument] == value
    with pytest.raises(UserError) as caught:
        check_architecture(model, section, base)
    line = next(line for line in str(caught.value).splitlines() if line.startswith(f"model.{argument}: "))
    assert expected in line
    override = expected.removeprefix("set model.").split("=")
    mended = OmegaConf.merge(section, OmegaConf.from_dotlist(["=".join(override)]))
    assert isinstance(mended, DictConfig)
    check_architecture(build(mended, base)[0], mended, base)


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "phi3", "phi3")
    section = component("llama2")
    model, _ = build(section, base)
    with pytest.raises(UserError, match="turns interleaved pairs.*set model=torchtune.models.phi3.phi3"):
        check_architecture(model, section, base)
    base = write_checkpoint(tmp_path / "gemma", "gemma")
    section = component("llama3_2", tie_word_embeddings=True)
    model, _ = build(section, base)
    with pytest.raises(UserError, match="lacks Gemma's norms.*set model=torchtune.models.gemma.gemma"):
        check_architecture(model, section, base)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "lacks factor, low_freq_factor"),
        ({"rope_theta": "10000"}, "rope_theta in .* is 10000, expected a number above 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps in .* is -1"),
        ({"vocab_size": 3.5}, "vocab_size in .* a whole number"),
        ({"attention_bias": "no"}, "attention_bias in .* true or false"),
    ],
)
def test_what_no_builder_has_and_what_makes_no_sense(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "llama2", **change)
    with pytest.raises(UserError, match=expected):
        fill_from_base(component("llama2"), base)


def test_the_fused_loss_sees_capped_logits(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "gemma2")
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(2))
    results = []
    for loss in (LinearCrossEntropyLoss(num_output_chunks=2), torch.nn.CrossEntropyLoss()):
        torch.manual_seed(3)
        model, _ = build(component("gemma2"), base)
        cap_logits(model)
        total = SummedLoss(TorchtuneModel(model), loss)({"tokens": tokens}, tokens, tokens.numel())
        total.backward()
        results.append((total.item(), model.tok_embeddings.weight.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------- published models and configs

# config.json of the repositories that the configs' headers download, as far as it tells of the model.
_LLAMA3 = {
    "model_type": "llama", "hidden_act": "silu", "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "attention_bias": False, "num_key_value_heads": 8,
}  # fmt: skip
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
_MISTRAL = {
    "model_type": "mistral", "hidden_act": "silu", "vocab_size": 32000, "rms_norm_eps": 1e-5, **_8B,
    "num_key_value_heads": 8, "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip
_ROPE_3_1 = {**SCALED, "original_max_position_embeddings": 8192}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b-hf": {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "Llama-2-13b-hf": {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 13824,
        "max_position_embeddings": 4096, "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 40,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "Meta-Llama-3-8B": {**_LLAMA3, **_8B, "max_position_embeddings": 8192, "rope_scaling": None},
    "Meta-Llama-3.1-8B-Instruct": {**_LLAMA3, **_8B, "max_position_embeddings": 131072, "rope_scaling": _ROPE_3_1},
    "Meta-Llama-3.1-70B-Instruct": {**_LLAMA3, **_70B, "max_position_embeddings": 131072, "rope_scaling": _ROPE_3_1},
    "Llama-3.2-1B-Instruct": {
        **_LLAMA3, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "max_position_embeddings": 131072, "rope_scaling": {**_ROPE_3_1, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "Llama-3.2-3B-Instruct": {
        **_LLAMA3, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "head_dim": 128, "max_position_embeddings": 131072, "rope_scaling": {**_ROPE_3_1, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "Mistral-7B-v0.1": {**_MISTRAL, "rope_theta": 10000.0, "sliding_window": 4096},
    "Mistral-7B-Instruct-v0.2": {**_MISTRAL, "rope_theta": 1000000.0, "sliding_window": None},
    "Phi-3-mini-4k-instruct": {
        "model_type": "phi3", "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
        "tie_word_embeddings": False, "vocab_size": 32064,
    },
    "Qwen2.5-0.5B-Instruct": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 21, "num_attention_heads": 14, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen2.5-7B-Instruct": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 131072,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
    },
    "gemma-2-2b": {
        "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
        "vocab_size": 256000,
    },
}  # fmt: skip


def published(name: str, model_type: str, tmp_path: Path) -> BaseCheckpoint:
    """config.json of a published model beside a weight file that holds nothing."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    save_file({}, tmp_path / "model.safetensors")
    section = {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(tmp_path)}
    return read_base({**section, "model_type": model_type})


def config_of(name: str, *overrides: str) -> DictConfig:
    from offload.training.settings import TrainSettings

    return load_config(registry.find_config(name).path, list(overrides), notes=[], schema=TrainSettings)


def on_meta(cfg: DictConfig, base: BaseCheckpoint) -> list[str]:
    notes = fill_from_base(cfg.model, base)
    with torch.device("meta"):
        model = instantiate(cfg.model)
    check_architecture(model, cfg.model, base)
    return notes


OF_TORCHTUNE = [
    name
    for name, path in sorted(registry.our_configs().items())
    if not name.startswith("tiny") and "offload.models.huggingface" not in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", OF_TORCHTUNE)
def test_shipped_configs_build_the_model_that_their_headers_download(name: str, tmp_path: Path) -> None:
    cfg = config_of(name)
    folder = str(cfg.tokenizer.path).split("/")[2]
    base = published(folder, cfg.checkpointer.model_type, tmp_path)
    assert on_meta(cfg, base) == []
    if "max_seq_len" in cfg.tokenizer:
        assert context_notes(base, cfg.tokenizer.max_seq_len) == []


@pytest.mark.parametrize(
    ("config", "checkpoint", "told", "override"),
    [
        (
            "mistral_7b_offload",
            "Mistral-7B-Instruct-v0.2",
            "rope_theta is 1000000 in config.json and 10000 in the model",
            "model=torchtune.models.mistral.mistral",
        ),
        (
            "llama3_1_8b_offload",
            "Meta-Llama-3-8B",
            "rope_scaling.factor is 1 in config.json and 8 in the model",
            "model=torchtune.models.llama3.llama3",
        ),
        (
            "llama2_7b_lora",
            "Meta-Llama-3-8B",
            "vocab_size is 128256 in config.json and 32000 in the model",
            "model=torchtune.models.llama3.lora_llama3",
        ),
    ],
)
def test_a_config_on_another_checkpoint_names_the_override_that_mends_it(
    config: str, checkpoint: str, told: str, override: str, tmp_path: Path
) -> None:
    cfg = config_of(config)
    base = published(checkpoint, cfg.checkpointer.model_type, tmp_path)
    with pytest.raises(UserError) as caught:
        on_meta(cfg, base)
    (line,) = str(caught.value).splitlines()
    assert told in line and f"set {override}," in line
    (note,) = on_meta(config_of(config, override), base)
    assert "num_layers=32" in note


# ---------------------------------------------------------------------------------------------------- tokenizers


class Tokenizer:
    def __init__(self, size: int, **attributes: Any) -> None:
        self.vocab_size = size
        self.__dict__.update(attributes)


def test_a_tokenizer_larger_than_the_embedding() -> None:
    model = torch.nn.Module()
    model.tok_embeddings = torch.nn.Embedding(100, 2)
    fitting = [
        Tokenizer(100),
        Tokenizer(128, base_vocab_size=90, special_tokens={"a": 99, "<|image|>": 128}, image_id=128, pad_id=99),
        object(),
    ]
    for tokenizer in fitting:
        check_vocabulary(tokenizer, model.tok_embeddings.num_embeddings, checkpoint="checkpointer.checkpoint_dir")
    for tokenizer in (Tokenizer(101), Tokenizer(90, pad_id=100), Tokenizer(90, special_tokens={"<|x|>": 100})):
        with pytest.raises(UserError, match="it has 101 tokens, the model's embedding has 100 rows"):
            check_vocabulary(tokenizer, model.tok_embeddings.num_embeddings, checkpoint="checkpointer.checkpoint_dir")


def test_contexts_beyond_the_base_models_are_told(tmp_path: Path) -> None:
    base = published("Mistral-7B-v0.1", "MISTRAL", tmp_path / "mistral")
    assert context_notes(base, 4097) == []
    (note,) = context_notes(base, 8192)
    assert "tokenizer.max_seq_len is 8192" in note and "4096" in note
    assert len(context_notes(base, None)) == 2
    base = published("Qwen2.5-7B-Instruct", "QWEN2", tmp_path / "qwen")
    assert context_notes(base, 32768) == []


def test_norms_of_bf16_models_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    """torchtune's RMSNorm gives fp32 to PyTorch beside weights of bf16, which it warns of."""
    from offload.models.torchtune.building import build_model

    sizes = {"vocab_size": 64, "num_layers": 1, "num_heads": 2, "embed_dim": 16, "max_seq_len": 8, "num_kv_heads": 2}
    section = OmegaConf.create({"_component_": "torchtune.models.llama2.llama2", **sizes})
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        build_model(section, device=torch.device("cpu"), dtype=torch.bfloat16)(torch.zeros(1, 4, dtype=torch.long))
    finally:
        torch.set_warn_always(always)
    assert not [warning for warning in recwarn if "Mismatch dtype" in str(warning.message)]

"""What a base checkpoint's ``config.json`` says of the model, held against the model that a config builds.

Weights fit many models by their shapes: another number of heads, norm epsilon or rotary base computes another
function with the same tensors. Every value that both sides know is compared here, read from the built model's
modules, so that any builder and any component of a user's own is covered. What a config leaves to a builder's
default is taken from ``config.json``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from offload import component as components
from offload.component import resolve
from offload.errors import UserError
from offload.models.torchtune.base_checkpoint import FAMILIES, BaseCheckpoint

# Name in config.json -> argument of torchtune's builders. None: no builder takes it.
_ARGUMENTS: dict[str, str | None] = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "hidden_size": "embed_dim",
    "intermediate_size": "intermediate_dim",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_base",
    "rope_scaling.factor": "scale_factor",
    "rope_scaling.low_freq_factor": None,
    "rope_scaling.high_freq_factor": None,
    "rope_scaling.original_max_position_embeddings": None,
    "tie_word_embeddings": "tie_word_embeddings",
    "attention_bias": None,
    "mlp_bias": None,
    "hidden_act": None,
    "attn_logit_softcapping": "hidden_capping_value",
    "final_logit_softcapping": "final_capping_value",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "sliding_window": "sliding_window_size",
    "max_position_embeddings": "max_seq_len",
}
BUILDER_ARGUMENTS = tuple(argument for argument in _ARGUMENTS.values() if argument is not None)
"""Arguments of model builders that ``config.json`` can supply."""

# What transformers 5.23 takes where a config.json of that model_type has no such key: the fields' defaults in
# transformers/models/<model_type>/configuration_<model_type>.py. None: it is computed, or there is none.
_COMMON = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False, "head_dim": None}
_LLAMA = {**_COMMON, "hidden_act": "silu", "tie_word_embeddings": False}
_GEMMA = {**_COMMON, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": {**_LLAMA, "attention_bias": True},  # of q, k and v, without a key that says so
    "phi3": {**_LLAMA, "rms_norm_eps": 1e-5},
    "gemma": _GEMMA,
    "gemma2": {
        **_GEMMA,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
}
# torchtune's class of rotary embeddings -> which pairs of elements it rotates. A checkpoint's q and k projections are
# converted for one or the other.
_ROTARY_PAIRS = {
    "RotaryPositionalEmbeddings": "interleaved",
    "Llama3ScaledRoPE": "interleaved",
    "Qwen2RotaryPositionalEmbeddings": "halves",
    "Phi3RotaryPositionalEmbeddings": "halves",
}
_TANH_GELU = ("gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_pytorch_tanh")
_TEXT_KEYS = ("hidden_act",)
_BOOL_KEYS = ("tie_word_embeddings", "attention_bias", "mlp_bias")


@dataclass(frozen=True)
class _Difference:
    key: str  # in config.json
    wanted: Any
    built: Any

    def __str__(self) -> str:
        return f"{self.key} is {shown(self.wanted)} in config.json and {shown(self.built)} in the model"


# ------------------------------------------------------------------------------------------ what config.json says


def wanted_values(base: BaseCheckpoint) -> dict[str, Any]:
    """The values of ``config.json`` that decide what the model computes, by Hugging Face's names.

    What it leaves out has the default of transformers for its ``model_type``; values that are not known are absent.

    Raises:
        UserError: for a value of the wrong kind, and for a kind of rotary scaling that no builder has.
    """
    config = base.config
    defaults = _DEFAULTS.get(base.family, {})
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise _not_understood(base, "rope_scaling", rope, "a section")
    flat = {**defaults, **{key: config[key] for key in _ARGUMENTS if config.get(key) is not None}}
    if base.family == "gemma2":
        # Null there means none, where another key's null means the default.
        flat |= {key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping") if key in config}
        flat["hidden_act"] = config.get("hidden_activation") or defaults["hidden_act"]
    else:
        flat.pop("sliding_window", None)  # no other builder has one: see context_notes
    if base.family == "gemma" and flat["hidden_act"] == "gelu":
        flat["hidden_act"] = "gelu_pytorch_tanh"  # what its first releases meant by it
    if flat.get("head_dim") is None:
        flat["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if "rope_theta" in rope:
        flat["rope_theta"] = rope["rope_theta"]
    flat |= _rope_scaling(base, rope)
    return {key: _checked(base, key, value) for key, value in flat.items()}


def _rope_scaling(base: BaseCheckpoint, rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    partial = rope.get("partial_rotary_factor", base.config.get("partial_rotary_factor", 1.0))
    if partial is not None and partial != 1.0:
        raise UserError(
            f"model: {base.config_path} has partial_rotary_factor {shown(partial)}, and torchtune's models rotate "
            "whole heads: choose another checkpoint"
        )
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        missing = [key for key in keys if key not in rope]
        if missing:
            raise UserError(
                f"checkpointer.checkpoint_dir: rope_scaling in {base.config_path} lacks {', '.join(missing)}: download "
                "it again"
            )
        return {f"rope_scaling.{key}": rope[key] for key in keys}
    # "dynamic" changes what lies beyond max_position_embeddings alone.
    if kind in ("default", "dynamic") or (kind == "linear" and rope.get("factor") == 1):
        return {"rope_scaling.factor": 1}
    raise UserError(
        f"model: {base.config_path} has rope_scaling of type {kind!r}, which torchtune's models do not have: choose "
        "another checkpoint, or take rope_scaling out of config.json to train without it"
    )


def _checked(base: BaseCheckpoint, key: str, value: Any) -> Any:
    if key in _TEXT_KEYS:
        return "silu" if value == "swish" else "gelu_pytorch_tanh" if value in _TANH_GELU else value
    if key in _BOOL_KEYS:
        if not isinstance(value, bool):
            raise _not_understood(base, key, value, "true or false")
        return value
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < 1e300:
        raise _not_understood(base, key, value, "a number above 0")
    is_count = _ARGUMENTS[key] not in ("norm_eps", "rope_base", "hidden_capping_value", "final_capping_value")
    if is_count and not key.startswith("rope_scaling.") and (value != int(value) or value >= 2**31):
        raise _not_understood(base, key, value, "a whole number of a model's size")
    # rope_theta is 500000.0 in config.json where builders take 500000.
    return int(value) if value == int(value) and value < 2**31 else float(value)


def _not_understood(base: BaseCheckpoint, key: str, value: Any, expected: str) -> UserError:
    return UserError(
        f"checkpointer.checkpoint_dir: {key} in {base.config_path} is {shown(value)}, expected {expected}: download it "
        "again"
    )


# ----------------------------------------------------------------------------------------------- filling the gaps


def fill_from_base(section: DictConfig, base: BaseCheckpoint) -> list[str]:
    """Give ``section`` the arguments which it leaves out and ``config.json`` knows; returns a note that lists them.

    What the builder's own default says too stays out. Nothing that the section has is touched.

    Args:
        section: the ``model`` component; changed in place.
        base: the base checkpoint.

    Raises:
        UserError: as :func:`wanted_values`.
    """
    wanted = wanted_values(base)
    parameters = _parameters(section)
    filled = []
    for key, argument in _ARGUMENTS.items():
        parameter = parameters.get(argument) if argument is not None else None
        value = wanted.get(key)
        if argument is None or parameter is None or value is None or argument in section:
            continue
        if parameter.default is not inspect.Parameter.empty and _same(parameter.default, value):
            continue
        section[argument] = value
        filled.append(f"{argument}={shown(value)}")
    return [f"model: {', '.join(filled)}, from {base.config_path}"] if filled else []


def _parameters(section: DictConfig) -> Mapping[str, inspect.Parameter]:
    builder = resolve(str(section["_component_"]), key="model._component_")
    given = {str(name): section._get_node(name) for name in section if name != "_component_"}
    return components.signature_of(builder, given).parameters


# ------------------------------------------------------------------------------------------- what the model has


def built_values(model: nn.Module) -> dict[str, set[Any]]:
    """The same values in ``model``, read from its modules: each with all that its layers have.

    What cannot be read, in a model that is not made of torchtune's parts, is absent.
    """
    found: dict[str, set[Any]] = {}

    def note(key: str, value: Any) -> None:
        if value is not None:
            found.setdefault(key, set()).add(value)

    module: Any
    embedding = getattr(model, "tok_embeddings", None)
    note("vocab_size", getattr(embedding, "num_embeddings", None))
    note("hidden_size", getattr(embedding, "embedding_dim", None))
    layers = getattr(model, "layers", None)
    if isinstance(layers, nn.ModuleList):
        note("num_hidden_layers", len(layers))
    output = getattr(model, "output", None)
    if output is not None:
        note("tie_word_embeddings", hasattr(output, "tied_module"))
    for module in model.modules():
        if isinstance(getattr(module, "eps", None), int | float) and isinstance(getattr(module, "scale", None), Tensor):
            note("rms_norm_eps", module.eps)
        if type(module).__name__ in _ROTARY_PAIRS:
            note("rope_theta", module.base)
            note("rope_scaling.factor", getattr(module, "scale_factor", 1))
            note("rope_scaling.low_freq_factor", getattr(module, "low_freq_factor", None))
            note("rope_scaling.high_freq_factor", getattr(module, "high_freq_factor", None))
            note("rope_scaling.original_max_position_embeddings", getattr(module, "old_context_len", None))
        if all(hasattr(module, name) for name in ("q_proj", "num_heads", "num_kv_heads", "head_dim")):
            note("num_attention_heads", module.num_heads)
            note("num_key_value_heads", module.num_kv_heads)
            note("head_dim", module.head_dim)
            note("attention_bias", getattr(module.q_proj, "bias", None) is not None)
        if hasattr(module, "softcapping"):  # Gemma 2's attention
            found.setdefault("attn_logit_softcapping", set()).add(module.softcapping)
            note("query_pre_attn_scalar", module.scaling**-2)
            note("sliding_window", module.sliding_window_size)
        if all(hasattr(module, name) for name in ("w1", "w2", "activation")):
            weight = getattr(module.w1, "weight", None)
            note("intermediate_size", weight.shape[0] if isinstance(weight, Tensor) else None)
            note("mlp_bias", getattr(module.w1, "bias", None) is not None)
            note("hidden_act", _activation(module.activation))
    note("final_logit_softcapping", getattr(getattr(model, "norm", None), "capping_value", None))
    return found


def _activation(module: Any) -> str | None:
    if isinstance(module, nn.SiLU):
        return "silu"
    if isinstance(module, nn.GELU):
        return "gelu_pytorch_tanh" if module.approximate == "tanh" else "gelu"
    return None


def check_architecture(model: nn.Module, section: DictConfig, base: BaseCheckpoint) -> None:
    """Refuse a model that computes something else with the base checkpoint's weights than they were trained for.

    Args:
        model: as built from ``section``.
        section: the ``model`` component.
        base: the base checkpoint.

    Raises:
        UserError: names each value in ``config.json``, the model's, and the override that mends it.
    """
    wanted = wanted_values(base)
    if wanted["rope_scaling.factor"] == 1:
        # The other numbers of a scaling by 1 say nothing.
        wanted = {k: v for k, v in wanted.items() if k == "rope_scaling.factor" or not k.startswith("rope_scaling.")}
    built = built_values(model)
    differences = []
    for key, values in built.items():
        if key in wanted:
            other = next((value for value in values if not _same(value, wanted[key])), wanted[key])
            if not _same(other, wanted[key]):
                differences.append(_Difference(key, wanted[key], other))
    kind = _other_kind(model, base)
    if kind is None and not differences:
        return
    name = str(section["_component_"])
    parameters = _parameters(section)
    if "head_dim" not in parameters and any(d.key in ("num_attention_heads", "hidden_size") for d in differences):
        differences = [d for d in differences if d.key != "head_dim"]  # it follows from them
    settable = [d for d in differences if _ARGUMENTS[d.key] in parameters]
    if kind is None and len(settable) == len(differences):
        raise UserError("\n".join(_to_set(d) for d in differences))
    told = "; ".join([*([kind] if kind else []), *map(str, differences)])
    raise UserError(
        f"model: {name} builds another model than the one in {base.directory}: {told}: {_way_out(name, base)}"
    )


def _to_set(difference: _Difference) -> str:
    argument = _ARGUMENTS[difference.key]
    override = f"model.{argument}={shown(difference.wanted)}"
    return f"model.{argument}: {difference}: set {override}, or leave it out to take it from config.json"


def _way_out(name: str, base: BaseCheckpoint) -> str:
    builder = _component_of(name, base)
    if builder is None:
        return "choose a checkpoint of the model that it builds, or a component that builds this one"
    quantised = " model.quantize_base=True" if name.rpartition(".")[2].startswith("qlora_") else ""
    if builder == name:
        return f"no argument of {name} gives that: choose another checkpoint"
    return f"set model={builder}{quantised}, which takes what you leave out from config.json"


def _component_of(name: str, base: BaseCheckpoint) -> str | None:
    """torchtune's general builder for what ``config.json`` describes, with adapters if ``name`` builds them."""
    package = base.family
    if package == "llama":
        wanted = wanted_values(base)
        scaled, tied = wanted["rope_scaling.factor"] != 1, base.config["tie_word_embeddings"]
        # lora_llama2 takes no rope_base.
        plain = "llama2" if base.model_type == "LLAMA2" and wanted["rope_theta"] == 10000 else "llama3"
        package = "llama3_2" if tied else "llama3_1" if scaled else plain
    elif package not in _DEFAULTS:
        return None
    prefix = "lora_" if name.rpartition(".")[2].startswith(("lora_", "qlora_")) else ""
    return f"torchtune.models.{package}.{prefix}{package}"


def _other_kind(model: nn.Module, base: BaseCheckpoint) -> str | None:
    """What tells that the model is of another family, where no number does."""
    expected = "halves" if base.model_type in ("QWEN2", "PHI3_MINI", "PHI4") else "interleaved"
    names = {type(module).__name__ for module in model.modules()}
    pairs = {_ROTARY_PAIRS[name] for name in names if name in _ROTARY_PAIRS}
    if pairs and pairs != {expected}:
        return (
            f"its rotary embedding turns {'/'.join(sorted(pairs))} pairs, and the weights of "
            f"checkpointer.model_type={base.model_type} are for {expected} ones"
        )
    if base.family in FAMILIES and "TransformerDecoder" in names:
        is_gemma, wants_gemma = "GemmaRMSNorm" in names, base.family in ("gemma", "gemma2")
        if is_gemma != wants_gemma:
            return f"config.json is of a {base.family} model, the model {'has' if is_gemma else 'lacks'} Gemma's norms"
        if base.family == "gemma2" and "Gemma2Attention" not in names:
            return "config.json is of a gemma2 model, the model lacks its attention"
    return None


# ------------------------------------------------------------------------------------------------------- limits


def context_notes(base: BaseCheckpoint, max_seq_len: int | None) -> list[str]:
    """A line for each limit of the base model that samples of ``max_seq_len`` tokens may pass; None: any length."""
    config = base.config
    notes = []
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    limits = [(config.get("max_position_embeddings"), "was trained on at most", "positions beyond them are new to it")]
    if base.family in ("mistral", "phi3", "qwen2"):
        limits.append((window, "attends to the last", "torchtune's model to all of them"))
    # The last token of a sample is a label only.
    length = math.inf if max_seq_len is None else max_seq_len - 1
    for limit, verb, consequence in limits:
        if isinstance(limit, int) and length > limit:
            given = "no limit" if max_seq_len is None else max_seq_len
            notes.append(
                f"tokenizer.max_seq_len is {given}, and the base model {verb} {limit} tokens, {consequence}: set "
                f"tokenizer.max_seq_len={limit} if samples are longer"
            )
    return notes


# ------------------------------------------------------------------------------------------------------- Gemma 2


def cap_logits(model: nn.Module) -> None:
    """Move Gemma 2's final soft cap to the logits; other models are left alone.

    torchtune 0.6.1 caps what the final norm returns, where Gemma 2 caps the logits ("Gemma 2: Improving Open Language
    Models at a Practical Size", section 2).
    """
    from torchtune.models.gemma2._component_builders import Gemma2FinalNorm
    from torchtune.modules import TiedLinear

    class CappedTiedLinear(TiedLinear):
        """The tied projection, then ``cap * tanh(logits / cap)``."""

        def __call__(self, x: Tensor) -> Tensor:
            return torch.tanh(super().__call__(x) / cap) * cap

    norm = model.norm
    if isinstance(norm, Gemma2FinalNorm) and isinstance(model.output, TiedLinear):
        cap = norm.capping_value
        norm.logit_capping = nn.Identity()
        model.output = CappedTiedLinear(model.output.tied_module)


def _same(left: Any, right: Any) -> bool:
    # A bool is a number to Python: 1 == True.
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (left, right))
    # An epsilon may have passed through fp32.
    return math.isclose(left, right, rel_tol=1e-6) if numbers else left == right


def shown(value: Any) -> str:
    """``value`` as an override would have it."""
    if value is None:
        return "null"
    if isinstance(value, float) and value == value and abs(value) < 1e15 and value == int(value):
        return str(int(value))
    text = str(value) if str(value).isprintable() else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

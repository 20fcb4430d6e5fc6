"""A transformers model from a folder, on its device, without a second copy."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.errors import UserError, first_line, raise_shortage
from offload.models.huggingface import quantized
from offload.models.huggingface.attention import check_attention, not_usable
from offload.models.huggingface.folder import check_is_models
from offload.models.huggingface.model import HuggingFaceModel
from offload.models.safetensors_header import read_safetensors_header
from offload.models.safetensors_index import indexed_files
from offload.paths import expanded

LEAST_VERSION = (5, 20)
"""Tested; weight conversions that ``save_pretrained`` undoes began with 5."""


def from_pretrained(
    path: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    load_in_4bit: bool = False,
) -> HuggingFaceModel:
    """The model in a folder in Hugging Face's format, each tensor read straight to where it stays.

    Args:
        path: holds ``config.json`` and safetensors files.
        device: where the model goes. On the meta device no weight is read: names, shapes and what the files lack are
            known from their headers.
        dtype: of its parameters.
        attn_implementation: one of :data:`offload.models.huggingface.attention.KNOWN`; None for ``sdpa`` where the
            model can, else ``eager``.
        trust_remote_code: run the Python files that a folder brings.
        load_in_4bit: round linear layers but the head to NF4 with double quantisation (4.13 bits per weight), by
            bitsandbytes; they are frozen, for LoRA. https://arxiv.org/abs/2305.14314

    Raises:
        UserError: for a folder that holds no such model or only part of its weights.
    """
    import transformers

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < LEAST_VERSION:
        wanted = ".".join(map(str, LEAST_VERSION))
        raise UserError(
            f"model: transformers {transformers.__version__} is too old, {wanted} or newer is needed: "
            f"pip install 'transformers>={wanted}'"
        )
    check_attention(attn_implementation, device, dtype)
    folder = expanded(path, "model.path").absolute()
    check_is_models(str(path), folder)
    stored = _check_folder(folder)
    arguments = quantized.loading_arguments(folder, dtype, load_in_4bit=load_in_4bit)
    if load_in_4bit and device.type == "meta":
        arguments = {}  # there are no values to round; names and shapes stay
    config = read_config(folder, trust_remote_code)
    if device.type != "meta" and stored < _few(config):
        # The headers tell what is missing before transformers makes it up, in as much memory as the model takes.
        from_pretrained(path, device=torch.device("meta"), dtype=dtype, trust_remote_code=trust_remote_code)
    try:
        with _quiet() if device.type == "meta" else contextlib.nullcontext():
            loaded: Any = auto_class(config).from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                device_map={"": device},
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # and told by name
                **arguments,
            )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # building a model of odd values raises what it likes
        raise_shortage(error)
        if load_in_4bit and isinstance(error, RuntimeError) and "bitsandbytes" in str(error).lower():
            raise UserError(
                f"model.load_in_4bit=True: bitsandbytes does not work on {device} here ({first_line(error)}): leave it "
                "out"
            ) from error
        raise _explained(folder, error, attn_implementation) from error
    model, report = loaded
    _check_report(folder, report)
    packing = quantized.stored_format(folder)
    dequantized = packing if packing in quantized.DEQUANTIZED else None
    if dequantized:
        del model._weight_conversions  # saving would go back to names of quantised weights
    if load_in_4bit and device.type != "meta":
        quantized.check_rounded(model)
    quantized.settle_4bit(model, dtype)
    _make_apart(model, copies=device.type == "cpu")
    try:
        return HuggingFaceModel(model, dequantized=dequantized)
    except NotImplementedError as error:  # it has no embedding of tokens
        raise UserError(
            f"model.path: {type(model).__name__} is no causal language model: {first_line(error)}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress of what takes no time, and no table beside the line that is told."""
    from transformers.utils import logging

    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def auto_class(config: Any) -> Any:
    """What opens the whole of a folder: where it holds more than a language model, ``AutoModelForCausalLM`` knows
    nothing of it, or opens the language model alone."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    whole = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)
    is_whole = whole in (config.architectures or ()) or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForMultimodalLM if whole is not None and is_whole else AutoModelForCausalLM


def _make_apart(model: nn.Module, *, copies: bool) -> None:
    """Make each parameter a tensor of its own: those that are one tensor in the file share its version counter, so
    that a change of one looks like a change of all.

    Args:
        model: as transformers loaded it.
        copies: move them out of the mapped files too, where no kernel's alignment is kept and each write copies a page.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if type(param) is not nn.Parameter:
                continue
            if param not in made:
                made[param] = nn.Parameter(param.data, requires_grad=param.requires_grad)
                if copies:
                    param.data = made[param].data = param.data.clone()
            setattr(module, name, made[param])


def _few(config: Any) -> int:
    """Fewer weights than this are hardly a model: four square matrices in each layer."""
    text = config.get_text_config()
    layers, width = getattr(text, "num_hidden_layers", 0), getattr(text, "hidden_size", 0)
    return 4 * layers * width**2 if type(layers) is type(width) is int else 0


def _check_folder(folder: Path) -> int:
    """The number of weights in a model's files."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: cannot read {folder / 'config.json'}: {error}: download it again") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"model.path: {folder / 'config.json'} names no model_type: it is not a model's configuration")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"model.path: {folder} has no safetensors files: download the weights, or convert them")
    _check_index(folder, [file.name for file in files])
    count = 0
    for file in files:
        try:
            count += sum(math.prod(entry["shape"]) for entry in read_safetensors_header(file).values())
        except (ValueError, OSError) as error:
            raise UserError(f"model.path: {file} is damaged ({error}): download it again") from error
    return count


def _check_index(folder: Path, there: list[str]) -> None:
    """UserError where a model of several files lacks some of them."""
    if "model.safetensors" in there:
        return  # which transformers takes
    index = folder / "model.safetensors.index.json"
    try:
        wanted = indexed_files(index)
    except FileNotFoundError:
        if any("-of-" in name for name in there):
            raise UserError(
                f"model.path: {folder} has the weights in several files and no {index.name}, which tells where each "
                "is: download it again"
            ) from None
        return
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: {index} is damaged ({first_line(error)}): download it again") from error
    missing = [name for name in wanted if name not in there]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"model.path: {missing[0]}{more} of the {len(wanted)} weight files that {index.name} names is missing in "
            f"{folder}: download it again"
        )


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """The configuration of transformers that a folder's ``config.json`` gives.

    Raises:
        UserError: it cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the values' checks raise what they like
        raise _explained(folder, error) from error


def _explained(folder: Path, error: Exception, attn_implementation: str | None = None) -> UserError:
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in text:
        return UserError(
            f"model.path: {folder} brings Python files of its own that the model needs; read them, and allow them "
            "with model.trust_remote_code=True"
        )
    if "Unrecognized configuration class" in text:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
        return UserError(f"model.path: {folder} holds a {kind}, which is no causal language model of transformers")
    if "does not recognize this architecture" in text:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
        return UserError(
            f"model.path: the installed transformers does not know the model type {kind!r} of {folder}: "
            "pip install --upgrade transformers"
        )
    if attn_implementation is not None and ("attention" in text.lower() or "kernel" in text.lower()):
        return not_usable(attn_implementation, _first_sentence(text))
    return UserError(f"model.path: {folder} cannot be loaded: {type(error).__name__}: {_first_sentence(text)}")


def _first_sentence(text: str) -> str:
    return text.split(". ")[0][:300].rstrip(".")


def _check_report(folder: Path, report: dict[str, Any]) -> None:
    """Refuse weights that are missing or of another shape; transformers makes up random ones."""
    mismatched = [
        name if isinstance(name, str) else f"{name[0]} is {list(name[1])}, the model has {list(name[2])}"
        for name in report.get("mismatched_keys", ())
    ]
    problems = [f"{name} is missing" for name in sorted(report.get("missing_keys", ()))] + sorted(mismatched)
    problems += [str(message) for message in report.get("error_msgs", ())]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise UserError(
            f"model.path: the weights in {folder} do not fit its config.json: {problems[0]}{more}; download it again"
        )

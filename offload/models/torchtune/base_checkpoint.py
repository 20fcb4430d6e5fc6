"""Finding and checking the files of a Hugging Face checkpoint before any weight is read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from offload.component import nearest
from offload.errors import UserError
from offload.models.safetensors_header import read_safetensors_header
from offload.models.safetensors_index import indexed_files
from offload.paths import expanded

# An index and the single file that takes its place in a small model; in order of preference.
_LAYOUTS = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
# Weights by their suffix, but not a checkpoint of their own.
_NOT_BASE_WEIGHTS = (
    "adapter_model.",
    "consolidated.",
    "training_args.",
    "optimizer.",
    "scheduler.",
    "rng_state",
)
_MODEL_TYPES = ("GEMMA", "GEMMA2", "LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL", "PHI3_MINI", "PHI4", "QWEN2")
_TIED_BY_DEFAULT = ("GEMMA", "GEMMA2")
_CONFIG_KEYS = ("hidden_size", "num_attention_heads")
FAMILIES = {
    "llama": ("LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL"),
    "mistral": ("MISTRAL", "LLAMA2", "LLAMA3", "LLAMA3_2"),
    "qwen2": ("QWEN2",),
    "phi3": ("PHI3_MINI", "PHI4"),
    "gemma": ("GEMMA",),
    "gemma2": ("GEMMA2",),
}
"""``model_type`` of config.json -> torchtune's model types whose conversion fits its weights, the likeliest first."""

# Names as safetensors and torch have them. 8-bit floats come with scales, which no conversion reads.
_WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")

_OWNERS = {
    "Llama-": "meta-llama",
    "Meta-Llama-": "meta-llama",
    "CodeLlama-": "codellama",
    "Qwen": "Qwen",
    "gemma-": "google",
    "Phi-": "microsoft",
    "phi-": "microsoft",
    "Mistral-": "mistralai",
}


@dataclass(frozen=True)
class BaseCheckpoint:
    """A Hugging Face checkpoint on disk whose files are present and whole.

    Attributes:
        directory: absolute.
        files: names of the weight files in ``directory``, sorted.
        model_type: name of torchtune's ``ModelType``.
        config: ``config.json``, with Hugging Face's defaults for what it leaves out.
        config_text: ``config.json`` as it is.
        repo_id: its repository on the hub, if ``tune download`` noted one.
    """

    directory: Path
    files: tuple[str, ...]
    model_type: str
    config: dict[str, Any]
    config_text: str
    repo_id: str | None

    @property
    def config_path(self) -> Path:
        return self.directory / "config.json"

    @property
    def family(self) -> str:
        """``model_type`` of ``config.json``; where it has none, the one that torchtune's model type stands for."""
        kind = self.config.get("model_type")
        return str(kind) if kind else next(name for name, types in FAMILIES.items() if self.model_type in types)

    @property
    def name_or_path(self) -> str:
        """What an adapter names as its base: the repository, or else the folder."""
        return self.repo_id or str(self.directory)


def read_base(section: Mapping[str, Any]) -> BaseCheckpoint:
    """Checks the ``checkpointer`` section of a config and the files that it names.

    Args:
        section: ``_component_`` (``torchtune.training.FullModelHFCheckpointer``), ``checkpoint_dir``,
            ``model_type`` and, optionally, ``checkpoint_files``: a list of names or
            ``{filename_format, max_filename}``. Without it the files are found: those of an index, then
            ``model.safetensors`` or ``pytorch_model.bin``, then any other weight files of one kind.

    Raises:
        UserError: for anything wrong with the section or the files; safetensors files are checked for
            truncation by comparing their header with their size, and all weights for dtypes and shapes that
            conversion would take for others.
    """
    values = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else dict(section)
    assert isinstance(values, dict)
    _check_section(values)
    directory = expanded(str(values["checkpoint_dir"]), "checkpointer.checkpoint_dir").absolute()
    if not directory.is_dir():
        raise UserError(f"checkpointer.checkpoint_dir: there is no folder {directory}: {_download_hint(directory)}")
    model_type = _model_type(values["model_type"])
    config_text, config = _read_config(directory, model_type)
    given = values.get("checkpoint_files")
    files = _find_files(directory) if given is None else _given_files(directory, given)
    layers: set[int] = set()
    for name in files:
        if name.endswith(".safetensors"):
            header = check_safetensors(directory / name)
            tensors = {key: (str(entry["dtype"]), tuple(entry["shape"])) for key, entry in header.items()}
        elif not (directory / name).stat().st_size:
            raise UserError(f"checkpointer.checkpoint_dir: {directory / name} is empty: download it again")
        else:
            tensors = _tensors_of_bin(directory / name)
        _check_tensors(directory / name, tensors, config)
        layers.update(int(match.group(1)) for key in tensors if (match := _LAYER.match(key)))
    depth = config.get("num_hidden_layers")
    if layers and depth is not None and (len(layers) != depth or max(layers) != depth - 1):
        raise UserError(
            f"checkpointer.checkpoint_dir: {directory / 'config.json'} has num_hidden_layers {depth}, the weight files "
            f"hold {len(layers)} layers: {_download_hint(directory)}"
        )
    return BaseCheckpoint(directory, files, model_type, config, config_text, _repo_id(directory))


def _check_section(values: Mapping[Any, Any]) -> None:
    from torchtune.training import FullModelHFCheckpointer

    from offload.component import resolve

    path = values.get("_component_")
    if path is None:
        raise UserError("checkpointer._component_ is missing: use torchtune.training.FullModelHFCheckpointer")
    component = resolve(str(path), key="checkpointer._component_")
    if not (isinstance(component, type) and issubclass(component, FullModelHFCheckpointer)):
        raise UserError(
            f"checkpointer._component_: {path} does not read and write Hugging Face's format: use "
            "torchtune.training.FullModelHFCheckpointer (with a checkpoint in that format)"
        )
    known = ("_component_", "checkpoint_dir", "model_type", "checkpoint_files")
    problems = []
    for key in values:
        if key not in known:
            problems.append(_unknown_key(str(key), known))
    for key in ("checkpoint_dir", "model_type"):
        if values.get(key) is None:
            problems.append(f"checkpointer.{key} is missing")
    if problems:
        raise UserError("\n".join(problems))


def _unknown_key(key: str, known: tuple[str, ...]) -> str:
    if key in (
        "recipe_checkpoint",
        "adapter_checkpoint",
        "resume_from_checkpoint",
        "should_load_recipe_state",
    ):
        return (
            f"checkpointer.{key} is not used: the top-level resume_from_checkpoint finds the newest "
            "checkpoint in output_dir: remove it"
        )
    if key == "output_dir":
        return "checkpointer.output_dir is not used: checkpoints go to the top-level output_dir: remove it"
    if key == "safe_serialization":
        return "checkpointer.safe_serialization is not used: checkpoints are safetensors files: remove it"
    guess = nearest(key, known)
    hint = f": did you mean checkpointer.{guess}?" if guess else f": valid keys are {', '.join(known[1:])}"
    return f"checkpointer.{key} is unknown{hint}"


def _model_type(value: Any) -> str:
    name = str(value)
    if name in _MODEL_TYPES:
        return name
    # Without underscores first: LLAMA_2 is meant for LLAMA2, though it is closer to LLAMA3_2.
    bare = {known.replace("_", ""): known for known in _MODEL_TYPES}
    guess = bare.get(name.upper().replace("_", "")) or nearest(name, _MODEL_TYPES)
    hint = f"did you mean {guess}? " if guess else ""
    raise UserError(
        f"checkpointer.model_type: got {name!r}: {hint}Valid are {', '.join(_MODEL_TYPES)} "
        "(Llama 3.1 is LLAMA3, Qwen 2.5 is QWEN2)"
    )


def _read_config(directory: Path, model_type: str) -> tuple[str, dict[str, Any]]:
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(
            f"checkpointer.checkpoint_dir: {directory} has no config.json; it holds {_listing(directory)}: "
            f"{_download_hint(directory)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
        config = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"checkpointer.checkpoint_dir: cannot read {path}: {error}: download it again") from error
    missing = [key for key in _CONFIG_KEYS if not isinstance(config, dict) or key not in config]
    if missing:
        raise UserError(
            f"checkpointer.checkpoint_dir: {path} lacks {', '.join(missing)}: it is not the configuration of "
            "a text model in Hugging Face's format"
        )
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if config.get("tie_word_embeddings") is None:
        config["tie_word_embeddings"] = model_type in _TIED_BY_DEFAULT
    _check_config(path, config, model_type)
    return text, config


def _check_config(path: Path, config: Mapping[str, Any], model_type: str) -> None:
    """What reading the weights relies on."""
    for key in (*_CONFIG_KEYS, "num_key_value_heads", "num_hidden_layers", "head_dim"):
        value = config.get(key)
        if value is None and key not in _CONFIG_KEYS:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise UserError(
                f"checkpointer.checkpoint_dir: {key} in {path} is {_short(value)}, expected a whole number above 0: "
                "download it again"
            )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads or (config.get("head_dim") is None and config["hidden_size"] % heads):
        raise UserError(
            f"checkpointer.checkpoint_dir: in {path} num_attention_heads={heads}, num_key_value_heads={kv_heads} and "
            f"hidden_size={config['hidden_size']} do not divide one another: download it again"
        )
    if not isinstance(config["tie_word_embeddings"], bool):
        raise UserError(
            f"checkpointer.checkpoint_dir: tie_word_embeddings in {path} is {_short(config['tie_word_embeddings'])}, "
            "expected true or false: download it again"
        )
    kind = config.get("model_type")
    fitting = FAMILIES.get(kind, ()) if isinstance(kind, str) else ()
    if fitting and model_type not in fitting:
        raise UserError(
            f"checkpointer.model_type: got {model_type}, and {path} is of a {kind} model: set "
            f"checkpointer.model_type={fitting[0]}, and model to a component that builds it"
        )


def _check_tensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], config: Mapping[str, Any]) -> None:
    """Refuses what a conversion would silently make weights of.

    Args:
        path: the weight file, for messages.
        tensors: name -> (dtype, shape).
        config: a checked ``config.json``.
    """
    width = config["hidden_size"]
    head_dim = config.get("head_dim") or width // config["num_attention_heads"]
    # Conversions view these two as [heads, 2, head_dim / 2, width], whatever their shape.
    shapes = {
        "q_proj.weight": (config["num_attention_heads"] * head_dim, width),
        "k_proj.weight": (config["num_key_value_heads"] * head_dim, width),
    }
    # Those whose size a builder may take from config.json before any weight is read.
    if isinstance(config.get("vocab_size"), int):
        shapes["embed_tokens.weight"] = (config["vocab_size"], width)
    if isinstance(config.get("intermediate_size"), int):
        shapes["down_proj.weight"] = (width, config["intermediate_size"])
    for name, (dtype, shape) in tensors.items():
        if "rotary_emb.inv_freq" in name:  # no weight: no conversion reads it
            continue
        if dtype not in _WEIGHT_DTYPES:
            raise UserError(
                f"checkpointer.checkpoint_dir: {path}: {_short(name)} is {_short(dtype)}, expected weights in fp32, "
                "bf16 or fp16: choose a checkpoint that is not quantised"
            )
        expected = shapes.get(".".join(name.split(".")[-2:]))
        if expected is not None and shape != expected:
            raise UserError(
                f"checkpointer.checkpoint_dir: {path}: {_short(name)} is {_short(list(shape))}, config.json makes it "
                f"{list(expected)}: {_download_hint(path.parent)}"
            )


def _tensors_of_bin(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of a pickled weight file; nothing where it cannot be read: loading it says why."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return {
            str(name): (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in content.items()
            if isinstance(tensor, torch.Tensor)
        }
    except Exception:
        return {}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _repo_id(directory: Path) -> str | None:
    path = directory / "original_repo_id.json"
    if not path.is_file():
        return None
    try:
        repo = json.loads(path.read_text(encoding="utf-8")).get("repo_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"checkpointer.checkpoint_dir: {path} is damaged: delete it, nothing needs it") from error
    return str(repo) if repo else None


def _given_files(directory: Path, given: Any) -> tuple[str, ...]:
    key = "checkpointer.checkpoint_files"
    if isinstance(given, Mapping):
        if set(given) != {"filename_format", "max_filename"}:
            raise UserError(f"{key}: expected a list of names, or the keys filename_format and max_filename")
        last = given["max_filename"]
        # A number has lost its leading zeros, which are part of the file names.
        if not isinstance(last, str) or not last.isdigit():
            raise UserError(f"{key}.max_filename: got {last!r}, expected digits in quotes such as '00002'")
        pattern = str(given["filename_format"])
        try:
            names = [pattern.format(str(i + 1).zfill(len(last)), last) for i in range(int(last))]
        except (IndexError, KeyError, ValueError):
            names = []
        if pattern.count("{}") != 2 or not names:
            raise UserError(
                f"{key}.filename_format: got {pattern!r}, expected two {{}} as in 'model-{{}}-of-{{}}.safetensors'"
            )
    elif isinstance(given, (list, tuple)) and given and all(isinstance(name, str) for name in given):
        names = list(given)
    else:
        raise UserError(f"{key}: got {given!r}, expected a list of file names; leave it out to have them found")
    missing = [name for name in names if not os.path.isfile(directory / name)]
    if missing:
        raise UserError(f"{key}: {_missing_message(directory, names, missing)}")
    return tuple(sorted(names))


def _find_files(directory: Path) -> tuple[str, ...]:
    incomplete = None
    for index, single in _LAYOUTS:
        if (directory / index).is_file():
            names = _indexed_files(directory / index)
            missing = [name for name in names if not os.path.isfile(directory / name)]
            if not missing:
                return names
            # The index alone is there where the download left the weights of this kind out.
            incomplete = incomplete or (index, names, missing)
        if (directory / single).is_file():
            return (single,)
    if incomplete is not None:
        index, names, missing = incomplete
        raise UserError(f"checkpointer.checkpoint_dir: {index}: {_missing_message(directory, list(names), missing)}")
    for suffix in (".safetensors", ".bin"):
        names = tuple(
            sorted(
                path.name
                for path in directory.glob(f"*{suffix}")
                if path.is_file() and not path.name.startswith(_NOT_BASE_WEIGHTS)
            )
        )
        if names:
            _check_numbering(directory, names)
            return names
    raise UserError(
        f"checkpointer.checkpoint_dir: {directory} has no model.safetensors, pytorch_model.bin or index of "
        f"them; it holds {_listing(directory)}: {_download_hint(directory)}"
    )


def _check_numbering(directory: Path, names: tuple[str, ...]) -> None:
    """Without an index, names such as ``model-00001-of-00003.safetensors`` still tell how many there are."""
    first = re.fullmatch(r"(.*?)(\d+)-of-(\d+)(\.\w+)", names[0])
    if first is None:
        return
    start, digits, total, suffix = first.groups()
    wanted = [f"{start}{i + 1:0{len(digits)}}-of-{total}{suffix}" for i in range(int(total))]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise UserError(f"checkpointer.checkpoint_dir: {_missing_message(directory, wanted, missing)}")


def _indexed_files(index: Path) -> tuple[str, ...]:
    try:
        return indexed_files(index)
    except (OSError, ValueError) as error:
        raise UserError(
            f"checkpointer.checkpoint_dir: {index} is not an index of weight files: download it again"
        ) from error


def _missing_message(directory: Path, wanted: list[str], missing: list[str]) -> str:
    there = [name for name in wanted if name not in missing]
    return (
        f"{len(missing)} of {len(wanted)} weight files are missing in {directory}: {_some(missing)}; "
        f"there: {_some(there) if there else _listing(directory)}: {_download_hint(directory)}"
    )


def _listing(directory: Path) -> str:
    names = sorted(path.name + ("/" if path.is_dir() else "") for path in directory.iterdir())
    return _some(names) if names else "nothing"


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _download_hint(directory: Path) -> str:
    owner = next((owner for prefix, owner in _OWNERS.items() if directory.name.startswith(prefix)), "<owner>")
    name = directory.name if owner != "<owner>" else "<model>"
    return f"download it with `tune download {owner}/{name} --output-dir {directory}`"


def check_safetensors(path: Path) -> dict[str, Any]:
    """The header of a file; raises a :class:`UserError` if it is truncated or no safetensors file."""
    try:
        return read_safetensors_header(path)
    except PermissionError as error:
        raise UserError(f"checkpointer.checkpoint_dir: {path} cannot be read: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"checkpointer.checkpoint_dir: {path} is damaged: {error}: {_download_hint(path.parent)}"
        ) from error

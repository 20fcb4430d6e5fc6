"""Finding and checking the files of a Hugging Face checkpoint before any weight is read."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from offload.component import nearest
from offload.errors import UserError

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

# What else makes a folder a model that transformers and torchtune can use: configuration, tokenizer, licence,
# and the code of models that bring their own.
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".spm", ".jinja", ".py")
_COMPANION_NAMES = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY).*", re.IGNORECASE)
_COMPANION_LIMIT = 100 * 2**20  # bytes; Gemma's tokenizer.json, the largest around, has 33 MiB
_NOT_COMPANIONS = (
    "config.json",
    "adapter_config.json",
    "checkpoint.json",
    "trainer_state.json",
    "ft_config.json",
)

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
    def name_or_path(self) -> str:
        """What an adapter names as its base: the repository, or else the folder."""
        return self.repo_id or str(self.directory)

    def companions(self) -> list[str]:
        """Relative names of the small files which belong to the model besides ``config.json``.

        Tokenizer, generation settings, licence, code of models that bring their own; nothing of other
        subfolders, no weights, no hidden files, nothing huge.
        """
        names = [path.name for path in self.directory.iterdir() if _is_companion(path)]
        # torchtune's Llama 3 tokenizer reads this one.
        if (self.directory / "original" / "tokenizer.model").is_file():
            names.append("original/tokenizer.model")
        return sorted(names)

    def copy_companions(self, target: Path) -> None:
        """Copies :meth:`companions` into ``target``, following links."""
        for name in self.companions():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.directory / name, target / name)


def _is_companion(path: Path) -> bool:
    if path.name.startswith(".") or path.name.endswith(".index.json") or path.name in _NOT_COMPANIONS:
        return False
    if path.suffix not in _COMPANION_SUFFIXES and not _COMPANION_NAMES.fullmatch(path.name):
        return False
    return path.is_file() and path.stat().st_size <= _COMPANION_LIMIT


def read_base(section: Mapping[str, Any]) -> BaseCheckpoint:
    """Checks the ``checkpointer`` section of a config and the files that it names.

    Args:
        section: ``_component_`` (``torchtune.training.FullModelHFCheckpointer``), ``checkpoint_dir``,
            ``model_type`` and, optionally, ``checkpoint_files``: a list of names or
            ``{filename_format, max_filename}``. Without it the files are found: those of an index, then
            ``model.safetensors`` or ``pytorch_model.bin``, then any other weight files of one kind.

    Raises:
        UserError: for anything wrong with the section or the files; safetensors files are checked for
            truncation by comparing their header with their size.
    """
    values = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else dict(section)
    assert isinstance(values, dict)
    _check_section(values)
    directory = Path(str(values["checkpoint_dir"])).expanduser().absolute()
    if not directory.is_dir():
        raise UserError(f"checkpointer.checkpoint_dir: there is no folder {directory}: {_download_hint(directory)}")
    model_type = _model_type(values["model_type"])
    config_text, config = _read_config(directory, model_type)
    given = values.get("checkpoint_files")
    files = _find_files(directory) if given is None else _given_files(directory, given)
    for name in files:
        if name.endswith(".safetensors"):
            check_safetensors(directory / name)
        elif not (directory / name).stat().st_size:
            raise UserError(f"checkpointer.checkpoint_dir: {directory / name} is empty: download it again")
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
    except (OSError, ValueError) as error:
        raise UserError(f"checkpointer.checkpoint_dir: cannot read {path}: {error}: download it again") from error
    missing = [key for key in _CONFIG_KEYS if not isinstance(config, dict) or key not in config]
    if missing:
        raise UserError(
            f"checkpointer.checkpoint_dir: {path} lacks {', '.join(missing)}: it is not the configuration of "
            "a text model in Hugging Face's format"
        )
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("tie_word_embeddings", model_type in _TIED_BY_DEFAULT)
    return text, config


def _repo_id(directory: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        repo = json.loads((directory / "original_repo_id.json").read_text(encoding="utf-8")).get("repo_id")
        return str(repo) if repo else None
    return None


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
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UserError(f"{key}: {_missing_message(directory, names, missing)}")
    return tuple(sorted(names))


def _find_files(directory: Path) -> tuple[str, ...]:
    incomplete = None
    for index, single in _LAYOUTS:
        if (directory / index).is_file():
            names = _indexed_files(directory / index)
            missing = [name for name in names if not (directory / name).is_file()]
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
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return tuple(sorted(set(weight_map.values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: name -> ``{dtype, shape, data_offsets}``, without its metadata.

    Source of the layout: https://github.com/huggingface/safetensors#format

    Raises:
        ValueError: if it is not such a file, or its size is not the one that the header tells.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if length < 2 or 8 + length > size:
            raise ValueError("it does not begin with the header of a safetensors file")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError("its header is damaged") from error
    if 8 + length + end != size:
        raise ValueError(f"it has {size} bytes where its header tells of {8 + length + end}")
    return header


def check_safetensors(path: Path) -> None:
    """Raises a :class:`UserError` for a file that is truncated or no safetensors file."""
    try:
        read_safetensors_header(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"checkpointer.checkpoint_dir: {path} is damaged: {error}: {_download_hint(path.parent)}"
        ) from error

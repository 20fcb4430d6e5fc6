"""Opening a data set: what is wrong with its section or its files, told in one line."""

from __future__ import annotations

import errno
import glob
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from offload.component import nearest
from offload.config.loading import instantiate
from offload.config.schema import resolve
from offload.errors import UserError
from offload.models.torchtune.datasets import packing_through
from offload.paths import NO_HOME, with_home

# Readers of `datasets` for files of one's own, and the endings that tell which is meant.
_FORMATS = {"json": (".json", ".jsonl"), "csv": (".csv", ".tsv"), "parquet": (".parquet",), "text": (".txt",)}
_BLANK_BYTES = 4096


def open_dataset(section: DictConfig, tokenizer: Any, key: str, rows_of: Callable[[Any], Any]) -> Any:
    """The data set that a section describes.

    Args:
        section: the component and its arguments.
        tokenizer: passed to it.
        key: the section's place in the configuration, for messages.
        rows_of: what is packed is read through this.

    Raises:
        UserError: the section cannot mean anything, or its data cannot be read.
    """
    files = data_files(section)
    _check_section(section, key, files)
    _check_cache(section, key)
    resolve(section.get("_component_"), key=f"{key}._component_")  # imported before anything asks what it imported
    try:
        with packing_through(rows_of):
            dataset = instantiate(section, tokenizer)
    except UserError:
        raise
    except Exception as error:
        # `datasets` and pyarrow raise their own exceptions for unreadable files, without a common base.
        raise UserError(_unreadable(section, key, files, error)) from error
    if not hasattr(type(dataset), "__len__") or not hasattr(type(dataset), "__getitem__"):
        raise UserError(
            f"{key}: {section.get('_component_')} gives {type(dataset).__name__}, without a length and an index; "
            "shuffling and resuming need both (torch.utils.data.Dataset)"
        )
    return dataset


def data_files(section: DictConfig) -> list[str]:
    """The local files that the section names, patterns expanded."""
    found: list[str] = []
    for path in _local_names(section):
        found += sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
    return [path for path in found if os.path.isfile(path)]


def _local_names(section: DictConfig) -> list[str]:
    """Paths and patterns, with ``data_dir`` and the home folder; without addresses."""
    given = OmegaConf.to_container(section, resolve=True)
    assert isinstance(given, dict)
    names: Any = given.get("data_files")
    if isinstance(names, dict):
        names = [name for each in names.values() for name in (each if isinstance(each, list) else [each])]
    names = names if isinstance(names, list) else [names]
    folder = given.get("data_dir") or ""
    local = [os.path.join(folder, name) for name in names if isinstance(name, str) and "://" not in name]
    return [os.path.expanduser(path) if path.startswith("~/") else path for path in local]


def _no_file(path: str) -> str:
    if os.path.isdir(path):
        return f"{path} is a folder; give its files, such as {os.path.join(path, '*.jsonl')}"
    folder = os.path.dirname(path) or "."
    near = nearest(os.path.basename(path), os.listdir(folder)) if os.path.isdir(folder) else None
    hint = f"; did you mean {os.path.join(os.path.dirname(path), near)}?" if near else ""
    return f"there is no file {path}{hint}"


def described(section: DictConfig) -> str:
    """What the data is, for messages: its file, or its source and split."""
    files = data_files(section)
    if len(files) == 1:
        return files[0]
    what = str(section.get("source") or section.get("_component_"))
    return f"{what}, split {section.get('split')}" if section.get("split") else what


def check_not_streaming(section: DictConfig, key: str) -> None:
    """UserError for a data set that can only be read from one end to the other."""
    if section.get("streaming"):
        raise UserError(
            f"{key}.streaming: shuffling and resuming need rows by their number, which a stream has not; remove it. "
            f"Files on disk are not loaded into memory anyway; {key}.split=train[:10000] takes a part"
        )


def _check_section(section: DictConfig, key: str, files: list[str]) -> None:
    check_not_streaming(section, key)
    source = section.get("source")
    if section.get("data_files") and isinstance(source, str):
        # With files of one's own the source is their format. Names without a slash are also old data sets of the Hub.
        known = source in _FORMATS or "/" in source or Path(source).exists() or source in _packaged()
        if not known and files:
            near = nearest(source, _FORMATS)
            hint = f"did you mean {near}?" if near else f"for files it is one of {', '.join(_FORMATS)}"
            raise UserError(f"{key}.source: there is no format {source!r}; {hint}")
    if source in _FORMATS:
        for path in _local_names(section):
            with_home(path, f"{key}.data_files")
            if not glob.has_magic(path) and not os.path.isfile(path):
                raise UserError(f"{key}.data_files: {_no_file(path)}")
    for path in files:
        if _is_blank(path):
            raise UserError(f"{key}.data_files: {path} is empty; give a file with at least one row")


def _check_cache(section: DictConfig, key: str) -> None:
    """UserError where ``datasets`` would keep what it reads in a folder called ``~`` in the current one."""
    variables = ("HF_DATASETS_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    cache = next(filter(None, map(os.environ.get, variables)), "~/.cache")
    ours = str(section.get("_component_")).startswith(("torchtune.", "offload."))
    if ours and os.path.expanduser(cache).startswith("~"):
        raise UserError(f"{key}: {NO_HOME}: set HOME, or HF_HOME to a folder for what is read of data sets")


def _packaged() -> set[str]:
    """The names of all readers that ``datasets`` brings."""
    import datasets.packaged_modules as packaged

    folder = Path(packaged.__file__).parent
    return {each.name for each in folder.iterdir() if (each / "__init__.py").is_file()}


def _is_blank(path: str) -> bool:
    if os.path.getsize(path) > _BLANK_BYTES:
        return False
    try:
        return Path(path).read_bytes().strip() in (b"", b"[]")
    except OSError:
        return False


def _unreadable(section: DictConfig, key: str, files: list[str], error: BaseException) -> str:
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    cause = chain[-1]
    first = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    if (problem := machine_problem(cause)) is not None:
        return f"{key}: {described(section)} cannot be read: {problem}"
    if any(isinstance(each, (ConnectionError, TimeoutError)) for each in chain) and not files:
        return (
            f"{key}.source: there is no folder {section.get('source')} here and the Hugging Face Hub cannot be asked "
            f"({first}); check the name and the network, or give files of your own with {key}.source=json "
            f"{key}.data_files=FILE"
        )
    broken = next((line for line in map(broken_json_line, files) if line is not None), None)
    where = broken or f"{described(section)} cannot be read: {first}"
    return f"{key}: {where}; {_remedy(section, key, files)}"


def _remedy(section: DictConfig, key: str, files: list[str]) -> str:
    source = section.get("source")
    for path in files:
        ending = Path(path).suffix.lower()
        format = next((name for name, endings in _FORMATS.items() if ending in endings), None)
        if format is not None and format != source and source in _FORMATS:
            return f"{key}.source={format} reads files that end in {ending}"
    return f"mend the data or choose another with {key}.data_files=…"


def machine_problem(error: BaseException) -> str | None:
    """What the machine, and not the data, is to blame for; with the way out."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return f"{text}: raise the limit of processes and threads (ulimit -u, or the container's pids limit)"
    if isinstance(error, MemoryError):
        return "out of host memory; close other programs or take a part of the data with split=train[:10000]"
    if not isinstance(error, OSError):
        return None
    where = f" {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return f"{error.strerror}{where}: free space, or move the cache with HF_DATASETS_CACHE=FOLDER"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error.strerror}: raise the limit of open files (ulimit -n)"
    if error.errno in (errno.ENOMEM, errno.EAGAIN):
        return f"{error.strerror}: memory or processes have run out; close other programs or raise ulimit -u"
    if error.errno == errno.EIO:
        return f"{error.strerror}{where}: the disk or its mount fails"
    return None


def broken_json_line(path: str) -> str | None:
    """Which line of a JSON-lines file is broken; pyarrow tells a row of a block, if anything."""
    if not path.endswith(".jsonl"):
        return None
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                json.loads(line if line.strip() else "null")
            except (ValueError, RecursionError) as error:
                return f"{path}, line {number} is not JSON ({error})"
    return None

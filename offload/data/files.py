"""Rows of JSON, JSON-lines, Parquet, CSV and text files, of folders and of data sets of the Hugging Face Hub.

``datasets`` reads them once into an Arrow file in its cache and maps that into memory: rows are read from the disk when
they are asked for, so that a file may be larger than memory.
"""

from __future__ import annotations

import csv
import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from offload.component import nearest
from offload.errors import UserError

_FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}
_PACKED = (".gz", ".bz2", ".xz", ".zst")

# Opened without its magic number, a file of another kind fails late and oddly.
_ENDINGS = ", ".join(_FORMATS)


class Source:
    """The rows of files or of a data set of the Hub, by number.

    Args:
        path: a file, a pattern, a folder, a list of files, or a name on the Hub such as ``owner/name``.
        split: a split or a part of one as ``datasets`` writes it, such as ``train[:1000]``. Files of one's own are all
            ``train``; a folder's are what their names say.
        **options: of :func:`datasets.load_dataset`.

    Attributes:
        rows: ``datasets.Dataset``.
        described: what the data is, for messages.

    Raises:
        UserError: there is no such data, or it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str] | Sequence[str], *, split: str = "train", **options: Any) -> None:
        self._files = _files(path)
        for name in ("data_files", "data_dir"):
            if self._files and options.get(name):
                raise UserError(
                    f"dataset.{name}: it chooses among the files of a folder or of a data set of the Hub, and "
                    "dataset.path names files already; remove it"
                )
        self._split = split
        given = path if isinstance(path, str | os.PathLike) else ", ".join(map(str, path))
        self.described = os.path.expanduser(os.fspath(given)) if self._files else f"{given}, split {split}"
        self.rows = _read(self._files or [], str(given), split, options)

    def where(self, index: int) -> str:
        """File and line of a row of JSON lines, otherwise the number of the row, counted from 1."""
        if self._split == "train" and self._files and all(file.endswith(".jsonl") for file in self._files):
            for number, (file, line) in enumerate(_lines(self._files)):
                if number == index:
                    return f"{file}, line {line}"
        return f"{self.described}, row {index + 1}"


def _files(path: str | os.PathLike[str] | Sequence[str]) -> list[str]:
    """The local files that are meant, in order; none for a folder or a name on the Hub."""
    if not isinstance(path, str | os.PathLike):
        files = [file for one in path for file in _files(one)]
        if not files:
            raise UserError("dataset.path: expected a list of files, got an empty one")
        return files
    name = os.path.expanduser(os.fspath(path))
    if glob.has_magic(name):
        files = sorted(file for file in glob.glob(name, recursive=True) if os.path.isfile(file))
        if not files:
            raise UserError(f"dataset.path: no file is like {name}")
        return files
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        return []
    looks_local = name.startswith((".", "/", "~")) or _format(name) is not None or name.count("/") > 1
    folder = os.path.dirname(name) or "."
    near = nearest(os.path.basename(name), os.listdir(folder)) if os.path.isdir(folder) else None
    if looks_local:
        hint = f"did you mean {os.path.join(os.path.dirname(name), near)}?" if near else "check the path"
        raise UserError(f"dataset.path: there is no file {name}; {hint}")
    return []


def _format(name: str) -> str | None:
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    return _FORMATS.get(suffixes[-1]) if suffixes else None


def _read(files: list[str], given: str, split: str, options: dict[str, Any]) -> Any:
    import datasets

    folder = Path(given).expanduser()
    try:
        if files:
            kind = _one_format(files)
            if kind == "csv":
                options = {**_csv_options(files[0]), **options}
            if all(os.path.getsize(file) == 0 for file in files):
                raise UserError(f"dataset.path: {given} is empty; give a file with at least one row")
            rows = datasets.load_dataset(kind, data_files=files, split=split, **options)
        elif (folder / "state.json").is_file():
            rows = datasets.load_from_disk(str(folder))
        elif folder.is_dir() and not any(_format(file.name) for file in folder.rglob("*")):
            raise UserError(f"dataset.path: the folder {folder} has no file that ends in {_ENDINGS}")
        else:
            rows = datasets.load_dataset(str(folder) if folder.is_dir() else given, split=split, **options)
    except UserError:
        raise
    except Exception as error:  # datasets, pyarrow and pandas raise their own, without a common base
        raise UserError(_unreadable(files, given, split, error)) from error
    if not isinstance(rows, datasets.Dataset):
        raise UserError(f"dataset.split: {split!r} is not one split of {given}; give one, such as train")
    if len(rows) == 0:
        raise UserError(f"dataset.path: {given} has no rows")
    return rows


def _one_format(files: list[str]) -> str:
    formats = {file: _format(file) for file in files}
    unknown = next((file for file, kind in formats.items() if kind is None), None)
    if unknown is not None:
        raise UserError(f"dataset.path: {unknown} is of no known format; expected a name that ends in {_ENDINGS}")
    kinds = {kind for kind in formats.values() if kind is not None}
    if len(kinds) > 1:
        raise UserError(f"dataset.path: files of several formats ({', '.join(sorted(kinds))}); give one data set each")
    return kinds.pop()


def _csv_options(file: str) -> dict[str, Any]:
    """Every cell is text: otherwise 007 is 7, an empty cell is nan and one odd row changes a column's type."""
    import datasets

    delimiter = "\t" if ".tsv" in Path(file).suffixes else ","
    if Path(file).suffix.lower() in _PACKED:
        return {"delimiter": delimiter}
    with open(file, newline="", encoding="utf-8-sig") as opened:
        header = next(csv.reader(opened, delimiter=delimiter), [])
    features = datasets.Features({name: datasets.Value("string") for name in header})
    return {"delimiter": delimiter, "keep_default_na": False, "encoding": "utf-8-sig", "features": features}


def _unreadable(files: list[str], given: str, split: str, error: BaseException) -> str:
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = str(chain[-1]).strip()
    first = text.splitlines()[0] if text else type(chain[-1]).__name__
    if "split" in first.lower() and isinstance(error, ValueError):
        return f"dataset.split: {given} has no {split!r}: {first}"
    if not files and not os.path.exists(os.path.expanduser(given)):
        return (
            f"dataset.path: there is no file or folder {given} here, and the Hugging Face Hub does not give it "
            f"({first}); check the name and the network"
        )
    for file, line, problem in _broken(files):
        return f"dataset.path: {file}, line {line}: {problem}; mend it"
    return f"dataset.path: {given} cannot be read: {first}"


def _broken(files: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Lines of JSON-lines files that are no row; pyarrow tells a row of a block, if anything."""
    for file, line, text in _texts(file for file in files if file.endswith(".jsonl")):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield file, line, f"it is not JSON ({error})"
        else:
            if not isinstance(row, dict):
                yield file, line, f"expected an object with a row's columns, got {type(row).__name__}"


def _lines(files: Sequence[str]) -> Iterator[tuple[str, int]]:
    for file, line, _ in _texts(files):
        yield file, line


def _texts(files: Sequence[str] | Iterator[str]) -> Iterator[tuple[str, int, str]]:
    """File, line number and text of each line that is not blank, as readers of JSON lines skip blank ones."""
    for file in files:
        with open(file, encoding="utf-8", errors="replace") as opened:
            for line, text in enumerate(opened, start=1):
                if text.strip():
                    yield file, line, text

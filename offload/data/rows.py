"""Rows of data sets: which can be used, where a bad one stands, and what reading them before training tells.

A row that cannot be used travels as a :class:`BadRow` in place of its sample, so that a data worker can hand it on.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from omegaconf import DictConfig
from torch.utils.data import Dataset

from offload.component import nearest, resolve
from offload.data.messages import RowError
from offload.data.packing import lengths_of
from offload.data.source import data_files, described, machine_problem
from offload.errors import UserError

# Torchtune masks labels with this, whatever the loss ignores.
_MASKED = -100
_SHOWN = 3
# Keys of a message in the two forms that torchtune's chat_dataset reads.
_STYLES = {"sharegpt": ("from", "value"), "openai": ("role", "content")}


@dataclass(frozen=True)
class BadRow:
    """Stands in for a sample that cannot be used.

    Attributes:
        source: number of its data set.
        index: in that data set.
        reason: on one line.
        concerns_all: every row has this fault; leaving this one out would not help.
        is_line: the fault is none of the row; ``reason`` is all that there is to say.
    """

    source: int
    index: int
    reason: str
    concerns_all: bool = False
    is_line: bool = False


@dataclass
class Tally:
    """What reading samples told.

    Attributes:
        read: samples read.
        without_labels: samples of which no label counts.
        first_without: how many of the first that training sees have none.
        longest: tokens of the longest.
        bad: in the order of reading.
    """

    read: int = 0
    without_labels: int = 0
    first_without: int = 0
    longest: int = 0
    bad: list[BadRow] = field(default_factory=list)

    def add(self, sample: Any, ignore_index: int) -> None:
        self.read += 1
        if isinstance(sample, BadRow):
            self.bad.append(sample)
        elif isinstance(sample, Mapping) and "tokens" in sample and "labels" in sample:
            self.longest = max(self.longest, len(sample["tokens"]))
            if num_labels(sample, ignore_index) == 0:
                self.first_without += self.first_without == self.read - len(self.bad) - 1
                self.without_labels += 1

    @property
    def is_hopeless(self) -> bool:
        """No row of what was read can be used."""
        return bool(self.bad) and (self.bad[-1].concerns_all or len(self.bad) == self.read)


def num_labels(sample: Mapping[str, Any], ignore_index: int) -> int:
    """Labels that count in the loss; the first is no model's prediction."""
    return int((numpy.asarray(sample["labels"])[1:] != ignore_index).sum())


class Rows(Dataset[Any]):
    """A data set that gives a :class:`BadRow` where a sample cannot be made or cannot be trained on.

    Args:
        dataset: with a length and an index.
        section: the configuration that it comes from.
        key: the section's place in the configuration.
        number: of the data set among several.
        ignore_index: label that does not count.
    """

    def __init__(self, dataset: Any, section: DictConfig, key: str, number: int, ignore_index: int) -> None:
        self._dataset, self.section, self.key, self._number = dataset, section, key, number
        self._ignore_index = ignore_index
        self._required = _required_columns(dataset)
        self.tally = Tally()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            sample = self._dataset[index]
            problem = sample_problem(sample, self._ignore_index)
            if problem is None:
                return self._with_nulls(index) or sample
            return BadRow(self._number, index, problem)
        except BaseException as error:  # a panic of a tokenizer's Rust code is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            if isinstance(error, UserError):
                return BadRow(self._number, index, str(error), concerns_all=True, is_line=True)
            if (problem := machine_problem(error)) is not None:
                line = f"{self.key}: {described(self.section)} cannot be read: {problem}"
                return BadRow(self._number, index, line, concerns_all=True, is_line=True)
            missing = self._missing_column(index, error)
            if missing is not None:
                return BadRow(self._number, index, missing, concerns_all=True)
            return BadRow(self._number, index, self._reason(index, error))

    def good(self) -> Iterator[Any]:
        """The samples that can be used, in order, counting all of them; for packing."""
        for index in range(len(self)):
            sample = self[index]
            self.tally.add(sample, self._ignore_index)
            if not isinstance(sample, BadRow):
                yield sample
            elif sample.concerns_all:
                return

    # Iterating is what torchtune's packing does.
    __iter__ = good

    def lengths(self) -> list[int]:
        """Tokens of each sample, 0 for a bad row, counting all of them; for packing."""

        def length(index: int) -> int | None:
            sample = self[index]
            self.tally.add(sample, self._ignore_index)
            if isinstance(sample, BadRow):
                return None if sample.concerns_all else 0
            return len(sample["tokens"])

        return lengths_of(len(self), length)

    def notes(self) -> list[str]:
        """What the data set itself has to say of the samples read."""
        notes: list[str] = self._dataset.notes() if hasattr(self._dataset, "notes") else []
        return notes

    def where(self, index: int) -> str:
        """File and line, where they can be told; otherwise the number of the row, counted from 1."""
        told = getattr(self._dataset, "where", None)
        if told is not None:
            return str(told(index))
        row = self._row(index)
        if row is not None:
            for path in data_files(self.section):
                if path.endswith(".jsonl") and (line := _line_of(path, row)) is not None:
                    return f"{path}, line {line}"
        return f"{described(self.section)}, row {index + 1}"

    def _row(self, index: int) -> Mapping[str, Any] | None:
        """The raw row, of data sets that have one."""
        data = getattr(self._dataset, "_data", None)
        with contextlib.suppress(Exception):
            row = data[index] if data is not None else None
            return row if isinstance(row, Mapping) else None
        return None

    def _with_nulls(self, index: int) -> BadRow | None:
        """Some transforms write a null as the word None."""
        if not self._required:
            return None
        row = self._row(index) or {}
        nulls = [name for name in self._required if name in row and row[name] is None]
        return BadRow(self._number, index, f"{' and '.join(nulls)} is null") if nulls else None

    def _reason(self, index: int, error: BaseException) -> str:
        text = " ".join(str(error).split())
        if isinstance(error, RowError):
            return text  # says what there is and what was expected
        said = f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
        row = self._row(index) or {}
        odd = [f"{name} is {kind}" for name in row if (kind := _kind(row[name])) != "text"]
        reason = f"{', '.join(odd[:_SHOWN])} ({said})" if odd else said
        style = self.section.get("conversation_style")
        if isinstance(error, KeyError) and style in _STYLES and error.args[0] in _STYLES[style]:
            other = next(each for each in _STYLES if each != style)
            reason += f"; {self.key}.conversation_style={other} reads messages with {' and '.join(_STYLES[other])}"
        return reason

    def _missing_column(self, index: int, error: BaseException) -> str | None:
        row = self._row(index)
        name = error.args[0] if isinstance(error, KeyError) and error.args else None
        if row is None or not isinstance(name, str) or name in _column_names(self._dataset, row):
            return None
        mapped = _column_map(self._dataset)
        is_nested = any(isinstance(value, (list, dict)) for value in row.values())
        if name not in mapped.values() and (mapped or is_nested):
            return None  # it is looked for inside of a column
        taken = inspect.signature(resolve(self.section["_component_"])).parameters
        near = nearest(name, row)
        problem = f"there is no column {name!r}, only {', '.join(map(str, row))}"
        if "column_map" in taken:
            wanted = [each for each in mapped if each != "image"] or [name]
            pairs = ", ".join(f"{each}: {mapped[each] if mapped.get(each) in row else 'COLUMN'}" for each in wanted)
            return f"{problem}; say which are meant with {self.key}.column_map='{{{pairs}}}'"
        option = next((each for each in ("column", "conversation_column") if each in taken), None)
        if option is not None:
            return f"{problem}; say which is meant with {self.key}.{option}={near or 'COLUMN'}"
        return f"{problem}; rename one"


class Samples(Dataset[Any]):
    """Several :class:`Rows` after each other."""

    def __init__(self, rows: Sequence[Rows]) -> None:
        self.rows = rows
        self._ends = list(itertools.accumulate(map(len, rows)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number = bisect.bisect_right(self._ends, index)
        return self.rows[number][index - self._start(number)]

    def index_of(self, bad: BadRow) -> int:
        """The number here of a row that one of the data sets calls bad."""
        return self._start(bad.source) + bad.index

    def _start(self, number: int) -> int:
        return self._ends[number - 1] if number else 0


def sample_problem(sample: Any, ignore_index: int) -> str | None:
    """Why a sample cannot be trained on; None for one that can, and for kinds of samples not known here."""
    if not isinstance(sample, Mapping) or "tokens" not in sample or "labels" not in sample:
        return None
    tokens, labels = _whole_numbers(sample["tokens"]), _whole_numbers(sample["labels"])
    if tokens is None:
        return f"its tokens are no list of whole numbers ({str(sample['tokens'])[:60]})"
    if len(tokens) == 0:
        return "no token is left of it"
    if tokens.min() < 0:
        return f"the tokenizer gives {tokens.min()}, which is no token"
    if labels is None or len(labels) != len(tokens):
        return "its labels are not one whole number for each token"
    if ignore_index != _MASKED and (labels == _MASKED).any():
        raise UserError(f"loss.ignore_index: the data masks labels with {_MASKED}, the loss ignores {ignore_index}")
    return None


def _whole_numbers(values: Any) -> Any:
    """A one-dimensional integer array, or None."""
    try:
        array = values.numpy() if isinstance(values, torch.Tensor) else numpy.asarray(values)
    except (ValueError, TypeError, OverflowError):
        return None
    if array.size == 0 and array.ndim == 1:
        return array.astype(numpy.int64)
    return array if array.ndim == 1 and array.dtype.kind in "iu" else None


def _column_map(dataset: Any) -> dict[str, str]:
    """Which column torchtune's transforms read for what."""
    transform = getattr(dataset, "_message_transform", None)
    mapping = getattr(transform, "column_map", None) or getattr(transform, "_column_map", None)
    if isinstance(mapping, Mapping):
        return {str(name): str(column) for name, column in mapping.items()}
    if type(transform).__name__ == "AlpacaToMessages":
        return {"instruction": "instruction", "output": "output"}
    column = getattr(dataset, "_column", None)
    return {"text": column} if isinstance(column, str) else {}


def _column_names(dataset: Any, row: Mapping[str, Any]) -> list[str]:
    names = getattr(getattr(dataset, "_data", None), "column_names", None)
    return list(names) if isinstance(names, list) else list(row)


def _required_columns(dataset: Any) -> list[str]:
    """Columns that must not be null, of those in which there is a null at all."""
    mapped = _column_map(dataset)
    is_alpaca = type(getattr(dataset, "_message_transform", None)).__name__ == "AlpacaToMessages"
    wanted = [column for name, column in mapped.items() if name != "image" and not (is_alpaca and name == "input")]
    table = getattr(getattr(dataset, "_data", None), "data", None)
    if table is None:
        return wanted
    return [name for name in wanted if name in table.column_names and table.column(name).null_count]


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "no valid Unicode" if any("\ud800" <= each <= "\udfff" for each in value) else "text"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"a list of mappings with {', '.join(map(str, value[0]))}"
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _line_of(path: str, row: Mapping[str, Any]) -> int | None:
    """The first line of a JSON-lines file that holds ``row``; keys that it leaves out are null there."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                parsed = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(parsed, dict) and {**dict.fromkeys(row), **parsed} == dict(row):
                return number
    return None

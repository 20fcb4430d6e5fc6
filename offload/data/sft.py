"""Supervised fine-tuning: rows of conversations, prompts with completions, instructions or plain text to samples."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch.utils.data import Dataset

from offload.component import nearest
from offload.data.files import Source
from offload.data.labels import IGNORE_INDEX
from offload.data.messages import THINKING, RowError, without_nulls
from offload.data.packing import PackedSamples
from offload.data.tokenizer import ChatTokenizer
from offload.errors import UserError

# What a row of each format consists of, and the names that its columns go under. The first name is also what `columns`
# calls it. A format is meant if all of its required ones are there; of several, the first.
_FORMATS: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": ("messages", "conversations", "conversation"), "tools": ("tools",)},
    "prompt": {
        "prompt": ("prompt",),
        "completion": ("completion", "response"),
        "system": ("system",),
        "tools": ("tools",),
    },
    "instruction": {
        "instruction": ("instruction",),
        "input": ("input", "context"),
        "output": ("output", "response"),
        "system": ("system",),
    },
    "text": {"text": ("text",)},
}
_OPTIONAL = {"tools", "system", "input"}

# https://github.com/tatsu-lab/stanford_alpaca#data-release, for models without a chat template
_ALPACA = "{system}\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
_ALPACA_SYSTEM = (
    "Below is an instruction that describes a task{with_input}. "
    "Write a response that appropriately completes the request."
)


class SFTDataset(Dataset[dict[str, list[int]]]):
    """Samples of one source, made when they are asked for.

    A sample is ``{"tokens": ids, "labels": ids}``, lists of one length, at most ``tokenizer.max_seq_len``. Labels are
    not shifted: the label of a token is that token, or -100 where it does not count. Asking for a row that cannot be
    used raises a :class:`offload.data.messages.RowError`, which does not name the row; :meth:`where` does.

    Args:
        tokenizer: makes tokens of rows.
        source: the rows.
        format: ``messages``, ``prompt``, ``instruction`` or ``text``; None tells it from the columns.
        columns: the source's name of a column, for each of the format's that has another.
        train_on: ``assistant`` (the completion, the output) or ``all`` tokens.
        too_long: ``cut`` samples at ``tokenizer.max_seq_len``, or take longer ones for an ``error`` of their rows.
        weight: how often an epoch of a mixture goes through the data set (:mod:`offload.data.mixture`).

    Attributes:
        format: that of the rows.
        weight: as given.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        source: Source,
        *,
        format: str | None = None,
        columns: Mapping[str, str] | None = None,
        train_on: Literal["assistant", "all"] = "assistant",
        too_long: Literal["cut", "error"] = "cut",
        weight: float = 1.0,
    ) -> None:
        if train_on not in ("assistant", "all"):
            raise UserError(f"dataset.train_on: expected assistant or all, got {train_on!r}")
        if too_long not in ("cut", "error"):
            raise UserError(f"dataset.too_long: expected cut or error, got {too_long!r}")
        if not weight > 0:
            raise UserError(f"dataset.weight: expected a number above 0, got {weight}; leave the data set out instead")
        self._tokenizer = tokenizer
        self._source = source
        self._data = source.rows
        self._all = train_on == "all"
        self._cuts = too_long == "cut"
        self.weight = float(weight)
        self.format, self._columns = _format_of(source, format, dict(columns or {}))
        if self.format == "messages":
            tokenizer.template  # noqa: B018 - refused here rather than at each row
        self._encode: Callable[[Mapping[str, Any]], tuple[list[int], list[bool]]] = {
            "messages": self._messages,
            "prompt": self._prompt,
            "instruction": self._instruction,
            "text": self._text,
        }[self.format]
        self._read: set[int] = set()
        self._cut: dict[int, int] = {}
        self._unwritten: set[int] = set()  # rows with thinking parts that the template leaves out

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self._data[index]
        ids, counts = self._encode(row)
        if not ids:
            raise RowError("no token is left of it")
        limit = self._tokenizer.max_seq_len
        if limit is not None and len(ids) > limit and not self._cuts:
            raise RowError(
                f"it has {len(ids):,} tokens, more than tokenizer.max_seq_len={limit}; raise that, or have it cut with "
                "dataset.too_long=cut"
            )
        self._read.add(index)
        if self.format == "messages" and not self._tokenizer.template.writes_thinking:
            messages = self._cell(row, "messages")
            if any(message.get(key) for message in messages if isinstance(message, dict) for key in THINKING):
                self._unwritten.add(index)
        if limit is not None and len(ids) > limit:
            self._cut[index] = len(ids)
            ids, counts = ids[:limit], counts[:limit]
        if self._all:
            return {"tokens": ids, "labels": list(ids)}
        labels = [token if counted else IGNORE_INDEX for token, counted in zip(ids, counts, strict=True)]
        return {"tokens": ids, "labels": labels}

    def where(self, index: int) -> str:
        """Where a row stands: file and line where they can be told."""
        return self._source.where(index)

    def notes(self) -> list[str]:
        """What is not as the data says, as far as this process has read it: samples that were cut, thinking parts and
        ends of turns that the chat template does not write."""
        notes = []
        of = f"of the {len(self._read):,} samples read"
        if self._cut:
            longest = max(self._cut.values())
            notes.append(
                f"{len(self._cut):,} {of} are longer than tokenizer.max_seq_len={self._tokenizer.max_seq_len} and were "
                f"cut; the longest has {longest:,} tokens"
            )
        if self._unwritten:
            notes.append(
                f"{len(self._unwritten):,} {of} have thinking parts, which the chat template leaves out; give one that "
                "writes reasoning_content with tokenizer.chat_template=FILE"
            )
        if self.format != "text" and self._tokenizer.has_template and not self._tokenizer.template.ends_turns:
            notes.append("the chat template ends no turn with a special token, so the model will not learn to stop")
        return [f"note: {self._source.described}: {note}" for note in notes]

    def _cell(self, row: Mapping[str, Any], name: str) -> Any:
        column = self._columns.get(name)
        return None if column is None else row[column]

    def _string(self, row: Mapping[str, Any], name: str) -> str:
        value = self._cell(row, name)
        if name in _OPTIONAL and value is None:
            return ""
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            raise RowError(f"its {self._columns[name]} is {kind}; expected text")
        if name not in _OPTIONAL and not value.strip():
            raise RowError(f"its {self._columns[name]} is empty")
        return value

    def _tools(self, row: Mapping[str, Any]) -> Any:
        tools = self._cell(row, "tools")
        if isinstance(tools, str):
            try:
                tools = json.loads(tools) if tools.strip() else None
            except ValueError as error:
                raise RowError(f"its {self._columns['tools']} are not JSON ({error})") from error
            return tools or None
        return without_nulls(tools) or None

    def _messages(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        messages = self._cell(row, "messages")
        if messages is None:
            raise RowError(f"its {self._columns['messages']} is null")
        return self._tokenizer.encode_chat(messages, self._tools(row))

    def _prompt(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        prompt, completion = self._cell(row, "prompt"), self._cell(row, "completion")
        if isinstance(prompt, list):
            asked = [{**message, "masked": True} for message in prompt]
            given = completion if isinstance(completion, list) else [_assistant(self._string(row, "completion"))]
            return self._tokenizer.encode_chat([*asked, *given], self._tools(row))
        prompt, completion, system = (self._string(row, name) for name in ("prompt", "completion", "system"))
        if not self._tokenizer.has_template:
            return self._tokenizer.encode_completion(f"{system}\n\n{prompt}" if system else prompt, completion)
        return self._tokenizer.encode_chat([*_system(system), _user(prompt), _assistant(completion)], self._tools(row))

    def _instruction(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        names = ("instruction", "input", "output", "system")
        instruction, more, output, system = (self._string(row, name) for name in names)
        if self._tokenizer.has_template:
            question = f"{instruction}\n\n{more}" if more.strip() else instruction
            return self._tokenizer.encode_chat([*_system(system), _user(question), _assistant(output)])
        with_input = ", paired with an input that provides further context" if more.strip() else ""
        prompt = _ALPACA.format(
            system=system or _ALPACA_SYSTEM.format(with_input=with_input),
            instruction=instruction,
            input=f"### Input:\n{more}\n\n" if more.strip() else "",
        )
        return self._tokenizer.encode_completion(prompt, output)

    def _text(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        ids = self._tokenizer.encode(self._string(row, "text"))
        return ids, [True] * len(ids)


def sft_dataset(
    tokenizer: ChatTokenizer,
    path: str | os.PathLike[str] | Sequence[str],
    *,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    train_on: Literal["assistant", "all"] = "assistant",
    packed: bool = False,
    split: str = "train",
    too_long: Literal["cut", "error"] = "cut",
    weight: float = 1.0,
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedSamples:
    """A data set for supervised fine-tuning, from files, a folder or the Hugging Face Hub.

    ===============  =====================================================  ===========================================
    format           columns                                                what counts in the loss
    ===============  =====================================================  ===========================================
    ``messages``     messages or conversations (OpenAI's or ShareGPT's      the assistant's turns
                     form), and tools
    ``prompt``       prompt, completion or response, and system             the completion
    ``instruction``  instruction, input, output or response, and system     the output
    ``text``         text                                                   all of it
    ===============  =====================================================  ===========================================

    Prompts and instructions go through the chat template as a user's message. A tokenizer without one writes prompt
    and completion one after the other, and instructions in Alpaca's form.

    Args:
        tokenizer: makes tokens; its ``max_seq_len`` cuts samples.
        path: JSON, JSON-lines, Parquet, CSV or text files, a folder of them, or a name on the Hub.
        format: of the table; None tells it from the columns.
        columns: the data's name for each column of the table that has another, such as ``{"prompt": "question"}``.
        train_on: ``assistant``, or ``all`` tokens.
        packed: several samples in one of ``max_seq_len`` tokens, kept apart (:mod:`offload.data.packing`).
        split: such as ``train`` or ``train[:1000]``.
        too_long: ``cut`` samples at ``max_seq_len``, which loses the end of a turn; or ``error``, which makes them bad
            rows, for ``dataset_errors`` to stop at or leave out.
        weight: how often an epoch goes through this data set, among several.
        **load_dataset_kwargs: of :func:`datasets.load_dataset`, such as ``name`` and ``revision``; ``data_files`` and
            ``data_dir`` choose among the files of a folder or of a data set of the Hub.

    Raises:
        UserError: data that cannot be read, columns of no format, or no chat template where one is needed.
    """
    if load_dataset_kwargs.pop("streaming", None):
        raise UserError(
            "dataset.streaming: rows stay on the disk anyway, and shuffling and resuming need them by their number; "
            "remove it"
        )
    source = Source(path, split=split, **load_dataset_kwargs)
    if columns is not None and not isinstance(columns, Mapping):
        raise UserError(
            f"dataset.columns: got {columns!r}, expected a mapping from names of ours to the data's, such as "
            "dataset.columns='{prompt: question, completion: answer}'"
        )
    dataset = SFTDataset(
        tokenizer, source, format=format, columns=columns, train_on=train_on, too_long=too_long, weight=weight
    )
    if not packed:
        return dataset
    if tokenizer.max_seq_len is None:
        raise UserError("dataset.packed: packs need a length; set tokenizer.max_seq_len")
    return PackedSamples(dataset, tokenizer.max_seq_len, pad_id=tokenizer.pad_id)


_BRACKETS = (("[[", "]]"), ("⟦", "⟧"), ("<<<", ">>>"))


def shown(tokenizer: Any, sample: Mapping[str, Any], *, longest: int | None = None, limit: int | None = None) -> str:
    """A sample's text with what is trained in brackets (``[[`` and ``]]``, or others where the text has those).

    Args:
        tokenizer: with ``decode``.
        sample: tokens and unshifted labels, packed or not; its padding is left out.
        longest: characters of a part, trained or not, that stands there without its middle; None for any number.
        limit: characters after which no further part stands there; None for any number.
    """
    ids, labels = [int(token) for token in sample["tokens"]], [int(label) for label in sample["labels"]]
    if "padding" in sample:
        kept = len(ids) - int(sample["padding"])
        ids, labels = ids[:kept], labels[:kept]
    edges = [n for n in range(1, len(ids)) if (labels[n] == IGNORE_INDEX) != (labels[n - 1] == IGNORE_INDEX)]
    # Decoded alone, a part loses the blank that it begins with in some tokenizers.
    texts = [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in (*edges, len(ids))]
    opening, closing = next((pair for pair in _BRACKETS if pair[0] not in texts[-1]), _BRACKETS[0])
    pieces: list[str] = []
    for start, before, text in zip((0, *edges), ("", *texts), texts, strict=False):
        piece = text[len(before) :]
        if longest is not None and len(piece) > longest:
            piece = f"{piece[: longest // 2]} … {piece[-(longest // 2) :]}"
        pieces.append(piece if labels[start] == IGNORE_INDEX else f"{opening}{piece}{closing}")
        if limit is not None and start != (0, *edges)[-1] and sum(map(len, pieces)) > limit:
            return "".join([*pieces, " …"])
    return "".join(pieces)


def _format_of(source: Source, format: str | None, renamed: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The format of the rows, and the source's name of each of its columns."""
    there = list(source.rows.column_names)
    if format is not None and format not in _FORMATS:
        raise UserError(f"dataset.format: there is no {format!r}; {_meant(format, _FORMATS, 'it is one of')}")
    known = {name for names in _FORMATS.values() for name in names}
    for name, column in renamed.items():
        if name not in known:
            raise UserError(
                f"dataset.columns: {name!r} is no column of any format; {_meant(name, sorted(known), 'they are')}"
            )
        if column not in there:
            raise UserError(
                f"dataset.columns.{name}: {source.described} has no column {column!r}; "
                f"{_meant(column, there, 'it has')}"
            )
    for candidate in [format] if format else list(_FORMATS):
        found: dict[str, str] = {}
        for name, aliases in _FORMATS[candidate].items():
            here = renamed.get(name) or next((alias for alias in aliases if alias in there), None)
            if here is not None:
                found[name] = here
        missing = [name for name in _FORMATS[candidate] if name not in found and name not in _OPTIONAL]
        if not missing:
            return candidate, found
        if format:
            raise UserError(
                f"dataset.format: {source.described} has no column for {', '.join(missing)} of {format}, only "
                f"{', '.join(there)}; say which is meant with dataset.columns.{missing[0]}=COLUMN"
            )
    raise UserError(
        f"dataset.path: the columns of {source.described} ({', '.join(there)}) are of no known format; expected "
        "messages, prompt and completion, instruction and output, or text; "
        "say which are meant, such as dataset.columns.prompt=COLUMN dataset.columns.completion=COLUMN"
    )


def _meant(name: str, candidates: Sequence[str] | Mapping[str, Any], otherwise: str) -> str:
    near = nearest(name, candidates)
    return f"did you mean {near}?" if near else f"{otherwise} {', '.join(candidates)}"


def _system(content: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": content}] if content else []


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}

"""Any tokenizer folder that transformers opens, as data sets need it: ours, and torchtune's builders."""

from __future__ import annotations

import bisect
import os
from collections.abc import Mapping, Sequence
from typing import Any

from offload.component import nearest
from offload.data.chat import ChatTemplate
from offload.data.messages import Conversation, check_order, conversation
from offload.errors import UserError
from offload.paths import expanded


class ChatTokenizer:
    """A tokenizer with the chat template that its model was trained with.

    Wherever torchtune's data set builders take a tokenizer they take this one. It opens ``tokenizer.json``, tiktoken
    and SentencePiece files, from the disk alone, and runs no code of the folder.

    Args:
        path: the folder of the tokenizer, usually the model's.
        max_seq_len: tokens of a sample at most; None for any number.
        chat_template: file of the Jinja template to use in place of the folder's own, or the template itself.
        chat_template_kwargs: what the template takes besides messages and tools, such as ``{"enable_thinking":
            False}``.

    Attributes:
        max_seq_len: as given.
        hf: transformers' tokenizer, with the chat template that is used.
        bos_id, eos_id: None where the tokenizer has no such token.
        pad_id: the tokenizer's padding token, or one that is named so, or the end of the text, or 0.
        vocab_size: ids that the tokenizer may give, added tokens included.

    Raises:
        UserError: for a folder without a tokenizer, one that needs code of its own, and a template that is missing or
            broken.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_seq_len: int | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if max_seq_len is not None and max_seq_len < 2:
            raise UserError(f"tokenizer.max_seq_len: expected at least 2 tokens, got {max_seq_len}")
        self.hf = _load(path)
        if chat_template is not None:
            self.hf.chat_template = _template(chat_template)
        self.max_seq_len = max_seq_len
        self._options = dict(chat_template_kwargs or {})
        self._template: ChatTemplate | None = None
        if self.hf.chat_template:
            self._template = ChatTemplate(self.hf, self._options)

        self.bos_id: int | None = self.hf.bos_token_id
        self.eos_id: int | None = self.hf.eos_token_id
        self.pad_id: int = _padding(self.hf)
        self.vocab_size: int = max(len(self.hf), 1 + max(self.hf.get_vocab().values(), default=0))

    @property
    def template(self) -> ChatTemplate:
        """The chat template; a UserError where there is none."""
        if self._template is None:
            self._template = ChatTemplate(self.hf, self._options)
        return self._template

    @property
    def has_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._template is not None

    @property
    def stop_tokens(self) -> list[int]:
        """The tokens that end an answer: the end of the text, and those that end a turn in the chat template."""
        ends = self._template.ends if self._template is not None else []
        ids = [self.eos_id, *(self.hf.convert_tokens_to_ids(token) for token in ends)]
        return sorted({token for token in ids if token is not None})

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """The token ids of plain text, with the tokenizer's first and last token where it has them."""
        ids = self.hf.encode(text, add_special_tokens=False)
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if add_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def encode_chat(self, messages: Any, tools: Any = None) -> tuple[list[int], list[bool]]:
        """A conversation's token ids and which of them count in the loss, however long.

        Args:
            messages: in any form that :func:`offload.data.messages.conversation` reads.
            tools: JSON schemas of the functions that the assistant may call.

        Returns:
            ids and, for each, True where the model itself has to generate it (and its turn counts).

        Raises:
            RowError: for a conversation that cannot be trained on.
            UserError: without a chat template.
        """
        read = conversation(messages)
        check_order(read.messages)
        rendered = self.template.trained(read, tools)
        return self._mask(rendered.text, rendered.trained)

    def encode_completion(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        """Plain text, of which the completion and the end of the text count; ids and counts as :meth:`encode_chat`."""
        ids, counts = self._mask(prompt + completion, [(len(prompt), len(prompt) + len(completion))])
        if self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids, counts = [self.bos_id, *ids], [False, *counts]
        if self.eos_id is not None:
            ids, counts = [*ids, self.eos_id], [*counts, True]
        return ids, counts

    def encode_prompt(self, messages: Any, tools: Any = None) -> list[int]:
        """The token ids after which the model answers ``messages``; goes on with a last message of the assistant's."""
        read = conversation(messages)
        if read.messages and read.messages[-1]["role"] == "assistant" and not read.messages[-1]["content"].strip():
            read = Conversation(read.messages[:-1], read.counts[:-1])
        if read.messages and read.messages[-1]["role"] == "assistant":
            text = self.template.continued(read.messages, tools)
        else:
            text = self.template.render(read.messages, tools, prompt=True)
        return self.hf.encode(text, add_special_tokens=False)

    def tokenize_messages(
        self, messages: Any, *, add_eos: bool = True, tools: Any = None
    ) -> tuple[list[int], list[bool]]:
        """torchtune's: token ids of at most ``max_seq_len``, and True where a token does *not* count.

        Args:
            messages: torchtune's ``Message`` or dictionaries.
            add_eos: the last turn is whole; False leaves it open, for the model to answer or to go on with.
            tools: as in :meth:`encode_chat`.
        """
        if not add_eos:
            ids = self.encode_prompt(messages, tools)
            return ids, [True] * len(ids)
        ids, counts = self.encode_chat(messages, tools)
        return ids[: self.max_seq_len], [not count for count in counts[: self.max_seq_len]]

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """torchtune's: ``sample`` with ``tokens`` and ``mask`` in place of ``messages`` (and ``tools``)."""
        rest = dict(sample)
        messages, tools = rest.pop("messages"), rest.pop("tools", None)
        tokens, mask = self.tokenize_messages(messages, add_eos=not inference, tools=tools or None)
        return {**rest, "tokens": tokens, "mask": mask}

    def _mask(self, text: str, trained: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """The ids of ``text``; a token counts if it begins inside of a trained part.

        One that begins before does not: after a prompt, the model cannot generate it. One that ends behind does: it
        has the whole end of the turn in it (Phi-3's end token takes the newline after it along).
        """
        if not self.hf.is_fast:
            return self._mask_without_offsets(text, trained)
        encoding = self.hf(text, add_special_tokens=False)._encodings[0]
        ids, starts = encoding.ids, _starts(encoding, text)
        counts = [False] * len(ids)
        for start, end in trained:
            for token in range(bisect.bisect_left(starts, start), bisect.bisect_left(starts, end)):
                counts[token] = True
        return ids, counts

    def _mask_without_offsets(self, text: str, trained: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """As :meth:`_mask`, where the tokenizer does not tell offsets: by what precedes each edge, tokenized alone."""
        ids = self.hf.encode(text, add_special_tokens=False)

        def tokens_before(edge: int) -> int:
            alone = self.hf.encode(text[:edge], add_special_tokens=False)
            same = next((i for i, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b), len(alone))
            return same if same == len(alone) else same + 1

        counts = [False] * len(ids)
        for start, end in trained:
            for token in range(tokens_before(start), tokens_before(end)):
                counts[token] = True
        return ids, counts


def _starts(encoding: Any, text: str) -> list[int]:
    """Where each token begins in ``text``, ascending.

    Byte-level tokenizers leave blanks that a token begins with out of its offsets, and give each of several tokens of
    one character all of it.
    """
    starts: list[int] = []
    before = 0
    for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True):
        if start > before and token.startswith("Ġ") and not text[before:start].strip(" "):
            start = before
        starts.append(max(start, starts[-1]) if starts else start)
        before = max(before, end)
    return starts


def _load(path: str | os.PathLike[str]) -> Any:
    folder = expanded(path, "tokenizer.path")
    if not folder.is_dir():
        if folder.is_file():
            raise UserError(f"tokenizer.path: {folder} is a file; give the folder that it lies in, {folder.parent}")
        siblings = {str(one): one for one in folder.parent.glob("*/")} if folder.parent.is_dir() else {}
        meant = nearest(str(folder), siblings)
        hint = f"; did you mean {meant}?" if meant else "; download the model with `tune download`"
        raise UserError(f"tokenizer.path: the folder {folder} does not exist{hint}")
    # Importing transformers takes a second, which a wrong path need not wait for.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise what they like, down to a bare Exception
        names = sorted(one.name for one in folder.iterdir() if "token" in one.name.lower())
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "trust_remote_code" in str(error):
            what = "it needs code of its own, which is not run"
        there = f"it has {', '.join(names)}" if names else "it has no tokenizer files"
        raise UserError(
            f"tokenizer.path: {folder} cannot be opened as a tokenizer ({there}): {what}; "
            "expected tokenizer.json, or a tiktoken or SentencePiece file with tokenizer_config.json"
        ) from error


def _template(given: str | os.PathLike[str]) -> str:
    if isinstance(given, str) and ("{%" in given or "{{" in given):
        return given
    path = expanded(given, "tokenizer.chat_template")
    if not path.is_file():
        siblings = {str(one): one for one in path.parent.glob("*")} if path.parent.is_dir() else {}
        meant = nearest(str(path), siblings)
        hint = f"; did you mean {meant}?" if meant else ""
        raise UserError(f"tokenizer.chat_template: there is no file {path}{hint}")
    return path.read_text(encoding="utf-8")


def _padding(tokenizer: Any) -> int:
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    for number, token in sorted(tokenizer.added_tokens_decoder.items()):
        # Llama 3.1 has <|finetune_right_pad_id|> and does not say what it is for.
        if token.special and "pad" in token.content.lower():
            return int(number)
    return int(tokenizer.eos_token_id or 0)

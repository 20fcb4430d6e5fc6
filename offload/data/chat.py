"""Which parts of a conversation, as a model's chat template writes it, the model itself has to generate.

Those are the assistant's turns from where the generation prompt ends: the thinking part, the content, the tool calls
and the token that ends the turn, without what the template writes after it (ChatML's newline). Stock templates seldom
say so, therefore three ways, the first that applies:

1. The template's own marks, ``{% generation %}``.
2. Prefixes. What the template writes of the messages before a turn, with the generation prompt, and of the messages up
   to it, are both beginnings of the whole text; the turn is what lies between.
3. Marked messages. Templates that write a turn otherwise once it is history (Qwen3 and DeepSeek drop its thinking,
   gpt-oss ends it with another token) fail the second. The conversation is written again with characters of Unicode's
   private use area inside of its messages; without them it must be the same text. They show where each message is;
   around it, the generation prompt begins the turn and a special token ends it.

What none of them can tell is refused. Everything here is about text; :mod:`offload.data.tokenizer` makes tokens of it.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.data.messages import Conversation, RowError
from offload.errors import UserError

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THINK = "<think>"

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: all of it, special tokens included.
        trained: ``(start, end)`` of each part that counts in the loss, in characters, in order and apart.
    """

    text: str
    trained: list[tuple[int, int]]


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: of transformers, with a chat template.
        options: what the template takes besides messages and tools, such as ``{"enable_thinking": False}``.

    Raises:
        UserError: without a template, and for one that Jinja cannot read.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        import jinja2

        if not tokenizer.chat_template:
            raise UserError(
                "tokenizer: it has no chat template, which conversations need; "
                "give one with tokenizer.chat_template=FILE, or train on a column of plain text"
            )
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        try:
            self._in_parts = self._choose_form()
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"tokenizer.chat_template: line {error.lineno} of the template is broken: {_line(error)}"
            ) from error
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = sorted({*special, *tokenizer.all_special_tokens}, key=len, reverse=True)
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        self._added = sorted({*self._special, *added}, key=len, reverse=True)

    def render(self, messages: Messages, tools: Any = None, *, prompt: bool = False) -> str:
        """The template's text of ``messages``; ``prompt`` adds what asks the model for its turn.

        Raises:
            RowError: for what the template refuses.
        """
        try:
            return self._write(messages, tools, prompt)
        except TypeError:
            # Most templates take a call's arguments as a mapping, some (DeepSeek's) as JSON.
            try:
                return self._write(_arguments_as_json(messages), tools, prompt)
            except Exception as error:
                raise _refused(error) from error
        except Exception as error:
            raise _refused(error) from error

    def trained(self, conversation: Conversation, tools: Any = None) -> Rendered:
        """The text of a conversation and the parts of it that count.

        Raises:
            RowError: for what the template refuses, and where its turns cannot be found.
        """
        messages, counts = conversation.messages, conversation.counts
        text = self.render(messages, tools)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if any(counts[number] for number in range(len(messages)) if number not in turns):
            return Rendered(text, [(self._end_of_system(conversation, text, tools), len(text))])
        parts = self._marked_by_template(messages, tools)
        if parts is None:
            end = self._next_role(messages, text)
            text += end
            parts = self._between_prefixes(messages, turns, text, tools)
            if parts is None:
                parts = self._around_marks(messages, turns, text, tools, end)
        said = [text[start:end] for start, end in parts]
        for number, turn in enumerate(turns):
            if not _is_said(messages[turn], said[number] if len(said) == len(turns) else "".join(said)):
                raise self._left_out(turn)
        if all(counts[turn] for turn in turns):
            return Rendered(text, parts)
        if len(parts) != len(turns):
            raise RowError(
                "the chat template marks a turn in several parts, so single turns cannot be left out; "
                "remove weight and masked from the messages"
            )
        return Rendered(text, [part for part, turn in zip(parts, turns, strict=True) if counts[turn]])

    @functools.cached_property
    def ends_turns(self) -> bool:
        """Whether a token ends the assistant's turns; a model trained without does not learn to stop."""
        asked: Messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}]
        text = self._try(asked, None)
        return text is None or self._closing(text, 0) is not None or self._next_role(asked, text) != ""

    @functools.cached_property
    def ends(self) -> list[str]:
        """The tokens that end the assistant's turns: an answer and, where it is another, a turn with calls."""
        call = {"type": "function", "function": {"name": "look_up", "arguments": {}}}
        found: dict[str, None] = {}
        for said in ({"content": "-"}, {"content": "", "tool_calls": [call]}):
            messages: Messages = [{"role": "user", "content": "-"}, {"role": "assistant", **said}]
            try:
                turn = self.trained(Conversation(messages, [False, True]))
            except RowError:
                continue
            start, end = turn.trained[-1]
            if closing := self._closing(turn.text[start:end], 0):
                found[re.findall(_any_of(self._added), closing[0])[-1]] = None
        return list(found)

    @functools.cached_property
    def writes_thinking(self) -> bool:
        """Whether the thinking part of a message, where it is apart from the content, is written at all."""
        thought = "what is thought"
        answer = {"role": "assistant", "content": "-", "reasoning_content": thought, "thinking": thought}
        text = self._try([{"role": "user", "content": "-"}, answer], None)
        return text is None or thought in text

    def continued(self, messages: Messages, tools: Any = None) -> str:
        """The text of ``messages`` with the last one open, for the model to go on with."""
        try:
            return self._tokenizer.apply_chat_template(
                self._formed(messages), tools=tools, tokenize=False, continue_final_message=True, **self._options
            )
        except Exception as error:
            raise _refused(error) from error

    def _choose_form(self) -> bool:
        """Whether contents go to the template as lists of parts; some, for images too, leave text alone out."""
        import jinja2

        probe = "what is asked"
        for self._in_parts in (False, True):
            try:
                if probe in self._write([{"role": "user", "content": probe}]):
                    return self._in_parts
            except jinja2.TemplateSyntaxError:
                raise
            except Exception:  # it may refuse a form, or a conversation of one message
                continue
        return False

    def _formed(self, messages: Messages) -> Messages:
        if not self._in_parts:
            return messages
        return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]

    def _write(self, messages: Messages, tools: Any = None, prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            self._formed(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **self._options
        )

    def _try(self, messages: Messages, tools: Any, prompt: bool = False) -> str | None:
        try:
            return self.render(messages, tools, prompt=prompt)
        except RowError:
            return None

    def _next_role(self, messages: Messages, text: str) -> str:
        """What ends the last turn of ``text`` in a template that leaves it to the next role's token, as GLM's does."""
        if messages[-1]["role"] != "assistant" or self._closing(text, 0):
            return ""
        turn: dict[str, Any] = {"role": "assistant", "content": "-"}
        answer = {"role": "user", "content": "-"}
        if "tool_calls" in messages[-1]:
            call = {"type": "function", "function": {"name": "f", "arguments": {}}}
            turn, answer = {**turn, "tool_calls": [call]}, {"role": "tool", "content": "-"}
        asked: Messages = [{"role": "user", "content": "-"}, turn]
        shorter, longer = self._try(asked, None), self._try([*asked, answer], None)
        if shorter is None or longer is None or not longer.startswith(shorter):
            return ""
        following = self._token_at(longer, len(shorter))
        return following[0] if following else ""

    def _end_of_system(self, conversation: Conversation, text: str, tools: Any) -> int:
        """Where a system prompt that does not count ends, for data sets that train on all the rest."""
        leading = 0
        while conversation.messages[leading]["role"] == "system" and not conversation.counts[leading]:
            leading += 1
        system = self._try(conversation.messages[:leading], tools) if leading else None
        return len(system) if system is not None and text.startswith(system) else 0

    # 1. The template's own marks.

    def _marked_by_template(self, messages: Messages, tools: Any) -> list[tuple[int, int]] | None:
        template = self._tokenizer.get_chat_template(None, tools)
        if not _GENERATION.search(template):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        def parts(messages: Messages) -> list[tuple[int, int]]:
            rendered: Any = render_jinja_template(
                [self._formed(messages)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **self._options},
            )
            return [(start, end) for start, end in rendered[1][0] if end > start]

        try:
            found = parts(messages)
        except TypeError:
            found = parts(_arguments_as_json(messages))
        if not found:
            raise RowError("the chat template has {% generation %}, but marks nothing of this conversation")
        return found

    # 2. Prefixes.

    def _between_prefixes(
        self, messages: Messages, turns: Sequence[int], text: str, tools: Any
    ) -> list[tuple[int, int]] | None:
        parts = []
        for turn in turns:
            before = self._try(messages[:turn], tools, prompt=True)
            upto = text if turn == len(messages) - 1 else self._try(messages[: turn + 1], tools)
            if before is None or upto is None or not text.startswith(before) or not text.startswith(upto):
                return None
            if len(before) >= len(upto):
                return None
            closing = self._closing(upto, len(before)) or self._token_at(text, len(upto))
            parts.append((len(before), closing.end() if closing else len(upto)))
        return parts

    # 3. Marked messages.

    def _around_marks(
        self, messages: Messages, turns: Sequence[int], text: str, tools: Any, end_of_text: str
    ) -> list[tuple[int, int]]:
        signs = (chr(code) for code in range(0xE000, 0xF900))
        sign = next((sign for sign in signs if sign not in text), "")
        marks = _Marks(messages, sign)
        written = self._try(marks.messages, tools)
        places = marks.places(None if written is None else written + end_of_text, text)
        if places is None:
            raise self._unclear("it writes a message otherwise when another has changed")
        parts: list[tuple[int, int]] = []
        for turn in turns:
            here = [places[mark] for mark in marks.of(turn) if mark in places]
            if not here:
                raise self._left_out(turn)
            later = [at for mark, at in places.items() if marks.message(mark) > turn]
            limit = min(later, default=len(text))
            start = self._start(messages, turn, text, tools, marks, places)
            end = self._end(messages, turn, text, tools, max(here), limit)
            if start is None or end is None:
                raise self._unclear(f"where message {turn + 1} {'begins' if start is None else 'ends'}")
            if not (parts[-1][1] if parts else 0) <= start <= min(here) <= max(here) <= end <= limit:
                raise self._unclear(f"where message {turn + 1} is")
            parts.append((start, end))
        return parts

    def _start(
        self, messages: Messages, turn: int, text: str, tools: Any, marks: _Marks, places: Mapping[int, int]
    ) -> int | None:
        """Where the generation prompt before ``turn`` ends.

        What follows the last mark before it, when nothing comes after, is looked for behind the same mark in ``text``.
        """
        bare = self._try(messages[:turn], tools)
        before = self._try(messages[:turn], tools, prompt=True)
        if bare is None or before is None:
            return None
        if text.startswith(before):
            return len(before)
        alone = marks.places(self._try(marks.messages[:turn], tools, prompt=True), before)
        if not alone:
            return None
        last = max(alone, key=lambda mark: alone[mark])
        # Thinking models' prompts open the thinking part, which a turn may be written without.
        prompt = len(os.path.commonprefix([bare, before]))
        cuts = {match.start() for match in re.compile(_any_of([_THINK, *self._added])).finditer(before, prompt + 1)}
        for cut in sorted({len(before), *cuts}, reverse=True):
            tail = before[alone[last] : cut]
            if text.startswith(tail, places.get(last, len(text))):
                return places[last] + len(tail)
        return None

    def _end(self, messages: Messages, turn: int, text: str, tools: Any, last: int, limit: int) -> int | None:
        """Where the special token ends that closes ``turn``, between the turn's last mark and ``limit``."""
        if not messages[turn].get("tool_calls"):
            closing = self._token_at(text, last)
            return closing.end() if closing else None
        # It comes after the calls' arguments, and is the one that the turn ends with where it is the last.
        alone = self._try(messages[: turn + 1], tools)
        closing = self._closing(alone, 0) if alone else None
        if closing:
            token = next(token for token in self._added if closing[0].endswith(token))
            at = text.find(token, last, limit)
            return at + len(token) if at >= 0 else None
        special = re.compile(_any_of(self._special)).search(text, last, limit) if self._special else None
        return special.end() if special else None

    # What both need.

    def _closing(self, text: str, start: int) -> re.Match[str] | None:
        """The special tokens that close the turn that is the last of ``text``.

        The first ones of those at the end: Phi-3's template writes ``<|end|>``, a newline and the end of the text, and
        ``<|end|>`` is what the model stops at.
        """
        for tokens in (self._special, [token for token in self._added if not token.startswith("</")]):
            one = _any_of(tokens)
            found = re.compile(rf"(?:{one})+(?=(?:{one}|\s)*\Z)").search(text, start) if tokens else None
            if found:
                return found
        return None

    def _token_at(self, text: str, at: int) -> re.Match[str] | None:
        """The special token, or else the added one, that follows ``at`` after nothing but blanks."""
        for tokens in (self._special, self._added):
            found = re.compile(rf"\s*(?:{_any_of(tokens)})").match(text, at) if tokens else None
            if found:
                return found
        return None

    def _left_out(self, turn: int) -> RowError:
        return RowError(
            f"the chat template leaves out what message {turn + 1}, of assistant, says or calls; give a template that "
            "writes it with tokenizer.chat_template=FILE, or leave the conversation out"
        )

    def _unclear(self, what: str) -> RowError:
        return RowError(
            f"the chat template does not tell which part of the text is the assistant's ({what}); give one that has "
            "{% generation %} around what the model generates, with tokenizer.chat_template=FILE"
        )


class _Marks:
    """A conversation with marks inside of its messages, to find them in the template's text.

    A mark is ``sign``, a number and ``sign``. The assistant's messages have them at the edges of the answer and the
    thinking part and after names of tools, others in the middle: inside of what a template may strip or look for
    (``<tool_response>``, ``</think>``).

    Attributes:
        messages: with marks; ``messages[:n]`` is marked as the first n are.
    """

    def __init__(self, messages: Messages, sign: str) -> None:
        self._sign = sign
        self._owners: list[int] = []
        self.messages = [self._marked(number, message) for number, message in enumerate(messages)]

    def of(self, number: int) -> list[int]:
        """The marks of a message."""
        return [mark for mark, owner in enumerate(self._owners) if owner == number]

    def message(self, mark: int) -> int:
        """The message that has a mark."""
        return self._owners[mark]

    def places(self, written: str | None, text: str) -> dict[int, int] | None:
        """Where each mark is in ``text`` for the first time; None if ``written`` is another text than that."""
        pieces = re.split(rf"{self._sign}(\d+){self._sign}", written or "") if self._sign else []
        if "".join(pieces[::2]) != text:
            return None
        places: dict[int, int] = {}
        at = 0
        for before, mark in zip(pieces[::2], pieces[1::2], strict=False):
            at += len(before)
            places.setdefault(int(mark), at)
        return places

    def _marked(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        def mark() -> str:
            self._owners.append(number)
            return f"{self._sign}{len(self._owners) - 1}{self._sign}"

        def framed(text: str) -> str:
            core = text.strip()
            if not core:
                return text
            lead = len(text) - len(text.lstrip())
            return f"{text[:lead]}{mark()}{core}{mark()}{text[lead + len(core) :]}"

        marked = dict(message)
        content = message["content"]
        if message["role"] != "assistant":
            middle = len(content) // 2
            marked["content"] = content[:middle] + mark() + content[middle:] if content else content
            return marked
        answer = _answer(content)
        marked["content"] = content[: len(content) - len(answer)] + framed(answer)
        if "thinking" in message:
            marked.update(dict.fromkeys(("reasoning_content", "thinking"), framed(message["thinking"])))
        if "tool_calls" in message:
            marked["tool_calls"] = [
                {**call, "function": {**call["function"], "name": call["function"]["name"] + mark()}}
                for call in message["tool_calls"]
            ]
        return marked


def _answer(content: str) -> str:
    """Content without a thinking part of its own."""
    return content.rpartition("</think>")[2]


def _is_said(message: Mapping[str, Any], said: str) -> bool:
    """Whether a turn's text has all of its tool calls; without calls, its answer.

    An answer beside calls may be left out: gpt-oss takes it for a thinking part, which history does not have.
    """
    calls = Counter(call["function"]["name"] for call in message.get("tool_calls", ()))
    if calls:
        return all(said.count(name) >= times for name, times in calls.items())
    answer = _answer(message["content"]).strip()
    return answer != "" and answer in said


def _arguments_as_json(messages: Messages) -> Messages:
    def call(call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [call(one) for one in message["tool_calls"]]} if "tool_calls" in message else message
        for message in messages
    ]


def _any_of(tokens: Sequence[str]) -> str:
    return "|".join(map(re.escape, tokens))


def _refused(error: Exception) -> RowError:
    return RowError(f"the chat template refuses this conversation: {_line(error)}")


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

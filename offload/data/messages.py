"""What a conversation is: roles, contents and tool calls in one form, and what is wrong with a conversation.

A conversation comes as dictionaries in OpenAI's form (``role``, ``content``, ``tool_calls``), as ShareGPT's (``from``,
``value``), or as objects with ``role``, ``content`` and ``masked``, torchtune's ``Message``. It leaves as dictionaries
that a chat template of transformers takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.component import nearest

# Names of roles in the wild, to those that chat templates know.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "ipython": "tool",
    "function": "tool",
    "observation": "tool",
}

# Keys that say how a message is read or counted; templates do not see them.
_OURS = ("role", "from", "content", "value", "masked", "weight", "tool_calls")

# Names that a message's thinking part goes under; templates read the first or the second.
THINKING = ("reasoning_content", "thinking", "reasoning")


class RowError(ValueError):
    """A row of a data set that cannot be trained on; a program goes on to the next or stops, as it was told to.

    ``str(error)`` is one line that says what is wrong with the row and does not name it: who reads the rows adds where
    it is.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(" ".join(reason.split()))


@dataclass
class Conversation:
    """Messages in the form that chat templates take.

    Attributes:
        messages: dictionaries with ``role`` (system, user, assistant or tool) and ``content`` (text), and, where they
            have them, ``reasoning_content`` and ``thinking`` (the same text), ``tool_calls`` and further keys.
        counts: for each message, whether the loss counts it; False for all but the assistant's unless said otherwise.
    """

    messages: list[dict[str, Any]]
    counts: list[bool]


def conversation(messages: Any) -> Conversation:
    """``messages`` in one form.

    An assistant's message does not count if it says ``weight: 0`` (OpenAI's) or ``masked: true`` (torchtune's). Another
    role's counts only if it is an object that says ``masked=False``, which torchtune's data sets set for
    ``train_on_input``.

    Raises:
        RowError: for what is no list of messages, an unknown role, content that is not text, or a malformed tool call.
    """
    if isinstance(messages, str):
        messages = _from_json(messages, "messages")
    if not isinstance(messages, Sequence):
        raise RowError(f"expected a list of messages, got {type(messages).__name__}")
    read, counts = [], []
    for number, message in enumerate(messages, start=1):
        one, counted = _message(message, number)
        read.append(one)
        counts.append(counted)
    return Conversation(read, counts)


def check_order(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a conversation whose turns do not follow each other, that has an empty turn or none of the assistant.

    System messages come first, then a user's; an assistant's follows a user's or a tool's; a tool's follows an
    assistant's or another tool's.

    Raises:
        RowError: naming the message.
    """
    if not messages:
        raise RowError("the conversation is empty")
    before = "system"
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        follows = {
            "system": ("system",),
            "user": ("system", "assistant", "tool"),
            "assistant": ("user", "tool"),
            "tool": ("assistant", "tool"),
        }
        if before not in follows[role]:
            after = f"follows one of {before}" if number > 1 else "comes first"
            join = ", or make one message of the two" if before == role and number > 1 else ""
            raise RowError(
                f"roles are out of order: message {number}, of {role}, {after}; "
                f"it has to follow {_either(follows[role])}{join}"
            )
        if role in ("user", "assistant") and not message["content"].strip() and not message.get("tool_calls"):
            raise RowError(f"message {number}, of {role}, is empty; fill it or leave the conversation out")
        before = role
    if all(message["role"] != "assistant" for message in messages):
        raise RowError("no message is the assistant's, so there is nothing to train on")


def _message(message: Any, number: int) -> tuple[dict[str, Any], bool]:
    if isinstance(message, Mapping):
        fields = dict(message)
        masked, unmasked = bool(fields.get("masked")) or fields.get("weight") == 0, False
    elif hasattr(message, "role") and hasattr(message, "content"):
        fields = {"role": message.role, "content": message.content}
        masked = bool(getattr(message, "masked", False))
        unmasked = not masked
    else:
        raise RowError(f"message {number} is {type(message).__name__}; expected role and content")

    name = fields.get("role", fields.get("from"))
    if name is None:
        raise RowError(f"message {number} has no role (or from); it has {', '.join(map(str, fields)) or 'nothing'}")
    role = _ROLES.get(str(name))
    if role is None:
        meant = nearest(str(name), _ROLES)
        hint = f"did you mean {meant}?" if meant else f"expected {_either(('system', 'user', 'assistant', 'tool'))}"
        raise RowError(f"message {number} has the unknown role {name!r}; {hint}")

    read: dict[str, Any] = {"role": role, "content": _text(fields.get("content", fields.get("value")), number)}
    calls = fields.get("tool_calls")
    if isinstance(calls, str):
        calls = _from_json(calls, f"tool_calls of message {number}")
    if calls:
        if role != "assistant":
            raise RowError(f"message {number}, of {role}, has tool_calls; only the assistant's may")
        read["tool_calls"] = [_tool_call(call, number) for call in calls]
    thinking = next((fields[key] for key in THINKING if fields.get(key)), None)
    if thinking is not None:
        read.update(dict.fromkeys(THINKING[:2], _text(thinking, number)))
    for key, value in fields.items():
        if key not in (*_OURS, *THINKING) and value is not None:
            read[key] = value
    return read, not masked if role == "assistant" else unmasked


def _text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = []
        for part in content:
            kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise RowError(f"message {number} has a part of type {kind!r}; only text can be trained on")
            text = part.get("text", part.get("content"))
            parts.append(_text(text, number))
        return "".join(parts)
    raise RowError(f"the content of message {number} is {type(content).__name__}; expected text")


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """One call as ``{"type": "function", "function": {"name": …, "arguments": {…}}}``, as templates take it.

    A null among arguments is kept where they are JSON in a string.
    """
    if not isinstance(call, Mapping):
        raise RowError(f"a tool call of message {number} is {type(call).__name__}; expected name and arguments")
    function = call.get("function") or {key: call.get(key) for key in ("name", "arguments")}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError(f"a tool call of message {number} has no name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _from_json(arguments, f"the arguments of {function['name']} in message {number}")
    else:
        arguments = without_nulls(arguments)
    outer = {key: value for key, value in call.items() if key not in ("function", "name", "arguments", "type")}
    return {
        "type": "function",
        **{key: value for key, value in outer.items() if value is not None},
        "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
    }


def without_nulls(value: Any) -> Any:
    """``value`` without keys that are null; columns of one type, as Parquet's, have one for each key of other rows."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _from_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowError(f"{what}: not JSON ({error})") from error


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

"""Which tokens of a conversation count, against expectations written by hand."""

from __future__ import annotations

import pytest

from offload.data.messages import RowError, conversation
from offload.data.tokenizer import ChatTokenizer
from offload.errors import UserError

SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}]


def user(content):
    return {"role": "user", "content": content}


def assistant(content="", **more):
    return {"role": "assistant", "content": content, **more}


def call(name="weather", **arguments):
    return {"tool_calls": [{"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}]}


def tool(content):
    return {"role": "tool", "content": content, "tool_call_id": "c1", "name": "weather"}


TURNS = [SYSTEM, user("Add 1 and 2."), assistant("  It is 3.\n"), user("And 4?"), assistant("That is 7. 🤗")]
TURNS_WITHOUT_SYSTEM = TURNS[1:]
THINKING = [
    user("Add 1 and 2."),
    assistant("3", reasoning_content="one plus two"),
    user("And 4?"),
    assistant("7", reasoning_content="three plus four"),
]
IN_CONTENT = [
    user("Add 1 and 2."),
    assistant("<think>\none plus two\n</think>\n\n3"),
    user("And 4?"),
    assistant("<think>\nthree plus four\n</think>\n\n7"),
]
CALLS = [
    user("Rain in Ulm?"),
    assistant(reasoning_content="I ask weather.", **call(city="Ulm")),
    tool("sun"),
    assistant("No, sun.", reasoning_content="It says sun."),
    user("And in Bonn?"),
    assistant(**call(city="Bonn")),
    tool("rain"),
    assistant("Yes."),
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'

# (template, conversation, tools, what the model itself has to generate)
CASES = {
    "llama31 turns": ("llama31", TURNS, None, ["It is 3.<|eot_id|>", "That is 7. 🤗<|eot_id|>"]),
    "llama31 tools": (
        "llama31",
        [SYSTEM, *CALLS],
        TOOLS,
        [
            '{"name": "weather", "parameters": {"city": "Ulm"}}<|eot_id|>',
            "No, sun.<|eot_id|>",
            '{"name": "weather", "parameters": {"city": "Bonn"}}<|eot_id|>',
            "Yes.<|eot_id|>",
        ],
    ),
    "qwen3 turns": (
        "qwen3",
        TURNS,
        None,
        ["  It is 3.\n<|im_end|>", "<think>\n\n</think>\n\nThat is 7. 🤗<|im_end|>"],
    ),
    "qwen3 one turn": ("qwen3", TURNS[:3], None, ["<think>\n\n</think>\n\n  It is 3.\n<|im_end|>"]),
    "qwen3 thinking": (
        "qwen3",
        THINKING,
        None,
        ["3<|im_end|>", "<think>\nthree plus four\n</think>\n\n7<|im_end|>"],
    ),
    "qwen3 thinking in content": (
        "qwen3",
        IN_CONTENT,
        None,
        ["3<|im_end|>", "<think>\nthree plus four\n</think>\n\n7<|im_end|>"],
    ),
    "qwen3 tools": (
        "qwen3",
        CALLS,
        TOOLS,
        [
            f"{CALL % 'Ulm'}<|im_end|>",
            "No, sun.<|im_end|>",
            f"{CALL % 'Bonn'}<|im_end|>",
            "<think>\n\n</think>\n\nYes.<|im_end|>",
        ],
    ),
    "qwen3 tools after the last question": (
        "qwen3",
        [SYSTEM, *CALLS[:4]],
        TOOLS,
        [
            f"<think>\nI ask weather.\n</think>\n\n{CALL % 'Ulm'}<|im_end|>",
            "<think>\nIt says sun.\n</think>\n\nNo, sun.<|im_end|>",
        ],
    ),
    "gemma turns": ("gemma", TURNS_WITHOUT_SYSTEM, None, ["It is 3.<end_of_turn>", "That is 7. 🤗<end_of_turn>"]),
    "gemma3 turns": ("gemma3", TURNS, None, ["It is 3.<end_of_turn>", "That is 7. 🤗<end_of_turn>"]),
    "gemma3 without system": (
        "gemma3",
        TURNS_WITHOUT_SYSTEM,
        None,
        ["It is 3.<end_of_turn>", "That is 7. 🤗<end_of_turn>"],
    ),
    "mistral turns": ("mistral", TURNS, None, [" It is 3.</s>", " That is 7. 🤗</s>"]),
    "mistral tools": (
        "mistral",
        CALLS,
        None,
        [
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ulm"}}]</s>',
            " No, sun.</s>",
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bonn"}}]</s>',
            " Yes.</s>",
        ],
    ),
    "harmony turns": (
        "harmony",
        TURNS,
        None,
        [
            "<|channel|>final<|message|>  It is 3.\n<|end|>",
            "<|channel|>final<|message|>That is 7. 🤗<|return|>",
        ],
    ),
    "harmony thinking": (
        "harmony",
        THINKING,
        None,
        [
            "<|channel|>final<|message|>3<|end|>",
            "<|channel|>analysis<|message|>three plus four<|end|>"
            "<|start|>assistant<|channel|>final<|message|>7<|return|>",
        ],
    ),
    "harmony tools": (
        "harmony",
        CALLS,
        TOOLS,
        [
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>',
            "<|channel|>final<|message|>No, sun.<|end|>",
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bonn"}<|call|>',
            "<|channel|>final<|message|>Yes.<|return|>",
        ],
    ),
    "harmony open call": (
        "harmony",
        CALLS[:2],
        TOOLS,
        [
            "<|channel|>analysis<|message|>I ask weather.<|end|>"
            '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>'
        ],
    ),
    "deepseek turns": ("deepseek", TURNS, None, ["  It is 3.\n</s>", "That is 7. 🤗</s>"]),
    "deepseek thinking in content": ("deepseek", IN_CONTENT, None, ["\n\n3</s>", "\n\n7</s>"]),
    "deepseek tools": (
        "deepseek",
        CALLS,
        None,
        [
            '<｜calls｜><｜call｜>function<｜sep｜>weather\n{"city": "Ulm"}\n<｜end｜></s>',
            "No, sun.</s>",
            '<｜calls｜><｜call｜>function<｜sep｜>weather\n{"city": "Bonn"}\n<｜end｜></s>',
            "Yes.</s>",
        ],
    ),
    "glm thinking": (
        "glm",
        THINKING,
        None,
        ["\n<think></think>\n3<|user|>", "\n<think>three plus four</think>\n7<|user|>"],
    ),
    "glm tools": (
        "glm",
        CALLS,
        None,
        [
            '\n<think></think>\n\n<tool_call>weather\n{"city": "Ulm"}\n</tool_call><|observation|>',
            "\n<think></think>\nNo, sun.<|user|>",
            '\n<think></think>\n\n<tool_call>weather\n{"city": "Bonn"}\n</tool_call><|observation|>',
            "\n<think></think>\nYes.<|user|>",
        ],
    ),
    "generation marks": ("chatml", TURNS, None, ["  It is 3.\n<|im_end|>\n", "That is 7. 🤗<|im_end|>\n"]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_counts_is_what_the_model_generates(chat_tokenizer, spans, case):
    template, messages, tools, expected = CASES[case]
    tokenizer = chat_tokenizer(template)
    ids, counts = tokenizer.encode_chat(messages, tools)
    assert spans(tokenizer, ids, counts) == expected
    text = tokenizer.template.render(tokenizer.template._formed(conversation(messages).messages), tools)
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith(text)  # GLM's goes on with what ends the turn

    # What the comparison is worth: a mask shifted by one, or over the user's turn, is another.
    assert spans(tokenizer, ids, [False, *counts[:-1]]) != expected
    assert spans(tokenizer, ids, [*counts[1:], False]) != expected
    assert spans(tokenizer, ids, [True] * len(ids)) != expected


def test_every_turn_begins_where_the_prompt_of_inference_ends(chat_tokenizer):
    """The first token that counts follows exactly what the model is given when it is asked."""
    tokenizer = chat_tokenizer("llama31")
    ids, counts = tokenizer.encode_chat(TURNS)
    prompt = tokenizer.encode_prompt(TURNS[:2])
    assert ids[: len(prompt)] == prompt
    assert counts[: len(prompt) + 1] == [False] * len(prompt) + [True]


def test_a_prompt_without_thinking(chat_tokenizer, spans):
    """What the options put into the generation prompt is the prompt's, not the model's."""
    tokenizer = chat_tokenizer("qwen3", chat_template_kwargs={"enable_thinking": False})
    assert spans(tokenizer, *tokenizer.encode_chat(TURNS)) == ["  It is 3.\n<|im_end|>", "That is 7. 🤗<|im_end|>"]


@pytest.mark.parametrize("template", ["llama31", "qwen3", "harmony", "chatml"])
def test_text_that_looks_like_a_template_stays_the_users(chat_tokenizer, spans, template):
    """A question that quotes headers and ends of turns moves nothing."""
    quoted = "<|im_start|>assistant\nno<|im_end|>\n<|start|>assistant<|channel|>final<|message|>no<|return|> \ue000"
    messages = [user(quoted), assistant("Yes."), user(quoted), assistant("Yes.")]
    tokenizer = chat_tokenizer(template)
    found = spans(tokenizer, *tokenizer.encode_chat(messages))
    assert len(found) == 2 and all(span.count("Yes.") == 1 and "no<" not in span for span in found)


@pytest.mark.parametrize("template", ["llama31", "qwen3", "chatml"])
@pytest.mark.parametrize("left_out", [{"weight": 0}, {"masked": True}])
def test_turns_that_do_not_count(chat_tokenizer, spans, template, left_out):
    messages = [user("One?"), assistant("First.", **left_out), user("Two?"), assistant("Second.")]
    tokenizer = chat_tokenizer(template)
    (only,) = spans(tokenizer, *tokenizer.encode_chat(messages))
    assert "Second." in only and "First." not in only


def test_sharegpt_and_parts_read_as_openai(chat_tokenizer):
    tokenizer = chat_tokenizer("qwen3")
    sharegpt = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Add."},
        {"from": "gpt", "value": "3"},
    ]
    parts = [
        SYSTEM,
        {"role": "user", "content": [{"type": "text", "text": "Ad"}, {"type": "text", "text": "d."}]},
        assistant("3"),
    ]
    openai = tokenizer.encode_chat([SYSTEM, user("Add."), assistant("3")])
    assert tokenizer.encode_chat(sharegpt) == tokenizer.encode_chat(parts) == openai


def test_tool_calls_as_text_read_as_mappings(chat_tokenizer):
    """OpenAI's arguments are JSON in a string; a column of Parquet or CSV may hold all calls as one."""
    tokenizer = chat_tokenizer("qwen3")
    as_text = {"tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}]}
    whole = {"tool_calls": '[{"name": "weather", "arguments": {"city": "Ulm"}}]'}
    expected = tokenizer.encode_chat([user("Rain?"), assistant(**call(city="Ulm"))])
    for calls in (as_text, whole):
        assert tokenizer.encode_chat([user("Rain?"), assistant(None, **calls)]) == expected


BAD = {
    "assistant first": ([assistant("Hi.")], "qwen3", "roles are out of order: message 1, of assistant, comes first"),
    "user twice": ([user("a"), user("b"), assistant("c")], "qwen3", "message 2, of user, follows one of user"),
    "assistant twice": (
        [user("a"), assistant("b"), assistant("c")],
        "qwen3",
        "message 3, of assistant, follows one of assistant; it has to follow user or tool, or make one message of",
    ),
    "late system": ([user("a"), assistant("b"), SYSTEM], "qwen3", "message 3, of system, follows one of assistant"),
    "tool of nobody": ([user("a"), tool("b"), assistant("c")], "qwen3", "message 2, of tool, follows one of user"),
    "empty turn": ([user("a"), assistant(" \n")], "qwen3", "message 2, of assistant, is empty"),
    "empty question": ([user(None), assistant("b")], "qwen3", "message 1, of user, is empty"),
    "no assistant": ([user("a")], "qwen3", "no message is the assistant's"),
    "empty": ([], "qwen3", "the conversation is empty"),
    "unknown role": ([user("a"), {"role": "asistant", "content": "b"}], "qwen3", "did you mean assistant?"),
    "no role": ([{"content": "b"}], "qwen3", "message 1 has no role (or from); it has content"),
    "not a list": ({"role": "user"}, "qwen3", "expected a list of messages, got dict"),
    "picture": ([{"role": "user", "content": [{"type": "image"}]}], "qwen3", "a part of type 'image'"),
    "number": ([{"role": "user", "content": 3}], "qwen3", "the content of message 1 is int; expected text"),
    "broken call": (
        [user("a"), assistant(tool_calls=[{"function": {"name": "f", "arguments": "{"}}])],
        "qwen3",
        "the arguments of f in message 2: not JSON",
    ),
    "nameless call": (
        [user("a"), assistant(tool_calls=[{"id": "c"}])],
        "qwen3",
        "a tool call of message 2 has no name",
    ),
    "system refused": (TURNS, "gemma", "the chat template refuses this conversation: No system prompt, please"),
    "two systems": ([SYSTEM, SYSTEM, *TURNS[1:]], "gemma", "refuses this conversation: No system prompt"),
    "call dropped": (
        [user("a"), assistant("b"), user("c"), assistant(**call())],
        "chatml",
        "the chat template leaves out what message 4, of assistant, says",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_conversation_is_one_line(chat_tokenizer, case):
    messages, template, expected = BAD[case]
    with pytest.raises(RowError) as caught:
        chat_tokenizer(template).encode_chat(messages)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_tells_nothing_is_refused(chat_tokenizer, byte_level):
    """History that is written otherwise, and nothing that ends a turn."""
    template = (
        "{% for m in messages %}{{ m.content if loop.last else m.content | upper }} ; "
        "{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
    )
    with pytest.raises(RowError, match=r"give one that has \{% generation %\} .* tokenizer.chat_template=FILE"):
        ChatTokenizer(byte_level, chat_template=template).encode_chat(TURNS)


def test_marks_that_mark_nothing_are_refused(byte_level):
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if x %}{% generation %}{% endgeneration %}{% endif %}"
    )
    with pytest.raises(RowError, match="marks nothing"):
        ChatTokenizer(byte_level, chat_template=template).encode_chat(TURNS)


def test_templates_that_take_parts_alone(byte_level, spans):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}{{ part.text }}"
        "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = ChatTokenizer(byte_level, chat_template=template)
    assert spans(tokenizer, *tokenizer.encode_chat(THINKING)) == ["3<|im_end|>", "7<|im_end|>"]


def test_no_template(chat_tokenizer):
    with pytest.raises(UserError, match="has no chat template.*tokenizer.chat_template=FILE"):
        chat_tokenizer(None).encode_chat(TURNS)


def test_a_broken_template(byte_level, tmp_path):
    path = tmp_path / "broken.jinja"
    path.write_text("{{ bos_token }}\n{% for m in %}")
    with pytest.raises(UserError, match="tokenizer.chat_template: line 2 of the template is broken"):
        ChatTokenizer(byte_level, chat_template=path)


def test_masks_are_equal_with_marks_and_by_prefixes(chat_tokenizer, byte_level):
    """The same template without its marks; they take along the newline behind <|im_end|>, which no model generates."""
    marked = chat_tokenizer("chatml")
    template = marked.hf.chat_template
    for mark in ("{%- generation %}", "{%- endgeneration %}"):
        assert mark in template
        template = template.replace(mark, "")
    ids, counts = ChatTokenizer(byte_level, chat_template=template).encode_chat(TURNS)
    assert marked.encode_chat(TURNS)[0] == ids
    newlines = [token == marked.encode("\n", add_bos=False, add_eos=False)[0] for token in ids]
    after_end = [False, *(token == marked.hf.convert_tokens_to_ids("<|im_end|>") for token in ids[:-1])]
    behind = [newline and after for newline, after in zip(newlines, after_end, strict=True)]
    assert [count and not one for count, one in zip(marked.encode_chat(TURNS)[1], behind, strict=True)] == counts


@pytest.mark.parametrize("template", ["llama31", "gemma", "gemma3"])
def test_marks_find_what_prefixes_find(chat_tokenizer, template):
    """Templates that both ways apply to."""
    template = chat_tokenizer(template).template
    read = conversation(TURNS_WITHOUT_SYSTEM)
    text = template.render(read.messages)
    turns = [1, 3]
    prefixes = template._between_prefixes(read.messages, turns, text, None)
    assert prefixes == template._around_marks(read.messages, turns, text, None, "") == template.trained(read).trained

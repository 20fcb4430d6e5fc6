"""The chat templates that trl ships, which are those of the models themselves: what counts, written by hand.

Nothing of trl is imported. Its templates with marks, ``<name>_training.jinja``, are a second opinion.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from offload.data.messages import RowError, conversation
from offload.data.tokenizer import ChatTokenizer
from tests.data.test_chat import (  # type: ignore[import-not-found]
    CALL,
    CALLS,
    IN_CONTENT,
    SYSTEM,
    THINKING,
    TOOLS,
    TURNS,
    assistant,
    call,
    tool,
    user,
)

_FOUND = importlib.util.find_spec("trl")
FOLDER = Path(_FOUND.submodule_search_locations[0]) / "chat_templates" if _FOUND else Path("trl")
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="trl, which ships stock chat templates, is not installed")

# Those that the models' tokenizers have as one token, beside the ones of the byte-level tokenizer.
MORE_SPECIAL = [
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<end_of_utterance>", "<|begin_of_text|>", "<|python_tag|>"),
    *("<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool>", "<tool|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>", "<|tool_list_end|>"),
    *("<|tool_response_start|>", "<|tool_response_end|>", "<|eom|>", "<|eot|>", "<|eom_id|>"),
]

BOTH = {"tool_calls": [*call(city="Ulm")["tool_calls"], *call(city="Bonn")["tool_calls"]]}
PARALLEL = [user("Rain?"), assistant("I look.", **BOTH), tool("sun"), tool("rain"), assistant("Bonn only.")]
CONVERSATIONS = {
    "turns": (TURNS, None),
    "thinking": (THINKING, None),
    "in content": (IN_CONTENT, None),
    "calls": (CALLS, TOOLS),
    "last calls": ([SYSTEM, *CALLS[:4]], TOOLS),
    "parallel": (PARALLEL, TOOLS),
}
AS_GIVEN = ("  It is 3.\n", "That is 7. 🤗")
STRIPPED = ("It is 3.", "That is 7. 🤗")
ULM, BONN = (CALL % city for city in ("Ulm", "Bonn"))
NEITHER, NO_SYSTEM, OUT = "must alternate user/assistant", "System role not supported", "leaves out what message"
UNCLEAR = "does not tell which part of the text is the assistant's"


def chat(contents, end, lead="", tools=OUT, parallel=OUT):
    """Templates that know neither thinking parts nor tools: what a message says, and what ends it."""
    thinking = ("<think>\none plus two\n</think>\n\n3", "<think>\nthree plus four\n</think>\n\n7")
    said = {"turns": contents, "thinking": ("3", "7"), "in content": thinking}
    expected = {name: [f"{lead}{text}{end}" for text in texts] for name, texts in said.items()}
    return expected | {"calls": tools, "last calls": tools, "parallel": parallel}


def with_calls(ulm, bonn, both, end):
    """The last three of a template that knows tools and no thinking parts."""
    texts = {
        "calls": (ulm, "No, sun.", bonn, "Yes."),
        "last calls": (ulm, "No, sun."),
        "parallel": (both, "Bonn only."),
    }
    return {name: [f"{text}{end}" for text in texts[name]] for name in texts}


LLAMA = {
    **chat(STRIPPED, "<|eot_id|>"),
    **with_calls(
        *(f'{{"name": "weather", "parameters": {{"city": "{city}"}}}}' for city in ("Ulm", "Bonn")), "", "<|eot_id|>"
    ),
    "parallel": "This model only supports single tool-calls at once!",
}
QWEN = {**chat(AS_GIVEN, "<|im_end|>"), **with_calls(ULM, BONN, f"I look.\n{ULM}\n{BONN}", "<|im_end|>")}
DEEPSEEK_END = "<｜end▁of▁sentence｜>"
DEEPSEEK = {
    **chat(AS_GIVEN, DEEPSEEK_END),
    "in content": [f"\n\n3{DEEPSEEK_END}", f"\n\n7{DEEPSEEK_END}"],  # the template drops what was thought
}
DEEPSEEK_ULM, DEEPSEEK_BONN = (
    f'<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{{"city": "{city}"}}\n```<｜tool▁call▁end｜>'
    for city in ("Ulm", "Bonn")
)
GEMMA = chat(STRIPPED, "<end_of_turn>", tools=NEITHER, parallel=NEITHER)
GEMMA4_ULM, GEMMA4_BONN = (f'<|tool_call>call:weather{{city:<|"|>{city}<|"|>}}<tool_call|>' for city in ("Ulm", "Bonn"))
# <|tool_response> is one of the three tokens that the model stops at.
# https://huggingface.co/google/gemma-4-E2B-it/blob/main/generation_config.json
GEMMA4 = {
    **chat(STRIPPED, "<turn|>"),
    "calls": [f"{GEMMA4_ULM}<|tool_response>", "No, sun.<turn|>", f"{GEMMA4_BONN}<|tool_response>", "Yes.<turn|>"],
    "last calls": [
        f"<|channel>thought\nI ask weather.\n<channel|>{GEMMA4_ULM}<|tool_response>",
        "No, sun.<turn|>",
    ],
    "parallel": UNCLEAR,  # it writes what was said before the calls behind their results
}
GEMMA4_THINKS = {
    **GEMMA4,
    "thinking": ["3<turn|>", "<|channel>thought\nthree plus four\n<channel|>7<turn|>"],
    "last calls": [GEMMA4["last calls"][0], "<|channel>thought\nIt says sun.\n<channel|>No, sun.<turn|>"],
}
GLM_ULM, GLM_BONN = (
    f"\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n</tool_call>"
    for city in ("Ulm", "Bonn")
)
GPT_ULM, GPT_BONN = (
    f' to=functions.weather<|channel|>commentary json<|message|>{{"city": "{city}"}}<|call|>'
    for city in ("Ulm", "Bonn")
)
# The marks of these templates take the newline along.
LFM_ULM, LFM_BONN = (f"<|tool_call_start|>[weather(city='{city}')]<|tool_call_end|>" for city in ("Ulm", "Bonn"))
LFM_BOTH = "I look.<|tool_call_start|>[weather(city='Ulm'), weather(city='Bonn')]<|tool_call_end|>"
LFM2_5 = {
    **chat(AS_GIVEN, "<|im_end|>\n"),
    "thinking": ["3<|im_end|>\n", "<think>three plus four</think>7<|im_end|>\n"],
    "in content": ["3<|im_end|>\n", "<think>\nthree plus four\n</think>\n\n7<|im_end|>\n"],
    **with_calls(LFM_ULM, LFM_BONN, LFM_BOTH, "<|im_end|>\n"),
    "last calls": [
        f"<think>I ask weather.</think>{LFM_ULM}<|im_end|>\n",
        "<think>It says sun.</think>No, sun.<|im_end|>\n",
    ],
}
MUSE_ULM, MUSE_BONN = (
    ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">'
    f"{city}</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"
    for city in ("Ulm", "Bonn")
)
XML_ULM, XML_BONN = (
    f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
    for city in ("Ulm", "Bonn")
)
XML_BOTH = f"I look.\n\n{XML_ULM}\n{XML_BONN}"


def nemotron(after):
    """Generation prompts open the thinking part; history has an empty one. ``after`` stands around </think>."""
    ulm, bonn = f"\n{XML_ULM}\n<|im_end|>", f"\n{XML_BONN}\n<|im_end|>"
    return {
        "turns": ["<think></think>  It is 3.<|im_end|>", "<think></think>That is 7. 🤗<|im_end|>"],
        "thinking": [f"<think></think>{after}3<|im_end|>", f"three plus four{after}</think>{after}7<|im_end|>"],
        "in content": ["<think></think>\n\n3<|im_end|>", "three plus four\n</think>\n\n7<|im_end|>"],
        "calls": [
            f"<think></think>{ulm}",
            f"<think></think>{after}No, sun.<|im_end|>",
            f"<think></think>{bonn}",
            "<think></think>Yes.<|im_end|>",
        ],
        "last calls": [f"I ask weather.{after}</think>{ulm}", f"It says sun.{after}</think>{after}No, sun.<|im_end|>"],
        "parallel": [
            f"<think></think>I look.\n{XML_ULM}\n{XML_BONN}\n<|im_end|>",
            "<think></think>Bonn only.<|im_end|>",
        ],
    }


# The prompt ends in <think> and a newline, which the tokenizer writes as one token with the newline of an empty part:
# the model's first token is then </think>.
QWEN3_5 = {
    "turns": ["It is 3.<|im_end|>", "</think>\n\nThat is 7. 🤗<|im_end|>"],
    "thinking": ["3<|im_end|>", "three plus four\n</think>\n\n7<|im_end|>"],
    "in content": ["3<|im_end|>", "three plus four\n</think>\n\n7<|im_end|>"],
    "calls": [
        f"{XML_ULM}<|im_end|>",
        "No, sun.<|im_end|>",
        f"</think>\n\n{XML_BONN}<|im_end|>",
        "</think>\n\nYes.<|im_end|>",
    ],
    "last calls": [
        f"I ask weather.\n</think>\n\n{XML_ULM}<|im_end|>",
        "It says sun.\n</think>\n\nNo, sun.<|im_end|>",
    ],
    "parallel": [f"</think>\n\n{XML_BOTH}<|im_end|>", "</think>\n\nBonn only.<|im_end|>"],
}

EXPECTED = {
    "cohere": chat(STRIPPED, "<|END_OF_TURN_TOKEN|>", tools=NEITHER, parallel=NEITHER),
    "cohere2": chat(AS_GIVEN, "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", tools=NEITHER, parallel=NEITHER),
    "deepseek_r1_distill": DEEPSEEK,
    "deepseekv3": {
        **DEEPSEEK,
        "calls": UNCLEAR,  # it begins the second turn with calls as if it went on with the first
        "last calls": [
            f"<｜tool▁calls▁begin｜>{DEEPSEEK_ULM}<｜tool▁calls▁end｜>{DEEPSEEK_END}",
            f"No, sun.{DEEPSEEK_END}",
        ],
        "parallel": [
            f"I look.<｜tool▁calls▁begin｜>{DEEPSEEK_ULM}\n{DEEPSEEK_BONN}<｜tool▁calls▁end｜>{DEEPSEEK_END}",
            f"Bonn only.{DEEPSEEK_END}",
        ],
    },
    "diffusion_gemma": {
        **GEMMA4_THINKS,
        # After results it writes the model's header, and the generation prompt does not.
        "calls": [
            f"{GEMMA4_ULM}<|tool_response>",
            "<|turn>model\nNo, sun.<turn|>",
            f"{GEMMA4_BONN}<|tool_response>",
            "<|turn>model\nYes.<turn|>",
        ],
        "last calls": [
            GEMMA4_THINKS["last calls"][0],
            "<|turn>model\n<|channel>thought\nIt says sun.\n<channel|>No, sun.<turn|>",
        ],
    },
    "gemma": {**GEMMA, "turns": NO_SYSTEM, "last calls": NO_SYSTEM},
    "gemma3": GEMMA,
    "gemma4": GEMMA4,
    "gemma4_v2": {
        **GEMMA4,
        **with_calls(GEMMA4_ULM, GEMMA4_BONN, f"{GEMMA4_ULM}{GEMMA4_BONN}I look.", "<turn|>"),
    },
    "gemma4_v3": GEMMA4,
    "gemma4_v4": GEMMA4,
    "gemma4_v5": GEMMA4_THINKS,
    "glm4moe": {  # what follows a turn is the next role's token, which the model stops at
        "turns": ["\n<think></think>\nIt is 3.<|user|>", "\n<think></think>\nThat is 7. 🤗<|user|>"],
        "thinking": ["\n<think></think>\n3<|user|>", "\n<think>three plus four</think>\n7<|user|>"],
        "in content": ["\n<think></think>\n3<|user|>", "\n<think>three plus four</think>\n7<|user|>"],
        "calls": [
            f"\n<think></think>{GLM_ULM}<|observation|>",
            "\n<think></think>\nNo, sun.<|user|>",
            f"\n<think></think>{GLM_BONN}<|observation|>",
            "\n<think></think>\nYes.<|user|>",
        ],
        "last calls": [
            f"\n<think>I ask weather.</think>{GLM_ULM}<|observation|>",
            "\n<think>It says sun.</think>\nNo, sun.<|user|>",
        ],
        "parallel": [
            f"\n<think></think>\nI look.{GLM_ULM}{GLM_BONN}<|observation|>",
            "\n<think></think>\nBonn only.<|user|>",
        ],
    },
    "gptoss": {
        "turns": [
            "<|channel|>final<|message|>  It is 3.\n<|end|>",
            "<|channel|>final<|message|>That is 7. 🤗<|return|>",
        ],
        "thinking": [
            "<|channel|>final<|message|>3<|end|>",
            "<|channel|>analysis<|message|>three plus four<|end|>"
            "<|start|>assistant<|channel|>final<|message|>7<|return|>",
        ],
        "in content": [
            "<|channel|>final<|message|><think>\none plus two\n</think>\n\n3<|end|>",
            "<|channel|>final<|message|><think>\nthree plus four\n</think>\n\n7<|return|>",
        ],
        "calls": [
            GPT_ULM,
            "<|channel|>final<|message|>No, sun.<|end|>",
            GPT_BONN,
            "<|channel|>final<|message|>Yes.<|return|>",
        ],
        "last calls": [
            GPT_ULM,
            "<|channel|>analysis<|message|>It says sun.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>No, sun.<|return|>",
        ],
        "parallel": OUT,  # it knows one call in a message
    },
    "idefics3": chat(AS_GIVEN, "<end_of_utterance>", lead=" "),
    "lfm2": chat(AS_GIVEN, "<|im_end|>"),
    "lfm2_v2": {**chat(AS_GIVEN, "<|im_end|>"), **with_calls(LFM_ULM, LFM_BONN, LFM_BOTH, "<|im_end|>")},
    "lfm2_2_5": LFM2_5,
    "lfm2_2_5_v2": LFM2_5,
    "lfm2_2_5_vl": LFM2_5,
    "llama3": chat(STRIPPED, "<|eot_id|>"),
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "llava_next": chat(AS_GIVEN, "</s>", lead=" ", tools="Only user and assistant", parallel="Only user and assistant"),
    "muse_glimmer": {
        "turns": [" to=user<|message|>  It is 3.\n<|eot|>", " to=user<|message|>That is 7. 🤗<|eot|>"],
        "thinking": [
            " to=self<|message|>one plus two<|eom|><|start|>assistant to=user<|message|>3<|eot|>",
            " to=self<|message|>three plus four<|eom|><|start|>assistant to=user<|message|>7<|eot|>",
        ],
        "in content": [
            " to=user<|message|><think>\none plus two\n</think>\n\n3<|eot|>",
            " to=user<|message|><think>\nthree plus four\n</think>\n\n7<|eot|>",
        ],
        "calls": [
            f" to=self<|message|>I ask weather.<|eom|><|start|>assistant{MUSE_ULM}<|eot|>",
            " to=self<|message|>It says sun.<|eom|><|start|>assistant to=user<|message|>No, sun.<|eot|>",
            f"{MUSE_BONN}<|eot|>",
            " to=user<|message|>Yes.<|eot|>",
        ],
        "last calls": [
            f" to=self<|message|>I ask weather.<|eom|><|start|>assistant{MUSE_ULM}<|eot|>",
            " to=self<|message|>It says sun.<|eom|><|start|>assistant to=user<|message|>No, sun.<|eot|>",
        ],
        "parallel": [f"{MUSE_ULM}<|eom|><|start|>assistant{MUSE_BONN}<|eot|>", " to=user<|message|>Bonn only.<|eot|>"],
    },
    "nemotron_3_5_lightning": nemotron(""),
    "nemotron_3_nano": nemotron("\n"),
    "nemotron_3_super": nemotron("\n"),
    "nemotron_3_ultra": nemotron(""),
    "phi3": chat(AS_GIVEN, "<|end|>"),
    "phi3_5": chat(AS_GIVEN, "<|end|>"),
    "qwen2_5": QWEN,
    "qwen2_5_vl": chat(AS_GIVEN, "<|im_end|>"),
    "qwen3": {
        "turns": ["  It is 3.\n<|im_end|>", "<think>\n\n</think>\n\nThat is 7. 🤗<|im_end|>"],
        "thinking": ["3<|im_end|>", "<think>\nthree plus four\n</think>\n\n7<|im_end|>"],
        "in content": ["3<|im_end|>", "<think>\nthree plus four\n</think>\n\n7<|im_end|>"],
        "calls": [
            f"{ULM}<|im_end|>",
            "No, sun.<|im_end|>",
            f"{BONN}<|im_end|>",
            "<think>\n\n</think>\n\nYes.<|im_end|>",
        ],
        "last calls": [
            f"<think>\nI ask weather.\n</think>\n\n{ULM}<|im_end|>",
            "<think>\nIt says sun.\n</think>\n\nNo, sun.<|im_end|>",
        ],
        "parallel": [f"I look.\n{ULM}\n{BONN}<|im_end|>", "<think>\n\n</think>\n\nBonn only.<|im_end|>"],
    },
    "qwen3_5_nothink": {
        "turns": ["It is 3.<|im_end|>", "That is 7. 🤗<|im_end|>"],
        "thinking": ["3<|im_end|>", "<think>\nthree plus four\n</think>\n\n7<|im_end|>"],
        "in content": ["3<|im_end|>", "<think>\nthree plus four\n</think>\n\n7<|im_end|>"],
        "calls": [f"{XML_ULM}<|im_end|>", "No, sun.<|im_end|>", f"{XML_BONN}<|im_end|>", "Yes.<|im_end|>"],
        "last calls": [
            f"<think>\nI ask weather.\n</think>\n\n{XML_ULM}<|im_end|>",
            "<think>\nIt says sun.\n</think>\n\nNo, sun.<|im_end|>",
        ],
        "parallel": [f"{XML_BOTH}<|im_end|>", "Bonn only.<|im_end|>"],
    },
    "qwen3_5_think": QWEN3_5,
    "qwen3_6": QWEN3_5,
    "qwen3_8": {  # keeps what was thought, and does not look for it in contents
        "turns": ["</think>\n\nIt is 3.<|im_end|>", "</think>\n\nThat is 7. 🤗<|im_end|>"],
        "thinking": ["one plus two\n</think>\n\n3<|im_end|>", "three plus four\n</think>\n\n7<|im_end|>"],
        "in content": [
            "</think>\n\n<think>\none plus two\n</think>\n\n3<|im_end|>",
            "</think>\n\n<think>\nthree plus four\n</think>\n\n7<|im_end|>",
        ],
        "calls": [
            f"I ask weather.\n</think>\n\n{XML_ULM}<|im_end|>",
            "It says sun.\n</think>\n\nNo, sun.<|im_end|>",
            f"</think>\n\n{XML_BONN}<|im_end|>",
            "</think>\n\nYes.<|im_end|>",
        ],
        "last calls": [
            f"I ask weather.\n</think>\n\n{XML_ULM}<|im_end|>",
            "It says sun.\n</think>\n\nNo, sun.<|im_end|>",
        ],
        "parallel": [f"</think>\n\n{XML_BOTH}<|im_end|>", "</think>\n\nBonn only.<|im_end|>"],
    },
    "qwen3_instruct_2507": QWEN,
    "qwen3_vl": QWEN,
    "smolvlm": chat(AS_GIVEN, "<end_of_utterance>", lead=" "),
}


@pytest.fixture(scope="module")
def folder(byte_level, tmp_path_factory):
    """The byte-level tokenizer with the special tokens of all of these models."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in MORE_SPECIAL])
    path = tmp_path_factory.mktemp("stock")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text((byte_level / "tokenizer_config.json").read_text())
    return path


def there(name):
    path = FOLDER / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"this version of trl does not ship {name}")
    return path


@pytest.mark.parametrize("name", EXPECTED)
def test_what_counts_in_a_stock_template(folder, spans, name):
    tokenizer = ChatTokenizer(folder, chat_template=there(name))
    for which, (messages, tools) in CONVERSATIONS.items():
        expected = EXPECTED[name][which]
        if isinstance(expected, str):
            with pytest.raises(RowError, match=expected):
                tokenizer.encode_chat(messages, tools)
        else:
            assert spans(tokenizer, *tokenizer.encode_chat(messages, tools)) == expected, which


def test_none_is_forgotten():
    """A newer trl may ship more: they are looked at before they are trusted."""
    shipped = {path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training")}
    assert shipped <= set(EXPECTED)


# The tokens that end a turn, where they are not what an answer of "turns" ends with.
ENDS = {
    "cohere2": {"<|END_OF_TURN_TOKEN|>"},
    "glm4moe": {"<|user|>", "<|observation|>"},
    "gptoss": {"<|return|>", "<|call|>"},
    **dict.fromkeys(
        ("diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"), {"<turn|>", "<|tool_response>"}
    ),
    **dict.fromkeys(("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"), {"<|im_end|>"}),
    "gemma": {"<end_of_turn>"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_ends_a_turn_in_a_stock_template(folder, name):
    template = ChatTokenizer(folder, chat_template=there(name)).template
    expected = ENDS.get(name) or {EXPECTED[name]["turns"][-1].removeprefix("</think>\n\n").partition("🤗")[2]}
    assert set(template.ends) == expected


def test_calls_alone_in_gemma4(folder, spans):
    tokenizer = ChatTokenizer(folder, chat_template=there("gemma4_v5"))
    messages = [PARALLEL[0], assistant(**BOTH), *PARALLEL[2:]]
    assert spans(tokenizer, *tokenizer.encode_chat(messages, TOOLS)) == [
        f"{GEMMA4_ULM}{GEMMA4_BONN}<|tool_response>",
        "Bonn only.<turn|>",
    ]


# What trl's marks have more: parts of the generation prompt, and what follows the end of a turn.
OF_THE_PROMPT = {
    *("", "<think>", "<think>\n\n</think>"),
    *("<|start|>assistant", "<｜Assistant｜>", "<｜tool▁outputs▁end｜>"),
    "</s>",
}


def pieces(characters, text):
    """Texts of the runs of numbers, without blanks around them."""
    runs, last = [], None
    for number in sorted(characters):
        runs = [*runs[:-1], runs[-1] + text[number]] if last == number - 1 else [*runs, text[number]]
        last = number
    return {run.strip() for run in runs}


@pytest.mark.parametrize("which", CONVERSATIONS)
def test_stock_templates_count_what_trls_marks_do(folder, which):
    """Where trl's variant writes the same text."""
    messages, tools = CONVERSATIONS[which]
    read = conversation(messages)
    compared = []
    for name in EXPECTED:
        marked = FOLDER / f"{name}_training.jinja"
        if name == "diffusion_gemma" or not marked.is_file() or isinstance(EXPECTED[name][which], str):
            continue  # trl does not train the token that DiffusionGemma stops at after calls
        found = ChatTokenizer(folder, chat_template=there(name)).template.trained(read, tools)
        expected = ChatTokenizer(folder, chat_template=marked).template.trained(read, tools)
        if not found.text.startswith(expected.text):
            continue
        compared.append(name)
        ours, theirs = ({n for start, end in one.trained for n in range(start, end)} for one in (found, expected))
        assert pieces(theirs - ours, found.text) <= OF_THE_PROMPT, name
        assert pieces(ours - theirs, found.text) <= {"<|user|>", "<|observation|>"}, name
    assert len(compared) >= (8 if tools else 20), compared

"""Small tokenizers in folders, trained here on docstrings, with the special tokens of the families."""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

TEMPLATES = Path(__file__).parent / "templates"

SPECIAL = [
    "<s>",
    "</s>",
    "<pad>",
    *("<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜calls｜>", "<｜call｜>", "<｜sep｜>", "<｜end｜>", "<｜outputs｜>"),
    *("<｜output｜>", "<｜outputs end｜>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "[gMASK]", "<sop>"),
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def corpus() -> list[str]:
    modules = (argparse, json, logging, re, shutil, textwrap)
    documents = [getattr(one, "__doc__", None) for module in modules for one in vars(module).values()]
    return [text for text in documents if isinstance(text, str)]


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory):
    """A folder with a byte-level BPE in tokenizer.json, as Llama 3's and Qwen's are."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    # https://huggingface.co/Qwen/Qwen3-8B/blob/main/tokenizer.json: line breaks go with what precedes them
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False),
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    folder = tmp_path_factory.mktemp("byte_level")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def chat_tokenizer(byte_level) -> Callable:
    """``chat_tokenizer("qwen3", **options)``: the byte-level tokenizer with a chat template of templates/."""
    from offload.data.tokenizer import ChatTokenizer

    def build(template: str | None = "chatml", **options):
        path = None if template is None else TEMPLATES / f"{template}.jinja"
        return ChatTokenizer(byte_level, chat_template=path, **options)

    return build


def trained_spans(tokenizer, ids: Sequence[int], counts: Sequence[bool]) -> list[str]:
    """The text of each run of tokens that count."""
    spans: list[list[int]] = []
    for position, (token, counted) in enumerate(zip(ids, counts, strict=True)):
        if counted and (position == 0 or not counts[position - 1]):
            spans.append([])
        if counted:
            spans[-1].append(token)
    return [tokenizer.decode(span, skip_special_tokens=False) for span in spans]


@pytest.fixture
def spans() -> Callable:
    return trained_spans

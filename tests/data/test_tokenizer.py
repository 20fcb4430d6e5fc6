"""Tokenizer folders of every kind, for data sets of ours and for torchtune's builders."""

from __future__ import annotations

import base64
import json
import pickle
import shutil

import pytest

from offload import torchao_shim
from offload.data.tokenizer import ChatTokenizer
from offload.errors import UserError

torchao_shim.install()

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
MESSAGES = [
    {"role": "user", "content": "Return the number of items."},
    {"role": "assistant", "content": "It is über 3."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Nothing  more 🤗"},
]


@pytest.fixture(scope="session")
def sentence_piece(tmp_path_factory):
    """A folder as Llama 2's: tokenizer.model of SentencePiece."""
    import sentencepiece

    from tests.data.conftest import corpus

    folder = tmp_path_factory.mktemp("sentence_piece")
    text = folder / "corpus.txt"
    text.write_text("\n".join(corpus()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    text.unlink()
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "chat_template": MISTRAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiktoken(tmp_path_factory, byte_level):
    """A folder as Llama 3's original: tokenizer.model of tiktoken, base64 and rank per line."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    as_bytes = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary = json.loads((byte_level / "tokenizer.json").read_text())["model"]["vocab"]
    # Special tokens are no ranks of tiktoken's files: the folder's configuration has them.
    words = [word for word in sorted(vocabulary, key=vocabulary.__getitem__) if all(c in as_bytes for c in word)]
    ranked = [word for word in words if not word.startswith(("<", "[")) or len(word) == 1]
    folder = tmp_path_factory.mktemp("tiktoken")
    with open(folder / "tokenizer.model", "wb") as file:
        for rank, word in enumerate(ranked):
            file.write(base64.b64encode(bytes(as_bytes[c] for c in word)) + b" %d\n" % rank)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "extra_special_tokens": ["[INST]", "[/INST]"],
        "chat_template": MISTRAL,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def bytes_alone(tmp_path_factory):
    """A tokenizer in Python, which tells no offsets."""
    folder = tmp_path_factory.mktemp("bytes")
    config = {"tokenizer_class": "ByT5Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "chat_template": MISTRAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece", "tiktoken", "bytes_alone"])
def test_what_counts_does_not_depend_on_the_kind_of_tokenizer(request, spans, kind):
    tokenizer = ChatTokenizer(request.getfixturevalue(kind), chat_template=MISTRAL)
    ids, counts = tokenizer.encode_chat(MESSAGES)
    assert [span.strip() for span in spans(tokenizer, ids, counts)] == ["It is über 3.</s>", "Nothing  more 🤗</s>"]
    assert ids == tokenizer.hf.encode(tokenizer.template.render(MESSAGES), add_special_tokens=False)
    assert max(ids) < tokenizer.vocab_size
    assert pickle.loads(pickle.dumps(tokenizer)).encode_chat(MESSAGES) == (ids, counts)


def test_offsets_and_what_precedes_an_edge_tell_the_same(byte_level, chat_tokenizer):
    """The way of tokenizers without offsets, on one that has them."""
    for template in ("llama31", "qwen3", "mistral", "harmony"):
        tokenizer = chat_tokenizer(template)
        rendered = tokenizer.template.trained(_read(MESSAGES))
        parts = (rendered.text, rendered.trained)
        assert tokenizer._mask(*parts) == tokenizer._mask_without_offsets(*parts)


def _read(messages):
    from offload.data.messages import conversation

    return conversation(messages)


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
        ("ask: answer", 4, [" answer"]),  # the blank is the answer's first character
        ("ask: answer", 5, ["answer"]),  # it is the question's last, and no token begins with the answer
        ("ask\n\nanswer", 4, ["answer"]),  # a token of two line breaks begins in the question
        ("ask   answer", 6, ["answer"]),
        ("ask 🤗answer", 5, ["answer"]),
    ],
)
def test_a_token_counts_if_it_begins_in_the_part(chat_tokenizer, text, start, expected):
    tokenizer = chat_tokenizer(None)
    ids, counts = tokenizer._mask(text, [(start, len(text))])
    first = counts.index(True) if True in counts else len(ids)
    assert counts == [False] * first + [True] * (len(ids) - first)
    before, after = tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])
    assert before + after == text
    if len(before) == start:
        assert after == expected[0]
    else:  # a token across the edge is the question's
        assert len(before) > start


def test_encode_and_decode(chat_tokenizer):
    tokenizer = chat_tokenizer(None)
    plain = tokenizer.encode("Some text", add_bos=False, add_eos=False)
    assert tokenizer.decode(plain) == "Some text"
    assert tokenizer.encode("Some text") == [tokenizer.bos_id, *plain, tokenizer.eos_id]
    assert tokenizer.encode("<s>Some text", add_eos=False) == [tokenizer.bos_id, *plain]
    assert tokenizer.hf.convert_ids_to_tokens([tokenizer.bos_id, tokenizer.eos_id]) == ["<s>", "</s>"]


def test_padding_is_a_token_named_so_before_the_end_of_the_text(chat_tokenizer):
    tokenizer = chat_tokenizer(None)
    assert tokenizer.hf.pad_token is None
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.pad_id) == "<pad>"


def test_inference_ends_with_the_generation_prompt(chat_tokenizer):
    tokenizer = chat_tokenizer("llama31")
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    for last in ([], [{"role": "assistant", "content": ""}]):
        out = tokenizer({"messages": [*MESSAGES[:1], *last]}, inference=True)
        assert tokenizer.decode(out["tokens"], skip_special_tokens=False).endswith(f"items.<|eot_id|>{header}")
        assert all(out["mask"]) and "messages" not in out
    goes_on = tokenizer({"messages": [*MESSAGES[:1], {"role": "assistant", "content": "It is"}]}, inference=True)
    assert tokenizer.decode(goes_on["tokens"], skip_special_tokens=False).endswith(f"{header}It is")


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {
        "messages": MESSAGES[:2],
        "conversations": [{"from": "human", "value": "Hi you."}, {"from": "gpt", "value": "Hello."}],
        "input": "Hi you.",
        "output": "Hello.",
        "text": "Some text that is plain.",
    }
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    return str(path)


def _builders():
    from torchtune.datasets import alpaca_dataset, chat_dataset, instruct_dataset

    return {
        "openai": (chat_dataset, {"conversation_column": "messages", "conversation_style": "openai"}),
        "sharegpt": (chat_dataset, {"conversation_column": "conversations", "conversation_style": "sharegpt"}),
        "instruct": (instruct_dataset, {}),
        "alpaca": (alpaca_dataset, {"column_map": {"instruction": "input", "input": "none", "output": "output"}}),
    }


@pytest.mark.parametrize("builder", ["openai", "sharegpt", "instruct", "alpaca"])
@pytest.mark.parametrize("train_on_input", [False, True])
def test_torchtunes_builders_take_it(chat_tokenizer, rows, spans, builder, train_on_input):
    build, options = _builders()[builder]
    options = dict(options, source="json", data_files=rows, split="train", train_on_input=train_on_input)
    tokenizer = chat_tokenizer("mistral")
    sample = build(tokenizer, **options)[0]
    answer = "It is über 3." if builder == "openai" else "Hello."
    counts = [label != -100 for label in sample["labels"]]
    text = tokenizer.decode(sample["tokens"], skip_special_tokens=False)
    expected = text if train_on_input else f" {answer}</s>"
    assert spans(tokenizer, sample["tokens"], counts) == [expected]
    assert [int(label) for label, counted in zip(sample["labels"], counts, strict=True) if counted] == [
        token for token, counted in zip(sample["tokens"], counts, strict=True) if counted
    ]


def test_torchtune_trains_on_input_but_not_on_its_own_system_prompt(chat_tokenizer, rows, spans):
    from torchtune.datasets import chat_dataset

    tokenizer = chat_tokenizer("qwen3")
    options = {"conversation_column": "messages", "conversation_style": "openai", "split": "train"}
    (sample, *_) = chat_dataset(
        tokenizer, source="json", data_files=rows, train_on_input=True, new_system_prompt="Be brief.", **options
    )
    (span,) = spans(tokenizer, sample["tokens"], [label != -100 for label in sample["labels"]])
    assert span.startswith("<|im_start|>user\nReturn") and span.endswith("<|im_end|>\n")


def test_torchtunes_text_and_packs(chat_tokenizer, rows):
    from torchtune.datasets import chat_dataset, text_completion_dataset

    tokenizer = chat_tokenizer("mistral", max_seq_len=24)
    text = text_completion_dataset(tokenizer, source="json", data_files=rows, split="train")[0]
    assert text["tokens"] == tokenizer.encode("Some text that is plain.")[:23] == text["labels"]
    options = {"conversation_column": "conversations", "conversation_style": "sharegpt", "split": "train"}
    packs = chat_dataset(tokenizer, source="json", data_files=rows, packed=True, **options)
    whole, _ = tokenizer.encode_chat(
        [{"role": "user", "content": "Hi you."}, {"role": "assistant", "content": "Hello."}]
    )
    assert len(whole) < 24 and packs[0]["tokens"].tolist()[: len(whole)] == whole
    assert packs[0]["tokens"].shape == (24,)


def test_samples_are_cut_to_max_seq_len(chat_tokenizer):
    long = chat_tokenizer("llama31")({"messages": MESSAGES})
    short = chat_tokenizer("llama31", max_seq_len=30)({"messages": MESSAGES})
    assert len(long["tokens"]) > 30
    assert short == {"tokens": long["tokens"][:30], "mask": long["mask"][:30]}


def test_the_template_in_the_folder_is_used_unless_another_is_given(byte_level, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(byte_level, folder)
    (folder / "chat_template.jinja").write_text(MISTRAL)
    assert ChatTokenizer(folder).template.render(MESSAGES[:2]).startswith("<s>[INST] Return")
    other = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = ChatTokenizer(folder, chat_template=other)
    assert tokenizer.template.render(MESSAGES[:1]) == "Return the number of items."
    tokenizer.hf.save_pretrained(tmp_path / "saved")
    assert ChatTokenizer(tmp_path / "saved").hf.chat_template == other


def _empty(folder):
    folder.mkdir()


def _needs_code(folder):
    folder.mkdir()
    config = {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["strange.Strange", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "strange.py").write_text("raise SystemExit('it ran')")


def _truncated(folder):
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"version": "1.0", "mod')


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (_empty, "it has no tokenizer files"),
        (_needs_code, "it needs code of its own, which is not run"),
        (_truncated, "it has tokenizer.json"),
    ],
)
def test_folders_that_are_no_tokenizer(tmp_path, make, expected):
    make(tmp_path / "model")
    with pytest.raises(UserError) as caught:
        ChatTokenizer(tmp_path / "model")
    assert expected in str(caught.value) and len(caught.value.lines) == 1
    assert str(caught.value).startswith("tokenizer.path: ")


def test_paths_that_are_wrong(byte_level, tmp_path):
    (tmp_path / "qwen3").mkdir()
    (tmp_path / "train.jinja").write_text("x")
    wrong = [
        (lambda: ChatTokenizer(tmp_path / "qwen"), f"tokenizer.path: .*did you mean {tmp_path}/qwen3"),
        (lambda: ChatTokenizer(byte_level / "tokenizer.json"), "is a file; give the folder that it lies in"),
        (lambda: ChatTokenizer(byte_level, chat_template=tmp_path / "trian.jinja"), "did you mean .*train.jinja"),
        (lambda: ChatTokenizer(byte_level, max_seq_len=1), "tokenizer.max_seq_len: expected at least 2 tokens, got 1"),
    ]
    for build, expected in wrong:
        with pytest.raises(UserError, match=expected):
            build()


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (None, ["</s>"]),
        ("llama31", ["</s>", "<|eot_id|>"]),
        ("harmony", ["</s>", "<|call|>", "<|return|>"]),  # and not <|end|>, which ends what it thinks
        ("glm", ["</s>", "<|user|>", "<|observation|>"]),
    ],
)
def test_what_ends_an_answer(chat_tokenizer, template, ends):
    tokenizer = chat_tokenizer(template)
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.stop_tokens) == ends

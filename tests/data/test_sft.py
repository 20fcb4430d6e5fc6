"""Files of every format to samples; what is wrong with a file, its columns or a row."""

from __future__ import annotations

import csv
import json

import pytest

from offload.data.files import Source
from offload.data.messages import RowError
from offload.data.sft import SFTDataset, sft_dataset, shown
from offload.data.tokenizer import ChatTokenizer
from offload.errors import UserError
from tests.data.tokenizer_files import sentencepiece_model  # type: ignore[import-not-found]

TURNS = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "It is 3."}]
SHAREGPT = [{"from": "human", "value": "Add 1 and 2."}, {"from": "gpt", "value": "It is 3."}]
CHAT = "<|im_start|>user\nAdd 1 and 2.<|im_end|>\n<|im_start|>assistant\n[[It is 3.<|im_end|>\n]]"
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"

# (row, what a sample shows with a chat template, without one)
ROWS = {
    "openai": ({"messages": TURNS}, CHAT, None),
    "sharegpt": ({"conversations": SHAREGPT}, CHAT, None),
    "messages as text": ({"messages": json.dumps(TURNS)}, CHAT, None),
    "prompt": ({"prompt": "Add 1 and 2.", "completion": "It is 3."}, CHAT, "<s>Add 1 and 2.[[It is 3.</s>]]"),
    "response": ({"prompt": "Add 1 and 2.", "response": "It is 3."}, CHAT, "<s>Add 1 and 2.[[It is 3.</s>]]"),
    "prompt of messages": ({"prompt": TURNS[:1], "completion": TURNS[1:]}, CHAT, None),
    "system": (
        {"system": "Be brief.", "prompt": "Add 1 and 2.", "completion": "It is 3."},
        SYSTEM + CHAT,
        "<s>Be brief.\n\nAdd 1 and 2.[[It is 3.</s>]]",
    ),
    "instruction": (
        {"instruction": "Add", "input": "1 and 2.", "output": "It is 3."},
        CHAT.replace("Add ", "Add\n\n"),
        "<s>Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd\n\n### Input:\n1 and 2.\n\n### Response:\n[[It is 3.</s>]]",
    ),
    "instruction without input": (
        {"instruction": "Add 1 and 2.", "input": "", "output": "It is 3.", "text": "all of it"},
        CHAT,
        "<s>Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd 1 and 2.\n\n### Response:\n[[It is 3.</s>]]",
    ),
    "text": ({"text": "Some text."}, "[[<s>Some text.</s>]]", "[[<s>Some text.</s>]]"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def written(tmp_path):
    """Writes rows as a file of a format; gives its path."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        if name.endswith(".jsonl"):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif name.endswith(".json"):
            path.write_text(json.dumps(rows))
        elif name.endswith(".parquet"):
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif name.endswith((".csv", ".tsv")):
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, rows[0], delimiter="\t" if name.endswith("tsv") else ",")
                writer.writeheader()
                writer.writerows(rows)
        return path

    return write


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_every_format(chat_tokenizer, written, case):
    row, with_template, without = ROWS[case]
    path = written([row, row])
    tokenizer = chat_tokenizer("chatml")
    dataset = sft_dataset(tokenizer, path)
    assert len(dataset) == 2
    assert shown(tokenizer, dataset[1]) == with_template
    plain = chat_tokenizer(None)
    if without is None:
        with pytest.raises(UserError, match="has no chat template"):
            sft_dataset(plain, path)[0]
    else:
        assert shown(plain, sft_dataset(plain, path)[0]) == without


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.parquet", "rows.csv", "rows.tsv"])
def test_files_of_every_format_give_the_same_samples(chat_tokenizer, written, name):
    """Cells that look like numbers or like nothing are text in CSV too."""
    rows = [
        {"prompt": "007", "completion": "nan"},
        {"prompt": "a, b\nc", "completion": "1"},
        {"prompt": "x", "completion": "NA"},
    ]
    tokenizer = chat_tokenizer("chatml")
    dataset = sft_dataset(tokenizer, written(rows, name))
    for row, sample in zip(rows, dataset, strict=True):
        ids, counts = tokenizer.encode_chat(
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        )
        assert sample["tokens"] == ids
        assert sample["labels"] == [token if counted else -100 for token, counted in zip(ids, counts, strict=True)]


def test_text_files_patterns_lists_and_folders(chat_tokenizer, written, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for number in (1, 2):
        (folder / f"part{number}.jsonl").write_text(f'{{"text": "number {number}"}}\n\n{{"text": "more {number}"}}\n')
    (tmp_path / "plain.txt").write_text("number 1\nmore 1\nnumber 2\nmore 2\n")
    tokenizer = chat_tokenizer(None)
    expected = [tokenizer.encode(text) for text in ("number 1", "more 1", "number 2", "more 2")]
    parts = [str(folder / "part1.jsonl"), str(folder / "part2.jsonl")]
    for path in (folder, str(folder / "*.jsonl"), parts, tmp_path / "plain.txt"):
        assert [sample["tokens"] for sample in sft_dataset(tokenizer, path)] == expected
    assert len(sft_dataset(tokenizer, folder, split="train[:3]")) == 3
    assert sft_dataset(tokenizer, parts).where(3) == f"{parts[1]}, line 3"
    assert sft_dataset(tokenizer, tmp_path / "plain.txt").where(3) == f"{tmp_path}/plain.txt, row 4"


def test_a_folder_has_splits_by_its_files_names(chat_tokenizer, tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": split}) + "\n")
    tokenizer = chat_tokenizer(None)
    (sample,) = sft_dataset(tokenizer, tmp_path, split="validation")
    assert sample["tokens"] == tokenizer.encode("validation")


def test_some_files_of_a_folder(chat_tokenizer, tmp_path):
    """As of a data set of the Hub, whose files are laid out the same way."""
    (tmp_path / "more").mkdir()
    for name in ("a.jsonl", "b.jsonl", "more/c.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    tokenizer = chat_tokenizer(None)
    cases = [
        ({"data_files": "b.jsonl"}, ["b.jsonl"]),
        ({"data_files": ["a.jsonl", "more/*.jsonl"]}, ["a.jsonl", "more/c.jsonl"]),
        ({"data_files": {"train": "a.jsonl", "test": "b.jsonl"}, "split": "test"}, ["b.jsonl"]),
        ({"data_dir": "more"}, ["more/c.jsonl"]),
    ]
    for options, names in cases:
        found = [sample["tokens"] for sample in sft_dataset(tokenizer, tmp_path, **options)]
        assert found == [tokenizer.encode(name) for name in names]
    with pytest.raises(UserError, match=f"dataset.path: {tmp_path} cannot be read: .*nope.jsonl"):
        sft_dataset(tokenizer, tmp_path, data_files="nope.jsonl")


def test_rows_stay_on_the_disk(chat_tokenizer, written):
    """Arrow maps the cache's file: the rows' bytes are no memory that Python or Arrow allocated."""
    import pyarrow

    path = written([{"text": "word " * 2000} for _ in range(2000)])
    before = pyarrow.total_allocated_bytes()
    dataset = sft_dataset(chat_tokenizer(None), path)
    assert dataset[1999]["tokens"]
    assert path.stat().st_size > 15e6
    assert pyarrow.total_allocated_bytes() - before < 1e6
    assert dataset._data.cache_files


def test_columns_by_other_names(chat_tokenizer, written):
    path = written([{"question": "Add 1 and 2.", "answer": "It is 3.", "text": "x"}])
    tokenizer = chat_tokenizer("chatml")
    dataset = sft_dataset(tokenizer, path, columns={"prompt": "question", "completion": "answer"})
    assert shown(tokenizer, dataset[0]) == CHAT
    assert shown(tokenizer, sft_dataset(tokenizer, path, format="text")[0]) == "[[<s>x</s>]]"


def test_tools_and_calls_come_back_from_files_as_they_were(chat_tokenizer, written):
    """Rows with different functions do not get each other's keys, whichever way a file stores them."""
    rows = []
    for name, argument in (("weather", {"city": "Ulm"}), ("calendar", {"days": 3})):
        call = {"type": "function", "function": {"name": name, "arguments": argument}}
        properties = {key: {"type": "string"} for key in argument}
        schema = {"name": name, "parameters": {"type": "object", "properties": properties}}
        messages = [*TURNS, TURNS[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        rows.append({"messages": messages, "tools": [{"type": "function", "function": schema}]})
    tokenizer = chat_tokenizer("qwen3")
    expected = [tokenizer.encode_chat(row["messages"], row["tools"])[0] for row in rows]
    as_text = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    for path in (written(rows), written(rows, "r.parquet"), written(as_text, "t.parquet"), written(as_text, "t.csv")):
        assert [sample["tokens"] for sample in sft_dataset(tokenizer, path)] == expected, path


def test_train_on_all(chat_tokenizer, written):
    tokenizer = chat_tokenizer("chatml")
    sample = sft_dataset(tokenizer, written([{"messages": TURNS}]), train_on="all")[0]
    assert sample["labels"] == sample["tokens"]


def test_samples_are_cut_counted_and_told(chat_tokenizer, written):
    rows = [{"text": "a"}, {"text": "word " * 30}, {"text": "word " * 40}]
    tokenizer = chat_tokenizer(None, max_seq_len=16)
    dataset = sft_dataset(tokenizer, written(rows))
    assert dataset.notes() == []
    for _ in range(2):  # an epoch later it is the same samples
        assert [len(sample["tokens"]) for sample in dataset] == [3, 16, 16]
    (note,) = dataset.notes()
    longest = len(tokenizer.encode(rows[2]["text"]))
    assert "2 of the 3 samples read are longer than tokenizer.max_seq_len=16 and were cut" in note
    assert note.endswith(f"the longest has {longest} tokens")
    assert dataset[2]["tokens"] == tokenizer.encode(rows[2]["text"])[:16]


def test_samples_that_are_too_long_may_be_errors(chat_tokenizer, written):
    rows = [{"text": "a"}, {"text": "word " * 30}]
    tokenizer = chat_tokenizer(None, max_seq_len=16)
    dataset = sft_dataset(tokenizer, written(rows), too_long="error")
    assert len(dataset[0]["tokens"]) == 3
    length = len(tokenizer.encode(rows[1]["text"]))
    with pytest.raises(RowError, match=f"it has {length} tokens, more than tokenizer.max_seq_len=16; .*too_long=cut"):
        dataset[1]
    assert dataset.notes() == []


def test_what_the_template_leaves_out_is_told(chat_tokenizer, written):
    thinking = {"role": "assistant", "content": "It is 3.", "reasoning_content": "one plus two"}
    path = written([{"messages": [TURNS[0], thinking]}, {"messages": TURNS}])
    for template, told in (("llama31", True), ("qwen3", False), ("harmony", False), ("glm", False)):
        dataset = sft_dataset(chat_tokenizer(template), path)
        assert [len(sample["tokens"]) > 0 for sample in dataset] == [True, True]
        expected = f"note: {path}: 1 of the 2 samples read have thinking parts, which the chat template leaves out"
        assert [note.split(";")[0] for note in dataset.notes()] == [expected] * told


def test_a_template_without_ends_of_turns_is_told(byte_level, written, spans):
    template = (
        "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
    )
    dataset = sft_dataset(ChatTokenizer(byte_level, chat_template=template), written([{"messages": TURNS}]))
    assert "note: " in dataset.notes()[0] and "ends no turn with a special token" in dataset.notes()[0]


def test_shown_marks_exactly_what_counts(chat_tokenizer):
    tokenizer = chat_tokenizer(None)
    ids = tokenizer.encode("one two three", add_bos=False, add_eos=False)
    ends = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
    labels = [-100] * len(ids)
    assert shown(tokenizer, {"tokens": ids, "labels": labels}) == "one two three"
    labels[2] = ids[2]
    expected = f"{ends[2]}[[{ends[3][len(ends[2]) :]}]]{ends[-1][len(ends[3]) :]}"
    assert shown(tokenizer, {"tokens": ids, "labels": labels}) == expected


def test_long_parts_are_shown_without_their_middle_and_with_their_brackets(chat_tokenizer):
    tokenizer = chat_tokenizer("chatml")
    messages = [{"role": "user", "content": "q" * 90}, {"role": "assistant", "content": "a" * 90}] * 3
    ids, counts = tokenizer.encode_chat(messages)
    sample = {"tokens": ids, "labels": [token if one else -100 for token, one in zip(ids, counts, strict=True)]}
    whole, short = shown(tokenizer, sample), shown(tokenizer, sample, longest=40)
    assert len(whole) > 600 and whole.count("[[") == short.count("[[") == short.count("]]") == 3
    question, answer = f"{'q' * 10}<|im_end|>", f"[[{'a' * 20} … {'a' * 9}<|im_end|>\n]]"
    assert answer in short and question not in short and len(short) < 6 * 48
    cut = shown(tokenizer, sample, longest=40, limit=60)
    assert cut.count("[[") == cut.count("]]") == 1 and cut.endswith("]] …") and short.startswith(cut[:-2])


def test_brackets_of_the_text_are_not_taken_for_ours(chat_tokenizer):
    tokenizer = chat_tokenizer("chatml")
    ids, counts = tokenizer.encode_chat([{"role": "user", "content": "a[[0]]"}, {"role": "assistant", "content": "b"}])
    labels = [token if one else -100 for token, one in zip(ids, counts, strict=True)]
    text = shown(tokenizer, {"tokens": ids, "labels": labels})
    assert "a[[0]]<|im_end|>" in text and text.endswith("⟦b<|im_end|>\n⟧")


def test_shown_keeps_the_blanks_of_sentencepiece(tmp_path):
    """Decoded by itself, a part would lose the one that it begins with."""
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    tokenizer = ChatTokenizer(tmp_path)
    ids, counts = tokenizer.encode_completion("Return the string", " in lower case")
    labels = [token if one else -100 for token, one in zip(ids, counts, strict=True)]
    assert "Return the string[[ in lower case" in shown(tokenizer, {"tokens": ids, "labels": labels})


BAD_ROWS = {
    "null": ({"prompt": None, "completion": "x"}, "its prompt is null; expected text"),
    "number": ({"prompt": 3, "completion": "x"}, "its prompt is int; expected text"),
    "empty": ({"prompt": "a", "completion": " "}, "its completion is empty"),
    "null text": ({"text": None}, "its text is null; expected text"),
    "null messages": ({"messages": None}, "its messages is null"),
    "roles": ({"messages": TURNS[1:]}, "roles are out of order: message 1, of assistant, comes first"),
    "tools": ({"messages": TURNS, "tools": "{"}, "its tools are not JSON"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_one_line_and_others_go_on(chat_tokenizer, written, case):
    row, expected = BAD_ROWS[case]
    good = {name: TURNS if name == "messages" else "[]" if name == "tools" else "fine" for name in row}
    path = written([good, row])
    dataset = sft_dataset(chat_tokenizer("chatml"), path)
    assert dataset[0]["tokens"]
    with pytest.raises(RowError) as caught:
        dataset[1]
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert dataset.where(1) == f"{path}, line 2"


def test_packing_names_the_bad_row(chat_tokenizer, written):
    path = written([{"text": "fine"}, {"text": " "}])
    with pytest.raises(UserError, match=f"{path}, line 2: its text is empty"):
        sft_dataset(chat_tokenizer(None, max_seq_len=16), path, packed=True)


def _refusals(tmp_path, written):
    good = written([{"text": "x"}], "train.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n\n{"text": \n')
    (tmp_path / "numbers.jsonl").write_text("1\n2\n")
    (tmp_path / "odd.xyz").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "odd.xyz").write_text("x")
    pairs = written([{"question": "a", "answer": "b"}], "pairs.jsonl")
    parquet = tmp_path / "no.parquet"
    parquet.write_text("no")
    return [
        (tmp_path / "trian.jsonl", {}, f"dataset.path: there is no file .*; did you mean {good}"),
        (tmp_path / "*.arrow", {}, "dataset.path: no file is like"),
        ([], {}, "expected a list of files, got an empty one"),
        (tmp_path / "empty.jsonl", {}, "empty.jsonl is empty; give a file with at least one row"),
        (tmp_path / "broken.jsonl", {}, "broken.jsonl, line 3: it is not JSON"),
        (tmp_path / "numbers.jsonl", {}, "numbers.jsonl, line 1: expected an object with a row's columns, got int"),
        (tmp_path / "odd.xyz", {}, "odd.xyz is of no known format; expected a name that ends in .json"),
        (tmp_path / "folder", {}, "has no file that ends in .json"),
        ([str(good), str(parquet)], {}, r"files of several formats \(json, parquet\)"),
        (parquet, {}, "dataset.path: .*no.parquet cannot be read"),
        (good, {"split": "test"}, "dataset.split: .* has no 'test'"),
        (good, {"format": "txt"}, "dataset.format: there is no 'txt'; did you mean text"),
        (good, {"format": "prompt"}, "has no column for prompt, completion of prompt, only text; .*columns.prompt="),
        (good, {"columns": {"propmt": "text"}}, "dataset.columns: 'propmt' is no column of any format; .*prompt"),
        (pairs, {"columns": {"prompt": "qestion"}}, "dataset.columns.prompt: .* 'qestion'; did you mean question"),
        (pairs, {}, r"the columns of .* \(question, answer\) are of no known format; .*dataset.columns.prompt=COLUMN"),
        (good, {"train_on": "user"}, "dataset.train_on: expected assistant or all, got 'user'"),
        (good, {"too_long": "skip"}, "dataset.too_long: expected cut or error, got 'skip'"),
        (good, {"weight": 0}, "dataset.weight: expected a number above 0"),
        (good, {"streaming": True}, "dataset.streaming: rows stay on the disk anyway, .* by their number; remove it"),
        (good, {"data_files": "x"}, "dataset.data_files: .* dataset.path names files already; remove it"),
        (good, {"packed": True}, "dataset.packed: packs need a length; set tokenizer.max_seq_len"),
        ("nobody/nothing", {}, "no file or folder nobody/nothing here, and the Hugging Face Hub does not give it"),
    ]


def test_what_is_refused_is_one_line(chat_tokenizer, written, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    tokenizer = chat_tokenizer("chatml")
    for path, options, expected in _refusals(tmp_path, written):
        with pytest.raises(UserError, match=expected) as caught:
            sft_dataset(tokenizer, path, **options)
        assert len(caught.value.lines) == 1


def test_a_data_set_that_datasets_saved(chat_tokenizer, tmp_path):
    import datasets

    datasets.Dataset.from_list([{"text": "x"}]).save_to_disk(tmp_path / "saved")
    dataset = SFTDataset(chat_tokenizer(None), Source(tmp_path / "saved"))
    assert len(dataset) == 1 and dataset.where(0) == f"{tmp_path}/saved, split train, row 1"

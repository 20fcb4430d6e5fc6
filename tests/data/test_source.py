"""What a run says about data that cannot be opened or rows that cannot be used, and which rows it leaves out."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import Dataset, IterableDataset

from offload import torchao_shim
from offload.data import batches as data
from offload.data.batches import Batches, build_batches
from offload.errors import UserError
from offload.training.launch import _mendable


class Words:
    """One token per word, the number of its letters; a prompt is masked."""

    pad_id = 0
    max_seq_len = 64

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [1, *map(len, text.split()), 2]

    def __call__(self, sample: Any, inference: bool = False) -> dict[str, Any]:
        parts = [(self.encode(message.text_content), message.masked) for message in sample["messages"]]
        tokens = sum((part for part, _ in parts), [])
        mask = sum(([masked] * len(part) for part, masked in parts), [])
        return {"tokens": tokens[: self.max_seq_len], "mask": mask[: self.max_seq_len]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    torchao_shim.install()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def opened(section: dict[str, Any], **options: Any) -> Batches:
    defaults = {"_component_": "torchtune.datasets.instruct_dataset", "source": "json", "split": "train"}
    cfg = OmegaConf.create({"dataset": {**defaults, **section}})
    settings: dict[str, Any] = {"batch_size": 1, "shuffle": False, "seed": 0, **options}
    return build_batches(
        cfg.dataset,
        Words(),
        key="dataset",
        collate_fn="torchtune.data.padded_collate_sft",
        ignore_index=-100,
        **settings,
    )


def refused(section: dict[str, Any], **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        opened(section, **options)
    assert len(caught.value.lines) == 1
    return str(caught.value)


GOOD = {"input": "a b", "output": "c"}
CHAT = {"_component_": "torchtune.datasets.chat_dataset", "conversation_style": "sharegpt"}
ALPACA = {"_component_": "torchtune.datasets.alpaca_dataset"}
TEXT = {"_component_": "torchtune.datasets.text_completion_dataset"}
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

COLUMNS: list[tuple[dict[str, Any], Any, list[str]]] = [
    ({}, {"q": "a", "a": "b"}, ["only q, a;", "dataset.column_map='{input: COLUMN, output: COLUMN}'"]),
    ({}, {"input": "a", "answer": "b"}, ["no column 'output'", "column_map='{input: input, output: COLUMN}'"]),
    ({"packed": True}, {"question": "a", "answer": "b"}, ["no column 'input'", "dataset.column_map="]),
    (ALPACA, {"question": "a"}, ["no column 'instruction'", "='{instruction: COLUMN, output: COLUMN}'"]),
    (TEXT, {"texts": "a"}, ["no column 'text'", "dataset.column=texts"]),
    ({**CHAT, "conversation_column": "chat"}, {"chats": MESSAGES}, ["no column 'chat'", "conversation_column=chats"]),
    ({**CHAT, "conversation_column": "chat"}, {"chat": MESSAGES}, ["with role, content", "conversation_style=openai"]),
]  # fmt: skip


@pytest.mark.parametrize(("section", "row", "told"), COLUMNS)
def test_a_missing_column(tmp_path: Path, section: dict[str, Any], row: Any, told: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(row, row))
    for mode in (False, True):  # leaving rows out would leave none
        line = refused({**section, "data_files": str(path)}, skips_bad_rows=mode)
        assert line.startswith(f"dataset: {path}") and "mend" not in line
        assert all(part in line for part in told), line


FILES: list[tuple[str, str, dict[str, Any], str]] = [
    ("a.jsonl", "", {}, r"dataset\.data_files: \S+a\.jsonl is empty; "),
    ("a.jsonl", "\n \n", {}, r"a\.jsonl is empty; "),
    ("a.json", "[]", {}, r"a\.json is empty; "),
    ("a.jsonl", lines(GOOD), {"source": "jsn"}, r"^dataset\.source: there is no format 'jsn'; did you mean json\?"),
    ("a.jsonl", lines(GOOD), {"source": "zzz"}, r"^dataset\.source: .* one of json, csv, parquet, text"),
    ("a.jsonl", lines(GOOD), {"streaming": True}, r"^dataset\.streaming: .* remove it"),
    ("a.jsonl", lines(GOOD) + "{", {}, r"a\.jsonl, line 2 is not JSON .* mend the data"),
    ("a.csv", "input,output\na,b\n", {}, r"dataset\.source=csv reads files that end in \.csv"),
    ("a.jsonl", lines(GOOD), {"data_files": "{folder}/b.jsonl"}, r"no file \S+b\.jsonl; did you mean \S+a\.jsonl\?"),
    ("a.jsonl", lines(GOOD), {"data_files": "{folder}"}, r"\S+ is a folder; give its files, such as \S+/\*\.jsonl"),
    ("a.jsonl", lines({"input": 1, "output": 2}), {}, r"input is a number, output is a number.*; it is the only row$"),
    ("a.jsonl", lines({**GOOD, "input": ["a"]}), {}, r"input is a list"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "section", "told"), FILES)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, text: str, section: dict[str, Any], told: str) -> None:
    import re

    (tmp_path / name).write_text(text)
    given = {k: v.format(folder=tmp_path) if isinstance(v, str) else v for k, v in section.items()}
    line = refused({"data_files": str(tmp_path / name), **given})
    assert re.search(told, line), line


def test_a_null_that_a_template_would_write_as_a_word(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"instruction": "a", "input": None, "output": "b"}
    path.write_text(lines(row, {**row, "instruction": None}))
    assert f"{path}, line 2: instruction is null; mend the row" in refused({**ALPACA, "data_files": str(path)})
    assert opened({**ALPACA, "data_files": str(path)}, skips_bad_rows=True).num_samples == 1


def test_rows_are_found_through_slices_and_several_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = [{"input": f"{name} {i}", "output": "c"} for i in range(10)]
        (tmp_path / f"{name}.jsonl").write_text(lines(*rows[:5]) + "\n" + lines({**rows[5], "output": None}, *rows[6:]))
    line = refused({"data_files": str(tmp_path / "*.jsonl"), "split": "train[12:]"})
    assert f"{tmp_path}/b.jsonl, line 7: output is null" in line
    csv = tmp_path / "rows.csv"
    csv.write_text("input,output\na,b\nc,\n")
    assert f"{csv}, row 2: output is null" in refused({"source": "csv", "data_files": str(csv)})


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(GOOD, *[{**GOOD, "output": None}] * 5))
    with pytest.raises(UserError) as caught:
        opened({"data_files": str(path)})
    assert len(caught.value.lines) == 4
    assert "5 of 6 rows cannot be used; mend them, or leave them out with dataset_errors=skip" in caught.value.lines[-1]


def test_what_is_left_out_keeps_the_order_of_the_others() -> None:
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 1}
    whole, some = Batches(list(range(20)), None, **options), Batches(list(range(20)), None, **options)  # type: ignore[arg-type]
    some.leave_out([3, 17])
    for epoch in range(3):
        assert some.order(epoch) == [index for index in whole.order(epoch) if index not in (3, 17)]
    assert some.num_samples == 18 and len(some) == 9 and whole.order(0) != whole.order(1)


class Drawing(Dataset[Any]):
    """Samples that draw random numbers."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        torch.rand(2)
        return {"tokens": [1, 5, 2], "labels": [1, 5, 2]}


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield {"tokens": [1], "labels": [1]}


class Odd(Drawing):
    """Samples that are no lists of tokens; ``given`` is what they are."""

    given: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.given


def own(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Batches:
    monkeypatch.setattr(data, "open_dataset", lambda *_: make())
    return opened({}, **options)


def test_reading_before_training_leaves_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert own(Drawing, monkeypatch).tally.read == 3
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("key", ["evaluation.dataset", "dataset.1"])
def test_a_key_of_another_data_set_is_named_once(key: str, tmp_path: Path) -> None:
    from offload.data.source import open_dataset

    cfg = OmegaConf.create({"evaluation": {"dataset": {}}, "dataset": [{}, {}]})
    OmegaConf.update(cfg, key, {"_component_": "offload.data.sft.sft_dataset", "path": "nowhere.jsonl"})

    def told() -> str:
        with pytest.raises(UserError) as caught:
            open_dataset(OmegaConf.select(cfg, key), Words(), key, lambda rows: rows)
        return str(caught.value)

    assert told().startswith(f"{key}.path: there is no file nowhere.jsonl;")
    (tmp_path / "a.jsonl").write_text(lines({"prompt": "a", "completion": "b"}))
    OmegaConf.update(cfg, key, {"path": str(tmp_path / "a.jsonl"), "columns": 3}, force_add=True)
    assert told().startswith(f"{key}.columns: got 3, ") and f"such as {key}.columns='" in told()


def test_a_data_set_without_an_index() -> None:
    from offload.data.source import open_dataset

    section = OmegaConf.create({"_component_": f"{__name__}.Endless"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.data.source.instantiate", lambda *_: Endless())
        with pytest.raises(UserError, match="gives Endless, without a length and an index"):
            open_dataset(section, Words(), "dataset", lambda rows: rows)


def test_a_row_that_says_itself_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.data.messages import RowError

    def refuse(*_: Any) -> Any:
        raise RowError("the conversation is empty")

    monkeypatch.setattr(Odd, "__getitem__", refuse)
    with pytest.raises(UserError, match=r"row 1: the conversation is empty; none of the 3 rows can be used$"):
        own(Odd, monkeypatch)


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        ({"tokens": [[1], [2]], "labels": [1, 2]}, "its tokens are no list of whole numbers"),
        ({"tokens": ["a"], "labels": [1]}, "its tokens are no list of whole numbers"),
        ({"tokens": [1, None], "labels": [1, 2]}, "its tokens are no list of whole numbers"),
        ({"tokens": [], "labels": []}, "no token is left of it"),
        ({"tokens": [3, -1], "labels": [3, 4]}, "gives -1, which is no token"),
        ({"tokens": [3, 4], "labels": [3]}, "its labels are not one whole number for each token"),
    ],
)
def test_samples_that_cannot_be_trained_on(monkeypatch: pytest.MonkeyPatch, sample: Any, told: str) -> None:
    monkeypatch.setattr(Odd, "given", sample)
    with pytest.raises(UserError, match=told):
        own(Odd, monkeypatch)


def test_a_loss_that_does_not_ignore_what_the_data_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.data.rows import sample_problem

    with pytest.raises(UserError, match=r"loss\.ignore_index: the data masks labels with -100, the loss ignores 0"):
        sample_problem({"tokens": [3, 4], "labels": [-100, 4]}, ignore_index=0)


def test_rows_that_were_not_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(*[GOOD] * 20, {**GOOD, "output": None}))
    monkeypatch.setattr(data, "SCAN_SECONDS", 0.0)
    batches = opened({"data_files": str(path)})
    assert batches.tally.read < 21 and "of 21 rows were read before training" in batches.notes[0]
    with pytest.raises(UserError, match=r"rows\.jsonl, line 21: output is null .*dataset_errors=skip"):
        list(batches.epoch(0))
    assert opened({"data_files": str(path)}, skips_bad_rows=True).num_samples == 20, "all are read where they must be"


def test_a_bad_row_in_a_data_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(*[GOOD] * 20, {**GOOD, "output": None}))
    monkeypatch.setattr(data, "SCAN_SECONDS", 0.0)
    with pytest.raises(UserError) as caught:
        list(opened({"data_files": str(path)}, num_workers=1).epoch(0))
    assert len(caught.value.lines) == 1 and f"{path}, line 21: output is null" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "told", "untold"),
    [
        (RuntimeError("can't start new thread"), "raise the limit of processes and threads", "mend"),
        (OSError(errno.ENOSPC, "No space left on device", "/cache"), "HF_DATASETS_CACHE", "mend"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n", "mend"),
        (MemoryError(), "out of host memory", "mend"),
        (ConnectionError("Couldn't reach 'jsn'"), "dataset.source: there is no folder nobody/nothing", "mend"),
    ],
)
def test_the_remedy_fits_the_fault(monkeypatch: pytest.MonkeyPatch, error: Exception, told: str, untold: str) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise RuntimeError("while reading") from error

    monkeypatch.setattr("torchtune.datasets._sft.load_dataset", load)
    line = refused({"source": "nobody/nothing"})
    assert told in line and untold not in line, line


def test_no_thread_is_left_anywhere() -> None:
    assert "ulimit -u" in (_mendable(RuntimeError("can't start new thread")) or "")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("tokenizer: it has no chat template"), "tokenizer: it has no chat template"),
        (
            OSError(errno.EIO, "Input/output error"),
            "dataset: json, split train cannot be read: Input/output error",
        ),
    ],
    ids=["user", "disk"],
)
def test_a_fault_that_is_none_of_the_row(
    monkeypatch: pytest.MonkeyPatch, workers: int, error: Exception, told: str
) -> None:
    """One line, also out of a worker, and nothing is left out for it."""

    def fail(self: Any, index: int) -> Any:
        if index < 2:
            return {"tokens": [1, 5, 2], "labels": [1, 5, 2]}
        raise error

    monkeypatch.setattr(Odd, "__getitem__", fail)
    with pytest.raises(UserError) as caught:
        own(Odd, monkeypatch, skips_bad_rows=True)
    assert caught.value.lines[0].startswith(told) and len(caught.value.lines) == 1
    monkeypatch.setattr(data, "read_rows", lambda *_, **__: data.Tally(read=3))
    with pytest.raises(UserError) as caught:
        list(own(Odd, monkeypatch, num_workers=workers).epoch(0))
    assert caught.value.lines[0].startswith(told) and len(caught.value.lines) == 1


@pytest.mark.parametrize("key", ["dataset", "evaluation.dataset"])
def test_a_stream_is_refused_before_a_run(key: str) -> None:
    from offload.cli.validate import validate

    with pytest.raises(UserError, match=rf"^{key}\.streaming: shuffling and resuming"):
        validate("tiny_llama_offload", [f"{key}.streaming=True"])

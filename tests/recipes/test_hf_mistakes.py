"""What the recipes say of a folder, a tokenizer, a template or a conversation that is not as it should be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data.conftest import byte_level  # type: ignore[import-not-found]  # noqa: F401 - a fixture
from tests.models.huggingface import families  # type: ignore[import-not-found]
from tests.recipes.conftest import Result, Workspace  # type: ignore[import-not-found]

CHATML = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
USER, ASSISTANT = {"role": "user", "content": "What is one?"}, {"role": "assistant", "content": "A number."}
GOOD = {"messages": [USER, ASSISTANT]}


@pytest.fixture
def run(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Trains a copy of a tiny model on conversations, both as changed by the caller."""
    # A handler that a library made under an earlier test writes to that test's stream, which is closed.
    monkeypatch.setattr("logging.raiseExceptions", False)

    def run(
        *overrides: str,
        rows: list[dict[str, Any]] | None = None,
        change: Callable[[Path], Any] | None = None,
        template: str | None = CHATML,
    ) -> Result:
        folder = tmp_path / "model"
        shutil.copytree(workspace.path / "base", folder)
        config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "bos_token": "<s>"}
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config | ({"chat_template": template} if template else {}))
        )
        if change is not None:
            change(folder)
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in (rows or [GOOD] * 8)))
        settings = yaml.safe_load(workspace.config("full_finetune_single_device").read_text())
        del settings["checkpointer"]
        component = "offload.models.huggingface.from_pretrained"
        settings |= {
            "model": {"_component_": component, "path": str(folder)},
            "tokenizer": {
                "_component_": "offload.data.tokenizer.ChatTokenizer",
                "path": str(folder),
                "max_seq_len": 48,
            },
            "dataset": {"_component_": "offload.data.sft.sft_dataset", "path": str(data), "packed": False},
            "max_steps_per_epoch": 2,
        }
        mine = Workspace(tmp_path, workspace.recipes, workspace.capture)
        mine.config("full_finetune_single_device").write_text(yaml.safe_dump(settings))
        return mine.run(tmp_path / "out", *overrides)

    return run


def only_line(result: Result) -> str:
    """The one line of a run that was refused, and nothing written."""
    assert result.status == 2 and "Traceback" not in result.err, result.err
    (line,) = result.errors()
    assert not any(path.is_file() for path in result.output_dir.rglob("*"))
    return str(line)


def test_nothing_is_wrong_with_what_is_changed_below(run: Any) -> None:
    result = run()
    assert result.status == 0, result.err
    assert "user: What is one?</s>assistant: [[A number.</s>]]" in result.out


def config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        read = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in (read | values).items() if v is not None}))

    return change


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def half_of_the_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def with_code_of_its_own(folder: Path) -> None:
    config(model_type="odd", auto_map={"AutoConfig": "odd.Config", "AutoModelForCausalLM": "odd.Model"})(folder)
    (folder / "odd.py").write_text("raise SystemExit('it ran')\n")


def tokenizer_with_code_of_its_own(folder: Path) -> None:
    read = json.loads((folder / "tokenizer_config.json").read_text())
    read |= {"tokenizer_class": "OddTokenizer", "auto_map": {"AutoTokenizer": ["odd.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(read))
    (folder / "odd.py").write_text("raise SystemExit('it ran')\n")


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer_config.json").unlink()


FOLDERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "without weights": (without_weights, ["model.path: ", "/model has no safetensors files: download the weights"]),
    "half of the weights": (half_of_the_weights, ["model.path: ", "model.safetensors is damaged", "download it again"]),
    "of other code": (with_code_of_its_own, ["Python files of its own", "model.trust_remote_code=True"]),
    "tokenizer of other code": (tokenizer_with_code_of_its_own, ["tokenizer.path: ", "needs code of its own"]),
    "without a tokenizer": (
        without_tokenizer,
        ["it has no tokenizer files", "expected tokenizer.json"],
    ),
    "an unknown model": (config(model_type="nope"), ["'nope'", "pip install --upgrade transformers"]),
    "an encoder": (config(model_type="bert", architectures=["BertModel"]), ["model.path: "]),
    "other shapes": (config(hidden_size=64), ["do not fit its config.json", "download it again"]),
    "a smaller vocabulary": (config(vocab_size=100), ["do not fit its config.json: ", "512", "100"]),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_folders(run: Any, what: str) -> None:
    change, says = FOLDERS[what]
    line = only_line(run(change=change))
    assert all(part in line for part in says), line


def test_a_tokenizer_of_another_model(run: Any, tmp_path: Path, byte_level: Path) -> None:  # noqa: F811
    template = tmp_path / "chat.jinja"
    template.write_text(CHATML)
    line = only_line(run(f"tokenizer.path={byte_level}", f"tokenizer.chat_template={template}"))
    assert "tokenizer: it has " in line and "the model's embedding has 512 rows: set tokenizer.path" in line


TEMPLATES: dict[str, tuple[str | None, list[str]]] = {
    "none": (None, ["tokenizer: it has no chat template", "tokenizer.chat_template=FILE", "plain text"]),
    "broken": ("{% for m in messages %}{{ m.content }", ["tokenizer.chat_template: line 1 of the template is broken"]),
    "refuses": ("{{ raise_exception('not today') }}", ["refuses this conversation: not today", "rows.jsonl, line"]),
    "fails": ("{% for m in messages %}{{ m.content.nope.more }}{% endfor %}", ["refuses this conversation: ", "line"]),
    "writes nothing": ("{{ bos_token }}", ["leaves out what message 2, of assistant, says"]),
    "tells nothing": (
        "{% for m in messages %}{{ m.content if loop.last else m.content | upper }} {% endfor %}",
        ["give one that has {% generation %}", "tokenizer.chat_template=FILE"],
    ),
}


@pytest.mark.parametrize("what", TEMPLATES)
def test_templates(run: Any, what: str) -> None:
    template, says = TEMPLATES[what]
    line = only_line(run(template=template, rows=[{"messages": [USER, ASSISTANT, USER, ASSISTANT]}] * 8))
    assert all(part in line for part in says), line


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "assistant first": ([ASSISTANT], "roles are out of order: message 1, of assistant, comes first"),
    "user twice": ([USER, USER, ASSISTANT], "message 2, of user, follows one of user; it has to follow "),
    "empty question": ([{"role": "user", "content": ""}, ASSISTANT], "message 1, of user, is empty; fill it or leave"),
    "empty answer": ([USER, {"role": "assistant", "content": " "}], "message 2, of assistant, is empty; fill it"),
    "no answer": ([USER], "no message is the assistant's, so there is nothing to train on"),
    "no message": ([], "the conversation is empty"),
    "unknown role": ([USER, {"role": "asistant", "content": "x"}], "did you mean assistant?"),
}


@pytest.mark.parametrize("what", CONVERSATIONS)
def test_conversations(run: Any, what: str, tmp_path: Path) -> None:
    messages, says = CONVERSATIONS[what]
    line = only_line(run(rows=[GOOD, GOOD, {"messages": messages}, *[GOOD] * 6]))
    assert f"dataset: {tmp_path}/rows.jsonl, line 3: " in line and says in line
    assert "dataset_errors=skip" in line


def test_samples_that_are_too_long(run: Any, tmp_path: Path) -> None:
    rows = [GOOD, {"messages": [USER, {"role": "assistant", "content": "Long. " * 40}]}, *[GOOD] * 6]
    line = only_line(run("dataset.too_long=error", rows=rows))
    assert f"dataset: {tmp_path}/rows.jsonl, line 2: it has " in line and "tokenizer.max_seq_len=48" in line
    assert "dataset.too_long=cut" in line and "dataset_errors=skip" in line
    shutil.rmtree(tmp_path / "model")
    result = run(rows=rows)
    assert result.status == 0, result.err
    assert "1 of the 8 samples read are longer than tokenizer.max_seq_len=48 and were cut" in result.out
    for folder in ("model", "out"):
        shutil.rmtree(tmp_path / folder)
    line = only_line(run("tokenizer.max_seq_len=4096", rows=rows))
    assert "the model takes 64 tokens and dataset has samples of" in line and "tokenizer.max_seq_len=64" in line


@pytest.mark.parametrize("packed", [True, False])
def test_a_model_that_cannot_take_packs(run: Any, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    monkeypatch.setitem(families.SMALL, "vocab_size", 512)

    def convolutions(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        families.save("lfm2", folder)

    result = run(f"dataset.packed={packed}", "max_steps_per_epoch=1", change=convolutions, rows=[GOOD] * 24)
    if packed:
        assert "dataset.packed: Lfm2ForCausalLM does not keep the documents of a pack apart" in only_line(result)
    else:
        assert result.status == 0, result.err


def test_a_tokenizer_in_which_the_models_end_is_a_word(run: Any) -> None:
    """It has as many tokens, so that nothing fails; it is told."""
    result = run(change=config(eos_token_id=300))
    assert result.status == 0, result.err
    (line,) = [line for line in result.out.splitlines() if line.startswith("warning: tokenizer: ")]
    assert "config.json of the model says that token 300 ends a text" in line and "is it the model's?" in line


def test_the_first_sample_is_one_that_is_trained_on(run: Any) -> None:
    """The first row is left out; line breaks and control characters can be seen and do nothing."""
    odd = {"messages": [{"role": "user", "content": "a\r\x1b[2Jb\n\tc"}, ASSISTANT]}
    rows = [{"messages": [USER]}, odd, *[GOOD] * 6]
    result = run("dataset_errors=skip", "shuffle=False", rows=rows)
    assert result.status == 0, result.err
    (line,) = [line for line in result.out.split("\n") if "the first sample" in line]
    assert r"user: a\r\x1b[2Jb\n\tc</s>assistant: [[A number.</s>]]" in line

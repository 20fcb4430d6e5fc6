"""The embedded default: what is prepared, that it is the same everywhere, and that it is prepared once."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from offload import tiny
from offload.errors import UserError

ROOT = Path(tiny.__file__).resolve().parents[2]

# A part of the library and a small vocabulary: prepared in a fraction of a second.
SMALL = """
from offload import tiny
tiny._MODULES = ["argparse", "difflib", "json", "shutil", "tarfile", "typing"]
tiny._TWINS, tiny._C_MODULES, tiny._FEWEST_PAIRS = {}, ("math",), 50
tiny.MODEL.update(vocab_size=448, embed_dim=32, num_heads=2, num_kv_heads=2, intermediate_dim=64)
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache root of a preparation that is small in every respect."""
    monkeypatch.setenv(tiny.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setattr(tiny, "_MODULES", ["argparse", "difflib", "json", "shutil", "tarfile", "typing"])
    monkeypatch.setattr(tiny, "_TWINS", {})
    monkeypatch.setattr(tiny, "_C_MODULES", ("math",))
    monkeypatch.setattr(tiny, "_FEWEST_PAIRS", 50)
    model = {**tiny.MODEL, "vocab_size": 448, "embed_dim": 32, "num_heads": 2, "num_kv_heads": 2}
    monkeypatch.setattr(tiny, "MODEL", {**model, "intermediate_dim": 64})
    _forget()
    yield tmp_path / "home"
    _forget()


def _forget() -> None:
    tiny._key.cache_clear()
    tiny._sources.cache_clear()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real thing, prepared once for this file."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tiny.HOME_VARIABLE, str(home))
        return tiny.prepare()


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_importing_is_cheap() -> None:
    heavy = "{'torch', 'sentencepiece', 'safetensors', 'omegaconf', 'transformers', 'torchtune'}"
    code = f"import sys, offload.tiny; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---- what is prepared --------------------------------------------------------------------------------------


def test_exactly_the_promised_files(prepared: Path) -> None:
    found = {str(path.relative_to(prepared)) for path in prepared.rglob("*") if path.is_file()}
    assert found == {f"{sub}/{name}" for sub, names in tiny._FILES.items() for name in names}
    assert not [path for path in prepared.parent.iterdir() if path.suffix == ".tmp"]
    # A cache that users share must be readable by all of them.
    for path in [prepared, *prepared.rglob("*")]:
        assert path.stat().st_mode & 0o044 == 0o044, path


def test_thousands_of_pairs_and_nothing_held_out_is_seen_in_training(prepared: Path) -> None:
    train, heldout = _rows(prepared / "data/train.jsonl"), _rows(prepared / "data/heldout.jsonl")
    assert len(train) > 3000
    assert 0.03 < len(heldout) / (len(train) + len(heldout)) < 0.07
    for row in train + heldout:
        assert row.keys() == {"input", "output"}
        assert row["input"].startswith("What ") and row["input"].endswith("?")
        assert "\n" not in row["output"] and ">>>" not in row["output"]
        assert row["output"].endswith((".", "!", "?"))
    answers = [row["output"].lower() for row in train + heldout]
    assert len(set(answers)) == len(answers)


def test_answers_are_the_documentation(prepared: Path) -> None:
    import shutil
    import textwrap

    answers = {row["input"]: row["output"] for name in ("train", "heldout") for row in
               _rows(prepared / f"data/{name}.jsonl")}  # fmt: skip
    first = textwrap.dedent(shutil.copytree.__doc__ or "").strip().split("\n\n")[0]
    assert answers["What does shutil.copytree do?"] == " ".join(first.split())
    assert answers["What does textwrap.TextWrapper.wrap do?"].startswith("Reformat the single paragraph in 'text'")
    assert answers["What does str.lower do?"] == "Return a copy of the string converted to lowercase."
    assert "argparse.ArgumentParser?" in " ".join(answers)
    assert not [question for question in answers if "._" in question]


@pytest.mark.parametrize(
    ("docstring", "answer"),
    [
        ("Copy a tree.\n\nMore about it.", "Copy a tree."),
        ("Copy\n    a tree", "Copy a tree."),
        ("copy(src, dst) -> None\n\nCopy a tree:\n", "Copy a tree."),
        ("copy(src, dst)\nCopy a whole tree.", "Copy a whole tree."),
        ("Short", None),
        ("", None),
        (">>> copy(1)\n2", None),
        ("Copy " * 100, None),
        ("a | b | c | 1 | 2 | 3 | 4 | 5", None),
    ],
)
def test_first_paragraph(docstring: str, answer: str | None) -> None:
    assert tiny._first_paragraph(docstring) == answer


def test_transformers_and_torchtune_see_the_same_model_and_tokens(prepared: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from offload import torchao_shim

    torchao_shim.install()
    from torchtune.models.llama2 import llama2, llama2_tokenizer
    from torchtune.training import FullModelHFCheckpointer

    folder = prepared / "checkpoint"
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    ours = llama2(**tiny.MODEL).eval()
    checkpointer = FullModelHFCheckpointer(
        checkpoint_dir=str(folder),
        checkpoint_files=["model.safetensors"],
        model_type="LLAMA2",
        output_dir=str(prepared.parent / "unused"),
    )
    ours.load_state_dict(checkpointer.load_checkpoint()["model"])
    tokens = torch.randint(tiny.MODEL["vocab_size"], (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours(tokens)
        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=0, atol=1e-5)
    assert logits.std() > 0.1  # equal because both work, not because both are zero

    tokenizer = llama2_tokenizer(str(folder / "tokenizer.model"))
    assert tokenizer.vocab_size == tiny.MODEL["vocab_size"] == len(tokenizer._spm_model.spm_model)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 0)
    # Llama-2's tokenizer has no padding token either; torchtune pads with unk.
    assert tokenizer._spm_model.spm_model.pad_id() == -1
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("[INST] What does shutil.copytree do? [/INST] Copy a tree.", "tab\t, line\n, é, 漢, 1234"):
        ids = tokenizer.encode(text, add_bos=True, add_eos=False)
        assert tokenizer.decode(ids) == text
        assert hf_tokenizer(text)["input_ids"] == ids


def test_training_starts_near_the_loss_of_guessing(prepared: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(prepared / "checkpoint").eval()
    tokens = torch.randint(tiny.MODEL["vocab_size"], (4, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss.item()
    guessing = torch.log(torch.tensor(float(tiny.MODEL["vocab_size"]))).item()
    assert guessing - 0.1 < loss < guessing + 0.3


# ---- once, whole, and the same everywhere ------------------------------------------------------------------


def test_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    results = []
    for seed in ("1", "2"):
        environment = {**os.environ, tiny.HOME_VARIABLE: str(tmp_path / seed), "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", SMALL + "tiny.prepare()"], cwd=ROOT, env=environment, check=True)
        (folder,) = (path for path in (tmp_path / seed).iterdir() if path.is_dir())
        results.append((folder.name, _bytes(folder)))
    assert results[0] == results[1]


def test_the_second_time_nothing_is_written(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.prepare()
    told = capsys.readouterr().out
    assert str(folder) in told and "preparing" in told
    before = {path: path.stat().st_mtime_ns for path in small.rglob("*")}
    assert tiny.prepare() == folder
    assert capsys.readouterr().out == ""
    assert {path: path.stat().st_mtime_ns for path in small.rglob("*")} == before


def test_processes_at_once_prepare_once(tmp_path: Path) -> None:
    environment = {**os.environ, tiny.HOME_VARIABLE: str(tmp_path)}
    command = [sys.executable, "-c", SMALL + "print('PATH', tiny.prepare())"]
    running = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sum("preparing" in output for output in outputs) == 1
    assert len({output.split("PATH ")[1] for output in outputs}) == 1
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == [
        ".tiny_llama.lock",
        "tiny_llama",
    ]


def test_the_lock_is_waited_for(small: Path) -> None:
    small.mkdir()
    done = threading.Event()
    with tiny._lock(small / ".tiny_llama.lock"):
        thread = threading.Thread(target=lambda: (tiny.prepare(), done.set()))
        thread.start()
        assert not done.wait(0.5)
        assert not tiny.location().exists()
    thread.join(60)
    assert done.is_set() and tiny._complete(tiny.location())


def test_a_failure_leaves_nothing(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tiny, "_write_checkpoint", full)
    with pytest.raises(UserError, match=r"TUNE_OFFLOAD_HOME.*no space left for about \d+ MiB"):
        tiny.prepare()
    assert [path.name for path in small.iterdir()] == [".tiny_llama.lock"]


def test_leftovers_of_a_killed_process_go_away(small: Path) -> None:
    leftover = small / ".tiny_llama-abc.tmp" / "data"
    leftover.mkdir(parents=True)
    tiny.prepare()
    assert not leftover.parent.exists()


def test_an_incomplete_folder_is_made_anew(small: Path) -> None:
    folder = tiny.prepare()
    wanted = _bytes(folder)
    (folder / "checkpoint" / "tokenizer.model").unlink()
    assert tiny.prepare() == folder
    assert _bytes(folder) == wanted


def test_a_changed_recipe_gets_a_folder_of_its_own(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tiny.location()
    monkeypatch.setattr(tiny, "MODEL", {**tiny.MODEL, "num_layers": 1})
    _forget()
    after = tiny.location()
    monkeypatch.setattr(sys, "version_info", (3, 99, 0, "final", 0))
    _forget()
    assert len({before, after, tiny.location()}) == 3


# ---- where, and errors -------------------------------------------------------------------------------------


def test_the_home_variable_decides_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tiny.HOME_VARIABLE, str(tmp_path / "elsewhere"))
    assert tiny.location().parent == tmp_path / "elsewhere"
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv(tiny.HOME_VARIABLE, "")
    assert tiny.location().parent == tmp_path / "me" / ".cache" / "tune-offload"


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tiny.HOME_VARIABLE, str(tmp_path / "file" / "home"))
    with pytest.raises(UserError) as raised:
        tiny.prepare()
    (line,) = str(raised.value).splitlines()
    assert line.startswith("TUNE_OFFLOAD_HOME: ") and str(tmp_path / "file" / "home") in line
    assert line.endswith("set TUNE_OFFLOAD_HOME to a folder that can be written")


def test_a_library_without_documentation(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "_FEWEST_PAIRS", 10_000)
    with pytest.raises(UserError, match="expected at least 10000"):
        tiny.prepare()
    assert not tiny.location().exists()


# ---- the resolver ------------------------------------------------------------------------------------------


def test_reading_a_value_prepares(small: Path) -> None:
    from omegaconf import OmegaConf

    tiny.register_resolvers()
    names = ("checkpoint", "tokenizer", "train", "heldout")
    cfg = OmegaConf.create({name: f"${{tiny_llama:{name}}}" for name in names})
    assert not small.exists()
    paths = [Path(cfg[name]) for name in names]
    assert [path.is_dir() for path in paths] == [True, False, False, False]
    assert [path.is_file() for path in paths] == [False, True, True, True]


def test_an_unknown_name(small: Path) -> None:
    with pytest.raises(UserError, match=r"\$\{tiny_llama:test\}.*expected one of .*\$\{tiny_llama:heldout\}"):
        tiny._resolve("test")
    assert not small.exists()

"""``tune run | ls | cp | cat``: what runs, what is printed, which status."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from offload.cli import handover, registry
from offload.cli import main as command
from offload.cli.main import main
from offload.cli.validate import load_recipe

ROOT = Path(__file__).parents[2]

# Writes what it was given to a file, so that the test sees what a recipe sees.
RECIPE = """
import json, os, sys
from pathlib import Path
if __name__ == "__main__":
    seen = {"file": __file__, "argv": sys.argv, "path": sys.path}
    Path(os.environ["SEEN"]).write_text(json.dumps(seen))
    sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Stand-ins for the shipped recipes and configs, and an empty current folder."""
    (tmp_path / "shipped/recipes").mkdir(parents=True)
    (tmp_path / "shipped/configs").mkdir()
    for name in ("full_finetune_single_device", "lora_finetune_single_device", "generate"):
        (tmp_path / f"shipped/recipes/{name}.py").write_text(RECIPE)
    (tmp_path / "shipped/configs/small_offload.yaml").write_text("# the header\nb: 1  # a knob\na: 2\n")
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(registry, "_folder", lambda name: tmp_path / "shipped" / name)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    monkeypatch.setattr(sys, "argv", ["tune"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "shipped"


@pytest.fixture
def handed_on(monkeypatch):
    """Collects what would have gone to torchtune's command."""
    calls: list[list[str]] = []
    monkeypatch.setattr(handover, "torchtune", lambda arguments: calls.append(list(arguments)) or 0)
    return calls


def seen():
    return json.loads(Path(os.environ["SEEN"]).read_text())


def run(*words: str) -> int:
    """The exit status of `tune run ...`, whether it was returned or the recipe exited with it."""
    try:
        return main(["run", *words])
    except SystemExit as stop:
        return stop.code


def test_run_executes_our_recipe_with_the_config_and_every_override(shipped):
    config = shipped / "configs/small_offload.yaml"
    overrides = ["a=x=y", "~b", "+c=1", "optimizer=torch.optim.AdamW", "lr_scheduler=null"]
    assert run("full_finetune_single_device", "--config", "small_offload", *overrides) == 0
    recipe = str(shipped / "recipes/full_finetune_single_device.py")
    assert seen()["file"] == recipe
    assert seen()["argv"] == [recipe, "--config", str(config), *overrides]


@pytest.mark.parametrize(
    "words",
    [
        ["full_finetune_single_device", "--config=small_offload", "a=1"],
        ["full_finetune_single_device", "a=1", "--config", "small_offload"],
        ["--config", "small_offload", "full_finetune_single_device", "a=1"],
    ],
)
def test_run_takes_the_config_anywhere(shipped, words):
    assert run(*words) == 0
    assert seen()["argv"][1:] == ["--config", str(shipped / "configs/small_offload.yaml"), "a=1"]


def test_run_gives_back_the_recipes_status(shipped, monkeypatch):
    monkeypatch.setenv("STATUS", "143")
    assert run("full_finetune_single_device", "--config", "small_offload") == 143


def test_run_executes_a_recipe_file_with_its_folder_importable(shipped, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "mine.py").write_text(RECIPE)
    (folder / "mine.yaml").write_text("a: 1\n")
    assert run("../elsewhere/mine.py", "--config", "../elsewhere/mine.yaml") == 0
    assert Path(seen()["file"]).samefile(folder / "mine.py")
    assert any(Path(entry).samefile(folder) for entry in seen()["path"] if Path(entry).exists())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["full_finetune_distributed"], ["run", "full_finetune_distributed"]),
        (["torchtune/full_finetune_single_device"], ["run", "full_finetune_single_device"]),
        (["full_finetune_single_device"], ["run", "full_finetune_single_device"]),
        (
            ["--nproc_per_node", "2", "full_finetune_distributed"],
            ["run", "--nproc_per_node", "2", "full_finetune_distributed"],
        ),
        (
            ["--nnodes=1", "--nproc_per_node=2", "lora_finetune_distributed"],
            ["run", "--nnodes=1", "--nproc_per_node=2", "lora_finetune_distributed"],
        ),
    ],
)
def test_run_hands_torchtunes_recipes_on(shipped, handed_on, words, expected):
    config = registry.torchtune_configs()["llama2/7B_full_low_memory"]
    assert run(*words, "--config", "llama2/7B_full_low_memory", "epochs=1") == 0
    assert handed_on == [[*expected, "--config", str(config), "epochs=1"]]


@pytest.fixture
def launched(monkeypatch):
    """What torchrun was to start, in place of starting it."""
    from torch.distributed import run as torchrun

    seen = []
    monkeypatch.setattr(torchrun, "run", seen.append)
    return seen


def test_a_recipe_file_with_torchrun_options_goes_to_torchrun(shipped, launched, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Path("sub").mkdir()
    Path("sub/mine.py").write_text("raise SystemExit('imported')")
    Path("mine.yaml").write_text("a: 1\n")
    assert run("--nproc_per_node", "2", "--max-restarts=1", "./sub/mine.py", "--config", "mine.yaml", "a=2") == 0
    (options,) = launched
    files = [str(Path(name).absolute()) for name in ("sub/mine.py", "mine.yaml")]
    assert options.module and options.training_script_args == [files[0], "--config", files[1], "a=2"]
    assert (options.nproc_per_node, options.max_restarts) == ("2", 1)
    assert signal.set_wakeup_fd(-1) == -1, "nobody listens for signals afterwards"
    assert int(os.environ["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.parametrize("has_option", [True, False], ids=["its option", "no option"])
def test_processes_that_save_get_the_time_for_it(shipped, monkeypatch, has_option):
    """torchrun closes them with the signal that it got; without one, the others of a process that failed."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import PContext

    from offload.cli import torchrun as ours

    parse, before, seconds = ours._parse, PContext.close, []
    if has_option and not hasattr(parse([]), "shutdown_timeout"):
        pytest.skip("this torchrun has no option for it")

    def parsed(options):
        arguments = parse(options)
        if not has_option:
            vars(arguments).pop("shutdown_timeout", None)
        return arguments

    def torchruns(options):
        processes = SimpleNamespace(_tail_logs=[], filtered_stdout=None, filtered_stderr=None)
        processes._close = lambda death_sig, timeout: seconds.append(timeout)
        given = [torchrun.config_from_args(options)[0].shutdown_timeout] if has_option else []
        PContext.close(processes, signal.SIGTERM, *given)
        PContext.close(processes)

    monkeypatch.setattr(ours, "_parse", parsed)
    monkeypatch.setattr(torchrun, "run", torchruns)
    Path("mine.py").touch()
    Path("mine.yaml").write_text("a: 1\n")
    assert run("--nproc_per_node", "2", "./mine.py", "--config", "mine.yaml") == 0
    assert seconds[0] >= 3600 and seconds[1:] == [30]
    assert PContext.close is before


def test_a_mistake_is_told_before_any_process_starts(launched, capsys, tmp_path):
    arguments = ["full_finetune_distributed", "--config", "tiny_llama_offload_distributed", f"output_dir={tmp_path}/o"]
    assert run("--nproc_per_node", "2", *arguments, "reduce_dtyp=bf16") == 2
    assert run("--nproc_per_nodes", "2", *arguments) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "reduce_dtype" in errors[0] and "--nproc" in errors[1]
    assert launched == [] and not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "usage: tune run RECIPE"),
        (["--help"], "usage: tune run RECIPE"),
        (["generate", "--help"], "usage: tune run generate"),
        (["generate", "--config", "small_offload", "-h"], "usage: tune run generate"),
    ],
)
def test_run_help(shipped, capsys, words, expected):
    recipe = shipped / "recipes/generate.py"
    recipe.write_text(f"import dataclasses\n@dataclasses.dataclass\nclass Settings:\n    seed: int = 3\n{RECIPE}")
    assert run(*words) == 0
    out, _ = capsys.readouterr()
    assert out.startswith(expected)
    assert not Path(os.environ["SEEN"]).exists()


@pytest.mark.parametrize("recipe", ["full_finetune_single_device", "lora_finetune_single_device", "generate"])
def test_a_recipes_help_lists_every_key_with_type_default_and_meaning(capsys, recipe):
    assert run(recipe, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    schema = load_recipe(registry.our_recipes()[recipe]).Settings
    at = {line.split(":")[0].strip(): index for index, line in enumerate(lines) if re.match(r"  [a-z_.]+: ", line)}
    assert {field.name for field in dataclasses.fields(schema)} <= set(at)
    for key, index in at.items():
        assert lines[index].endswith("(required)") or " = " in lines[index], key
        meaning = lines[index + 1]
        assert meaning.startswith("      ") and len(meaning.split()) > 1, f"{key} has no meaning"
    assert "  batch_size: int, at least 1 = 1" in lines or recipe == "generate"


def test_torchtunes_recipes_have_torchtunes_help(shipped, handed_on):
    assert run("full_finetune_distributed", "--help") == 0
    assert handed_on == [["run", "full_finetune_distributed", "--help"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["full_finetune_single_devise", "--config", "small_offload"],
            "did you mean full_finetune_single_device?",
        ),
        (["generate", "--config", "small_ofload"], "did you mean small_offload?"),
        (["generate", "--config"], "--config needs"),
        (["generate", "a=1"], "which config?"),
        (["generate", "--confg", "small_offload"], "unknown option --confg: did you mean --config?"),
        (["generate", "small_offload"], "small_offload is a config: tune run generate --config small_offload"),
        (["small_offload"], "is a config: tune run full_finetune_single_device --config small_offload"),
        (["generate", "--config", "small_offload"], "is a config of the recipe full_finetune_single_device"),
        (["full_finetune_single_device", "--config", "small_offload", "--dryrun"], "did you mean --dry-run?"),
        (
            ["full_finetune_single_device", "--config", "small_offload", "--dry-run", "--gpu", "RTX 4090"],
            "--gpu is an option of tune plan: tune plan --config small_offload --gpu",
        ),
        (
            ["full_finetune_single_device", "--config", "small_offload", "--nproc-per-node=2"],
            "--nproc-per-node is an option of torchrun: it stands before the recipe's name",
        ),
        (["--config", "small_offload"], "which recipe?"),
        (["./gone.py", "--config", "small_offload"], "no file './gone.py'"),
        (
            ["--nproc_per_node", "2", "full_finetune_single_device", "--config", "small_offload"],
            "leave out --nproc_per_node 2",
        ),
        (
            ["--nproc_per_node=2", "torchtune/generate", "--config", "llama2/7B_full"],
            "leave out --nproc_per_node=2",
        ),
        (
            ["--nproc_per_node", "2", "full_finetune_distribute", "--config", "llama2/7B_full"],
            "full_finetune_distributed?",
        ),
        (["eleuther_eval", "--config", "eleuther_evaluation"], "lm_eval --model hf --model_args pretrained="),
    ],
)
def test_run_refuses_in_one_line(shipped, handed_on, capsys, words, said):
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert said in err
    assert handed_on == [] and not Path(os.environ["SEEN"]).exists()


def test_ls_lists_ours_first_and_torchtunes_after(shipped, capsys):
    assert main(["ls"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["RECIPE", "CONFIG"]
    assert lines[1] == ["full_finetune_single_device", "small_offload"]
    assert ["generate", "<>"] in lines
    assert ["torchtune/full_finetune_single_device", "llama2/7B_full_low_memory"] in lines
    assert lines.index(["generate", "<>"]) < lines.index(["full_finetune_distributed", "llama2/7B_full"])


def test_ls_narrows(shipped, capsys):
    assert main(["ls", "gemma2/2B"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert rows and all("gemma2/2B" in row for row in rows)
    assert main(["ls", "nothing-has-this"]) == 2


def test_cat_prints_a_config_as_it_is_written(shipped, capsys):
    assert main(["cat", "small_offload"]) == 0
    assert capsys.readouterr().out == "# the header\nb: 1  # a knob\na: 2\n"


def test_cat_sorts(shipped, capsys):
    assert main(["cat", "small_offload", "--sort"]) == 0
    assert capsys.readouterr().out == "a: 2\nb: 1\n"


def test_cat_prints_a_recipe_and_torchtunes_configs(shipped, capsys):
    assert main(["cat", "generate"]) == 0
    assert capsys.readouterr().out == RECIPE
    assert main(["cat", "llama2/7B_full_low_memory"]) == 0
    assert "llama2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("destination", "lands"),
    [
        ("mine.yaml", "mine.yaml"),
        ("mine", "mine.yaml"),
        ("mine.v2", "mine.v2.yaml"),
        (".", "small_offload.yaml"),
        ("mine.yml", "mine.yml"),
    ],
)
def test_cp_copies(shipped, capsys, destination, lands):
    assert main(["cp", "small_offload", destination]) == 0
    assert [str(path) for path in Path().iterdir()] == [lands]
    assert Path(lands).read_text() == (shipped / "configs/small_offload.yaml").read_text()
    assert capsys.readouterr().out == f"Copied to {lands}\n"


def test_cp_keeps_what_is_there_with_no_clobber(shipped, capsys):
    Path("mine.yaml").write_text("precious: 1\n")
    assert main(["cp", "small_offload", "mine", "-n"]) == 0
    assert Path("mine.yaml").read_text() == "precious: 1\n"


def test_cp_overwrites_only_when_asked(shipped, capsys):
    Path("mine.yaml").write_text("precious: 1\n")
    assert main(["cp", "small_offload", "mine"]) == 2
    assert Path("mine.yaml").read_text() == "precious: 1\n"
    assert "mine.yaml exists already" in capsys.readouterr().err
    assert main(["cp", "small_offload", "mine", "--force"]) == 0
    assert Path("mine.yaml").read_text() == (shipped / "configs/small_offload.yaml").read_text()


@pytest.mark.parametrize("words", ["ls", "cat tiny_llama_offload"])
@pytest.mark.parametrize("end", ["| true", ">&-", ">/dev/full"])
def test_output_that_nobody_reads(words, end):
    """A reader that has gone or was never there is no error; a full disk is one, in one line."""
    done = subprocess.run(
        ["bash", "-c", f"(sleep 0.3; {sys.executable} -m offload {words}; echo $? >&3) 3>&2 {end}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = "error: cannot write the answer: No space left on device\n2\n" if end == ">/dev/full" else "0\n"
    assert done.stderr == said


def test_cp_makes_parents_only_when_asked(shipped, capsys):
    assert main(["cp", "generate", "a/b/mine.py"]) == 2
    assert "--make-parents" in capsys.readouterr().err
    assert not Path("a").exists()
    assert main(["cp", "generate", "a/b/mine.py", "--make-parents"]) == 0
    assert Path("a/b/mine.py").read_text() == RECIPE


def test_a_source_that_must_not_be_read_is_named(shipped, capsys, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(command, "open", refuse, raising=False)
    assert main(["cp", "small_offload", "mine.yaml"]) == 2
    source = shipped / "configs/small_offload.yaml"
    assert capsys.readouterr().err == f"error: cannot read {source}: Permission denied\n"


def test_a_copied_config_can_be_copied_onto_itself_only_with_an_error(shipped, capsys):
    Path("mine.yaml").write_text("a: 1\n")
    assert main(["cp", "./mine.yaml", "mine.yaml"]) == 2
    assert Path("mine.yaml").read_text() == "a: 1\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rum"], "no command 'rum': did you mean run?"),
        (["frobnicate"], "choose from run, ls, cp, cat, validate, download"),
        (["train", "x.yaml"], "no command 'train': tune run RECIPE --config CONFIG trains"),
        (["chat"], "no command 'chat': tune run generate --config hf_generate"),
        (["ls", "smol"], "did you mean small?"),
        (["cp", "generate", "/proc/mine.py"], "cannot write /proc/mine.py"),
        (["validate"], "the following arguments are required: config;"),
        (["plan"], "which config? For example: tune plan --config"),
        (["plan", "gone"], "no config 'gone'"),
        (["ls", "--all"], "unknown argument --all"),
        (["cp", "generate"], "tune cp --help"),
        (["cat", "small_oflfoad"], "did you mean small_offload?"),
        (["cat", "generate", "--sort"], "--sort is for configs"),
        (["validate", "small_offload", "--strict"], "unknown option --strict"),
        (
            ["plan", "--config", "small_offload", "--batch-size", "4"],
            "settings are written as batch_size=4; `tune plan",
        ),
    ],
)
def test_mistakes_are_one_line_and_status_2(shipped, capsys, words, said):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert said in err


def test_help_names_every_command(capsys):
    assert main([]) == 0
    assert main_exits(["--help"]) == 0
    for out in capsys.readouterr().out.split("usage:")[1:]:
        assert all(f"    {command} " in out for command in ("run", "ls", "cp", "cat", "validate", "download", "push"))


def main_exits(words: list[str]) -> object:
    with pytest.raises(SystemExit) as stop:
        main(words)
    return stop.value.code


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["ls"],
        ["cat", "llama2/7B_full_low_memory"],
        ["cp", "llama2/7B_full_low_memory", "{tmp}/copy.yaml"],
        ["download", "--help"],
        ["push", "--help"],
        ["validate", "--help"],
        ["cat", "no-such-config"],
    ],
)
def test_nothing_heavy_is_imported_for_an_answer(tmp_path, words):
    """The command answers at interpreter speed, because it imports nothing that is slow to import."""
    program = (
        "import atexit, sys\n"
        "heavy = {'torch', 'omegaconf', 'torchtune', 'torchao', 'numpy', 'huggingface_hub', 'wandb'}\n"
        "atexit.register(lambda: print('HEAVY', sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        "from offload.cli.main import script\n"
        "script()\n"
    )
    words = [word.format(tmp=tmp_path) for word in words]
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if "no-such-config" in words else 0), done.stderr
    assert done.stderr.splitlines()[-1] == "HEAVY []"


def test_the_end_of_the_command_searches_nothing_for_garbage():
    """Its last search would go through all that a plan imported and built."""
    program = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print('SEARCHED', len(gc.get_objects()), file=sys.stderr))\n"
        "from offload.cli.main import script\n"
        "script()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "ls"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) < 100


def test_a_reader_that_has_enough_is_no_error():
    """``tune ls | head -1``: the pipe closes early, and nothing is said about it."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "offload", "ls"], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")

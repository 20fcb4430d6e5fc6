"""The hook at Python's start: our command whichever `tune` script is installed, torchtune on any torchao."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What pip and uv write for torchtune's entry point `tune = torchtune._cli.tune:main`.
PIPS_SCRIPT = """#!{python}
# -*- coding: utf-8 -*-
import re
import sys
from torchtune._cli.tune import main
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(main())
"""
UVS_SCRIPT = """#!{python}
# -*- coding: utf-8 -*-
import sys
from torchtune._cli.tune import main
if __name__ == "__main__":
    if sys.argv[0].endswith("-script.pyw"):
        sys.argv[0] = sys.argv[0][:-11]
    elif sys.argv[0].endswith(".exe"):
        sys.argv[0] = sys.argv[0][:-4]
    sys.exit(main())
"""
OUR_SCRIPT = PIPS_SCRIPT.replace("torchtune._cli.tune", "offload.cli.main").replace("main)", "script)")
OUR_SCRIPT = OUR_SCRIPT.replace("import main", "import script").replace("exit(main())", "exit(script())")

RECIPE = """
import sys
if __name__ == "__main__":
    loaded = [name for name in ("torch", "torchtune") if name in sys.modules]
    print("our recipe", __file__, sys.argv[1:], loaded)
    sys.exit(7)
"""


class Environment:
    """A virtual environment as an editable installation leaves it, with a stand-in checkout and torchtune."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        shutil.copytree(
            ROOT / "offload",
            self.checkout / "offload",
            ignore=shutil.ignore_patterns("__pycache__", "engine"),
        )
        (self.checkout / "recipes").mkdir()
        (self.checkout / "configs").mkdir()
        self.recipe = self.checkout / "recipes/full_finetune_single_device.py"
        self.recipe.write_text(RECIPE)
        self.config = self.checkout / "configs/tiny_llama_offload.yaml"
        self.config.write_text("a: 1\n")
        self.folder = folder / "venv"
        venv.create(self.folder, symlinks=True, with_pip=False)
        self.python = self.folder / "bin/python"
        (self.packages,) = self.folder.glob("lib/python*/site-packages")
        (self.packages / "_tune_offload.pth").write_text(f"{self.checkout}\n")
        shutil.copy(ROOT / "tune_offload.pth", self.packages)

    def add_stand_in_torchtune(self) -> None:
        """A torchtune that says when it is loaded, and whose command says what it was given."""
        (self.packages / "torchtune/_cli").mkdir(parents=True)
        (self.packages / "torchtune/__init__.py").write_text("print('torchtune is loaded')\n")
        (self.packages / "torchtune/_cli/__init__.py").write_text("")
        (self.packages / "torchtune/_cli/tune.py").write_text(
            "import sys\ndef main():\n    print('their command', sys.argv[1:])\n"
        )
        (self.packages / "torchtune/_recipe_registry.py").write_text(
            "_ALL_RECIPES = [Recipe(name='theirs', file_path='theirs.py', supports_distributed=False,"
            " configs=[Config(name='t/theirs', file_path='theirs.yaml')])]\n"
        )
        (self.packages / "recipes/configs").mkdir(parents=True)
        (self.packages / "recipes/configs/theirs.yaml").write_text("b: 1\n")

    def add_this_interpreters_packages(self) -> None:
        """The real torchtune and torch: folders named in a .pth file, whose own .pth files do not run."""
        folders = [entry for entry in sys.path if any(Path(entry).glob("*.dist-info"))]
        (self.packages / "zz_dependencies.pth").write_text("".join(f"{folder}\n" for folder in folders))

    def script(self, text: str, name: str = "tune") -> Path:
        path = self.folder / "bin" / name
        path.write_text(text.format(python=self.python))
        path.chmod(0o755)
        return path

    def run(
        self, *command: object, folder: Path | None = None, pythonpath: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV"))}
        if pythonpath is not None:
            clean["PYTHONPATH"] = str(pythonpath)
        return subprocess.run(
            [str(word) for word in command],
            cwd=folder or self.folder,
            env={**clean, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture
def environment(tmp_path):
    made = Environment(tmp_path)
    made.add_stand_in_torchtune()
    return made


@pytest.mark.parametrize("script", [PIPS_SCRIPT, UVS_SCRIPT, OUR_SCRIPT], ids=["pip's", "uv's", "ours"])
def test_the_title_command_reaches_our_recipe_whichever_script_was_installed(environment, script):
    tune = environment.script(script)
    done = environment.run(
        tune, "run", "full_finetune_single_device", "--config", "tiny_llama_offload", "optimizer.lr=1e-5"
    )
    expected = f"our recipe {environment.recipe} {['--config', str(environment.config), 'optimizer.lr=1e-5']} []"
    assert (done.returncode, done.stdout, done.stderr) == (7, expected + "\n", "")


@pytest.mark.parametrize("script", [PIPS_SCRIPT, OUR_SCRIPT], ids=["theirs", "ours"])
def test_what_is_torchtunes_is_handed_on_once(environment, script):
    """Our command imports torchtune while the process still is the script `tune`, and gets the real one."""
    tune = environment.script(script)
    # In the scripts folder the bare name that torchtune's command is given looks like the script too.
    done = environment.run(tune, "run", "theirs", "--config", "t/theirs", "b=2", folder=tune.parent)
    config = environment.packages / "recipes/configs/theirs.yaml"
    said = f"torchtune is loaded\ntheir command {['run', 'theirs', '--config', str(config), 'b=2']}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_a_link_to_the_script_counts(environment, tmp_path):
    (tmp_path / "local").mkdir()
    (tmp_path / "local/tune").symlink_to(environment.script(UVS_SCRIPT))
    done = environment.run(tmp_path / "local/tune", "--version")
    assert done.stdout.startswith("tune-offload ")


def test_other_programs_get_torchtune(environment, tmp_path):
    """A program of another name, or a `tune` that lies elsewhere, is none of ours."""
    other = environment.script(PIPS_SCRIPT, name="tuner")
    (tmp_path / "elsewhere").mkdir()
    same_name = Path(shutil.copy(environment.script(PIPS_SCRIPT), tmp_path / "elsewhere/tune"))
    for program in (other, same_name):
        done = environment.run(program, "ls")
        assert done.stdout == "torchtune is loaded\ntheir command ['ls']\n", program
    done = environment.run(environment.python, "-c", "import torchtune, torchtune._cli.tune as t; t.main()")
    assert done.stdout.startswith("torchtune is loaded\ntheir command")


def test_finding_torchtune_loads_nothing(environment):
    program = "import importlib.util as u, sys; print(u.find_spec('torchtune').origin, 'torchtune' in sys.modules)"
    done = environment.run(environment.python, "-c", program)
    assert done.stdout == f"{environment.packages / 'torchtune/__init__.py'} False\n"


def test_torchao_is_mended_before_torchtune_runs(environment):
    (environment.checkout / "offload/torchao_shim.py").write_text("def install(): print('mended')\n")
    done = environment.run(environment.python, "-c", "import torchtune; print(torchtune.__loader__.name)")
    assert done.stdout == "mended\ntorchtune is loaded\ntorchtune\n"


def test_the_start_of_python_leaves_nothing_behind_but_the_hook(environment):
    program = "import sys; print([name for name in sys.modules if name.startswith(('offload', 'torch'))])"
    done = environment.run(environment.python, "-c", program)
    # Not `offload` itself: a checkout in the current folder has to be importable beside an installed copy.
    assert (done.stdout, done.stderr) == ("['offload._startup']\n", "")


def test_the_hook_imports_nothing_of_its_own(environment):
    program = "import sys; print(*sys.modules)"
    hooked = environment.run(environment.python, "-c", program).stdout.split()
    (environment.packages / "tune_offload.pth").unlink()
    plain = environment.run(environment.python, "-c", program).stdout.split()
    assert "sys" in plain
    # __future__ is what annotations that are not evaluated cost: less than evaluating them.
    assert set(hooked) - set(plain) <= {"offload._startup", "__future__"}


@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_the_hook_is_the_installed_one_whatever_the_path_holds(environment, tmp_path, kind):
    """Another package called `offload` is neither run at Python's start nor when torchtune is mended."""
    installed = environment.checkout
    if kind == "wheel":
        (environment.packages / "_tune_offload.pth").unlink()
        shutil.copytree(environment.checkout / "offload", environment.packages / "offload")
        installed = environment.packages
    (installed / "offload/torchao_shim.py").write_text("def install(): print('mended')\n")
    for name in ("__init__", "_startup"):
        (tmp_path / "other/offload").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"other/offload/{name}.py").write_text("print('run'); raise SystemExit(3)\n")
    program = "import sys; print(sys.modules['offload._startup'].__file__); import torchtune"
    done = environment.run(environment.python, "-c", program, pythonpath=tmp_path / "other")
    said = f"{installed / 'offload/_startup.py'}\nmended\ntorchtune is loaded\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


@pytest.mark.parametrize("damage", ["gone", "broken", "exits"])
def test_a_package_that_is_gone_or_broken_does_not_disturb_python(environment, damage):
    if damage == "gone":
        shutil.rmtree(environment.checkout)
    else:
        text = {"broken": "this is not python\n", "exits": "raise SystemExit(3)\n"}[damage]
        (environment.checkout / "offload/_startup.py").write_text(text)
    done = environment.run(environment.python, "-c", "print('fine')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_the_real_torchtune_checks_its_own_config(tmp_path):
    """All of it at once: torchtune's script, our command, the mended torchao, torchtune's own command."""
    environment = Environment(tmp_path)
    environment.add_this_interpreters_packages()
    tune = environment.script(UVS_SCRIPT)
    done = environment.run(tune, "validate", "llama2/7B_full_low_memory")
    assert (done.returncode, done.stdout) == (0, "Config is well-formed!\n"), done.stderr
    assert "Traceback" not in done.stderr

"""What a wheel and a source distribution hold, and that an installed wheel works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import hatch_build
import offload

hatchling_sdist = pytest.importorskip("hatchling.builders.sdist", reason="the build backend: pip install -e .[dev]")
hatchling_wheel = pytest.importorskip("hatchling.builders.wheel", reason="the build backend: pip install -e .[dev]")

ROOT = Path(__file__).parents[1]
LIBRARY = "offload/optim/kernels/_adamw" + (".dylib" if sys.platform == "darwin" else ".so")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = hatchling_wheel.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(path)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    (path,) = hatchling_sdist.SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(path)


def files(*patterns: str) -> set[str]:
    """Files of this checkout, without what running it leaves."""
    return {
        path.relative_to(ROOT).as_posix()
        for pattern in patterns
        for path in ROOT.glob(pattern)
        if path.is_file() and "__pycache__" not in path.parts and not any(p.startswith(".build-") for p in path.parts)
    }


def has_compiler() -> bool:
    try:
        return bool(hatch_build.compiler())
    except RuntimeError:
        return False


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C compiler")


def wheel_name(tag: str) -> str:
    return f"tune_offload-{offload.__version__}-py3-none-{tag}.whl"


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.startswith(f"tune_offload-{offload.__version__}.")}


def test_a_wheel_holds_the_package_with_recipes_and_configs_inside(wheel):
    assert wheel.name == wheel_name(hatch_build.platform_tag() if has_compiler() else "any")
    moved = {f"offload/{name}" for name in files("recipes/**/*", "configs/**/*")}
    assert any(name.startswith("offload/configs/") for name in moved)
    assert names(wheel) == files("offload/**/*") | moved | {"tune_offload.pth"}


def test_a_wheel_claims_no_other_top_level_name(wheel):
    """torchtune's wheel installs a top-level `recipes`: a second one would overwrite it."""
    assert {name.split("/")[0] for name in names(wheel)} == {"offload", "tune_offload.pth"}


def test_a_wheels_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = f"tune_offload-{offload.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert f"\nVersion: {offload.__version__}\n" in metadata
    assert "\nLicense-Expression: BSD-3-Clause\n" in metadata
    assert "\nRequires-Dist: torchtune==0.6.1\n" in metadata
    assert "tune = offload.cli.main:script" in scripts
    assert "tune-offload = offload.cli.main:script" in scripts


def test_an_sdist_holds_everything_and_builds_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    (root,) = tmp_path.iterdir()
    held = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    wanted = files("offload/**/*", "recipes/**/*", "configs/**/*", "scripts/**/*", "tests/**/*.py", ".ci/*")
    wanted |= {"pyproject.toml", "hatch_build.py", "constraints.txt", "README.md", "LICENSE", "tune_offload.pth"}
    assert wanted - {LIBRARY} <= held
    assert LIBRARY not in held
    rebuilt = tmp_path / "rebuilt"
    (path,) = hatchling_wheel.WheelBuilder(str(root)).build(directory=str(rebuilt), versions=["standard"])
    assert names(Path(path)) == names(wheel)


@needs_compiler
def test_a_wheel_brings_the_cpu_kernel(wheel):
    assert LIBRARY in names(wheel)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/WHEEL"))
        lines = archive.read(metadata).decode().splitlines()
    assert "Root-Is-Purelib: false" in lines
    assert f"Tag: py3-none-{hatch_build.platform_tag()}" in lines


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"], ids=["missing", "failing"])
def test_without_a_working_compiler_a_pure_wheel_is_built_and_says_so(tmp_path, monkeypatch, capsys, compiler):
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "tune_offload.pth"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("offload", "recipes", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "_adamw.*"))
    monkeypatch.setenv("CC", compiler)
    (path,) = hatchling_wheel.WheelBuilder(str(tmp_path)).build(directory=str(tmp_path / "dist"), versions=["standard"])
    assert Path(path).name == wheel_name("any")
    assert LIBRARY not in names(Path(path))
    said = capsys.readouterr()
    assert "without its CPU kernel" in said.out + said.err


def test_an_editable_wheel_points_here_and_brings_the_hook(tmp_path):
    (path,) = hatchling_wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])
    assert names(Path(path)) == {"_tune_offload.pth", "tune_offload.pth"}
    with zipfile.ZipFile(path) as archive:
        assert archive.read("_tune_offload.pth").decode().split() == [str(ROOT)]
        # Python runs .pth files in alphabetical order; the hook needs what the other makes importable.
        assert sorted(names(Path(path)))[0] == "_tune_offload.pth"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A bare environment with the wheel and none of its dependencies; returns a function that runs in it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        pytest.skip("this environment has no pip")
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV"))}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        program = [str(folder / "venv/bin" / command[0]), *command[1:]]
        return subprocess.run(program, cwd=folder, env=clean, capture_output=True, text=True, timeout=60)

    return run


def test_an_installed_wheel_finds_its_recipes_and_configs(installed):
    program = "from offload.cli import registry as r; print(r.recipes_dir(), r.configs_dir(), sep='\\n')"
    recipes, configs = (Path(line) for line in installed("python", "-c", program).stdout.splitlines())
    assert recipes.parts[-3:] == ("site-packages", "offload", "recipes")
    assert configs.parts[-3:] == ("site-packages", "offload", "configs")


@pytest.mark.parametrize("command", [("tune",), ("tune-offload",), ("python", "-m", "offload")])
def test_an_installed_wheel_answers_under_its_three_names(installed, command):
    config = next(iter(sorted((ROOT / "configs").glob("*.yaml"))))
    done = installed(*command, "cat", config.stem)
    assert (done.returncode, done.stdout, done.stderr) == (0, config.read_text(), "")


def test_an_installed_wheel_starts_its_hook(installed):
    done = installed("python", "-c", "import sys; print('offload._startup' in sys.modules)")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_constraints_pin_every_direct_dependency_within_its_range():
    requirements = pytest.importorskip("packaging.requirements")
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has the parser")
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = requirements.Requirement(line)
            (only,) = requirement.specifier
            assert only.operator == "==", line
            pinned[_canonical(requirement.name)] = only.version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = requirements.Requirement(line)
        assert requirement.specifier.contains(pinned[_canonical(requirement.name)]), line


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")

"""scripts/pack_wheels.py on made-up wheels; nothing is fetched."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pack_wheels
import pytest
from pack_wheels import MIB, WANTED, NotPacked, keeps_backend, pack, pinned, repack

ROOT = Path(__file__).parents[1]

LIBRARIES = ("cuda118", "cuda128", "cuda130", "cuda132", "rocm64", "xpu2025")


MODULE = b"""
from pathlib import Path
libraries = sorted(path.name for path in Path(__file__).parent.glob("*.so"))
"""


def make_wheel(folder: Path, name: str = "bitsandbytes", tag: str = "py3-none-manylinux_2_24_x86_64") -> Path:
    """With a module that tells which libraries lie beside it."""
    path, info = folder / f"{name}-1.2-{tag}.whl", f"{name}-1.2.dist-info"
    files = {
        f"{name}/__init__.py": MODULE,
        f"{name}/libbitsandbytes_cpu.so": b"c" * 1000,
        **{f"{name}/lib{name}_{library}.so": library.encode() * 100_000 for library in LIBRARIES},
        f"{name}/other_cuda118.so": b"not one of them",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
    }
    rows = []
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            entry = zipfile.ZipInfo(file, (2020, 2, 3, 4, 5, 6))
            entry.external_attr = (0o755 if file.endswith(".so") else 0o644) << 16
            archive.writestr(entry, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append(f"{file},sha256={digest},{len(content)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return path


def test_only_the_wanted_library_stays_and_the_record_says_so(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        before = {info.filename: (info, archive.read(info)) for info in archive.infolist()}
    size = wheel.stat().st_size
    assert repack(wheel, keeps_backend("13.0")) == len(LIBRARIES) - 1
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        gone = {f"bitsandbytes/libbitsandbytes_{library}.so" for library in LIBRARIES if library != "cuda130"}
        assert set(names) == before.keys() - gone and len(names) == len(set(names))
        for info in archive.infolist():
            if not info.filename.endswith("RECORD"):
                assert archive.read(info) == before[info.filename][1]
                assert info.external_attr == before[info.filename][0].external_attr
        rows = list(csv.reader(archive.read("bitsandbytes-1.2.dist-info/RECORD").decode().splitlines()))
        assert {row[0] for row in rows} == set(names)
        for name, digest, length in rows:
            if name.endswith("RECORD"):
                assert (digest, length) == ("", "")
                continue
            content = archive.read(name)
            found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert digest == f"sha256={found}" and int(length) == len(content)
    assert wheel.stat().st_size < size / 4 and [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_a_repacked_wheel_can_be_installed(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, tag="py3-none-any")
    repack(wheel, keeps_backend("12.8"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
    subprocess.run([*install, str(tmp_path / "site"), str(wheel)], check=True, capture_output=True)
    program = "import bitsandbytes; print(*bitsandbytes.libraries)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["libbitsandbytes_cpu.so", "libbitsandbytes_cuda128.so", "other_cuda118.so"]


def test_a_wheel_of_which_all_stays_is_not_touched(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, name="torchao")
    before = wheel.read_bytes()
    assert repack(wheel, keeps_backend("13.0")) == 0 and wheel.read_bytes() == before


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Made-up wheels in place of fetched ones; what was asked for."""
    asked: list[str] = []

    def fetch(requirement: str, folder: Path, python: str) -> Path:
        asked.append(requirement)
        name = re.split("[=<>]", requirement)[0].replace("-", "_")
        if name == "absent":
            raise NotPacked(f"{requirement}: there is no wheel for Python {python}")
        return make_wheel(folder, name)

    monkeypatch.setattr(pack_wheels, "fetch", fetch)
    return asked


def test_packs_and_tells_sizes(tmp_path: Path, fetched: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "old-1-py3-none-any.whl").touch()
    assert pack_wheels.main([str(folder), "bitsandbytes", "torchao==0.17.0"]) == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"{name}-1.2-py3-none-manylinux_2_24_x86_64.whl" for name in ("bitsandbytes", "torchao")]
    assert fetched[0].startswith("bitsandbytes==") and fetched[1] == "torchao==0.17.0"
    said = capsys.readouterr().out
    total = sum(path.stat().st_size for path in folder.iterdir()) / MIB
    assert f"{total:6.2f} MiB  in 2 wheels, of 64" in said and "5 libraries of other devices left out" in said
    with zipfile.ZipFile(folder / names[0]) as small, zipfile.ZipFile(folder / names[1]) as whole:
        assert len(whole.namelist()) == len(small.namelist()) + 5


def test_what_is_too_large_or_missing_leaves_the_folder_alone(
    tmp_path: Path, fetched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old-1-py3-none-any.whl").touch()
    assert pack_wheels.main([str(tmp_path), "torchao", "--limit-mib", "0.1"]) == 1
    assert "are more than 0.1" in capsys.readouterr().err
    assert pack_wheels.main([str(tmp_path), "absent", "torchao", "absent==2"]) == 1
    said = capsys.readouterr()
    assert said.err.count("no wheel for Python 3.12") == 2 and "torchao-1.2" in said.out
    assert [path.name for path in tmp_path.iterdir()] == ["old-1-py3-none-any.whl"]


class Pip:
    """Stands in for pip: each command leaves a wheel of the given name, or none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, download: str | None, wheel: str | None) -> None:
        self.commands: list[list[str]] = []
        self.leaves = {"download": download, "wheel": wheel}
        self.folder = folder
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        name = self.leaves["download" if "download" in command else "wheel"]
        if name:
            (self.folder / name).touch()
        return subprocess.CompletedProcess(command, 0 if name else 1, "", "" if name else "pip says no\n")


def test_fetches_for_the_other_python_and_builds_what_has_no_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip(monkeypatch, tmp_path, "a-1-cp312-cp312-manylinux_2_28_x86_64.whl", None)
    assert pack_wheels.fetch("a==1", tmp_path, "3.12").name == "a-1-cp312-cp312-manylinux_2_28_x86_64.whl"
    (command,) = pip.commands
    assert {"--python-version=3.12", "--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "a==1"} <= set(command)

    pip = Pip(monkeypatch, tmp_path, None, "b-1-py3-none-any.whl")
    assert pack_wheels.fetch("b", tmp_path, "3.12").name == "b-1-py3-none-any.whl" and len(pip.commands) == 2

    Pip(monkeypatch, tmp_path, None, "c-1-cp311-cp311-linux_x86_64.whl")
    with pytest.raises(NotPacked, match="pip says no(.|\n)*runs on this machine's Python alone"):
        pack_wheels.fetch("c", tmp_path, "3.12")
    assert not list(tmp_path.glob("c-*"))


def test_versions_are_those_of_the_constraints() -> None:
    constraints = "a-b==1.2 ; python_version >= '3.11'\n# c==9\nd==3\n"
    assert pinned(["A_b", "a-b>=1", "d==2", "e"], constraints) == ["A_b==1.2", "a-b>=1", "d==2", "e"]
    text = (ROOT / "constraints.txt").read_text()
    assert all("==" in requirement for requirement in pinned(WANTED, text))


PRESENT = [
    "torch",
    "numpy",
    "pillow",
    "tqdm",
    "psutil",
    "pyyaml",
    "huggingface-hub",
    "safetensors",
    "sentencepiece",
    "tiktoken",
    "tokenizers",
    "regex",
    "typer",
    "requests",
    "urllib3",
    "lxml",
    "filelock",
    "packaging",
    "pandas",
    "pyarrow",
    "fsspec",
    "xxhash",
    "httpx",
    "protobuf",
    "click",
    "typing-extensions",
    "typing-inspection",
    "anyio",
]


def test_the_wanted_packages_have_all_that_they_need() -> None:
    """Beside what the machine has; by the metadata of what is installed here."""
    from packaging.requirements import Requirement

    for name in WANTED:
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed here")
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": "", "python_version": "3.12"}):
                assert pack_wheels.normal(need.name) in {*WANTED, *PRESENT}, (name, str(need))


def test_pack_takes_the_wanted_cuda(tmp_path: Path, fetched: list[str]) -> None:
    (wheel,) = pack(["bitsandbytes"], tmp_path, python="3.12", cuda="12.8", limit_mib=1.0)
    with zipfile.ZipFile(wheel) as archive:
        found = {re.search("_([a-z]+[0-9]+)[.]so", name) for name in archive.namelist()} - {None}
    assert {match[1] for match in found if match} == {"cuda128", "cuda118"}  # the latter of another file

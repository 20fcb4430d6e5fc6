"""Packs the wheels that a GPU machine without a network lacks into one folder, small enough to be carried there.

    python scripts/pack_wheels.py outputs/wheels                      # what the suite wants, as constraints.txt has it
    python scripts/pack_wheels.py outputs/wheels torchao bitsandbytes==0.50.2        # other packages or versions
    python scripts/pack_wheels.py outputs/wheels --python 3.11 --cuda 12.8 --limit-mib 40

There, from the checkout, with a Python that has torch, numpy and what transformers needs:

    python3 -m pip install --no-index --no-deps --target site outputs/wheels/*.whl
    PYTHONPATH=site python3 scripts/gpu_suite.py

Wheels are those of Linux on x86-64. Of a package without one that runs anywhere a wheel is built here. Of bitsandbytes,
which has a library for each CUDA, ROCm and XPU, only that of the wanted CUDA is kept, and the CPU's.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

WANTED = [
    "transformers",  # what a machine has may be older than what the models need
    "torchtune",
    "torchao",
    "torchdata",
    "omegaconf",
    "datasets",
    "dill",
    "multiprocess",
    "kagglehub",
    "kagglesdk",
    "blobfile",
    "pycryptodomex",
    "bitsandbytes",
    "wandb",
    "cwevals",
    "distro",
    "sniffio",
    "platformdirs",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "opentelemetry-proto",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-exporter-otlp-proto-common",
    "opentelemetry-exporter-otlp-common",
    "opentelemetry-exporter-http-transport",
    "googleapis-common-protos",
]
"""Everything of transformers, torchtune, torchao, bitsandbytes, omegaconf and wandb, with their needs, that does not
come with torch, numpy, tokenizers, huggingface_hub, sentencepiece, tiktoken, pandas, pyarrow and requests."""

LIMIT_MIB = 64.0
MIB = 2**20

GLIBC = (39, 38, 37, 36, 35, 34, 31, 28, 27, 24, 17, 12, 5)
"""Minor versions that wheels are tagged with; pip takes them one by one."""

BACKEND = re.compile(r"bitsandbytes/libbitsandbytes_(cuda|rocm|xpu)\d+\.(so|dll|dylib)")


class NotPacked(RuntimeError):
    """A package could not be had, or all are too large."""


def pinned(names: Sequence[str], constraints: str) -> list[str]:
    """Requirements: a name without a version gets that of the constraints, if they have one."""
    versions = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", constraints, re.MULTILINE))
    by_name = {normal(name): version for name, version in versions.items()}
    return [name if re.search("[=<>~]", name) or normal(name) not in by_name else f"{name}=={by_name[normal(name)]}"
            for name in names]  # fmt: skip


def normal(name: str) -> str:
    """A package's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def fetch(requirement: str, folder: Path, python: str) -> Path:
    """A wheel for that Python on Linux, x86-64; built here where there is none and it then runs anywhere.

    Raises:
        NotPacked: there is neither.
    """
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += [f"--platform=manylinux{name}_x86_64" for name in ("2014", "2010", "1")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    binary = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    said = ""
    for command in (
        [*pip, "download", "--quiet", "--no-deps", *binary, f"--dest={folder}", requirement],
        [*pip, "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}", requirement],
    ):
        before = set(folder.glob("*.whl"))
        done = subprocess.run(command, capture_output=True, text=True)
        said += done.stderr
        for wheel in set(folder.glob("*.whl")) - before:
            if "download" in command or wheel.name.endswith("-none-any.whl"):
                return wheel
            wheel.unlink()
            said += f"what was built here, {wheel.name}, runs on this machine's Python alone\n"
    raise NotPacked(f"{requirement}: there is no wheel for Python {python}\n{said.strip()}")


def repack(wheel: Path, keeps: Callable[[str], bool]) -> int:
    """Leave files out of a wheel; what stays is compressed, and its RECORD says what there is.

    Args:
        wheel: is replaced.
        keeps: whether to keep the file of that name.

    Returns:
        The number of files that were left out.
    """
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if not info.is_dir()]
        (record,) = [info for info in members if re.fullmatch(r"[^/]+\.dist-info/RECORD", info.filename)]
        kept = [info for info in members if keeps(info.filename) or info is record]
        if len(kept) == len(members):
            return 0
        draft = wheel.with_suffix(".part")
        rows = []
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as smaller:
            for info in kept:
                if info is record:
                    continue
                content = archive.read(info)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                rows.append((info.filename, f"sha256={digest}", len(content)))
                smaller.writestr(copied(info), content)
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([*rows, (record.filename, "", "")])
            smaller.writestr(copied(record), text.getvalue())
    draft.replace(wheel)
    return len(members) - len(kept)


def copied(info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """The same name, date and permissions, to be compressed."""
    same = zipfile.ZipInfo(info.filename, info.date_time)
    same.external_attr, same.compress_type = info.external_attr, zipfile.ZIP_DEFLATED
    return same


def keeps_backend(cuda: str) -> Callable[[str], bool]:
    """Of bitsandbytes' libraries for devices, that of one CUDA, such as 13.0; of everything else all."""
    wanted = f"cuda{cuda.replace('.', '')}."
    return lambda name: BACKEND.fullmatch(name) is None or f"_{wanted}" in name


def pack(requirements: Sequence[str], output: Path, *, python: str, cuda: str, limit_mib: float) -> list[Path]:
    """Fetch all wheels, leave out what is not wanted, and put them into the folder.

    Raises:
        NotPacked: for the packages that could not be had, and if all together are larger than the limit.
    """
    output.mkdir(parents=True, exist_ok=True)
    wheels, problems = [], []
    with tempfile.TemporaryDirectory(dir=output) as name:
        for requirement in requirements:
            try:
                wheel = fetch(requirement, Path(name), python)
            except NotPacked as error:
                problems.append(str(error))
                continue
            before = wheel.stat().st_size
            left_out = (
                repack(wheel, keeps_backend(cuda)) if normal(wheel.name.partition("-")[0]) == "bitsandbytes" else 0
            )
            size = wheel.stat().st_size
            note = f" (was {before / MIB:.1f}: {left_out} libraries of other devices left out)" if left_out else ""
            print(f"{size / MIB:6.2f} MiB  {wheel.name}{note}", flush=True)
            wheels.append(wheel)
        total = sum(wheel.stat().st_size for wheel in wheels) / MIB
        print(f"{total:6.2f} MiB  in {len(wheels)} wheels, of {limit_mib:g}")
        if problems:
            raise NotPacked("\n".join(problems))
        if total > limit_mib:
            raise NotPacked(f"{total:.1f} MiB are more than {limit_mib:g}; name fewer packages")
        for old in output.glob("*.whl"):
            old.unlink()
        return [wheel.replace(output / wheel.name) for wheel in wheels]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="gets the wheels, in place of any that it has")
    parser.add_argument("packages", nargs="*", default=WANTED, help="with or without versions; default: what is wanted")
    parser.add_argument("--python", default="3.12", help="version of the Python that will use them")
    parser.add_argument("--cuda", default="13.0", help="version of the CUDA that its torch was built with")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB)
    options = parser.parse_args(arguments)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    try:
        pack(
            pinned(options.packages, constraints),
            options.folder,
            python=options.python,
            cuda=options.cuda,
            limit_mib=options.limit_mib,
        )
    except NotPacked as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

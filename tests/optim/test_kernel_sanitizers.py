"""The kernel under the compiler's sanitizers: addresses, undefined behaviour, and races between its threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import hatch_build

DRIVER = Path(__file__).with_name("kernel_sanitizers.c")

SANITIZERS = {
    "address-and-undefined": ["-fsanitize=address,undefined,float-cast-overflow"],
    "thread": ["-fsanitize=thread"],
}


def sanitizer_flags(name: str) -> list[str]:
    return [*SANITIZERS[name], "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1"]


def build(name: str, folder: Path) -> Path:
    """The driver with the kernel in it; skips where the compiler has no such sanitizer."""
    try:
        command = hatch_build.compiler()
    except hatch_build.NoCompiler as error:
        pytest.skip(str(error))
    trivial = folder / "trivial.c"
    trivial.write_text("int main(void) { return 0; }\n")
    can_build = [*command, *sanitizer_flags(name), str(trivial), "-o", str(folder / "trivial")]
    if subprocess.run(can_build, capture_output=True).returncode or subprocess.run([folder / "trivial"]).returncode:
        pytest.skip(f"{command[0]} has no sanitizers here")
    program = folder / "kernel_sanitizers"
    flags = [*hatch_build.FLAGS, *sanitizer_flags(name), f"-I{hatch_build.KERNELS}"]
    hatch_build.compile_library(program, flags, (str(DRIVER),))
    return program


@pytest.mark.parametrize("name", SANITIZERS)
def test_every_loop_under_a_sanitizer(name, tmp_path):
    program = build(name, tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("abi ")

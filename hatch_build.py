"""Compiles the CPU kernel of the packed AdamW, for wheels and for editable installs.

The library lies beside its sources, in ``offload/optim/kernels``. It is plain C behind a C interface, so one wheel
(``py3-none-<platform>``) serves every Python and every PyTorch. Where there is no C compiler the package is built
without it, as ``py3-none-any``, and runs on PyTorch's operations.

``python hatch_build.py`` builds the library in a checkout. ``CC`` names another compiler than cc, gcc or clang.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, without the build backend
    BuildHookInterface = object

KERNELS = Path(__file__).parent / "offload/optim/kernels"
LIBRARY = KERNELS / ("_adamw.dylib" if sys.platform == "darwin" else "_adamw.so")

FLAGS = [
    *("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"),
    # The same bits from every instruction set: a product and a sum are rounded one after the other.
    "-ffp-contract=off",
    # Square roots and conditionals become vector instructions, whose results are the same: what is given up is
    # errno and the order of floating-point exceptions. Nothing here allows a different result, as -ffast-math does.
    *("-fno-math-errno", "-fno-trapping-math"),
    # `#pragma omp simd` alone, which needs no OpenMP library.
    "-fopenmp-simd",
]

X86_LEVELS = {
    "v3": ["-march=x86-64-v3", "-mtune=icelake-server"],
    "v4": ["-march=x86-64-v4", "-mtune=icelake-server", "-mprefer-vector-width=512"],
}
"""Instruction sets for which adamw.c is compiled beside the compiler's default. Tuned for a processor that has the
larger one, 8-bit formats are 1 to 2 % faster on others too than with the compiler's generic costs."""


class NoCompiler(RuntimeError):
    """There is no C compiler, or it refused."""


def compiler() -> list[str]:
    """The command of the C compiler.

    Raises:
        NoCompiler: there is none.
    """
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise NoCompiler("no C compiler (cc, gcc or clang; or name one in CC)")


def compile_library(output: Path, flags: list[str] = FLAGS, link: tuple[str, ...] = ("-shared",)) -> None:
    """Compile the kernel, for every instruction set that the compiler knows, and link it.

    Args:
        output: the file to write; it appears when it is complete.
        flags: for every source.
        link: for the linker, such as further objects.

    Raises:
        NoCompiler: there is none, or it failed.
    """
    command = compiler()
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as folder:
        objects: list[str] = []

        def compile_source(name: str, suffix: str, *more: str) -> str:
            """Add an object; what went wrong, or nothing."""
            target = f"{folder}/{name}-{suffix}.o"
            failure = _run([*command, *flags, *more, "-c", str(KERNELS / f"{name}.c"), "-o", target])
            if not failure:
                objects.append(target)
            return failure

        levels = X86_LEVELS if platform.machine().lower() in ("x86_64", "amd64") else {}
        known = [level for level in levels if not compile_source("adamw", level, f"-DISA={level}", *levels[level])]
        failure = (
            compile_source("adamw", "baseline", "-DISA=baseline")
            or compile_source("entry", "all", *(f"-DWITH_{level.upper()}" for level in known))
            or compile_source("pool", "all")
        )
        if failure:
            raise NoCompiler(failure)
        whole = f"{folder}/{output.name}"
        if failure := _run([*command, *flags, *objects, *link, "-lm", "-o", whole]):
            raise NoCompiler(failure)
        os.replace(whole, output)


def _run(command: list[str]) -> str:
    """What went wrong, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() or f"{command[0]} failed" if done.returncode else ""


def build() -> str:
    """Compile the library beside its sources unless it is newer than they are; what was done, in words.

    Raises:
        NoCompiler: there is none, or it failed.
    """
    newest = max(path.stat().st_mtime for path in (*KERNELS.glob("*.[ch]"), Path(__file__)))
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > newest:
        return f"{LIBRARY} is up to date"
    compile_library(LIBRARY)
    return f"compiled {LIBRARY}"


def platform_tag() -> str:
    """The wheel's platform: this machine, for this machine's processor alone."""
    tag = sysconfig.get_platform().replace("universal2", platform.machine())
    return tag.replace("-", "_").replace(".", "_")


class CustomBuildHook(BuildHookInterface):
    """Hatchling calls it before it builds a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            build()
        except NoCompiler as error:
            LIBRARY.unlink(missing_ok=True)  # an older one may disagree with the sources
            self.app.display_warning(f"tune-offload is built without its CPU kernel, and slower for it: {error}")
            return
        if version == "standard":
            build_data["artifacts"].append(f"/offload/optim/kernels/{LIBRARY.name}")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"


if __name__ == "__main__":
    try:
        print(build())
    except NoCompiler as error:
        sys.exit(str(error))

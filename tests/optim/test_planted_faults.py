"""Faults planted in a copy of the optimizer, each of which must turn a test red."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("test_adamw.py", "test_cpu_kernel.py")

FAULTS = {
    "bias correction off by one": ("adamw.py", "(1 - beta1**step)", "(1 - beta1 ** (step + 1))"),
    "first moment's correction on the second": ("adamw.py", "sqrt(1 - beta2**step)", "sqrt(1 - beta1**step)"),
    "decay coupled": ("adamw.py", "_coupled = False", "_coupled = True"),
    "scale's sign lost": ("adamw.py", 'gscale=-factor if group["maximize"] else factor', "gscale=factor"),
    "rounding bits of another step": ("adamw.py", "random_key(seed, step, 0)", "random_key(seed, 0, 0)"),
    "rounding bits reused": ("formats.py", "2 * step + purpose", "2 * step"),
    "eps inside the root": ("kernels/adamw.c", "(sqrtf(new.v) + c->eps)", "sqrtf(new.v + c->eps)"),
    "remainder dropped": ("kernels/adamw.c", "(as_bits(even) & 0xffff) | as_bits(odd) << 16", "0"),
    "24 bits cut off instead of rounded": ("kernels/adamw.c", "as_bits(even) + (random.even >> 8)", "as_bits(even)"),
    "8 bits unsigned": ("kernels/adamw.c", "(uint32_t)lower8[j] * 256", "(uint32_t)(uint8_t)lower8[j] * 256"),
    "remainder unsigned": ("kernels/adamw.c", "((lower & 0xffff) ^ 0x8000) - 0x8000", "(lower & 0xffff)"),
    "master cut off instead of rounded": (
        "kernels/adamw.c",
        "store_half_away(b->p, j, even, odd)",
        "store_upper(b->p, j, even, odd, 0, 0)",
    ),
    "scale of the wrong block": ("kernels/adamw.c", "b.v_scale++;", ""),
    "roots below the smallest code are zero": ("kernels/adamw.c", "if (width && lowest > least)", "if (0)"),
    "zero as the least root": ("kernels/adamw.c", "least || !top ? least : least_but_zero(w)", "least"),
    "width of steps forgotten": ("kernels/adamw.c", "8 * width + 7 >= 7 * before", "0"),
    "roots rounded down": ("kernels/adamw.c", "* e->step) + threshold) >> 16", "* e->step)) >> 16"),
    "moments taken for ratios": ("adamw.py", "has_ratios=float(has_ratios)", "has_ratios=1.0"),
    "codes of before taken for today's": (
        "interchange.py",
        "kind in (codes.RATIOS, codes.MOMENTS)",
        "kind is not None",
    ),
    "what a ratio loses is lost": ("adamw.py", "lr * bc2_sqrt * codes.ahead(beta1)", "0.0 * codes.ahead(beta1)"),
    "what a moment loses is given back": (
        "adamw.py",
        'is_corrected = has_ratios and group["state_dtype"]',
        'is_corrected = group["state_dtype"]',
    ),
    "what the new codes add is left out": ("kernels/adamw.c", "new.ahead * m_odd.value", "0"),
    "ninth bit lost": ("kernels/adamw.c", "v_even | (m_even & 1)", "v_even"),
    "ninth bit taken for the root's": ("kernels/adamw.c", "decode_root(v & 254, &old)", "decode_root(v & 255, &old)"),
    "same random bits for neighbours": (
        "kernels/adamw.c",
        "odd, random.even, random.odd",
        "odd, random.odd, random.odd",
    ),
    "start of a range ignored": ("kernels/adamw.c", "(uint64_t)(t->start + begin)", "(uint64_t)begin"),
    "square of the gradient scaled once": ("kernels/adamw.c", "(c->w2 * c->gscale) * c->gscale", "c->w2 * c->gscale"),
    "codes of the next block": ("kernels/adamw.c", "&before, &waiting[(i - 1) % 2]", "&before, &waiting[i % 2]"),
    "parameters of the next block": (
        "kernels/adamw.c",
        "encode_block(param, &numbers, &before, &waiting[(i",
        "encode_block(param, &numbers, &b, &waiting[(i",
    ),
    "NaN as a scale": ("kernels/adamw.c", "if (larger(largest_first, top) >= INFINITE)", "if (0)"),
    "infinity as a scale": ("kernels/adamw.c", "bits < INFINITE ? bits : 0", "bits <= INFINITE ? bits : 0"),
    "a range's last block left out": ("kernels/pool.c", "*end = taken + length;", "*end = taken + length - 1;"),
    "last short block left out": ("kernels/adamw.c", "if (!rest)", "if (rest < BLOCK)"),
}


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    tests = [str(folder / "tests/optim" / name) for name in TESTS]
    return subprocess.run([*command, *tests], cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def copy(folder: Path) -> None:
    for name in ("offload/optim", "offload/engine", "tests/optim"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "_adamw.*"))
    for path in [*(ROOT / "offload").glob("*.py"), ROOT / "pyproject.toml", ROOT / "hatch_build.py"]:
        shutil.copy(path, folder / path.relative_to(ROOT))


def compile_kernel(folder: Path) -> None:
    subprocess.run([sys.executable, "hatch_build.py"], cwd=folder, check=True, capture_output=True, timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_turns_a_test_red(fault: str, tmp_path: Path) -> None:
    copy(tmp_path)
    name, right, wrong = FAULTS[fault]
    path = tmp_path / "offload/optim" / name
    source = path.read_text(encoding="utf-8")
    assert source.count(right) >= 1, f"{name} no longer has {right!r}"
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    compile_kernel(tmp_path)
    done = run(tmp_path)
    red = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert done.returncode == 1 and red, done.stdout[-3000:] + done.stderr[-2000:]
    print(f"{fault}: {red[0]}")


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
def test_without_a_fault_they_are_green(tmp_path: Path) -> None:
    copy(tmp_path)
    compile_kernel(tmp_path)
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]

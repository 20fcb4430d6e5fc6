"""The packed optimizers with the Triton kernel against the same with the C kernel: whole steps, every bit of the state.

Natively where there is a GPU, on tensors as large as a model's; through Triton's interpreter elsewhere, on small ones.
``test_triton_kernel.py`` compares single updates with the reference.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.optim import cpu
from offload.optim.adamw import Adam, AdamW
from offload.optim.formats import MASTERS, STATE_DTYPES

pytest.importorskip("triton", reason="triton has no build for this platform")

ROOT = Path(__file__).parents[2]
STEPS = 3

LARGE = ((4096, 4096), (2048, 11008), (4096,), (300, 7), (1,))
SMALL = ((5, 257), (1,))

FORMATS = [("fp32", state, "none") for state in STATE_DTYPES]
FORMATS += [("bf16", state, master) for state in STATE_DTYPES for master in MASTERS]
COUPLED = [("bf16", "int8", "split"), ("fp32", "fp32", "none")]
CASES = [("AdamW", *one) for one in FORMATS] + [("Adam", *one) for one in COUPLED]

Result = list[dict[str, Tensor]]


def train(case: tuple[str, str, str, str], shapes: tuple[tuple[int, ...], ...], device: str) -> Result:
    """Weights and states after some steps, one of them with scaled gradients; on the CPU."""
    name, dtype, state_dtype, master = case
    draw = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], scale: float) -> Tensor:
        sizes = 10.0 ** torch.randint(-4, 1, (shape[0],), generator=draw).view(-1, *[1] * (len(shape) - 1))
        x = scale * torch.randn(shape, generator=draw) * sizes
        return x.to(torch.bfloat16 if dtype == "bf16" else torch.float32).to(device)

    params = [nn.Parameter(random(shape, 0.5)) for shape in shapes]
    kind = {"Adam": Adam, "AdamW": AdamW}[name]
    optimizer = kind(params, lr=1e-2, weight_decay=0.1, state_dtype=state_dtype, master=master, seed=7)  # type: ignore[arg-type]
    for step in range(STEPS):
        for param in params:
            param.grad = random(tuple(param.shape), 0.1)
        optimizer.gradient_scale = torch.tensor(0.3, device=device) if step == 1 else None
        optimizer.step()
    states = [{key: value.cpu() for key, value in optimizer.state[param].items()} for param in params]
    return [{"param": param.detach().cpu(), **state} for param, state in zip(params, states, strict=True)]


PROGRAM = """
import sys, torch
sys.path[:0] = [{root!r}, {tests!r}]
import test_native_kernel as tests
from offload.optim import cpu, triton_kernel
cpu.update = triton_kernel.update
torch.save({{case: tests.train(case, tests.SMALL, "cpu") for case in tests.CASES}}, {path!r})
"""
"""In a process of its own: once interpreted, Triton's language cannot be compiled any more."""

Trained = Callable[[Any], tuple[Result, tuple[tuple[int, ...], ...]]]


@pytest.fixture(
    scope="module",
    params=[
        "interpreter",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """What training with the Triton kernel gives, and on which shapes."""
    if request.param == "cuda":
        yield lambda case: (train(case, LARGE, "cuda"), LARGE)
        return
    path = tmp_path_factory.mktemp("interpreter") / "trained.pt"
    program = PROGRAM.format(root=str(ROOT), tests=str(Path(__file__).parent), path=str(path))
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", program]  # numpy says what masked elements do
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = torch.load(path)
    yield lambda case: (results[case], SMALL)


def bits_of(x: Tensor) -> Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_whole_steps_give_the_bits_of_the_c_kernel(trained: Trained, case: tuple[str, str, str, str]) -> None:
    if cpu.load() is None:
        pytest.skip("the C kernel is not compiled: python hatch_build.py")
    got, shapes = trained(case)
    wanted = train(case, shapes, "cpu")
    for shape, mine, theirs in zip(shapes, got, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            different = (bits_of(mine[key]) != bits_of(value)).flatten().nonzero().flatten()
            assert not len(different), (shape, key, different[:5].tolist(), len(different))

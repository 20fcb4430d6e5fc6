"""The Triton kernel gives the reference's bits: through Triton's interpreter everywhere, natively where there is a GPU.

The reference runs on the CPU either way.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.optim import codes, reference
from offload.optim.formats import (
    BLOCK,
    PARAM_KINDS,
    STATE_DTYPES,
    Constants,
    Item,
    Kind,
    f32,
    random_bits,
    split_master,
    split_master24,
)

triton = pytest.importorskip("triton", reason="triton has no build for this platform")

ROOT = Path(__file__).parents[2]
KINDS = [Kind(param, state, coupled) for param in PARAM_KINDS for state in STATE_DTYPES for coupled in (False, True)]
NAN_OF_CUDA = 0x7FFFFFFF
TILE = 4 * BLOCK
"""Elements of the larger of the two tiles."""


SERVER = """
import pickle, sys
from offload.optim import triton_kernel

launches = []
triton_kernel._update.add_pre_run_hook(lambda table, numbers, count, _, **options: launches.append((count, options)))
answers, sys.stdout = sys.stdout.buffer, sys.stderr
while True:
    try:
        name, arguments = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    launches.clear()
    try:
        reply = getattr(triton_kernel, name)(*arguments)
    except Exception as error:
        reply = error
    pickle.dump((reply, arguments, launches), answers)
    answers.flush()
"""
"""Calls what it is told to; answers with the result, the arguments as they are then, and what was launched."""


class Native:
    """The kernels on a GPU."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        from offload.optim import triton_kernel

        self.kernel = triton_kernel
        self.launches: list[tuple[int, dict[str, Any]]] = []

    def update(self, items: Sequence[Item], scale: Tensor | None = None) -> None:
        def hook(table: Tensor, numbers: Tensor, count: int, scale: Tensor | None, **options: Any) -> None:
            self.launches.append((count, options))

        self.launches.clear()
        self.kernel._update.pre_run_hooks.append(hook)
        try:
            self.kernel.update(items, scale)
        finally:
            self.kernel._update.pre_run_hooks.remove(hook)


class Interpreter:
    """The kernels in a process of its own: once interpreted, Triton's language cannot be compiled any more."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.launches: list[tuple[int, dict[str, Any]]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore::RuntimeWarning", "-c", SERVER],  # numpy says what masked elements do
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1"},
        )

    def _call(self, name: str, *arguments: Any) -> tuple[Any, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        pickle.dump((name, arguments), self.process.stdin)
        self.process.stdin.flush()
        reply, arguments, self.launches = pickle.load(self.process.stdout)
        if isinstance(reply, Exception):
            raise reply
        return reply, arguments

    def update(self, items: Sequence[Item], scale: Tensor | None = None) -> None:
        _, (updated, _) = self._call("update", items, scale)
        for mine, other in zip(items, updated, strict=True):
            for target, source in zip(mine, other, strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


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
def place(request: pytest.FixtureRequest) -> Iterator[Native | Interpreter]:
    if request.param == "cuda":
        yield Native()
        return
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


def constants_of(
    kind: Kind, beta1: float = 0.9, lr: float = 1e-3, gscale: float = 1.0, has_ratios: float = 1.0
) -> Constants:
    decay = 0.1
    return Constants(
        gscale=gscale,
        l2=decay if kind.coupled else 0.0,
        decay=1.0 if kind.coupled else 1 - lr * decay,
        beta1=beta1,
        w1=1 - beta1,
        beta2=0.999,
        w2=1 - 0.999,
        eps=1e-8,
        step_size=lr / (1 - beta1**3),
        bc2_sqrt=(1 - 0.999**3) ** 0.5,
        eps_before=0.8e-8,
        has_ratios=has_ratios,
        ahead=6e-3 * lr / 1e-3 * has_ratios if kind.state == "int8" else 0.0,
    )


def values(count: int, seed: int, size: float) -> Tensor:
    """fp32; the second block is zeros, the third subnormal, and what follows has many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = size * torch.randn(count, generator=generator) * 10.0 ** torch.randint(-6, 1, (count,), generator=generator)
    x[BLOCK : 2 * BLOCK] = 0
    x[2 * BLOCK : 3 * BLOCK] *= 1e-36 / size
    return x


def item_of(kind: Kind, count: int, seed: int = 0, start: int = 0, **constants: float) -> Item:
    """On the CPU."""
    p, g, m, v = values(count, seed, 1), values(count, seed + 1, 0.1), values(count, seed + 2, 0.1), None
    v = values(count, seed + 3, 0.1).square()
    m_scale = v_scale = remainder = None
    dtype = torch.float32 if kind.param == "fp32" else torch.bfloat16
    if kind.param == "split":
        p, remainder = split_master(p)
    elif kind.param == "split24":
        p, remainder = split_master24(p, random_bits(0, count, seed, p.device))
    if kind.state == "bf16":
        m, v = m.bfloat16(), v.bfloat16()
    elif kind.state != "fp32":
        ratio, root = m * 30, v.sqrt()
        m, v = torch.zeros(count, dtype=torch.int8), torch.zeros(count, dtype=torch.uint8)
        m_scale, v_scale = torch.zeros(2, -(-count // BLOCK))
        how = 1e-8, constants.get("has_ratios", 1.0) != 0
        codes.encode(ratio, root, codes.thresholds(start, count, seed, m.device), m, m_scale, v, v_scale, *how)
    keys = (2654435761 * (seed + 1)) % 2**32, (2246822519 * (seed + 7)) % 2**32
    return Item(
        kind, p.to(dtype), g.to(dtype), m, v, m_scale, v_scale, remainder, start, *keys, constants_of(kind, **constants)
    )


def copy(item: Item, device: torch.device | str = "cpu", offset: int = 0) -> Item:
    """A copy, whose tensors begin ``offset`` elements behind an aligned address."""

    def moved(tensor: Tensor) -> Tensor:
        room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
        return room[offset:].copy_(tensor)

    return Item(*(moved(field) if isinstance(field, Tensor) else field for field in item))


def bits_of(x: Tensor) -> Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same(got: Sequence[Item], wanted: Sequence[Item]) -> None:
    for index, (left, right) in enumerate(zip(got, wanted, strict=True)):
        for name, x, y in zip(Item._fields, left, right, strict=True):
            if isinstance(y, Tensor):
                different = (bits_of(x.cpu()) != bits_of(y)).nonzero()
                assert not len(different), (index, left.kind, name, different.flatten()[:5].tolist(), len(different))


def check(
    place: Native | Interpreter, items: Sequence[Item], scale: Tensor | None = None, offset: int = 0
) -> list[Item]:
    """Updates copies on the device and on the CPU and compares them; returns the device's."""
    wanted, got = [copy(item) for item in items], [copy(item, place.device, offset) for item in items]
    if scale is not None:
        factor = f32(float(scale))
        wanted = [
            i._replace(constants=i.constants._replace(gscale=f32(f32(i.constants.gscale) * factor))) for i in wanted
        ]
    reference.update(wanted)
    place.update(got, scale)
    for before, after in zip(items, wanted, strict=True):
        assert not before.param.numel() or not torch.equal(before.param, after.param)
    assert_same(got, wanted)
    return got


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_every_kind_gives_the_bits_of_the_reference(place: Native | Interpreter, kind: Kind) -> None:
    """One element, whole tiles, and an odd number; both starting points of torch.lerp; maximizing."""
    items = [
        item_of(kind, 1, seed=1),
        item_of(kind, TILE, seed=2, start=BLOCK, beta1=0.3, lr=1e-2),
        item_of(kind, TILE + 3 * BLOCK + 77, seed=3, gscale=-1.0),
    ]
    check(place, items)


def test_first_moments_that_are_no_ratios(place: Native | Interpreter) -> None:
    """Where beta2 is small."""
    check(place, [item_of(Kind("split", "int8", False), 5 * BLOCK + 3, seed=seed, has_ratios=0.0) for seed in (0, 5)])


def test_codes_after_many_steps(place: Native | Interpreter) -> None:
    """Rounded in every way: gradients of one size, of many within a block, and none."""
    item = item_of(Kind("split", "int8", False), 40 * BLOCK, seed=3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        gradient = torch.randn(40 * BLOCK, generator=generator) * 0.01
        gradient[: 20 * BLOCK] *= 10 ** (-9 * torch.rand(20 * BLOCK, generator=generator))
        gradient[torch.rand(40 * BLOCK, generator=generator) < 0.1] = 0
        item = check(place, [item._replace(grad=gradient.bfloat16())])[0]
        item = copy(item)


@pytest.mark.parametrize(
    "kind", [Kind("split", "bf16", False), Kind("fp32", "fp32", True), Kind("stochastic", "int8", True)]
)
def test_scale_of_the_gradients_is_read_on_the_device(place: Native | Interpreter, kind: Kind) -> None:
    scale = torch.tensor(0.3, dtype=torch.float64)
    check(place, [item_of(kind, 300, gscale=-3.0)], scale)
    check(place, [item_of(kind, 300)], scale.float().to(place.device))


@pytest.mark.parametrize("kind", [Kind("split", "int8", False), Kind("stochastic", "bf16", False)])
def test_addresses_need_no_alignment(place: Native | Interpreter, kind: Kind) -> None:
    check(place, [item_of(kind, 2 * TILE + 5), item_of(kind, 9)], offset=1)


@pytest.mark.parametrize("start", [2**32 - 2 * BLOCK, 2**33 + 3 * BLOCK, 2**40])
def test_random_bits_of_large_positions(place: Native | Interpreter, start: int) -> None:
    check(place, [item_of(Kind("stochastic", "bf16", False), 5 * BLOCK, start=start)])


def test_one_launch_for_each_kind(place: Native | Interpreter) -> None:
    """And of its own for tensors that are not aligned, whatever the order; none where there are no elements."""

    def launches() -> list[tuple[int, str, bool]]:
        return [(count, options["PARAM"], options["ALIGNED"]) for count, options in place.launches]

    kinds = Kind("split", "bf16", False), Kind("fp32", "bf16", False)
    sizes = (0, 5, 0, 0, 1030, 1, 2048, 700, 0)
    check(place, [item_of(kind, size, seed=size, start=BLOCK * size) for size in sizes for kind in kinds])
    assert launches() == [(len(sizes), "split", True), (len(sizes), "fp32", True)]

    aligned, other = item_of(kinds[0], 5), copy(item_of(kinds[0], 6), place.device, offset=1)
    place.update([copy(aligned, place.device), other, copy(aligned, place.device)])
    assert launches() == [(2, "split", True), (1, "split", False)]

    place.update([])
    assert launches() == []
    place.update([copy(item_of(kinds[0], 0), place.device)])
    assert launches() == []


def test_finds_the_tensor_among_many(place: Native | Interpreter) -> None:
    """Not a power of two of them, so that the search's halves differ."""
    kind = Kind("nearest", "bf16", False)
    check(place, [item_of(kind, 1 + 97 * seed % 1500, seed=seed, lr=1e-3 * (seed + 1)) for seed in range(37)])


@pytest.mark.parametrize("kind", [Kind(param, state, False) for param in PARAM_KINDS for state in ("fp32", "bf16")])
@pytest.mark.parametrize("pattern", [NAN_OF_CUDA, 0xFFC00000, 0x7F800000], ids=["NaN", "NaN of x86", "infinity"])
def test_what_is_not_finite_shows_in_the_parameter_and_nowhere_else(
    place: Native | Interpreter, kind: Kind, pattern: int
) -> None:
    item = item_of(kind, 700)
    bad = torch.tensor([pattern], dtype=torch.int64).to(torch.int32).view(torch.float32)
    item.exp_avg[600] = bad[0]
    item.exp_avg.view(torch.int32 if kind.state == "fp32" else torch.int16)[600] = (
        bad.view(torch.int32)[0] if kind.state == "fp32" else bad.view(torch.int32)[0] >> 16
    )
    wanted, got = copy(item), copy(item, place.device)
    reference.update([wanted])
    place.update([got])
    finite = torch.isfinite(got.param.cpu())
    assert finite.tolist() == [index != 600 for index in range(700)]
    assert not torch.isfinite(got.exp_avg[600].cpu())
    assert torch.equal(got.param.cpu()[finite], wanted.param[finite])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_that_is_not_finite_leaves_its_blocks_other_elements_alone(
    place: Native | Interpreter, bad: float
) -> None:
    item = item_of(Kind("split", "int8", False), 3 * BLOCK)
    item.grad[5] = bad
    got, wanted = copy(item, place.device), copy(item)
    reference.update([wanted])
    place.update([got])
    assert got.param.isnan().nonzero().flatten().tolist() == [5]
    others = [index for index in range(3 * BLOCK) if index != 5]
    for x, y in ((got.param, wanted.param), (got.exp_avg, wanted.exp_avg), (got.exp_avg_sq, wanted.exp_avg_sq)):
        assert torch.equal(x.cpu()[others], y[others])
    for x, y in ((got.exp_avg_scale, wanted.exp_avg_scale), (got.exp_avg_sq_scale, wanted.exp_avg_sq_scale)):
        assert y.isfinite().all() and torch.equal(x.cpu(), y)


# Compiled code


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> str:
    """PTX for compute capability 9.0, which takes no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from offload.optim import triton_kernel

    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs={})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=triton_kernel.OPTIONS).asm["ptx"]


def assert_exact(ptx: str) -> None:
    inexact = re.findall(r"\b(?:fma|mad)\.[a-z.]*f32|\S*\.approx\S*|div\.full\S*|\S*\.ftz\S*", ptx)
    assert not inexact, sorted(set(inexact))


FEW = {
    Kind("fp32", "fp32", True),
    Kind("nearest", "bf16", False),
    Kind("stochastic", "int8", True),
    Kind("split", "int8", False),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in FEW else pytest.mark.slow, id="-".join(map(str, k))) for k in KINDS]
)
def test_compiled_code_is_exact_and_reads_16_bytes_at_a_time(kind: Kind, cache: None) -> None:
    from offload.optim import triton_kernel

    is_wide = "fp32" in (kind.param, kind.state)
    ptx = compiled(
        triton_kernel._update,
        {"table": "*i64", "numbers": "*fp32", "count": "i32", "scale": "*fp32", "start": "i32"},
        {
            "PARAM": kind.param,
            "STATE": kind.state,
            "COUPLED": kind.coupled,
            "ALIGNED": True,
            "ROWS": 2 if is_wide else 4,
        },
    )
    assert_exact(ptx)
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx
    # The parameter and the gradient, in the larger of the two dtypes at least.
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 2
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) >= 1


def test_the_optimizers_work_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from offload.optim import AdamW
p = torch.nn.Parameter(torch.ones(300))
p.grad = torch.ones(300)
AdamW([p], lr=0.1, state_dtype="bf16").step()
print(bool((p < 1).all()), "offload.optim.triton_kernel" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "True False\n", done.stderr

"""The compiled kernel against the reference, bit for bit, and what happens around a call."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from offload.optim import codes, cpu, reference
from offload.optim.formats import (
    BLOCK,
    MASTERS,
    PARAM_KINDS,
    STATE_BLOCK,
    STATE_DTYPES,
    Constants,
    Item,
    Kind,
    random_bits,
    split_master,
    split_master24,
    state_spec,
)

SHORTEST, LONGEST = 1 << 16, 1 << 20
"""Elements that a thread of the kernel takes at a time."""

KINDS = [Kind(param, state, coupled) for param in PARAM_KINDS for state in STATE_DTYPES for coupled in (False, True)]

needs_kernel = pytest.mark.skipif(cpu.load() is None, reason="the kernel is not built: python hatch_build.py")


def constants(kind: Kind, step: int = 3, w1: float = 0.1, gscale: float = 0.7, eps: float = 1e-8) -> Constants:
    """Of AdamW or Adam at a step, with a scaled gradient; none of them is exact in fp32."""
    bc1, bc2_sqrt = 1 - (1 - w1) ** step, (1 - 0.999**step) ** 0.5
    fold = 1.0 if kind.state == "fp32" else bc2_sqrt
    l2, decay = (0.01, 1.0) if kind.coupled else (0.0, 1 - 1e-3 * 0.1)
    numbers = (gscale, l2, decay, 1 - w1, w1, 0.999, 0.001, eps * fold, 1e-3 * fold / bc1, bc2_sqrt, 0.9 * eps * fold)
    return Constants(*numbers, ahead=7e-3 * fold if kind.state == "int8" else 0.0)


def values(n: int, generator: torch.Generator, decades: float, special_share: float) -> Tensor:
    """``[n]`` fp32: magnitudes spread over decades around 1, with zeros, subnormals and large numbers among them."""
    x = torch.randn(n, generator=generator) * 10 ** ((torch.rand(n, generator=generator) - 0.5) * decades)
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-44, 1e-38, 1e15, -1e18, 1.0])
    where = torch.rand(n, generator=generator) < special_share
    return torch.where(where, special[torch.randint(len(special), (n,), generator=generator)], x)


def make(
    kind: Kind,
    n: int,
    *,
    start: int = 0,
    seed: int = 0,
    decades: float | None = None,
    offset: int = 0,
    factor: float = 1.0,
    has_ratios: bool = True,
) -> Item:
    """A tensor in the middle of training.

    Args:
        decades: of magnitudes; by default many, or few where one large number would make all other codes zero.
        offset: bytes by which every tensor is off its natural place.
        factor: of what is encoded.
        has_ratios: codes of the first moment are ratios.
    """
    coded = kind.state == "int8"
    spread = decades or (4 if coded else 12)
    g = torch.Generator().manual_seed(seed)

    def draw(decades: float = spread) -> Tensor:
        return values(n, g, decades, 0.001 if coded else 0.02)

    dtype = torch.float32 if kind.param == "fp32" else torch.bfloat16
    spec = state_spec(dtype, n, kind.state, kind.param if kind.param in MASTERS else "none")

    def place(content: Tensor) -> Tensor:
        nbytes = content.numel() * content.element_size()
        space = torch.zeros(nbytes + 64 + offset, dtype=torch.uint8)
        if not nbytes:
            return content
        skip = -space.data_ptr() % 64 + offset
        # From a buffer: views of other dtypes refuse odd addresses.
        buffer = (ctypes.c_uint8 * nbytes).from_address(space.data_ptr() + skip)
        buffer._keeps = space
        tensor = torch.frombuffer(buffer, dtype=content.dtype)
        assert (tensor.data_ptr() - offset) % 64 == 0
        ctypes.memmove(tensor.data_ptr(), content.data_ptr(), nbytes)
        return tensor

    state = {
        key: torch.zeros(-(-n // BLOCK) if key in STATE_BLOCK else n, dtype=dtype)
        for key, dtype in spec.items()
        if dtype
    }
    if coded:
        ratio, root = draw(2) * factor, draw().abs() * factor
        threshold = codes.thresholds(start, n, seed, ratio.device)
        stored = [state[key] for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")]
        codes.encode(ratio, root, threshold, *stored, 1e-8, has_ratios)
    else:
        state["exp_avg"].copy_(draw())
        state["exp_avg_sq"].copy_(draw(2 * spread).abs())
    param = draw()
    if "remainder" in state:
        bits = random_bits(0, n, seed, param.device)
        param, remainder = split_master(param) if kind.param == "split" else split_master24(param, bits)
        state["remainder"].copy_(remainder)
    placed = {key: place(tensor) for key, tensor in state.items()}
    return Item(
        kind=kind,
        param=place(param.to(dtype)),
        grad=place(draw().to(dtype)),
        exp_avg=placed["exp_avg"],
        exp_avg_sq=placed["exp_avg_sq"],
        exp_avg_scale=placed.get("exp_avg_scale"),
        exp_avg_sq_scale=placed.get("exp_avg_sq_scale"),
        remainder=placed.get("remainder"),
        start=start,
        key_param=0x9E3779B9 ^ seed,
        key_v=0xDEADBEEF ^ seed,
        constants=constants(kind)._replace(has_ratios=float(has_ratios), **({} if has_ratios else {"ahead": 0.0})),
    )


def tensors(item: Item) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in item._asdict().items() if isinstance(tensor, Tensor)}


def clone(items: Sequence[Item]) -> list[Item]:
    return [item._replace(**{name: tensor.clone() for name, tensor in tensors(item).items()}) for item in items]


def assert_same(ours: Sequence[Item], expected: Sequence[Item]) -> None:
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        for name, tensor in tensors(a).items():
            left, right = (bytes_of(x) for x in (tensor, tensors(b)[name]))
            wrong = (left != right).nonzero().flatten() // tensor.element_size()
            assert not len(wrong), f"item {i} of {a.kind}: {name} differs at {wrong.unique()[:8].tolist()}"


def bytes_of(tensor: Tensor) -> Tensor:
    return (
        torch.frombuffer(bytearray(memory(tensor)), dtype=torch.uint8) if tensor.numel() else tensor.view(torch.uint8)
    )


def memory(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def check(items: Sequence[Item], *, steps: int = 1, **how: int) -> None:
    """The kernel and the reference do the same to ``items``."""
    expected = clone(items)
    before = {name: memory(tensor) for name, tensor in tensors(items[-1]).items()}
    for _ in range(steps):
        reference.update(expected)
        cpu.update(items, **how)
    assert_same(items, expected)
    changed = {name for name, content in before.items() if content != memory(tensors(items[-1])[name])}
    assert "grad" not in changed
    if items[-1].param.numel() > BLOCK:
        assert changed >= {"param", "exp_avg", "exp_avg_sq"}


@needs_kernel
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
@pytest.mark.parametrize("isa", range(3))
def test_every_instruction_set_gives_the_references_bits(kind, isa):
    if isa >= len(cpu.instruction_sets()):
        pytest.skip("this CPU and this compiler have no more instruction sets")
    items = [
        make(kind, n, start=start, seed=n)
        for n, start in ((0, 0), (1, 0), (2, 256), (3, 0), (255, 512), (256, 0), (257, 1024), (5000, 0))
    ]
    check(items, steps=3, instruction_set=isa)


@needs_kernel
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
@pytest.mark.parametrize("offset", [1, 2, 4, 6])
def test_tensors_at_any_address(kind, offset):
    check([make(kind, 1001, offset=offset, seed=offset)], steps=2)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("state", STATE_DTYPES)
def test_any_number_of_threads_over_the_boundaries_of_ranges(state, threads):
    kinds = [Kind(param, state, False) for param in ("fp32", "stochastic", "split")]
    sizes = (SHORTEST - 1, 0, SHORTEST, SHORTEST + 1, 7, 2 * SHORTEST + 300)
    items = [make(kinds[i % 3], n, start=BLOCK * i, seed=i) for i, n in enumerate(sizes)]
    check(items, steps=2, threads=threads)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 3])
def test_ranges_that_are_as_long_as_they_get(threads):
    kind = Kind("stochastic", "bf16", False)
    check([make(kind, n, seed=n) for n in (5, 2 * threads * LONGEST + 77)], steps=1, threads=threads)


@needs_kernel
@pytest.mark.parametrize("start", [BLOCK, (1 << 32) - BLOCK, (1 << 33) - BLOCK])
def test_random_bits_belong_to_the_position_in_the_parameter(start):
    """A parameter in one piece, and in two."""
    kind = Kind("stochastic", "bf16", False)
    whole = make(kind, 3 * BLOCK, start=start)
    check(clone([whole]))
    pieces = clone([whole])[0]
    cpu.update([whole])
    parts = [
        pieces._replace(start=start + cut.start, **{name: tensor[cut] for name, tensor in tensors(pieces).items()})
        for cut in (slice(0, BLOCK), slice(BLOCK, 3 * BLOCK))
    ]
    cpu.update(parts[::-1])
    assert_same([pieces._replace(start=start)], [whole])


@needs_kernel
@pytest.mark.parametrize("kind", [Kind("fp32", "fp32", False), Kind("split", "fp32", True)])
@pytest.mark.parametrize("w1", [0.4999, 0.5, 0.9, 1.0])
def test_a_first_moment_nearer_to_the_gradient(kind, w1):
    """torch.lerp starts from the nearer end."""
    check([make(kind, 1000)._replace(constants=constants(kind, w1=w1))])


@needs_kernel
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("state", STATE_DTYPES)
def test_each_tensor_has_its_own_constants(state, coupled):
    kind = Kind("split", state, coupled)
    factors = (1.0, -0.3, 1 / 3, 1.7, 1e-3, -123.4)
    rows = [constants(kind, step + 1, gscale=factor, eps=10.0**-step) for step, factor in enumerate(factors)]
    check([make(kind, 600, seed=i)._replace(constants=row) for i, row in enumerate(rows)])


@needs_kernel
@pytest.mark.parametrize("factor", [0.0, 1e-43, 1e-38, 1e-36])
def test_scales_whose_inverse_is_out_of_range(factor):
    """As at the start, where all is zero, and for parameters whose gradients have been zero for long."""
    items = [make(Kind("split", "int8", coupled), 1000, factor=factor) for coupled in (False, True)]
    for item in items:
        item.grad.zero_()
        for stored in (item.exp_avg, item.exp_avg_sq, item.exp_avg_scale, item.exp_avg_sq_scale):
            assert stored is not None
            stored[2 if len(stored) == 4 else 2 * BLOCK :].zero_()
    expected = clone(items)
    for _ in range(3):
        reference.update(expected)
        cpu.update(items)
    assert_same(items, expected)


@needs_kernel
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("isa", range(3))
def test_first_moments_that_are_no_ratios(coupled, isa):
    """Where beta2 is small; with zeros, large numbers, and a block with a gradient that is not finite."""
    if isa >= len(cpu.instruction_sets()):
        pytest.skip("this CPU and this compiler have no more instruction sets")
    items = [make(Kind("split", "int8", coupled), n, seed=n, has_ratios=False) for n in (3, 256, 5000)]
    check(items, steps=3, instruction_set=isa)
    items[2].grad[[300, 600]] = torch.tensor([torch.inf, torch.nan], dtype=torch.bfloat16)
    expected = clone(items)
    reference.update(expected)
    cpu.update(items, instruction_set=isa)
    own = items[2].param.isnan()
    assert own.nonzero().flatten().tolist() == [300, 600] and torch.equal(own, expected[2].param.isnan())
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
        assert torch.equal(getattr(items[2], name), getattr(expected[2], name)), name


@needs_kernel
@pytest.mark.parametrize("decades", [1, 12, 30])
def test_roots_over_any_number_of_decades(decades):
    """Within a block, beyond those that have steps of their own; with zeros, alone and in whole blocks."""
    item = make(Kind("split", "int8", False), 20 * BLOCK, decades=decades)
    item.grad.copy_(torch.where(torch.rand(item.grad.shape) < 0.1, 0.0, item.grad.float()))
    item.grad[3 * BLOCK : 5 * BLOCK].zero_()
    for stored in (item.exp_avg, item.exp_avg_sq):
        stored[4 * BLOCK : 7 * BLOCK].zero_()
    check([item], steps=4)


@needs_kernel
@pytest.mark.parametrize("param", PARAM_KINDS)
def test_ties_between_two_roundings(param):
    """Half of all bf16 numbers times 1.5 lie in the middle between two."""
    kind = Kind(param, "bf16", False)
    item = make(kind, 5000, decades=2)
    item.grad.zero_()
    if item.remainder is not None:
        item.remainder.zero_()
    halves = constants(kind)._replace(decay=1.5, beta1=1.5, step_size=0.0)
    ties = (item.param.float() * 1.5).view(torch.int32) & 0xFFFF == 0x8000
    assert param == "fp32" or ties.sum() > 1000
    check([item._replace(constants=halves)])


@needs_kernel
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_a_number_that_is_none_spoils_its_own_element_alone(kind):
    clean = make(kind, 3 * BLOCK, decades=2)
    not_a_number, infinity = 6, BLOCK + 7
    clean.grad[[not_a_number, infinity]] = 0.0
    spoiled = clone([clean])[0]
    spoiled.grad[not_a_number], spoiled.grad[infinity] = torch.nan, torch.inf
    cpu.update([spoiled])
    cpu.update([clean])
    own = torch.zeros(3 * BLOCK, dtype=torch.bool)
    own[[not_a_number, infinity]] = True
    assert not spoiled.param[own].isfinite().any()
    assert torch.equal(spoiled.param[~own], clean.param[~own])
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(spoiled, name)[~own], getattr(clean, name)[~own])
    for name in STATE_BLOCK:
        if (scale := getattr(clean, name)) is not None:
            assert torch.equal(getattr(spoiled, name), scale)


@needs_kernel
@pytest.mark.parametrize("param", PARAM_KINDS)
def test_the_nan_of_a_gpu_stays_one(param):
    """All its bits are set, so that adding to them makes zero of it."""
    item = make(Kind(param, "fp32", False), 300)
    item.exp_avg.view(torch.int32)[:100] = 0x7FFFFFFF
    cpu.update([item])
    assert item.param[:100].isnan().all() and item.param[100:].isfinite().all()


@needs_kernel
@pytest.mark.parametrize("threads", [1, 3])
def test_a_caller_that_flushes_subnormals_gets_the_same_bits(threads):
    kinds = [Kind("fp32", "fp32", False), Kind("nearest", "bf16", False), Kind("split", "int8", True)]
    items = [make(kind, SHORTEST, decades=60) for kind in kinds]
    for item in items:
        item.grad.zero_()  # what was subnormal remains so
    expected = clone(items)
    cpu.update(expected, threads=1)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        assert torch.tensor(1e-40) * 1 == 0
        cpu.update(items, threads=threads)
        assert torch.tensor(1e-40) * 1 == 0, "the caller's mode is the caller's"
    finally:
        torch.set_flush_denormal(False)
    assert_same(items, expected)


@needs_kernel
def test_several_python_threads_call_at_once():
    kind = Kind("stochastic", "bf16", False)
    items = [make(kind, 5 * SHORTEST + 11 * i, seed=i) for i in range(4)]
    expected = clone(items)
    for _ in range(10):
        cpu.update(expected, threads=1)

    def run(item: Item) -> None:
        for _ in range(10):
            cpu.update([item], threads=3)

    team = [threading.Thread(target=run, args=(item,)) for item in items]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    assert_same(items, expected)


def run_python(program: str, *options: str) -> str:
    command = [sys.executable, *options, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_threads_of_its_own():
    """In a process of its own: a fork is not for one that runs torch's and pytest's threads."""
    program = """
import os
from offload.optim import cpu
from offload.optim.formats import Kind
from tests.optim.test_cpu_kernel import SHORTEST, assert_same, clone, make
items = [make(Kind("split", "bf16", False), 8 * SHORTEST)]
first = clone(items)
cpu.update(first, threads=3)
child = os.fork()
ours = clone(items)
cpu.update(ours, threads=3)
assert_same(ours, first)
threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 3
if not child:
    os._exit(0 if threads == 3 else 3)
assert os.waitpid(child, 0)[1] == 0
print("both")
"""
    assert run_python(program) == "both\n"


def test_without_the_library_the_reference_takes_over_and_says_so_once(tmp_path):
    program = f"""
import warnings
from pathlib import Path
from offload.optim import cpu, reference
from offload.optim.formats import Kind
from tests.optim.test_cpu_kernel import assert_same, clone, make
cpu.LIBRARY = Path({str(tmp_path / "none.so")!r})
cpu.load.cache_clear()
items = [make(Kind("split", "bf16", False), 1000)]
expected = clone(items)
reference.update(expected)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert cpu.load() is None and cpu.instruction_sets() == []
    cpu.update(items)
    cpu.advise_huge_pages(items[0].param)
assert_same(items, expected)
(warning,) = caught
print(warning.message)
"""
    said = run_python(program)
    assert "none.so" in said and "hatch_build.py" in said


@needs_kernel
def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(cpu, "ABI", cpu.ABI + 1)
    with pytest.warns(UserWarning, match=f"has interface {cpu.ABI - 1} instead of {cpu.ABI}"):
        assert cpu.load.__wrapped__() is None


@needs_kernel
def test_items_that_cannot_be_updated_are_named():
    good = make(Kind("split", "int8", False), 300)
    before = clone([good])
    for wrong in ({"remainder": None}, {"exp_avg_scale": None}, {"start": 100}, {"start": -BLOCK}):
        with pytest.raises(ValueError, match=r"cannot update a tensor of Kind\(param='split'.* from element"):
            cpu.update([good, good._replace(**wrong)])
    assert_same([good], before)
    with pytest.raises(ValueError, match="instruction_set=99: this CPU has .*baseline"):
        cpu.update([good], instruction_set=99)


@needs_kernel
def test_instruction_sets_are_what_the_cpu_has():
    sets = cpu.instruction_sets()
    assert sets[-1] == "baseline" and len(set(sets)) == len(sets)
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as info:
            flags = set(info.read().split())
        assert ("x86-64-v4" in sets) <= ("avx512bw" in flags)
        assert ("x86-64-v3" in sets) <= ("avx2" in flags)


@needs_kernel
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="huge pages are asked for on Linux alone")
def test_huge_pages_are_advised_for_whole_pages_of_large_tensors():
    tensor = torch.empty(16 << 20, dtype=torch.uint8)
    cpu.advise_huge_pages(tensor[1:])
    with open("/proc/self/smaps") as lines:
        flags = {}
        for line in lines:
            if line.split()[0].count("-") == 1 and not line[0].isupper():
                begin, end = (int(x, 16) for x in line.split()[0].split("-"))
            elif line.startswith("VmFlags:"):
                flags[begin, end] = line.split()[1:]
    if not any("hg" in f or "nh" in f for f in flags.values()):
        pytest.skip("this kernel has no transparent huge pages")
    middle = tensor.data_ptr() + tensor.numel() // 2
    (found,) = (f for (begin, end), f in flags.items() if begin <= middle < end)
    assert "hg" in found
    assert cpu.load().offload_advise_huge_pages(tensor.data_ptr() + 1, 4096) == 0, "no whole page"
    cpu.advise_huge_pages(torch.empty(100 << 20, device="meta"))

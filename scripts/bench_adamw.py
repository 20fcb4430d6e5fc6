"""AdamW per element: every format of the packed optimizer, every peer that imports, and the memory's own speed.

    python scripts/bench_adamw.py                                   # here: the GPU where there is one, else the CPU
    python scripts/bench_adamw.py --device cpu --threads 2          # records adamw_cpu.json, updates docs
    python scripts/bench_adamw.py --params 4e6 --rounds 2 --only 'offload bf16.*' --output outputs/adamw.json

Tensors have the shapes of Llama-2 7B's layers, in order, until ``--params`` elements are reached. All contenders live
in one process and take turns: in each round, each one makes an untimed step, so that the threads of the one before it
have gone to sleep, and then the timed ones. Numbers are medians over the timed steps of all turns that count; ratios
are between medians of one run.

probe       per format: what the memory gives. On the CPU, compiled code that adds an integer to each byte of every
            array that the format writes, and reads the gradient: in place in the very tensors that the format
            updates, block by block like the kernel, with its compiler flags, on its team of threads, which take 64 Ki
            elements at a time. (Every other pass subtracts what the one before added.) Without a C compiler,
            torch's in-place addition. On a GPU, a copy of half as many bytes, which moves as many.
limit       the same in the ranges that the kernel's threads take, which change when the kernel does, while the probe
            stays the yardstick that claims are about: the most that any code has got out of the memory here.
of probe    the probe's time over the format's; of limit likewise.
counts      On the CPU, a turn before and after which the memory gave at least 0.7 of the run's best rate. A host moves
            a virtual machine's cores about, mostly when they wake up: two that share one die's link to the memory get
            half of what two dies give. So an idle loop of the lowest priority keeps each of them awake, turns start by
            loading the memory until it gives that rate, and who lacks turns that count has more of them; who then has
            none is shown with all of its turns. ``--patience 0`` does without waiting and idle loops.

Contenders share parameters and gradients, and the packed formats their moments too: values are never compared here,
and all the tensors that one step touches are much larger than the caches. Large tensors that this script makes have
huge pages; peers make their own states, as they do for their users, without them. How torch's fused kernel does with
huge pages is measured beside that. Peers of which a step takes long on a CPU (foreach, torchao, bitsandbytes) update
the first matrix only: their time per element is the same.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT / "scripts", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # a checkout need not be installed

from gpu import machine  # noqa: E402
from pages import ADAMW, write_table  # noqa: E402

import hatch_build  # noqa: E402
from offload.optim import AdamW, cpu  # noqa: E402
from offload.optim.formats import BLOCK, STATE_BLOCK, Constants, Item, Kind, param_kind, state_spec  # noqa: E402

RECORDED = ROOT / "scripts" / "results" / "adamw_cpu.json"
"""What README shows."""

LR = 1e-5
FP32, BF16 = torch.float32, torch.bfloat16
NAMES = {FP32: "fp32", BF16: "bf16"}

# https://huggingface.co/meta-llama/Llama-2-7b-hf/blob/main/config.json: one layer
LAYER = [(4096,), *[(4096, 4096)] * 4, (4096,), *[(11008, 4096)] * 2, (4096, 11008)]

MANY = (300, 1 << 16)
"""Tensors and elements of each, for the case of many tensors."""

SMALL = 4096
"""Elements of the case of one small tensor: a norm of the Llama."""

SMALL_CALLS = 200
"""Per timed step: one call is too short for the clock."""

STEADY = 0.7
"""Of the run's best rate of the memory: what a turn needs to count."""

PACE_ELEMENTS = 8 << 20
"""Of the four fp32 tensors on which that rate is measured: several times the caches, as many streams as AdamW has."""

PACE_SECONDS = 0.05
"""That it is measured for."""


def shapes_of(params: int) -> Iterator[tuple[int, ...]]:
    """Of tensors with at least ``params`` elements in total, the last of which has fewer rows than the Llama's."""
    left = params
    while True:
        for shape in LAYER:
            if left <= 0:
                return
            row = shape[-1] if len(shape) == 2 else 1
            shape = (min(shape[0], -(-left // row)), *shape[1:])
            left -= shape[0] * row
            yield shape


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised, with huge pages to come where that has a meaning."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    cpu.advise_huge_pages(tensor)
    return tensor


class Memory:
    """Parameters with gradients, and states, all made once and shared.

    Attributes:
        params: per dtype, parameters whose ``.grad`` is set.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self.device = device
        torch.manual_seed(0)
        self.params: dict[torch.dtype, list[nn.Parameter]] = {FP32: [], BF16: []}
        for shape in shapes:
            weight = empty(shape, FP32, device).normal_(0.0, 0.02)
            grad = empty(shape, FP32, device).normal_(0.0, 1e-3)
            for dtype, params in self.params.items():
                same = dtype == FP32
                param = nn.Parameter(weight if same else empty(shape, dtype, device).copy_(weight))
                param.grad = grad if same else empty(shape, dtype, device).copy_(grad)
                params.append(param)
        self._states: dict[tuple[Any, ...], Tensor] = {}

    def states(self, dtype: torch.dtype, state_dtype: str, master: str) -> Iterator[dict[str, Tensor]]:
        """Of the packed optimizer, per parameter; ``step`` is a new tensor, the others are those of all who ask."""
        for index, param in enumerate(self.params[dtype]):
            state = {"step": torch.zeros((), dtype=FP32)}
            for name, kind in state_spec(dtype, param.numel(), state_dtype, master).items():
                key = (index, name, kind if name == "remainder" else state_dtype)
                if key not in self._states:
                    assert kind is not None
                    shape = (-(-param.numel() // BLOCK),) if name in STATE_BLOCK else tuple(param.shape)
                    self._states[key] = empty(shape, kind, self.device).zero_()
                state[name] = self._states[key]
            yield state


# The probe

PROBE = r"""
#include <stdatomic.h>
#include "adamw.h"

/* An array of one tensor, of which a block of the tensor has block_bytes. */
struct array { int64_t data, nbytes, block_bytes, is_written; };

struct job {
    const struct array *arrays; /* [tensors][width] */
    const int64_t *blocks;      /* [tensors] */
    int64_t tensors, width;
    uint8_t addend;
    struct ranges ranges; /* of blocks, over all tensors */
    int32_t is_in_the_kernels_ranges;
    atomic_uchar read;
};

static int take(struct job *job, int64_t *begin, int64_t *end)
{
    if (job->is_in_the_kernels_ranges)
        return offload_take_range(&job->ranges, begin, end);
    *begin = atomic_fetch_add(&job->ranges.taken, SHORTEST_RANGE);
    *end = *begin + SHORTEST_RANGE < job->ranges.blocks ? *begin + SHORTEST_RANGE : job->ranges.blocks;
    return *begin < *end;
}

static void add(uint8_t *data, int64_t nbytes, uint8_t addend)
{
    for (int64_t i = 0; i < nbytes; i++)
        data[i] += addend;
}

static uint8_t fold(const uint8_t *data, int64_t nbytes)
{
    uint8_t folded = 0;
    for (int64_t i = 0; i < nbytes; i++)
        folded ^= data[i];
    return folded;
}

static void work(void *argument)
{
    struct job *job = argument;
    uint8_t read = 0;
    int64_t t = 0, first = 0; /* the tensor, and its first block's number */
    int64_t block, end;
    while (take(job, &block, &end))
        for (; block < end; block++) {
            while (block >= first + job->blocks[t])
                first += job->blocks[t++];
            for (const struct array *a = job->arrays + t * job->width; a < job->arrays + (t + 1) * job->width; a++) {
                const int64_t offset = (block - first) * a->block_bytes, left = a->nbytes - offset;
                const int64_t nbytes = left < a->block_bytes ? left : a->block_bytes;
                if (a->is_written)
                    add((uint8_t *)a->data + offset, nbytes, job->addend);
                else
                    read ^= fold((uint8_t *)a->data + offset, nbytes);
            }
        }
    atomic_fetch_xor(&job->read, read);
}

__attribute__((visibility("default"))) int probe(const struct array *arrays, const int64_t *blocks, int64_t tensors,
                                                 int64_t width, int32_t threads, int32_t addend,
                                                 int32_t is_in_the_kernels_ranges)
{
    struct job job = {arrays, blocks, tensors, width, .addend = (uint8_t)addend, .ranges = {.threads = threads},
                      .is_in_the_kernels_ranges = is_in_the_kernels_ranges};
    for (int64_t t = 0; t < tensors; t++)
        job.ranges.blocks += blocks[t];
    offload_pool_run(threads, work, &job);
    return job.read;
}
"""

Array = tuple[Tensor, bool]
"""A tensor that a step touches, and whether it is written as well as read."""


def compile_probe() -> Any:
    """The probe as a function, for the best instruction set that the kernel has here.

    Raises:
        hatch_build.NoCompiler: there is none, or it failed.
    """
    level = re.sub(r"^x86-64-", "", next(iter(cpu.instruction_sets()), "baseline"))
    flags = [*hatch_build.FLAGS, *hatch_build.X86_LEVELS.get(level, ()), f"-I{hatch_build.KERNELS}", "-shared"]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "probe.c"), Path(folder, "probe.so")
        source.write_text(PROBE)
        pool = hatch_build.KERNELS / "pool.c"
        command = [*hatch_build.compiler(), *flags, str(source), str(pool), "-o", str(library)]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise hatch_build.NoCompiler(f"{error}{getattr(error, 'stderr', '')}") from error
        function = ctypes.CDLL(str(library)).probe
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    function.argtypes = [pointer, pointer, int64, int64, int32, int32, int32]
    return function


class Probes:
    """Makes a format's probe from the arrays that it touches.

    Attributes:
        how: in words.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._function = None
        self._buffers: list[Tensor] = []
        if device.type != "cpu":
            self.how = "copy"
            return
        try:
            self._function = compile_probe()
            self.how = "compiled"
        except hatch_build.NoCompiler as error:
            self.how = f"torch's in-place addition to what is written, the reading in proportion ({error})"

    def of(self, tensors: Sequence[Sequence[Array]]) -> dict[str, tuple[Callable[[], object], float]]:
        """``probe``, and with a compiler ``limit``: a call, and to how many passes over all bytes it amounts.

        ``tensors`` are as for :func:`moved_bytes`.
        """
        if self.device.type != "cpu":
            return {"probe": (self._copy(moved_bytes(tensors) // 2), 1.0)}
        if self._function is None:
            return {"probe": self._addition(tensors)}
        return {"probe": (self._compiled(tensors, False), 2.0), "limit": (self._compiled(tensors, True), 2.0)}

    def _compiled(self, tensors: Sequence[Sequence[Array]], in_the_kernels_ranges: bool) -> Callable[[], object]:
        function, rows, blocks = self._function, array("q"), array("q")
        for tensor in tensors:
            numel = tensor[0][0].numel()
            blocks.append(-(-numel // BLOCK))
            for values, is_written in tensor:
                per_block = values.element_size() * (BLOCK if values.numel() == numel else 1)
                rows.extend((values.data_ptr(), values.nbytes, per_block, is_written))

        def run() -> None:
            assert function is not None
            for addend in (1, -1):
                addresses = (rows.buffer_info()[0], blocks.buffer_info()[0])
                sizes = (len(blocks), len(tensors[0]), torch.get_num_threads())
                function(*addresses, *sizes, addend, in_the_kernels_ranges)

        return run

    def _addition(self, tensors: Sequence[Sequence[Array]]) -> tuple[Callable[[], object], float]:
        written = [values.view(torch.int8) for tensor in tensors for values, is_written in tensor if is_written]

        def run() -> None:
            for addend in (1, -1):
                for values in written:
                    values.add_(addend)

        return run, 4 * sum(values.nbytes for values in written) / moved_bytes(tensors)

    def _copy(self, nbytes: int) -> Callable[[], object]:
        if not self._buffers or self._buffers[0].numel() < nbytes:
            self._buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        target, source = (buffer[:nbytes] for buffer in self._buffers)
        return lambda: target.copy_(source)


class Pace:
    """The rate that the memory gives at the moment, on a CPU.

    Attributes:
        best: GB/s, of all measurements so far.
        patience: seconds for which :meth:`settle` may still wait.
    """

    def __init__(self, probes: Probes, patience: float) -> None:
        self.best, self.patience = 0.0, patience
        self._call: Callable[[], object] | None = None
        if probes.device.type == "cpu":
            tensors = [[(empty((PACE_ELEMENTS,), FP32, probes.device).zero_(), True) for _ in range(4)]]
            self._call, passes = probes.of(tensors)["probe"]
            self._gigabytes = passes * moved_bytes(tensors) / 1e9

    @property
    def least(self) -> float:
        """GB/s that a turn needs to count."""
        return STEADY * self.best

    def rate(self) -> float:
        """GB/s read and written by all threads together; infinite where this is not the CPU's matter."""
        if self._call is None:
            return math.inf
        self._call()  # the threads of who ran before go to sleep
        calls, began = 0, time.perf_counter()
        while (seconds := time.perf_counter() - began) < PACE_SECONDS:
            self._call()
            calls += 1
        rate = calls * self._gigabytes / seconds
        self.best = max(self.best, rate)
        return rate

    def settle(self) -> float:
        """Load the memory until its rate is steady or patience ends; gives the rate."""
        began = time.perf_counter()
        while (rate := self.rate()) < self.least:
            if time.perf_counter() - began >= self.patience:
                break
        self.patience = max(0.0, self.patience - (time.perf_counter() - began - PACE_SECONDS))
        return rate


IDLE_LOOP = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[2]):
    for _ in range(1000000):
        pass
"""


@contextmanager
def awake() -> Iterator[int]:
    """Keeps the cores of a virtual machine from falling asleep (Linux); gives their number, 0 where nothing is done."""
    cpuinfo = Path("/proc/cpuinfo")
    is_virtual = cpuinfo.exists() and "hypervisor" in cpuinfo.read_text().split()
    cores = os.sched_getaffinity(0) if is_virtual and hasattr(os, "SCHED_IDLE") else set()
    loops = [subprocess.Popen([sys.executable, "-c", IDLE_LOOP, str(core), str(os.getpid())]) for core in cores]
    try:
        yield len(loops)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def moved_bytes(tensors: Sequence[Sequence[Array]]) -> int:
    """Read and written by a step that touches these arrays: per tensor, the parameter's first."""
    return sum(values.nbytes * (1 + is_written) for tensor in tensors for values, is_written in tensor)


# The contenders


@dataclass
class Turn:
    """A contender's timed steps.

    Attributes:
        memory: GB/s, the lower of the memory's rates before and after.
        seconds: of one call, per step.
    """

    memory: float
    seconds: list[float]


@dataclass
class Entry:
    """Something that is timed.

    Attributes:
        labels: optimizer; dtype of the parameters; what keeps their small changes; dtype of the moments.
        build: gives the step to be timed, and the arrays that it touches where they are known.
        elements: that a step updates.
        calls: of one step: the step's time is divided by them.
        nbytes: that a step reads and writes, where the arrays are known.
        step, turns: filled in by :func:`measure`.
        least: GB/s of a turn that counts.
        probes: of the format, by name.
    """

    labels: tuple[str, str, str, str]
    build: Callable[[], tuple[Callable[[], object], list[list[Array]]]]
    elements: int
    calls: float = 1
    nbytes: int = 0
    step: Callable[[], object] = lambda: None
    turns: list[Turn] = field(default_factory=list)
    least: float = 0.0
    probes: dict[str, Entry] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(label for label in self.labels if label)

    def counting(self, least: float) -> int:
        """How many turns count where these GB/s are asked for."""
        return sum(turn.memory >= least for turn in self.turns)

    @property
    def seconds(self) -> list[float]:
        """Of one call, in all turns that count; in all turns where none does."""
        least = self.least if self.counting(self.least) else 0.0
        return [seconds for turn in self.turns if turn.memory >= least for seconds in turn.seconds]

    @property
    def median(self) -> float:
        """Seconds of one call."""
        return statistics.median(self.seconds)


def numel(params: Sequence[Tensor]) -> int:
    return sum(param.numel() for param in params)


def packed(memory: Memory, dtype: torch.dtype, master: str, state_dtype: str) -> Entry:
    """A format of ours."""
    params = memory.params[dtype]

    def build() -> tuple[Callable[[], object], list[list[Array]]]:
        optimizer = AdamW(params, lr=LR, state_dtype=state_dtype, master=master)  # type: ignore[arg-type]
        touched = []
        for param, state in zip(params, memory.states(dtype, state_dtype, master), strict=True):
            optimizer.state[param] = state
            assert param.grad is not None
            arrays = [tensor for name, tensor in state.items() if name != "step"]
            touched.append([(param.detach(), True), (param.grad, False), *((tensor, True) for tensor in arrays)])
        return optimizer.step, touched

    kind = param_kind(dtype, master)
    return Entry(("offload", NAMES[dtype], "none" if kind == "nearest" else kind, state_dtype), build, numel(params))


def peer(labels: tuple[str, str, str, str], params: list[nn.Parameter], path: str, **kwargs: Any) -> Entry:
    """An optimizer by its dotted path."""

    def build() -> tuple[Callable[[], object], list[list[Array]]]:
        module, name = path.rsplit(".", 1)
        return getattr(importlib.import_module(module), name)(params, lr=LR, **kwargs).step, []

    return Entry(labels, build, numel(params))


def fused_with_huge_pages(memory: Memory, dtype: torch.dtype) -> Entry:
    params, name = memory.params[dtype], NAMES[dtype]

    def build() -> tuple[Callable[[], object], list[list[Array]]]:
        optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
        for param, state in zip(params, memory.states(dtype, name, "none"), strict=True):
            optimizer.state[param] = state
        return optimizer.step, []

    own = "fp32" if dtype == FP32 else "none"
    return Entry(("torch fused, huge pages", name, own, name), build, numel(params))


def cast_fused_cast(params: list[nn.Parameter]) -> Entry:
    """bf16 gradients to fp32, torch's fused update of fp32 masters, and those to bf16 parameters."""

    def build() -> tuple[Callable[[], object], list[list[Array]]]:
        masters = [nn.Parameter(param.detach().float()) for param in params]
        for master in masters:
            master.grad = torch.empty_like(master)
        optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
        targets: list[Tensor] = [master.grad for master in masters if master.grad is not None]

        @torch.no_grad()
        def step() -> None:
            torch._foreach_copy_(targets, [param.grad for param in params if param.grad is not None])
            optimizer.step()
            torch._foreach_copy_(list(params), list(masters))

        return step, []

    return Entry(("torch cast+fused+cast", "bf16", "fp32", "fp32"), build, numel(params))


def contenders(memory: Memory) -> Iterator[Entry]:
    """In the order of the table and the plot."""
    fp32, bf16 = memory.params[FP32], memory.params[BF16]
    on_cpu = memory.device.type == "cpu"
    # The first matrix, or what there is.
    part = slice(1, 2) if on_cpu and len(fp32) > 1 else slice(None)
    adamw = "torch.optim.AdamW"

    yield packed(memory, FP32, "none", "fp32")
    yield peer(("torch fused", "fp32", "fp32", "fp32"), fp32, adamw, fused=True)
    if on_cpu:
        yield fused_with_huge_pages(memory, FP32)
    yield peer(("torch foreach", "fp32", "fp32", "fp32"), fp32[part], adamw, foreach=True)
    deepspeed = "deepspeed.ops.adam.DeepSpeedCPUAdam"
    if on_cpu:
        yield peer(("DeepSpeedCPUAdam", "fp32", "fp32", "fp32"), fp32, deepspeed)
    for state_dtype in ("bf16", "int8"):
        yield packed(memory, FP32, "none", state_dtype)

    for state_dtype in ("fp32", "bf16", "int8"):
        yield packed(memory, BF16, "split", state_dtype)
        yield packed(memory, BF16, "split24", state_dtype)
    yield cast_fused_cast(bf16)

    for master in ("none", "stochastic"):
        for state_dtype in ("fp32", "bf16"):
            yield packed(memory, BF16, master, state_dtype)
    yield peer(("torch fused", "bf16", "none", "bf16"), bf16, adamw, fused=True)
    if on_cpu:
        yield fused_with_huge_pages(memory, BF16)
    yield peer(("torch foreach", "bf16", "none", "bf16"), bf16[part], adamw, foreach=True)
    if on_cpu:
        yield peer(("DeepSpeedCPUAdam", "bf16", "none", "fp32"), bf16, deepspeed)
        yield peer(("DeepSpeedCPUAdam", "bf16", "none", "bf16"), bf16, deepspeed, fp32_optimizer_states=False)

    for master in ("none", "stochastic"):
        yield packed(memory, BF16, master, "int8")
    yield peer(("torchao", "bf16", "none", "int8"), bf16[part], "torchao.optim.AdamW8bit")
    rounding = {"bf16_stochastic_round": True}
    yield peer(("torchao", "bf16", "stochastic", "int8"), bf16[part], "torchao.optim.AdamW8bit", **rounding)
    yield peer(("torchao", "bf16", "none", "fp8"), bf16[part], "torchao.optim.AdamWFp8")
    yield peer(("bitsandbytes", "bf16", "none", "int8"), bf16[part], "bitsandbytes.optim.AdamW8bit")
    if on_cpu:
        yield from small_cases()


def small_cases() -> Iterator[Entry]:
    """Many tensors of 64 Ki, and one of a few KiB."""
    count, each = MANY
    memory = Memory([(each,)] * count, torch.device("cpu"))
    for dtype, name in NAMES.items():
        params = memory.params[dtype]
        own = "fp32" if dtype == FP32 else "none"

        def one_each(params: list[nn.Parameter] = params) -> tuple[Callable[[], object], list[list[Array]]]:
            optimizers = [torch.optim.AdamW([param], lr=LR, fused=True) for param in params]
            return lambda: [optimizer.step() for optimizer in optimizers], []

        def together(params: list[nn.Parameter] = params, name: str = name) -> Any:
            return AdamW(params, lr=LR, state_dtype=name, master="none").step, []  # type: ignore[arg-type]

        where = f", {count} tensors"
        yield Entry((f"offload{where}", name, own, name), together, count * each)
        yield Entry((f"torch fused{where} and optimizers", name, own, name), one_each, count * each)

    param = nn.Parameter(torch.zeros(SMALL, dtype=BF16))
    param.grad = torch.ones_like(param)
    labels = ("bf16", "none", "bf16")

    def repeated(call: Callable[[], object]) -> tuple[Callable[[], object], list[list[Array]]]:
        return lambda: [call() for _ in range(SMALL_CALLS)], []

    def kernel() -> tuple[Callable[[], object], list[list[Array]]]:
        zeros = torch.zeros(2, SMALL, dtype=BF16)
        numbers = Constants(*[0.5] * len(Constants._fields))  # any with which values stay normal
        kind = Kind("nearest", "bf16", False)
        assert param.grad is not None
        item = Item(kind, param.detach(), param.grad, zeros[0], zeros[1], None, None, None, 0, 1, 2, numbers)
        return repeated(lambda: cpu.update([item]))

    def stepping(optimizer: torch.optim.Optimizer) -> tuple[Callable[[], object], list[list[Array]]]:
        return repeated(optimizer.step)

    calls: dict[str, Callable[[], Any]] = {
        "offload, small, call": kernel,
        "offload, small, step": lambda: stepping(AdamW([param], lr=LR, state_dtype="bf16", master="none")),
        "torch fused, small, step": lambda: stepping(torch.optim.AdamW([param], lr=LR, fused=True)),
    }
    for name, build in calls.items():
        yield Entry((name, *labels), build, SMALL, calls=SMALL_CALLS)


# Measurement


def start(entry: Entry, device: torch.device) -> list[list[Array]]:
    """Build an entry and warm it up: states are made, code is compiled."""
    entry.step, touched = entry.build()
    for _ in range(2):
        entry.step()
    synchronize(device)
    return touched


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(entry: Entry, steps: int, device: torch.device) -> list[float]:
    """Seconds of one call: one step that does not count, and some that do."""
    entry.step()
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            entry.step()
            event.record()
        synchronize(device)
        return [a.elapsed_time(b) / 1e3 / entry.calls for a, b in zip(events, events[1:], strict=False)]
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        entry.step()
        seconds.append((time.perf_counter() - began) / entry.calls)
    return seconds


def take_turn(entry: Entry, steps: int, device: torch.device, pace: Pace) -> None:
    """Of a contender, and of its probes right after it."""
    all_timed = [entry, *entry.probes.values()]
    before = pace.settle()
    seconds = [time_steps(one, steps, device) for one in all_timed]
    memory = min(before, pace.rate())
    for one, its_seconds in zip(all_timed, seconds, strict=True):
        one.turns.append(Turn(memory, its_seconds))


def measure(
    device_name: str, params: int, rounds: int, steps: int, only: str = ".*", patience: float = 0.0
) -> dict[str, Any]:
    """Time every contender whose name matches, in turn.

    Args:
        device_name: ``cpu`` or ``cuda``.
        params: elements of all tensors together.
        rounds: how often each contender has its turn; at most as many again for those whose turns do not all count.
        steps: timed ones of each turn.
        only: regular expression over whole names; probes come with their formats.
        patience: seconds in all for which turns may wait for the memory's best rate.

    Returns:
        dict: ``contenders``, each with its labels, times and rates; ``failures``, each with a reason; ``claims``;
        ``memory``, the rates and the number of turns that count.
    """
    device = torch.device(device_name)
    shapes = list(shapes_of(params))
    memory, probes = Memory(shapes, device), Probes(device)
    entries: list[Entry] = []
    failures: dict[str, str] = {}
    for entry in contenders(memory):
        if not re.fullmatch(only, entry.name):
            continue
        try:
            touched = start(entry, device)
        except Exception as error:  # whatever a peer raises, the others run
            failures[entry.name] = f"{type(error).__name__}: {error}"
            print(f"{entry.name}: {failures[entry.name]}", file=sys.stderr)
            continue
        entries.append(entry)
        if touched:
            entry.nbytes = moved_bytes(touched)
            for name, (call, passes) in probes.of(touched).items():
                entry.probes[name] = Entry(entry.labels, entry.build, entry.elements, passes, step=call)
    pace = Pace(probes, patience)
    for extra in range(2 * rounds):
        for entry in entries:
            if extra < rounds or entry.counting(pace.least) < rounds:
                take_turn(entry, steps, device, pace)
    for entry in entries:
        for one in (entry, *entry.probes.values()):
            one.least = pace.least
    result = {
        "device": device_name,
        "params": numel(memory.params[BF16]),
        "shapes": [list(shape) for shape in shapes],
        "rounds": rounds,
        "steps_per_round": steps,
        "probe": probes.how,
        "memory": describe_memory(entries, pace),
        "contenders": [describe(entry) for entry in entries],
        "failures": failures,
    }
    return {**result, "claims": claims(result)}


def default_params(device: str) -> float:
    """On a GPU so many that a step takes longer than its launch, and that all contenders fit beside each other."""
    if device != "cuda":
        return 124e6
    free, _ = torch.cuda.mem_get_info()
    return min(810e6, free / 160)


def describe_memory(entries: Sequence[Entry], pace: Pace) -> dict[str, Any] | None:
    """GB/s: the best, and the median over the turns that count and over the others; None on a GPU."""
    if not pace.best:
        return None
    facts: dict[str, Any] = {"best_gb_per_second": pace.best}
    turns = [turn for entry in entries for turn in entry.turns]
    steady = [turn.memory for turn in turns if turn.memory >= pace.least]
    slower = [turn.memory for turn in turns if turn.memory < pace.least]
    for name, rates in (("counting", steady), ("others", slower)):
        facts[name] = {"turns": len(rates), "gb_per_second": statistics.median(rates) if rates else None}
    facts["without_turns_that_count"] = [entry.name for entry in entries if not entry.counting(pace.least)]
    return facts


def describe(entry: Entry) -> dict[str, Any]:
    optimizer, parameter, master, moments = entry.labels
    facts: dict[str, Any] = {"name": entry.name, "optimizer": optimizer, "parameter": parameter, "master": master}
    facts |= {"moments": moments, "params": entry.elements, **times(entry)}
    if entry.probes:
        facts["bytes_per_param"] = entry.nbytes / entry.elements
        facts["gb_per_second"] = entry.nbytes / entry.median / 1e9
    for name, probe in entry.probes.items():
        facts[name] = times(probe)
        facts[f"of_{name}"] = probe.median / entry.median
    return facts


def times(entry: Entry) -> dict[str, Any]:
    seconds = entry.seconds
    return {
        "mparam_per_second": entry.elements / entry.median / 1e6,
        "seconds": {"median": entry.median, "min": min(seconds), "max": max(seconds)},
        "samples": len(seconds),
    }


def claims(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What the optimizer is meant to reach, what was measured (None: was not), and whether that is enough."""
    found = {contender["name"]: contender for contender in result["contenders"]}

    def rate(name: str) -> float | None:
        return found[name]["mparam_per_second"] if name in found else None

    def microseconds(name: str) -> float | None:
        return found[name]["seconds"]["median"] * 1e6 if name in found else None

    def of_probe(name: str) -> float | None:
        return found[name].get("of_probe") if name in found else None

    def times_faster(name: str, than: str) -> float | None:
        ours, theirs = rate(name), rate(than)
        return None if ours is None or theirs is None else ours / theirs

    nearest, stochastic = "offload bf16 none bf16", "offload bf16 stochastic bf16"
    exact, halved, coded = (f"offload bf16 split {moments}" for moments in ("fp32", "bf16", "int8"))
    fused = "torch fused bf16 none bf16"
    many, one_each = f"offload, {MANY[0]} tensors", f"torch fused, {MANY[0]} tensors and optimizers"
    if result["device"] == "cuda":
        ours = [name for name in found if name.startswith("offload")]
        return [at_least(0.85, f"{name}: of the copy's speed", of_probe(name)) for name in ours]
    return [
        at_least(0.80, f"{nearest}: of the probe's speed", of_probe(nearest)),
        at_least(2.0, f"{nearest}: times {fused}", times_faster(nearest, fused)),
        at_least(1.5, f"{nearest}: times DeepSpeedCPUAdam", times_faster(nearest, "DeepSpeedCPUAdam bf16 none bf16")),
        at_least(1.5, f"{stochastic}: times {fused}", times_faster(stochastic, fused)),
        at_least(0.90, f"{exact}: of the probe's speed", of_probe(exact)),
        at_least(1.5, f"{exact}: times cast+fused+cast", times_faster(exact, "torch cast+fused+cast bf16 fp32 fp32")),
        at_least(0.70, f"{halved}: of the probe's speed", of_probe(halved)),
        at_least(0.45, f"{coded}: of the probe's speed", of_probe(coded)),
        at_least(20.0, f"{coded}: times torchao's int8", times_faster(coded, "torchao bf16 none int8")),
        at_least(20.0, f"{coded}: times bitsandbytes' int8", times_faster(coded, "bitsandbytes bf16 none int8")),
        *(
            at_least(
                2.0,
                f"{many} {kind}: times one torch optimizer each",
                times_faster(f"{many} {kind}", f"{one_each} {kind}"),
            )
            for kind in ("fp32 fp32 fp32", "bf16 none bf16")
        ),
        at_most(10.0, "one small tensor: microseconds of a call", microseconds("offload, small, call bf16 none bf16")),
    ]


def at_least(bound: float, claim: str, measured: float | None) -> dict[str, Any]:
    holds = None if measured is None else measured >= bound
    return {"claim": claim, "measured": measured, "at_least": bound, "holds": holds}


def at_most(bound: float, claim: str, measured: float | None) -> dict[str, Any]:
    holds = None if measured is None else measured <= bound
    return {"claim": claim, "measured": measured, "at_most": bound, "holds": holds}


# What is shown


def table(result: dict[str, Any]) -> str:
    """Markdown: contenders, failures, claims."""
    rows = [
        "| optimizer | parameter | master | moments | B/param | Mparam/s | min-max | GB/s "
        "| probe | of probe | limit | of limit |",
        "|" + "---|" * 12,
    ]
    for row in result["contenders"]:
        if row["params"] == SMALL:
            continue
        fastest, slowest = (row["params"] / row["seconds"][key] / 1e6 for key in ("min", "max"))
        cells = [row[key] for key in ("optimizer", "parameter", "master", "moments")]
        cells.append(f"{row['bytes_per_param']:.2f}" if "probe" in row else "")
        cells += [f"{row['mparam_per_second']:.0f}", f"{slowest:.0f}-{fastest:.0f}"]
        cells.append(f"{row['gb_per_second']:.1f}" if "probe" in row else "")
        for name in ("probe", "limit"):
            found = name in row
            cells += [f"{row[name]['mparam_per_second']:.0f}", f"{row[f'of_{name}']:.2f}"] if found else ["", ""]
        rows.append(f"| {' | '.join(cells)} |")
    rows += ["", f"probe: {result['probe']}"]
    if memory := result["memory"]:
        counting, others = memory["counting"], memory["others"]
        rows.append(f"memory: {counting['turns']} turns at {counting['gb_per_second'] or 0:.0f} GB/s count")
        if others["turns"]:
            rows[-1] += f", {others['turns']} at {others['gb_per_second']:.0f} GB/s do not"
        if names := memory["without_turns_that_count"]:
            rows.append(f"all turns count, because the memory was slower in each: {', '.join(names)}")
    for row in result["contenders"]:
        if row["params"] == SMALL:
            rows.append(f"{row['name']}, {SMALL} elements: {row['seconds']['median'] * 1e6:.1f} us")
    rows += [f"{name}: did not run: {reason}" for name, reason in result["failures"].items()]
    rows += ["", "| claim | wanted | measured | |", "|---|---|---|---|"]
    for claim in result["claims"]:
        wanted = f">= {claim['at_least']:g}" if "at_least" in claim else f"<= {claim['at_most']:g}"
        measured = "" if claim["measured"] is None else f"{claim['measured']:.2f}"
        mark = {True: "pass", False: "FAIL", None: "not measured"}[claim["holds"]]
        rows.append(f"| {claim['claim']} | {wanted} | {measured} | {mark} |")
    return "\n".join(rows)


BEGIN, END = "<!-- scripts/bench_adamw.py writes this table -->\n", "<!-- end of the table -->"

IN_README = """
offload fp32 fp32 fp32; torch fused fp32 fp32 fp32; DeepSpeedCPUAdam fp32 fp32 fp32
offload bf16 split fp32; torch cast+fused+cast bf16 fp32 fp32
offload bf16 split bf16
offload bf16 none bf16; offload bf16 stochastic bf16; torch fused bf16 none bf16; DeepSpeedCPUAdam bf16 none bf16
offload bf16 split int8; offload bf16 none int8; torchao bf16 none int8; bitsandbytes bf16 none int8
"""
"""Names of contenders; a line has what is equal in meaning or in bytes."""


def readme_table(record: dict[str, Any]) -> str:
    """Markdown: the contenders that README shows, those that ran."""
    by_name = {row["name"]: row for row in record["contenders"]}
    rows = ["| weights | master | moments | | Mparam/s | of the memory's limit |", "|" + "---|" * 6]
    for name in re.split(r"[;\n]\s*", IN_README.strip()):
        if row := by_name.get(name):
            who = "`offload.optim`" if row["optimizer"] == "offload" else row["optimizer"]
            limit = f"{row['of_limit']:.2f}" if "of_limit" in row else ""
            cells = (row["parameter"], row["master"], row["moments"], who, f"{row['mparam_per_second']:,.0f}", limit)
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


COLORS = {"offload": "tab:blue", "torch": "tab:orange", "DeepSpeedCPUAdam": "tab:green", "torchao": "tab:red"}


def draw(record: dict[str, Any], out: Path) -> None:
    """Bars of Mparam/s; black marks where a format's limit is, or its probe."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in record["contenders"] if ", " not in row["optimizer"] or "huge" in row["optimizer"]]
    rates = [row["mparam_per_second"] for row in rows]
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.26 * len(rows)))
    colors = [COLORS.get(re.split("[ ,]", row["optimizer"])[0], "tab:purple") for row in rows]
    slowest, fastest = ([row["params"] / row["seconds"][key] / 1e6 for row in rows] for key in ("max", "min"))
    axes.barh(range(len(rows)), rates, color=colors, height=0.75)
    axes.hlines(range(len(rows)), slowest, fastest, color="0.3", linewidth=0.8)
    for y, row in enumerate(rows):
        text = f"{row['mparam_per_second']:.0f}"
        if "probe" in row:
            mark = "limit" if "limit" in row else "probe"
            axes.vlines(row[mark]["mparam_per_second"], y - 0.45, y + 0.45, color="black", linewidth=2)
            text += f" ({row[f'of_{mark}']:.0%})"
        axes.annotate(text, (1, y), (4, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=8)
    names = [
        f"{row['optimizer']}: {row['parameter']}, master {row['master']}, moments {row['moments']}" for row in rows
    ]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("Mparam/s: median; thin line: from min to max; black: the memory's limit")
    where = record["environment"]
    hardware = where.get("card") or f"{where['cpu']}, {where['cpu_threads']} threads"
    axes.set_title(f"AdamW step, {record['params'] / 1e6:.0f} M parameters in Llama shapes, {hardware}", fontsize=10)
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def environment(device: str) -> dict[str, Any]:
    """Of :func:`gpu.machine.describe_machine`, and what matters for this benchmark alone."""
    facts = machine.describe_machine(device)
    for package in ("deepspeed", "triton"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    facts["transparent_huge_pages"] = huge_pages.read_text().strip() if huge_pages.exists() else None
    facts["cpu_kernel"] = next(iter(cpu.instruction_sets()), "none: torch operations")
    if hasattr(os, "getloadavg"):
        facts["load_average"] = os.getloadavg()[0]
    return facts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--params", type=float, help="elements of all tensors together; 124 M, on a GPU up to 810 M")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--patience", type=float, default=120, help="seconds in all to wait for the memory's best rate")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU, for all contenders")
    parser.add_argument("--only", default=".*", help="regular expression over whole names, such as 'offload bf16.*'")
    parser.add_argument(
        "--output", type=Path, help="default: scripts/results/adamw_<device>.json; the plot is beside it"
    )
    options = parser.parse_args(arguments)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    output = options.output or ROOT / "scripts" / "results" / f"adamw_{device}.json"
    torch.set_num_threads(options.threads)
    try:
        print(machine.build_kernel(), file=sys.stderr)
        machine.check_kernels(device)
    except machine.Unfit as error:
        parser.error(str(error))
    # DeepSpeed's extension brings another OpenMP, which is loaded later and asks the environment.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    keep_awake = awake() if device == "cpu" and options.patience > 0 else nullcontext(0)
    with keep_awake as cores:
        measured = measure(
            device,
            int(options.params or default_params(device)),
            options.rounds,
            options.steps,
            options.only,
            options.patience,
        )
    record = {
        "benchmark": "one AdamW step, by format and implementation",
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(
            ["python", "scripts/bench_adamw.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "commit": machine.git_commit(),
        "environment": {**environment(device), "cores_kept_awake": cores},
        **measured,
    }
    if not record["contenders"]:
        parser.error(f"nothing that runs here matches {options.only!r}")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=1) + "\n")
    draw(record, output.with_suffix(".png"))
    if output == RECORDED:
        write_table(readme_table(record), BEGIN, END, ADAMW)
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())

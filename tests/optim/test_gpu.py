"""What happens around the GPU kernel, without a GPU: when it is compiled and tried, where and with what it is launched,
and what runs in its place.

Parameters only say that they are on a GPU; their memory is the CPU's. A stand-in for Triton's driver compiles for real
and notes launches.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.optim
from offload.optim import gpu, reference
from offload.optim.formats import BLOCK, PARAM_KINDS, STATE_DTYPES, Item, Kind, f32
from tests.optim.test_cpu_kernel import assert_same, clone, make

KINDS = [Kind(param, state, coupled) for param in PARAM_KINDS for state in STATE_DTYPES for coupled in (False, True)]
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


class OnGpu(nn.Parameter):
    """On ``cuda:1``, to whoever asks."""

    device = SECOND  # type: ignore[assignment]

    def to(self, device: torch.device, dtype: torch.dtype, non_blocking: bool = False) -> Tensor:
        if device == SECOND:
            return self if dtype == self.dtype else type(self)(self.detach().to(dtype))
        return super().to(device, dtype)


class Unread(OnGpu):
    """A number on the device; reading it would wait for the device."""

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("the host reads a number on the device")

    item = tolist = cpu = __float__ = __bool__ = __int__ = _refuse


def parameters(
    count: int = 1, dtype: torch.dtype = torch.bfloat16, cls: type[nn.Parameter] = OnGpu
) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    params = [cls(torch.randn(300, generator=draw).to(dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(300, generator=draw).to(dtype)
    return params


@pytest.fixture(autouse=True)
def _nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_tried", type(gpu._tried)(set))
    monkeypatch.setattr(gpu, "_unusable", set())


# When it is prepared


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.device, set[Kind]]]:
    calls: list[tuple[torch.device, set[Kind]]] = []
    monkeypatch.setattr(gpu, "prepare", lambda device, kinds: calls.append((device, set(kinds))) or False)
    return calls


def test_building_an_optimizer_prepares_what_its_steps_need(prepared: list[tuple[torch.device, set[Kind]]]) -> None:
    wide, narrow = parameters(2, torch.float32), parameters(2)
    optimizer = offload.optim.Adam([*wide, *narrow, nn.Parameter(torch.ones(3))], state_dtype="bf16")
    assert prepared == [(SECOND, {Kind("fp32", "bf16", False), Kind("split", "bf16", False)})]
    optimizer.add_param_group({"params": parameters(), "state_dtype": "int8", "master": "none", "weight_decay": 0.1})
    assert prepared[1:] == [(SECOND, {Kind("nearest", "int8", True)})]
    # A loaded state brings its own weight decay.
    saved = optimizer.state_dict()
    saved["param_groups"][0]["weight_decay"] = 0.2
    optimizer.load_state_dict(saved)
    assert prepared[2:] == [
        (SECOND, {Kind("fp32", "bf16", True), Kind("split", "bf16", True)}),
        (SECOND, {Kind("nearest", "int8", True)}),
    ]


def test_parameters_on_the_cpu_prepare_nothing(prepared: list[tuple[torch.device, set[Kind]]]) -> None:
    offload.optim.AdamW([nn.Parameter(torch.ones(3))])
    assert prepared == []


def test_a_device_and_a_kind_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_kernel = pytest.importorskip("offload.optim.triton_kernel")
    tried: list[tuple[torch.device, set[Kind]]] = []
    monkeypatch.setattr(triton_kernel, "prepare", lambda device, kinds: tried.append((device, set(kinds))))
    a, b = Kind("split", "int8", False), Kind("fp32", "int8", False)
    for device, kinds in ((FIRST, {a}), (FIRST, {a}), (FIRST, {a, b}), (SECOND, {a}), (FIRST, {b})):
        assert gpu.prepare(device, kinds)
    assert tried == [(FIRST, {a}), (FIRST, {b}), (SECOND, {a})]


# What runs in its place


def refuse_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(offload.optim, "triton_kernel", raising=False)
    monkeypatch.delitem(sys.modules, "offload.optim.triton_kernel", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)


def try_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.optim import triton_kernel

    real = triton_kernel._sample
    monkeypatch.setattr(triton_kernel, "_sample", lambda kind, device, offset: real(kind, torch.device("cpu"), offset))
    monkeypatch.setattr(triton_kernel, "_current", lambda device: nullcontext())


def compile_driver(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Triton's own way to its driver, at the first launch."""
    from triton.runtime import build

    from offload.optim import triton_kernel

    try_on_the_cpu(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    if hasattr(build, "_find_compiler"):  # Triton 3.8 remembers what it found
        monkeypatch.setattr(build, "_find_compiler", build._find_compiler.__wrapped__)
    monkeypatch.setattr(
        triton_kernel, "_tables", lambda device: build.compile_module_from_src("not C", name="cuda_utils")
    )


def without_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    compile_driver(monkeypatch, folder)
    return (
        r"RuntimeError: Failed to find C compiler.* Triton compiles with gcc or clang, which cannot be found: install "
        r"a C compiler and Python's headers \(apt-get install gcc python3-dev\)"
    )


def with_another_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setenv("CC", "no-such-compiler")
    compile_driver(monkeypatch, folder)
    return "FileNotFoundError: .*no-such-compiler.* Triton compiles with no-such-compiler, which cannot be found"


def without_headers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    real = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(folder) if name == "INCLUDEPY" else real(name))
    monkeypatch.setenv("CC", "false")
    compile_driver(monkeypatch, folder)
    return "CalledProcessError: .* Triton compiles with Python.h, which cannot be found"


def without_triton(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    refuse_import(monkeypatch)
    return r"ModuleNotFoundError: .*triton.*\. It needs Triton: pip install triton, where there is a build\."


def with_wrong_results(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    from offload.optim import triton_kernel

    try_on_the_cpu(monkeypatch)
    monkeypatch.setattr(triton_kernel, "update", lambda items: None)
    return r"RuntimeError: a trial of Kind\(.*\) changed a parameter by 0\.0"


def on_another_device(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setattr(gpu, "DEVICE_TYPES", ("another",))
    return "it runs on another devices"


@pytest.mark.parametrize(
    "failure",
    [without_compiler, with_another_compiler, without_headers, without_triton, with_wrong_results, on_another_device],
)
def test_where_the_kernel_fails_the_reference_runs_and_one_warning_says_why(
    failure: Callable[[pytest.MonkeyPatch, Path], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if failure is not without_triton:
        pytest.importorskip("triton", reason="triton has no build for this platform")
    message = failure(monkeypatch, tmp_path)
    params, expected = parameters(2), parameters(2, cls=nn.Parameter)
    with pytest.warns(UserWarning, match=r"cannot be used on cuda:1: " + message) as caught:
        optimizer = offload.optim.AdamW(params)
    assert len(caught) == 1 and "run on PyTorch's operations with the same results" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = offload.optim.AdamW(parameters(1, torch.float32), state_dtype="bf16")
        reference_optimizer = offload.optim.AdamW(expected)
        for _ in range(3):
            for each in (optimizer, other, reference_optimizer):
                each.step()
    for param, wanted in zip(params, expected, strict=True):
        assert torch.equal(param, wanted)


def test_no_memory_is_not_taken_for_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_kernel = pytest.importorskip("offload.optim.triton_kernel")

    def fail(device: torch.device, kinds: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(triton_kernel, "prepare", fail)
    with pytest.raises(torch.OutOfMemoryError):
        offload.optim.AdamW(parameters())


# The gradients' scale


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[Item], Tensor | None]]:
    calls: list[tuple[Sequence[Item], Tensor | None]] = []
    monkeypatch.setattr(gpu, "prepare", lambda device, kinds: True)
    monkeypatch.setattr(gpu, "update", lambda items, scale: calls.append((items, scale)))
    return calls


def test_a_scale_on_the_device_is_left_there(updates: list[tuple[Sequence[Item], Tensor | None]]) -> None:
    optimizer = offload.optim.AdamW(parameters(2), maximize=True)
    optimizer.gradient_scale = scale = Unread(torch.tensor(0.25))
    optimizer.step()
    items, handed = updates.pop()
    assert handed is scale and [item.constants.gscale for item in items] == [-1.0, -1.0]


def test_a_scale_on_the_host_becomes_a_constant(updates: list[tuple[Sequence[Item], Tensor | None]]) -> None:
    optimizer = offload.optim.AdamW(parameters(2), maximize=True)
    optimizer.gradient_scale = torch.tensor(0.25)
    optimizer.step()
    items, handed = updates.pop()
    assert handed is None and [item.constants.gscale for item in items] == [-0.25, -0.25]


def test_parameters_on_the_host_need_the_number(updates: list[tuple[Sequence[Item], Tensor | None]]) -> None:
    """Beside parameters on a device: both are updated with the same scale."""
    hosted, expected = parameters(cls=nn.Parameter), parameters(cls=nn.Parameter)
    optimizer = offload.optim.AdamW([*hosted, *parameters()])
    plain = offload.optim.AdamW(expected)
    optimizer.gradient_scale, plain.gradient_scale = OnGpu(torch.tensor(0.3)), torch.tensor(0.3)
    optimizer.step()
    plain.step()
    (item,), handed = updates.pop()
    assert handed is None and item.constants.gscale == f32(0.3)
    assert torch.equal(hosted[0], expected[0])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_the_reference_multiplies_by_a_tensor_as_by_a_constant(kind: Kind) -> None:
    """And does not read it on the host."""
    items = [make(kind, 3 * BLOCK + 5, seed=seed) for seed in range(2)]
    factor = f32(0.3)
    scaled, constant = clone(items), clone(items)
    reference.update(scaled, Unread(torch.tensor(0.3, dtype=torch.float64)))
    reference.update(
        [
            item._replace(constants=item.constants._replace(gscale=f32(f32(item.constants.gscale) * factor)))
            for item in constant
        ]
    )
    assert_same(scaled, constant)


# Launches


class Driver:
    """A stand-in for Triton's: compiles for compute capability 9.0; a launch is a note.

    Attributes:
        launches: ``(kernel, device, stream, grid, arguments)`` of each.
        current: the device of launches.
        streams: current streams of this thread.
    """

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []
        self.current = 0
        self.streams = threading.local()
        self.on_launch: Callable[[SimpleNamespace], None] = lambda launch: None
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda name, kernel, shared, device: (object(), name, 32, 0, 1024),
        )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> Any:
        return getattr(self.streams, "current", "default"), device

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, stream: Any, function: str, *rest: Any) -> None:
            arguments = dict(zip(source.fn.arg_names, rest[4:], strict=True))
            note = SimpleNamespace(kernel=function, device=self.current, stream=stream, grid=(x, y, z), **arguments)
            self.launches.append(note)
            self.on_launch(note)

        return launch


class Queue:
    """Launches whose turn has not come: what each fetches, as it was when it was queued."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, launch: SimpleNamespace) -> None:
        if launch.kernel == "_fetch":
            words = launch.source[launch.start : launch.start + launch.size]
            self.waiting.append((words, words.clone()))

    def run(self) -> None:
        for words, queued in self.waiting:
            assert torch.equal(words, queued), "overwritten before it was fetched"
        self.waiting.clear()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture
def driver(compiled: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    triton = pytest.importorskip("triton", reason="triton has no build for this platform")
    from offload.optim import triton_kernel

    made = Driver()

    class Tables(triton_kernel._Tables):
        def __init__(self, device: torch.device) -> None:
            super().__init__(torch.device("cpu"))
            self.queue = Queue()

        def read(self, start: int, size: int) -> None:
            self.ring.read_until(SimpleNamespace(synchronize=self.queue.run), start, size)

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        before, made.current = made.current, device.index
        yield
        made.current = before

    monkeypatch.setattr(triton_kernel, "_tables", cache(Tables))
    monkeypatch.setattr(torch.cuda, "device", current)
    for kernel in (triton_kernel._fetch, triton_kernel._update):
        monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    monkeypatch.setattr(triton.runtime.driver, "_active", made)
    yield made


def item_of(kind: Kind, count: int = BLOCK, cls: type[nn.Parameter] = OnGpu, offset: int = 0) -> Item:
    item = make(kind, count, offset=offset)
    return item._replace(param=cls(item.param, requires_grad=False))


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    import triton

    names: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **about: names.append(about["repr"]))
    return names


def test_after_preparing_nothing_is_compiled_any_more(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever addresses, sizes and numbers of tensors are, at both alignments, with a scale and without."""
    from offload.optim import triton_kernel

    kinds = Kind("split", "int8", False), Kind("fp32", "bf16", True)
    monkeypatch.setattr(triton_kernel, "_SAMPLE_CHANGE", 0.0)  # nothing runs here
    real = triton_kernel._sample

    def sample(kind: Kind, device: torch.device, offset: int) -> Item:
        item = real(kind, torch.device("cpu"), offset)
        return item._replace(param=OnGpu(item.param, requires_grad=False))

    monkeypatch.setattr(triton_kernel, "_sample", sample)
    names = compilations(monkeypatch)
    assert gpu.prepare(SECOND, kinds)
    assert len(names) == 5 and len({name.split("[")[0] for name in names}) == 2, names

    names.clear()
    scales = [None, *(OnGpu(number, requires_grad=False) for number in torch.full((2,), 0.5))]  # 4 bytes apart
    for kind in kinds:
        for offset in (0, 2 if kind.param == "split" else 4):
            for count in (1, 2, 16, 17):
                items = [item_of(kind, 1 + 1000 * index, offset=offset) for index in range(count)]
                gpu.update(items, scales[count % 3])
    assert not names and len(driver.launches) > 16


def test_launches_go_to_the_tensors_device_and_the_threads_stream(driver: Driver) -> None:
    from offload.optim import triton_kernel

    assert driver.current == 0
    triton_kernel.update([item_of(Kind("split", "int8", False))])

    def other() -> None:
        driver.streams.current = "of the worker"
        triton_kernel.update([item_of(Kind("split", "int8", False))])

    worker = threading.Thread(target=other)
    worker.start()
    worker.join()
    assert [(launch.kernel, launch.device, launch.stream) for launch in driver.launches] == [
        ("_fetch", 1, ("default", 1)),
        ("_update", 1, ("default", 1)),
        ("_fetch", 1, ("of the worker", 1)),
        ("_update", 1, ("of the worker", 1)),
    ]
    assert driver.current == 0


def test_a_scale_goes_to_the_kernel_by_its_address(driver: Driver) -> None:
    from offload.optim import triton_kernel

    scale = Unread(torch.tensor(0.5), requires_grad=False)
    triton_kernel.update([item_of(Kind("split", "int8", False))], scale)
    triton_kernel.update([item_of(Kind("split", "int8", False))])
    first, second = (launch.scale for launch in driver.launches if launch.kernel == "_update")
    assert first.data_ptr() == scale.data_ptr()
    assert second.item() == 1.0


def test_tables_stay_until_they_are_fetched(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device does nothing before somebody waits for it, and the CPU fills the space for tables many times."""
    from offload.optim import triton_kernel

    monkeypatch.setattr(triton_kernel, "TABLE_WORDS", 400)
    tables = triton_kernel._tables(SECOND)
    queue = tables.queue
    driver.on_launch = queue.add
    most = 0
    for count in [1, 3, 1, 1, 7, 2, 20, 1, 1, 1, 5, 9, 4] * 4:
        triton_kernel.update([item_of(Kind("nearest", "bf16", False), 10 + index) for index in range(count)])
        most = max(most, len(queue.waiting))
    queue.run()
    assert most >= 5, "the CPU has not run ahead"


def test_many_tensors_have_several_launches(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.optim import triton_kernel

    monkeypatch.setattr(triton_kernel, "MOST_TENSORS", 8)
    items = [item_of(Kind("split", "bf16", False), 100) for _ in range(19)]
    triton_kernel.update(items)
    assert [launch.count for launch in driver.launches if launch.kernel == "_update"] == [8, 8, 3]
    fetches = [launch for launch in driver.launches if launch.kernel == "_fetch"]
    words = triton_kernel._UPDATE_ROW.size // 8
    addresses = [
        launch.source[launch.start + row * words].item()
        for launch in fetches
        for row in range((launch.size - 1) // (words + 1))
    ]
    assert addresses == [item.param.data_ptr() for item in items]


def test_a_table_is_read_past_the_caches(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may hold what was at the same place of the host's memory before."""
    triton = pytest.importorskip("triton", reason="triton has no build for this platform")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from offload.optim import triton_kernel

    def code_for(target: GPUTarget, hip: str | None, kind: str) -> str:
        monkeypatch.setattr(torch.version, "hip", hip)
        signature = {"source": "*i64", "target": "*i64", "start": "i32", "size": "i32", "CACHE": "constexpr"}
        constants = {"CACHE": triton_kernel.read_anew()}
        source = ASTSource(fn=triton_kernel._fetch, signature=signature, constexprs=constants, attrs={})
        return triton.compile(source, target=target, options=triton_kernel.OPTIONS).asm[kind]

    for capability in (80, 89, 90, 120):
        code = code_for(GPUTarget("cuda", capability, 32), None, "ptx")
        assert "ld.volatile.global" in code and "ld.global" not in code
    code = code_for(GPUTarget("hip", "gfx942", 64), "6.4", "amdgcn")
    loads = [line.split() for line in code.splitlines() if "global_load" in line]
    assert loads and all({"sc0", "sc1"} <= set(line) for line in loads)


def test_the_trial_of_every_kind_passes_where_the_kernel_works() -> None:
    pytest.importorskip("triton", reason="triton has no build for this platform")
    program = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from offload.optim import triton_kernel
from tests.optim.test_gpu import KINDS
triton_kernel.prepare(torch.device("cpu"), KINDS)
print(len(KINDS))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root)
    assert done.stdout == f"{len(KINDS)}\n", done.stderr


# Graphs


def test_a_step_is_not_captured_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    (param,) = parameters(cls=nn.Parameter)
    optimizer = offload.optim.AdamW([param])
    before = param.detach().clone()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"AdamW.step\(\) cannot be captured in a CUDA graph"):
        optimizer.step()
    assert torch.equal(param, before) and optimizer.state[param]["step"].item() == 0


def test_torch_compile_leaves_the_update_alone() -> None:
    """What it makes of torch's operations is rounded in other places."""
    compiled_operations = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        compiled_operations.extend(node.name for node in module.graph.nodes if node.op.startswith("call"))
        return module

    params, expected = parameters(2, cls=nn.Parameter), parameters(2, cls=nn.Parameter)
    optimizer, eager = offload.optim.AdamW(params), offload.optim.AdamW(expected)

    @torch.compile(backend=backend)
    def step() -> None:
        optimizer.step()

    for _ in range(3):
        step()
        eager.step()
    assert compiled_operations == []
    assert all(map(torch.equal, params, expected))
    torch._dynamo.reset()

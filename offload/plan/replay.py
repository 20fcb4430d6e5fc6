"""How long a training step takes on a machine that is not there: the engine itself, run on simulated time.

A model is described by what its layers cost; its tensors are shrunk by :attr:`Workload.shrink` and every byte counts
that many times. The optimizer is the real one, on :class:`offload.simulation.accelerator.SimulatedAccelerator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from offload.engine import units
from offload.engine.runtime import Event, Runtime
from offload.optimizer import OffloadOptimizer
from offload.simulation.accelerator import Rates, SimulatedAccelerator, Span

GB = 1e9


@dataclass(frozen=True)
class Machine:
    """Rates that a training step can count on, in units per second.

    Attributes:
        name: what tables call it.
        flops: 16-bit matrix products, as training reaches them.
        up: bytes from page-locked host memory to the device.
        down: bytes from the device to page-locked host memory.
        device: bytes of device memory, read and written.
        host: bytes of host memory, read and written.
    """

    name: str
    flops: float
    up: float
    down: float
    device: float
    host: float

    def rates(self) -> Rates:
        """What the simulator needs of it."""
        return Rates(up=self.up, down=self.down, device=self.device, host=self.host)


# Data sheets: dense 16-bit FLOPS with fp32 accumulation, device memory, PCIe 4.0 or 5.0 x16, DIMMs' transfer rate. Of
# these a training step gets about half of the FLOPS, 85 % of device memory, 80 % of the link, 75 % of host memory.
MACHINES = {
    "rtx4090": Machine("RTX 4090, DDR5-5600", 165e12 * 0.5, 25 * GB, 25 * GB, 1008 * GB * 0.85, 89.6 * GB * 0.75),
    "4070tis": Machine("4070 Ti SUPER, DDR4-3200", 88e12 * 0.5, 25 * GB, 25 * GB, 672 * GB * 0.85, 51.2 * GB * 0.75),
    "h200": Machine("H200, 8 channels of DDR5-4800", 989e12 * 0.5, 50 * GB, 50 * GB, 4800 * GB * 0.85, 307 * GB * 0.75),
}


@dataclass(frozen=True)
class Workload:
    """A model of equal layers, and the tokens of a step.

    Attributes:
        layers: number of layers.
        tensors: elements of each tensor of a layer.
        tokens: tokens of a step, in one forward and backward.
        edge: elements of the embedding, and of the head.
        dtype: of parameters, gradients and, for torch's optimizers, states.
        recompute: layers' forwards run again in backward (activation checkpointing).
        shrink: how many times smaller the simulated tensors are.
    """

    layers: int
    tensors: tuple[int, ...]
    tokens: int
    edge: int = 0
    dtype: torch.dtype = torch.bfloat16
    recompute: bool = True
    shrink: int = 65536

    @property
    def parameters(self) -> int:
        return self.layers * sum(self.tensors) + 2 * self.edge

    def forward_flops(self, elements: int) -> float:
        """Of the matrix products with so many weights; attention's own are left out."""
        return 2.0 * elements * self.tokens


LLAMA2_7B = Workload(
    layers=32, tensors=(4096 * 4096,) * 4 + (4096 * 11008,) * 3 + (4096,) * 2, tokens=4096, edge=32000 * 4096
)
"""https://huggingface.co/meta-llama/Llama-2-7b-hf/blob/main/config.json"""


@dataclass(frozen=True)
class Result:
    """Seconds of one step in the steady state, and what bounds it.

    Attributes:
        step: from one step to the next.
        compute: of them, forward and backward.
        busy: for each agent, the seconds per step that it works.
        trace: who did what when, in one step, from the beginning of its forward.
    """

    step: float
    compute: float
    busy: dict[str, float]
    trace: list[Span] = field(repr=False)

    @property
    def exposed(self) -> float:
        """Seconds per step that forward and backward wait for the optimizer."""
        return self.step - self.compute

    @property
    def bound(self) -> float:
        """No schedule is faster than what its busiest part needs."""
        return max(self.busy.values())


class _Charge(torch.autograd.Function):
    """Forward and backward take time on the compute stream; a parameter gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: _Work, *params: nn.Parameter) -> Tensor:
        ctx.work = work
        ctx.set_materialize_grads(False)
        if work.forward_seconds:
            work.simulator.compute(work.forward_seconds, f"{work.name}: forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        work = ctx.work
        if work.backward_seconds:
            work.simulator.compute(work.backward_seconds, f"{work.name}: backward")
        return grads[0], None, *[torch.ones_like(p) for p in work.parameters()]


class _Work(nn.Module):
    """One matrix product with a weight, or, without a weight, a layer's second forward in backward."""

    def __init__(
        self,
        simulator: SimulatedAccelerator,
        name: str,
        seconds: tuple[float, float],
        weight: Tensor | None,
    ) -> None:
        super().__init__()
        self.simulator, self.name = simulator, name
        self.forward_seconds, self.backward_seconds = seconds
        self.weight = None if weight is None else nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return _Charge.apply(x, self, *self.parameters())


def _layer(
    simulator: SimulatedAccelerator,
    name: str,
    machine: Machine,
    load: Workload,
    elements: Sequence[int],
    *,
    again: bool,
) -> nn.Sequential:
    """A layer whose gradients come one by one, the last tensor's first.

    Args:
        again: its forward runs once more at the beginning of its backward.
    """
    works = []
    for count in elements:
        forward = load.forward_flops(count) / machine.flops
        weight = torch.zeros(max(1, count // load.shrink), dtype=load.dtype)
        works.append(_Work(simulator, name, (forward, 2 * forward), weight))
    if again:
        works.append(_Work(simulator, name, (0.0, load.forward_flops(sum(elements)) / machine.flops), None))
    return nn.Sequential(*works)


def _model(simulator: SimulatedAccelerator, machine: Machine, load: Workload) -> nn.Sequential:
    model = nn.Sequential()
    if load.edge:
        weight = torch.zeros(load.edge // load.shrink, dtype=load.dtype)
        model.add_module("embedding", _Work(simulator, "embedding", (0.0, 0.0), weight))
    for index in range(load.layers):
        layer = _layer(simulator, str(index), machine, load, load.tensors, again=load.recompute)
        model.add_module(str(index), layer)
    if load.edge:
        forward = load.forward_flops(load.edge) / machine.flops
        model.add_module("head", _Work(simulator, "head", (forward, 2 * forward), weight.clone()))
    return model


class _Simulated(OffloadOptimizer):
    """The optimizer on a given runtime."""

    def __init__(self, runtime: Runtime, *args: Any, **kwargs: Any) -> None:
        self._given = runtime
        super().__init__(*args, **kwargs)

    def _runtime(self, groups: list[dict[str, Any]]) -> Runtime:
        return self._given


@contextmanager
def _small_chunks(shrink: int) -> Iterator[None]:
    with mock.patch.object(units, "CHUNK_ELEMENTS", max(1, units.CHUNK_ELEMENTS // shrink)):
        yield


WARM_UP, MEASURED = 3, 3
"""Steps: the first creates states, the next settle into the rhythm that goes on."""

Stepper = Callable[[], None]


def replay(machine: Machine, load: Workload, *, waits_per_unit: bool = True, **optimizer: Any) -> Result:
    """The steady state of training on a machine.

    Args:
        machine: rates.
        load: what is trained.
        waits_per_unit: the forward waits for each unit's update; otherwise ``step()`` waits for all.
        **optimizer: arguments of :class:`offload.OffloadOptimizer`.
    """

    def build(simulator: SimulatedAccelerator, model: nn.Module) -> Stepper:
        given = model if waits_per_unit else None
        built = _Simulated(simulator, model.named_parameters(), lr=1e-3, model=given, **optimizer)

        def step() -> None:
            built.step()
            built.zero_grad()

        return step

    return _run(machine, load, build)


def replay_compute(machine: Machine, load: Workload) -> Result:
    """Forward and backward without any optimizer."""

    def build(simulator: SimulatedAccelerator, model: nn.Module) -> Stepper:
        return lambda: model.zero_grad()

    return _run(machine, load, build)


def replay_torchao(machine: Machine, load: Workload) -> Result:
    """The schedule of torchao's CPUOffloadOptimizer: gradients come down during backward, ``step()`` updates on the
    CPU in the order of their arrival, and waits until all parameters are up again.

    Source: https://github.com/pytorch/ao/blob/main/torchao/optim/cpu_offload.py
    """

    def build(simulator: SimulatedAccelerator, model: nn.Module) -> Stepper:
        hosts: dict[Tensor, nn.Parameter] = {}
        optimizers: dict[Tensor, torch.optim.Optimizer] = {}
        arrived: dict[Tensor, Event] = {}
        units_of: dict[Tensor, str] = {param: units.unit_of(name) for name, param in model.named_parameters()}

        def on_gradient(param: Tensor) -> None:
            assert param.grad is not None
            host = hosts[param].grad
            assert host is not None
            arrived[param] = simulator.copy(
                host, param.grad, "down", (simulator.record(),), f"{units_of[param]}: gradient"
            )
            param.grad = None

        for param in model.parameters():
            buffers = [simulator.empty_pinned(param.nbytes).view(param.dtype) for _ in range(2)]
            hosts[param] = host = nn.Parameter(buffers[0].zero_())
            host.grad = buffers[1].zero_()
            optimizers[param] = torch.optim.AdamW([host], lr=1e-3, fused=True)
            param.register_post_accumulate_grad_hook(on_gradient)

        def step() -> None:
            def update() -> None:
                # On a thread of its own, because the simulator charges host work to started threads.
                for param, event in arrived.items():
                    event.synchronize()
                    name = units_of[param]
                    with simulator.working(f"{name}: update"):
                        optimizers[param].step()
                    uploads.append(simulator.copy(param.detach(), hosts[param].detach(), "up", (), f"{name}: weight"))
                uploads[-1].synchronize()

            uploads: list[Event] = []
            simulator.start(update, "torchao").join()
            simulator.wait(uploads[-1])
            arrived.clear()

        return step

    return _run(machine, load, build)


def _within(trace: Sequence[Span], begin: float, end: float) -> Iterator[Span]:
    """What lies between two points in time, the first of them being zero."""
    for span in trace:
        if span.end > begin and span.start < end and span.end > span.start:
            agent = span.agent.partition("#")[0]
            yield Span(agent, span.name, max(span.start, begin) - begin, min(span.end, end) - begin)


def _run(machine: Machine, load: Workload, build: Callable[[SimulatedAccelerator, nn.Module], Stepper]) -> Result:
    simulator = SimulatedAccelerator(machine.rates(), order="time", scale=load.shrink)
    begins: list[float] = []
    with simulator, _small_chunks(load.shrink):
        model = _model(simulator, machine, load)
        step = build(simulator, model)
        for _ in range(WARM_UP + MEASURED + 1):
            x = torch.zeros(1, requires_grad=True)
            # Where the compute stream stands once it has waited for what the first layer needs.
            handle = model[0].register_forward_pre_hook(lambda *_: begins.append(simulator.now("compute")))
            y = model(x)
            handle.remove()
            y.sum().backward()
            step()
        trace = list(simulator.trace)
    begin, end = begins[WARM_UP], begins[WARM_UP + MEASURED]
    inside = [span for span in trace if begin <= span.start < end]
    busy: dict[str, float] = {}
    for span in inside:
        agent = span.agent.partition("#")[0]  # a thread that was started again
        busy[agent] = busy.get(agent, 0.0) + (span.end - span.start) / MEASURED
    return Result(
        step=(end - begin) / MEASURED,
        compute=busy["compute"],
        busy=busy,
        trace=list(_within(trace, begins[WARM_UP], begins[WARM_UP + 1])),
    )

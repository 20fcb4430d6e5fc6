"""What a training step takes on a machine that is not there, in time and memory: the engine itself, simulated.

Tensors are shrunk by :attr:`~offload.plan.workload.Workload.shrink` and every byte counts that many times. The
optimizer is the real one, on :class:`offload.simulation.accelerator.SimulatedAccelerator`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import auto, machinery
from offload.engine import units
from offload.engine.runtime import Event, Runtime
from offload.optim import cpu, gpu
from offload.optim.formats import Item
from offload.optimizer import OffloadOptimizer
from offload.placing import Speeds
from offload.plan.workload import Machine, Workload
from offload.simulation.accelerator import SimulatedAccelerator, Span
from offload.simulation.memory import Use
from offload.simulation.sharing import Sharing


@dataclass(frozen=True)
class SteadyState:
    """One step in the steady state, and what bounds it, in seconds; the device's memory.

    Attributes:
        step: from one step to the next; infinite where memory ran out.
        compute: of them, forward and backward.
        busy: for each agent or resource, the seconds per step that it works.
        trace: who did what when, in one step, from the beginning of its forward.
        first: memory of construction and the first step.
        steady: memory of the steps in the steady state.
    """

    step: float
    compute: float
    busy: dict[str, float]
    trace: list[Span] = field(repr=False)
    first: Use
    steady: Use

    @property
    def exposed(self) -> float:
        """Seconds per step that forward and backward wait for the optimizer, and for any collectives."""
        return self.step - self.compute

    @property
    def bound(self) -> float:
        """No schedule with the same work is faster than what its busiest part needs."""
        return max(self.busy.values())


@dataclass(frozen=True)
class Result(SteadyState):
    """A step of one card.

    Attributes:
        pinned_late: bytes of host memory that were page-locked after construction.
        out_of_memory: when the device had too little and what it said, ``step 1: ...``; empty where it had enough.
        micro_batch: of three micro-batches or more, what the second takes; otherwise the whole step.
        placed: with strategy ``auto``, of all states the share of each way that their updates go.
    """

    pinned_late: int
    out_of_memory: str = ""
    micro_batch: float = math.nan
    placed: Mapping[str, float] = field(default_factory=dict)


class _Stage(nn.Module):
    """One matrix product with a weight, and what autograd keeps for it.

    Args:
        seconds: of forward and backward.
        launches: in forward and backward.
        weight: what it multiplies with.
        kept: bytes that it keeps for its backward.
        gradients: bytes of activations' gradients while its backward runs.
    """

    def __init__(
        self,
        simulator: SimulatedAccelerator,
        name: str,
        *,
        seconds: tuple[float, float],
        launches: tuple[int, int],
        weight: Tensor,
        kept: int = 0,
        gradients: int = 0,
    ) -> None:
        super().__init__()
        self.simulator, self.name = simulator, name
        self.forward_seconds, self.backward_seconds = seconds
        self.forward_launches, self.backward_launches = launches
        self.kept, self.gradients = kept, gradients
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return _Run.apply(x, self, self.weight)


class _Run(torch.autograd.Function):
    """A stage's forward and backward take time on the compute stream, and memory; its weight gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: _Stage, weight: nn.Parameter) -> Tensor:
        ctx.stage = stage
        ctx.set_materialize_grads(False)
        with stage.simulator.purpose("activations"):
            # Something is always kept, so that a checkpointed layer runs again when its last stage asks for it.
            ctx.save_for_backward(torch.empty(stage.kept, dtype=torch.uint8) if stage.kept else x)
            if stage.forward_seconds:
                stage.simulator.compute(stage.forward_seconds, f"{stage.name}: forward", stage.forward_launches)
            return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        stage = ctx.stage
        kept = ctx.saved_tensors
        with stage.simulator.purpose("activations"):
            passing = torch.empty(stage.gradients, dtype=torch.uint8)
        if stage.backward_seconds:
            stage.simulator.compute(stage.backward_seconds, f"{stage.name}: backward", stage.backward_launches)
        with stage.simulator.purpose("gradients"):
            gradient = torch.ones_like(stage.weight)
        del kept, passing  # until here
        return grads[0], None, gradient


class _Layer(nn.Sequential):
    """Stages, whose forward runs again in backward if ``recompute``."""

    def __init__(self, *stages: _Stage, recompute: bool) -> None:
        super().__init__(*stages)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)
        return super().forward(x)


class _Loss(nn.Module):
    """The head and the loss in one, chunk by chunk: both gradients are there when forward is done."""

    def __init__(
        self, simulator: SimulatedAccelerator, seconds: tuple[float, float], weight: Tensor | None, logits: int
    ) -> None:
        super().__init__()
        self.simulator, self.logits = simulator, logits
        self.forward_seconds, self.backward_seconds = seconds
        self.weight = None if weight is None else nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return _RunLoss.apply(x, self, self.weight)


class _RunLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: _Loss, weight: nn.Parameter | None) -> Tensor:
        ctx.loss = loss
        with loss.simulator.purpose("logits"):
            logits = torch.empty(loss.logits, dtype=torch.uint8)
        loss.simulator.compute(loss.forward_seconds, "head: forward")
        with loss.simulator.purpose("gradients"):
            of_weight = None if weight is None else torch.ones_like(weight)  # every chunk's product is added to it
        del logits
        with loss.simulator.purpose("activations"):
            of_input = torch.empty_like(x)
        ctx.gradients = [of_input, of_weight]
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (of_input, of_weight), ctx.gradients = ctx.gradients, None
        ctx.loss.simulator.compute(ctx.loss.backward_seconds, "head: backward")
        return of_input.mul_(1.0), None, None if of_weight is None else of_weight.mul_(1.0)


def _layer(simulator: SimulatedAccelerator, name: str, machine: Machine, load: Workload) -> _Layer:
    """A layer whose gradients come one by one, the last tensor's first."""
    number = len(load.tensors)
    activations = load.activations
    stages = []
    for index, (count, seconds) in enumerate(zip(load.tensors, load.stage_seconds(machine), strict=True)):
        stages.append(
            _Stage(
                simulator,
                name,
                seconds=seconds,
                launches=(_share(load.launches[0], index, number), _share(load.launches[1], index, number)),
                weight=_parameter(load, count),
                kept=0 if activations is None else _bytes(load, activations.kept[index]),
                gradients=0 if activations is None else _bytes(load, activations.gradients[index]),
            )
        )
    return _Layer(*stages, recompute=load.recompute)


def _share(total: int, index: int, number: int) -> int:
    """Of ``total`` divided among ``number``, at least one each."""
    return max(1, total * (index + 1) // number - total * index // number)


def _parameter(load: Workload, elements: int) -> Tensor:
    return torch.zeros(max(1, elements // load.shrink), dtype=load.dtype)


def _bytes(load: Workload, per_token: float) -> int:
    """Of all tokens, in the shrunk model."""
    return math.ceil(per_token * load.tokens / load.shrink)


def _model(simulator: SimulatedAccelerator, machine: Machine, load: Workload) -> nn.Sequential:
    model = nn.Sequential()
    with simulator.purpose("parameters"):
        if load.edge:
            weight = _parameter(load, load.edge)
            embedding = _Stage(simulator, "embedding", seconds=(0.0, 0.0), launches=(1, 1), weight=weight)
            model.add_module("embedding", embedding)
        for index in range(load.layers):
            model.add_module(str(index), _layer(simulator, str(index), machine, load))
        if load.edge or load.passes:
            seconds = load.head_seconds(machine)
            logits = 0 if load.activations is None else load.activations.logits / load.activations.chunks
            of_head = _parameter(load, load.head_elements) if load.head_elements else None
            model.add_module("head", _Loss(simulator, seconds, of_head, _bytes(load, logits)))
    return model


class _Simulated(OffloadOptimizer):
    """The optimizer on a given runtime."""

    def __init__(self, runtime: Runtime, *args: Any, **kwargs: Any) -> None:
        self._given = runtime
        super().__init__(*args, **kwargs)

    def _build(self, groups: list[dict[str, Any]], *, is_final: bool) -> None:
        with mock.patch.object(machinery, "_runtime", lambda *_: self._given):
            super()._build(groups, is_final=is_final)


@contextmanager
def _small_chunks(shrink: int) -> Iterator[None]:
    with mock.patch.object(units, "CHUNK_ELEMENTS", max(1, units.CHUNK_ELEMENTS // shrink)):
        yield


WARM_UP, MEASURED = 3, 3
"""Steps: the first creates states, the next settle into the rhythm that goes on."""

QUICK = (2, 1)
"""Of these as few as tell the step to a percent or two."""


@dataclass(frozen=True)
class _Training:
    """What surrounds forward and backward.

    Attributes:
        step: after the last micro-batch's backward.
        accumulate: a context for the backward of those before it.
        settle: waits for all that is under way.
        placed: as :attr:`Result.placed`.
    """

    step: Callable[[], None]
    accumulate: Callable[[], AbstractContextManager[Any]] = nullcontext
    settle: Callable[[], None] = lambda: None
    placed: Callable[[], Mapping[str, float]] = dict


@contextmanager
def _counting_packed_updates() -> Iterator[None]:
    """The packed AdamW's kernels, which torch does not see, take their memory traffic."""
    with mock.patch.object(cpu, "update", _touch), mock.patch.object(gpu, "update", _touch):
        yield


def _touch(items: Sequence[Item], scale: Tensor | None = None) -> None:
    for item in items:
        states = (item.exp_avg, item.exp_avg_sq, item.exp_avg_scale, item.exp_avg_sq_scale, item.remainder)
        written = [item.param, *(state for state in states if state is not None)]
        torch.ops.offload_replay.update(item.grad, [tensor.detach() for tensor in written])


_LIBRARY = torch.library.Library("offload_replay", "FRAGMENT")
_LIBRARY.define("update(Tensor gradient, Tensor(a!)[] written) -> ()")
_LIBRARY.impl("update", lambda gradient, written: None, "CompositeExplicitAutograd")


def replay(
    machine: Machine,
    load: Workload,
    *,
    memory: int | None = None,
    waits_per_unit: bool = True,
    steps: tuple[int, int] = (WARM_UP, MEASURED),
    shares_host_memory: bool = False,
    room: int | None = None,
    tries_cpu: bool = True,
    is_checked: bool = True,
    **optimizer: Any,
) -> Result:
    """The steady state of training on a machine.

    Args:
        machine: rates.
        load: what is trained.
        memory: bytes of the device; None for as many as it takes.
        waits_per_unit: the forward waits for each unit's update; otherwise ``step()`` waits for all.
        steps: before the steady state, and in it.
        is_checked: for races too, and memory is told (:class:`offload.simulation.accelerator.SimulatedAccelerator`).
        shares_host_memory: copies over the link and the CPU's updates get together what the host's memory gives.
        room: bytes of the device that strategy ``auto`` finds left over, when it times each try by one step; None for
            what ``memory`` leaves.
        tries_cpu: with ``room``, it times steps with the CPU's help where it may have that; otherwise it only places
            states as it does before.
        **optimizer: arguments of :class:`offload.OffloadOptimizer`.
    """

    def build(simulator: SimulatedAccelerator, model: nn.Module) -> _Training:
        given = model if waits_per_unit else None
        in_flight = optimizer.pop("in_flight_gib", 1.0) / load.shrink
        built = _Simulated(
            simulator, model.named_parameters(), lr=1e-3, model=given, in_flight_gib=in_flight, **optimizer
        )

        def step() -> None:
            built.step()
            built.zero_grad()

        def placed() -> Mapping[str, float]:
            found = {} if built.auto is None else built.auto.placed()
            total = sum(entry["bytes"] for entry in found.values())
            return {way: entry["bytes"] / total for way, entry in found.items()}

        return _Training(step, built.accumulate, built.synchronize, placed)

    sharing = _shared(machine) if shares_host_memory else None
    with _counting_packed_updates(), _deciding_soon(tries_cpu=tries_cpu) if room is not None else nullcontext():
        return _run(machine, load, memory, build, steps, sharing, room, is_checked=is_checked)


DECIDED, DECIDED_WITH_CPU = 2, 9
"""Steps in which ``auto`` decides about a given room, and one in which that settles: without the CPU's help, and with a
try of all and of half of it."""


@contextmanager
def _deciding_soon(*, tries_cpu: bool) -> Iterator[None]:
    """Simulated steps are all alike, and no allocator has to be watched."""
    never = nullcontext() if tries_cpu else mock.patch.object(auto.Auto, "_try_cpu", lambda _: iter(()))
    with mock.patch.multiple(auto, WARM_UP=1, TIMED=1), never:
        yield


def _shared(machine: Machine) -> Sharing:
    """The host's memory, of which each kind of work at its full speed takes a share."""
    rates = {"up": machine.up, "down": machine.down, "host": machine.host}
    return Sharing({kind: {"host's memory": rate / machine.shared} for kind, rate in rates.items()})


def speeds_of(machine: Machine, load: Workload, *, cpu_bytes: float) -> Speeds:
    """What strategy ``auto`` would measure there, in the shrunk model's bytes.

    Args:
        machine: rates.
        load: what is trained.
        cpu_bytes: of host memory, that the update of a parameter reads and writes.
    """
    up, down, host, shared = (rate / load.shrink for rate in (machine.up, machine.down, machine.host, machine.shared))
    return Speeds(up, down, host / cpu_bytes, shared)


def replay_compute(machine: Machine, load: Workload) -> Result:
    """Forward and backward without any optimizer."""

    def build(simulator: SimulatedAccelerator, model: nn.Module) -> _Training:
        return _Training(lambda: model.zero_grad())

    return _run(machine, load, None, build)


def replay_torchao(
    machine: Machine, load: Workload, *, shares_host_memory: bool = False, is_checked: bool = True
) -> Result:
    """The schedule of torchao's CPUOffloadOptimizer: gradients come down during backward, ``step()`` updates on the
    CPU in the order of their arrival, and waits until all parameters are up again. Arguments as of :func:`replay`.

    Source: https://github.com/pytorch/ao/blob/main/torchao/optim/cpu_offload.py
    """

    def build(simulator: SimulatedAccelerator, model: nn.Module) -> _Training:
        hosts: dict[Tensor, nn.Parameter] = {}
        optimizers: dict[Tensor, torch.optim.Optimizer] = {}
        arrived: dict[Tensor, Event] = {}
        held: dict[Tensor, Tensor] = {}
        units_of: dict[Tensor, str] = {param: units.unit_of(name) for name, param in model.named_parameters()}

        def on_gradient(param: Tensor) -> None:
            assert param.grad is not None
            host = hosts[param].grad
            assert host is not None
            arrived[param] = simulator.copy(
                host, param.grad, "down", (simulator.record(),), f"{units_of[param]}: gradient"
            )
            held[param], param.grad = param.grad, None

        for param in model.parameters():
            buffers = [simulator.empty_pinned(param.nbytes).view(param.dtype) for _ in range(2)]
            hosts[param] = host = nn.Parameter(buffers[0].zero_())
            host.grad = buffers[1].zero_()
            optimizers[param] = torch.optim.AdamW([host], lr=1e-3, fused=True)
            param.register_post_accumulate_grad_hook(on_gradient)

        def step() -> None:
            def update() -> None:
                # On a thread of its own, because the simulator charges host work to started threads.
                uploads: list[Event] = []
                for param, event in arrived.items():
                    event.synchronize()
                    del held[param]
                    name = units_of[param]
                    with simulator.working(f"{name}: update"):
                        optimizers[param].step()
                    uploads.append(simulator.copy(param.detach(), hosts[param].detach(), "up", (), f"{name}: weight"))
                uploads[-1].synchronize()

            simulator.start(update, "torchao").join()

        return _Training(step)

    sharing = _shared(machine) if shares_host_memory else None
    return _run(machine, load, None, build, sharing=sharing, is_checked=is_checked)


def _within(trace: Sequence[Span], begin: float, end: float) -> Iterator[Span]:
    """What lies between two points in time, the first of them being zero."""
    for span in trace:
        if span.end > begin and span.start < end and span.end > span.start:
            agent = span.agent.partition("#")[0]
            yield Span(agent, span.name, max(span.start, begin) - begin, min(span.end, end) - begin)


def _run(
    machine: Machine,
    load: Workload,
    memory: int | None,
    build: Callable[[SimulatedAccelerator, nn.Module], _Training],
    steps: tuple[int, int] = (WARM_UP, MEASURED),
    sharing: Sharing | None = None,
    room: int | None = None,
    *,
    is_checked: bool = True,
) -> Result:
    warm_up, measured = steps
    simulator = SimulatedAccelerator(
        machine.rates(),
        order="time",
        scale=load.shrink,
        memory=memory,
        sharing=sharing,
        spare=room,
        is_checked=is_checked,
    )
    begins: list[float] = []
    first: Use | None = None
    steady: Use | None = None
    placed: Mapping[str, float] = {}
    pins, message, place = 0, "", "construction"
    try:
        with simulator, _small_chunks(load.shrink):
            model = _model(simulator, machine, load)
            training = build(simulator, model)
            pins = len(simulator.pins)
            passing = 1 if load.activations is None else _bytes(load, load.activations.passing) // 2

            def forward() -> Tensor:
                with simulator.purpose("activations"):
                    x = torch.zeros(passing, dtype=torch.bfloat16)
                # Where the compute stream stands once it has waited for what the first layer needs.
                handle = model[0].register_forward_pre_hook(lambda *_: begins.append(simulator.now("compute")))
                y: Tensor = model(x)
                handle.remove()
                return y

            for number in range(warm_up + measured):
                place = f"step {number + 1}"
                if number in (1, warm_up):
                    first = first or simulator.memory.use()
                    simulator.memory.reset_peak()
                for micro_batch in range(load.micro_batches):
                    y = forward()
                    with nullcontext() if micro_batch == load.micro_batches - 1 else training.accumulate():
                        y.sum().backward()
                    del y
                training.step()
            steady = simulator.memory.use()
            # What is measured ends with the beginning of this forward; updates that are under way then belong to it.
            forward()
            training.settle()
            placed = training.placed()
            trace = list(simulator.trace)
    except torch.OutOfMemoryError as error:
        message = f"{place}: {error}"
    steady = steady or simulator.memory.use()
    late = sum(pin.nbytes for pin in simulator.pins[pins:])
    if message:
        return Result(math.inf, math.inf, {}, [], first or steady, steady, late, message)
    first_of, last_of = warm_up * load.micro_batches, (warm_up + measured) * load.micro_batches
    begin, end = begins[first_of], begins[last_of]
    inside = [span for span in trace if begin <= span.start < end]
    busy: dict[str, float] = {}
    for span in inside:
        agent = span.agent.partition("#")[0]  # a thread that was started again
        busy[agent] = busy.get(agent, 0.0) + (span.end - span.start) / measured
    assert first is not None
    return Result(
        step=(end - begin) / measured,
        compute=busy["compute"],
        busy=busy,
        trace=list(_within(trace, begin, begins[first_of + load.micro_batches])),
        first=first,
        steady=steady,
        pinned_late=late,
        micro_batch=begins[first_of + 2] - begins[first_of + 1] if load.micro_batches > 2 else (end - begin) / measured,
        placed=placed,
    )

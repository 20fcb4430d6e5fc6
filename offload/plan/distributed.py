"""A training step of several ranks under FSDP2, replayed: FSDP2 and the engine are the real ones, on one rank of a
machine that is not there.

All ranks do the same at the same time, so that one of them tells of all. Its process group has no others in it: what a
collective would take comes from :class:`offload.plan.collectives.System`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.utils._python_dispatch import _disable_current_modes

from offload.distributed.sharding import keep_gathered, shard
from offload.engine import units
from offload.engine.runtime import Event
from offload.engine.shards import local
from offload.plan.collectives import System
from offload.plan.replay import (
    SteadyState,
    _bytes,
    _counting_packed_updates,
    _model,
    _Simulated,
    _small_chunks,
    _Training,
    _within,
)
from offload.plan.workload import Machine, Workload
from offload.simulation.accelerator import SimulatedAccelerator, Span
from offload.simulation.fsdp import STREAMS, played_streams
from offload.simulation.memory import Use
from offload.simulation.sharing import Sharing


class RankResult(SteadyState):
    """A step of one of the ranks, of whose resources ``busy`` tells: ``compute``, ``up`` and ``down`` (the link),
    ``host`` (its share of the host's memory) and ``collectives``, each as long as its work alone would take."""


@dataclass(frozen=True)
class Plan:
    """What is the same for all ways to update.

    Attributes:
        system: the cards and their host.
        ranks: how many of them.
        load: what each of them computes; the gradients of every micro-batch are reduced.
        resharding: ``reshard_after_forward`` of the layers. False also keeps weights between micro-batches.
        reduce_dtype: in which gradients are reduced, as the recipes' key says.
    """

    system: System
    ranks: int
    load: Workload
    resharding: bool = True
    reduce_dtype: torch.dtype = torch.float32


WARM_UP, MEASURED = 2, 2
"""Steps: a step of several cards takes three times as long to replay as one of a single card."""

Build = Callable[[SimulatedAccelerator, nn.Module], _Training]


def replay_engine(plan: Plan, *, waits_per_unit: bool = True, **optimizer: Any) -> RankResult:
    """The steady state with :class:`offload.OffloadOptimizer`.

    Args:
        plan: what is trained, and on what.
        waits_per_unit: each all-gather waits for the updates of what it reads; otherwise ``step()`` waits for all.
        **optimizer: its arguments.
    """
    in_flight = optimizer.pop("in_flight_gib", 1.0) / plan.load.shrink

    def build(simulator: SimulatedAccelerator, model: nn.Module) -> _Training:
        given = model if waits_per_unit else None
        built = _Simulated(
            simulator, model.named_parameters(), lr=1e-3, model=given, in_flight_gib=in_flight, **optimizer
        )

        def step() -> None:
            # What the optimizer computes on the computing stream takes its time there.
            with simulator.on("compute"):
                built.step()
            built.zero_grad()

        return _Training(step, built.accumulate)

    with _counting_packed_updates():
        return _run(plan, build)


def replay_nothing(plan: Plan) -> RankResult:
    """Forward, backward and collectives without any update."""

    def build(simulator: SimulatedAccelerator, model: nn.Module) -> _Training:
        return _Training(model.zero_grad)

    return _run(plan, build)


def replay_cpu_offload(plan: Plan) -> RankResult:
    """FSDP2's ``CPUOffloadPolicy`` with torch's fused AdamW.

    Weights rest on the host and go up before every all-gather. Gradients come down behind each reduce-scatter, and the
    CPU waits for those that are added to others. The update runs on the CPU when backward is over.

    Source: FSDPParam.all_gather_inputs, foreach_reduce and FSDPParamGroup.finalize_backward in
    https://github.com/pytorch/pytorch/tree/v2.13.0/torch/distributed/fsdp/_fully_shard
    """

    def build(simulator: SimulatedAccelerator, model: nn.Module) -> _Training:
        hosts: dict[Tensor, nn.Parameter] = {}
        arrived: list[Event] = []
        names: dict[Tensor, str] = {param: units.unit_of(name) for name, param in model.named_parameters()}
        machine, scale = plan.system.machine, plan.load.shrink

        def on_gradient(param: Tensor) -> None:
            assert param.grad is not None
            part, host = local(param.grad), hosts[param]
            simulator.transfer(part.nbytes * scale / machine.down, f"{names[param]}: gradient", "down", reads=[part])
            arrived.append(simulator.record())
            param.grad = None
            if host.grad is None:
                host.grad = sums[param]
            else:
                arrived[-1].synchronize()
                simulator.start(lambda: add(host, names[param]), "adds").join()

        def add(host: nn.Parameter, name: str) -> None:
            assert host.grad is not None
            with simulator.working(f"{name}: add"):
                host.grad.add_(host.grad)

        def update() -> None:
            with simulator.working("update"):
                optimizer.step()

        def step() -> None:
            for event in arrived:
                event.synchronize()
            arrived.clear()
            simulator.start(update, "adamw").join()
            for host in hosts.values():
                host.grad = None

        def fetched(params: Any) -> Any:
            for param in params:
                part = param._sharded_param_data
                simulator.transfer(part.nbytes * scale / machine.up, f"{names[param.sharded_param]}: weight", "up")
            return inputs_of(params)

        sums: dict[Tensor, Tensor] = {}
        for param in model.parameters():
            part = local(param)
            buffers = [simulator.empty_pinned(part.nbytes).view(part.dtype) for _ in range(2)]
            hosts[param], sums[param] = nn.Parameter(buffers[0].zero_()), buffers[1].zero_()
            param.register_post_accumulate_grad_hook(on_gradient)
        optimizer = torch.optim.AdamW(hosts.values(), lr=1e-3, fused=True)
        stack.enter_context(mock.patch.object(_fsdp_collectives, "_get_param_all_gather_inputs", fetched))
        return _Training(step)

    inputs_of = _fsdp_collectives._get_param_all_gather_inputs
    with ExitStack() as stack:
        return _run(plan, build)


@contextmanager
def _alone_of(ranks: int) -> Iterator[None]:
    """Inside, this process is the first of so many ranks, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a replay of several ranks needs a process that is in no process group")
    hook = sys.excepthook  # which a process group makes begin every line with a rank
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _sharded(model: nn.Sequential, plan: Plan) -> nn.Sequential:
    """As the recipes for several processes do it: every layer, and the embedding, is gathered by itself."""
    mesh = init_device_mesh("cpu", (plan.ranks,))
    head = 1 if plan.load.head_elements else 0
    blocks = list(model)[: len(model) - head]
    with _disable_current_modes():  # a simulator does not see what DTensor finds out about operations
        shard(model, blocks, mesh, reshard_after_forward=plan.resharding, reduce_dtype=plan.reduce_dtype)
    return model


def _run(plan: Plan, build: Build) -> RankResult:
    load, machine = plan.load, plan.system.rank(plan.ranks)
    sharing = plan.system.sharing(plan.ranks)
    simulator = SimulatedAccelerator(machine.rates(), order="time", scale=load.shrink, streams=STREAMS, sharing=sharing)
    begins: list[float] = []
    first: Use | None = None

    def cost(name: str, nbytes: int) -> float:
        return plan.system.seconds(name, nbytes, plan.ranks)

    passing = 1 if load.activations is None else _bytes(load, load.activations.passing) // 2
    with _alone_of(plan.ranks), simulator, _small_chunks(load.shrink), played_streams(simulator, cost):
        model = _sharded(_model(simulator, machine, load), plan)
        simulator.memory.reset_peak()
        training = build(simulator, model)
        for number in range(WARM_UP + MEASURED + 1):
            if number in (1, WARM_UP):
                first = first or simulator.memory.use()
                simulator.memory.reset_peak()
            # Where the compute stream stands once it has waited for what the first layer needs.
            handle = model[0].register_forward_pre_hook(lambda *_: begins.append(simulator.now("compute")))
            for micro in range(load.micro_batches):
                is_last = micro == load.micro_batches - 1
                keep_gathered(model, not plan.resharding and not is_last)
                x = torch.zeros(passing, dtype=torch.bfloat16)
                with nullcontext() if is_last else training.accumulate():
                    model(x).sum().backward()
                handle.remove()
            training.step()
            if len(begins) > 1:
                sharing.forget(begins[-2])
        trace, steady = list(simulator.trace), simulator.memory.use()
    assert first is not None
    begin, end = begins[WARM_UP], begins[WARM_UP + MEASURED]
    return RankResult(
        step=(end - begin) / MEASURED,
        compute=load.micro_batches * _compute(load, machine),
        busy=_busy(sharing, trace, begin, end),
        trace=list(_within(trace, begins[WARM_UP], begins[WARM_UP + 1])),
        first=first,
        steady=steady,
    )


def _compute(load: Workload, machine: Machine) -> float:
    """Seconds of a micro-batch's forward and backward."""
    forward, backward = (sum(seconds) for seconds in zip(*load.stage_seconds(machine), strict=True))
    return load.layers * ((2 if load.recompute else 1) * forward + backward) + sum(load.head_seconds(machine))


def _busy(sharing: Sharing, trace: list[Span], begin: float, end: float) -> dict[str, float]:
    computing = sum(span.end - span.start for span in trace if span.agent == "compute" and begin <= span.start < end)
    work = {"compute": computing, **sharing.seconds(begin, end)}
    return {name: seconds / MEASURED for name, seconds in work.items() if seconds}

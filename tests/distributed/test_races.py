"""What orders updates and FSDP2's collectives is needed: without any part of it, the simulator sees a race."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from offload.engine import fsdp
from offload.engine.engine import Engine
from offload.engine.in_flight import InFlight
from offload.engine.norms import Norms
from offload.engine.pipeline import Job, Pipeline
from offload.engine.runtime import DONE
from offload.engine.shards import gradient_of
from tests.distributed.ranks import Ranks
from tests.distributed.test_fsdp import FUSED, on_a_grid, plain_optimizer, prefetching
from tests.distributed.training import (
    Case,
    Llama,
    device,
    differing,
    loss_of,
    made,
    optimizer_of,
    parts,
    sharded,
    states_of,
    train,
)
from tests.engine import test_races as engine_races

# ---- scenarios


def by_children() -> Any:
    """A group for each module that has parameters: several for a unit, and none that comes before the unit's others."""
    model = Llama(layers=3)
    for layer in model.layers:
        for child in layer.children():
            fully_shard(child)
    return fully_shard(model)


def ignoring() -> Any:
    """Gradients of a unit come on two streams: those of parameters that FSDP2 leaves alone on the computing one."""
    model = Llama(layers=3)
    return sharded(model, ignored_params={layer.out.bias for layer in model.layers})


@dataclass(frozen=True)
class Scenario:
    """Training, on a simulator of the ``kind`` that :func:`device` knows."""

    build: Callable[[], Any]
    case: Case
    kind: str = "simulated"


# Norms of gradients on the host go to the device for the sum over ranks, which is one memory with the host here.
SCENARIOS = {
    "in backward": Scenario(prefetching, Case("stream", in_backward=True, options=FUSED)),
    "at step": Scenario(prefetching, Case("host", options=FUSED)),
    "clipped": Scenario(prefetching, Case("stream", offload_gradients=True, clip=0.5, options=FUSED)),
    "on the host": Scenario(prefetching, Case("host", in_backward=True, offload_gradients=True, options=FUSED)),
    "accumulated": Scenario(
        prefetching, Case("host", offload_gradients=True, accumulation=2, attached=False, options=FUSED)
    ),
    "by children": Scenario(by_children, Case("host", options=FUSED)),
    "no gather": Scenario(lambda: on_a_grid(2, 1), Case("stream", in_backward=True, options=FUSED)),
    "ignoring": Scenario(ignoring, Case("stream", in_backward=True, options=FUSED)),
    "at once": Scenario(prefetching, Case("stream", in_backward=True, options=FUSED), "early"),
    "at once, on the host": Scenario(
        prefetching, Case("host", offload_gradients=True, accumulation=2, options=FUSED), "early"
    ),
}


def outcome(scenario: Scenario) -> list[Tensor] | str:
    """What training gives on the simulator, or what the simulator says."""
    try:
        with device(scenario.kind) as simulator:
            model = made(scenario.build)
            optimizer = optimizer_of(scenario.case, model)
            norms = train(scenario.case, model, optimizer)
            seen = [*norms, *states_of(optimizer), *parts(model.parameters())]
            use_without_the_last_layer(model, optimizer)
            optimizer.synchronize()
            simulator.finish()  # what was read is freed with the optimizer
            return seen
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def use_without_the_last_layer(model: Any, optimizer: Any) -> None:
    """After a step: a forward that gathers the last layer ahead and does not use it, and then a look at its shards."""
    loss_of(model, 99).backward()
    optimizer.step()
    layers = model.layers
    model.layers = layers[:-1]
    with torch.no_grad():
        loss_of(model, 100)
        for param in layers[-1].parameters():
            getattr(param, "_local_tensor", param) * 2
    model.layers = layers


def warm(name: str) -> Scenario:
    """DTensor's rules for operations are found out, which is not simulated."""
    scenario = SCENARIOS[name]
    if name != "ignoring":  # torch's fused kernels take DTensors or others, not both
        model: Any = made(scenario.build)
        train(scenario.case, model, plain_optimizer(model))
    return scenario


# ---- what is taken away


def without_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "wait_to_gather", lambda engine, unit: None)


def on_the_computing_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fsdp, "_reading", lambda group, async_op: nullcontext())


def for_one_stream_only(patch: pytest.MonkeyPatch) -> None:
    wait = Pipeline.wait
    patch.setattr(Pipeline, "wait", lambda pipeline, unit, keep=False: wait(pipeline, unit))


def letting_go_of_norms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Norms, "taken_early", lambda norms: [])


def letting_go_of_gradients(patch: pytest.MonkeyPatch) -> None:
    """The flat buffer of a group's gradients is freed with the last of its views."""
    release = InFlight.release
    patch.setattr(InFlight, "release", lambda held, tensors, after, *rest: release(held, tensors, DONE, *rest))


def before_the_reduction(patch: pytest.MonkeyPatch) -> None:
    """Updates begin when the backward has been computed, not when its gradients have been reduced."""
    submit = Pipeline.submit

    def submit_early(pipeline: Pipeline, jobs: list[Job]) -> None:
        for job in jobs:
            job.ready = pipeline._runtime.record("compute")
        submit(pipeline, jobs)

    patch.setattr(Pipeline, "submit", submit_early)


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "no wait": (without_waiting, "in backward"),
    "no wait at step": (without_waiting, "at step"),
    "another stream": (on_the_computing_stream, "in backward"),
    "one stream": (for_one_stream_only, "at step"),
    "one stream, by children": (for_one_stream_only, "by children"),
    "no gather": (without_waiting, "no gather"),
    "norms": (letting_go_of_norms, "clipped"),
    "gradients": (letting_go_of_gradients, "at once"),
    "gradients on their way to the host": (letting_go_of_gradients, "at once, on the host"),
    "reduction": (before_the_reduction, "at once"),
    "all-reduce": (before_the_reduction, "no gather"),
}


NOTICED = {
    "fsdp.py:AllGatherWaits._watched.wait_and_unshard:self._wait(unit)": "in backward",
    "engine.py:Engine.wait_to_gather:self._worker.wait(unit, keep=True)": "in backward",
    "engine.py:Engine.wait:self._worker.wait(unit, keep=bool(self._gathers))": "at step",
    "engine.py:Engine.wait_for_all:self.wait(unit)": "at step",
    "engine.py:Engine.step:self.wait_for_all()": "accumulated",
    "engine.py:Engine.settle:self._worker.settle()": "in backward",
    "engine.py:Engine._gradient:held.arrived(param)": "clipped",
    "stream.py:StreamPipeline.settle:super().settle()": "in backward",
    "stream.py:StreamPipeline.settle:self._last_rested.synchronize()": "in backward",
    "stream.py:StreamPipeline._stage:after[slot.freed]": "in backward",
    "stream.py:StreamPipeline._update:self._runtime.wait(job.ready)": "clipped",
    "stream.py:StreamPipeline._update:self._runtime.wait(slot.filled)": "in backward",
    "stream.py:StreamPipeline._update.down:after[updated]": "in backward",
    "stream.py:StreamPipeline._update:slot.freed.synchronize()": "in backward",
    "stream.py:StreamPipeline._bring_gradients:after[from_host[part].arrived()]": "clipped",
    "stream.py:StreamPipeline._bring_gradients:from_host[part].arrived()": "clipped",
    "host.py:HostPipeline._update:slot.filled.synchronize()": "at step",
    "accumulation.py:HostGradients._work_once:addition.filled.synchronize()": "accumulated",
    "accumulation.py:HostGradients._bring:after[self._runtime.record()]": "accumulated",
    "pipeline.py:Pipeline.settle:while self._is_busy() and self._error is None: wait": "at step",
    "pipeline.py:Pipeline.wait:while self._open[unit] and self._error is None: wait": "in backward",
    "pipeline.py:Pipeline.wait:self._runtime.wait(event)": "in backward",
    "pipeline.py:Pipeline.settle:self._last_update.synchronize()": "at step",
    "host.py:HostPipeline._update:job.gradients[part.param].arrived()": "accumulated",
    "host.py:HostPipeline._update:job.gradients[part.param].arrived().synchronize()": "accumulated",
    "host.py:HostPipeline._bring_gradients:after[job.ready]": "at step",
    "accumulation.py:HostGradients.take:after[self._runtime.record()]": "clipped",
    "accumulation.py:HostGradients.arrived:self._wait_for(param)": "accumulated",
}
"""The engine's waits that the schedule over shards needs too, and a scenario that notices when one is missing. That all
of its waits are needed is shown in tests/engine/test_races.py."""


def noticed(waits: list[str]) -> dict[str, tuple[str, str]]:
    """What the scenarios say with every wait, and without one."""
    found = {}
    complete: dict[str, list[Tensor] | str] = {}
    for name in waits:
        which = NOTICED[name]
        if which not in complete:
            complete[which] = outcome(warm(which))
        wanted = complete[which]
        if isinstance(wanted, str):
            found[name] = wanted, ""
            continue
        (wait,) = [wait for wait in engine_races.WAITS if wait.name == name]
        with pytest.MonkeyPatch.context() as patch:
            engine_races.without(wait, patch)
            got = outcome(SCENARIOS[which])
        found[name] = "", got if isinstance(got, str) else differing(got, wanted)
    return found


BY_FILE: dict[str, list[str]] = {}
for _name in NOTICED:
    BY_FILE.setdefault(_name.partition(":")[0], []).append(_name)


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=() if file == "fsdp.py" else pytest.mark.slow) for file in BY_FILE]
)
def test_removing_a_wait_fails_a_scenario(ranks: Ranks, file: str) -> None:
    for found in ranks.run(2, noticed, BY_FILE[file]):
        assert {name: complete for name, (complete, _) in found.items() if complete} == {}
        assert [name for name, (_, without) in found.items() if not without] == []


def races(name: str) -> tuple[str, str]:
    """What the simulator says, of the engine as it is and of the changed one."""
    mutate, which = MUTATIONS[name]
    scenario = warm(which)
    found = []
    for change in (lambda patch: None, mutate):
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            seen = outcome(scenario)
            found.append(seen if isinstance(seen, str) else "")
    return found[0], found[1]


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_an_order_there_is_a_race(ranks: Ranks, name: str) -> None:
    for as_it_is, changed in ranks.run(2, races, name):
        assert as_it_is == ""
        assert "nothing orders two accesses" in changed or "memory was freed" in changed


def summed(waits: bool) -> list[bool]:
    """Of a gradient whose sum over ranks is under way, as tensor parallelism may leave it: whether it was, whether the
    engine gets a tensor with the memory that it is to hold, and whether that is the sum."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    part = torch.full((4,), 1.0 + torch.distributed.get_rank())
    gradient: Any = DTensor.from_local(part, mesh, [Partial()]).redistribute(placements=[Replicate()], async_op=True)
    param.grad = gradient
    with pytest.MonkeyPatch.context() as patch:
        if not waits:
            patch.setattr(AsyncCollectiveTensor, "wait", lambda tensor: tensor)
        got: Any = gradient_of(param)
    was_under_way = isinstance(gradient._local_tensor, AsyncCollectiveTensor)
    return [was_under_way, type(got) is Tensor, bool((got == 3.0).all())]


def test_a_sum_over_ranks_that_is_under_way_is_waited_for(ranks: Ranks) -> None:
    assert ranks.run(2, summed, True) == [[True, True, True]] * 2
    assert ranks.run(2, summed, False) == [[True, False, True]] * 2

"""How long a step takes on a machine, and what it waits for: compute from the work counted, the optimizer replayed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.auto import LINK_BOUND
from offload.placing import Speeds, host_share
from offload.plan.calibration import Costs
from offload.plan.efficiency import ATTENTION
from offload.plan.replay import DECIDED, DECIDED_WITH_CPU, QUICK, Result, replay, replay_torchao, speeds_of
from offload.plan.work import Amount, Work
from offload.plan.workload import Machine, Passes, Workload

COMPUTE, UP, DOWN, CPU_UPDATE, GPU_UPDATE = (
    "forward and backward",
    "link, host to GPU",
    "link, GPU to host",
    "update on the CPU",
    "update on the GPU",
)

_AGENTS = {"compute": COMPUTE, "up": UP, "down": DOWN, "offload-host": CPU_UPDATE, "torchao": CPU_UPDATE,
           "update": GPU_UPDATE}  # fmt: skip

EXPOSED = 0.03
"""Of a step, what may be exposed while compute is still said to be what bounds it."""

STEP_SECONDS = 0.002
"""Of a step on the CPU, for data, the log and Python between: tiny_llama_offload's."""

LEAST_LAYERS = 6
"""That are replayed, however little is in flight."""

MOST_LAYERS = 32
"""That are replayed of a deeper model, the rest in proportion: 48 layers come out within 2 %, in half the time."""

REPLAYED_MICRO_BATCHES = 3
"""The first waits for updates, the last brings them, and those between are all alike."""


@dataclass(frozen=True)
class Settings:
    """What of a run's settings decides when its optimizer works.

    Attributes:
        strategy: ``resident``, ``stream``, ``host`` or ``auto``; ``torchao`` for its CPU offload; ``plain`` for an
            optimizer that runs after backward, on the device.
        state_bytes: of all states, for each element that is trained.
        update_in_backward: as :class:`offload.OffloadOptimizer`'s; so are the next three.
        offload_gradients: gradients go to the host as soon as they are there.
        in_flight_gib: device memory for what is under way.
        offloaded: share of the states that ``stream`` takes to the host.
        micro_batches: forwards and backwards of a step.
        offload_states: rules with the replay's names (``exp_avg/<layer>.<tensor>.weight``) in place of ``offloaded``.
        room: bytes of the device that are left over, where ``auto`` keeps states.
        cpu_may_help: ``auto`` may let the CPU update a share of the parameters.
    """

    strategy: str
    state_bytes: float
    update_in_backward: bool = False
    offload_gradients: bool = False
    in_flight_gib: float = 1.0
    offloaded: float = 1.0
    micro_batches: int = 1
    offload_states: Any = None
    room: int = 0
    cpu_may_help: bool = False


@dataclass(frozen=True)
class Prediction:
    """A step in the steady state.

    Attributes:
        step_seconds: from one step to the next.
        tokens_per_second: of full micro-batches.
        compute_seconds: of a step's forwards and backwards.
        exposed_seconds: that forward and backward wait for the optimizer.
        bottleneck: what a faster one of would shorten the step most: COMPUTE, UP, DOWN, CPU_UPDATE or GPU_UPDATE.
        busy: seconds of a step that each of these works.
        result: the replay of at most three micro-batches; None where nothing had to be replayed.
        placed: with ``auto``, the share of all states by the way that their updates go.
        reserved: with ``auto``, the share of all parameters that have room on the host for the CPU to update them.
    """

    step_seconds: float
    tokens_per_second: float
    compute_seconds: float
    exposed_seconds: float
    bottleneck: str
    busy: Mapping[str, float]
    result: Result | None = field(default=None, repr=False, compare=False)
    placed: Mapping[str, float] = field(default_factory=dict)
    reserved: float = 0.0


def seconds(amount: Amount, machine: Machine, fused: float = 1.0) -> float:
    """What work takes on the device itself.

    Args:
        fused: of the bytes that operations move, those that are left when a compiler has joined them.
    """
    products = max(amount.products / machine.flops, amount.weights / machine.device)
    return products + amount.attention / (ATTENTION * machine.flops) + fused * amount.moved / machine.device


def passes(work: Work, machine: Machine, *, recompute: bool, fused: float = 1.0) -> Passes:
    """Of :class:`Work` on a machine. The layers' recomputation, which the replay adds, is taken off their backward."""
    forward, backward = (seconds(amount, machine, fused) for amount in work.layer)
    if recompute:
        backward = max(0.0, backward - forward)
    first, last = (seconds(amount, machine, fused) for amount in work.edge)
    return Passes((forward, backward), (first, last))


def predict(workload: Workload, machine: Machine, settings: Settings) -> Prediction:
    """The steady state of training.

    Args:
        workload: one micro-batch's, with :attr:`~Workload.passes` from :func:`passes` (or without, for products alone).
        machine: rates.
        settings: when the optimizer works; its micro-batches replace those of ``workload``.
    """
    return _predict(workload.coarse(), machine, settings)


@functools.lru_cache(maxsize=1024)
def _predict(whole: Workload, machine: Machine, settings: Settings) -> Prediction:
    load = whole
    tokens = whole.tokens * settings.micro_batches
    if settings.strategy == "plain" or not load.parameters:
        compute = settings.micro_batches * compute_seconds(load, machine)
        update = load.parameters * (settings.state_bytes * 2 + 3 * load.dtype.itemsize) / machine.device
        busy = {COMPUTE: compute, GPU_UPDATE: update}
        return prediction_of(compute + update, tokens, compute, busy, None)
    if settings.strategy != "resident":
        load = _shallow(whole, settings.in_flight_gib)
        room = int(settings.room * load.parameters / whole.parameters)
        settings = dataclasses.replace(settings, room=room)
    replayed = min(settings.micro_batches, REPLAYED_MICRO_BATCHES)
    more = settings.micro_batches - replayed
    result = _replayed(dataclasses.replace(load, micro_batches=replayed), machine, settings)
    between = compute_seconds(load, machine)
    busy = {}
    for agent, worked in result.busy.items():
        if agent in _AGENTS:
            busy[_AGENTS[agent]] = worked
    busy[COMPUTE] += more * between
    if settings.offload_gradients:  # what each of the micro-batches that were not replayed adds
        busy[DOWN] = busy.get(DOWN, 0.0) + more * load.parameters * load.dtype.itemsize / machine.down
    step = result.step + more * max(between, result.micro_batch if more else 0.0)
    compute = result.compute + more * between
    if load.layers != whole.layers:
        times = whole.layers / load.layers
        step, compute, busy = times * step, times * compute, {name: times * worked for name, worked in busy.items()}
    found = prediction_of(step, tokens, compute, busy, result)
    if settings.strategy != "auto":
        return found
    return dataclasses.replace(
        found, placed=result.placed, reserved=share_of_cpu(load.dtype.itemsize, machine, settings)
    )


def _shallow(load: Workload, in_flight_gib: float) -> Workload:
    """A part of the model, its edges too. Little in flight is many small pieces, and a layer has nothing to do with
    those far from it."""
    layers = max(min(load.layers, LEAST_LAYERS), math.ceil(min(load.layers, MOST_LAYERS) * min(1.0, in_flight_gib)))
    if layers >= load.layers:
        return load
    part = layers / load.layers
    passes = load.passes
    if passes is not None:
        passes = dataclasses.replace(passes, edge=(part * passes.edge[0], part * passes.edge[1]))
    return dataclasses.replace(
        load,
        layers=layers,
        edge=int(part * load.edge),
        head=int(part * load.head_elements),
        passes=passes,
    )


def prediction_of(
    step: float, tokens: int, compute: float, busy: Mapping[str, float], result: Result | None = None
) -> Prediction:
    """A step of so many seconds and tokens, of which forward and backward compute for some; arguments as attributes of
    :class:`Prediction`."""
    exposed = max(0.0, step - compute)
    others = {name: worked for name, worked in busy.items() if name != COMPUTE}
    waits = exposed > EXPOSED * step and others
    bottleneck = max(others, key=lambda name: others[name]) if waits else COMPUTE
    return Prediction(step, tokens / step, compute, exposed, bottleneck, dict(busy), result)


def predict_on_cpu(work: Work, costs: Costs, *, micro_batches: int, update: float, faults: float = 0.0) -> Prediction:
    """A step on the CPU, where updates are done before and after, whatever the strategy.

    Args:
        work: of a micro-batch.
        costs: measured on that CPU.
        micro_batches: of a step.
        update: seconds of the optimizer.
        faults: seconds for which the system makes new pages.
    """
    compute = micro_batches * costs.seconds(work.total, work.length) + faults
    step = compute + update + STEP_SECONDS
    return prediction_of(step, micro_batches * work.tokens, compute, {COMPUTE: compute, CPU_UPDATE: update}, None)


def compute_seconds(load: Workload, machine: Machine) -> float:
    """Forward and backward of a micro-batch, recomputation included, as the device needs them or the host launches."""
    forward, backward = (sum(part) for part in zip(*load.stage_seconds(machine), strict=True))
    again = forward if load.recompute else 0.0
    launched = machine.launch * (load.launches[0] * (2 if load.recompute else 1) + load.launches[1])
    return load.layers * max(forward + backward + again, launched) + sum(load.head_seconds(machine))


def phases(load: Workload, machine: Machine) -> tuple[float, float]:
    """Seconds of a micro-batch's forward, and of its backward with recomputation, as the device needs them or the host
    launches."""
    forward, backward = (sum(part) for part in zip(*load.stage_seconds(machine), strict=True))
    launched = [machine.launch * count for count in load.launches]
    if load.recompute:
        backward += forward
        launched[1] += launched[0]
    head = load.head_seconds(machine)
    return (
        load.layers * max(forward, launched[0]) + head[0],
        load.layers * max(backward, launched[1]) + head[1],
    )


def estimate(workload: Workload, machine: Machine, settings: Settings) -> float:
    """Seconds of a step without a replay, to rank settings before the best of them are replayed.

    Backward hides what the link or the CPU do in it, and the next forward what is done after it; in the middle, memory
    in flight makes backward wait.
    """
    forward, backward = phases(workload, machine)
    compute = settings.micro_batches * (forward + backward)
    width, elements = workload.dtype.itemsize, workload.parameters
    states = elements * settings.state_bytes
    traffic = 2 * states + 3 * elements * width
    if settings.strategy in ("plain", "resident"):
        return compute + (traffic / machine.device if settings.strategy == "plain" else 0.0)
    link = min(machine.up, machine.down)
    if settings.strategy == "stream":
        work = max(states * settings.offloaded / link, 2 * states * settings.offloaded / machine.shared)
    elif settings.strategy == "auto":
        share = share_of_cpu(width, machine, settings)
        away = 1 - min(1.0, settings.room / states)  # of all parameters, whose states are not on the device
        over_link = (1 - share) * states + share * elements * width
        of_host = 2 * states + share * 5 * elements * width
        on_cpu = share * cpu_bytes(width, settings) * elements
        work = away * max(over_link / link, of_host / machine.shared, on_cpu / machine.host)
    else:
        work = max(elements * width / link, (2 * states + 5 * elements * width) / machine.host)
    if settings.offload_gradients:
        gradients = elements * width / machine.down
        work += gradients
        compute = max(compute, settings.micro_batches * gradients + forward)
    if settings.update_in_backward:
        return compute + max(0.0, work - backward)
    return compute + max(0.0, work - forward)


def cpu_bytes(itemsize: int, settings: Settings) -> float:
    """Of host memory that the CPU's update of a parameter reads and writes: its gradient once for its norm and once for
    the update, the rest twice."""
    return 2 * settings.state_bytes + 4 * itemsize


def share_of_cpu(itemsize: int, machine: Machine, settings: Settings) -> float:
    """Of parameters whose states rest on the host, those that ``auto`` reckons the CPU may update.

    Args:
        itemsize: bytes of a number of a parameter.
        machine: rates.
        settings: of the optimizer.
    """
    if not settings.cpu_may_help:
        return 0.0
    speeds = Speeds(machine.up, machine.down, machine.host / cpu_bytes(itemsize, settings), machine.shared)
    return host_share(settings.state_bytes, itemsize, speeds)


def _replayed(load: Workload, machine: Machine, settings: Settings) -> Result:
    if settings.strategy == "torchao":
        return replay_torchao(machine, load, shares_host_memory=True, is_checked=False)
    optimizer: dict[str, Any] = _class_with(settings.state_bytes, load.dtype)
    optimizer |= {
        "strategy": settings.strategy,
        "update_in_backward": settings.update_in_backward,
        "offload_gradients": settings.offload_gradients,
        "in_flight_gib": settings.in_flight_gib,
    }
    if settings.strategy == "stream":
        if settings.offload_states is not None:
            optimizer["offload_states"] = settings.offload_states
        elif settings.offloaded < 1:
            optimizer["offload_states"] = _offloaded(load.layers, settings.offloaded)
    # Later steps are all alike; updates at step, and copies that outlast backward, need one more until they are.
    hidden = estimate(load, machine, settings) <= (1 + EXPOSED) * load.micro_batches * compute_seconds(load, machine)
    steps = (1, 1) if settings.update_in_backward and hidden else QUICK
    room, tries_cpu = None, False
    if settings.strategy == "auto":
        # A step that computes for longer than this does not wait for the link, and the CPU is not tried.
        away = max(0.0, load.parameters * settings.state_bytes - settings.room) / min(machine.up, machine.down)
        waits = load.micro_batches * compute_seconds(load, machine) <= CERTAIN * LINK_BOUND * away
        tries_cpu = waits and share_of_cpu(load.dtype.itemsize, machine, settings) > 0
        steps = (steps[0] + (DECIDED_WITH_CPU if tries_cpu else DECIDED) - 1, steps[1])
        speeds = speeds_of(machine, load, cpu_bytes=cpu_bytes(load.dtype.itemsize, settings))
        # What the CPU may help with, tried or not, rests on the device last.
        optimizer["speeds"] = speeds if settings.cpu_may_help else dataclasses.replace(speeds, cpu=NEVER)
        room = settings.room
    return replay(
        machine,
        load,
        steps=steps,
        shares_host_memory=True,
        room=room,
        tries_cpu=tries_cpu,
        is_checked=False,
        **optimizer,
    )


CERTAIN = 1.2
"""Times what decides whether the CPU is tried: states move in portions, so that more of them may be away."""

NEVER = 1e-9
"""Parameters a second of a CPU that is not asked."""


def _offloaded(layers: int, share: float) -> str:
    """States of the last layers, so many that they are a share of all."""
    first = round(layers * (1 - share))
    names = "|".join(str(index) for index in range(first, layers))
    return rf".*/({names}|head)\..*" if names else "none"


def _class_with(state_bytes: float, dtype: torch.dtype) -> dict[str, Any]:
    """The packed AdamW whose states are nearest to so many bytes an element: what a replay sees of any optimizer."""
    sizes: dict[float, tuple[str, str]] = {2.03: ("int8", "none"), 8.0: ("fp32", "none")}
    if dtype == torch.float32:
        sizes |= {4.0: ("bf16", "none")}
    else:
        sizes |= {3.03: ("int8", "split24"), 4.03: ("int8", "split"), 6.0: ("bf16", "split"), 10.0: ("fp32", "split")}
    state_dtype, master = sizes[min(sizes, key=lambda size: abs(size - state_bytes))]
    return {"optimizer_class": "offload.optim.AdamW", "state_dtype": state_dtype, "master": master}

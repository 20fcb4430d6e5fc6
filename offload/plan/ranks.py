"""How long a step of several ranks takes, in closed form: what each computes, exchanges and copies, in the order that
FSDP2 and the engine give it.

A micro-batch has two phases. In forward weights are gathered layer by layer, in backward gathered again and gradients
reduced, all beside the computation but for what the first layer needs and the last one leaves. A phase takes as long as
its busiest resource: the compute stream, which also copies what is gathered out of one buffer and what is reduced into
another, the collectives, each direction of the link, and a rank's share of the host's memory. The optimizer of a rank's
own part adds its copies and updates to the last backward and the next step's first forward, or to that forward alone
where it waits for all gradients. Between hosts a collective is one ring through all of its ranks, hosts one after the
other, as NCCL's all-gathers and reduce-scatters are; what its trees save an all-reduce of two hosts is left out.
:mod:`offload.plan.distributed` replays FSDP2 and the engine themselves; tests/plan/test_ranks.py holds this to its
recorded steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.plan.collectives import System
from offload.plan.prediction import (
    COMPUTE,
    CPU_UPDATE,
    DOWN,
    UP,
    Prediction,
    Settings,
    cpu_bytes,
    phases,
    prediction_of,
)
from offload.plan.workload import Machine, Workload

COLLECTIVES, HOST = "collectives", "the host's memory"

Phase = Mapping[str, float]
"""Seconds of each resource that works in it."""


@dataclass(frozen=True)
class Exchange:
    """What ranks exchange in a step, of whole tensors.

    Attributes:
        ranks: that divide the model.
        layers: elements of weights that are gathered layer by layer, whether they are trained or not.
        embedding: of those of an embedding of its own, which backward does not need.
        root: of those that are gathered once a step: the head, and what belongs to no layer.
        first: of those that the first layer's forward waits for: the embedding's and its own.
        trained: of all weights.
        itemsize: bytes of a weight, on average where some are in 4 bits.
        reduce_itemsize: of a number that is summed.
        resharding: weights are gathered again in backward, from all ranks (True) or from so many of them.
        replicas: of the model, each divided among so many ranks; they sum their parts of the gradients.
    """

    ranks: int
    layers: int
    embedding: int
    root: int
    first: int
    trained: int
    itemsize: float = 2.0
    reduce_itemsize: int = 4
    resharding: bool | int = True
    replicas: int = 1

    @property
    def cards(self) -> int:
        """Of all hosts."""
        return self.ranks * self.replicas


def predict_ranks(load: Workload, system: System, exchange: Exchange, settings: Settings) -> Prediction:
    """The steady state of the ranks; tokens per second are those of all.

    Args:
        load: a micro-batch of one rank; ``passes`` of the system's machine.
        system: the cards and their hosts, each with an equal part of the ranks.
        exchange: between the ranks.
        settings: when the optimizer works; ``room`` of one rank's card.
    """
    machine = system.rank(_local(system, exchange))
    forward, backward = phases(load, machine)
    reshards = exchange.resharding is not False
    again = exchange.layers if reshards else 0
    before = again + (exchange.embedding if reshards else 0)
    weights = exchange.layers + exchange.embedding + exchange.root
    first = _sum(
        {COMPUTE: forward + 2 * exchange.itemsize * weights / machine.device},
        _collective(system, exchange, exchange.itemsize * weights),
    )
    later = _sum(
        {COMPUTE: forward + 2 * exchange.itemsize * before / machine.device},
        _collective(system, exchange, exchange.itemsize * before),
    )
    reduced = exchange.trained * (exchange.itemsize + exchange.reduce_itemsize)
    last = _sum(
        {COMPUTE: backward + (2 * exchange.itemsize * again + reduced) / machine.device},
        _collective(system, exchange, exchange.itemsize * again, of=exchange.resharding),
        _collective(system, exchange, exchange.reduce_itemsize * exchange.trained),
        _summed(system, exchange),
        _gradients_leave(machine, exchange, settings),
    )
    update = _update(machine, exchange, settings)
    between = settings.micro_batches - 1
    if settings.update_in_backward:
        step = max(_longest(last) + _longest(first), _longest(_sum(last, first, update)))
    else:
        step = _longest(last) + _longest(_sum(first, update))
    step += between * (_longest(last) + _longest(later)) + _ends(system, exchange)
    work = _sum(first, update, *[later] * between, *[last] * settings.micro_batches)
    tokens = settings.micro_batches * load.tokens * exchange.cards
    return prediction_of(step, tokens, settings.micro_batches * (forward + backward), work)


def _local(system: System, exchange: Exchange) -> int:
    """Cards of each host."""
    return exchange.cards // system.hosts


def _collective(system: System, exchange: Exchange, nbytes: float, *, of: bool | int = True) -> Phase:
    """An all-gather or reduce-scatter of a whole tensor, or of the part that is kept among fewer ranks: of ranks one
    after the other, so that those of a host are in one ring where it leaves the host."""
    ranks = exchange.ranks if of is True else max(1, int(of))
    rings = 1 if ranks > _local(system, exchange) else 0
    return _over_links(system, exchange, system.seconds("all_gather", int(nbytes), ranks, rings=rings), rings)


def _summed(system: System, exchange: Exchange) -> Phase:
    """A rank's part of the gradients, over the replicas: for each part a ring of its own."""
    if exchange.replicas == 1:
        return {}
    nbytes = exchange.reduce_itemsize * exchange.trained // exchange.ranks
    rings = min(exchange.ranks, _local(system, exchange)) if system.hosts > 1 else 0
    seconds = system.seconds("all_reduce", nbytes, exchange.replicas, rings=rings)
    return _over_links(system, exchange, seconds, rings)


def _over_links(system: System, exchange: Exchange, seconds: float, rings: int) -> Phase:
    """What a collective takes of what cards share."""
    shares = system.shares(_local(system, exchange), rings=rings)
    return {COLLECTIVES: seconds, UP: shares["up"] * seconds, DOWN: shares["down"] * seconds,
            HOST: shares["host"] * seconds}  # fmt: skip


def _gradients_leave(machine: Machine, exchange: Exchange, settings: Settings) -> Phase:
    """A rank's part of the gradients goes to the host, where it is summed."""
    if not settings.offload_gradients:
        return {}
    nbytes = exchange.itemsize * exchange.trained / exchange.ranks
    return {DOWN: nbytes / machine.down, HOST: nbytes / machine.host}


def _update(machine: Machine, exchange: Exchange, settings: Settings) -> Phase:
    """Of a rank's part."""
    mine = exchange.trained / exchange.ranks
    states = mine * settings.state_bytes
    weights = mine * exchange.itemsize
    if settings.strategy == "host":
        traffic = mine * cpu_bytes(int(exchange.itemsize), settings)
        down = 0.0 if settings.offload_gradients else weights
        return {UP: weights / machine.up, DOWN: down / machine.down, CPU_UPDATE: traffic / machine.host,
                HOST: (traffic + weights + down) / machine.host}  # fmt: skip
    on_gpu = {COMPUTE: (2 * states + 3 * weights) / machine.device}
    if settings.strategy in ("resident", "plain"):
        return on_gpu
    away = settings.offloaded * states
    if settings.strategy == "auto":
        away = max(0.0, away - settings.room)
    back = weights if settings.offload_gradients else 0.0
    return {UP: (away + back) / machine.up, DOWN: away / machine.down, HOST: (2 * away + back) / machine.host}


def _ends(system: System, exchange: Exchange) -> float:
    """What nothing hides: the gather of what the first layer waits for, and the last gradients' reduction."""
    gathered = _collective(system, exchange, exchange.itemsize * exchange.first)
    reduced = _collective(system, exchange, exchange.reduce_itemsize * min(exchange.first, exchange.trained))
    return _longest(gathered) + _longest(reduced)


def _longest(phase: Phase) -> float:
    return max(phase.values(), default=0.0)


def _sum(*phases: Phase) -> Phase:
    found: dict[str, float] = {}
    for phase in phases:
        for name, seconds in phase.items():
            found[name] = found.get(name, 0.0) + seconds
    return found

"""A run's step before there is any: its model's own work and its optimizer's schedule, for :mod:`offload.plan`."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.component import resolve
from offload.distributed import network
from offload.metrics.this_machine import costs_here, machine_here
from offload.optimizer import OffloadOptimizer
from offload.peers import TorchAOCPUOffloadOptimizer
from offload.plan import prediction
from offload.plan.budget import DEVICE, STATES, Sharding
from offload.plan.calibration import Costs
from offload.plan.collectives import System, system_of
from offload.plan.efficiency import FUSED
from offload.plan.machines import PACKED_BYTES, card_named
from offload.plan.prediction import Prediction, predict
from offload.plan.ranks import Exchange, predict_ranks
from offload.plan.work import Amount, Work, count
from offload.plan.workload import Machine, Workload
from offload.training.budgeting import Plan, Planner
from offload.training.placement import NOTHING_KNOWN, Room, for_auto, is_auto, kind_of_update, left_over
from offload.training.settings import TrainSettings
from offload.training.tracing import TRACED, layers_of, shortened

NF4_MOVED = 15.0
"""Bytes that making a weight of 4 bits one of 16 moves, each time that it is used: between torchtune's LoRA and QLoRA
of Llama 3.1 8B on a 4090, 3,083 and 2,413 tok/s at 4096 tokens (its README), lie 0.37 s for 3 x 6.98 B weights."""


PLAIN_BYTES = 14
"""That torch's fused AdamW reads and writes for a bf16 parameter with two moments: four tensors read, three written."""


class Predictor:
    """Predicts runs that differ in a few settings; work that was counted once is not counted again.

    Args:
        planner: of the same runs' memory, which knows their models.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._shapes: dict[Any, _Shape] = {}

    def predict(
        self,
        settings: TrainSettings,
        plan: Plan,
        machine: Machine,
        dtype: torch.dtype,
        room: Room = NOTHING_KNOWN,
    ) -> Prediction:
        """The steady state of a run on an accelerator.

        Args:
            settings: of the run.
            plan: its memory.
            machine: rates.
            dtype: of the parameters.
            room: of the machine, for strategy ``auto``.
        """
        when = self._schedule(settings, plan, machine, dtype, room)
        return predict(self.workload(settings, plan, machine, dtype), machine, when)

    def _schedule(
        self, settings: TrainSettings, plan: Plan, machine: Machine, dtype: torch.dtype, room: Room
    ) -> prediction.Settings:
        when = schedule(settings, plan)
        if not is_auto(settings.optimizer):
            return when
        return for_auto(when, settings.optimizer, plan, room, machine, dtype.itemsize)

    def predict_here(
        self,
        settings: TrainSettings,
        plan: Plan,
        device: torch.device,
        dtype: torch.dtype,
        room: Room = NOTHING_KNOWN,
    ) -> tuple[Prediction, str] | None:
        """The steady state of a run on this machine, and what that rests on, in words; None where that is not known."""
        if device.type == "cpu":
            costs = costs_here()
            return costs and (self.predict_on_cpu(settings, plan, costs[0], dtype), costs[1])
        here = machine_here(device, fp32=dtype == torch.float32)
        return here and (self.predict(settings, plan, here[0], dtype, room), here[1])

    def predict_ranks_here(
        self,
        settings: TrainSettings,
        plan: Plan,
        device: torch.device,
        sharding: Sharding,
        dtype: torch.dtype,
        room: Room = NOTHING_KNOWN,
        *,
        processes: int,
        hosts: int = 1,
    ) -> tuple[Prediction, str] | None:
        """The steady state of several processes on this machine, or on several like it, and what that rests on, in
        words; None where it is not known. Arguments as of :meth:`predict_ranks`."""
        here = machine_here(device, fp32=dtype == torch.float32, cards=processes // hosts)
        between = network.speed() if hosts > 1 else math.inf
        if here is None or between is None:
            return None
        system = system_of(here[0], card_named(here[0].name), hosts=hosts, network=between)
        return self.predict_ranks(settings, plan, system, sharding, dtype, room, processes=processes), here[1]

    def predict_on_cpu(
        self, settings: TrainSettings, plan: Plan, rates: Mapping[str, Any], dtype: torch.dtype
    ) -> Prediction:
        """The steady state of a run on a CPU.

        Args:
            settings: of the run.
            plan: its memory.
            rates: measured on that CPU (:mod:`offload.plan.rates`), its ``training`` and ``cpu_adamw``.
            dtype: of the parameters.
        """
        costs = Costs(**rates["training"]["fp32" if dtype == torch.float32 else "bf16"])
        work = self.work(settings, plan, dtype, on_gpu=False)
        states = sum(item.nbytes for item in plan.budget.items if item.name.startswith(STATES))
        traffic = plan.trained * 3 * dtype.itemsize + 2 * states
        name = kind_of_update(settings.optimizer)
        if name in PACKED_BYTES:
            update = traffic / (PACKED_BYTES[name] * rates["cpu_adamw"][name])
        else:
            update = traffic / (PLAIN_BYTES * rates["cpu_adamw"]["torch fused"])
        if settings.clip_grad_norm is not None:
            update += 3 * plan.trained * dtype.itemsize / rates["host_copy"]
        micro_batches = settings.gradient_accumulation_steps
        faults = plan.faulted / rates["host_faults"] if "host_faults" in rates else 0.0  # a profile of before has none
        return prediction.predict_on_cpu(work, costs, micro_batches=micro_batches, update=update, faults=faults)

    def predict_ranks(
        self,
        settings: TrainSettings,
        plan: Plan,
        system: System,
        sharding: Sharding,
        dtype: torch.dtype,
        room: Room = NOTHING_KNOWN,
        *,
        processes: int,
    ) -> Prediction:
        """The steady state of several processes.

        Args:
            settings: of the run.
            plan: the memory of one of them.
            system: their cards.
            sharding: of each replica of the model.
            dtype: of the parameters.
            room: of one process, for strategy ``auto``.
            processes: of all replicas.
        """
        when = schedule(settings, plan)
        when = dataclasses.replace(when, state_bytes=sharding.ranks * when.state_bytes)
        if is_auto(settings.optimizer):
            when = dataclasses.replace(when, room=left_over(settings.optimizer, plan, room))
        parts, packed = self._planner.model_of(settings, dtype)
        layers = [_elements(layer) for layer in layers_of(parts.module)]
        whole = _elements(parts.module)
        embedding = sum(map(_elements, parts.blocks())) - sum(layers)
        nbytes = dtype.itemsize * (whole - packed.elements) + packed.nbytes * packed.elements
        exchange = Exchange(
            sharding.ranks,
            sum(layers),
            embedding,
            whole - sum(layers) - embedding,
            embedding + (layers[0] if layers else 0),
            plan.trained,
            nbytes / whole,
            sharding.reduce_itemsize,
            sharding.resharding,
            processes // sharding.ranks,
        )
        found = predict_ranks(self.workload(settings, plan, system.machine, dtype), system, exchange, when)
        if when.strategy != "auto" or not when.state_bytes:
            return found
        share = min(1.0, when.room * sharding.ranks / (when.state_bytes * plan.trained))
        return dataclasses.replace(found, placed={"resident": share, "stream": 1 - share})

    def estimate(
        self,
        settings: TrainSettings,
        plan: Plan,
        machine: Machine,
        dtype: torch.dtype,
        room: Room = NOTHING_KNOWN,
    ) -> float:
        """Tokens per second, without the replay of the optimizer; arguments as of :meth:`predict`."""
        when = self._schedule(settings, plan, machine, dtype, room)
        seconds = prediction.estimate(self.workload(settings, plan, machine, dtype), machine, when)
        return plan.batch * plan.length * when.micro_batches / seconds

    def workload(self, settings: TrainSettings, plan: Plan, machine: Machine, dtype: torch.dtype) -> Workload:
        """What a micro-batch of a run is to the replay, on a machine."""
        shape = self._shape(settings, plan, dtype, on_gpu=True)
        work = shape.work.with_batch(plan.batch, plan.length)
        recompute = settings.enable_activation_checkpointing and bool(shape.of_layer)
        if shape.rounded:
            moved = Amount(moved=NF4_MOVED * shape.rounded / work.layers)
            layer = work.layer[0] + moved, work.layer[1] + (2 if recompute else 1) * moved
            work = dataclasses.replace(work, layer=layer)
        again = work.layer[0].launches if recompute else 0
        return Workload(
            layers=work.layers,
            tensors=shape.of_layer,
            tokens=work.tokens,
            edge=shape.before,
            head=shape.after,
            dtype=dtype,
            recompute=recompute,
            launches=(round(work.layer[0].launches), round(work.layer[1].launches - again)),
            passes=prediction.passes(work, machine, recompute=recompute, fused=FUSED if settings.compile else 1.0),
        )

    def work(self, settings: TrainSettings, plan: Plan, dtype: torch.dtype, *, on_gpu: bool) -> Work:
        """Of a micro-batch of the whole model."""
        return self._shape(settings, plan, dtype, on_gpu=on_gpu).work.with_batch(plan.batch, plan.length)

    def _shape(self, settings: TrainSettings, plan: Plan, dtype: torch.dtype, *, on_gpu: bool) -> _Shape:
        sections = settings.model, settings.loss, getattr(settings, "adapter", None)
        model, loss, adapter = sections  # of a loss there are copies, as other chunks are tried
        key = (id(model), repr(loss), id(adapter), dtype, on_gpu, settings.enable_activation_checkpointing,
               settings.compile)  # fmt: skip
        if key not in self._shapes:
            parts, packed = self._planner.model_of(settings, dtype)
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                few, of_few, step = shortened(parts, settings, plan.batch, plan.length, number=TRACED[0])
                counted = count(few.module, of_few, step, batch=plan.batch, length=plan.length,
                                fused_norms=on_gpu)  # fmt: skip
            layers = layers_of(parts.module)
            self._shapes[key] = _Shape(
                dataclasses.replace(counted, layers=len(layers) or 1),
                tuple(_trained(layers[len(layers) // 2])) if len(layers) else (),
                *_edges(parts.module, layers),
                packed.elements,
                sections,
            )
        return self._shapes[key]


@dataclass(frozen=True)
class _Shape:
    """A model under a loss and checkpointing.

    Attributes:
        work: of a micro-batch, whichever.
        of_layer: elements of each tensor of a layer that is trained.
        before: elements that are trained before the layers.
        after: those after them.
        rounded: weights in 4 bits.
        sections: which it was made of; kept, so that no other has their place in memory.
    """

    work: Work
    of_layer: tuple[int, ...]
    before: int
    after: int
    rounded: int
    sections: tuple[Any, ...]


def schedule(settings: TrainSettings, plan: Plan) -> prediction.Settings:
    """When a run's optimizer works, and on what."""
    section = settings.optimizer
    kind: Any = resolve(section["_component_"], key="optimizer._component_")
    states = [item for item in plan.budget.items if item.name.startswith(STATES)]
    total = sum(item.nbytes for item in states)
    micro_batches = settings.gradient_accumulation_steps
    each = total / max(1, plan.trained)
    if kind is TorchAOCPUOffloadOptimizer:
        return prediction.Settings("torchao", each, micro_batches=1)
    if kind is not OffloadOptimizer:
        return prediction.Settings("plain", each, micro_batches=micro_batches)
    on_device = sum(item.nbytes for item in states if item.place == DEVICE)
    return prediction.Settings(
        str(section.get("strategy", "host")),
        each,
        update_in_backward=bool(section.get("update_in_backward")),
        offload_gradients=bool(section.get("offload_gradients")),
        in_flight_gib=float(section.get("in_flight_gib", 1.0)),
        offloaded=1.0 - on_device / total if total else 1.0,
        micro_batches=micro_batches,
    )


def _elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _trained(module: nn.Module) -> list[int]:
    return [param.numel() for param in module.parameters() if param.requires_grad]


def _edges(module: nn.Module, layers: nn.ModuleList) -> tuple[int, int]:
    """Elements that are trained before a model's layers, and after them."""
    inside = {id(param) for param in layers.parameters()}
    before = after = 0
    passed = False
    for param in module.parameters():
        if id(param) in inside:
            passed = True
        elif param.requires_grad and passed:
            after += param.numel()
        elif param.requires_grad:
            before += param.numel()
    return before, after

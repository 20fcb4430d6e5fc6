"""What works on the parameters of an :class:`offload.OffloadOptimizer`, put together."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.auto import AHEAD, Auto, AutoPlacement
from offload.base_class import is_foreseeable, is_same_everywhere, launches_on_default_stream
from offload.engine.accumulation import HostGradients
from offload.engine.base import PartialStep, place, state_blocks
from offload.engine.both import pipelines
from offload.engine.copy_on_write import CopyOnWrite
from offload.engine.engine import Engine, Schedule
from offload.engine.forecast import Forecast, Form, forecast, kind_of
from offload.engine.host import HostCopies
from offload.engine.in_flight import InFlight
from offload.engine.memory import HostMemory, padded
from offload.engine.model import weakly
from offload.engine.placement import Placement
from offload.engine.runtime import HostRuntime, Runtime, runtime_for
from offload.engine.shards import LocalParameters, first_element, has_blocks, is_distributed
from offload.engine.states import States
from offload.engine.stream import SLOTS
from offload.engine.units import Slice, Unit, build_units
from offload.errors import UserError
from offload.exchange import Members
from offload.groups import tensors_of
from offload.loading import hollow, set_params
from offload.mixed import cuttable_groups
from offload.placing import Speeds
from offload.refusals import check_patterns

STAGING_SHARE = 0.6
"""Of ``in_flight_gib``, at most this much goes to the staging ring of ``stream``; the rest is for gradients."""


@dataclass(frozen=True)
class Wishes:
    """What the caller of :class:`offload.OffloadOptimizer` chose.

    Attributes:
        placement: where states rest, as far as the caller said.
        has_rules: the caller said something about it.
        gradient_dtype: of sums in host memory; None for each gradient's own.
        in_flight: bytes of device memory for what is under way.
        device_memory: bytes of the device that ``auto`` may take; None for all that is free.
        speeds: what ``auto`` goes by; None to measure.
    """

    base_class: type[torch.optim.Optimizer]
    base_kwargs: Mapping[str, Any]
    strategy: str
    schedule: Schedule
    placement: Placement
    has_rules: bool
    gradient_dtype: torch.dtype | None
    in_flight: int
    device_memory: int | None
    speeds: Speeds | None


class Machinery:
    """The base optimizer and all that moves its parameters' gradients and states and runs its updates.

    Args:
        groups: what the base optimizer is built over.
        param_groups: the optimizer's groups as they are when asked; must not keep the optimizer alive.
        is_final: no other parameters will take the place of these before they are trained. Those that wait for others
            are not copied, nor is anything page-locked for them.

    Attributes:
        copies: the parameters' copies in host memory, where the CPU updates them.
        parts: this rank's parts of parameters that are shared by several.
        resting: what the base optimizer updates for each parameter.
        folds: whether the base optimizer takes the gradients' scale into its update.
        placement: where states rest; None where they stay with their parameters.
        snapshots: of parameters and states.
        worker: what runs updates beside the caller's thread.
    """

    def __init__(
        self,
        wishes: Wishes,
        members: Members,
        groups: list[dict[str, Any]],
        param_groups: Callable[[], list[dict[str, Any]]],
        *,
        at_first: Callable[..., None],
        is_final: bool,
    ) -> None:
        self._wishes, self._members, self._groups = wishes, members, param_groups
        runtime = _runtime(wishes.strategy, groups) if is_final else HostRuntime()
        is_immediate = runtime.shares_memory
        self._block = math.lcm(*state_blocks(wishes.base_class).values())
        self._largest_gradients = 0
        self._is_on_host = runtime.is_on_host
        self.memory = HostMemory(runtime)
        self.in_flight = InFlight(runtime, wishes.in_flight)
        self.parts = LocalParameters()
        self.copies: HostCopies | None = None
        if (wishes.strategy == "host" or self._may_use_cpu(groups)) and not is_immediate:
            self.copies = HostCopies(self.memory, members.labels, self.parts)
        self.resting = self.parts if self.copies is None else self.copies
        streams = wishes.strategy in ("stream", "auto")
        self.placement = wishes.placement if streams and not is_immediate else None
        self._forecasts: list[Forecast | None] = []
        if streams and (is_foreseeable(wishes.base_class) or wishes.has_rules):
            self._foresee(groups)
            if wishes.has_rules:
                check_patterns(wishes.placement, self._forecasts, groups, members.paths, self._block)

        resting = (
            self._resting_groups(groups) if is_final else [dict(g, params=hollow(tensors_of([g]))) for g in groups]
        )
        self.base_optimizer = wishes.base_class(resting, **wishes.base_kwargs)
        step = PartialStep(self.base_optimizer)
        self.folds = step.folds
        self.states = States(self.base_optimizer, self.resting.of, self.placement, self.memory)
        self.snapshots = self._snapshots(runtime, tensors_of(groups)[0].device if is_final else None)
        self._on_device, self._on_cpu, self.worker = pipelines(
            runtime,
            self.in_flight,
            step,
            self.states,
            self.memory,
            self.copies,
            self.snapshots.before_update,
            updates_on_device=wishes.strategy != "host" and not is_immediate,
            on_default=launches_on_default_stream(wishes.base_class),
            ahead=AHEAD if wishes.strategy == "auto" else 0.5,
        )
        self.engine = Engine(
            runtime,
            wishes.schedule,
            in_flight=self.in_flight,
            step=step,
            states=self.states,
            worker=self.worker,
            copies=self.copies,
            snapshots=self.snapshots,
            names=members.labels,
            groups=param_groups,
        )
        if wishes.schedule.offload_gradients:
            self.engine.gradients = HostGradients(
                runtime, self.in_flight, self.memory, wishes.gradient_dtype, self.engine.settle
            )
        self.engine.at_first = at_first
        self.close = weakref.finalize(self, self.engine.close)
        self.auto: Auto | None = None
        if isinstance(self.placement, AutoPlacement):
            assert self._on_device is not None
            self.auto = Auto(
                runtime,
                self.engine,
                self.states,
                self.placement,
                self.copies,
                self._on_device,
                weakly(self.set_resting),
                device=tensors_of(groups)[0].device,
                in_backward=wishes.schedule.update_in_backward,
                speeds=wishes.speeds,
                budget=wishes.device_memory,
            )

    def _snapshots(self, runtime: Runtime, device: torch.device | None) -> CopyOnWrite:
        """Copies for snapshots are asynchronous on a device, even where updates are not."""
        memory = self.memory
        if runtime.shares_memory and device is not None and device.type not in ("cpu", "meta"):
            runtime = runtime_for(device)
            memory = HostMemory(runtime)
        return CopyOnWrite(runtime, memory, self.states, self.copies)

    def _may_use_cpu(self, groups: list[dict[str, Any]]) -> bool:
        """Whether ``auto`` may come to let the CPU update some of the parameters: each is this process's alone, and
        gets the same bits there."""
        is_shared = any(map(is_distributed, tensors_of(groups)))
        return self._wishes.strategy == "auto" and is_same_everywhere(self._wishes.base_class) and not is_shared

    # Parameters

    def begin(self) -> None:
        """Take charge of the parameters of all groups."""
        self._add_units(self._groups(), 0)
        if self.auto is None:
            return
        self.auto.begin(self._forms, self._wishes.base_class, dict(self._wishes.base_kwargs))
        come_from_device = self.engine.gradients is None or self._wishes.schedule.update_in_backward
        if self._on_cpu is not None and self.auto.may_use_cpu and come_from_device:
            self._on_cpu.reserve(self._largest_gradients)

    def add_group(self, group: dict[str, Any], before: int) -> None:
        """Give the base optimizer one more group, before which ``before`` parameters are; see :meth:`take_charge`."""
        if self._forecasts:
            self._foresee([group])
        self.base_optimizer.add_param_group(self._resting_groups([group], before)[0])

    def take_charge(self, first: int) -> None:
        """Work on the parameters of the groups from the position ``first`` on too."""
        self._add_units(self._groups()[first:], first)

    def _resting_groups(self, groups: list[dict[str, Any]], before: int = 0) -> list[dict[str, Any]]:
        """The groups for the base optimizer: the same, over the tensors that it updates, which are a parameter's host
        copy, this rank's part of it, or itself. ``before``: parameters of the groups before these."""
        resting = []
        for group in groups:
            self._add_resting(tensors_of([group]), before)
            before += len(group["params"])
            entries = [
                (entry[0], self.resting.of(entry[1])) if isinstance(entry, tuple) else self.resting.of(entry)
                for entry in group["params"]
            ]
            resting.append(dict(group, params=entries))
        return resting

    def _add_resting(self, params: list[nn.Parameter], before: int) -> None:
        """Make what the base optimizer updates for parameters, of which the first is at the position ``before``."""
        self.parts.add(params)
        if self.copies is not None and self._wishes.strategy == "host":
            self.copies.add(params)
        for position, param in enumerate(params, before):
            if is_distributed(param):
                whole_blocks = has_blocks(param, self._block)
                place(self.resting.of(param), position, first_element(param), has_blocks=whole_blocks)

    def add_missing_copies(self, copies: HostCopies) -> None:
        """Give parameters that were frozen at construction their host copies."""
        params = tensors_of(self._groups())
        if any(p.grad is not None and not copies.known([p]) for p in params):
            self._add_resting(params, 0)
            self.set_resting()

    def set_resting(self) -> None:
        """Tell the base optimizer what it updates for each parameter."""
        resting = [[self.resting.of(param) for param in group["params"]] for group in self._groups()]
        set_params(self.base_optimizer, resting)

    def _foresee(self, groups: list[dict[str, Any]]) -> None:
        """Find out which states the parameters of more groups will have."""
        for group in groups:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            kwargs = dict(self._wishes.base_kwargs)
            self._forecasts.append(forecast(self._wishes.base_class, kwargs, tensors_of([group]), options))

    def _forms(self, part: Slice) -> list[Form]:
        """The states that a parameter will have, as far as they are known."""
        foreseen = self._forecasts[part.group] if self._forecasts else None
        return [] if foreseen is None else foreseen.get(kind_of(part.param, self._block), [])

    # Units and their buffers

    def _add_units(self, groups: list[dict[str, Any]], first: int) -> None:
        """Take charge of the parameters of groups from the position ``first`` on, and make their buffers."""
        before = sum(len(group["params"]) for group in self._groups()[:first])
        in_groups = [(p, i) for i, group in enumerate(groups, first) for p in group["params"]]
        members = [
            (p, self._members.paths[p], group, position) for position, (p, group) in enumerate(in_groups, before)
        ]
        units = build_units(
            members,
            named=self._members.are_named(p for p, _ in in_groups),
            can_cut=cuttable_groups(self.base_optimizer) if self.worker is not None else (),
            block=self._block,
            limit=self._piece_limit(),
        )
        for piece in (piece for unit in units for piece in unit.pieces):
            piece.way = "host" if self._on_device is None and self._on_cpu is not None else "stream"
        self._reserve(units)
        self.engine.add_units(units)

    def _piece_limit(self) -> int | None:
        """Elements of a piece whose states fit a slot of the staging ring; None where that is not known."""
        densities = [
            sum(component.density for form in forms for component in form.components)
            for foreseen in self._forecasts
            for forms in (foreseen or {}).values()
        ]
        if not any(densities) or self.placement is None:
            return None
        slot = STAGING_SHARE * self._wishes.in_flight / SLOTS
        return max(1, int(slot / max(densities)))

    def _reserve(self, units: list[Unit]) -> None:
        """Make the buffers that updates need: page-locking takes seconds, and would hold up backward."""
        pieces = [piece for unit in units for piece in unit.pieces]
        dtype = self._wishes.gradient_dtype
        sizes = [
            sum(padded(part.numel * (dtype or part.param.dtype).itemsize) for part in piece.slices) for piece in pieces
        ]
        self._largest_gradients = largest = max(sizes, default=0)
        offloads_all = self.engine.gradients is not None and not self._wishes.schedule.update_in_backward
        if self._on_device is not None:
            staged = self.states.plan(pieces, self._forms)
            self._on_device.reserve(staged, largest if offloads_all else 0)
        elif self._on_cpu is not None and not offloads_all:
            self._on_cpu.reserve(largest)
        if self.engine.gradients is not None and offloads_all:
            params = [param for unit in units for param in unit.params]
            casts = dtype is not None and any(p.dtype != dtype for p in params)
            self.engine.gradients.reserve(params, sums=casts)

    # States

    def saved(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """The base optimizer's ``state_dict()`` over ``params``, all that it was built over, when no work is queued;
        states that travel in pieces are whole."""
        self.states.publish()
        state_dict: dict[str, Any] = self.base_optimizer.state_dict()
        if self.placement is not None:
            ids = [index for group in state_dict["param_groups"] for index in group["params"]]
            names = {index: self._members.paths[param] for index, param in zip(ids, params, strict=True)}
            state_dict["state"] = self.states.for_saving(state_dict["state"], names)
        return state_dict

    def adopt(self, previous: Any) -> None:
        """Take over the states that the base optimizer was given in the place of ``previous``."""
        if self.placement is None:
            self.states.forget()
        else:
            self.states.adopt(self.engine.pieces, previous, tensors_of(self._groups())[0].device)

    def memory_report(self) -> dict[str, dict[str, int]]:
        """See :meth:`offload.OffloadOptimizer.memory_report`."""
        held = []
        for param, state in list(self.base_optimizer.state.items()):
            path = self._members.paths.get(self.resting.device(param), "")
            values = [(key, value) for key, value in list(state.items()) if isinstance(value, Tensor)]
            held += [value for key, value in values if not self.states.is_counted(key, value, path)]
        # Without a device of its own, strategy resident plays one.
        is_on_host = (lambda _: False) if self._wishes.strategy == "resident" else self._is_on_host
        staging = 0 if self._on_device is None else self._on_device.staging_bytes()
        return self.memory.report_with(held, is_on_host, {"staging": staging, "gradients": self.in_flight.peak})


def _runtime(strategy: str, groups: list[dict[str, Any]]) -> Runtime:
    if strategy == "resident":
        return HostRuntime()
    devices = {param.device for param in tensors_of(groups)}
    if len(devices) != 1:
        raise UserError(
            f"strategy={strategy} needs all parameters on one device, got {sorted(map(str, devices))}; build one "
            "optimizer per device or use strategy=resident"
        )
    return runtime_for(devices.pop())

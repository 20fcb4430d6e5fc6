"""The front door: :class:`OffloadOptimizer`, any optimizer class with its work and state off the device."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offload.component import resolve
from offload.engine.accumulation import HostGradients
from offload.engine.base import PartialStep, step_alone
from offload.engine.engine import Engine, Schedule
from offload.engine.forecast import Forecast, Form, forecast, kind_of
from offload.engine.host import HostCopies, HostPipeline
from offload.engine.in_flight import InFlight
from offload.engine.memory import HostMemory, padded
from offload.engine.norms import clip_coefficient, total_norm
from offload.engine.pipeline import Pipeline
from offload.engine.placement import Placement
from offload.engine.runtime import HostRuntime, Runtime, runtime_for
from offload.engine.states import States, state_blocks
from offload.engine.stream import SLOTS, StreamPipeline
from offload.engine.units import Slice, Unit, build_units, clean_name, components
from offload.errors import UserError
from offload.optim import unpacked

log = logging.getLogger(__name__)

STRATEGIES = ("host", "stream", "resident")

GIB = 2**30

STAGING_SHARE = 0.6
"""Of ``in_flight_gib``, at most this much goes to the staging ring of ``stream``; the rest is for gradients."""

PER_PARAMETER_PACKAGES = ("torch.optim.", "torchao.optim.", "bitsandbytes.optim.")
"""Packages whose optimizers update each parameter from its own gradient and state alone, so that the engine may
update them one by one. Another class says so by an attribute ``per_parameter = True``; without it, it is stepped once
with everything."""

FORESEEABLE_PACKAGES = (*PER_PARAMETER_PACKAGES, "offload.optim.")
"""Packages whose optimizers may be tried on a small parameter, to see what states they keep before the first step.
Another class says so by an attribute ``foreseeable = True``; without it, host memory for its states is page-locked when
its first updates make them."""

DEFAULT_STREAM_PACKAGES = ("bitsandbytes.",)
"""Packages whose kernels run on the device's default stream, whichever stream is current. Another class says so by an
attribute ``launches_on_default_stream = True``."""

ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Optimizers that treat each element alone, so that a large tensor may be updated in ranges. Another class says so by
an attribute ``elementwise = True``."""

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose ``fused=True`` makes one pass over memory instead of one per operation, on the CPU too."""

FUSED_IN_FP32_ONLY = (torch.optim.SGD,)
"""Of them, those whose CPU kernel is wrong for 16-bit parameters: torch 2.13's SGD reads momentum that nobody wrote."""

ACCUMULATION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class OffloadOptimizer(torch.optim.Optimizer):
    """Runs any base optimizer with its state, its work, or both moved off the device.

    It is a :class:`torch.optim.Optimizer` over the caller's parameters: learning-rate schedulers, parameter
    groups, hooks and ``state_dict`` work as with the base optimizer, and ``state_dict`` has the base
    optimizer's own format, so checkpoints move freely between this class, any strategy of it, and the plain
    base optimizer.

    ========== ============= ============== ====================================================================
    strategy   states rest   update runs    per step over the link, each way; on the host, for N parameters
    ========== ============= ============== ====================================================================
    resident   on the device on the device  nothing; nothing
    stream     on the host   on the device  the states; the states
    host       on the host   on the CPU     gradients down, parameters up; parameters and states
    ========== ============= ============== ====================================================================

    Updates run beside the caller's thread. :meth:`step` returns when they are queued if it knows the ``model``,
    whose forward then waits unit by unit; without it, :meth:`step` waits until the device will see all of them.

    Args:
        params: parameters, parameter groups or named parameters, as for any torch optimizer; all on one
            device. On the CPU every strategy runs, and nothing is copied or page-locked.
        optimizer_class: the base optimizer, as a dotted path (``torch.optim.AdamW``) or a class.
        strategy: see the table.
        offload_states: with ``stream``, which states rest on the host: a regular expression that is matched
            against whole state paths ``<state>/<parameter name>`` (``exp_avg/layers.0.attn.q_proj.weight``), or a
            list of ``{"pattern": regex, "memory": "pinned_host" | "host" | "device"}``, of which the last that
            matches decides. What nothing matches stays on the device, and so do scalars.
        update_in_backward: update each unit as soon as backward has produced its gradients, and free them at
            once; with accumulation, in the last micro-batch's backward. Excludes clipping by the global norm.
        offload_gradients: move each gradient to the host as soon as backward has produced it and free it on
            the device; micro-batches are summed there. Whatever touches such a gradient on the device raises
            instead of having no effect.
        accumulation_dtype: of the sums in host memory, ``fp32`` or ``bf16``; None for each gradient's own. With
            fp32, bf16 gradients are summed without rounding and rounded once, for the update.
        in_flight_gib: device memory, in GiB, for what is under way: the staging ring of ``stream``, at most 60 % of
            it, and the gradients that ``update_in_backward`` and ``offload_gradients`` take. Backward waits rather
            than exceed it by more than the gradient that it is computing.
        model: what the parameters belong to. Gives them names where ``params`` has none, and lets its forward
            wait for each unit's update instead of :meth:`step`.
        **base_kwargs: passed on to the base optimizer (``lr``, ``weight_decay``, …). Where the work is offloaded,
            ``fused=True`` is chosen if the base optimizer has it and the caller chose no implementation.

    Host memory is page-locked when the optimizer is built, with what its states will need
    (:data:`FORESEEABLE_PACKAGES`).

    Raises:
        UserError: for a class that cannot be found, an unknown strategy, or a combination that has no meaning.
        ValueError, TypeError: from the base optimizer, for the arguments that it refuses.

    Example::

        optimizer = OffloadOptimizer(model.parameters(), "torch.optim.AdamW", strategy="host", lr=1e-5)
        for micro_batch in micro_batches[:-1]:
            with optimizer.accumulate():
                loss(micro_batch).backward()
        loss(micro_batches[-1]).backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: str | type[torch.optim.Optimizer] = "torch.optim.AdamW",
        *,
        strategy: Literal["host", "stream", "resident"] = "host",
        offload_states: str | list[Any] = ".*",
        update_in_backward: bool = False,
        offload_gradients: bool = False,
        accumulation_dtype: Literal["fp32", "bf16"] | None = None,
        in_flight_gib: float = 1.0,
        model: nn.Module | None = None,
        **base_kwargs: Any,
    ) -> None:
        base_class = base_class_of(optimizer_class)
        groups = as_groups(params)
        self.strategy = strategy
        self.update_in_backward = update_in_backward
        self._is_per_parameter = f"{base_class.__module__}.".startswith(PER_PARAMETER_PACKAGES) or bool(
            getattr(base_class, "per_parameter", False)
        )
        self._can_cut = base_class in ELEMENTWISE or bool(getattr(base_class, "elementwise", False))
        _check_choices(
            strategy,
            offload_gradients=offload_gradients,
            accumulation_dtype=accumulation_dtype,
            is_default_placement=offload_states == ".*",
            in_flight_gib=in_flight_gib,
        )
        self._refuse_base(base_class, base_kwargs)
        placement = Placement(offload_states)

        self._model_names = {param: name for name, param in model.named_parameters()} if model is not None else {}
        self._names: dict[Tensor, str] = {}
        self._paths: dict[Tensor, str] = {}
        self._named: set[Tensor] = set()
        self._name(groups)
        runtime = self._runtime(groups)
        is_immediate = runtime.shares_memory
        self._memory = HostMemory(runtime)
        self._in_flight_bytes = int(in_flight_gib * GIB)
        self._in_flight = InFlight(runtime, self._in_flight_bytes)
        self._copies = HostCopies(self._memory, self._names) if strategy == "host" and not is_immediate else None
        if strategy != "resident":
            base_kwargs = _with_fused(base_class, groups, base_kwargs)
        self._placement = placement if strategy == "stream" and not is_immediate else None
        self._base_kwargs = base_kwargs
        self._forecasts: list[Forecast | None] = []
        is_foreseeable = f"{base_class.__module__}.".startswith(FORESEEABLE_PACKAGES) or bool(
            getattr(base_class, "foreseeable", False)
        )
        if strategy == "stream" and (is_foreseeable or offload_states != ".*"):
            self._foresee(base_class, groups)
            if offload_states != ".*":
                _check_patterns(placement, self._forecasts, groups, self._paths)

        self.base_optimizer = base_class(self._resting_groups(groups), **base_kwargs)
        step = PartialStep(self.base_optimizer)
        self._folds = step.folds
        resting = _itself if self._copies is None else self._copies.of
        self._states = States(self.base_optimizer, resting, self._placement, self._memory)
        self._worker: Pipeline | None = None
        if not is_immediate:
            if self._copies is not None:
                self._worker = HostPipeline(runtime, self._in_flight, step, self._states, self._copies, self._memory)
            else:
                on_default = base_class.__module__.startswith(DEFAULT_STREAM_PACKAGES) or bool(
                    getattr(base_class, "launches_on_default_stream", False)
                )
                self._worker = StreamPipeline(runtime, self._in_flight, step, self._states, on_default=on_default)
        this = weakref.ref(self)
        self._engine = Engine(
            runtime,
            Schedule(offload_gradients=offload_gradients, update_in_backward=update_in_backward),
            in_flight=self._in_flight,
            step=step,
            states=self._states,
            worker=self._worker,
            copies=self._copies,
            names=self._names,
            groups=lambda: _alive(this).param_groups,
        )
        self._gradient_dtype = None if accumulation_dtype is None else ACCUMULATION_DTYPES[accumulation_dtype]
        if offload_gradients:
            self._engine.gradients = HostGradients(
                runtime, self._in_flight, self._memory, self._gradient_dtype, self._engine.settle
            )
        weakref.finalize(self, self._engine.close)
        super().__init__(groups, self.base_optimizer.defaults)
        self._pull_groups()
        self._add_units(self.param_groups)
        if model is not None:
            self.attach(model)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an OffloadOptimizer cannot be copied or pickled: its parameters are another object's, and a thread of its "
            "own works on them; save state_dict() and load it into a new one"
        )

    @classmethod
    def config_signature(cls, kwargs: Mapping[str, Any]) -> inspect.Signature:
        """The keyword arguments that a config may give: this class's own and those of ``optimizer_class``.

        Raises:
            UserError: where ``kwargs["optimizer_class"]`` cannot be found.
        """
        own = inspect.signature(cls)
        base_class = base_class_of(kwargs.get("optimizer_class", own.parameters["optimizer_class"].default))
        not_for_configs = ("model",)
        merged = [p for n, p in own.parameters.items() if n not in (*not_for_configs, "base_kwargs")]
        taken = {p.name for p in merged}
        for parameter in inspect.signature(base_class).parameters.values():
            if parameter.name not in taken and parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
                keyword = inspect.Parameter.KEYWORD_ONLY
                is_variable = parameter.kind is inspect.Parameter.VAR_KEYWORD
                merged.append(parameter if is_variable else parameter.replace(kind=keyword))
        return own.replace(parameters=merged)

    # Construction

    def _refuse_base(self, base_class: type[torch.optim.Optimizer], kwargs: Mapping[str, Any]) -> None:
        is_paged = base_class.__name__.startswith("Paged") or kwargs.get("is_paged", False)
        if is_paged and base_class.__module__.startswith("bitsandbytes.") and self.strategy != "resident":
            plain = base_class.__name__.removeprefix("Paged")
            raise UserError(
                f"optimizer.optimizer_class: bitsandbytes.optim.{base_class.__name__} pages its states by itself; "
                f"with strategy={self.strategy} use bitsandbytes.optim.{plain} without is_paged, or select the paged "
                f"one alone by optimizer=bitsandbytes.optim.{base_class.__name__}"
            )
        if issubclass(base_class, torch.optim.LBFGS) and (self.strategy != "resident" or self.update_in_backward):
            raise UserError(
                "optimizer.optimizer_class: torch.optim.LBFGS evaluates the model between its updates, which only "
                "strategy=resident with update_in_backward=False can do"
            )
        if not self._is_per_parameter and (self.strategy == "stream" or self.update_in_backward):
            setting = "strategy=stream" if self.strategy == "stream" else "update_in_backward=True"
            raise UserError(
                f"optimizer.optimizer_class: {base_class.__module__}.{base_class.__qualname__} is not known to update "
                f"each parameter by itself, which {setting} needs; if it does, give the class an attribute "
                "per_parameter = True, else use strategy=host with update_in_backward=False"
            )

    def _runtime(self, groups: list[dict[str, Any]]) -> Runtime:
        if self.strategy == "resident":
            return HostRuntime()
        devices = {param.device for param in _tensors(groups)}
        if len(devices) != 1:
            raise UserError(
                f"strategy={self.strategy} needs all parameters on one device, got {sorted(map(str, devices))}; build "
                "one optimizer per device or use strategy=resident"
            )
        return runtime_for(devices.pop())

    def _resting(self, param: nn.Parameter) -> nn.Parameter:
        """The tensor that the base optimizer updates for a parameter: its host copy, or itself."""
        return param if self._copies is None else self._copies.of(param)

    def _resting_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups for the base optimizer: the same, over the tensors that it updates."""
        resting = []
        for group in groups:
            if self._copies is not None:
                self._copies.add(_tensors([group]))
            entries = [
                (entry[0], self._resting(entry[1])) if isinstance(entry, tuple) else self._resting(entry)
                for entry in group["params"]
            ]
            resting.append(dict(group, params=entries))
        return resting

    def _name(self, groups: list[dict[str, Any]], first: int = 0) -> None:
        """Give parameters their name in state paths, and what messages call them: a name, else a position."""
        for group_index, group in enumerate(groups, first):
            for index, entry in enumerate(group["params"]):
                param = entry[1] if isinstance(entry, tuple) else entry
                name = entry[0] if isinstance(entry, tuple) else self._model_names.get(param)
                if name is not None:
                    self._named.add(param)
                    self._paths[param], self._names[param] = clean_name(name), f"parameter {name}"
                else:
                    self._paths[param] = f"{group_index}.{index}"
                    self._names[param] = f"parameter {index} of group {group_index} (shape {tuple(param.shape)})"

    def _foresee(self, base_class: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> None:
        """Find out which states the parameters of more groups will have."""
        for group in groups:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            self._forecasts.append(forecast(base_class, self._base_kwargs, _tensors([group]), options))

    def _forms(self, part: Slice) -> list[Form]:
        """The states that a parameter will have, as far as they are known."""
        foreseen = self._forecasts[part.group] if self._forecasts else None
        return [] if foreseen is None else foreseen.get(kind_of(part.param), [])

    def _add_units(self, groups: list[dict[str, Any]], first: int = 0) -> None:
        """Take charge of the parameters of groups from the position ``first`` on, and make their buffers."""
        before = sum(len(group["params"]) for group in self.param_groups[:first])
        in_groups = [(p, i) for i, group in enumerate(groups, first) for p in group["params"]]
        members = [(p, self._paths[p], group, position) for position, (p, group) in enumerate(in_groups, before)]
        units = build_units(
            members,
            named=all(p in self._named for p, _ in in_groups),
            can_cut=self._can_cut and self._worker is not None,
            block=math.lcm(*state_blocks(type(self.base_optimizer)).values()),
            limit=self._piece_limit(),
        )
        self._reserve(units)
        self._engine.add_units(units)

    def _piece_limit(self) -> int | None:
        """Elements of a piece whose states fit a slot of the staging ring; None where that is not known."""
        densities = [
            sum(component.density for form in forms for component in form.components)
            for foreseen in self._forecasts
            for forms in (foreseen or {}).values()
        ]
        if not any(densities) or self._placement is None:
            return None
        slot = STAGING_SHARE * self._in_flight_bytes / SLOTS
        return max(1, int(slot / max(densities)))

    def _reserve(self, units: list[Unit]) -> None:
        """Make the buffers that updates need: page-locking takes seconds, and would hold up backward."""
        pieces = [piece for unit in units for piece in unit.pieces]
        sizes = [
            sum(padded(part.numel * (self._gradient_dtype or part.param.dtype).itemsize) for part in piece.slices)
            for piece in pieces
        ]
        largest = max(sizes, default=0)
        offloads_all = self._engine.gradients is not None and not self.update_in_backward
        if isinstance(self._worker, StreamPipeline):
            staged = self._states.plan(pieces, self._forms)
            self._worker.reserve(staged, largest if offloads_all else 0)
        elif isinstance(self._worker, HostPipeline) and not offloads_all:
            self._worker.reserve(largest)
        if self._engine.gradients is not None and offloads_all:
            params = [param for unit in units for param in unit.params]
            casts = self._gradient_dtype is not None and any(p.dtype != self._gradient_dtype for p in params)
            self._engine.gradients.reserve(params, sums=casts)

    def attach(self, model: nn.Module) -> None:
        """Let the forward of ``model`` wait for each unit's update, so that :meth:`step` need not; as ``model=``."""
        self._engine.attach(model)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this optimizer and to the base optimizer, as torch.optim.Optimizer does."""
        is_construction = len(self.param_groups) < len(self.base_optimizer.param_groups)
        if is_construction:
            super().add_param_group(param_group)
            return
        first = len(self.param_groups)
        (group,) = as_groups([param_group])
        self._name([group], first)
        if self._forecasts:
            self._foresee(type(self.base_optimizer), [group])
        self.base_optimizer.add_param_group(self._resting_groups([group])[0])
        super().add_param_group(group)
        self._pull_groups()
        self._add_units(self.param_groups[first:], first)

    # Hyperparameters and state

    def _push_groups(self) -> None:
        """Hand the caller's hyperparameters (a scheduler's ``lr``) to the base optimizer."""
        for mine, base in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            base.update((key, value) for key, value in mine.items() if key != "params")

    def _pull_groups(self) -> None:
        """Take over what the base optimizer keeps in its groups (defaults, counters, loaded values)."""
        for mine, base in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            mine.update((key, value) for key, value in base.items() if key != "params")

    @property
    def state(self) -> Any:
        """The base optimizer's state by the caller's parameters, after all queued work; tensors lie where they rest."""
        if hasattr(self, "_engine"):
            self._engine.settle()
            self._states.publish()
        if self._copies is None:
            return self.base_optimizer.state
        return _StateView(self.base_optimizer, self._copies)

    @state.setter
    def state(self, value: Any) -> None:
        # torch.optim.Optimizer.__init__ assigns an empty mapping; the state is the base optimizer's.
        assert not value

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's ``state_dict()``, tensors where they rest, after all queued work."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self.synchronize()
        self._states.publish()
        self._push_groups()
        state_dict = self.base_optimizer.state_dict()
        if self._placement is not None:
            ids = [index for group in state_dict["param_groups"] for index in group["params"]]
            names = {index: self._paths[p] for index, p in zip(ids, _tensors(self.param_groups), strict=True)}
            state_dict["state"] = self._states.for_saving(state_dict["state"], names)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    @property
    def owns_loaded_states(self) -> bool:
        """Whether the base optimizer converts what it loads to a format of its own."""
        return bool(getattr(self.base_optimizer, "owns_loaded_states", False))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of the base optimizer, of this class, or of another strategy of it.

        States keep the dtype that they were saved in and go to where this strategy rests them. A base optimizer that
        converts what it loads to a format of its own (:class:`offload.optim.AdamW`) does so here too; its class says
        it by an attribute ``owns_loaded_states = True``.

        Raises:
            ValueError: where groups, their sizes or a state's shape do not fit this optimizer.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        if not self.owns_loaded_states:
            state_dict = unpacked(state_dict, _tensors(self.param_groups))
        self._check_shapes(state_dict)
        self.synchronize()
        previous = self.base_optimizer.state
        if self.owns_loaded_states:
            states_on = {} if self._placement is None else {"states_on": torch.device("cpu")}
            self.base_optimizer.load_state_dict(state_dict, **states_on)
        else:
            with self._loading_on_host():
                self.base_optimizer.load_state_dict(state_dict)
            self._own_states(state_dict)
        if self._placement is not None:
            self._states.adopt(self._engine.pieces, previous, _tensors(self.param_groups)[0].device)
        else:
            self._states.forget()
        self._pull_groups()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @contextmanager
    def _loading_on_host(self) -> Iterator[None]:
        """Inside, the base optimizer takes its parameters to be on the host, so that it leaves loaded states there."""
        if self._placement is None:
            yield
            return
        base = self.base_optimizer
        params = [group["params"] for group in base.param_groups]
        stand_ins = [
            [nn.Parameter(torch.empty((), dtype=p.dtype).expand(p.shape), requires_grad=False) for p in members]
            for members in params
        ]
        self._set_base_params(stand_ins)
        try:
            yield
        finally:
            self._set_base_params(params)
        # Only after loading: where that failed, the state is still the one before.
        real: dict[Any, nn.Parameter] = {
            s: p for ours, theirs in zip(stand_ins, params, strict=True) for s, p in zip(ours, theirs, strict=True)
        }
        states: dict[Any, Any] = {real.get(key, key): state for key, state in base.state.items()}
        base.state = defaultdict(dict, states)

    def _set_base_params(self, params: list[list[nn.Parameter]]) -> None:
        for group, members in zip(self.base_optimizer.param_groups, params, strict=True):
            group["params"] = members

    def _saved_states(self, state_dict: dict[str, Any]) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """``(resting parameter, its saved state)``: states are saved by position over all groups."""
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        resting = [param for group in self.base_optimizer.param_groups for param in group["params"]]
        for index, param in zip(ids, resting, strict=True):
            if index in state_dict["state"]:
                yield param, state_dict["state"][index]

    def _check_shapes(self, state_dict: dict[str, Any]) -> None:
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        expected = [len(group["params"]) for group in self.base_optimizer.param_groups]
        if sizes != expected:
            raise ValueError(
                f"the state to load has {len(sizes)} parameter groups of sizes {sizes}, this optimizer has "
                f"{len(expected)} of sizes {expected}; build it over the same parameters in the same order"
            )
        for param, state in self._saved_states(state_dict):
            moment = state.get("exp_avg", state.get("momentum_buffer"))
            if isinstance(moment, Tensor) and moment.numel() != param.numel():
                device_param = param if self._copies is None else self._copies.device(param)
                raise ValueError(
                    f"the state to load for {self._names[device_param]} has shape {tuple(moment.shape)}, "
                    f"expected {tuple(param.shape)}: it was saved for other parameters or in another order"
                )

    def _own_states(self, state_dict: dict[str, Any]) -> None:
        """Undo torch's cast of floating-point states to the parameter's dtype, and its sharing of storage
        with the loaded dict, which may be another optimizer's live state or a memory-mapped file."""
        for param, saved in self._saved_states(state_dict):
            loaded = self.base_optimizer.state[param]
            for key, value in saved.items():
                mine = loaded.get(key)
                if type(value) is not Tensor or not isinstance(mine, Tensor):
                    continue
                if mine.dtype != value.dtype or mine.data_ptr() == value.data_ptr():
                    loaded[key] = value.to(mine.device, copy=True)

    # Gradients

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Marks the backward of every micro-batch but the last: its gradients are not final yet."""
        with self._engine.accumulate():
            yield

    @property
    def measure_grad_norm(self) -> bool:
        """Whether norms are taken of gradients that leave early (``update_in_backward``, ``offload_gradients``): set
        it to False before a backward whose norm nobody will ask for."""
        return self._engine.norms.measure

    @measure_grad_norm.setter
    def measure_grad_norm(self, measure: bool) -> None:
        self._engine.norms.measure = measure

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm over all gradients wherever they rest, as a 0-dim tensor (fp32 for 16-bit gradients).

        With ``update_in_backward`` it is that of the gradients of the last backward, for order 2 only.
        """
        return total_norm(self._norms(norm_type), norm_type)

    def _norms(self, norm_type: float) -> list[Tensor]:
        with torch.no_grad():
            return self._engine.gradient_norms(_tensors(self.param_groups), norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Limit the norm of all gradients to ``max_norm`` in the coming update; returns the norm before.

        It counts every gradient wherever it rests. Where updates run beside this thread the factor is applied
        by the update itself, so no copy that is under way is touched; and so it is by a base optimizer whose class
        has an attribute ``folds_gradient_scale = True`` (:class:`offload.optim.AdamW`), which rounds nothing for it.

        Args:
            max_norm: the limit; ``inf`` only measures.
            norm_type: p of the p-norm, may be ``inf``.
            error_if_nonfinite: raise RuntimeError for a norm that is nan or infinite.

        Raises:
            UserError: with ``update_in_backward``, whose updates are done before the norm is known.
        """
        if self.update_in_backward:
            raise UserError(
                "clip_grad_norm: update_in_backward=True updates each layer before the norm of all gradients is known, "
                "so it cannot be limited; set clip_grad_norm=null, or optimizer.update_in_backward=False"
            )
        norm = total_norm(self._norms(norm_type), norm_type, error_if_nonfinite=error_if_nonfinite)
        factor = clip_coefficient(norm, float(max_norm))
        if factor is not None:
            with torch.no_grad():
                self._engine.scale_gradients(factor)
        return norm

    def check_training(self, *, gradient_accumulation_steps: int, clip_grad_norm: float | None) -> None:
        """Refuse, before the first step, what :meth:`clip_grad_norm_` would refuse after it."""
        if clip_grad_norm is not None and self.update_in_backward:
            self.clip_grad_norm_(clip_grad_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) every gradient, on the device and on the host."""
        self._engine.zero_grad(_tensors(self.param_groups), set_to_none)

    # Update

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient and was not updated in backward.

        It returns when the updates are queued. The forward of the ``model`` waits for each unit's update; without a
        model, work that is queued on the device afterwards sees all new values. Until that forward, read parameters
        after :meth:`synchronize`, and drop gradients rather than change them.

        Args:
            closure: reevaluates the loss and is called once before the update (``resident`` hands it to
                a base optimizer that does not fold the gradients' scale).
        """
        loss = None
        hands_closure_on = self.strategy == "resident" and not self.update_in_backward and not self._folds
        if closure is not None and not hands_closure_on:
            with torch.enable_grad():
                loss, closure = closure(), None
        if self._copies is not None:
            self._add_missing_copies(self._copies)
        if self._worker is None and not self.update_in_backward:
            self._push_groups()
            with self._engine.gradients_in_place(self.base_optimizer):
                if closure is None:
                    step_alone(self.base_optimizer)
                else:
                    loss = step_alone(self.base_optimizer, closure)
            self._pull_groups()
        elif not self._is_per_parameter and self._copies is not None:
            self._push_groups()
            with self._engine.gradients_on_host(self.base_optimizer, self._copies) as updated:
                step_alone(self.base_optimizer)
            self._engine.upload(updated, self._copies)
            self._pull_groups()
        else:
            self._engine.step()
        return loss

    def _add_missing_copies(self, copies: HostCopies) -> None:
        """Give parameters that were frozen at construction their host copies."""
        missing = [p for p in _tensors(self.param_groups) if p.grad is not None and copies.of(p) is p]
        if missing:
            copies.add(missing)
            self._set_base_params([[copies.of(p) for p in group["params"]] for group in self.param_groups])

    # Memory

    def synchronize(self) -> None:
        """Block until every queued copy and update is done."""
        self._engine.settle()

    def sync_from_model(self) -> None:
        """Re-read all parameters into their host copies, after they were loaded or changed elsewhere."""
        self._engine.settle()
        if self._copies is not None:
            self._copies.read()

    def memory_report(self) -> dict[str, dict[str, int]]:
        """Bytes that this optimizer holds, as ``{memory kind: {purpose: bytes}}``.

        Kinds are ``device``, ``pinned_host`` and ``host``; purposes are ``parameters``, ``gradients``, ``staging`` and
        ``optimizer_state``. The caller's own parameters and gradients are not counted; on the device, ``gradients`` is
        the most that was held at a time for updates in backward and copies to the host. Nothing is waited for.
        """
        report = self._memory.report()
        on_device = report.setdefault("device", {})
        for param, state in list(self.base_optimizer.state.items()):
            for key, value in list(state.items()):
                if isinstance(value, Tensor) and not self._states.is_counted(key, value, self._paths.get(param, "")):
                    # Without a device of its own, strategy resident plays one.
                    is_host = value.device.type == "cpu" and self.strategy != "resident"
                    purposes = report.setdefault("host", {}) if is_host else on_device
                    nbytes = sum(component.nbytes for component in components(value))
                    purposes["optimizer_state"] = purposes.get("optimizer_state", 0) + nbytes
        if isinstance(self._worker, StreamPipeline):
            on_device["staging"] = self._worker.staging_bytes()
        on_device["gradients"] = self._in_flight.peak
        kept = {kind: {purpose: nbytes for purpose, nbytes in p.items() if nbytes} for kind, p in report.items()}
        return {kind: purposes for kind, purposes in kept.items() if purposes}


class _StateView(MutableMapping[Any, Any]):
    """The base optimizer's state, looked up by the caller's parameters instead of their host copies."""

    def __init__(self, base: torch.optim.Optimizer, copies: HostCopies) -> None:
        self._base, self._copies = base, copies

    def __getitem__(self, param: Any) -> Any:
        return self._base.state[self._copies.of(param)]

    def __setitem__(self, param: Any, value: Any) -> None:
        self._base.state[self._copies.of(param)] = value

    def __delitem__(self, param: Any) -> None:
        del self._base.state[self._copies.of(param)]

    def __contains__(self, param: object) -> bool:
        return isinstance(param, nn.Parameter) and self._copies.of(param) in self._base.state

    def __iter__(self) -> Iterator[Any]:
        return (self._copies.device(host) for host in self._base.state)

    def __len__(self) -> int:
        return len(self._base.state)


def base_class_of(optimizer_class: str | type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The optimizer class that a dotted path or a class names; UserError where there is none."""
    resolved = optimizer_class
    if isinstance(optimizer_class, str):
        resolved = resolve(optimizer_class, key="optimizer.optimizer_class")
    if not (isinstance(resolved, type) and issubclass(resolved, torch.optim.Optimizer)):
        raise UserError(
            f"optimizer.optimizer_class: {optimizer_class!r} is not a torch.optim.Optimizer class; give the "
            "dotted path of one, such as torch.optim.AdamW"
        )
    if issubclass(resolved, OffloadOptimizer):
        raise UserError("optimizer.optimizer_class: OffloadOptimizer cannot offload itself; name the base optimizer")
    return resolved


def _check_choices(
    strategy: str,
    *,
    offload_gradients: bool,
    accumulation_dtype: str | None,
    is_default_placement: bool,
    in_flight_gib: float,
) -> None:
    if strategy not in STRATEGIES:
        near = difflib.get_close_matches(str(strategy), STRATEGIES, n=1, cutoff=0.0)[0]
        raise UserError(
            f"optimizer.strategy: got {strategy!r}, expected one of {', '.join(STRATEGIES)}; did you mean {near}?"
        )
    if isinstance(in_flight_gib, bool) or not isinstance(in_flight_gib, (int, float)) or not in_flight_gib > 0:
        raise UserError(
            f"optimizer.in_flight_gib: got {in_flight_gib!r}, expected GiB of device memory above 0, such as 1.0; more "
            "lets backward run further ahead of the updates"
        )
    if offload_gradients and strategy == "resident":
        raise UserError(
            "optimizer.offload_gradients: strategy=resident updates with the gradients on the device; set "
            "offload_gradients=False, or strategy=stream or host"
        )
    if not is_default_placement and strategy != "stream":
        rests = "all states rest on the device" if strategy == "resident" else "all states rest on the host"
        raise UserError(
            f"optimizer.offload_states: with strategy={strategy} {rests}; leave it out or set strategy=stream"
        )
    if accumulation_dtype is not None and accumulation_dtype not in ACCUMULATION_DTYPES:
        near = difflib.get_close_matches(str(accumulation_dtype), ACCUMULATION_DTYPES, n=1, cutoff=0.0)[0]
        raise UserError(
            f"optimizer.accumulation_dtype: got {accumulation_dtype!r}, expected fp32, bf16 or null; did you mean "
            f"{near}?"
        )
    if accumulation_dtype is not None and not offload_gradients:
        raise UserError(
            "optimizer.accumulation_dtype: is that of sums in host memory, which need offload_gradients=True; "
            "gradients on the device are summed by autograd in their own dtype"
        )


def _itself(param: nn.Parameter) -> nn.Parameter:
    return param


def _alive(reference: weakref.ref[OffloadOptimizer]) -> OffloadOptimizer:
    optimizer = reference()
    assert optimizer is not None
    return optimizer


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameter groups with ``params`` as a list; entries may be ``(name, parameter)``."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of parameters or of groups, got a single Tensor")
    entries = list(params)
    if not entries:
        raise ValueError("optimizer got an empty parameter list")
    if not isinstance(entries[0], dict):
        entries = [{"params": entries}]
    groups = []
    for group in entries:
        members = group["params"]
        groups.append(dict(group, params=[members] if isinstance(members, Tensor) else list(members)))
    return groups


def _tensors(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    entries = [entry for group in groups for entry in group["params"]]
    return [entry[1] if isinstance(entry, tuple) else entry for entry in entries]


def _check_patterns(
    placement: Placement,
    forecasts: list[Forecast | None],
    groups: list[dict[str, Any]],
    names: Mapping[Tensor, str],
) -> None:
    """Refuse patterns that match no state, where the states can be known; ``names`` are those in state paths."""
    paths: list[str] = []
    for foreseen, group in zip(forecasts, groups, strict=True):
        if foreseen is None:
            return
        paths += [f"{form.key}/{names[param]}" for param in _tensors([group]) for form in foreseen[kind_of(param)]]
    placement.check(paths)


def _with_fused(
    base_class: type[torch.optim.Optimizer], groups: list[dict[str, Any]], kwargs: dict[str, Any]
) -> dict[str, Any]:
    chosen = {"fused", "foreach", "capturable", "differentiable"}
    groups_choose = any(chosen & group.keys() for group in groups)
    floating = all(param.is_floating_point() for param in _tensors(groups))
    if base_class in FUSED_IN_FP32_ONLY:
        floating = all(param.dtype in (torch.float32, torch.float64) for param in _tensors(groups))
    if base_class not in FUSED or chosen & kwargs.keys() or groups_choose or not floating:
        return kwargs
    log.info("%s: fused=True, one pass over host memory per step", base_class.__name__)
    return {**kwargs, "fused": True}

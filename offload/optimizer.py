"""The front door: :class:`OffloadOptimizer`, any optimizer class with its work and state off the device."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offload.auto import Auto, AutoPlacement
from offload.base_class import base_class_of, is_per_parameter, needs_closure, path_of
from offload.engine.base import step_alone
from offload.engine.copy_on_write import Snapshot
from offload.engine.engine import Schedule
from offload.engine.model import weakly
from offload.engine.norms import clip_coefficient
from offload.engine.placement import Placement
from offload.engine.runtime import free_pinned
from offload.errors import UserError
from offload.exchange import Group, Members, awaits_sharding
from offload.groups import as_groups, tensors_of
from offload.loading import check_shapes, load
from offload.machinery import Machinery, Wishes
from offload.optim import unpacked
from offload.param_groups import choose_base, read_rules
from offload.placing import Speeds
from offload.refusals import ACCUMULATION_DTYPES, check_choices, check_distributed, check_params, check_wrapper
from offload.sharded_states import for_loading, for_saving, tell_of_fp32
from offload.state_view import StateView

GIB = 2**30


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
    auto       found out     found out      as of the above that a unit goes by, see :mod:`offload.auto`
    ========== ============= ============== ====================================================================

    Updates run beside the caller's thread. :meth:`step` returns when they are queued if it knows the ``model``,
    whose forward then waits unit by unit; without it, :meth:`step` waits until the device will see all of them.

    Args:
        params: parameters, parameter groups or named parameters, as for any torch optimizer; all on one
            device. On the CPU every strategy runs, and nothing is copied or page-locked.
        optimizer_class: the base optimizer, as a dotted path (``torch.optim.AdamW``) or a class.
        strategy: see the table.
        offload_states: with ``stream`` and ``auto``, which states rest on the host: a regular expression that is
            matched against whole state paths ``<state>/<parameter name>`` (``exp_avg/layers.0.attn.q_proj.weight``), or
            a list of ``{"pattern": regex, "memory": "pinned_host" | "host" | "device"}``, of which the last that
            matches decides. What nothing matches stays on the device, as scalars do, or is left to ``auto``.
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
        device_memory_gib: with ``auto``, GiB of the device that may be taken, by whatever is on it; None for all that
            is free. Of what is left under the peak of the first steps, states take all but 3 %.
        param_groups: hyperparameters, or another class, for parameters by their names: a list of ``{"params": regex,
            "weight_decay": 0.0, …}``. The first whose ``params`` matches a whole name decides. An entry with an
            ``optimizer_class`` of its own takes ``lr`` and ``weight_decay`` from ``base_kwargs`` if it gives none, and
            nothing else. ``self.param_groups`` has what no entry matches first, then one group per entry.
        model: what the parameters belong to. Gives them names where ``params`` has none, and lets its forward
            wait for each unit's update instead of :meth:`step`.
        speeds: with ``auto``, those of this machine; None to measure, in a fraction of a second, where they decide.
        **base_kwargs: passed on to the base optimizer (``lr``, ``weight_decay``, …). Where the work is offloaded,
            ``fused=True`` is chosen if the base optimizer has it and the caller chose no implementation.

    Host memory is page-locked when the optimizer is built, with what its states will need
    (:data:`offload.base_class.FORESEEABLE_PACKAGES`).

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
        strategy: Literal["host", "stream", "resident", "auto"] = "host",
        offload_states: str | list[Any] = ".*",
        update_in_backward: bool = False,
        offload_gradients: bool = False,
        accumulation_dtype: Literal["fp32", "bf16"] | None = None,
        in_flight_gib: float = 1.0,
        device_memory_gib: float | None = None,
        param_groups: list[Any] | None = None,
        model: nn.Module | None = None,
        speeds: Speeds | None = None,
        **base_kwargs: Any,
    ) -> None:
        base_class = base_class_of(optimizer_class)
        groups = as_groups(params)
        self.strategy = strategy
        self.update_in_backward = update_in_backward
        check_choices(
            strategy,
            offload_gradients=offload_gradients,
            accumulation_dtype=accumulation_dtype,
            is_default_placement=offload_states == ".*",
            in_flight_gib=in_flight_gib,
            device_memory_gib=device_memory_gib,
        )
        self._model = None if model is None else weakref.ref(model)
        base_class, base_kwargs, groups = choose_base(
            base_class,
            base_kwargs,
            groups,
            param_groups or [],
            self._names_in_model(),
            strategy=strategy,
            update_in_backward=update_in_backward,
        )
        self._is_per_parameter = is_per_parameter(base_class)
        self._wishes = Wishes(
            base_class,
            base_kwargs,
            strategy,
            Schedule(offload_gradients=offload_gradients, update_in_backward=update_in_backward),
            placement=AutoPlacement(offload_states) if strategy == "auto" else Placement(offload_states),
            has_rules=offload_states != ".*",
            gradient_dtype=None if accumulation_dtype is None else ACCUMULATION_DTYPES[accumulation_dtype],
            in_flight=int(in_flight_gib * GIB),
            device_memory=None if device_memory_gib is None else int(device_memory_gib * GIB),
            speeds=speeds,
        )
        self._snapshot_bytes = 0
        self._check(groups)
        self._members = Members()
        self._members.add(groups, self._names_in_model())
        # Nothing is page-locked, and no parameter kept, before those are there that will be trained.
        is_final = not awaits_sharding(tensors_of(groups))
        self._build(groups, is_final=is_final)
        super().__init__(groups, self.base_optimizer.defaults)
        self._watch_groups()
        self._pull_groups()
        if is_final:
            self._begin()
        else:
            self._members.forget()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an OffloadOptimizer cannot be copied or pickled: its parameters are another object's, and a thread of its "
            "own works on them; save state_dict() and load it into a new one"
        )

    @classmethod
    def config_signature(cls, kwargs: Mapping[str, Any]) -> inspect.Signature:
        """The keyword arguments that a config may give: this class's own and those of ``optimizer_class``.

        Raises:
            UserError: where ``kwargs["optimizer_class"]`` cannot be found, or ``kwargs["param_groups"]`` not be read.
        """
        own = inspect.signature(cls)
        base_class = base_class_of(kwargs.get("optimizer_class", own.parameters["optimizer_class"].default))
        # No config can give these; who builds it from one may.
        not_for_configs = {"model", "speeds"} - {name for name, each in kwargs.items() if isinstance(each, Speeds)}
        if kwargs.get("param_groups"):
            read_rules(kwargs["param_groups"], base_class, kwargs)
        merged = [p for n, p in own.parameters.items() if n not in (*not_for_configs, "base_kwargs")]
        taken = {p.name for p in merged}
        for parameter in inspect.signature(base_class).parameters.values():
            if parameter.name not in taken and parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
                keyword = inspect.Parameter.KEYWORD_ONLY
                is_variable = parameter.kind is inspect.Parameter.VAR_KEYWORD
                merged.append(parameter if is_variable else parameter.replace(kind=keyword))
        return own.replace(parameters=merged)

    # Construction

    def _build(self, groups: list[dict[str, Any]], *, is_final: bool) -> None:
        """Make everything that works on the parameters of ``groups``; see :class:`offload.machinery.Machinery`."""
        this = weakref.ref(self)
        self._machinery = Machinery(
            self._wishes,
            self._members,
            groups,
            lambda: _alive(this).param_groups,
            at_first=weakly(self._check_again),
            is_final=is_final,
        )

    def _begin(self) -> None:
        """Take charge of the parameters of all groups."""
        if self._machinery.parts:
            tell_of_fp32(self.param_groups)
        self._machinery.begin()
        model = self._attached()
        if model is not None:
            self.attach(model)

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that does the arithmetic, over what it updates: host copies, this rank's parts, or the
        parameters themselves."""
        return self._machinery.base_optimizer

    @property
    def auto(self) -> Auto | None:
        """With ``strategy="auto"``, what decides where each unit is updated."""
        return self._machinery.auto

    def _watch_groups(self, first: int = 0) -> None:
        """Notice when groups from the position ``first`` on are given other parameters."""
        ready = weakly(self._ready)
        self.param_groups[first:] = [Group(group, ready) for group in self.param_groups[first:]]

    def _names_in_model(self) -> dict[Tensor, str]:
        model = self._attached()
        return {} if model is None else {param: name for name, param in model.named_parameters()}

    def _ready(self, *, begin: bool = True) -> None:
        """Work on the parameters that the groups have now, where they are others than before, as accelerate gives that
        shards a model by FSDP2. Names, settings and states stay.

        ``begin``: also where none were taken charge of yet.
        """
        machinery = self._machinery
        known = machinery.engine.params()
        if not known and not begin:
            return
        if all(param in known for param in tensors_of(self.param_groups)) or not self._members.fit(self.param_groups):
            return
        self._check(self.param_groups)
        self._push_groups()
        machinery.engine.settle()
        resting = tensors_of(machinery.base_optimizer.param_groups)
        saved = self._saved([machinery.resting.device(param) for param in resting]) if known else {}
        measures = self.measure_grad_norm
        machinery.close()
        # Host memory of what is there goes before more is page-locked.
        del machinery, self._machinery
        free_pinned()
        self._members.exchange(self.param_groups)
        self._build([dict(group) for group in self.param_groups], is_final=True)
        self._begin()
        if self._snapshot_bytes:
            self.reserve_snapshot(self._snapshot_bytes)
        self.measure_grad_norm = measures
        if saved.get("state"):
            self._load(saved)

    def _check(self, groups: list[dict[str, Any]]) -> None:
        """Refuse parameters that cannot be updated, or not in this way."""
        check_params(groups)
        check_distributed(self._wishes.base_class, groups, self._attached(), takes_early=self._takes_early())

    def _check_again(self) -> None:
        """Refuse what the model was wrapped in after this was built."""
        check_wrapper(self.param_groups, takes_early=self._takes_early())

    def _takes_early(self) -> bool:
        return self._wishes.schedule.update_in_backward or self._wishes.schedule.offload_gradients

    def _attached(self) -> nn.Module | None:
        """The model that the caller gave."""
        return None if self._model is None else self._model()

    def attach(self, model: nn.Module) -> None:
        """Let the forward of ``model`` wait for each unit's update, so that :meth:`step` need not; as ``model=``."""
        self._model = weakref.ref(model)
        self._machinery.engine.attach(model)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this optimizer and to the base optimizer, as torch.optim.Optimizer does."""
        is_construction = len(self.param_groups) < len(self.base_optimizer.param_groups)
        if is_construction:
            super().add_param_group(param_group)
            return
        first = len(self.param_groups)
        (group,) = as_groups([param_group])
        check_params([group])
        check_distributed(type(self.base_optimizer), [group], None, takes_early=False)
        self._ready()
        self._members.add([group], self._names_in_model())
        self._machinery.add_group(group, before=len(tensors_of(self.param_groups)))
        super().add_param_group(group)
        self._watch_groups(first)
        self._pull_groups()
        self._machinery.take_charge(first)

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
        """The base optimizer's state by the caller's parameters, after all queued work; tensors lie where they rest.
        Of a parameter that several ranks share, it is that of this rank's part."""
        self._ready(begin=False)
        machinery = self._machinery
        machinery.engine.settle()
        machinery.states.publish()
        if machinery.copies is None and not machinery.parts:
            return machinery.base_optimizer.state
        return StateView(machinery.base_optimizer, machinery.resting)

    @state.setter
    def state(self, value: Any) -> None:
        # torch.optim.Optimizer.__init__ assigns an empty mapping; the state is the base optimizer's.
        assert not value

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's ``state_dict()``, tensors where they rest, after all queued work.

        States of DTensors are DTensors, which ``torch.distributed.checkpoint`` saves, and loads on any number of ranks.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._ready(begin=False)
        self.synchronize()
        self._push_groups()
        state_dict = self._saved(tensors_of(self.param_groups))
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def _saved(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """The base optimizer's state over ``params``, all that it was built over, when no work is queued."""
        state_dict = self._machinery.saved(params)
        if self._machinery.parts:
            state_dict = for_saving(state_dict, params, path_of(type(self.base_optimizer)))
        return state_dict

    @property
    def owns_loaded_states(self) -> bool:
        """Whether the base optimizer converts what it loads to a format of its own."""
        return bool(getattr(self.base_optimizer, "owns_loaded_states", False))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of the base optimizer, of this class, or of another strategy of it.

        States keep the dtype that they were saved in and go to where this strategy rests them. A base optimizer that
        converts what it loads to a format of its own (:class:`offload.optim.AdamW`) does so here too; its class says
        it by an attribute ``owns_loaded_states = True``. States of DTensors may be DTensors or whole tensors.

        Raises:
            ValueError: where groups, their sizes or a state's shape do not fit this optimizer.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        if state_dict["state"]:
            self._ready()
        self._load(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        machinery = self._machinery
        if machinery.parts:
            state_dict = for_loading(state_dict, tensors_of(self.param_groups))
        if not self.owns_loaded_states:
            state_dict = unpacked(state_dict, tensors_of(self.param_groups))
        check_shapes(self.base_optimizer, state_dict, self._name_of)
        machinery.engine.settle(readers=True)
        previous = machinery.base_optimizer.state
        load(machinery.base_optimizer, state_dict, on_host=machinery.placement is not None)
        machinery.adopt(previous)
        self._pull_groups()

    def _name_of(self, resting: nn.Parameter) -> str:
        return self._members.labels[self._machinery.resting.device(resting)]

    # Gradients

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Marks the backward of every micro-batch but the last: its gradients are not final yet."""
        self._ready()
        with self._machinery.engine.accumulate():
            yield

    @property
    def measure_grad_norm(self) -> bool:
        """Whether norms are taken of gradients that leave early (``update_in_backward``, ``offload_gradients``): set
        it to False before a backward whose norm nobody will ask for."""
        return self._machinery.engine.norms.measure

    @measure_grad_norm.setter
    def measure_grad_norm(self, measure: bool) -> None:
        self._machinery.engine.norms.measure = measure

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm over all gradients wherever they rest, as a 0-dim tensor (fp32 for 16-bit gradients).

        Of DTensors it is that of the whole gradients, for which every rank has to call it: ranks add up theirs on the
        device, by the mesh's own backend.

        With ``update_in_backward`` it is that of the gradients of the last backward, for order 2 only.
        """
        self._ready()
        return self._machinery.engine.grad_norm(tensors_of(self.param_groups), norm_type, error_if_nonfinite=False)

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
        self._ready()
        params = tensors_of(self.param_groups)
        norm = self._machinery.engine.grad_norm(params, norm_type, error_if_nonfinite=error_if_nonfinite)
        factor = clip_coefficient(norm, float(max_norm))
        if factor is not None:
            with torch.no_grad():
                self._machinery.engine.scale_gradients(factor)
        return norm

    def check_training(self, *, gradient_accumulation_steps: int, clip_grad_norm: float | None) -> None:
        """Refuse, before the first step, what :meth:`clip_grad_norm_` would refuse after it."""
        if clip_grad_norm is not None and self.update_in_backward:
            self.clip_grad_norm_(clip_grad_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) every gradient, on the device and on the host."""
        self._ready()
        self._machinery.engine.zero_grad(tensors_of(self.param_groups), set_to_none)

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

        Raises:
            UserError: without a closure, where the base optimizer needs one (``torch.optim.LBFGS``).
        """
        loss = None
        if closure is None and needs_closure(type(self.base_optimizer)):
            raise UserError(
                f"step: {type(self.base_optimizer).__name__} needs a closure that computes the loss anew; call "
                "step(closure), or use an optimizer that needs none, such as torch.optim.AdamW"
            )
        self._ready()
        self._check_members()
        hands_closure_on = self.strategy == "resident" and not self.update_in_backward and not self._machinery.folds
        if closure is not None and not hands_closure_on:
            with torch.enable_grad():
                loss, closure = closure(), None
        machinery, copies = self._machinery, self._machinery.copies
        if copies is not None and self.strategy == "host":
            machinery.add_missing_copies(copies)
        if machinery.worker is None and not self.update_in_backward:
            self._push_groups()
            with self._machinery.engine.gradients_in_place(self.base_optimizer, machinery.parts):
                if closure is None:
                    step_alone(self.base_optimizer)
                else:
                    loss = step_alone(self.base_optimizer, closure)
            self._pull_groups()
        elif not self._is_per_parameter and copies is not None:
            self._push_groups()
            with self._machinery.engine.gradients_on_host(self.base_optimizer, copies) as updated:
                step_alone(self.base_optimizer)
            self._machinery.engine.upload(updated, copies)
            self._pull_groups()
        else:
            self._machinery.engine.step()
        if self.auto is not None:
            self.auto.after_step()
        return loss

    def _check_members(self) -> None:
        """Raises RuntimeError where the groups have parameters that nothing would update, or not as they are now."""
        known = self._machinery.engine.params()
        params = tensors_of(self.param_groups)
        if all(param in known for param in params) and self._members.fit(self.param_groups):
            return
        shape = next((tuple(param.shape) for param in params if param not in known), None)
        what = "have another shape" if shape is None else f"are others (one has the shape {shape}, as none had)"
        raise RuntimeError(
            f"parameters in the optimizer's groups {what} since it was built, as DeepSpeed and "
            "FullyShardedDataParallel (FSDP1) leave them: build the OffloadOptimizer over what it is to train, use "
            "add_param_group, or shard the model by FSDP2 (fully_shard, or accelerate with fsdp_version: 2)"
        )

    # Training and evaluation

    def train(self) -> None:
        """Give parameters their values for training, where the base optimizer (of schedulefree) has others for
        evaluation; with every other it does nothing."""
        self._switch("train")

    def eval(self) -> None:
        """Give parameters their values for evaluation and for saving; see :meth:`train`."""
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        self._ready()
        switch = getattr(self.base_optimizer, mode, None)
        if switch is None:
            return
        self._machinery.engine.settle(readers=True)
        self._push_groups()
        switch()
        self._pull_groups()
        copies = self._machinery.copies
        if copies is not None:
            self._machinery.engine.upload(copies.known(tensors_of(self.param_groups)), copies)

    # Snapshots

    def reserve_snapshot(self, nbytes: int) -> None:
        """Page-lock host memory for :meth:`snapshot`, before the first step.

        Args:
            nbytes: all that a snapshot may take, for copies of what is updated before it was read.

        Raises:
            UserError: the parameters are on several devices.
        """
        devices = {param.device for param in tensors_of(self.param_groups)}
        if len(devices) > 1:
            raise UserError(
                f"enable_async_checkpointing: needs all parameters on one device, got {sorted(map(str, devices))}; set "
                "enable_async_checkpointing=False"
            )
        self._snapshot_bytes = nbytes
        self._machinery.snapshots.reserve(nbytes)

    def snapshot(self) -> Snapshot:
        """Parameters and states as they are now, to be read by another thread while training goes on.

        An update of what is still to be read copies it first, or where :meth:`reserve_snapshot`'s memory is full, waits
        until it is read. So does all else here that changes parameters or states, until the snapshot is closed.

        Raises:
            RuntimeError: nothing was reserved.
        """
        self._ready(begin=False)
        self.synchronize()
        self._machinery.states.publish()
        return self._machinery.engine.take_snapshot()

    # Memory

    def synchronize(self) -> None:
        """Block until every queued copy and update is done."""
        self._machinery.engine.settle()

    def sync_from_model(self) -> None:
        """Re-read all parameters into their host copies, after they were loaded or changed elsewhere."""
        self._ready()
        self._machinery.engine.settle(readers=True)
        if self._machinery.copies is not None:
            self._machinery.copies.read()

    def memory_report(self) -> dict[str, dict[str, int]]:
        """Bytes that this optimizer holds, as ``{memory kind: {purpose: bytes}}``.

        Kinds are ``device``, ``pinned_host`` and ``host``; purposes are ``parameters``, ``gradients``, ``staging`` and
        ``optimizer_state``. The caller's own parameters and gradients are not counted; on the device, ``gradients`` is
        the most that was held at a time for updates in backward and copies to the host. Nothing is waited for.
        """
        return self._machinery.memory_report()


def _alive(reference: weakref.ref[OffloadOptimizer]) -> OffloadOptimizer:
    optimizer = reference()
    assert optimizer is not None
    return optimizer

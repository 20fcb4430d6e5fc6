"""The front door: :class:`OffloadOptimizer`, any optimizer class with its work and state off the device."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offload.component import resolve
from offload.engine.gradients import clip_coefficient, tensor_norm, total_norm
from offload.engine.host import HostStrategy
from offload.engine.runtime import Runtime, runtime_for
from offload.errors import UserError

log = logging.getLogger(__name__)

STRATEGIES = ("host", "resident")

PER_PARAMETER_PACKAGES = ("torch.optim.", "torchao.optim.", "bitsandbytes.optim.")
"""Packages whose optimizers update each parameter from its own gradient and state alone, so that the
engine may update them one by one as gradients arrive. Others are stepped once with everything."""

FUSED_ON_CPU = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose ``fused=True`` runs on CPU tensors: one pass over memory instead of one per operation."""


class OffloadOptimizer(torch.optim.Optimizer):
    """Runs any base optimizer with its state, its work, or both moved off the device.

    It is a :class:`torch.optim.Optimizer` over the caller's parameters: learning-rate schedulers, parameter
    groups, hooks and ``state_dict`` work as with the base optimizer, and ``state_dict`` has the base
    optimizer's own format, so checkpoints move freely between this class, any strategy of it, and the plain
    base optimizer.

    ========== ==================== ================ ===================================================
    strategy   state rests on       update runs on   host memory for N parameters of b bytes
    ========== ==================== ================ ===================================================
    resident   the device           the device       none
    host       the host             the CPU          2 N b (parameters, gradients) plus the state
    ========== ==================== ================ ===================================================

    Args:
        params: parameters, parameter groups or named parameters, as for any torch optimizer; all on one
            device. On the CPU every strategy runs, and nothing is copied or page-locked.
        optimizer_class: the base optimizer, as a dotted path (``torch.optim.AdamW``) or a class.
        strategy: see the table.
        offload_gradients: with ``host``, move each gradient to the host as soon as backward has produced it
            and free it on the device. Accumulation over micro-batches then happens in host memory, in the
            gradient's own dtype; clip with :meth:`clip_grad_norm_`. Whatever touches such a gradient on the
            device raises instead of having no effect.
        **base_kwargs: passed on to the base optimizer (``lr``, ``weight_decay``, …). With ``host``,
            ``fused=True`` is chosen where the base optimizer has a fused CPU kernel and the caller chose
            no implementation.

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
        strategy: Literal["host", "resident"] = "host",
        offload_gradients: bool = False,
        **base_kwargs: Any,
    ) -> None:
        base_class = base_class_of(optimizer_class)
        _check_strategy(strategy, offload_gradients)
        groups = as_groups(params)
        self.strategy = strategy
        self._host: HostStrategy | None = None
        self._names = _names(groups)
        if strategy == "host":
            _refuse_closure_driven(base_class)
            self._host = HostStrategy(self._runtime(groups), offload_gradients=offload_gradients, names=self._names)
            base_kwargs = _with_fused(base_class, groups, base_kwargs)
        self.base_optimizer = base_class(self._resting_groups(groups), **base_kwargs)
        self._per_parameter = f"{base_class.__module__}.".startswith(PER_PARAMETER_PACKAGES)
        super().__init__(groups, self.base_optimizer.defaults)
        self._pull_groups()

    @classmethod
    def config_signature(cls, kwargs: Mapping[str, Any]) -> inspect.Signature:
        """The keyword arguments that a config may give: this class's own and those of ``optimizer_class``.

        Raises:
            UserError: where ``kwargs["optimizer_class"]`` cannot be found.
        """
        own = inspect.signature(cls)
        base_class = base_class_of(kwargs.get("optimizer_class", own.parameters["optimizer_class"].default))
        merged = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        taken = {p.name for p in merged}
        for parameter in inspect.signature(base_class).parameters.values():
            if parameter.name not in taken and parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
                keyword = inspect.Parameter.KEYWORD_ONLY
                is_variable = parameter.kind is inspect.Parameter.VAR_KEYWORD
                merged.append(parameter if is_variable else parameter.replace(kind=keyword))
        return own.replace(parameters=merged)

    # Construction

    def _runtime(self, groups: list[dict[str, Any]]) -> Runtime:
        devices = {param.device for param in _tensors(groups)}
        if len(devices) != 1:
            raise UserError(
                f"strategy=host needs all parameters on one device, got {sorted(map(str, devices))}; build one "
                "optimizer per device or use strategy=resident"
            )
        return runtime_for(devices.pop())

    def _resting_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups for the base optimizer: the same, over the tensors that it updates."""
        if self._host is None:
            return [dict(group, params=list(group["params"])) for group in groups]
        resting = []
        for group in groups:
            entries = group["params"]
            hosts = self._host.add([entry[1] if isinstance(entry, tuple) else entry for entry in entries])
            pairs = zip(entries, hosts, strict=True)
            named = [(entry[0], host) if isinstance(entry, tuple) else host for entry, host in pairs]
            resting.append(dict(group, params=named))
        return resting

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this optimizer and to the base optimizer, as torch.optim.Optimizer does."""
        is_construction = len(self.param_groups) < len(self.base_optimizer.param_groups)
        if not is_construction:
            (group,) = as_groups([param_group])
            self._names.update(_names([group], first=len(self.param_groups)))
            self.base_optimizer.add_param_group(self._resting_groups([group])[0])
            param_group = group
        super().add_param_group(param_group)

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
        """The base optimizer's state by the caller's parameters; tensors lie where they rest."""
        if self._host is None:
            return self.base_optimizer.state
        return _StateView(self.base_optimizer, self._host)

    @state.setter
    def state(self, value: Any) -> None:
        # torch.optim.Optimizer.__init__ assigns an empty mapping; the state is the base optimizer's.
        assert not value

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's ``state_dict()``, tensors where they rest, after all queued work."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self.synchronize()
        self._push_groups()
        state_dict = self.base_optimizer.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of the base optimizer, of this class, or of another strategy of it.

        States keep the dtype that they were saved in and go to where this strategy rests them.

        Raises:
            ValueError: where groups, their sizes or a state's shape do not fit this optimizer.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._check_shapes(state_dict)
        self.base_optimizer.load_state_dict(state_dict)
        self._own_states(state_dict)
        self._pull_groups()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

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
                device_param = param if self._host is None else self._host.device_parameter(param)
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
        if self._host is None:
            yield
            return
        before, self._host.accumulating = self._host.accumulating, True
        try:
            yield
        finally:
            self._host.accumulating = before

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm over all gradients wherever they rest, as a 0-dim tensor (fp32 for 16-bit gradients)."""
        return total_norm(self._norms(norm_type), norm_type)

    def _norms(self, norm_type: float) -> list[Tensor]:
        params = _tensors(self.param_groups)
        with torch.no_grad():
            if self._host is not None:
                return self._host.norms(params, norm_type)
            return [tensor_norm(p.grad, norm_type) for p in params if p.grad is not None]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Limit the norm of all gradients to ``max_norm`` in the coming update; returns the norm before.

        It counts every gradient wherever it rests. With ``host`` the factor is applied to the host gradients
        in :meth:`step`, so no copy that is under way is touched; ``p.grad`` on a device keeps its values.

        Args:
            max_norm: the limit; ``inf`` only measures.
            norm_type: p of the p-norm, may be ``inf``.
            error_if_nonfinite: raise RuntimeError for a norm that is nan or infinite.
        """
        norm = total_norm(self._norms(norm_type), norm_type, error_if_nonfinite=error_if_nonfinite)
        factor = clip_coefficient(norm, float(max_norm))
        if factor is None:
            return norm
        if self._host is not None:
            self._host.scale_gradients(factor)
        else:
            with torch.no_grad():
                for param in _tensors(self.param_groups):
                    if param.grad is not None:
                        param.grad.mul_(factor.to(param.grad.device))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) every gradient, on the device and on the host."""
        if self._host is None:
            super().zero_grad(set_to_none)
        else:
            self._host.zero_grad(_tensors(self.param_groups), set_to_none)

    # Update

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        When it returns, the host side is done and the copies to the device are queued; work that is queued
        on the device afterwards sees the new values.

        Args:
            closure: reevaluates the loss and is called once before the update (``resident`` hands it to
                the base optimizer).
        """
        self._push_groups()
        if self._host is None:
            loss = self.base_optimizer.step(closure)
        else:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._update_on_host(self._host)
        self._pull_groups()
        return loss

    def _update_on_host(self, host: HostStrategy) -> None:
        params = [param for param in _tensors(self.param_groups) if param.grad is not None]
        for param in params:
            if host.host_parameter(param) is param:
                self._unfreeze(host, param)
        arrived = host.host_gradients(params)
        if self._per_parameter and not host.immediate:
            groups = self.base_optimizer.param_groups
            group_of = {param: group for group in groups for param in group["params"]}
            try:
                for param, gradient in arrived:
                    resting = host.host_parameter(param)
                    self.base_optimizer.param_groups = [dict(group_of[resting], params=[resting])]
                    self._step_base([resting], [gradient])
                    host.upload(param)
            finally:
                self.base_optimizer.param_groups = groups
        else:
            pairs = list(arrived)
            self._step_base([host.host_parameter(param) for param, _ in pairs], [g for _, g in pairs])
            for param, _ in pairs:
                host.upload(param)
        host.uploads_done()

    def _step_base(self, resting: list[nn.Parameter], gradients: list[Tensor]) -> None:
        for param, gradient in zip(resting, gradients, strict=True):
            param.grad = gradient
        self.base_optimizer.step()
        for param in resting:
            param.grad = None

    def _unfreeze(self, host: HostStrategy, param: nn.Parameter) -> None:
        """Give a parameter that was frozen at construction its host copy."""
        (resting,) = host.add([param])
        for mine, base in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            base["params"] = [resting if p is param else b for p, b in zip(mine["params"], base["params"], strict=True)]

    # Memory

    def synchronize(self) -> None:
        """Block until every queued copy and update is done."""
        if self._host is not None:
            self._host.synchronize()

    def sync_from_model(self) -> None:
        """Re-read all parameters into their host copies, after they were loaded or changed elsewhere."""
        if self._host is not None:
            self._host.synchronize()
            self._host.read_parameters()

    def memory_report(self) -> dict[str, dict[str, int]]:
        """Bytes that this optimizer holds, as ``{memory kind: {purpose: bytes}}``.

        Kinds are ``device``, ``pinned_host`` and ``host``; purposes are ``parameters``, ``gradients``,
        ``staging`` and ``optimizer_state``. The caller's own parameters and gradients are not counted.
        """
        report = {} if self._host is None else self._host.memory.report()
        for state in self.base_optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    kind = "device" if value.device.type != "cpu" or self._host is None else "host"
                    purposes = report.setdefault(kind, {})
                    purposes["optimizer_state"] = purposes.get("optimizer_state", 0) + value.nbytes
        return report


class _StateView(MutableMapping[Any, Any]):
    """The base optimizer's state, looked up by the caller's parameters instead of their host copies."""

    def __init__(self, base: torch.optim.Optimizer, host: HostStrategy) -> None:
        self._base, self._host = base, host

    def __getitem__(self, param: Any) -> Any:
        return self._base.state[self._host.host_parameter(param)]

    def __setitem__(self, param: Any, value: Any) -> None:
        self._base.state[self._host.host_parameter(param)] = value

    def __delitem__(self, param: Any) -> None:
        del self._base.state[self._host.host_parameter(param)]

    def __contains__(self, param: object) -> bool:
        return isinstance(param, nn.Parameter) and self._host.host_parameter(param) in self._base.state

    def __iter__(self) -> Iterator[Any]:
        return (self._host.device_parameter(host) for host in self._base.state)

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


def _check_strategy(strategy: str, offload_gradients: bool) -> None:
    if strategy not in STRATEGIES:
        raise UserError(f"optimizer.strategy: got {strategy!r}, expected one of {', '.join(STRATEGIES)}")
    if offload_gradients and strategy != "host":
        raise UserError(
            f"optimizer.offload_gradients: needs strategy=host, got strategy={strategy}, whose update reads the "
            "gradients on the device; set offload_gradients=False or strategy=host"
        )


def _refuse_closure_driven(base_class: type[torch.optim.Optimizer]) -> None:
    if issubclass(base_class, torch.optim.LBFGS):
        raise UserError(
            "optimizer.optimizer_class: torch.optim.LBFGS evaluates the model between its updates, which "
            "strategy=host cannot do; use strategy=resident"
        )


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


def _names(groups: list[dict[str, Any]], first: int = 0) -> dict[Tensor, str]:
    """What messages call each parameter: its name where the caller gave names, else its position."""
    names = {}
    for group_index, group in enumerate(groups, first):
        for index, entry in enumerate(group["params"]):
            if isinstance(entry, tuple):
                names[entry[1]] = f"parameter {entry[0]}"
            else:
                names[entry] = f"parameter {index} of group {group_index} (shape {tuple(entry.shape)})"
    return names


def _tensors(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    entries = [entry for group in groups for entry in group["params"]]
    return [entry[1] if isinstance(entry, tuple) else entry for entry in entries]


def _with_fused(
    base_class: type[torch.optim.Optimizer], groups: list[dict[str, Any]], kwargs: dict[str, Any]
) -> dict[str, Any]:
    chosen = {"fused", "foreach", "capturable", "differentiable"}
    groups_choose = any(chosen & group.keys() for group in groups)
    floating = all(param.is_floating_point() for param in _tensors(groups))
    if base_class not in FUSED_ON_CPU or chosen & kwargs.keys() or groups_choose or not floating:
        return kwargs
    log.info("%s: fused=True, one pass over host memory per step", base_class.__name__)
    return {**kwargs, "fused": True}

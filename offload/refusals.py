"""What is refused when an :class:`offload.OffloadOptimizer` is built, by name and with the way out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offload.base_class import is_elementwise, is_per_parameter, needs_closure, path_of
from offload.engine.forecast import Forecast, kind_of
from offload.engine.fsdp import VERSIONS, groups_of, is_offloaded, wrapper_of
from offload.engine.placement import Placement
from offload.engine.shards import difference as shards_differ
from offload.engine.shards import is_distributed
from offload.errors import UserError
from offload.groups import tensors_of

STRATEGIES = ("host", "stream", "resident", "auto")

ACCUMULATION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

CPU_OFFLOAD = (
    "optimizer: fully_shard was given a CPUOffloadPolicy, which rests parameters on the host and updates them there; "
    "leave it out, since OffloadOptimizer rests states on the host itself"
)


def check_choices(
    strategy: str,
    *,
    offload_gradients: bool,
    accumulation_dtype: str | None,
    is_default_placement: bool,
    in_flight_gib: float,
    device_memory_gib: float | None = None,
) -> None:
    """Refuse values, and combinations of them, that mean nothing."""
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
    if device_memory_gib is not None:
        if strategy != "auto":
            raise UserError(
                f"optimizer.device_memory_gib: with strategy={strategy} no states move to what is left of the device's "
                "memory; leave it out or set strategy=auto"
            )
        if isinstance(device_memory_gib, bool) or not (
            isinstance(device_memory_gib, (int, float)) and device_memory_gib > 0
        ):
            raise UserError(
                f"optimizer.device_memory_gib: got {device_memory_gib!r}, expected GiB that may be taken of the "
                "device, such as 22.0, or null for all that is free"
            )
    if offload_gradients and strategy == "resident":
        raise UserError(
            "optimizer.offload_gradients: strategy=resident updates with the gradients on the device; set "
            "offload_gradients=False, or strategy=stream or host"
        )
    if not is_default_placement and strategy not in ("stream", "auto"):
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


def check_base(
    base_class: type[torch.optim.Optimizer],
    kwargs: Mapping[str, Any],
    groups: list[dict[str, Any]],
    *,
    strategy: str,
    update_in_backward: bool,
    is_alone: bool,
) -> None:
    """Refuse a base optimizer that the strategy or the schedule cannot run, or that cannot update its groups.

    ``is_alone``: no other class updates other groups.
    """
    if needs_closure(base_class) and not is_alone:
        raise UserError(
            f"optimizer.param_groups: {path_of(base_class)} needs a closure and all parameters; use it alone"
        )
    if issubclass(base_class, torch.optim.Muon):
        others = [param for param in tensors_of(groups) if param.dim() != 2]
        if others:
            raise UserError(
                "optimizer.optimizer_class: torch.optim.Muon updates matrices only, not the parameters of shape "
                f"{tuple(others[0].shape)}; give these another class by optimizer.param_groups="
                '[{params: ".*(norm|scale|bias).*", optimizer_class: torch.optim.AdamW, lr: 1e-4}]'
            )
    is_paged = base_class.__name__.startswith("Paged") or kwargs.get("is_paged", False)
    if is_paged and base_class.__module__.startswith("bitsandbytes.") and strategy != "resident":
        plain = base_class.__name__.removeprefix("Paged")
        raise UserError(
            f"optimizer.optimizer_class: bitsandbytes.optim.{base_class.__name__} pages its states by itself; "
            f"with strategy={strategy} use bitsandbytes.optim.{plain} without is_paged, or select the paged "
            f"one alone by optimizer=bitsandbytes.optim.{base_class.__name__}"
        )
    if issubclass(base_class, torch.optim.LBFGS) and (strategy != "resident" or update_in_backward):
        raise UserError(
            "optimizer.optimizer_class: torch.optim.LBFGS evaluates the model between its updates, which only "
            "strategy=resident with update_in_backward=False can do"
        )
    if issubclass(base_class, torch.optim.SparseAdam) and (strategy != "resident" or update_in_backward):
        raise UserError(
            "optimizer.optimizer_class: torch.optim.SparseAdam takes sparse gradients, which cannot be offloaded; use "
            "strategy=resident with update_in_backward=False, or torch.optim.AdamW with dense gradients"
        )
    if not is_per_parameter(base_class) and (strategy in ("stream", "auto") or update_in_backward):
        setting = f"strategy={strategy}" if strategy in ("stream", "auto") else "update_in_backward=True"
        raise UserError(
            f"optimizer.optimizer_class: {base_class.__module__}.{base_class.__qualname__} is not known to update "
            f"each parameter by itself, which {setting} needs; if it does, give the class an attribute "
            "per_parameter = True, else use strategy=host with update_in_backward=False"
        )


def check_params(groups: list[dict[str, Any]]) -> None:
    """Refuse parameters of a kind that the engine cannot update."""
    for param in filter(is_distributed, tensors_of(groups)):
        if other := shards_differ():
            raise UserError(
                f"optimizer: DTensors of torch {torch.__version__} are not those of torch {VERSIONS} ({other}); "
                "install one of these, or use the base optimizer itself"
            )
        placements = param.placements  # type: ignore[attr-defined]
        if any(placement.is_partial() for placement in placements):
            raise UserError(
                f"optimizer: a parameter of shape {tuple(param.shape)} has the placements {placements}, of which each "
                "rank has a summand; redistribute it to Replicate() or Shard() before the optimizer is built"
            )
        if param.device.type == "cpu" and param.device_mesh.device_type != "cpu":  # type: ignore[attr-defined]
            raise UserError(CPU_OFFLOAD)


def check_distributed(
    base_class: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    model: nn.Module | None,
    *,
    takes_early: bool,
) -> None:
    """Refuse what has no meaning where several ranks share parameters, or each has a copy.

    Args:
        base_class: the base optimizer.
        groups: parameter groups.
        model: what they belong to, if it is known.
        takes_early: gradients are taken as backward computes them.
    """
    if model is not None and any(is_offloaded(group) for group in groups_of(model)):
        raise UserError(CPU_OFFLOAD)
    check_wrapper(groups, takes_early=takes_early)
    kinds = getattr(base_class, "kinds", {})
    for group in groups:
        kind, _ = kinds.get(group.get("optimizer_class", next(iter(kinds), None)), (base_class, None))
        if not is_elementwise(kind) and any(map(is_distributed, tensors_of([group]))):
            raise UserError(
                f"optimizer.optimizer_class: {path_of(kind)} is not known to update each element by itself, and of "
                "parameters that are DTensors (FSDP2, tensor parallelism) each rank has a part; use torch.optim.AdamW, "
                "offload.optim.AdamW or the class itself, without OffloadOptimizer. If it does, give it an attribute "
                "elementwise = True"
            )


def check_wrapper(groups: list[dict[str, Any]], *, takes_early: bool) -> None:
    """Refuse a model that is wrapped in what sums gradients over ranks too late, or keeps parameters in its own way."""
    wrapper = wrapper_of(tensors_of(groups))
    if wrapper == "FullyShardedDataParallel":
        raise UserError(
            "optimizer: FullyShardedDataParallel (FSDP1) lays parameters out flat, where neither their gradients nor "
            "their norms can be told apart; shard the model by FSDP2 (torch.distributed.fsdp.fully_shard, accelerate's "
            "fsdp_version: 2)"
        )
    if takes_early and wrapper:
        raise UserError(
            "optimizer: DistributedDataParallel sums gradients over ranks after they were taken by "
            "update_in_backward=True or offload_gradients=True; set both to False, or in place of DDP call "
            'fully_shard(module, mesh=init_device_mesh(device, (ranks, 1), mesh_dim_names=("replicate", "shard")))'
            ", which sums them before"
        )


def check_patterns(
    placement: Placement,
    forecasts: list[Forecast | None],
    groups: list[dict[str, Any]],
    names: Mapping[Tensor, str],
    block: int,
) -> None:
    """Refuse patterns that match no state, where the states can be known; ``names`` are those in state paths."""
    paths: list[str] = []
    for foreseen, group in zip(forecasts, groups, strict=True):
        if foreseen is None:
            return
        paths += [
            f"{form.key}/{names[param]}" for param in tensors_of([group]) for form in foreseen[kind_of(param, block)]
        ]
    placement.check(paths)

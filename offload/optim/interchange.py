"""Moving states between formats, and to and from ``torch.optim.AdamW`` with fp32 master weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.optim import codes, earlier
from offload.optim.formats import (
    BLOCK,
    STATE_BLOCK,
    as_kept,
    flat,
    join_master,
    remainder_like,
    remainder_of,
    state_dtype_of,
    state_spec,
)

MASTER = "master"
"""Key of fp32 master weights in a plain state. ``torch.optim.AdamW`` keeps it and does nothing with it."""

_OWN_OPTIONS = ("state_dtype", "master", "seed", "codes")
"""What groups of packed optimizers have beside torch's."""

_TORCH_OPTIONS = ("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
"""What groups of torch.optim.AdamW choose about its implementation."""


def to_plain(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a packed optimizer as one of ``torch.optim.AdamW`` over fp32 parameters.

    Args:
        optimizer: :class:`offload.optim.AdamW` or ``Adam``, or an ``OffloadOptimizer`` around it.

    Returns:
        A ``state_dict`` with fp32 moments, and under ``master`` the fp32 weights, on the states' device, for
        parameters that keep a remainder; other parameters are their own master.

    Raises:
        ValueError: for DTensors, of which each rank has a part.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(hasattr(param, "device_mesh") for param in params):
        raise ValueError(
            "to_plain: the optimizer's parameters are DTensors; load its whole state (get_optimizer_state_dict with "
            "StateDictOptions(full_state_dict=True)) into an optimizer over plain parameters first"
        )
    return _unpacked(optimizer.state_dict(), params)


def unpacked(state_dict: dict[str, Any], params: Sequence[Tensor]) -> dict[str, Any]:
    """A state for ``torch.optim.AdamW``: the given one, or if it is packed, with moments of the parameters' dtypes.

    What optimizers that know no packed states have to load, or they would take codes for moments. Masters are left
    out: nothing would keep them up to date.

    Args:
        state_dict: of any optimizer.
        params: what it is to be loaded for, in the order of the groups.
    """
    if not any("state_dtype" in group for group in state_dict["param_groups"]):
        return state_dict
    plain = _unpacked(state_dict, None)
    ids = [index for group in plain["param_groups"] for index in group["params"]]
    for index, param in zip(ids, params, strict=True):
        if (state := plain["state"].get(index)) is not None:
            state.update({key: state[key].to(param.dtype) for key in ("exp_avg", "exp_avg_sq")})
    return plain


def _unpacked(state_dict: Mapping[str, Any], params: Sequence[Tensor] | None) -> dict[str, Any]:
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    param_of = {} if params is None else dict(zip(ids, params, strict=True))
    states = {}
    groups = []
    for group in state_dict["param_groups"]:
        groups.append({key: value for key, value in group.items() if key not in _OWN_OPTIONS})
        for index in group["params"]:
            if index not in state_dict["state"]:
                continue
            if "state_dtype" not in group:  # of another class, or plain already
                states[index] = dict(state_dict["state"][index])
            else:
                states[index] = _plain(state_dict["state"][index], group, param_of.get(index))
    return {"state": states, "param_groups": groups}


def from_plain(state_dict: Mapping[str, Any], params: Iterable[Tensor]) -> dict[str, Any]:
    """A state of ``torch.optim.AdamW`` with the fp32 parameters that it belongs to as ``master`` weights.

    Loaded into :class:`offload.optim.AdamW` over the same parameters in bf16, training goes on from the exact fp32
    values where ``master="split"``.

    Args:
        state_dict: of ``torch.optim.AdamW`` or ``Adam``.
        params: the fp32 parameters, in the order of the groups.
    """
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    masters = dict(zip(ids, params, strict=True))
    states = {
        index: {**state, MASTER: masters[index].detach().to(torch.float32)}
        for index, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def loaded(
    state_dict: Mapping[str, Any],
    current: Sequence[Mapping[str, Any]],
    own_options: Sequence[str],
    states_on: torch.device | None,
) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """``(state, groups)`` of an optimizer whose groups are ``current`` after it has loaded ``state_dict``.

    Args:
        state_dict: to load; is not changed and not referred to.
        current: the optimizer's groups.
        own_options: options of ``current`` that stay.
        states_on: where states go; None for their parameter's device.

    Raises:
        ValueError: where groups, shapes or masters do not fit.
    """
    saved_groups = state_dict["param_groups"]
    sizes, expected = [[len(group["params"]) for group in groups] for groups in (saved_groups, current)]
    if sizes != expected:
        raise ValueError(
            f"the state to load has {len(sizes)} parameter groups of sizes {sizes}, this optimizer has {len(expected)} "
            f"of sizes {expected}; build it over the same parameters in the same order"
        )
    groups: list[dict[str, Any]] = []
    state: dict[Any, Any] = defaultdict(dict)
    for index, (saved_group, group) in enumerate(zip(saved_groups, current, strict=True)):
        options = {key: value for key, value in saved_group.items() if key not in _TORCH_OPTIONS}
        kept = {key: group[key] for key in (*own_options, "params", "param_names") if key in group}
        groups.append({**group, **options, **kept})
        groups[-1]["codes"] = codes.best_for(float(groups[-1]["betas"][1]))
        for position, (key, param) in enumerate(zip(saved_group["params"], group["params"], strict=True)):
            saved = state_dict["state"].get(key)
            if not saved:
                continue
            where = f"parameter {position} of group {index}"
            try:
                state[param] = _packed(saved, saved_group, param, groups[-1], states_on)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
    return state, groups


def decoded(state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """A state of a packed optimizer with its moments in fp32; the rest as it is."""
    m, v = _moments(state, group)
    others = {key: value for key, value in state.items() if key not in STATE_BLOCK}
    return {**others, "exp_avg": m, "exp_avg_sq": v}


def _plain(state: Mapping[str, Any], group: Mapping[str, Any], param: Tensor | None) -> dict[str, Tensor]:
    state = as_kept(state)
    m, v = _moments(state, group)
    plain = {"step": state["step"].clone(), "exp_avg": m, "exp_avg_sq": v}
    if "remainder" in state and param is not None:
        plain[MASTER] = join_master(param.detach().to(state["remainder"].device), state["remainder"])
    return plain


def _eps(group: Mapping[str, Any], step: float) -> float:
    """What the update of a step added to sqrt(v): see :class:`offload.optim.formats.Constants`."""
    return group["eps"] * math.sqrt(1 - float(group["betas"][1]) ** step)


def _moments(state: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Both moments in fp32, as new tensors in the shape and memory order that they were stored in."""
    stored = [state["exp_avg"], state["exp_avg_sq"]]
    m, v = (torch.empty_like(tensor, dtype=torch.float32) for tensor in stored)
    if "exp_avg_scale" in state:
        if (state_dtype := group["state_dtype"]) != "int8":
            raise ValueError(
                f"the state to load has state_dtype={state_dtype!r}, which this version does not read: load it into "
                "state_dtype='int8' with the version that wrote it and save it there, or begin anew from its weights"
            )
        eps = _eps(group, float(state["step"]))
        kind = group.get("codes")
        if kind in (codes.RATIOS, codes.MOMENTS):
            values = codes.decode(*_coded(state), eps, kind == codes.RATIOS)
        else:
            values = earlier.decode(*_coded(state), eps, kind)
        flat(m).copy_(values[0])
        flat(v).copy_(values[1])
    else:
        m.copy_(stored[0])
        v.copy_(stored[1])
    return m, v


def _coded(state: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """8-bit moments in the order in which ``codes`` takes them."""
    return flat(state["exp_avg"]), state["exp_avg_scale"], flat(state["exp_avg_sq"]), state["exp_avg_sq_scale"]


def _packed(
    saved: Mapping[str, Any],
    saved_group: Mapping[str, Any],
    param: Tensor,
    group: Mapping[str, Any],
    states_on: torch.device | None,
) -> dict[str, Any]:
    """A state in the format of ``group``, out of one in any format."""
    device = param.device if states_on is None else states_on
    if "exp_avg" not in saved or "exp_avg_sq" not in saved:
        raise ValueError(f"expected a state of Adam with exp_avg and exp_avg_sq, got {', '.join(map(str, saved))}")
    shape = saved["exp_avg"].shape
    if shape != param.shape:
        raise ValueError(
            f"the state to load has shape {tuple(shape)}, expected {tuple(param.shape)}: it was saved for other "
            "parameters or in another order"
        )
    saved = as_kept(saved)
    step, state_dtype = float(saved["step"]), state_dtype_of(param, group["state_dtype"])
    spec = state_spec(param.dtype, param.numel(), state_dtype, group["master"])
    state: dict[str, Any] = {"step": torch.tensor(step, dtype=torch.float32, device="cpu")}
    for key, dtype in spec.items():
        if key in STATE_BLOCK:
            state[key] = torch.zeros(-(-param.numel() // BLOCK), dtype=dtype, device=device)
        else:
            state[key] = torch.zeros_like(param, dtype=dtype, device=device, requires_grad=False)
    moments = [key for key in spec if key != "remainder"]
    are_codes_same = state_dtype != "int8" or saved_group.get("codes") == group["codes"]
    is_same = (
        saved_group.get("state_dtype", "fp32") == state_dtype
        and are_codes_same
        and all(
            key in saved and saved[key].dtype == state[key].dtype and saved[key].stride() == state[key].stride()
            for key in moments
        )
    )
    if is_same:
        for key in moments:
            state[key].copy_(saved[key])
    else:
        m, v = (torch.empty_like(state["exp_avg"], dtype=torch.float32).copy_(x) for x in _moments(saved, saved_group))
        if "exp_avg_scale" in state:
            root = flat(v).sqrt()
            ratio = torch.nan_to_num(flat(m) / (root + _eps(group, step)))
            half = torch.full_like(root, 1 << 15, dtype=torch.int32)
            has_ratios = group["codes"] == codes.RATIOS
            codes.encode(ratio, root, half, *_coded(state), _eps(group, step), has_ratios)
        else:
            state["exp_avg"].copy_(m)
            state["exp_avg_sq"].copy_(v)
    if "remainder" in state:
        _load_remainder(state["remainder"], saved, param)
    return state


def _load_remainder(remainder: Tensor, saved: Mapping[str, Any], param: Tensor) -> None:
    if MASTER in saved:
        master = torch.empty_like(remainder, dtype=torch.float32).copy_(saved[MASTER])
        remainder.copy_(remainder_of(master, param.detach().to(remainder.device), remainder.dtype))
    elif "remainder" in saved:
        remainder.copy_(remainder_like(saved["remainder"], remainder.dtype))

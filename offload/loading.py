"""Loading a saved state into a base optimizer: each tensor keeps its dtype and is the optimizer's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def load(base: torch.optim.Optimizer, state_dict: dict[str, Any], *, on_host: bool) -> None:
    """Load ``state_dict`` into ``base``.

    Args:
        base: converts what it loads to a format of its own if its class has ``owns_loaded_states = True``.
        state_dict: with groups and shapes that :func:`check_shapes` accepts.
        on_host: states stay on the host, wherever the parameters are.
    """
    if getattr(base, "owns_loaded_states", False):
        states_on = {"states_on": torch.device("cpu")} if on_host else {}
        base.load_state_dict(state_dict, **states_on)
        return
    with _on_host(base) if on_host else nullcontext():
        base.load_state_dict(state_dict)
    _own_states(base, state_dict)


def check_shapes(
    base: torch.optim.Optimizer, state_dict: dict[str, Any], name_of: Callable[[nn.Parameter], str]
) -> None:
    """Raises ValueError where groups, their sizes or a state's shape do not fit the parameters of ``base``."""
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    expected = [len(group["params"]) for group in base.param_groups]
    if sizes != expected:
        raise ValueError(
            f"the state to load has {len(sizes)} parameter groups of sizes {sizes}, this optimizer has "
            f"{len(expected)} of sizes {expected}; build it over the same parameters in the same order"
        )
    if getattr(state_dict["state"], "checks_shapes", False):
        return  # reading them all from a disk would take as long as loading them
    for param, state in _saved_states(base, state_dict):
        moment = state.get("exp_avg", state.get("momentum_buffer"))
        if isinstance(moment, Tensor) and moment.numel() != param.numel():
            raise ValueError(
                f"the state to load for {name_of(param)} has shape {tuple(moment.shape)}, "
                f"expected {tuple(param.shape)}: it was saved for other parameters or in another order"
            )


@contextmanager
def _on_host(base: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the base optimizer takes its parameters to be on the host, so that it leaves loaded states there."""
    params = [group["params"] for group in base.param_groups]
    stand_ins = [hollow(members) for members in params]
    set_params(base, stand_ins)
    try:
        yield
    finally:
        set_params(base, params)
    # Only after loading: where that failed, the state is still the one before.
    real: dict[Any, nn.Parameter] = {
        s: p for ours, theirs in zip(stand_ins, params, strict=True) for s, p in zip(ours, theirs, strict=True)
    }
    states: dict[Any, Any] = {real.get(key, key): state for key, state in base.state.items()}
    base.state = defaultdict(dict, states)


def hollow(params: Iterable[Tensor]) -> list[nn.Parameter]:
    """Parameters of the same shapes and dtypes on the CPU, of one element's memory each."""
    return [nn.Parameter(torch.empty((), dtype=p.dtype).expand(p.shape), requires_grad=False) for p in params]


def set_params(base: torch.optim.Optimizer, params: list[list[nn.Parameter]]) -> None:
    """Put other parameters into the groups of ``base``."""
    for group, members in zip(base.param_groups, params, strict=True):
        group["params"] = members


def _saved_states(
    base: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """``(parameter, its saved state)``: states are saved by position over all groups."""
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = [param for group in base.param_groups for param in group["params"]]
    for index, param in zip(ids, params, strict=True):
        if index in state_dict["state"]:
            yield param, state_dict["state"][index]


def _own_states(base: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Undo torch's cast of floating-point states to the parameter's dtype, and its sharing of storage
    with the loaded dict, which may be another optimizer's live state or a memory-mapped file."""
    for param, saved in _saved_states(base, state_dict):
        loaded = base.state[param]
        for key, value in saved.items():
            mine = loaded.get(key)
            if type(value) is not Tensor or not isinstance(mine, Tensor):
                continue
            if mine.dtype != value.dtype or mine.data_ptr() == value.data_ptr():
                loaded[key] = value.to(mine.device, copy=True)

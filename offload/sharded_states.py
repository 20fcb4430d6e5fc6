"""States of parameters that several ranks share: DTensors in what is saved, this rank's parts in the base optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.engine.shards import has_blocks, is_distributed, local, local_state, whole_state
from offload.errors import UserError
from offload.optim.formats import BLOCK, STATE_BLOCK, as_kept, as_shared, shared_shape
from offload.optim.interchange import decoded

WORTH_TELLING = 0.01
"""Share of all elements whose moments are larger than their group says."""


def tell_of_fp32(groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn where many of the parameters that ranks share keep fp32 moments instead of 8-bit codes."""
    params = [(param, group) for group in groups for param in group["params"]]
    kept = [param for param, group in params if group.get("state_dtype") == "int8" and not has_blocks(param, BLOCK)]
    share = sum(param.numel() for param in kept) / max(1, sum(param.numel() for param, _ in params))
    if share > WORTH_TELLING:
        largest = max(kept, key=Tensor.numel)
        warnings.warn(
            f"{share:.0%} of the elements keep fp32 moments instead of 8-bit ones, such as a parameter of shape "
            f"{tuple(largest.shape)}: where several ranks share a parameter, its rows have to be multiples of {BLOCK} "
            "elements; state_dtype=bf16 would take 4 bytes per element instead of 8",
            stacklevel=3,
        )


def for_saving(state_dict: dict[str, Any], params: Sequence[Tensor], class_name: str) -> dict[str, Any]:
    """A base optimizer's ``state_dict`` with DTensors, over the same memory, for the states of distributed parameters.

    Args:
        state_dict: with this rank's parts.
        params: the caller's parameters, in the order of the groups.
        class_name: what the base optimizer is called.

    Raises:
        UserError: for a state of another shape than its parameter's, which is not one of :class:`offload.optim.Adam`.
    """
    states = dict(state_dict["state"])
    for index, param in _distributed(state_dict, params):
        try:
            states[index] = {
                key: _whole(key, value, param) if _is_sharded(value) else value for key, value in states[index].items()
            }
        except ValueError as error:
            raise UserError(
                f"optimizer.optimizer_class: {class_name} keeps a state of {error}, which cannot be saved for "
                "parameters that several ranks share; use torch.optim.AdamW or offload.optim.AdamW"
            ) from error
    return {**state_dict, "state": states}


def for_loading(state_dict: dict[str, Any], params: Sequence[Tensor]) -> dict[str, Any]:
    """The inverse, out of DTensors or of whole tensors, as an optimizer over plain parameters saves them.

    Raises:
        ValueError: for a state of another parameter's shape.
    """
    return {**state_dict, "state": _Parts(state_dict, params)}


class _Parts(Mapping[Any, dict[str, Any]]):
    """States of a ``state_dict`` with this rank's parts of those of distributed parameters, each made when it is asked
    for: they may be on a disk.

    Attributes:
        checks_shapes: asking for a state refuses one of another shape than its parameter's.
    """

    def __init__(self, state_dict: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        self._states = state_dict["state"]
        self._groups = {index: group for group in state_dict["param_groups"] for index in group["params"]}
        self._params = dict(_distributed(state_dict, params))
        self.checks_shapes = len(self._params) == len(self._states)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        state, param = self._states[index], self._params.get(index)
        if param is None:
            return dict(state)
        if any(key in state for key in STATE_BLOCK) and not has_blocks(param, BLOCK):
            state = decoded(as_kept(state), self._groups[index])
        try:
            parts = {key: _part(key, value, param) if _is_sharded(value) else value for key, value in state.items()}
            return as_kept(parts)
        except ValueError as error:
            raise ValueError(f"the state to load for parameter {index} has {error}") from error

    def __contains__(self, index: object) -> bool:
        return index in self._states

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def divided(state_dict: dict[str, Any], params: Sequence[Tensor]) -> dict[str, Any]:
    """A state of whole tensors, as ``torch.optim.AdamW`` keeps them, with DTensors for distributed parameters: what a
    torch optimizer over those has to load.

    Raises:
        ValueError: for a state of another parameter's shape.
    """
    states = dict(state_dict["state"])
    for index, param in _distributed(state_dict, params):
        states[index] = {
            key: whole_state(local_state(value, param).to(local(param).device), param) if _is_sharded(value) else value
            for key, value in states[index].items()
        }
    return {**state_dict, "state": states}


def _whole(key: str, part: Tensor, param: Tensor) -> Tensor:
    shaping = partial(shared_shape, key, part.dtype)
    return whole_state(as_shared(key, part, local(param).shape), param, shaping)


def _part(key: str, value: Tensor, param: Tensor) -> Tensor:
    is_bytes = key == "remainder" and value.dtype == torch.uint8
    return local_state(value, param, partial(shared_shape, key, torch.int16 if is_bytes else torch.uint8))


def _is_sharded(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _distributed(state_dict: Mapping[str, Any], params: Sequence[Tensor]) -> Iterator[tuple[Any, Tensor]]:
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, param in zip(ids, params, strict=False):  # other sizes are refused by who loads it
        if is_distributed(param) and index in state_dict["state"]:
            yield index, param

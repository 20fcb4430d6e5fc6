"""States of parameters that several ranks share: DTensors in what is saved, this rank's parts in the base optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from offload.engine.shards import has_blocks, is_distributed, local_state, whole_state
from offload.errors import UserError
from offload.optim.formats import BLOCK, STATE_BLOCK
from offload.optim.interchange import decoded


def for_saving(
    state_dict: dict[str, Any], params: Sequence[Tensor], blocks: Mapping[str, int], class_name: str
) -> dict[str, Any]:
    """A base optimizer's ``state_dict`` with DTensors, over the same memory, for the states of distributed parameters.

    Args:
        state_dict: with this rank's parts.
        params: the caller's parameters, in the order of the groups.
        blocks: of the base optimizer's states, elements of the parameter for each of theirs where that is not one.
        class_name: what the base optimizer is called.

    Raises:
        UserError: for a state that has neither the parameter's shape nor such blocks.
    """
    states = dict(state_dict["state"])
    for index, param in _distributed(state_dict, params):
        try:
            states[index] = {
                key: whole_state(value, param, blocks.get(key, 1)) if _is_sharded(value) else value
                for key, value in states[index].items()
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
    states = dict(state_dict["state"])
    groups = {index: group for group in state_dict["param_groups"] for index in group["params"]}
    for index, param in _distributed(state_dict, params):
        state = states[index]
        scales = [state[key] for key in STATE_BLOCK if key in state]
        if scales and not has_blocks(param, BLOCK):
            state = decoded(state, groups[index])
        try:
            states[index] = {
                key: local_state(value, param, STATE_BLOCK.get(key, 1)) if _is_sharded(value) else value
                for key, value in state.items()
            }
        except ValueError as error:
            raise ValueError(f"the state to load for parameter {index} has {error}") from error
    return {**state_dict, "state": states}


def _is_sharded(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _distributed(state_dict: Mapping[str, Any], params: Sequence[Tensor]) -> Iterator[tuple[Any, Tensor]]:
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, param in zip(ids, params, strict=False):  # other sizes are refused by who loads it
        if is_distributed(param) and index in state_dict["state"]:
            yield index, param

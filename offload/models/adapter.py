"""An adapter of a checkpoint, and the model that goes on with it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from offload.errors import UserError


def fitting_adapter(
    adapter: Mapping[str, Tensor] | None, expected: Mapping[str, Tensor], *, key: str
) -> dict[str, Tensor]:
    """All of an adapter.

    Args:
        adapter: of a checkpoint; None for one that has none.
        expected: the model's own.
        key: of the configuration, which says what adapter the model has.

    Raises:
        UserError: where it is not the adapter of a model like this.
    """
    if adapter is None:
        raise UserError(
            "resume_from_checkpoint: the checkpoint holds a full model and no adapter; resume it with "
            "full_finetune_single_device, or give this run an output_dir of its own"
        )
    way_out = f"set {key} as it was in that run, or start anew in another output_dir"
    for name in {**expected, **adapter}:
        if name not in adapter:
            raise UserError(f"{key}: the checkpoint's adapter has no {name}; {way_out}")
        if name not in expected:
            raise UserError(f"{key}: the checkpoint's adapter has {name}, the model has not; {way_out}")
        if adapter[name].shape != expected[name].shape:
            raise UserError(
                f"{key}: {name} is {list(adapter[name].shape)} in the checkpoint's adapter, the model has "
                f"{list(expected[name].shape)}; {way_out}"
            )
    return dict(adapter)

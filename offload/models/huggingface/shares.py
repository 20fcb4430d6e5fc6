"""A transformers model of which each rank has a part: filled from files, and written to them.

transformers can read parts of DTensors itself: it takes this rank's rows of what a file has and converts those. That is
right for stacked experts, and not for a conversion that cuts or reorders rows. Here conversions see whole tensors.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from offload.engine.units import clean_name
from offload.errors import UserError
from offload.models.shares import WeightFile, materialize, read_share
from offload.models.weight_files import WeightFiles

_META = torch.device("meta")


def fill(divided: nn.Module, model: Any, folder: Path, bare: Callable[[], Any], device: torch.device) -> None:
    """Give a model its memory and its weights.

    Args:
        divided: the model, or what peft put around it; its parameters are DTensors on the meta device, but for an
            adapter, which has its values already.
        model: of transformers.
        folder: holds safetensors files.
        bare: makes the same model on the meta device, with plain parameters.
        device: where the model goes.

    Raises:
        UserError: for a model whose weights are tied across what ranks gather apart.
    """
    made = materialize(divided, device)
    plain = bare()
    is_custom = plain.is_custom_code()
    with WeightFiles(sorted(folder.glob("*.safetensors"))) as files:
        converter = _Converter(plain, files.empty)
        stored = converter(files.empty).keys()
        kept = {tensor: names for tensor, names in _kept(model).items() if tensor in made}
        wanted = {_as_stored(names, stored): tensor for tensor, names in kept.items()}
        if untied := sorted(wanted.keys() - stored):
            raise UserError(
                f"model.path: {untied[0]} is tied to a weight of another layer, and FSDP2 would train the two apart: "
                "train this model on one device"
            )
        read_share(wanted, files, converter)
    # Of a class that FSDP2 made, transformers does not know that it is one of its own.
    with mock.patch.object(model, "is_custom_code", lambda: is_custom):
        _initialize_buffers(model)


@torch.no_grad()
def _initialize_buffers(model: Any) -> None:
    """Values of the buffers that no file has, by transformers' own initialization; it leaves alone what is marked."""
    kept = _kept(model)
    for tensor in [*model.parameters(), *kept]:
        tensor._is_hf_initialized = True
    for module in model.modules():
        # Some write parts of tensors before they look at marks, which DTensors do not take: without need none is asked.
        module._is_hf_initialized = all(buffer in kept for buffer in module.buffers())
    model.initialize_weights()


def _kept(model: nn.Module) -> dict[Tensor, list[str]]:
    """What a checkpoint keeps of a model, with all names of each."""
    kept: dict[Tensor, list[str]] = {}
    in_checkpoints = model.state_dict().keys()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if name in in_checkpoints:
            kept.setdefault(tensor, []).append(clean_name(name).replace(".base_layer.", "."))
    return kept


def _as_stored(names: list[str], stored: Collection[str]) -> str:
    return next((name for name in names if name in stored), names[0])


class _Converter:
    """What transformers makes of tensors of files: those of the model, by name.

    Args:
        model: on the meta device; its parameters are replaced.
        empty: all tensors of the files.
    """

    def __init__(self, model: Any, empty: Mapping[str, Tensor]) -> None:
        sizes: Counter[torch.dtype] = Counter()
        for tensor in empty.values():
            if tensor.is_floating_point():
                sizes[tensor.dtype] += tensor.numel()
        # Not in that of training: a cast would make another tensor of each.
        self._model = model.to(max(sizes, key=lambda dtype: sizes[dtype]))
        self._empty = {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        model = self._model
        device = next(iter(tensors.values())).device
        mapping: Any = get_model_conversion_mapping(model, None, None)
        config = LoadStateDictConfig(
            device_map={"": device},
            dtype=model.dtype,
            weight_mapping=mapping,
            ignore_mismatched_sizes=True,
        )
        with _without_progress():
            report, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config)
        mismatched = {entry if isinstance(entry, str) else entry[0] for entry in report.mismatched_keys}
        made = {
            name: tensor.detach()
            for name, tensor in model.state_dict().items()
            if name not in report.missing_keys and name not in mismatched
        }
        for name in made:
            owner, _, attribute = name.rpartition(".")
            holder = model.get_submodule(owner)
            if attribute in holder._parameters:
                holder._parameters[attribute] = nn.Parameter(self._empty[name], requires_grad=False)
            else:
                holder._buffers[attribute] = self._empty[name]
        return made


@contextlib.contextmanager
def _without_progress() -> Iterator[None]:
    from transformers.utils import logging

    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()


def begin(model: Any, folder: Path, empty: Mapping[str, Tensor], max_shard_bytes: int) -> list[WeightFile]:
    """All that ``model.save_pretrained`` writes but the weights, and the files that it puts them into.

    Args:
        model: of transformers.
        folder: is there.
        empty: the weights under the model's names, on the meta device.
        max_shard_bytes: of a file.
    """
    files = []

    def note(tensors: Mapping[str, Tensor], path: str, metadata: Any = None) -> None:
        files.append(WeightFile(Path(path).name, dict(tensors)))

    count = sum(param.numel() for param in model.parameters())
    with (
        mock.patch("transformers.modeling_utils.safe_save_file", note),
        mock.patch("transformers.modeling_utils.split_torch_state_dict_into_shards", _split),
        mock.patch.object(model, "num_parameters", lambda: count),  # it counts this rank's
        _without_progress(),
    ):
        model.save_pretrained(folder, state_dict=dict(empty), max_shard_size=max_shard_bytes)
    return files


def _split(state_dict: Mapping[str, Tensor], **options: Any) -> Any:
    """``split_torch_state_dict_into_shards``, which does not know which tensors on the meta device share memory."""
    from huggingface_hub.serialization._base import split_state_dict_into_shards_factory

    return split_state_dict_into_shards_factory(
        dict(state_dict),
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
        **options,
    )


def in_files(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the model's names as :func:`begin` says that files have them."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return converted

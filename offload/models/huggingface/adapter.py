"""LoRA and its relatives on a transformers model, by peft: training it, saving it, merging it."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from offload.component import nearest
from offload.engine.units import clean_name
from offload.errors import UserError
from offload.models.adapter import fitting_adapter
from offload.models.huggingface.model import HuggingFaceModel, save_pretrained
from offload.models.huggingface.quantized import is_in_4bit, plain
from offload.models.merging import MergedWeights, kept
from offload.models.tensors import is_divided

ADAPTER = "default"
"""The name that peft gives to a model's only adapter."""

_PREFIX = "base_model.model."


@contextlib.contextmanager
def wrapping() -> Iterator[None]:
    """While peft wraps a model: without the warning that it asks transformers something by a former name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


@contextlib.contextmanager
def _keeping_values() -> Iterator[None]:
    """While peft wraps a model on the meta device: adapters keep the values that they are drawn with, on the CPU, where
    peft would move each to its layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    drawn: list[tuple[Any, str, Tensor]] = []
    name = "_move_adapter_to_device_of_base_layer"
    move = getattr(BaseTunerLayer, name)

    def note_and_move(layer: Any, adapter: str, device: torch.device | None = None) -> None:
        for each in layer.adapter_layer_names:
            parts = getattr(layer, each, None)
            if isinstance(parts, nn.ModuleDict) and adapter in parts:
                owner = parts[adapter]
                drawn.extend((owner, key, value.detach()) for key, value in owner.named_parameters(recurse=False))
            elif isinstance(parts, nn.ParameterDict) and adapter in parts:
                drawn.append((parts, adapter, parts[adapter].detach()))
        move(layer, adapter, device)

    with mock.patch.object(BaseTunerLayer, name, note_and_move):
        yield
    for owner, key, value in drawn:
        moved = getattr(owner, key)
        setattr(owner, key, nn.Parameter(value.to(moved.dtype), requires_grad=moved.requires_grad))


def begins_with_weights(config: Any) -> bool:
    """Whether an adapter begins with the values of the layers that it is for (PiSSA, DoRA, a copy of a layer)."""
    from peft import LoraConfig

    return type(config) is not LoraConfig or bool(
        config.init_lora_weights not in (True, False, "gaussian")
        or config.use_dora
        or config.modules_to_save
        or config.trainable_token_indices
        or config.target_parameters
    )


class AdaptedModel(HuggingFaceModel):
    """A frozen model with an adapter that trains.

    Args:
        base: the model; its modules are wrapped in place.
        config: a ``peft.LoraConfig``, or another of peft's configurations whose adapter can be merged.
        draws: the adapter has its values, on the CPU, though the model is on the meta device.

    Attributes:
        left_out: names of linear layers, ends of paths, that ``all-linear`` does not mean: what they give is not a
            product alone (a router's scores and choices).

    Raises:
        UserError: for targets that the model does not have or no adapter fits, a rank above all of theirs, and what
            else peft refuses.
    """

    def __init__(self, base: HuggingFaceModel, config: Any, *, draws: bool = False) -> None:
        from peft import get_peft_model

        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = base.name_or_path
        config.task_type = config.task_type or "CAUSAL_LM"
        odd = _odd_linears(base.module)
        means_all = str(getattr(config, "target_modules", None)).lower() == "all-linear"
        self.left_out = sorted({name.rpartition(".")[2] for name in odd}) if means_all else []
        if hasattr(config, "exclude_modules"):
            # all-linear would also mean towers that no text goes through.
            towers = base.frozen if config.exclude_modules is None else []
            config.exclude_modules = _excluded(config.exclude_modules, towers, odd if means_all else {})
        _check(config, base.module)
        is_empty = next(base.module.parameters()).is_meta and not draws
        if is_empty and isinstance(getattr(config, "init_lora_weights", None), str):
            config = copy.copy(config)
            config.init_lora_weights = True  # pissa and others begin with the weights' values: names and shapes do not
        try:
            with wrapping(), _keeping_values() if draws else contextlib.nullcontext():
                module = get_peft_model(base.module, config, adapter_name=ADAPTER, autocast_adapter_dtype=False)
        except (ValueError, TypeError, NotImplementedError, re.error) as error:
            raise UserError(f"adapter: {' '.join(str(error).split())[:400]}") from error
        super().__init__(module, name_or_path=base.name_or_path, tried=base)
        _check_ranks(module)
        for name, layer in _adapted(module):
            own_name = name.removeprefix(_PREFIX)
            if own_name in odd:
                raise UserError(
                    f"adapter.target_modules: {own_name} is a {odd[own_name]}, which gives more than a product: no "
                    "adapter fits it; leave it out"
                )
            if not hasattr(layer, "merge"):
                raise UserError(f"adapter: {type(layer).__name__} cannot be merged into the model; use peft.LoraConfig")
            if is_in_4bit(layer.get_base_layer()) and not hasattr(layer, "lora_variant"):
                raise UserError("adapter: beside weights in 4 bits use peft.LoraConfig")

    def adapter_weights(self) -> dict[str, Tensor]:
        """The adapter's tensors under peft's names, where they are."""
        from peft import get_peft_model_state_dict

        weights: dict[str, Tensor] = get_peft_model_state_dict(self._model, save_embedding_layers=False)
        return {clean_name(name): tensor.detach() for name, tensor in weights.items()}

    def load_adapter(self, weights: Mapping[str, Tensor] | None) -> None:
        """Load all of an adapter.

        Args:
            weights: as :meth:`adapter_weights` gives them; None for a checkpoint that has none.

        Raises:
            UserError: where it is not the adapter of a model like this.
        """
        from peft import set_peft_model_state_dict

        fitting = fitting_adapter(weights, self.adapter_weights(), key="adapter")
        set_peft_model_state_dict(self._model, fitting, adapter_name=ADAPTER)

    def adapter_config(self) -> dict[str, Any]:
        """Fields of peft's configuration."""
        config: dict[str, Any] = self._model.peft_config[ADAPTER].to_dict()
        return config

    def merged_weights(self, *, goes_on: bool = False) -> MergedWeights:
        """The base model's weights with the adapter merged in, under its own names.

        ``goes_on``: the adapter trains on while they are asked for, and is merged as it is now."""
        return _Merged(self._model, goes_on)

    @property
    def in_checkpoints(self) -> Any:
        base = self._model.get_base_model()
        return _unquantized(base) if self.is_in_4bit else base

    def save(self, folder: Path, weights: Mapping[str, Tensor], *, max_shard_bytes: int) -> None:
        """Write the base model with ``weights``, of :meth:`merged_weights`."""
        # Merged weights are new ones: the host has room for a whole model of them.
        on_host = {name: weights[name].cpu() for name in weights}
        save_pretrained(self.in_checkpoints, folder, on_host, max_shard_bytes)


def _unquantized(model: Any) -> Any:
    """A model of the same class and configuration for plain weights, which it does not have."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"):
        bare = type(model)(config).to(config.dtype)
    bare.generation_config = model.generation_config
    return bare


def _check(config: Any, module: nn.Module) -> None:
    """UserError for what peft takes and does not train as it was meant."""
    if config.is_prompt_learning:
        raise UserError(
            f"adapter: {type(config).__name__} trains what precedes a prompt, which cannot be merged into the model: "
            "use peft.LoraConfig"
        )
    if config.task_type != "CAUSAL_LM":
        raise UserError(f"adapter.task_type: got {config.task_type!r}, expected CAUSAL_LM: leave it out")
    names = [name for name, _ in module.named_modules()]
    for wanted in getattr(config, "modules_to_save", None) or ():
        if not any(name.endswith(str(wanted)) for name in names):  # as peft finds them
            near = nearest(str(wanted), {name.rpartition(".")[2] for name in names})
            hint = f"; did you mean {near}?" if near else ""
            raise UserError(f"adapter.modules_to_save: the model has no module {wanted}{hint}")


def _odd_linears(module: nn.Module) -> dict[str, str]:
    """Linear layers that do not give what ``nn.Linear`` gives, with the names of their classes."""
    is_odd: dict[type[nn.Module], bool] = {}
    odd = {}
    for name, part in module.named_modules():
        kind = type(part)
        if not isinstance(part, nn.Linear) or kind.forward is nn.Linear.forward or is_in_4bit(part):
            continue
        if kind not in is_odd:
            is_odd[kind] = not _gives_a_product(part)
        if is_odd[kind]:
            odd[name] = kind.__name__
    return odd


@torch.no_grad()
def _gives_a_product(layer: nn.Linear) -> bool:
    try:
        output: Any = layer(layer.weight.new_zeros(2, layer.in_features))
    except (RuntimeError, ValueError, IndexError, TypeError):  # it takes other shapes
        return False
    return isinstance(output, Tensor) and output.shape == (2, layer.out_features)


def _excluded(given: Any, towers: Sequence[str], odd: Iterable[str]) -> Any:
    """peft's ``exclude_modules``: what is given there, towers by a part of the path, and layers by their whole path."""
    parts = [re.escape(name) for name in odd]
    if towers:
        parts.append(rf"(.*\.)?({'|'.join(towers)})(\..*)?")
    if not parts:
        return given
    if given is None or isinstance(given, str):
        return "|".join([*([f"(?:{given})"] if given else []), *parts])
    return [*given, *odd]


def _check_ranks(module: nn.Module) -> None:
    """UserError for LoRA whose rank is above what any product of its layers can have."""
    layers = [(name, layer) for name, layer in _adapted(module) if ADAPTER in getattr(layer, "lora_A", ())]
    sides = {name: min(layer.in_features, layer.out_features) for name, layer in layers}
    if layers and all(layer.r[ADAPTER] > sides[name] for name, layer in layers):
        name, layer = max(layers, key=lambda each: sides[each[0]])
        raise UserError(
            f"adapter.r: got {layer.r[ADAPTER]}, expected at most {sides[name]}: {name.removeprefix(_PREFIX)} is "
            f"{layer.out_features} x {layer.in_features}, and a higher rank than its smaller side adds nothing"
        )


def _adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, BaseTunerLayer))


class _Merged(MergedWeights):
    """Weights of a model under an adapter."""

    def __init__(self, model: Any, goes_on: bool) -> None:
        from peft.utils.other import ModulesToSaveWrapper

        trained = [param for param in model.parameters() if goes_on and param.requires_grad]
        self._now = {param: kept(param) for param in trained}
        # The layer to merge, if there is one, and the weight before. FSDP2 puts gathered weights into a layer while it
        # runs: this is another one, of the same parameters.
        self._of: dict[str, tuple[Any, str, Tensor]] = {}
        adapted = {id(layer) for _, layer in _adapted(model)}
        inside: tuple[str, ...] = ()
        for name, module in model.named_modules():
            if name.startswith(inside) and inside:
                continue
            own_name = clean_name(name).removeprefix(_PREFIX)
            layer = None
            if id(module) in adapted:
                inside = (*inside, f"{name}.")
                layer = copy.deepcopy(module, {id(param): param for param in module.parameters()})
                owned: nn.Module = module.get_base_layer()
            elif isinstance(module, ModulesToSaveWrapper):
                inside = (*inside, f"{name}.")
                owned = module.modules_to_save[ADAPTER]
            else:
                owned = module
            recurse = owned is not module
            for attribute, tensor in [*owned.named_parameters(recurse=recurse), *_persistent(owned, recurse)]:
                self._of[f"{own_name}.{attribute}" if own_name else attribute] = layer, attribute, tensor

    @property
    def empty(self) -> dict[str, Tensor]:
        empty = {}
        for name, (_, _, tensor) in self._of.items():
            state = getattr(tensor, "quant_state", None)
            shown = tensor if state is None else state
            empty[name] = torch.empty(shown.shape, dtype=shown.dtype, device="meta")
        return empty

    def copies(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.device, int]:
        # The copy that peft adds to, the product, and that scaled: of 16-bit weights it multiplies in fp32 on the CPU.
        # Its variants, such as DoRA, compute norms and the sum beside.
        has_variant = any(ADAPTER in getattr(layer, "lora_variant", ()) for layer, _, _ in self._of.values())
        return device, 5 if has_variant or (device.type == "cpu" and dtype.itemsize == 2) else 3

    def merged_from(self, name: str) -> list[Tensor]:
        layer, _, _ = self._of[name]
        return [] if layer is None else [self._now.get(param, param) for param in layer.parameters()]

    def made(self, name: str, wholes: Mapping[Tensor, Tensor]) -> Tensor:
        layer, attribute, tensor = self._of[name]
        if layer is not None:
            params = {param: self._now.get(param, param) for param in layer.parameters()}
            return _merged_layer(layer, attribute, {param: wholes[now] for param, now in params.items()})
        value = self._now.get(tensor, tensor)
        return value if is_divided(value) else plain(value)  # a tied weight stays one object


@torch.no_grad()
def _merged_layer(layer: Any, attribute: str, values: Mapping[Tensor, Tensor]) -> Tensor:
    """A tensor of an adapted layer's base as it is after merging, from a copy of the layer.

    Args:
        layer: stays as it is.
        attribute: name of the tensor.
        values: of each parameter of the layer, whole, on any device.
    """
    own: dict[int, Any] = {}  # of the copy, in place of the layer's
    for param, value in values.items():
        if value is not param:
            moved = value.detach().to(param.device, copy=True)
            own[id(param)] = nn.Parameter(moved, requires_grad=param.requires_grad)
    copied = copy.deepcopy(layer, own)
    if is_in_4bit(copied.get_base_layer()):
        return _merged_with_4bit(copied, attribute)
    _merge(copied)
    return plain(_get(copied.get_base_layer(), attribute))


def _merge(layer: Any) -> None:
    """Merge an adapter and those inside it: peft nests one for each parameter of a module of experts."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(layer.base_layer, BaseTunerLayer):
        _merge(layer.base_layer)
    layer.merge()


def _merged_with_4bit(layer: Any, attribute: str) -> Tensor:
    """The same beside a base in 4 bits: ``layer.merge`` rounds the sum to 4 bits, and does not scale LoRA's bias."""
    value = plain(_get(layer.get_base_layer(), attribute))
    if attribute == "bias":
        return value + layer.lora_B[ADAPTER].bias * layer.scaling[ADAPTER] if layer.lora_bias[ADAPTER] else value
    if ADAPTER in layer.lora_variant:
        merged: Tensor = layer.lora_variant[ADAPTER].merge_safe(layer, ADAPTER, value)
    else:
        merged = value + layer.get_delta_weight(ADAPTER)
    return merged.to(value.dtype)


def _persistent(module: nn.Module, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    names = module.state_dict().keys()
    return ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name in names)


def _get(module: nn.Module, attribute: str) -> Tensor:
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part)
    tensor: Tensor = value
    return tensor

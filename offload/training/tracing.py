"""Forward, loss and backward of a run's micro-batch on tensors without memory, no more often than it takes."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import ListConfig
from torch import Tensor, nn

from offload.config.loading import instantiate
from offload.engine.units import clean_name
from offload.models.protocol import CausalLM
from offload.models.source import masks_documents
from offload.plan.footprint import Footprint, footprint, of_more_layers
from offload.training.activations import prepare_activations
from offload.training.loss import SummedLoss
from offload.training.settings import TrainSettings

TRACED = (3, 5)
"""Layers of the models that are traced for one with more. Every shape of a layer, and each kind of mask, is in the
first two of them; a third is needed because nothing asks the first for its input's gradient."""


@dataclass(frozen=True)
class _Layers:
    """A model's layers: the list of modules with most parameters.

    Attributes:
        owner: the module that has it.
        name: of the list there; empty for a model without one.
        path: of the list in the model.
    """

    owner: nn.Module
    name: str
    path: str

    @property
    def modules(self) -> nn.ModuleList:
        found = getattr(self.owner, self.name) if self.name else nn.ModuleList()
        assert isinstance(found, nn.ModuleList)
        return found


def layers_of(module: nn.Module) -> nn.ModuleList:
    """A model's layers; empty where it has no list of them."""
    return _layers(module).modules


def _layers(module: nn.Module) -> _Layers:
    lists = [
        (sum(param.numel() for param in child.parameters()), owner, name, f"{place}.{name}" if place else name)
        for place, owner in module.named_modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList)
    ]
    _, owner, name, path = max(lists, key=lambda entry: entry[0], default=(0, module, "", ""))
    return _Layers(owner, name, path)


class Tracer:
    """Traces a model under several settings; what follows from traces that were made is not traced.

    In one stage of backward every tensor is as large as a multiple of the batch, plus what does not depend on it. The
    fullest of the stage's moments lies on or below the line between two batches that were traced.
    """

    def __init__(self) -> None:
        self._found: dict[Any, dict[int, Footprint]] = {}

    @property
    def traced(self) -> list[int]:
        """The batches of all traces that were made."""
        return [batch for found in self._found.values() for batch in found]

    def count(
        self,
        model: CausalLM,
        settings: TrainSettings,
        dtype: torch.dtype,
        length: int,
        *,
        keeps: bool,
        host_states: Sequence[tuple[str, int]] | None = None,
    ) -> Footprint:
        """What one micro-batch takes.

        Args:
            model: that ``settings`` describe, on the meta device; it stays as it is.
            settings: of the run.
            dtype: of the parameters.
            length: tokens of each sequence.
            keeps: gradients stay until all are there.
            host_states: where it trains on the CPU, the name of a parameter and the bytes of each tensor of it that
                comes with the first update and stays.
        """
        key = (repr(settings.model), repr(settings.loss), repr(getattr(settings, "adapter", None)), dtype, length,
               is_packed(settings), settings.enable_activation_checkpointing, settings.compile, keeps,
               None if host_states is None else (tuple(host_states), settings.gradient_accumulation_steps))  # fmt: skip
        found = self._found.setdefault(key, {})

        def traced(batch: int) -> Footprint:
            if batch not in found:
                found[batch] = _extrapolated(model, settings, batch, length, keeps=keeps, host_states=host_states)
            return found[batch]

        batch = settings.batch_size
        more = [other for other in found if other > batch]
        if batch in found or not more or host_states is not None:  # the heap's holes are on no line
            return traced(batch)
        less, least = max((other for other in found if other < batch), default=1), min(more)
        return traced(less) if less == batch else traced(less).towards(found[least], (batch - less) / (least - less))


def _extrapolated(
    model: CausalLM,
    settings: TrainSettings,
    batch: int,
    length: int,
    *,
    keeps: bool,
    host_states: Sequence[tuple[str, int]] | None,
) -> Footprint:
    number = len(layers_of(model.module))
    if number <= 2 * TRACED[1]:
        return _trace(model, settings, batch, length, keeps=keeps, host_states=host_states, number=number)
    few, more = (
        _trace(model, settings, batch, length, keeps=keeps, host_states=host_states, number=each) for each in TRACED
    )
    return of_more_layers(few, more, (number - TRACED[1]) / (TRACED[1] - TRACED[0]))


def _trace(
    model: CausalLM,
    settings: TrainSettings,
    batch: int,
    length: int,
    *,
    keeps: bool,
    host_states: Sequence[tuple[str, int]] | None,
    number: int,
) -> Footprint:
    packs = Packs.of(settings, on_host=host_states is not None)
    few, layers, step = shortened(model, settings, batch, length, number=number, packs=packs)
    staying = None
    if host_states is not None:
        names = {clean_name(name) for name, _ in few.module.named_parameters()}
        staying = [(name, nbytes) for name, nbytes in host_states if name in names]
    return footprint(few.module, step, keeps_gradients=keeps, layers=layers, host_states=staying,
                     micro_batches=settings.gradient_accumulation_steps)  # fmt: skip


def is_packed(settings: TrainSettings) -> bool:
    """Whether a row holds several samples. Packed and other data sets are never mixed."""
    sections = settings.dataset if isinstance(settings.dataset, list | ListConfig) else [settings.dataset]
    return any(section.get("packed") for section in sections)


class Packs(enum.Enum):
    """What a model is told of the documents in each row of a micro-batch."""

    NOTHING = enum.auto()
    """A row is one sample."""
    POSITIONS = enum.auto()
    """Of each token in its document. Torchtune's also take a mask for flex attention, which is small."""
    MASK = enum.auto()
    """Positions, and what each token attends to."""

    @classmethod
    def of(cls, settings: TrainSettings, *, on_host: bool) -> Packs:
        """Those of a run."""
        if not is_packed(settings):
            return cls.NOTHING
        return cls.MASK if on_host and masks_documents(settings.model) else cls.POSITIONS

    def batch(self, size: int, length: int, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs of a model, without values, and the labels."""
        tokens, labels = (torch.zeros(size, length, dtype=torch.long, device=device) for _ in range(2))
        inputs = {"tokens": tokens}
        if self is not Packs.NOTHING:
            inputs["input_pos"] = torch.zeros_like(tokens)
        if self is Packs.MASK:
            each = [torch.ones(length, length, dtype=torch.bool, device=device) for _ in range(size)]
            inputs["mask"] = torch.stack(each)
        return inputs, labels


def shortened(
    model: CausalLM,
    settings: TrainSettings,
    batch: int,
    length: int,
    *,
    number: int,
    packs: Packs = Packs.NOTHING,
) -> tuple[CausalLM, list[nn.Module], Callable[[], Tensor]]:
    """A copy of the model with its first ``number`` layers alone, ready to train; these layers, beside which another
    list may have more parameters (a frozen tower's); and what computes its loss on ``batch`` sequences of ``length``
    tokens, which stay."""
    layers = _layers(model.module)
    whole = layers.modules
    if layers.name:
        setattr(layers.owner, layers.name, whole[:number])
    try:
        model = copy.deepcopy(model)
    finally:
        if layers.name:
            setattr(layers.owner, layers.name, whole)
    prepare_activations(
        model, checkpointing=settings.enable_activation_checkpointing, offloading=False, device=torch.device("cpu")
    )
    loss_fn = instantiate(settings.loss)
    if settings.compile and hasattr(loss_fn, "compute_cross_entropy"):
        loss_fn.compute_cross_entropy = lambda logits, *_, **__: _CompiledLoss.apply(logits)
    model.module.train()
    staying: list[Any] = []

    def step() -> Tensor:
        device = next(model.module.parameters()).device
        staying[:] = (packs.batch(batch, length, device) for _ in range(settings.gradient_accumulation_steps))
        inputs, labels = staying[0]
        loss = SummedLoss(model, loss_fn)  # which looks for the head's parameters, and they may have been replaced
        return loss(inputs, labels, labels.numel())

    kept = model.module.get_submodule(layers.path) if layers.name else nn.ModuleList()
    return model, list(kept.children()), step


class _CompiledLoss(torch.autograd.Function):
    """A loss over logits that is compiled: kept are the logits as they came, whose gradient has their dtype."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])

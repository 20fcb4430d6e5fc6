"""A run's memory before there is any: its own model, optimizer and loss, on tensors without memory."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from offload.auto import AutoPlacement
from offload.component import resolve
from offload.config.loading import instantiate
from offload.engine.forecast import Component, forms_of, kind_of, stand_in
from offload.engine.placement import Placement
from offload.engine.units import clean_name
from offload.errors import UserError
from offload.host_memory import use_of_this_process
from offload.machinery import STAGING_SHARE
from offload.models.merging import MergedWeights
from offload.models.protocol import AdaptedLM, CausalLM, Packed
from offload.models.source import describe
from offload.optimizer import GIB, OffloadOptimizer
from offload.peers import TorchAOCPUOffloadOptimizer
from offload.plan.budget import (
    DEVICE,
    DISK,
    HOST,
    STATES,
    Budget,
    Group,
    Item,
    Optimizer,
    Sharding,
    on_accelerator,
    on_cpu,
    weights_of,
)
from offload.plan.footprint import Footprint, without_activations
from offload.refusals import ACCUMULATION_DTYPES
from offload.training.settings import TrainSettings
from offload.training.tracing import Tracer, layers_of

KEPT = "kept for a checkpoint"

DEFAULT_LENGTH = 2048
"""Tokens of a sequence where neither the tokenizer nor the model limits them."""

WRAPPER_KEYS = ("strategy", "offload_states", "update_in_backward", "offload_gradients", "accumulation_dtype",
                "in_flight_gib", "device_memory_gib", "minimal_size")  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What a run takes.

    Attributes:
        budget: of every kind of memory.
        parameters: of the model.
        trained: of them, those that train.
        batch: sequences of a forward.
        length: tokens of each, at most.
        notes: what the numbers rest on.
        faulted: bytes of host memory that a step on the CPU has from the system anew, page by page.
    """

    budget: Budget
    parameters: int
    trained: int
    batch: int
    length: int
    notes: tuple[str, ...]
    faulted: int = 0


@dataclass(frozen=True)
class _Described:
    """A model, and what every plan of it asks for.

    Attributes:
        parts: the model.
        packed: its weights that take other bytes.
        named: what trains, by name.
        sizes: bytes of each of these.
        numbers: elements of the model, and of what trains.
        nbytes: of the model's parameters, none of them packed.
        layers: their number.
    """

    parts: CausalLM
    packed: Packed
    named: list[tuple[str, nn.Parameter]]
    sizes: list[int]
    numbers: tuple[int, int]
    nbytes: int
    layers: int

    @functools.cached_property
    def merged(self) -> MergedWeights:
        """Its weights with the adapter that it has."""
        return cast(AdaptedLM, self.parts).merged_weights()


def _described(parts: CausalLM, packed: Packed) -> _Described:
    params = list(parts.module.parameters())
    named = [(clean_name(name), param) for name, param in parts.module.named_parameters() if param.requires_grad]
    numbers = sum(param.numel() for param in params), sum(param.numel() for _, param in named)
    sizes = [param.numel() * param.element_size() for _, param in named]
    return _Described(parts, packed, named, sizes, numbers, _nbytes(params), len(layers_of(parts.module)))


READERS = 24 << 20
"""Bytes of the host that a run takes and a plan does not: what reads data sets and checkpoints, and the logs. In runs
of tiny_llama_offload, resident memory before the first step less that of a process that has checked the run; 34 MiB
with a model of transformers."""


ELSEWHERE = int(0.57 * GIB)
"""Bytes of the host that a run's process takes before its model on another machine: 0.54 GiB with a model of torchtune,
0.58 with one of transformers, where that was measured as :func:`process_of_a_run` does."""


def process_of_a_run() -> int:
    """Bytes of the host that a run's process takes before its model, from this one's, which has imported the same but
    for what reads data."""
    if importlib.util.find_spec("datasets") is not None:
        importlib.import_module("datasets")
    return use_of_this_process().resident + READERS


class Planner:
    """Plans runs that differ in a few settings; what was traced once is not traced again.

    Args:
        base: bytes of the host that a process takes before its model; or a function that tells it, called when all that
            the model and the optimizer need is imported.
        adapts: an adapter trains, and not the whole model.
    """

    def __init__(self, base: int | Callable[[], int], *, adapts: bool) -> None:
        self._asked, self._adapts = base, adapts
        self._tracer = Tracer()
        self._models: dict[Any, _Described] = {}
        self._of_sections: dict[Any, tuple[Any, _Described]] = {}
        self._states: dict[str, list[tuple[str, str, int]] | None] = {}

    def plan(
        self, settings: TrainSettings, device: torch.device, dtype: torch.dtype, *, sharding: Sharding | None = None
    ) -> Plan:
        """The memory of a run with these settings, on each rank where there are several.

        Args:
            settings: of the run.
            device: where it trains.
            dtype: of the parameters.
            sharding: over several ranks.

        Raises:
            UserError: nothing here tells the model's sizes, or it cannot be trained so.
        """
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            return self._plan(settings, device, dtype, sharding or Sharding(1), traced=True)

    def least(
        self, settings: TrainSettings, device: torch.device, dtype: torch.dtype, *, sharding: Sharding | None = None
    ) -> Plan:
        """What a run takes beside its activations: nothing is traced for it. Arguments and errors as :meth:`plan`."""
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            return self._plan(settings, device, dtype, sharding or Sharding(1), traced=False)

    @functools.cached_property
    def _base(self) -> int:
        return self._asked if isinstance(self._asked, int) else self._asked()

    def _model(self, settings: TrainSettings, dtype: torch.dtype) -> tuple[CausalLM, Packed]:
        found = describe(settings.model, getattr(settings, "adapter", None), dtype, adapts=self._adapts)
        if found is None:
            raise UserError(
                f"model.path: nothing here tells the sizes of {settings.model.get('path')}: a folder with the model's "
                "config.json is enough (`tune download REPOSITORY --include config.json`), given as model.path"
            )
        return found

    def model_of(self, settings: TrainSettings, dtype: torch.dtype) -> tuple[CausalLM, Packed]:
        """The model with its tensors on the meta device."""
        described = self._describe(settings, dtype)
        return described.parts, described.packed

    def _describe(self, settings: TrainSettings, dtype: torch.dtype) -> _Described:
        # Settings that differ elsewhere have the same sections, which are compared at length where they have not.
        sections = settings.model, getattr(settings, "adapter", None)
        place = (*map(id, sections), dtype)
        if place not in self._of_sections:
            key = (*map(repr, sections), dtype)
            if key not in self._models:
                self._models[key] = _described(*self._model(settings, dtype))
            self._of_sections[place] = sections, self._models[key]
        return self._of_sections[place][1]

    def _plan(
        self, settings: TrainSettings, device: torch.device, dtype: torch.dtype, sharding: Sharding, *, traced: bool
    ) -> Plan:
        model = self._describe(settings, dtype)
        parts, packed, numbers = model.parts, model.packed, model.numbers
        largest = max((p.numel() for p in packed.weights), default=0)
        saved = int((dtype.itemsize - packed.nbytes) * packed.elements)
        on_gpu = device.type != "cpu"
        notes: list[str] = []
        if packed.dequantized:
            notes.append(f"the {packed.dequantized} weights of the folder are read as {settings.dtype}, and saved so")
        optimizer, states = self._optimizer(settings, model, sharding, on_gpu=on_gpu, notes=notes)
        base = self._base
        length = settings.tokenizer.get("max_seq_len")
        if length is None:
            length = min(parts.max_seq_len or DEFAULT_LENGTH, DEFAULT_LENGTH)
            notes.append(f"tokenizer.max_seq_len is not set: counted with {length} tokens")
        # Of ranks none keeps a whole one; of micro-batches the first leaves all, which the others are added to.
        are_apart = optimizer.keeps_gradients and (sharding.ranks > 1 or settings.gradient_accumulation_steps > 1)
        keeps = optimizer.keeps_gradients and not are_apart
        if traced:
            staying = None
            if not on_gpu:
                staying = [(name, nbytes) for _, name, nbytes in self._states_of(settings, model.named) or ()]
            counted = self._tracer.count(parts, settings, dtype, int(length), keeps=keeps, host_states=staying)
        else:
            counted = without_activations(model.nbytes, sum(model.sizes) if keeps else 0)
        weights = sharding.part(weights_of(counted) - saved)
        beside = _gathered(sharding, parts, counted, settings)
        if are_apart:
            name = "gradients, this rank's part" if sharding.ranks > 1 else "gradients of all micro-batches"
            beside.append((name, sharding.part(sum(model.sizes))))
        if packed.weights:
            beside.append(("a weight in 16 bits, to compute with", largest * dtype.itemsize))
        if on_gpu:
            kept = 2 / max(3, model.layers)  # a layer's on its way out, another's on its way in
            moved = int(counted.kept * (1 - kept)) if settings.enable_activation_offloading else 0
            items = on_accelerator(counted, optimizer, weights=weights, base=base, moved=moved, beside=beside)
        else:
            items = on_cpu(counted, optimizer, weights=weights, base=base, beside=beside)
        if self._adapts:
            items += _merged_beside(settings, model, sharding, device)
        items += _disk(settings, numbers, states, dtype)
        if settings.compile:
            notes.append("compile=True: what compilation fuses away was counted, what it adds was not")
        return Plan(
            Budget(tuple(items)), *numbers, settings.batch_size, int(length), tuple(notes), counted.heap.faulted
        )

    # ---- optimizer

    def _states_of(
        self, settings: TrainSettings, named: list[tuple[str, nn.Parameter]]
    ) -> list[tuple[str, str, int]] | None:
        """State, parameter and bytes of all that the optimizer keeps; None where it cannot be told."""
        section = settings.optimizer
        probed = _probed(section, resolve(section["_component_"], key="optimizer._component_"))
        key = repr((settings.model, getattr(settings, "adapter", None), settings.dtype, probed))
        if key not in self._states:
            self._states[key] = _states(probed, named)
        return self._states[key]

    def _optimizer(
        self,
        settings: TrainSettings,
        model: _Described,
        sharding: Sharding,
        *,
        on_gpu: bool,
        notes: list[str],
    ) -> tuple[Optimizer, int]:
        """What this rank's keeps, and the bytes of the states of all ranks."""
        section = settings.optimizer
        kind: Any = resolve(section["_component_"], key="optimizer._component_")
        sizes = [sharding.part(nbytes) for nbytes in model.sizes]
        states = self._states_of(settings, model.named)
        if states is None:
            notes.append(f"optimizer: {section['_component_']} does not run on the CPU: its states are not counted")
            states = []
        whole = sum(nbytes for _, _, nbytes in states)
        states = [(state, name, sharding.part(nbytes)) for state, name, nbytes in states]
        total = sum(nbytes for _, _, nbytes in states)
        accumulates = settings.gradient_accumulation_steps > 1
        if kind is TorchAOCPUOffloadOptimizer and on_gpu:
            keeps = not section.get("offload_gradients", False)
            locked = {"copies of the weights": sizes, "gradients": sizes}
            return Optimizer(0, locked, {STATES: total}, 0, keeps, in_slabs=False), whole
        if kind is not OffloadOptimizer:
            is_paged = str(section["_component_"]).rpartition(".")[2].startswith("Paged") and on_gpu
            paged = {"optimizer states, paged by CUDA": total} if is_paged else {}
            return Optimizer(0 if is_paged else total, {}, paged, 0, True), whole
        strategy = section.get("strategy", "host")
        early, offloads = bool(section.get("update_in_backward")), bool(section.get("offload_gradients"))
        keeps = (not early or accumulates) and not offloads
        writes_beside = settings.enable_async_checkpointing and not self._adapts
        room = {KEPT: int(settings.async_checkpoint_gib * GIB)} if writes_beside else {}
        if not on_gpu:
            return Optimizer(total, {}, room, 0, keeps or (offloads and not early)), whole
        kept = {purpose: [nbytes] for purpose, nbytes in room.items()}
        if strategy == "resident":
            return Optimizer(total, kept, {}, 0, keeps or (offloads and not early)), whole
        on_device, locked, pageable = 0, {}, 0
        if strategy == "host":
            locked = {"copies of the weights": sizes, STATES: [n for _, _, n in states]}
        else:
            rules = section.get("offload_states", ".*")
            placement = AutoPlacement(rules) if strategy == "auto" else Placement(rules)
            kinds = [(placement.memory(state, name), nbytes) for state, name, nbytes in states]
            on_device = sum(nbytes for memory, nbytes in kinds if memory == "device")
            pageable = sum(nbytes for memory, nbytes in kinds if memory == "host")
            locked = {STATES: [nbytes for memory, nbytes in kinds if memory == "pinned_host"]}
        if offloads and (not early or accumulates):
            given = section.get("accumulation_dtype")
            width = None if given is None else ACCUMULATION_DTYPES[given].itemsize
            locked["gradients"] = [
                sharding.part(param.numel() * (width or param.element_size())) for _, param in model.named
            ]
        bound = int(section.get("in_flight_gib", 1.0) * GIB)
        staged = min(int(STAGING_SHARE * bound), sum(locked.get(STATES, []))) if strategy in ("stream", "auto") else 0
        taken = min(bound, sum(sizes) + staged) if early or offloads else staged
        return Optimizer(on_device, {**locked, **kept}, {STATES: pageable}, taken, keeps), whole


def _gathered(
    sharding: Sharding, parts: CausalLM, counted: Footprint, settings: TrainSettings
) -> list[tuple[str, int]]:
    """What a rank holds beside its part of the weights."""
    if sharding.ranks == 1:
        return []
    layers = list(layers_of(parts.module))
    others = [block for block in parts.blocks() if all(block is not layer for layer in layers)]
    of_layers = [_group(layer) for layer in layers]
    embedding = _sum(_group(block) for block in others)
    rest = _sum((*of_layers, embedding))
    whole = _group(parts.module)
    activations = 0 if settings.enable_activation_offloading else counted.kept
    root = Group(whole.nbytes - rest.nbytes, whole.trained - rest.trained)
    return sharding.gathered(root, of_layers, embedding=embedding, activations=activations)


def _group(module: nn.Module) -> Group:
    params = list(module.parameters())
    return Group(_nbytes(params), _nbytes(param for param in params if param.requires_grad))


def _sum(groups: Iterable[Group]) -> Group:
    found = list(groups)
    return Group(sum(group.nbytes for group in found), sum(group.trained for group in found))


def _merged_beside(settings: TrainSettings, model: _Described, sharding: Sharding, device: torch.device) -> list[Item]:
    """What writing a model with its adapter merged in takes while training goes on: the adapter as it was, and the
    weight that is being made."""
    if not settings.enable_async_checkpointing or getattr(settings, "save_adapter_weights_only", False):
        return []
    place, nbytes = model.merged.made_on(device)
    return [
        Item(HOST, KEPT, sum(map(sharding.part, model.sizes)), "the adapter as it was"),
        Item(HOST if place.type == "cpu" else DEVICE, "a weight, being merged", nbytes, "for a checkpoint"),
    ]


def _probed(section: DictConfig, kind: Any) -> DictConfig:
    """The section of an optimizer with the same states that updates where its parameters are."""
    section = section.copy()
    if kind is OffloadOptimizer or kind is TorchAOCPUOffloadOptimizer:
        for key in WRAPPER_KEYS:
            section.pop(key, None)
        section["_component_"] = "offload.OffloadOptimizer"
        section["strategy"] = "resident"
    return section


def _states(section: DictConfig, named: list[tuple[str, nn.Parameter]]) -> list[tuple[str, str, int]] | None:
    """State, parameter and bytes of all that the optimizer will keep: its class steps small parameters of the same
    names once. None where it does not run on the CPU."""
    # Without groups by name, parameters of a kind have the same states.
    kinds = {name: name if "param_groups" in section else repr(kind_of(param)) for name, param in named}
    stand_ins: dict[str, tuple[str, nn.Parameter]] = {}
    for name, param in named:
        if kinds[name] not in stand_ins:
            small = stand_in(param)
            small.grad = torch.zeros_like(small)
            stand_ins[kinds[name]] = name, small
    optimizer = instantiate(section, list(stand_ins.values()))
    try:
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    except Exception:
        return None
    forms: dict[str, list[tuple[str, list[Component]]]] = {
        kind: [
            (state, list(forms_of(value, small)))
            for state, value in optimizer.state[small].items()
            if isinstance(value, Tensor) and value.dim()
        ]
        for kind, (_, small) in stand_ins.items()
    }
    found = []
    for name, param in named:
        for state, components in forms[kinds[name]]:
            tensors = [each.of(param) for each in components]
            found.append((state, name, sum(tensor.numel() * tensor.element_size() for tensor in tensors)))
    return found


def _nbytes(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() * param.element_size() for param in params)


def _disk(settings: TrainSettings, numbers: tuple[int, int], states: int, dtype: torch.dtype) -> list[Item]:
    total, trained = numbers
    only_trained = bool(getattr(settings, "save_adapter_weights_only", False))
    one = dtype.itemsize * (trained if only_trained else total) + states
    count = settings.keep_last_n + 1 if settings.keep_last_n else 1
    note = (
        f"keep_last_n={settings.keep_last_n}, and one that is being written"
        if settings.keep_last_n
        else "each; keep_last_n=null keeps all"
    )
    return [Item(DISK, "checkpoints" if count > 1 else "checkpoint", one * count, note)]

"""The memory of a training step before there is any: the model's own forward and backward on tensors without memory.

Nothing is computed and nothing allocated. Every operation tells the shapes of what it returns, and a storage lives
until autograd and Python have let go of it, so what is alive at each moment is what an accelerator would hold, down to
which activations a checkpointed layer keeps. Attention kernels are played: ``scaled_dot_product_attention`` on an
accelerator keeps its inputs, its output and a log-sum-exp per head and token (FlashAttention-2,
https://arxiv.org/abs/2307.08691) for shapes for which the CPU's would write the whole matrix down.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.engine.units import clean_name
from offload.optim.formats import is_dense
from offload.plan.heap import Event, Held, Step, held
from offload.plan.objects import Objects
from offload.plan.without_memory import without_memory

# What the caching allocator of CUDA and XPU rounds each block up to.
BLOCK = 512

PARAMETERS, GRADIENTS, ACTIVATIONS = "parameters", "gradients", "activations"


@dataclass(frozen=True)
class Moment:
    """The moment when most bytes are alive.

    Attributes:
        total: bytes.
        parts: what they are: ``parameters`` (buffers included), ``gradients``, ``activations``.
        at: where the model was: the innermost module in forward, or ``backward``.
    """

    total: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    at: str = ""


HEAD, TAIL = -1, -2
"""Stages of backward beside those of layers: until a layer has a gradient, and when what is before all layers has."""


@dataclass(frozen=True)
class Footprint:
    """What one micro-batch takes on the device.

    Attributes:
        before: the fullest moment until the first gradient is complete; an update in backward has nothing in flight.
        stages: the fullest moment from then on while the gradient that came last was of a layer, by its index, or of
            none (HEAD, TAIL).
        kept: bytes of activations when forward is done: what backward needs.
        heap: what the C library holds beyond these where tensors are the host's.
    """

    before: Moment
    stages: dict[int, Moment]
    kept: int
    heap: Held = Held(0, 0)

    @property
    def after(self) -> Moment:
        """The fullest moment once a gradient is complete."""
        return max(self.stages.values(), key=lambda moment: moment.total, default=Moment())

    def peak(self, in_flight: int = 0) -> int:
        """Bytes at the fullest moment, with so many of the optimizer's in flight once there are gradients."""
        return max(self.before.total, self.after.total + in_flight)

    def towards(self, other: Footprint, share: float) -> Footprint:
        """What lies ``share`` of the way from this to another of the same stages: between them for 0 to 1."""

        def moment(one: Moment, another: Moment) -> Moment:
            parts = {
                name: int(one.parts.get(name, 0) + share * (another.parts.get(name, 0) - one.parts.get(name, 0)))
                for name in {**one.parts, **another.parts}
            }
            return Moment(sum(parts.values()), parts, another.at)

        stages = {key: moment(self.stages.get(key, other.stages[key]), other.stages[key]) for key in other.stages}

        def number(one: int, another: int) -> int:
            return int(one + share * (another - one))

        heap = Held(number(self.heap.beyond_use, other.heap.beyond_use), number(self.heap.faulted, other.heap.faulted))
        return Footprint(moment(self.before, other.before), stages, number(self.kept, other.kept), heap)


def without_activations(parameters: int, gradients: int) -> Footprint:
    """The footprint of so many bytes alone: the least that a step can take."""
    moment = Moment(parameters, {PARAMETERS: parameters})
    with_gradients = Moment(parameters + gradients, {PARAMETERS: parameters, GRADIENTS: gradients})
    return Footprint(moment, {TAIL: with_gradients}, 0)


def of_more_layers(few: Footprint, more: Footprint, times: float) -> Footprint:
    """The footprint of a model with more equal layers: ``times`` the difference of two beyond the second.

    From a layer to the one before it, backward frees as much and adds as much as anywhere else: what is alive in the
    stages of layers between is on a line between those of the last layer and the second, which are extrapolated each by
    itself, as is all that lies before and behind.
    """

    def ends(counted: Footprint) -> Footprint:
        last = max(counted.stages, default=HEAD)
        found = {key: counted.stages[key] for key in (HEAD, TAIL, 0) if key in counted.stages}
        if last > 0:
            found |= {1: counted.stages[min(key for key in counted.stages if key > 0)], 2: counted.stages[last]}
        return Footprint(counted.before, found, counted.kept, counted.heap)

    return ends(few).towards(ends(more), 1 + times)


def footprint(
    module: nn.Module,
    step: Callable[[], Tensor],
    *,
    keeps_gradients: bool,
    gradient_dtype: torch.dtype | None = None,
    layers: Sequence[nn.Module] = (),
    host_states: Sequence[tuple[str, int]] | None = None,
    micro_batches: int = 1,
) -> Footprint:
    """What forward and backward of one micro-batch take.

    Args:
        module: on the meta device.
        step: makes the inputs, runs the model and returns the loss, 0-dim, with a graph behind it.
        keeps_gradients: gradients stay until all are there (an update at step, or accumulation); otherwise each goes as
            soon as it is complete.
        gradient_dtype: what gradients are kept in where that is not the parameters' dtype.
        layers: of the module, whose stages of backward are told apart.
        host_states: where all tensors will be in the host's memory, the parameter's name and bytes of each that comes
            with the first update and stays; the C library's heap is counted then. Updates are in backward where one
            micro-batch keeps no gradients.
        micro_batches: of a step.
    """
    # Not a mode for torch functions, which would not see the forward of a checkpointed layer inside of backward.
    played = mock.patch.object(F, "scaled_dot_product_attention", _played_attention)

    def trace(keeps_gradients: bool = keeps_gradients) -> tuple[_Account, int]:
        account = _Account(module, layers, follows_heap=host_states is not None)
        with played, account.following(keeps_gradients, gradient_dtype), account:
            loss = step()
            kept = account.now[ACTIVATIONS]
            account.where = ["backward"]
            account.begin_backward()
            loss.backward()
        return account, kept

    account, kept = without_memory(module, trace)
    heap = Held(0, 0)
    if host_states is not None:
        events, inputs = account.events, account.inputs
        first = events
        if micro_batches > 1 and not keeps_gradients:  # but the others' are added to the first's
            first = without_memory(module, lambda: trace(True))[0].events
        early: dict[int, list[int]] = {}
        if micro_batches == 1 and not keeps_gradients:
            for index, name in account.completed:
                early.setdefault(index - inputs, []).extend(nbytes for of, nbytes in host_states if of == name)
        states = [] if early else [nbytes for _, nbytes in host_states]
        heap = held(Step(events[:inputs], first[inputs:], events[inputs:], states, micro_batches, early=early))
    return Footprint(account.before, account.stages, kept, heap)


class _Account(TorchDispatchMode):
    """Counts the storages that operations return, by what they are, until they are gone.

    Args:
        module: its tensors are there already.
        layers: of the module.
        follows_heap: note what the C library is asked for.

    Attributes:
        inputs: how many of ``events`` came before the first module's forward.
        completed: parameters in the order in which their gradients were complete, each with the number of ``events`` by
            then.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module], *, follows_heap: bool) -> None:
        super().__init__()
        self.now: dict[str, int] = defaultdict(int)
        self.before = Moment()
        self.stages: dict[int, Moment] = {}
        self.where: list[str] = []
        self._layers = {id(param): index for index, layer in enumerate(layers) for param in layer.parameters()}
        self._stage: int | None = None  # until there is a gradient
        self._module = module
        self._shapes = {param.shape for param in module.parameters() if param.dim() > 1}
        self._storages: dict[int, list[Any]] = {}  # by address: kind and bytes
        self.inputs = 0
        self.completed: list[tuple[int, str]] = []
        self._objects = Objects() if follows_heap else None
        self._total = 0
        for tensor in (*module.parameters(), *module.buffers()):
            self._add(tensor, PARAMETERS)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside, and torch's guard against it costs as much as the rest."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and (self._are_gradients(*args[:2]) or _are_summed(*args[:2])):
            # Autograd adds a tensor's gradients in place where no mode looks on:
            # https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/input_buffer.cpp
            return args[0].add_(args[1])
        if func in _SUMS and _is_let_go(args[0]):
            # Autograd does this in place, too, where no mode looks on:
            # https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/FunctionsManual.cpp
            return _SUMS[func](*args, **(kwargs or {}))
        if self._objects is not None:
            self._objects.operation(func, args)
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                is_new = self._add(each, ACTIVATIONS)
                if self._objects is not None:
                    self._objects.tensor(each, is_view=not is_new)
        return out

    @property
    def events(self) -> list[Event]:
        """What the C library was asked for."""
        return [] if self._objects is None else self._objects.events

    def begin_backward(self) -> None:
        if self._objects is not None:
            self._objects.begin_backward()

    def _are_gradients(self, one: Tensor, other: Any) -> bool:
        if torch.is_grad_enabled() or one.shape not in self._shapes:
            return False
        return isinstance(other, Tensor) and other.shape == one.shape

    def _add(self, tensor: Tensor, kind: str) -> bool:
        """Whether its storage is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return False
        entry = self._storages[key] = [kind, -(-storage.nbytes() // BLOCK) * BLOCK]
        self._change(kind, entry[1])
        if kind != PARAMETERS and self._objects is not None:
            self._objects.storage(key, storage.nbytes())
        weakref.finalize(storage, self._gone, key)
        return True

    def _gone(self, key: int) -> None:
        kind, nbytes = self._storages.pop(key)
        self._change(kind, -nbytes)
        if self._objects is not None:
            self._objects.gone(key)

    def _change(self, kind: str, nbytes: int) -> None:
        self.now[kind] += nbytes
        self._total += nbytes
        fullest = self.before if self._stage is None else self.stages.setdefault(self._stage, Moment())
        if self._total > fullest.total:
            moment = Moment(self._total, dict(self.now), self.where[-1] if self.where else "")
            if self._stage is None:
                self.before = moment
            else:
                self.stages[self._stage] = moment

    def _becomes_gradient(self, tensor: Tensor) -> None:
        entry = self._storages[tensor.untyped_storage()._cdata]
        self.now[entry[0]] -= entry[1]
        self.now[GRADIENTS] += entry[1]
        entry[0] = GRADIENTS

    @contextlib.contextmanager
    def following(self, keeps_gradients: bool, dtype: torch.dtype | None) -> Iterator[None]:
        """Knows in which module's forward an operation is, and takes gradients when they are complete."""
        kept: list[Tensor] = []

        names = {id(param): clean_name(name) for name, param in self._module.named_parameters()}

        def take(param: nn.Parameter) -> None:
            self.completed.append((len(self.events), names[id(param)]))
            gradient = param.grad
            assert gradient is not None
            rest = TAIL if self._stage is not None and self._stage != HEAD else HEAD
            self._stage = self._layers.get(id(param), rest)
            if not keeps_gradients:
                param.grad = None
                return
            if dtype is not None and gradient.dtype != dtype:
                gradient = gradient.to(dtype)
                kept.append(gradient)
                param.grad = None
            self._becomes_gradient(gradient)

        handles: list[Any] = [
            param.register_post_accumulate_grad_hook(take) for param in self._module.parameters() if param.requires_grad
        ]
        for name, each in self._module.named_modules():
            handles.append(each.register_forward_pre_hook(lambda *_, name=name: self._enter(name)))
            handles.append(each.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> None:
        self.inputs = self.inputs or len(self.events)
        self.where.append(name)

    def _leave(self) -> None:
        self.where.pop()


_SUMS = {torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default}


def _are_summed(one: Tensor, other: Any) -> bool:
    """Whether these are gradients that autograd sums, and nothing else holds on to the first."""
    fits = isinstance(other, Tensor) and other.shape == one.shape and _is_let_go(one)
    return fits and is_dense(one)


def _is_let_go(tensor: Tensor) -> bool:
    """Whether this is a tensor of backward's own that nothing else holds on to."""
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
        return False
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2  # with the one of this question


def _played_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` with the memory of a fused kernel, which adds a mask as numbers."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    return _Attention.apply(query, key, value, attn_mask)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # [batch, heads, tokens, dim], which lies in memory as [batch, tokens, heads, dim]: what follows copies nothing.
        batch, heads, tokens, _ = query.shape
        out = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        # In the order in which PyTorch's own lets go of them.
        ctx.save_for_backward(mask, key, query, value, sums, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mask, key, query, value, sums, out = ctx.saved_tensors
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
        del out, sums, value, query, key, mask  # the order of a C++ function's variables
        return gradients

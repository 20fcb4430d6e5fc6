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

from offload.plan.heap import Event, held_beyond_use
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


EDGE, DIMENSION, STORAGE, VERSION, TASK = 16, 8, 96, 24, (24, 16)
"""Bytes of small objects that stay, in the order in which PyTorch makes them: a node of autograd's graph has a list of
its edges, one for each tensor that it has a gradient for, and some have sizes; a tensor with memory of its own has a
``c10::StorageImpl`` before it and a counter of versions behind; backward has two tables of the nodes. Larger objects,
as nodes themselves, fit into no remainder of a tensor."""

KEEP_SIZES = {"view", "_unsafe_view", "_reshape_alias", "expand", "sum", "mean", "select", "slice", "as_strided"}
"""Operations whose nodes keep their input's sizes (tools/autograd/derivatives.yaml)."""

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
        heap: bytes that the C library holds beyond these where tensors are the host's.
    """

    before: Moment
    stages: dict[int, Moment]
    kept: int
    heap: int = 0

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

        numbers = number(self.kept, other.kept), number(self.heap, other.heap)
        return Footprint(moment(self.before, other.before), stages, *numbers)


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
    host_states: Sequence[int] | None = None,
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
        host_states: where all tensors will be in the host's memory, bytes of each that comes after the first backward
            and stays; the C library's heap is counted then.
        micro_batches: of a step.
    """
    # Not a mode for torch functions, which would not see the forward of a checkpointed layer inside of backward.
    played = mock.patch.object(F, "scaled_dot_product_attention", _played_attention)

    def trace() -> tuple[_Account, int]:
        account = _Account(module, layers)
        with played, account.following(keeps_gradients, gradient_dtype), account:
            loss = step()
            kept = account.now[ACTIVATIONS]
            account.where = ["backward"]
            account.begin_backward()
            loss.backward()
        return account, kept

    account, kept = without_memory(module, trace)
    heap = 0 if host_states is None else held_beyond_use(account.events, host_states, micro_batches)
    return Footprint(account.before, account.stages, kept, heap)


class _Account(TorchDispatchMode):
    """Counts the storages that operations return, by what they are, until they are gone.

    Args:
        module: its tensors are there already.
        layers: of the module.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module]) -> None:
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
        self.events: list[Event] = []
        self._nodes = self._first_node = torch._C._autograd._get_sequence_nr()
        self._of_view: tuple[int, ...] = ()
        self._of_recomputation: list[int] = []
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
        self._note_nodes(func, args)
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self._add(each, ACTIVATIONS)
        return out

    def _note_nodes(self, func: Any = None, args: Any = ()) -> None:
        """Autograd numbers its nodes. It makes a view's after the operation, any other's before. The loss holds on to
        those of forward until backward is over; a checkpointed layer's second forward to its own."""
        number = torch._C._autograd._get_sequence_nr()
        is_backward = torch._C._current_autograd_node() is not None
        if is_backward and not torch.is_grad_enabled():
            self.events += [(key, None, False) for key in self._of_recomputation]
            self._of_recomputation.clear()
            self._nodes = number
            return
        before, self._of_view = self._of_view, ()
        sizes = () if func is None else _small_objects(func, args)
        if func is not None and func.is_view:
            self._of_view = sizes
        for node in range(self._nodes, number):
            for place, nbytes in enumerate(before or sizes):
                key = -(_MOST_OF_A_NODE * node + place) - 1
                self.events.append((key, nbytes, False))
                if is_backward:
                    self._of_recomputation.append(key)
            before = ()
        self._nodes = number

    def begin_backward(self) -> None:
        """Which has a table of all nodes until it is over."""
        self._note_nodes()
        number = len(TASK) * (self._nodes - self._first_node)
        self.events += [(-1 - (1 << 40) - place, TASK[place % len(TASK)], False) for place in range(number)]

    def _are_gradients(self, one: Tensor, other: Any) -> bool:
        return one.shape in self._shapes and isinstance(other, Tensor) and other.shape == one.shape

    def _add(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            entry = self._storages[key] = [kind, -(-storage.nbytes() // BLOCK) * BLOCK]
            self._change(kind, entry[1])
            if kind != PARAMETERS:
                self.events.append((key + 1, STORAGE, False))
                self.events.append((key, storage.nbytes(), True))
                self.events.append((key + 2, VERSION, False))
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        kind, nbytes = self._storages.pop(key)
        self._change(kind, -nbytes)
        self.events += [(key + place, None, place == 0) for place in range(3)]

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

        def take(param: nn.Parameter) -> None:
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
            handles.append(each.register_forward_pre_hook(lambda *_, name=name: self.where.append(name)))
            handles.append(each.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self) -> None:
        self.where.pop()


def _are_summed(one: Tensor, other: Any) -> bool:
    """Whether these are gradients that autograd sums, and nothing else holds on to the first."""
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
        return False
    uses = torch._C._storage_Use_Count(one.untyped_storage()._cdata) - 1  # less the one of this question
    return isinstance(other, Tensor) and other.shape == one.shape and uses == 1 and one.is_contiguous()


_MOST_OF_A_NODE = 8


def _small_objects(func: Any, args: Any) -> tuple[int, ...]:
    """Bytes of those that an operation's node has."""
    given = [each for each in tree_leaves(args) if isinstance(each, Tensor) and each.is_floating_point()]
    if not given:
        return ()
    name, edges = func.overloadpacket.__name__, EDGE * len(given)
    if name in KEEP_SIZES:
        return edges, DIMENSION * max(1, given[0].dim())
    if name == "mm":  # of both, and their strides
        return edges, *4 * (2 * DIMENSION,)
    return (edges,)


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
    """``scaled_dot_product_attention`` with the memory of a fused kernel."""
    return _Attention.apply(query, key, value)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # [batch, heads, tokens, dim], which lies in memory as [batch, tokens, heads, dim]: what follows copies nothing.
        batch, heads, tokens, _ = query.shape
        out = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

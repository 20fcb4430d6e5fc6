"""What forward and backward have to do, counted from the model's own graph on tensors without memory.

Matrix products count by their FLOPs, attention by its own, everything else by the bytes that it reads and writes, and
each by the kernels that it launches. Layers are told from the rest, the embedding, the head and the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from offload.plan.without_memory import DiffersOnMetaError, without_memory

CAUSAL = 0.5
"""Of the matrix of scores, what a causal model's attention kernels compute."""


@dataclass(frozen=True)
class Amount:
    """Work.

    Attributes:
        products: FLOPs of matrix products.
        attention: FLOPs of attention's own products.
        weights: bytes of weights that products read, and of the gradients of weights that they write.
        moved: bytes that all other operations read and write.
        launches: operations that run a kernel.
        still: of the bytes moved, those of what is as large as a parameter, such as its gradient: more tokens do not
            make them more.
    """

    products: float = 0.0
    attention: float = 0.0
    weights: float = 0.0
    moved: float = 0.0
    launches: float = 0.0
    still: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def __rmul__(self, factor: float) -> Amount:
        return Amount(*(factor * value for value in _values(self)))

    def for_tokens(self, ratio: float, length_ratio: float) -> Amount:
        """Of a micro-batch with ``ratio`` times the tokens, in sequences ``length_ratio`` times as long."""
        return Amount(
            ratio * self.products,
            ratio * length_ratio * self.attention,
            self.weights,
            self.still + ratio * (self.moved - self.still),
            self.launches,
            self.still,
        )


def _values(amount: Amount) -> list[float]:
    return [getattr(amount, field.name) for field in fields(amount)]


@dataclass(frozen=True)
class Work:
    """Of one micro-batch.

    Attributes:
        tokens: of the micro-batch.
        length: tokens of a sequence.
        layers: number of layers.
        layer: forward and backward of a layer, the mean of all; recomputation belongs to backward.
        edge: forward and backward of all else. A loss that computes its gradients in forward has them there.
    """

    tokens: int
    length: int
    layers: int
    layer: tuple[Amount, Amount]
    edge: tuple[Amount, Amount]

    def with_batch(self, batch: int, length: int) -> Work:
        """Of ``batch`` sequences of ``length`` tokens."""
        ratio, longer = batch * length / self.tokens, length / self.length
        forward, backward = (each.for_tokens(ratio, longer) for each in self.layer)
        first, last = (each.for_tokens(ratio, longer) for each in self.edge)
        return Work(batch * length, length, self.layers, (forward, backward), (first, last))

    @property
    def total(self) -> Amount:
        return self.layers * (self.layer[0] + self.layer[1]) + self.edge[0] + self.edge[1]


def count(
    module: nn.Module,
    layers: Sequence[nn.Module],
    step: Callable[[], Tensor],
    *,
    batch: int,
    length: int,
    fused_norms: bool,
) -> Work:
    """The work of one micro-batch.

    Args:
        module: on the meta device.
        layers: of it, as many as shall be traced.
        step: builds the loss, which asks the model for its parameters, makes the inputs, runs the model and returns the
            loss, 0-dim, with a graph behind it.
        batch: sequences of the micro-batch that ``step`` makes.
        length: tokens of each.
        fused_norms: ``rms_norm`` is one kernel, as on a GPU; on the CPU it is several.
    """

    def trace() -> _Counter:
        counter = _Counter(module)
        with counter.following(layers), counter.kernels(fused_norms), counter:
            loss = step()
            counter.phase = 1
            counter.in_layer = False
            loss.backward()
        return counter

    counter = without_memory(module, trace)
    number = max(1, len(layers))
    forward, backward = ((1 / number) * counter.sums[True, phase] for phase in (0, 1))
    return Work(batch * length, length, number, (forward, backward), (counter.sums[False, 0], counter.sums[False, 1]))


class _Counter(TorchDispatchMode):
    """Sums operations by whether they belong to a layer, and by phase: 0 is forward, 1 backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.sums = {(in_layer, phase): Amount() for in_layer in (True, False) for phase in (0, 1)}
        self.phase = 0
        self.in_layer = False
        self._weights = {tensor.untyped_storage()._cdata for tensor in module.parameters()}
        self._shapes = {tuple(sorted(param.shape)) for param in module.parameters() if param.dim() > 1}  # or transposed
        self._gradients = {param.shape for param in module.parameters()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside, and torch's guard against it costs as much as the rest."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        results = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if not results or name in _FREE or torch.Tag.inplace_view in func.tags:
            return out
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        known = {each.untyped_storage()._cdata for each in inputs}
        writes = func._schema.is_mutable
        if writes and any(each.is_meta and each._is_view() and each.requires_grad for each in inputs[:1]):
            raise DiffersOnMetaError(f"{name} writes into a view, whose backward copies more there")
        if not writes and all(each.untyped_storage()._cdata in known for each in results):
            return out  # views
        product = getattr(torch.ops.aten, name.removesuffix("_"), None)
        if name == "_grouped_mm" or product in flop_registry:
            if name == "_grouped_mm":
                flops = 2 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]
            else:
                flops = flop_registry[product](*args, **kwargs, out_val=out)
            weights = sum(each.nbytes for each in inputs if each.untyped_storage()._cdata in self._weights)
            weights += sum(each.nbytes for each in results if tuple(sorted(each.shape)) in self._shapes)
            self.add(Amount(products=float(flops), weights=float(weights), launches=1.0))
        else:
            picks = name in _PICKS
            read = [] if name in _ONLY_WRITES else inputs[1:] if picks else inputs
            moved = sum(map(_traffic, (*results, *read)))
            if picks:
                moved += min(sum(map(_traffic, results)), _traffic(inputs[0]))
            still = sum(_traffic(each) for each in (*results, *read) if each.shape in self._gradients)
            self.add(Amount(moved=float(moved), launches=1.0, still=float(still)))
        return out

    def add(self, amount: Amount) -> None:
        key = self.in_layer, self.phase
        self.sums[key] = self.sums[key] + amount

    @contextlib.contextmanager
    def following(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Knows whether an operation belongs to a layer: in backward from the gradient of its result to that of its
        input."""

        results: set[int] = set()

        def enters(*_: Any) -> None:
            self.in_layer = True

        def leaves(_: Any) -> None:
            self.in_layer = False

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            given = _first_tensor((args, kwargs))
            if given is not None and given.requires_grad and self.phase == 0 and id(given) not in results:
                given.register_hook(leaves)
            enters()

        def after(_: nn.Module, args: Any, result: Any) -> None:
            given = _first_tensor(result)
            if self.phase == 0:
                if given is not None and given.requires_grad:
                    given.register_hook(enters)
                    results.add(id(given))
                self.in_layer = False

        handles: list[Any] = []
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(layer.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def kernels(self, fused_norms: bool) -> Iterator[None]:
        """Attention is one kernel forward and one backward, which computes the scores again. So are norms."""
        counter = self

        class Attention(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                batch, heads, tokens, _ = query.shape
                ctx.save_for_backward(query, key, value)
                ctx.flops = CAUSAL * 2 * batch * heads * tokens * key.shape[2] * (query.shape[-1] + value.shape[-1])
                with counter.as_one(Amount(attention=ctx.flops, launches=1.0)):
                    return query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Any:
                with counter.as_one(Amount(attention=2.5 * ctx.flops, launches=1.0)):
                    return tuple(torch.empty_like(each) for each in ctx.saved_tensors)

        class Norm(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
                ctx.save_for_backward(x, *(() if weight is None else (weight,)))
                with counter.as_one(Amount(moved=2.0 * _traffic(x), launches=1.0)):
                    return torch.empty_like(x)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Any:
                x, *weight = ctx.saved_tensors
                with counter.as_one(Amount(moved=3.0 * _traffic(x), launches=2.0)):
                    return torch.empty_like(x), torch.empty_like(weight[0]) if weight else None

        def attention(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
            is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
        ) -> Tensor:  # fmt: skip
            return Attention.apply(query, key, value)

        def norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
            return Norm.apply(x, weight)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
            if fused_norms:
                stack.enter_context(mock.patch.object(F, "rms_norm", norm))
            yield

    @contextlib.contextmanager
    def as_one(self, amount: Amount) -> Iterator[None]:
        """What is done inside counts as so much."""
        key = self.in_layer, self.phase
        total = self.sums[key] + amount
        yield
        self.sums[key] = total


_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias"}
_ONLY_WRITES = {"zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros", "new_ones", "new_full",
                "zero_", "fill_", "arange", "nll_loss_backward"}  # fmt: skip
_PICKS = {"embedding", "index_select", "gather", "index", "nll_loss_forward"}
"""They read no more of their first argument than they return."""


def _traffic(tensor: Tensor) -> int:
    """Bytes of reading or writing it once; what is expanded is there once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _first_tensor(tree: Any) -> Tensor | None:
    return next((each for each in tree_leaves(tree) if isinstance(each, Tensor) and each.is_floating_point()), None)

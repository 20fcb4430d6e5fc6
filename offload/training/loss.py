"""Losses: the fused head and cross-entropy, and one way to get any loss as a sum over labels.

The recipes divide by the number of labels of the whole step before its first backward, so what they need of
a loss is its sum. That keeps gradient accumulation exact, and a micro-batch without any label adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offload.data.labels import IGNORE_INDEX
from offload.models.protocol import CausalLM

Head = Callable[[Tensor], Tensor]


class LinearCrossEntropyLoss(nn.Module):
    """Output projection and cross-entropy in one, chunk by chunk over tokens; the logits never exist whole.

    For each chunk the projection, the loss and both gradients are computed at once, so that nothing but the
    gradients outlives the chunk and nothing is recomputed in backward. At 4096 tokens and Llama 3's 128256
    words this holds 8 chunks of 0.25 GiB in turn where the plain loss holds 2 GiB of fp32 logits, twice.

    The head may be any module over the last dimension: tied, low-rank adapted, soft-capped.

    Args:
        num_output_chunks: number of chunks that the tokens are cut into.
        ignore_index: label that does not count.
    """

    def __init__(self, num_output_chunks: int = 8, ignore_index: int = IGNORE_INDEX) -> None:
        super().__init__()
        if num_output_chunks < 1:
            raise ValueError(f"num_output_chunks: expected at least 1, got {num_output_chunks}")
        self.num_output_chunks = num_output_chunks
        self.ignore_index = ignore_index

    def forward(
        self, hidden: Tensor, labels: Tensor, num_labels: int, head: Head, parameters: list[nn.Parameter]
    ) -> Tensor:
        """Sum of the cross-entropy over the labels that count, a 0-dim fp32 tensor.

        Args:
            hidden: what the head takes, shape [batch, tokens, dim].
            labels: int64, shape [batch, tokens], already shifted.
            num_labels: how many of them count; known on the host, so that nothing waits for the device.
            head: maps [tokens, dim] to logits [tokens, vocabulary].
            parameters: the head's parameters, for their gradients.
        """
        # Chunks without a label that counts (a prompt, padding) cost nothing.
        counts = (labels != self.ignore_index).reshape(-1)
        counted = torch.nonzero_static(counts, size=num_labels).squeeze(1)
        flat = hidden.reshape(-1, hidden.shape[-1]).index_select(0, counted)
        targets = labels.reshape(-1).index_select(0, counted)
        trainable = [p for p in parameters if p.requires_grad]
        if torch.is_grad_enabled() and (flat.requires_grad or trainable):
            return _FusedCrossEntropy.apply(flat, targets, head, self.num_output_chunks, *trainable)
        total = flat.new_zeros((), dtype=torch.float32)
        for chunk, target in _chunks(flat, targets, self.num_output_chunks):
            total += F.cross_entropy(head(chunk).float(), target, reduction="sum")
        return total


def _chunks(flat: Tensor, targets: Tensor, number: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(flat.chunk(number), targets.chunk(number), strict=True))


class _FusedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in forward, where the logits are at hand; backward only scales them, where they lie."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, targets: Tensor, head: Head, num_chunks: int, *parameters: nn.Parameter
    ) -> Tensor:
        total = flat.new_zeros((), dtype=torch.float32)
        flat_gradient = torch.empty_like(flat)
        sums = {parameter: _Sum() for parameter in parameters}
        start = 0
        for chunk, target in _chunks(flat, targets, num_chunks):
            with torch.enable_grad(), _LinearsAdd(sums):
                leaf = chunk.detach().requires_grad_()
                loss = F.cross_entropy(head(leaf).float(), target, reduction="sum")
            of_leaf, *of_parameters = torch.autograd.grad(loss, (leaf, *parameters), allow_unused=True)
            total += loss.detach()
            flat_gradient[start : start + len(chunk)] = of_leaf
            start += len(chunk)
            for parameter, gradient in zip(parameters, of_parameters, strict=True):
                if gradient is not None:
                    sums[parameter].add(gradient)
        ctx.gradients = [flat_gradient, *(sums[parameter].value for parameter in parameters)]
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of LinearCrossEntropyLoss are given out once: call it again")
        (flat, *of_parameters), ctx.gradients = ctx.gradients, None
        for gradient in (flat, *of_parameters):
            if gradient is not None:
                gradient.mul_(factor.to(gradient.dtype))
        return flat, None, None, None, *of_parameters


class _Sum:
    """A parameter's gradient over the chunks so far; None before the first that has one."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        self.value = gradient if self.value is None else self.value.add_(gradient)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left @ right`` without a tensor for it."""
        if self.value is None:
            self.value = torch.mm(left, right)
        else:
            self.value.addmm_(left, right)


class _LinearsAdd(TorchFunctionMode):
    """Linear layers add the gradients of the weights in ``sums`` there. A head's takes up to 2 GiB, and autograd would
    hold one of a chunk beside the sum."""

    def __init__(self, sums: Mapping[nn.Parameter, _Sum]) -> None:
        super().__init__()
        self._sums = sums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and 2 <= len(args) <= 3 and not kwargs and args[1] in self._sums:
            return _Linear.apply(args[0], args[1].detach(), args[2] if len(args) == 3 else None, self._sums[args[1]])
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, total: _Sum) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.total = total
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        gradient = grads[0].reshape(-1, grads[0].shape[-1])
        ctx.total.add_product(gradient.t(), input.reshape(-1, input.shape[-1]))
        return grads[0] @ weight, None, gradient.sum(0) if ctx.needs_input_grad[2] else None, None


class SummedLoss:
    """Model and loss together: a batch in, the loss summed over its labels out.

    Takes :class:`LinearCrossEntropyLoss`, losses over logits in chunks of tokens (torchtune's
    ``CEWithChunkedOutputLoss``), and any loss called as ``loss(logits [n, vocabulary], labels [n])`` that
    returns a mean over the labels that count (``torch.nn.CrossEntropyLoss``) or a sum (``reduction="sum"``).

    Args:
        model: the model in parts.
        loss: the loss component.
        compile: compile the loss with torch.compile.
    """

    def __init__(self, model: CausalLM, loss: Any, *, compile: bool = False) -> None:
        self._model = model
        self._loss = loss
        self._fused = isinstance(loss, LinearCrossEntropyLoss)
        self._num_chunks: int | None = getattr(loss, "num_output_chunks", None)
        if compile:
            self._compile()

    def _compile(self) -> None:
        if hasattr(self._loss, "compute_cross_entropy"):
            self._loss.compute_cross_entropy = torch.compile(self._loss.compute_cross_entropy)
        elif not self._fused:
            self._loss = torch.compile(self._loss)

    def __call__(self, inputs: dict[str, Any], labels: Tensor, num_labels: int) -> Tensor:
        """The sum of the loss over ``labels``, 0-dim.

        Args:
            inputs: what the model reads, see :class:`offload.models.protocol.CausalLM`.
            labels: int64, shape [batch, tokens], already shifted.
            num_labels: how many of them count.
        """
        if self._num_chunks is None or not self._model.has_separate_head:
            return self._of_logits(self._model.logits(inputs), labels, num_labels)
        hidden = self._model.hidden(inputs)
        if self._fused:
            return self._loss(hidden, labels, num_labels, self._model.head, self._model.head_parameters())
        logits = [self._model.head(chunk) for chunk in hidden.chunk(self._num_chunks, dim=1)]
        return self._of_logits(logits, labels, num_labels)

    def _of_logits(self, logits: Tensor | list[Tensor], labels: Tensor, num_labels: int) -> Tensor:
        if num_labels == 0:
            # A mean over nothing is nan; the sum is 0, with a graph behind it.
            return (
                0.0 * torch.stack([part.sum() for part in ([logits] if isinstance(logits, Tensor) else logits)]).sum()
            )
        if isinstance(logits, list):
            return self._loss(logits, labels) * num_labels
        flat, targets = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
        if self._fused:
            return F.cross_entropy(flat, targets, ignore_index=self._loss.ignore_index, reduction="sum")
        if self._num_chunks is not None:
            return self._loss(list(logits.chunk(self._num_chunks, dim=1)), labels) * num_labels
        value = self._loss(flat, targets)
        return value if getattr(self._loss, "reduction", "mean") == "sum" else value * num_labels

"""What the recipes and the loss see of a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn


class CausalLM(Protocol):
    """A language model in parts, so that the loss can apply the head chunk by chunk.

    Attributes:
        module: what is trained, and what an optimizer waits for layer by layer.
        has_separate_head: :meth:`head` after :meth:`hidden` gives the model's logits. Where it does not, the model does
            more to its logits than is known here, and only :meth:`logits` can be used.
    """

    module: nn.Module
    has_separate_head: bool

    def hidden(self, inputs: Mapping[str, Any]) -> Tensor:
        """What the head takes, shape [batch, tokens, dim].

        Args:
            inputs: ``tokens`` int64 [batch, tokens]; ``input_pos`` of the same shape where a row holds several
                documents, each counting from 0; ``mask`` for models that do not tell documents by their positions.
        """

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of ``hidden`` [..., dim], as the loss takes them."""

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`head` reads."""

    def logits(self, inputs: Mapping[str, Any]) -> Tensor:
        """Logits of the whole model, shape [batch, tokens, vocabulary]."""

    def checkpoint_activations(self) -> None:
        """Keep each layer's input alone in forward and compute the layer again in backward."""

    def compile_layers(self) -> None:
        """Compile each layer in place; the first step pays for it."""

"""What the recipes and the loss see of a language model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from offload.models.size import Size


class CausalLM(Protocol):
    """A language model in parts, so that the loss can apply the head chunk by chunk.

    Attributes:
        module: what is trained, and what an optimizer waits for layer by layer.
        has_separate_head: :meth:`head` after :meth:`hidden` gives the model's logits. Where it does not, the model does
            more to its logits than is known here, and only :meth:`logits` can be used.
    """

    module: nn.Module
    has_separate_head: bool

    @property
    def max_seq_len(self) -> int | None:
        """The longest sequence that it takes; None where nothing limits it."""

    def size(self) -> Size:
        """How large it is, for the arithmetic of a step."""

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

    def check_packs(self) -> None:
        """Before it is called with packs.

        Raises:
            UserError: for a model that does not keep the documents of a pack apart.
        """

    def checkpoint_activations(self) -> None:
        """Keep each layer's input alone in forward and compute the layer again in backward."""

    def offload_activations(self) -> contextlib.AbstractContextManager[Any]:
        """A context for forward in which what is kept for backward goes to host memory, and comes back for it."""

    def compile_layers(self) -> None:
        """Compile each layer in place; the first step pays for it."""


class AdaptedLM(CausalLM, Protocol):
    """A frozen model with an adapter that trains."""

    def adapter_weights(self) -> dict[str, Tensor]:
        """The adapter's tensors, where they are."""

    def adapter_config(self) -> dict[str, Any]:
        """Fields of peft's ``LoraConfig``, with the model's names."""

    def merged_weights(self) -> Mapping[str, Tensor]:
        """The model's weights with the adapter merged in; the live model is not touched."""


class ModelFormat(Protocol):
    """How the weights of a kind of model are read and written in checkpoints.

    Attributes:
        directory: of the base model, absolute.
        key: the configuration's key that named it, for messages.
    """

    @property
    def directory(self) -> Path: ...

    @property
    def key(self) -> str: ...

    def prepare(self, output_dir: Path) -> None:
        """Once, before anything else; ``output_dir`` is the run's folder."""

    def load(self, folder: Path, files: Sequence[str]) -> dict[str, Tensor] | None:
        """The weights in ``files`` of a checkpoint, under the model's names, on the CPU; None where the model reads
        them itself when it is built.

        Raises:
            UserError: if they are not this model's.
        """

    def write_model(self, folder: Path, weights: Mapping[str, Tensor], written: Callable[[Path], None]) -> None:
        """Write weights and what belongs to them (configuration, tokenizer) so that ``from_pretrained`` opens it.

        Args:
            folder: is there.
            weights: under the model's names.
            written: told each weight file when it is written.
        """

    def write_adapter(self, folder: Path, adapter: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Write an adapter as peft opens it.

        Args:
            folder: is made.
            adapter: under the model's names.
            config: fields of peft's ``LoraConfig``, with the model's names.
        """

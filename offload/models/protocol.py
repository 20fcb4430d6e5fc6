"""What the recipes and the loss see of a language model, whichever library it is of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offload.models.merging import MergedWeights
from offload.models.shares import WeightFile
from offload.models.size import Size

NF4_BYTES = 0.5 + (1 + 4 / 256) / 64
"""Per weight in 4 bits: a scale of 8 bits for 64 of them, and one of fp32 for 256 scales
(https://arxiv.org/abs/2305.14314)."""


@dataclass(frozen=True)
class Packed:
    """The weights of a model that take other bytes than their dtype's, in memory or in its files.

    Attributes:
        weights: that are in 4 bits in memory; they are frozen.
        nbytes: of each element of those, with its part of the scales.
        dequantized: the format of its files' weights, where they become plain ones; empty where they are.
    """

    weights: Sequence[nn.Parameter] = ()
    nbytes: float = NF4_BYTES
    dequantized: str = ""

    @property
    def elements(self) -> int:
        """Of :attr:`weights`."""
        return sum(weight.numel() for weight in self.weights)


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
                With ``input_pos`` also ``document_ends``, int32 [documents + 1] from 0, in all rows one after the
                other, and ``longest_document``, so many tokens, where that is known to the host.
        """

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of ``hidden`` [..., dim], as the loss takes them."""

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`head` reads."""

    def blocks(self) -> list[nn.Module]:
        """Parts of :attr:`module` whose weights several processes gather one part at a time: each is called as a
        module, and shares no parameter with what is outside of it."""

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

    def settle(self) -> None:
        """Find out what its weights tell of how to call it, when they have come after it was built."""

    def compile_layers(self) -> None:
        """Compile each layer in place; the first step pays for it."""


class AdaptedLM(CausalLM, Protocol):
    """A frozen model with an adapter that trains."""

    def adapter_weights(self) -> dict[str, Tensor]:
        """The adapter's tensors, where they are."""

    def adapter_config(self) -> dict[str, Any]:
        """Fields of peft's ``LoraConfig``, with the model's names."""

    def merged_weights(self, *, goes_on: bool = False) -> MergedWeights:
        """The model's weights with the adapter merged in; the live model is not touched.

        ``goes_on``: the adapter trains on while weights are asked for, which are of its values as they are now."""


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

    def begin_model(self, folder: Path, empty: Mapping[str, Tensor]) -> list[WeightFile]:
        """Write what :meth:`write_model` writes besides the weights, of a model whose parts several ranks have.

        Args:
            folder: is there.
            empty: the weights under the model's names, on the meta device.

        Returns:
            The files that the weights go into, the same as :meth:`write_model` makes.
        """

    def in_files(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights under the model's names as those files have them; all of them, or what belongs together."""

    def write_adapter(self, folder: Path, adapter: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Write an adapter as peft opens it.

        Args:
            folder: is made.
            adapter: under the model's names.
            config: fields of peft's ``LoraConfig``, with the model's names.
        """


class ModelSource(Protocol):
    """Makes the model of a run, with the weights that it begins with.

    Attributes:
        masks_documents: the model tells the documents of a pack by a mask; otherwise by their positions.
    """

    masks_documents: bool

    def can_fill(self, *, adapts: bool) -> bool:
        """Whether :meth:`fill` reads its weights: not where they are packed, in files or in memory, and not where an
        adapter begins with their values.

        Args:
            adapts: an adapter trains, and not the whole model.
        """

    @property
    def format(self) -> ModelFormat:
        """How its weights are read and written."""

    def outline(self, *, adapts: bool) -> CausalLM:
        """The model that trains, on the meta device: names, shapes and what is frozen. No weight is read.

        Args:
            adapts: an adapter trains, and not the whole model.

        Raises:
            UserError: as :meth:`full` or :meth:`adapted`, but for what only the weights tell.
        """

    def full(self, saved: Mapping[str, Tensor] | None, folder: Path | None) -> CausalLM:
        """The model to train whole.

        Args:
            saved: the weights of the checkpoint to go on from, where :attr:`format` reads them.
            folder: of that checkpoint; None to begin with the base model.
        """

    def empty(self) -> CausalLM:
        """The model to train whole, as :meth:`full` gives it, but on the meta device, to be divided among processes and
        then filled."""

    def empty_adapted(self, adapter: Mapping[str, Tensor] | None, folder: Path | None) -> AdaptedLM:
        """The base model with an adapter to train, as :meth:`adapted` gives it, but the base on the meta device; the
        adapter, which is small, is on the CPU."""

    def fill(self, model: CausalLM, folder: Path | None, device: torch.device) -> None:
        """Give a model memory and weights, of which each process reads its part from the files.

        Args:
            model: of :meth:`empty` or :meth:`empty_adapted`, divided.
            folder: of the checkpoint to go on from; None to begin with the base model.
            device: of this process.

        Raises:
            UserError: as :meth:`full`.
        """

    def adapted(self, adapter: Mapping[str, Tensor] | None, folder: Path | None) -> AdaptedLM:
        """The base model with an adapter to train.

        Args:
            adapter: of the checkpoint to go on from; None where it has none.
            folder: of that checkpoint; None to begin with an adapter that changes nothing.
        """


class Answerer(Protocol):
    """A model that answers.

    Attributes:
        context: tokens that a prompt and its answer may have together; None where nothing limits them.
    """

    context: int | None

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a prompt, in the template of training, with the turn of the answer opened.

        Args:
            messages: with ``role`` and ``content``.
        """

    def reserve(self, tokens: int) -> None:
        """Before the first answer: prompt and answer have at most so many tokens."""

    def answer(
        self,
        prompt: Sequence[int],
        show: Callable[[str], None],
        *,
        max_new_tokens: int,
        seed: int | None,
        use_cache: bool,
    ) -> list[int]:
        """The token ids of an answer, without the one that ends it.

        Args:
            prompt: token ids.
            show: called with the answer's text, piece by piece or at once.
            max_new_tokens: its length at most.
            seed: of the choice of tokens; None for another one each time.
            use_cache: keep what was computed for earlier tokens.
        """


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen; where it says nothing, as the model's own settings do.

    Attributes:
        temperature: 0 for the likeliest token each time.
        top_k: choose among so many likeliest tokens; 0 for all.
        top_p: choose among the likeliest that have this probability together.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class SavedRuns(Protocol):
    """Reads what training runs left, for models that were one of them."""

    def newest(self, folder: Path) -> Path | None:
        """The checkpoint in a run's folder that was saved last; None where there is none."""

    def config(self, folder: Path) -> Mapping[str, Any] | None:
        """The configuration of the run that saved a checkpoint; None where the folder is none."""

    def adapter(self, folder: Path, format: ModelFormat) -> Mapping[str, Tensor] | None:
        """The adapter in a checkpoint, under the model's names."""

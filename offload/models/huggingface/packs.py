"""The documents of a pack in a transformers model: what it is called with, and whether it keeps them apart.

Most classes find documents by positions that begin anew, and make a mask of them; those with flash attention do it for
a single row only. Some make their mask without looking at positions (gpt-oss, OPT), and state-space layers and
convolutions have no mask at all. No list says which: a trial does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from offload.errors import UserError

LENGTHS = ((14, 10), (8, 16))
"""Tokens of the trial's documents, in each row; more than a convolution's kernel or a tiny sliding window."""
APART = 1e-5
"""How far logits may move that should stay, relative to the largest, in fp32."""
APART_16_BIT = 1e-3
"""The same in bf16 and fp16. They move by nothing, but where another number of tokens changes how a kernel sums."""
NOISE, MOST_NOISE = 4.0, 2**-5
"""A model's experts get other numbers of tokens when another row changes: so many times that is taken for noise, up to
a limit."""


PLACE, PLACE_16_BIT = 1e-5, 0.05
"""How far a document's logits may move with its place in a pack, as a norm: kernels sum in another order there."""


class Packs:
    """Calls a model with packs, and without.

    Args:
        model: of transformers, or of peft around one.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._makes_masks = False
        self._takes_ends = False

    def arguments(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The model's keyword arguments for ``tokens`` and what is told of documents.

        There is nothing to cache in training.

        Args:
            inputs: as :meth:`offload.models.protocol.CausalLM.hidden` takes them.
        """
        tokens, positions = inputs["tokens"], inputs.get("input_pos")
        arguments = {"input_ids": tokens, "use_cache": False}
        if positions is None:
            if self._takes_ends and len(tokens) == 1:
                arguments |= _ends(
                    torch.arange(0, tokens.numel() + 1, tokens.numel(), device=tokens.device), tokens.numel()
                )
            return arguments
        if self._in_one_row:
            arguments["input_ids"], positions = tokens.reshape(1, -1), positions.reshape(1, -1)
            if self._takes_ends and "document_ends" in inputs:
                arguments |= _ends(inputs["document_ends"], inputs["longest_document"])
        arguments["position_ids"] = positions
        if self._makes_masks:
            arguments["attention_mask"] = self._masks(positions)
        return arguments

    @contextlib.contextmanager
    def _told(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """A context for forward in which the host does not wait for the device to learn whether there are documents.

        transformers looks for them in the positions, and asks the device whether it found any, before each forward.
        """
        from transformers import masking_utils

        has_documents = inputs.get("input_pos") is not None

        def find(position_ids: Tensor) -> Tensor | None:
            if not has_documents:
                return None
            step = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
            return (step != 1).cumsum(-1)

        asks = masking_utils.find_packed_sequence_indices
        masking_utils.find_packed_sequence_indices = find
        try:
            yield
        finally:
            masking_utils.find_packed_sequence_indices = asks

    def call(self, forward: Callable[[dict[str, Any]], Tensor], inputs: Mapping[str, Any]) -> Tensor:
        """What ``forward`` makes of the model's keyword arguments for ``inputs``, as [batch, tokens, dim]."""
        with self._told(inputs):
            output = forward(self.arguments(inputs))
        return output.reshape(*inputs["tokens"].shape, output.shape[-1])

    @torch.no_grad()
    def check(self) -> None:
        """Try whether documents are kept apart, and find out what it takes.

        Raises:
            UserError: where they are not.
        """
        with self._in_evaluation():
            for self._makes_masks in (False, True):
                if self._keeps_apart():
                    return
        base = self._model.get_base_model() if hasattr(self._model, "get_base_model") else self._model
        raise UserError(
            f"dataset.packed: {type(base).__name__} does not keep the documents of a pack apart (layers that carry a "
            "state from token to token, or a mask that does not look at positions): what it says in one changes with "
            "another; set dataset.packed=False"
        )

    @torch.no_grad()
    def settle(self) -> None:
        """Find out whether flash attention can be told where documents end.

        Otherwise transformers looks for them in the positions, and each layer of a single row waits for the device.
        """
        if not self._in_one_row:
            return
        tokens = {"tokens": self._tokens()[:1]}
        with self._in_evaluation():
            expected = self._model(**self.arguments(tokens)).logits
            self._takes_ends = True
            try:
                found = self._model(**self.arguments(tokens)).logits
                bound = PLACE if expected.dtype == torch.float32 else PLACE_16_BIT
                self._takes_ends = float((found - expected).float().norm() / expected.float().norm()) <= bound
            except torch.OutOfMemoryError:
                raise
            except Exception:  # classes that take no such arguments fail in as many ways
                self._takes_ends = False

    @contextlib.contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        was_training = self._model.training
        self._model.eval()
        try:
            yield
        finally:
            self._model.train(was_training)

    @property
    def _in_one_row(self) -> bool:
        return "flash" in str(self._model.config._attn_implementation)

    def _keeps_apart(self) -> bool:
        if getattr(self._model.config.get_text_config(), "index_topk", None):
            # DeepSeek's sparse attention chooses tokens, or compressed windows of up to 128, among all of a row. The
            # trial is too short for it to have a choice. In V3.2 it stays within documents, but of equal scores (its
            # ReLU gives zeros) it takes those that come first in the row: one such token of a tiny model moved
            # gradients by 0.18 of the largest.
            return False
        try:
            return self._is_told_positions() and self._sees_no_other()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # classes that take no positions, or other masks, fail in as many ways
            return False

    def _is_told_positions(self) -> bool:
        """Whether the model counts from 0 by itself, and a document's place in a pack changes nothing."""
        first, second = self._tokens()[0].split(LENGTHS[0])
        alone = self._model(input_ids=first[None], use_cache=False).logits
        counted = self._logits(first[None], torch.arange(len(first), device=first.device)[None])
        forth, back = (self._in_order(*order) for order in ((first, second), (second, first)))
        moved = float((forth - back.roll(len(first), 1)).float().norm() / forth.float().norm())
        is_exact = alone.dtype == torch.float32
        return _relative(counted - alone, alone) <= (APART if is_exact else APART_16_BIT) and moved <= (
            PLACE if is_exact else PLACE_16_BIT
        )

    def _in_order(self, *documents: Tensor) -> Tensor:
        positions = torch.cat([torch.arange(len(one), device=one.device) for one in documents])
        return self._logits(torch.cat(documents)[None], positions[None])

    def _tokens(self) -> Tensor:
        count = sum(LENGTHS[0])
        tokens = torch.arange(len(LENGTHS) * count, device=next(self._model.parameters()).device)
        return ((tokens * 5 + 7) % self._model.config.get_text_config().vocab_size).reshape(-1, count)

    def _sees_no_other(self) -> bool:
        tokens = self._tokens()
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS]).to(tokens.device)
        first = LENGTHS[0][0]
        expected = self._logits(tokens, positions)
        # No token sees a later one, and no row another: what moves the first row when the second changes is noise.
        moved_by_row = self._moved(tokens, positions, expected, changed=(1, slice(None)), looked_at=(0, slice(None)))
        moved = self._moved(tokens, positions, expected, changed=(0, slice(first)), looked_at=(0, slice(first, None)))
        bound = APART if expected.dtype == torch.float32 else APART_16_BIT
        return moved <= max(bound, min(NOISE * moved_by_row, MOST_NOISE))

    def _moved(self, tokens: Tensor, positions: Tensor, expected: Tensor, *, changed: Any, looked_at: Any) -> float:
        """How far the logits at one place move, relative to the largest, when tokens at another are others."""
        others = tokens.clone()
        others[changed] = (others[changed] + 1) % self._model.config.get_text_config().vocab_size
        return _relative((self._logits(others, positions) - expected)[looked_at], expected)

    def _logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        starts = (positions.reshape(-1) == 0).nonzero().reshape(-1)
        ends = torch.cat([starts, starts.new_tensor([positions.numel()])])
        longest = int(ends.diff().max())
        inputs = {"tokens": tokens, "input_pos": positions, "document_ends": ends, "longest_document": longest}
        return self.call(lambda arguments: self._model(**arguments).logits, inputs)

    def _masks(self, positions: Tensor) -> Any:
        """What the class would make if it looked at the positions; for kinds of layers a mapping."""
        from transformers.masking_utils import create_masks_for_generate

        weight = self._model.get_input_embeddings().weight
        return create_masks_for_generate(
            self._model.config.get_text_config(),
            inputs_embeds=weight.new_empty((*positions.shape, 1)),  # looked at for its shape, device and dtype
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )


def _ends(ends: Tensor, longest: int) -> dict[str, Any]:
    """What transformers' ``FlashAttentionKwargs`` tell of documents, so that no layer looks for them."""
    ends = ends.to(torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _relative(difference: Tensor, of: Tensor) -> float:
    return float(difference.float().abs().max()) / max(float(of.float().abs().max()), 1e-30)

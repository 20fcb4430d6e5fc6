"""The head of a transformers model by itself: its input, and what the model does to its output.

Hundreds of classes call their head somewhere in ``forward`` and scale or cap the logits afterwards. The head is
found by ``get_output_embeddings()``, its input by standing in for it during one call, and what happens to the logits
by the values of the configuration that are known to do it. A trial shows whether that was all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]

TRIAL_TOKENS = 8


class Head:
    """Output projection of a model, apart from the rest.

    Args:
        model: a transformers model with an output projection.
        config: of its language part.

    Raises:
        ValueError: for a model without an output projection.
    """

    def __init__(self, model: Any, config: Any) -> None:
        module = model.get_output_embeddings()
        if not isinstance(module, nn.Module):
            raise ValueError(f"{type(model).__name__} has no output projection (get_output_embeddings)")
        self.module = module
        self._model = model
        self._vocabulary: int = config.vocab_size
        self._changes = _known_changes(config)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary], changed as the model changes them, of ``hidden`` [..., dim]."""
        logits: Tensor = self.module(hidden)
        for change in self._changes:
            logits = change(logits)
        return logits

    def input_of(self, inputs: dict[str, Any]) -> Tensor:
        """What the model hands to its head, shape [batch, tokens, dim]; the projection is not computed."""
        with self._standing_in(lambda hidden: hidden[..., :1]) as seen:
            self._model(**inputs)
        return seen.pop()

    @torch.no_grad()
    def is_whole(self, device: torch.device) -> bool:
        """Whether the head on its own input gives the model's logits, by trying it on a few tokens."""
        tokens = torch.arange(min(TRIAL_TOKENS, self._vocabulary), device=device).unsqueeze(0)
        was_training = self._model.training
        self._model.eval()
        try:
            expected = self._model(input_ids=tokens, use_cache=False).logits
            hidden = self.input_of({"input_ids": tokens, "use_cache": False})
            if hidden.shape[:2] != tokens.shape:
                return False
            got = self(hidden)
        finally:
            self._model.train(was_training)
        if got.shape != expected.shape:
            return False
        # The same operations on the same values; a model may round to 16 bits before or after it scales.
        return torch.allclose(got.float(), expected.float(), rtol=2**-7, atol=1e-5 * float(expected.abs().max()))

    @contextmanager
    def _standing_in(self, answer: Change) -> Iterator[list[Tensor]]:
        """Inside, the head keeps what it is called with and answers with ``answer`` of it."""
        seen: list[Tensor] = []

        def stand_in(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
            seen.append(hidden)
            return answer(hidden)

        # On the instance, so that its hooks run: an optimizer waits there for the head's update.
        self.module.forward = stand_in
        try:
            yield seen
        finally:
            del self.module.forward


def _known_changes(config: Any) -> list[Change]:
    """What models do to their logits, by the configuration's key."""
    changes: list[Change] = []
    factor = getattr(config, "logit_scale", None)  # Cohere
    if factor:
        changes.append(lambda logits: logits * factor)
    divisor = getattr(config, "logits_scaling", None)  # Granite
    if divisor:
        changes.append(lambda logits: logits / divisor)
    multiplier = getattr(config, "lm_head_multiplier", None)  # Falcon H1
    if multiplier:
        changes.append(lambda logits: logits * multiplier)
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and later
    if cap:
        changes.append(lambda logits: torch.tanh(logits / cap) * cap)
    return changes

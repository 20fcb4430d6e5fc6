"""The head of a transformers model by itself: its input, and what the model does to its output.

Hundreds of classes call their head somewhere in ``forward`` and scale or cap the logits afterwards. The head is
found by ``get_output_embeddings()``, its input by standing in for it during one call, and what happens to the logits
by the values of the configuration that are known to do it. A trial shows whether that was all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import UserError, first_line, raise_shortage

Change = Callable[[Tensor], Tensor]

TRIAL_TOKENS = 8
ROUNDING = 2**-16
"""How far logits may be apart, relative to the largest; where the dtype is coarser, by its own rounding: a model may
round before or after it scales them."""
LOOKS_AHEAD = 0.02
"""The same, from a change of later tokens. It is 0 in a causal model, but that a kernel may round differently."""


class Head:
    """Output projection of a model, apart from the rest.

    Args:
        model: a transformers model with an output projection.
        config: of its language part.

    Attributes:
        changes: what the model does to the projection's output.

    Raises:
        UserError: for a model without an output projection, or one whose logits depend on later tokens.
    """

    def __init__(self, model: Any, config: Any) -> None:
        module = model.get_output_embeddings()
        if not isinstance(module, nn.Module):
            raise UserError(f"model.path: {type(model).__name__} has no output projection, so it is no language model")
        self.module = module
        self._model = model
        self._vocabulary: int = config.vocab_size
        self.changes = _known_changes(config)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary], changed as the model changes them, of ``hidden`` [..., dim]."""
        logits: Tensor = self.module(hidden)
        for change in self.changes:
            logits = change(logits)
        return logits

    def input_of(self, inputs: dict[str, Any]) -> Tensor:
        """What the model hands to its head, shape [batch, tokens, dim]; the projection is not computed."""
        with self._standing_in(lambda hidden: hidden[..., :1]) as seen:
            self._model(**inputs)
        return seen.pop()

    @torch.no_grad()
    def is_whole(self, device: torch.device) -> bool:
        """Whether the head on its own input gives the model's logits, by trying it on a few tokens.

        On the meta device, where nothing can be tried, it is taken to.

        Raises:
            UserError: where the logits of a token depend on the tokens after it, where the model needs more than
                tokens, or where it changes its own weights.
        """
        if device.type == "meta":
            return True
        versions = {name: param._version for name, param in self._model.named_parameters()}
        try:
            separate = self._try(device)
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # hundreds of classes raise what they like
            raise_shortage(error)
            raise UserError(
                f"model.path: {type(self._model).__name__} cannot be called with tokens alone: "
                f"{type(error).__name__}: {first_line(error)[:300]}"
            ) from error
        for name, param in self._model.named_parameters():
            if param._version != versions[name]:
                raise UserError(
                    f"model.path: {type(self._model).__name__} changes {name} when it is called in evaluation, and an "
                    "optimizer cannot hold a copy of it (for rwkv, set rescale_every to 0 in its config.json)"
                )
        return separate

    def _try(self, device: torch.device) -> bool:
        tokens = torch.arange(min(TRIAL_TOKENS, self._vocabulary), device=device).unsqueeze(0)
        was_training = self._model.training
        self._model.eval()
        try:
            half = tokens.shape[1] // 2
            others = torch.cat([tokens[:, :half], tokens[:, :half]], dim=1)
            tokens = torch.cat([tokens, others])
            arguments = {"input_ids": tokens, "use_cache": False}
            decoder = self._decoder()
            with _watched(decoder) as outputs:
                expected: Tensor = self._model(**arguments).logits
            if _relative(expected[1, :half] - expected[0, :half], expected) > LOOKS_AHEAD:
                raise UserError(
                    f"model.path: {type(self._model).__name__} looks ahead: what it says of a token depends on the "
                    "tokens after it, so it cannot be trained to predict them (an encoder? set is_decoder in its "
                    "config.json if it has one)"
                )
            if decoder is not None and len(outputs) == 1:
                # What follows the layers is called again, they are not: they take most of the time.
                with _answering(decoder, outputs[0]):
                    if self._fits(arguments, expected):
                        return True
            return self._fits(arguments, expected)
        finally:
            self._model.train(was_training)

    def _fits(self, arguments: dict[str, Any], expected: Tensor) -> bool:
        """Whether the head on its own input gives the expected logits; settles :attr:`changes`."""
        hidden = self.input_of(arguments)
        if hidden.shape[:2] != arguments["input_ids"].shape:
            return False
        # Not every class does what its configuration has a key for.
        known = self.changes
        for self.changes in (known, []):
            got = self(hidden)
            bound = max(torch.finfo(got.dtype).eps, ROUNDING)
            if got.shape == expected.shape and _relative(got - expected, expected) < bound:
                return True
        self.changes = known
        return False

    def _decoder(self) -> nn.Module | None:
        """The part of the model that the head comes after, if it is one."""
        try:
            decoder = self._model.get_decoder()
        except (AttributeError, NotImplementedError):
            return None
        is_apart = isinstance(decoder, nn.Module) and decoder is not self._model
        return decoder if is_apart and all(part is not self.module for part in decoder.modules()) else None

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


@contextmanager
def _watched(module: nn.Module | None) -> Iterator[list[Any]]:
    """Inside, what the module gives is kept."""
    outputs: list[Any] = []
    if module is None:
        yield outputs
        return
    hook = module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        hook.remove()


@contextmanager
def _answering(module: nn.Module, output: Any) -> Iterator[None]:
    """Inside, the module gives ``output`` and computes nothing."""
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.forward


def _relative(difference: Tensor, of: Tensor) -> float:
    return float(difference.float().abs().max()) / max(float(of.float().abs().max()), 1e-30)


def _known_changes(config: Any) -> list[Change]:
    """What models do to their logits, by the configuration's key."""
    changes: list[Change] = []
    factor = getattr(config, "logit_scale", None)  # Cohere
    if factor:
        changes.append(lambda logits: logits * factor)
    divisor = getattr(config, "logits_scaling", None)  # Granite
    if divisor:
        changes.append(lambda logits: logits / divisor)
    for key in ("lm_head_multiplier", "output_multiplier"):  # Falcon H1, Muse Glimmer
        multiplier = getattr(config, key, None)
        if multiplier:
            changes.append(partial(torch.mul, other=multiplier))
    for key in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):  # Gemma, Griffin, xLSTM
        cap = getattr(config, key, None)
        if cap:
            changes.append(partial(_capped, cap=cap))
    return changes


def _capped(logits: Tensor, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap

"""Tokenizers to try things on, made on the spot."""

from __future__ import annotations

import functools
import io


@functools.cache
def sentencepiece_model() -> bytes:
    """A small SentencePiece model with byte fallback, trained on what Python says about strings."""
    import sentencepiece

    sentences = [line for name in dir(str) for line in str(getattr(str, name).__doc__).splitlines() if line.strip()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=400, model_type="bpe", byte_fallback=True,
        num_threads=1, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return model.getvalue()

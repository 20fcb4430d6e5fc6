"""A tokenizer and the embedding that its tokens look up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offload.errors import UserError


def check_vocabulary(tokenizer: Any, rows: int | None, *, checkpoint: str) -> None:
    """Refuse a tokenizer that makes token ids for which the model's embedding has no row.

    Args:
        tokenizer: its ``vocab_size``, special tokens and ``…_id`` attributes are read, as far as it has them.
        rows: of the embedding; None where they are not known.
        checkpoint: the configuration's key that names the model's folder, for the message.

    Raises:
        UserError: names both sizes.
    """
    largest = max(_token_ids(tokenizer), default=None)
    if rows is None or largest is None or largest < rows:
        return
    raise UserError(
        f"tokenizer: it has {largest + 1} tokens, the model's embedding has {rows} rows: set tokenizer.path to the "
        f"tokenizer that belongs to {checkpoint}"
    )


def _token_ids(tokenizer: Any) -> Iterator[int]:
    """The largest ids that text can become. Images are not text: Llama 3's ``<|image|>`` has no row."""
    for name in ("base_vocab_size", "vocab_size"):
        size = getattr(tokenizer, name, None)
        if isinstance(size, int) and size > 0:
            yield size - 1
            break
    special = getattr(tokenizer, "special_tokens", None)
    if isinstance(special, Mapping):
        yield from (i for token, i in special.items() if isinstance(i, int) and token != "<|image|>")
    for name, value in getattr(tokenizer, "__dict__", {}).items():
        if name.endswith("_id") and name != "image_id" and isinstance(value, int):
            yield value

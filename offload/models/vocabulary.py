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


def end_warning(tokenizer: Any, config: Any) -> str | None:
    """What a tokenizer looks like that belongs to another model with no more tokens; None where it does not.

    Args:
        tokenizer: with transformers' in ``hf``; others are not looked at.
        config: of a model of transformers.
    """
    ends = getattr(config.get_text_config(), "eos_token_id", None)
    hf = getattr(tokenizer, "hf", None)
    if hf is None or ends is None:
        return None
    special = {*hf.all_special_ids, *hf.added_tokens_decoder}
    for end in ends if isinstance(ends, list) else [ends]:
        if end not in special:
            token = hf.convert_ids_to_tokens(end) if end < len(hf) else None
            what = "it has no such token" if token is None else f"in the tokenizer that is {token!r}, part of a word"
            return (
                f"tokenizer: config.json of the model says that token {end} ends a text, and {what}: is it the "
                "model's? It comes from tokenizer.path"
            )
    return None


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

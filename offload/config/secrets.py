"""What a configuration must not carry into files that are kept and shared: tokens, keys, passwords.

A checkpoint's ``recipe_state.pt``, ``run.json`` and wandb get the configuration with these values replaced. What the
run itself reads stays as it was given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from offload.config.yaml_files import walk

MASK = "***"

# A whole word of a key, at its end: max_new_tokens, pad_token and tokenizer are none.
_SECRET_KEY = re.compile(
    r"(?:^|_)(?:password|passwd|passphrase|secret|secrets|credential|credentials|authorization|api_?token|(?:api|access|private"
    r"|secret)_?key|(?:hf|hub|auth|access|bearer|refresh|session|use_auth|huggingface|wandb|github)_?token)$|^token$"
)

# What such values look like under any key: a Hugging Face, OpenAI or GitHub token; a password in an address.
_SECRET_TEXT = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,})"
    r"|(?<=://)[^\s/@:]*:[^\s/@]+(?=@)"
)

_SHORTEST = 6
"""Characters of a secret that is also looked for inside other values; a shorter one would be found by chance."""


def is_secret_key(key: str) -> bool:
    """Whether a value under ``key`` is to be kept out of files."""
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(key)).replace("-", "_").lower()
    return bool(_SECRET_KEY.search(snake))


def masked(tree: Any) -> Any:
    """A copy of plain containers with :data:`MASK` for each secret, wherever it stands.

    Args:
        tree: nested dicts and lists, interpolations resolved.
    """
    return _masked(tree, _secret_texts(tree), is_secret=False)


def masked_words(words: Sequence[str], tree: Any) -> list[str]:
    """A command line without the secrets of the configuration that it makes; wandb keeps ``sys.argv``.

    Args:
        words: arguments, overrides among them.
        tree: the configuration with those overrides, interpolations not resolved.
    """
    texts = _secret_texts(tree)
    shown = []
    for word in words:
        key, equals, value = word.partition("=")
        is_secret = bool(equals) and is_secret_key(key.rpartition(".")[2].lstrip("+-"))
        shown.append(
            f"{key}={_masked(value, [], is_secret=True)}" if is_secret else _masked(word, texts, is_secret=False)
        )
    return shown


def _secret_texts(tree: Any) -> list[str]:
    """Texts that stand under keys of secrets, the longest first."""
    texts = {
        str(value)
        for at, value in walk(tree)
        if any(is_secret_key(str(part)) for part in at) and _is_text(value) and len(str(value)) >= _SHORTEST
    }
    return sorted(texts, key=len, reverse=True)


def _masked(value: Any, texts: list[str], *, is_secret: bool) -> Any:
    if isinstance(value, dict):
        return {
            key: _masked(each, texts, is_secret=is_secret or is_secret_key(str(key))) for key, each in value.items()
        }
    if isinstance(value, list):
        return [_masked(each, texts, is_secret=is_secret) for each in value]
    if is_secret and _is_text(value):
        return MASK
    if isinstance(value, str):
        for text in texts:
            value = value.replace(text, MASK)
        return _SECRET_TEXT.sub(MASK, value)
    return value


def _is_text(value: Any) -> bool:
    """``token: true`` (use the login) and ``token: null`` are no secrets, nor is an empty one."""
    return isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != ""


def resolved_and_masked(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as it may be written: plain containers, interpolations resolved, secrets masked."""
    content = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(content, dict)
    return masked({str(key): value for key, value in content.items()})

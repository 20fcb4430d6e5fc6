"""The tokenizer component: its files are looked at before it is built, and what it gives before it is used."""

from __future__ import annotations

import base64
import contextlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from offload.component import nearest
from offload.config.loading import instantiate
from offload.errors import UserError
from offload.paths import expanded

_PROBE = "Hello"
_USUAL_NAMES = ("tokenizer.model", "original/tokenizer.model", "vocab.json", "tokenizer.json", "merges.txt")


def build_tokenizer(section: DictConfig) -> Any:
    """The ``tokenizer`` component.

    Raises:
        UserError: a file of it is missing, is no file, cannot be read as what the component expects, or gives no
            tokens that a model could take.
    """
    key = section._get_full_key(None) or "tokenizer"
    try:
        arguments = OmegaConf.to_container(section, resolve=True)
    except OmegaConfBaseException:
        return instantiate(section)  # says which value it is
    assert isinstance(arguments, dict)
    component = str(arguments.get("_component_"))
    files: dict[str, Any] = {}
    if component.startswith("torchtune."):  # which reads files alone; what others take for a path is theirs to judge
        files = {
            str(name): value for name, value in arguments.items() if _names_a_file(str(name)) and value is not None
        }
    for name, value in files.items():
        path = _existing_file(f"{key}.{name}", value)
        if (problem := _tiktoken_problem(path)) is not None:
            raise UserError(f"{key}.{name}: {path} is no whole tiktoken file: {problem}; download it again")
    try:
        with _own_files_only() if files else contextlib.nullcontext():
            tokenizer = instantiate(section)
    except UserError as error:
        # What the user's arguments are to blame for says so; what is raised while a file is read is about the file.
        cause = error.__cause__
        if not files or cause is None or isinstance(cause, UserError) or not _while_reading(cause):
            raise
        raise UserError(_unreadable(key, files, component, cause)) from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of tokenizers' or tiktoken's Rust code is no Exception
        raise UserError(_unreadable(key, files, component, error)) from error
    _check_tokens(tokenizer, key, files)
    return tokenizer


def _names_a_file(argument: str) -> bool:
    return argument in ("path", "merges_file") or argument.endswith(("_path", "_file"))


def _existing_file(key: str, value: Any) -> Path:
    path = expanded(str(value), key)
    if path.is_file():
        if not os.access(path, os.R_OK):
            raise UserError(f"{key}: {path} may not be read by this user; allow it with chmod")
        return path
    if path.is_dir():
        inside = next((path / name for name in _USUAL_NAMES if (path / name).is_file()), None)
        hint = f"did you mean {inside}?" if inside else "give the tokenizer's file in it"
        raise UserError(f"{key}: {path} is a folder, expected a file; {hint}")
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, beside)
    hint = f"did you mean {path.parent / near}?" if near else "it comes with the model's weights (tune download)"
    raise UserError(f"{key}: there is no file {value}; {hint}")


def _tiktoken_problem(path: Path) -> str | None:
    """What would make tiktoken's Rust code panic, now or at some text of the data; None also for other files."""
    ranks: dict[int, bytes] = {}
    for line in path.read_bytes().splitlines():
        if not line:
            continue
        try:  # as tiktoken.load.load_tiktoken_bpe reads it
            token, rank = line.split()
            number = int(rank)
            decoded = base64.b64decode(token)
        except ValueError:
            return None
        if number in ranks:
            return f"{number} is the number of two tokens"
        ranks[number] = decoded
    missing = {bytes([each]) for each in range(256)}.difference(ranks.values())
    return f"{len(missing)} of the 256 bytes have no token" if ranks and missing else None


@contextlib.contextmanager
def _own_files_only() -> Iterator[None]:
    """tiktoken keeps copies by path, also of local files, and would go on with one when the file has changed."""
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["TIKTOKEN_CACHE_DIR"]
        else:
            os.environ["TIKTOKEN_CACHE_DIR"] = before


def _while_reading(error: BaseException) -> bool:
    """Whether the component itself ran; arguments that do not fit fail in :func:`inspect.Signature.bind` before."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename != inspect.__file__


def _unreadable(key: str, files: dict[str, Any], component: str, error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
    if not files:
        return f"{key}: {component} cannot be built: {text}"
    named = " and ".join(f"{key}.{name}={value}" for name, value in files.items())
    return (
        f"{named}: {component} cannot read it ({text}); the file is damaged or belongs to another kind of "
        "tokenizer: compare it with the model's own, or download it again"
    )


def _check_tokens(tokenizer: Any, key: str, files: dict[str, Any]) -> None:
    named = " and ".join(str(value) for value in files.values()) or "it"
    for name in ("eos_id", "pad_id"):
        token = getattr(tokenizer, name, None)
        if token is not None and not (isinstance(token, int) and token >= 0):
            raise UserError(
                f"{key}: {named} has no {name} ({token}), which training needs; use the tokenizer of the model"
            )
    if not hasattr(tokenizer, "encode"):
        return
    try:
        tokens = tokenizer.encode(_PROBE)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{key}: {named} cannot encode the text {_PROBE!r} ({text}); use the model's own") from error
    if not isinstance(tokens, list) or not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise UserError(
            f"{key}: {named} gives no token for some of the text {_PROBE!r} ({str(tokens)[:80]}): its files are "
            "damaged or do not belong together; use the model's own"
        )

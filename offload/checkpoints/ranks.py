"""What ranks that write and read a checkpoint together tell one another."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from offload.errors import UserError, first_line

Result = TypeVar("Result")


def are_several() -> bool:
    """Whether this process is a rank among others (or could be: it may be the only one)."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    return torch.distributed.get_rank() if are_several() else 0


def count() -> int:
    return torch.distributed.get_world_size() if are_several() else 1


def together(work: Callable[[], Result]) -> list[Result]:
    """``work()`` on every rank, which all have to call this; what each returned, in order.

    Raises:
        Exception: where it failed on any rank, on all of them: a rank's own error, or that of the first that failed.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    if not are_several():
        if error is not None:
            raise error
        return [result]  # type: ignore[list-item]
    answers: list[Any] = [None] * count()
    torch.distributed.all_gather_object(answers, (result, None if error is None else _portable(error)))
    if error is not None:
        raise error
    for number, (_, other) in enumerate(answers):
        if other is not None:
            raise _told_by(number, other)
    return [answer for answer, _ in answers]


def by_first(work: Callable[[], Result]) -> Result:
    """``work()`` on the first rank; its result on every one."""
    return together(lambda: work() if rank() == 0 else None)[0]  # type: ignore[return-value]


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # an exception with arguments of its own
        return RuntimeError(f"{type(error).__name__}: {first_line(error)}")


def _told_by(number: int, error: Exception) -> Exception:
    if isinstance(error, (UserError, OSError)):
        return error
    told = RuntimeError(f"rank {number}: {type(error).__name__}: {first_line(error)}")
    told.__cause__ = error
    return told

"""Of a run that ran out of memory: what it did, told by its frames, and that nothing of it is held any more."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

from offload.training.out_of_memory import release, shortage


class Block(nn.Module):
    def forward(self, work: Any) -> Any:
        return work()


class Run:
    global_step, is_between_steps = 4, False

    def __init__(self) -> None:
        self.model = nn.Sequential(Block())

    def setup_run(self, work: Any) -> None:
        self.prepare_model(work)

    def prepare_model(self, work: Any) -> None:
        work()

    def forward_backward(self, work: Any) -> None:
        self.model[0](work)

    def backward(self, work: Any) -> None:
        work()


def fail() -> None:
    raise MemoryError


def told(run: Run, work: Any) -> str:
    try:
        work(run)
    except MemoryError as error:
        found = shortage(error, run)
        assert found is not None and not found.of_device
        return found.where
    raise AssertionError


def test_the_innermost_that_is_known_tells() -> None:
    run = Run()
    assert told(run, lambda run: run.setup_run(fail)) == "while the model was prepared"
    assert told(run, lambda run: run.forward_backward(fail)) == "in forward of step 4, 0"


def test_what_forward_was_in_is_not_where_backward_is() -> None:
    """A loss whose forward goes backward."""
    run = Run()
    assert told(run, lambda run: run.forward_backward(lambda: run.backward(fail))) == "in backward of step 4"
    inside = run.model[0]
    assert told(run, lambda run: run.forward_backward(lambda: run.backward(lambda: inside(fail)))) == (
        "in backward of step 4, 0"
    )
    run.is_between_steps = True
    assert told(run, lambda run: run.forward_backward(fail)) == "in forward of step 5, 0"


def test_nothing_of_the_run_is_held() -> None:
    """Neither by it, nor by the frames of what was raised while another error was handled."""
    held: list[Any] = []

    def first(tensor: torch.Tensor) -> None:
        held.append(weakref.ref(tensor))
        raise MemoryError

    def second(tensor: torch.Tensor) -> None:
        held.append(weakref.ref(tensor))
        try:
            first(torch.ones(3))
        except MemoryError:
            raise ValueError("in the handler")  # noqa: B904

    run = Run()
    held.append(weakref.ref(run.model))
    try:
        second(torch.ones(4))
    except ValueError as error:
        kept = error
    assert all(each() is not None for each in held)
    release(run, kept)
    gc.collect()
    assert vars(run) == {} and [each() for each in held] == [None] * 3

"""A checkpoint's thread: what it tells while it writes, and that it lets go of what it reads however it ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.checkpoints.beside import Beside, Counted


class Closing:
    """A source that notes what is asked of it."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    @contextlib.contextmanager
    def reading(self, tensor: Tensor) -> Iterator[Tensor]:
        self.noted.append("begins")
        yield tensor
        self.noted.append("ends")

    def done(self, tensor: Tensor) -> None:
        self.noted.append("done")

    def position(self, tensor: Tensor) -> float:
        return 7.0

    def close(self) -> None:
        self.noted.append("closed")


def test_it_tells_how_far_it_is_and_ends_with_its_folder() -> None:
    source, goes_on, has_read = Closing(), threading.Event(), threading.Event()
    counted, tensor = Counted(source), torch.ones(6, requires_grad=True)

    def work() -> None:
        assert not torch.is_grad_enabled() and threading.current_thread() is not threading.main_thread()
        assert counted.position(tensor) == 7.0
        with counted.reading(tensor) as values:
            assert values is tensor and counted.nbytes == 0
        has_read.set()
        goes_on.wait()
        for _ in range(3):
            with counted.reading(tensor):
                pass
        counted.done(tensor)

    beside = Beside(Path("step_2"), work, counted, 50)
    assert has_read.wait(10) and beside.written == (24, 50)
    assert not beside.is_done and not beside.wait(0.01) and "closed" not in source.noted
    goes_on.set()
    assert beside.wait(10) and beside.is_done
    assert beside.written == (50, 50), "what was reckoned is never exceeded"
    assert beside.result() == Path("step_2")
    assert source.noted == ["begins", "ends"] * 4 + ["done", "closed"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt(), SystemExit(3)])
def test_what_went_wrong_is_told_to_who_asks_and_the_source_is_closed(error: BaseException) -> None:
    source = Closing()

    def work() -> None:
        raise error

    beside = Beside(Path("step_2"), work, Counted(source), 50)
    assert beside.wait(10) and source.noted == ["closed"]
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            beside.result()
        assert caught.value is error


def test_who_asks_for_the_folder_waits_for_it() -> None:
    written: list[str] = []
    goes_on = threading.Event()

    def work() -> None:
        goes_on.wait()
        written.append("all")

    beside = Beside(Path("step_2"), work, Counted(Closing()), 50)
    threading.Timer(0.1, goes_on.set).start()
    assert beside.result() == Path("step_2") and written == ["all"]

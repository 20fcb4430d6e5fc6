"""A checkpoint that is written by a thread of its own, beside training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from offload.engine.copy_on_write import Source


class Counted:
    """A :class:`Source` that counts the bytes that were read.

    Args:
        source: gives them.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.nbytes = 0

    @contextlib.contextmanager
    def reading(self, tensor: Tensor) -> Iterator[Tensor]:
        with self._source.reading(tensor) as values:
            yield values
        self.nbytes += tensor.nbytes

    def done(self, tensor: Tensor) -> None:
        self._source.done(tensor)

    def position(self, tensor: Tensor) -> float:
        return self._source.position(tensor)

    def close(self) -> None:
        self._source.close()


class Beside:
    """Writes a checkpoint while its maker goes on.

    Args:
        final: the checkpoint's folder when it is whole.
        work: writes it.
        source: what ``work`` reads; closed at its end.
        nbytes: about what will be written.
    """

    def __init__(self, final: Path, work: Callable[[], None], source: Counted, nbytes: int) -> None:
        self.final = final
        self._work = work
        self._source = source
        self._nbytes = nbytes
        self._error: BaseException | None = None
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:  # a thread begins with the first of several
            accelerator = torch.device(accelerator.type, torch.accelerator.current_device_index())
        self._accelerator = accelerator
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._accelerator is not None:
                # What it computes, such as merged weights, waits for nothing that is queued for training.
                torch.accelerator.set_stream(torch.Stream(device=self._accelerator))
            with torch.no_grad():
                self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._source.close()

    @property
    def is_done(self) -> bool:
        """Whether it is whole, or has failed."""
        return not self._thread.is_alive()

    @property
    def written(self) -> tuple[int, int]:
        """Bytes that were written, of about how many."""
        return min(self._source.nbytes, self._nbytes), self._nbytes

    def wait(self, seconds: float | None = None) -> bool:
        """Block until it is done, for so long at most; returns whether it is."""
        self._thread.join(seconds)
        return self.is_done

    def result(self) -> Path:
        """The checkpoint's folder; blocks until it is done.

        Raises:
            Exception: why there is none.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.final

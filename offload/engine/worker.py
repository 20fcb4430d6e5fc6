"""A thread that does work beside the caller's, and hands its errors back."""

from __future__ import annotations

import contextlib
import copy
import traceback
import warnings

import torch

from offload.engine.runtime import Runtime, Thread


class Worker:
    """Does one thing after another on a thread of its own, which starts when there is something to do.

    An error there is raised again by whatever the caller does next. Subclasses say what the thread does
    (:meth:`_work_once`); they share with it what :attr:`_signal` guards.
    """

    name = "offload"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._signal = runtime.signal()
        self._error: BaseException | None = None
        self._error_is_known = False
        self._stopping = False
        self._thread: Thread | None = None

    def _start(self) -> None:
        """Start the thread, if it does not run yet; with the signal held."""
        if self._thread is None:
            self._thread = self._runtime.start(self._work, self.name)

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._signal:
            self._stopping = True
            self._signal.notify_all()
        thread.join()
        if self._error is not None and not self._error_is_known:
            warnings.warn(f"updates were lost: {type(self._error).__name__}: {self._error}", stacklevel=2)

    def _raise_error(self) -> None:
        if self._error is not None:
            self._error_is_known = True
            # A copy: the one that is raised collects the caller's frames, and with them the optimizer.
            again = self._error
            with contextlib.suppress(Exception):
                again = copy.copy(self._error)
            raise again

    # The thread's side

    def _work(self) -> None:
        try:
            with torch.no_grad():
                self._prepare_thread()
                while self._work_once():
                    pass
        except BaseException as error:
            _let_go_of_frames(error)
            with self._signal:
                self._error = error
                self._give_up()
                self._signal.notify_all()

    def _prepare_thread(self) -> None:
        return None

    def _work_once(self) -> bool:
        """Do one thing; False to end the thread."""
        raise NotImplementedError

    def _give_up(self) -> None:
        """After an error, with the signal held: let go of what was not done."""


def _let_go_of_frames(error: BaseException) -> None:
    """Keep of a traceback its text: its frames hold on to whatever they touched."""
    text = "".join(traceback.format_exception(error))
    error.__traceback__ = error.__context__ = error.__cause__ = None
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"In the optimizer's own thread:\n{text}")

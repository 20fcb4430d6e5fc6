"""``run.json``: what a run was, beside the ``metrics.jsonl`` that says how it went.

::

    {
      "format": 1,
      "status": "done",                          running, done, interrupted, failed
      "started": "2026-01-01T12:00:00+00:00",    and "ended", null while it runs
      "resumed_from_step": null,                 the step that this process went on from
      "label": "offload.optim.AdamW int8 split, stream in backward",
      "optimizer": {"class": ..., "strategy": ..., "in_backward": ..., "state_dtype": ..., "master": ...},
      "config": {...},                           resolved
      "environment": {"torch": ..., "device": ..., ...},
      "oom_kills": 0,                            of the control group by the kernel, until then; null: it does not tell
      "summary": {"tokens_per_second": ..., "loss_final": ..., ...}
    }

It is written whole or not at all, when the run begins and when it ends. A run that was killed says ``running`` and has
an empty summary; ``metrics.jsonl`` has the lines to make one from (:mod:`offload.metrics.run_summary`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.metrics.lines import say

RUN_FILE = "run.json"
FORMAT = 1

STATUS = {0: "done", 130: "interrupted", 143: "interrupted"}


class RunRecord:
    """Writes ``output_dir/run.json``.

    A disk that cannot take it costs the run a warning and nothing else.

    Args:
        output_dir: folder of the run, which exists.
        content: ``label``, ``optimizer``, ``config``, ``environment``: what is known when the run begins.
        resume_step: the step that the run goes on from, None for a fresh one.
    """

    def __init__(self, output_dir: str | Path, content: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        self.path = Path(output_dir) / RUN_FILE
        self._content = {
            "format": FORMAT,
            "status": "running",
            "started": _now(),
            "ended": None,
            "resumed_from_step": resume_step,
            **content,
            "summary": {},
        }
        self._write()

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        """The run has ended, with an exit status and what :func:`offload.metrics.run_summary.summarise` made of it."""
        self._content.update(status=STATUS.get(exit_code, "failed"), ended=_now(), summary=dict(summary))
        self._write()

    def _write(self) -> None:
        temporary = _temporary(self.path.parent)
        try:
            text = json.dumps(_writable(self._content), indent=2, allow_nan=False) + "\n"
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                with contextlib.suppress(OSError):  # some file systems cannot; the rename is atomic all the same
                    os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            say(f"warning: cannot write {self.path}: {error.strerror or error}; training goes on", stream=sys.stderr)


def remove_leftover(folder: Path) -> None:
    """Remove what a run left that was killed while it wrote; for whoever holds the folder."""
    with contextlib.suppress(OSError):
        _temporary(folder).unlink(missing_ok=True)


def _temporary(folder: Path) -> Path:
    return folder / f".{RUN_FILE}.tmp"


def read_run(folder: str | Path, name: str = RUN_FILE) -> dict[str, Any]:
    """The content of a run's ``run.json``, or of ``run.<n>.json``, an earlier run's; empty where there is none.

    Raises:
        ValueError: it is no JSON object.
    """
    path = Path(folder) / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: not a JSON object")
    return content


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _writable(value: Any) -> Any:
    """``value`` as JSON takes it: what it has no word for, infinities among them, becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _writable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(each) for each in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)

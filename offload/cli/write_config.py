"""``tune plan --write``: a config with the fastest of the settings that fit, for `tune run` as it is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.cli.planned_run import GIB, PlannedRun
from offload.errors import UserError
from offload.paths import expanded


def destination(text: str) -> Path:
    """The file that shall be written, which is not there.

    Raises:
        UserError: it is, or cannot be.
    """
    path = expanded(text, "--write")
    if path.suffix not in (".yaml", ".yml"):
        path = Path(f"{path}.yaml")
    if path.exists():
        raise UserError(f"--write: {path} exists already: give another name")
    if not path.parent.is_dir():
        raise UserError(f"--write: {path.parent} does not exist: make it, or give another place")
    return path


def best_of(choices: Sequence[Any]) -> Any:
    """Of a ranked list: the fastest that keeps the optimizer's formats, or else the fastest; None where there is none.

    Args:
        choices: :class:`offload.training.ranking.Choice`, the fastest first.
    """
    return next((choice for choice in choices if not choice.rounds_otherwise), next(iter(choices), None))


def write(path: Path, run: PlannedRun, choice: Any, *, name: str, machine: str) -> None:
    """Writes the config of a run with a choice's overrides, which a run would take.

    Args:
        path: a file that is not there.
        run: of the choice.
        choice: :class:`offload.training.ranking.Choice`.
        name: of the run's config.
        machine: that it fits, in words.

    Raises:
        UserError: it cannot be written, or is there by now.
    """
    budget = choice.plan.budget
    takes = f"{budget.device / GIB:.1f} GiB of the GPU and {budget.host / GIB:.1f} GiB of the host"
    speed = "" if choice.prediction is None else f", {choice.speed:,.0f} tok/s"
    words = " ".join(run.words(choice.changes)) or "no override"
    head = f"# {name} with {words}.\n# Planned for {machine}: {takes}{speed}.\n#\n"
    text = head + run.text(choice.changes)
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / path.name
        trial.write_text(text, encoding="utf-8")
        run.at(trial).check(())
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise UserError(f"--write: {path} exists already: give another name") from None
    except OSError as error:
        raise UserError(f"--write: cannot write {path}: {error.strerror}") from None

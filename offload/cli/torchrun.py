"""Starts a recipe as several processes, by torchrun (:mod:`torch.distributed.run`) with all its options."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from offload.cli import registry
from offload.errors import UserError, first_line

PATIENCE = 24 * 3600
"""Seconds that processes, which save a checkpoint first, have to end after a signal; torchrun would give them 30."""


def launch(options: Sequence[str], recipe: registry.RecipeRef, config: Path, rest: Sequence[str]) -> int:
    """Checks a config, then runs a recipe with it in as many processes as torchrun's options say; returns the status.

    A signal goes on to all processes, once; they save and end. The terminal reaches this process alone, since torchrun
    gives each of the others a session of its own.

    Args:
        options: torchrun's, as on its own command line.
        recipe: of ours, or a file of the user's.
        config: the file.
        rest: overrides.

    Raises:
        UserError: a mistake in any of them, or a process that was killed.
    """
    from offload.cli.validate import check_here

    arguments = _parse(options)
    check_here(recipe, config, rest)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments.training_script, arguments.training_script_args = str(recipe.path), ["--config", str(config), *rest]
    if arguments.shutdown_timeout is None:
        arguments.shutdown_timeout = PATIENCE
    processes = run.determine_local_world_size(arguments.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    if recipe.path.parent != registry.recipes_dir():  # modules of the user's in the current folder
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()]))
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the processes tell what went wrong
    sys.stdout.flush()
    try:
        run.run(arguments)
    except SignalException as signalled:
        return 128 + int(signalled.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return int(failure.exitcode)
        raise UserError(
            f"the process of rank {rank} was ended by {failure.signal_name()}, and with it the run; where that is "
            "SIGKILL, the host's memory most often ran out. The same command with resume_from_checkpoint=auto goes on "
            "from the last checkpoint"
        ) from None
    except (RuntimeError, ValueError) as error:
        raise UserError(f"torchrun: {type(error).__name__}: {first_line(error)}") from error
    return 0


def _parse(options: Sequence[str]) -> Any:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    known = {option for action in parser._actions for option in action.option_strings}

    def refuse(message: str) -> NoReturn:
        from offload.component import nearest

        wrong = next((word for word in options if word.startswith("-") and word.partition("=")[0] not in known), None)
        near = nearest(wrong.partition("=")[0], sorted(known)) if wrong else None
        hint = f"; did you mean {near}?" if near else "; `torchrun --help` lists its options"
        raise UserError(f"torchrun: {f'unknown option {wrong}' if wrong else message}{hint}")

    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args([*options, "recipe"])

"""From the command line to a recipe's end: arguments, configuration, exit status.

Exit status: 0 trained, or nothing left to train; 2 something that the user can mend, told in one line; 130, 143 and
129 after SIGINT, SIGTERM and SIGHUP, with a checkpoint saved. A reader that leaves (``tune run … | head``) changes
nothing: the run goes on, saves, and ends with the status that it would have had.

Of several processes that torchrun started for one recipe, the first that fails says so, and all end with its status.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from offload import streams
from offload.errors import UserError, first_line


class NothingToDo(Exception):
    """There is nothing left to do; the text says why. Ends the program with status 0."""


class Recipe(Protocol):
    """What a recipe script hands to :func:`run_recipe`: a class with these methods and a schema."""

    Settings: type

    def __init__(self, settings: Any, cfg: Any) -> None: ...

    def setup(self) -> None: ...

    def train(self) -> int:
        """Does the work; returns the exit status."""

    def cleanup(self, exit_code: int) -> None:
        """Runs whatever happened, also after a failed set-up."""


def as_override(word: str) -> str:
    """``--optimizer.lr=1e-5``, as other programs want it, is ``optimizer.lr=1e-5``; any other word stays."""
    is_option = word.startswith(("--config=", "--recipe=", "--gpu=", "--vram=", "--ram="))
    return word.lstrip("-") if word.startswith("--") and "=" in word and not is_option else word


def run_recipe(recipe_class: type[Recipe], argv: Sequence[str] | None = None) -> int:
    """Run a recipe as a program: ``--config PATH [key=value ...]``; returns the exit status."""
    with streams.unbreakable():
        if os.environ.get("WORLD_SIZE", "1") == "1" and "RANK" not in os.environ:
            return _run_recipe(recipe_class, argv)
        from offload.distributed.world import is_launched, joined

        if is_launched() and not getattr(recipe_class, "is_distributed", False):
            if os.environ["RANK"] == "0":
                print(f"error: {recipe_class.__name__} runs on one device, and torchrun started it as one of "
                      f"{os.environ['WORLD_SIZE']} processes: start it without torchrun", file=sys.stderr)  # fmt: skip
            return 2
        with contextlib.ExitStack() as stack:
            try:
                world = stack.enter_context(joined())
            except RuntimeError as error:
                if os.environ["LOCAL_RANK"] == "0":
                    print(f"error: the processes cannot reach each other through {os.environ['MASTER_ADDR']} port "
                          f"{os.environ['MASTER_PORT']}: {first_line(error)}; of several hosts, GLOO_SOCKET_IFNAME "
                          "names the network interface that leads to the others", file=sys.stderr)  # fmt: skip
                return 2
            verdict = world.noted(_VERDICT)
            return int(verdict) if verdict else _run_recipe(recipe_class, argv)


_VERDICT = "verdict"
"""The status of processes before these that ended with what starting again does not mend."""


def _run_recipe(recipe_class: type[Recipe], argv: Sequence[str] | None) -> int:
    from omegaconf import OmegaConf

    from offload.config.loading import load_and_check
    from offload.config.secrets import masked_words
    from offload.distributed import watch
    from offload.distributed.world import PeerError, current, is_shared

    world = current()
    _quieten()
    if not world.is_main:
        _hush()
    # `python -OO` has no docstrings.
    parser = argparse.ArgumentParser(description=next(iter((recipe_class.__doc__ or "").strip().splitlines()), None))
    parser.add_argument("--config", required=True, metavar="PATH", help="configuration (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the configuration's")
    arguments, unknown = parser.parse_known_args(
        [as_override(word) for word in (sys.argv[1:] if argv is None else argv)]
    )
    recipe: Recipe | None = None
    try:
        notes: list[str] = []
        settings: Any
        if unknown:
            raise UserError("\n".join(as_settings(sys.argv[1:] if argv is None else argv, unknown)))
        with _telling_peers():
            cfg, settings = load_and_check(Path(arguments.config), arguments.overrides, recipe_class.Settings, notes)
        if argv is None:
            sys.argv[1:] = masked_words(sys.argv[1:], OmegaConf.to_container(cfg, resolve=False))
        for note in notes if world.is_main else ():
            print(f"note: {note}", file=sys.stderr)
        with _telling_peers():
            recipe = recipe_class(settings, cfg)
        with _telling_peers(recipe):
            status = _run(recipe)
            if status:
                _ignore_torchrun()
            world.barrier()  # the main process writes to the end
        watch.note_end(status)
        return status
    except NothingToDo as done:
        if world.is_main:
            print(done)
        return 0
    except PeerError as error:
        return error.status
    except KeyboardInterrupt:
        # While a recipe trains, signals go to its Interrupt: what comes here came before training or after it.
        from offload.training.settings import TrainSettings

        saved = getattr(getattr(recipe, "saving", None), "newest", None)
        if not world.is_main:
            pass
        elif saved is not None:
            print(f"interrupted at the end; {saved} is whole", file=sys.stderr)
        elif issubclass(recipe_class.Settings, TrainSettings):
            print("interrupted before training began; nothing was saved", file=sys.stderr)
        else:
            print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        is_watched = watch.active() is not None
        who = f"{world.name}: " if is_watched and world.size > 1 and recipe is not None and not is_shared(error) else ""
        if _tell_of_memory(error, recipe, Path(arguments.config), arguments.overrides, who):
            world.note(_VERDICT, "2")
            return 2
        line = _mendable(error)
        if not is_watched and not world.is_first("error"):
            return 1 if line is None else 2
        watch.note_for_torchrun(f"{who}{line or f'{type(error).__name__}: {error}'}")
        if line is None:
            if world.size > 1:
                print(f"error: {world.name} failed, and with it the run:", file=sys.stderr)
            raise
        world.note(_VERDICT, "2")
        for one in line.splitlines():
            print(f"error: {who}{one}", file=sys.stderr)
        return 2


def as_settings(words: Sequence[str], unknown: Sequence[str]) -> Iterator[str]:
    """How options are written here: ``--learning_rate 1e-5`` is ``optimizer.lr=1e-5``."""
    from offload.config.elsewhere import HERE

    words = list(words)
    for option in (each for each in unknown if each.startswith("-")):
        at = words.index(option) + 1 if option in words else len(words)
        value = words[at] if at < len(words) and not words[at].startswith("-") and "=" not in words[at] else "True"
        name = option.lstrip("-").replace("-", "_") or "key"
        yield f"unknown option {option}: settings are written as {HERE.get(name, name)}={value}"


@contextlib.contextmanager
def _telling_peers(recipe: object = None) -> Iterator[None]:
    """Around what this process of several may fail in: the others are told at once, and leave.

    Raises:
        PeerError: in place of an error that another process's failure led to, or that another one had first.
    """
    from offload.distributed import watch
    from offload.distributed.world import PeerError
    from offload.training.out_of_memory import shortage

    try:
        yield
    except (NothingToDo, SystemExit):
        raise
    except BaseException as error:
        watched = watch.active()
        if watched is None:
            raise
        _ignore_torchrun()
        if isinstance(error, PeerError):
            raise
        first = watched.cause(error)
        if first is None:
            short = shortage(error, recipe)
            line = "interrupted" if isinstance(error, KeyboardInterrupt) else str(short) if short else _mendable(error)
            status = 130 if isinstance(error, KeyboardInterrupt) else 1 if line is None else 2
            first = watched.report(status, line or f"{type(error).__name__}: {first_line(error)}")
        if first.rank != watched.rank and not isinstance(error, KeyboardInterrupt):
            raise PeerError(first.status) from error
        raise


def _ignore_torchrun() -> None:
    """This process is on its way out: from here on it does not end of SIGTERM, which torchrun sends to those that are
    left when the first has gone with another status than 0. They close their logs, and one that ended in the middle of
    the last exchange would be missed by the others."""
    from offload.distributed import watch

    if watch.active() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def quieten_libraries() -> None:
    """Without what some say while they are imported, of kernels that nothing here uses."""
    for name in ("torchao", "bitsandbytes.backends", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


class _ToStandardError(logging.StreamHandler[Any]):
    """Writes to what is ``sys.stderr`` when the line comes: a process may run several recipes, each with its own."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def _quieten() -> None:
    """Our own log lines only, and no other library's progress bars in files and CI logs."""
    logger = logging.getLogger("offload")
    if not any(isinstance(handler, _ToStandardError) for handler in logger.handlers):
        handler = _ToStandardError()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    quieten_libraries()
    # Unreadable data is told once, by us.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    if not sys.stderr.isatty():
        import tqdm

        # The variable TQDM_DISABLE is read when tqdm is imported, which is long past.
        bar = tqdm.tqdm
        if not getattr(bar, "silenced_by_offload", False):
            bar.__init__ = functools.partialmethod(bar.__init__, disable=True)
            bar.silenced_by_offload = True


def _hush() -> None:
    """What every process would say, the main one says."""
    logging.getLogger("offload").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def _run(recipe: Recipe) -> int:
    from offload.distributed import watch

    watched = watch.active()
    if watched is not None:
        watched.last_will = functools.partial(recipe.cleanup, 1)
    exit_code = 1
    try:
        with _telling_peers(recipe):
            recipe.setup()
            exit_code = recipe.train()
    finally:
        if watched is not None:
            watched.leave()
        recipe.cleanup(exit_code)
    return exit_code


SHORT_OF_DEVICE = (
    "in this order try batch_size=1, enable_activation_checkpointing=True, a smaller tokenizer.max_seq_len, "
    "optimizer.strategy=stream with optimizer.update_in_backward=True, enable_activation_offloading=True"
)
SHORT_OF_HOST = (
    "try a smaller model or batch_size, optimizer.offload_gradients=False, or a base optimizer with smaller states "
    "(optimizer.optimizer_class=offload.optim.AdamW)"
)
"""What is told where there is no room to plan the run."""


def _tell_of_memory(error: Exception, recipe: Any, path: Path, overrides: Sequence[str], who: str) -> bool:
    """Tell of memory that ran out for ``who``, and what would save most; whether it is that."""
    from offload.distributed.watch import note_for_torchrun
    from offload.training.out_of_memory import release, shortage, write_snapshot

    found = shortage(error, recipe)
    if found is None:
        return False
    note_for_torchrun(f"{who}{found}")
    print(f"error: {who}{found}", file=sys.stderr, flush=True)
    lines = [SHORT_OF_DEVICE if found.of_device else SHORT_OF_HOST]
    if hasattr(recipe, "memory_before"):  # it trains
        with contextlib.suppress(Exception):
            from offload.training.advice import advisor_of, room, settings_of_file

            if found.of_device and recipe.settings.memory_snapshot:
                path_of_snapshot = write_snapshot(recipe.device, recipe.output_dir)
                if path_of_snapshot is not None:
                    print(f"memory snapshot: {path_of_snapshot}, for https://pytorch.org/memory_viz", file=sys.stderr)
            there_is = room(recipe.device, recipe.world, of_device=found.of_device)
            settings = settings_of_file(type(recipe), path, overrides)
            advisor = advisor_of(recipe, settings)
            device, used = recipe.device, recipe.memory_before
            release(recipe, error)
            lines = advisor.lines(device, of_device=found.of_device, used=used, room=there_is)
    for line in lines:
        print(line, file=sys.stderr)
    return True


def _mendable(error: BaseException) -> str | None:
    """The line for an error that the user can mend; None for a defect, whose traceback is worth more."""
    from offload.config.interpolation import user_error_in

    told = user_error_in(error)
    if told is not None:
        return str(told)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return f"{error}: raise the limit of processes and threads (ulimit -u, or the container's pids limit)"
    if isinstance(error, PermissionError) and error.filename:
        return f"no access to {error.filename}: {error.strerror}; get the right to it (`ls -ld`), or give another path"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        where = f" {error.filename}" if error.filename else ""
        return f"cannot write{where}: {error.strerror}; free space or choose another output_dir"
    return None

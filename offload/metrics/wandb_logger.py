"""Mirrors a run's metrics to Weights & Biases (https://wandb.ai), offline unless told otherwise.

wandb is optional and never in the way: without the package one line says so; without a key, a server or a
network the run is kept on disk, and ``wandb sync`` uploads it later. All of wandb (its import of about half a
second, ``init``, every ``log``, ``finish``) runs on the thread that
:class:`offload.metrics.log.MetricLog` gives each mirror, so that training waits for none of it.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import logging
import netrc
import os
import re
import secrets
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from offload.errors import UserError
from offload.metrics.environment import environment
from offload.metrics.lines import say

Mode = Literal["auto", "online", "offline", "disabled"]

PROJECT = "tune-offload"
RUN_ID_FILE = "wandb_run_id.txt"

# Seconds. A server that works answers in well under one; these bound what a dead one can cost.
_SERVER_CHECK_TIMEOUT = 3.0
_INIT_TIMEOUT = 15.0
_FINISH_TIMEOUT = 20.0


class WandBLogger:
    """A mirror of the metrics in wandb; a component for ``metric_logger`` in a config.

    wandb's environment variables work as usual (``WANDB_API_KEY``, ``WANDB_BASE_URL``, ``WANDB_MODE``,
    ``WANDB_ENTITY``, ``WANDB_NAME``, ``WANDB_RUN_GROUP``, ``WANDB_TAGS``, ``WANDB_RUN_ID``, ``WANDB_DIR``);
    an argument that is given wins over its variable, as in ``wandb.init``. ``WANDB_PROJECT`` wins over the
    default project, ``WANDB_MODE`` over ``mode: auto``.

    A run that resumes (``resume_from_checkpoint`` in its config) continues the wandb run that is named in
    ``<output_dir>/wandb_run_id.txt``.

    Args:
        project: wandb project.
        entity: user or team; default: the account's own.
        name: name shown for the run; default: the run id.
        group: group of runs.
        tags: labels.
        mode: ``auto``: online if a key is configured and the server answers, else offline. ``online``: falls
            back to offline when the server cannot be reached. ``offline``: on disk only. ``disabled``:
            nothing.
        log_dir: folder that gets the ``wandb`` folder; default ``WANDB_DIR``, else the current folder, as for wandb
            itself: ``wandb sync`` and ``wandb leet`` look there and find every run. Where that cannot be written, the
            config's ``output_dir``.
        run_id: id of the run, unique in its project; default ``<name or output folder>-<date>-<time>-<4
            hex>``.

    Raises:
        UserError: an unknown mode.
    """

    def __init__(
        self,
        project: str = PROJECT,
        *,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        mode: Mode = "auto",
        log_dir: str | None = None,
        run_id: str | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise UserError(f"metric_logger.mode: {mode!r} is not one of {', '.join(get_args(Mode))}")
        self._project = (os.environ.get("WANDB_PROJECT") or project) if project == PROJECT else project
        self._entity = entity
        self._name = name
        self._group = group
        self._tags = list(tags) if tags is not None else None
        self._mode = mode
        self._log_dir = log_dir
        self._run_id = run_id or os.environ.get("WANDB_RUN_ID")
        self._wandb: Any = None
        self._run: Any = None
        self._started = False
        self.directory: Path | None = None
        """Folder of the run on disk; None until wandb has started and where nothing is written."""
        self.url: str | None = None
        """Web page of an online run."""

    def log_config(self, config: Any) -> None:
        """Starts the run with its configuration (OmegaConf or a mapping) and facts about the machine."""
        content = _plain(config)
        if not self._started:
            self._start(content)
        elif self._run is not None:
            self._run.config.update(content, allow_val_change=True)

    def log_facts(self, facts: Mapping[str, Any]) -> None:
        """Adds what the configuration does not say to the run's configuration: what runs are grouped by."""
        if not self._started:
            self._start({})
        if self._run is not None:
            self._run.config.update(dict(facts), allow_val_change=True)

    def log_summary(self, values: Mapping[str, Any]) -> None:
        """Puts what the whole run comes to (``summary/loss_best``) beside wandb's own summary, the last values."""
        if self._run is not None:
            self._run.summary.update({f"summary/{name}": value for name, value in values.items()})

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Logs numbers by name; ``step`` must not fall."""
        if not self._started:
            self._start({})
        if self._run is not None:
            self._run.log(dict(payload), step=step)

    def log(self, name: str, data: Any, step: int) -> None:
        """Logs one number (torchtune's interface)."""
        self.log_dict({name: data}, step)

    def close(self, exit_code: int = 0) -> None:
        """Writes everything to disk, uploads what is left if online (for a bounded time), ends the run.

        Args:
            exit_code: other than 0 marks the run as failed.
        """
        run, self._run = self._run, None
        if run is None:
            return
        run.finish(exit_code=exit_code)
        if self._wandb.run is None:  # nobody else in this process has a run
            # Ends wandb's service process here: its exit hook would wait for it without a limit.
            self._wandb.teardown(exit_code=exit_code)

    def abandon(self) -> None:
        """Kills wandb's service process after :meth:`close` hung: wandb's exit hook would wait for it.

        What reached the run's folder stays there and can be synced.
        """
        with contextlib.suppress(Exception):  # internals of wandb: if they moved, the wait is wandb's
            from wandb.sdk import wandb_setup

            wandb_setup.singleton()._connection._proc._process.kill()

    def note(self) -> tuple[str, str] | None:
        """Where the run is, for the summary: ``("wandb", URL or the command that uploads it)``, or None."""
        if self.url is not None:
            return "wandb", self.url
        if self.directory is not None:
            return "wandb", f"wandb sync {_relative(self.directory)}"
        return None

    def _start(self, config: dict[str, Any]) -> None:
        self._started = True
        mode, reason = self._wanted_mode()
        if mode == "disabled":
            say(f"wandb: off ({reason})")
            return
        # wandb reports its own usage and errors over the network, also offline, and its exit hook waits for
        # that.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # Its own log is beside the run: on a full disk each line of it would be a traceback.
        logging.raiseExceptions = False
        try:
            self._wandb = importlib.import_module("wandb")
            if self._wandb.__file__ is None:  # only the folder of that name in the current folder, with its runs
                raise ImportError("No module named 'wandb'")
        except ImportError as error:
            say(f"wandb: off ({error}; to use it: pip install wandb). The metrics are in metrics.jsonl.")
            return
        _find_cache()
        quiet = self._wandb.Settings(silent=True, quiet=True, console="off")
        base_url = str(self._wandb.setup(quiet).settings.base_url)
        if mode in ("auto", "online"):
            obstacle = self._obstacle(base_url)
            if obstacle is None:
                mode, reason = (
                    "online",
                    f"a key is configured and {base_url} answers" if mode == "auto" else reason,
                )
            else:
                mode, reason = "offline", obstacle

        output_dir = Path(config.get("output_dir") or ".").resolve()
        log_dir = self._find_log_dir(output_dir)
        log_dir.mkdir(parents=True, exist_ok=True)
        output_dir.mkdir(parents=True, exist_ok=True)
        # With the run: other runs may log to the same folder.
        resume = self._choose_id(output_dir, resume=bool(config.get("resume_from_checkpoint")))
        arguments: dict[str, Any] = {
            "project": self._project,
            "entity": self._entity,
            "name": self._name or os.environ.get("WANDB_NAME") or self._run_id,
            "group": self._group,
            "tags": self._tags,
            "id": self._run_id,
            "dir": str(log_dir),
            "config": {**config, "environment": environment(config.get("device"))},
            # An offline run cannot ask the server what it has; `wandb sync` joins parts with the same id.
            "resume": "allow" if resume and mode == "online" else None,
        }
        try:
            self._run = self._init(mode, arguments)
        except Exception as error:
            if mode != "online":
                raise
            first_line = next(iter(str(error).splitlines()), "")
            mode, reason = "offline", f"{base_url} refused: {first_line or type(error).__name__}"
            # The failed attempt still holds the run id in wandb's service process.
            self._wandb.teardown(exit_code=1)
            self._wandb.setup(quiet)
            arguments["resume"] = None
            self._run = self._init(mode, arguments)
        self.directory = Path(self._run.dir).parent
        if mode == "online":
            self.url = self._run.url
        say(f"wandb: {mode} ({reason}), {'continuing' if resume else 'run'} {self._run_id}: {self._where()}")

    def _find_log_dir(self, output_dir: Path) -> Path:
        chosen = self._log_dir or os.environ.get("WANDB_DIR")
        if chosen:
            return Path(chosen).resolve()
        here = Path.cwd()
        runs = here / "wandb"
        return here if os.access(runs if runs.exists() else here, os.W_OK | os.X_OK) else output_dir

    def _where(self) -> str:
        return self.url or (_relative(self.directory) if self.directory else "")

    def _init(self, mode: str, arguments: Mapping[str, Any]) -> Any:
        settings = self._wandb.Settings(
            silent=True,
            quiet=True,
            console="off",
            init_timeout=_INIT_TIMEOUT,
            disable_git=True,
            save_code=False,
        )
        if hasattr(settings, "finish_timeout"):  # older releases wait without a limit; then abandon() ends it
            settings.finish_timeout = _FINISH_TIMEOUT
        return self._wandb.init(mode=mode, settings=settings, **arguments)

    def _wanted_mode(self) -> tuple[str, str]:
        """The mode asked for and by whom."""
        if self._mode != "auto":
            return self._mode, f"metric_logger.mode={self._mode}"
        variable = os.environ.get("WANDB_MODE", "").lower()
        mode = {"dryrun": "offline", "run": "online"}.get(variable, variable)
        if mode in get_args(Mode) and mode != "auto":
            return mode, f"WANDB_MODE={variable}"
        if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
            return "disabled", "WANDB_DISABLED is set"
        return "auto", ""

    def _obstacle(self, base_url: str) -> str | None:
        """Why the run cannot be online; None if it can.

        Asked before ``wandb.init``, which would prompt for a key on the terminal, or wait for the server.
        """
        if not has_key(self._wandb, base_url):
            return "no key is configured: `wandb login`"
        request = urllib.request.Request(base_url, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=_SERVER_CHECK_TIMEOUT):
                return None
        except urllib.error.HTTPError as error:
            # Any answer will do, but a gateway's word that nobody is behind it.
            return f"{base_url} does not answer: HTTP {error.code}" if error.code in (502, 503, 504) else None
        except (OSError, ValueError) as error:
            return f"{base_url} does not answer: {getattr(error, 'reason', None) or error}"
        except http.client.HTTPException as error:
            return f"{base_url} does not answer in HTTP: {type(error).__name__}"

    def _choose_id(self, output_dir: Path, *, resume: bool) -> bool:
        """Sets the run id and keeps it in ``output_dir``; True if an earlier run is continued."""
        kept = output_dir / RUN_ID_FILE
        if resume and self._run_id is None and kept.is_file():
            self._run_id = kept.read_text().strip() or None
            if self._run_id:
                return True
        if self._run_id is None:
            stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", self._name or output_dir.name).strip("-.")[:64] or "run"
            self._run_id = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        kept.write_text(self._run_id + "\n")
        return resume


def _find_cache() -> None:
    """Lets wandb's service log below the temporary folder where there is no cache folder to write: else it logs on the
    terminal.
    """
    home = os.environ.get("HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or (home and os.path.join(home, ".cache"))
    there = cache and next((each for each in (Path(cache), *Path(cache).parents) if each.exists()), None)
    if "WANDB_CACHE_DIR" not in os.environ and not (there and there.is_dir() and os.access(there, os.W_OK)):
        os.environ["WANDB_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), f"wandb-{os.getuid()}")


def has_key(wandb: Any, base_url: str | None = None) -> bool:
    """Whether wandb, the module, can log in without asking.

    Args:
        wandb: the imported package.
        base_url: of the server; default: the one that wandb is set to.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    _find_cache()
    settings = wandb.setup().settings
    return bool(settings.api_key) or _netrc_has_key(urllib.parse.urlsplit(base_url or settings.base_url).netloc)


def _netrc_has_key(host: str) -> bool:
    """Whether the file in which ``wandb login`` keeps keys has one for ``host`` (with its port, if any)."""
    for path in [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
    return False


def _plain(config: Any) -> dict[str, Any]:
    """A config as plain dicts and lists with its interpolations resolved."""
    from omegaconf import OmegaConf

    if not OmegaConf.is_config(config):
        return dict(config)
    content = OmegaConf.to_container(config, resolve=True)
    assert isinstance(content, dict), "a config is a mapping"
    return {str(key): value for key, value in content.items()}


def _relative(path: Path) -> str:
    """The path relative to the working directory where it lies below it: what a user can paste."""
    try:
        return str(path.relative_to(Path.cwd().resolve()))
    except ValueError:
        return str(path)

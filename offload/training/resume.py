"""Which checkpoint a run goes on from, and putting its state back.

Each field is checked before it is used, each failure names it in one line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.checkpoints.manager import STATE_NAME, CheckpointManager, Loaded
from offload.checkpoints.manifest import DamagedCheckpoint, whole_checkpoints
from offload.checkpoints.shared_states import SavedStates
from offload.device import set_random_state
from offload.distributed.world import World
from offload.errors import UserError, raise_shortage
from offload.metrics.lines import say
from offload.optim import unpacked
from offload.sharded_states import divided
from offload.training.restart import Restart
from offload.training.resume_changes import weights_key
from offload.training.seed import draw_apart
from offload.training.settings import AUTO, TrainSettings

_COUNTS = ("epoch", "step_in_epoch", "global_step", "tokens_seen", "seed")
_LEAVES = (Tensor, bool, int, float, complex, type(None))


def choose_checkpoint(
    checkpoints: CheckpointManager, settings: TrainSettings, restart: Restart | None
) -> tuple[Path, Loaded] | None:
    """The checkpoint that a run begins with, and what it holds; None to start from the beginning.

    Args:
        checkpoints: those in the run's folder.
        settings: of the run.
        restart: what the lives of a job before this one left.

    Raises:
        UserError: there is none such.
        DamagedCheckpoint: the one that was asked for by name is damaged.
    """
    chosen = settings.resume_from_checkpoint
    output_dir = checkpoints.output_dir
    if restart is not None and restart.has_saved:
        chosen = True
    if chosen is False:
        if restart is None:
            _tell_of_an_earlier_run(output_dir, settings.keep_last_n)
        return None
    takes_newest = chosen is True or chosen == AUTO
    found = checkpoints.load_newest() if takes_newest else checkpoints.load_chosen(str(chosen))
    if found is None and chosen == AUTO and not whole_checkpoints(output_dir):
        say(f"resume_from_checkpoint={AUTO}: no checkpoint in {output_dir} yet, starting from the beginning")
        return None
    if found is None:
        damaged = whole_checkpoints(output_dir)
        raise UserError(
            f"resume_from_checkpoint: every checkpoint in {output_dir} is damaged; give the output_dir of "
            "another run, or start anew with resume_from_checkpoint=False"
            if damaged
            else f"resume_from_checkpoint: there is no whole checkpoint in {output_dir}; give the output_dir "
            f"of the run to go on with, or resume_from_checkpoint={AUTO}, which starts from the beginning where "
            "there is none"
        )
    path, loaded = found
    check_fields(loaded.recipe_state, path)
    return path, loaded


def _tell_of_an_earlier_run(output_dir: Path, keep: int | None) -> None:
    """A run that begins in a folder with checkpoints may have been meant to go on from them."""
    names = [path.name for path in whole_checkpoints(output_dir)]
    if not names:
        return
    fate = "writes over those of its own steps" if keep is None else f"deletes them as it saves (keep_last_n={keep})"
    say(
        f"warning: {output_dir} has {', '.join(names[-3:])} of an earlier run; this one starts from the "
        f"beginning and {fate}: to go on from them, resume_from_checkpoint={AUTO}; to keep them, another output_dir"
    )


def check_fields(state: Mapping[str, Any], checkpoint: Path) -> None:
    """DamagedCheckpoint where a field of a recipe's state is missing or of a type that no recipe writes.

    Args:
        state: as :meth:`offload.training.finetune.FinetuneRecipe.recipe_state` makes it.
        checkpoint: its folder.
    """
    for problem in _problems(state):
        raise DamagedCheckpoint(
            f"{checkpoint / STATE_NAME} is not what this program writes ({problem}): resume from another checkpoint"
        )


def put_back(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, lr_scheduler: Any, checkpoint: Path) -> None:
    """Loads what was saved into an optimizer and, where there is one, its schedule.

    Args:
        state: checked by :func:`check_fields`.
        optimizer: of the parameters that the saved one had.
        lr_scheduler: its schedule, or None.
        checkpoint: the folder that the state comes from.

    Raises:
        UserError: if they cannot use it.
    """
    with _putting_back("optimizer", state, checkpoint):
        saved = state["optimizer"]
        if isinstance(saved["state"], SavedStates):
            saved["state"].params = [param for group in optimizer.param_groups for param in group["params"]]
        if not getattr(optimizer, "owns_loaded_states", False):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            saved = divided(unpacked(saved, params), params)
        optimizer.load_state_dict(saved)
    if lr_scheduler is not None and state["lr_scheduler"] is not None:
        with _putting_back("lr_scheduler", state, checkpoint):
            _check_like(state["lr_scheduler"], lr_scheduler.state_dict(), "lr_scheduler")
            lr_scheduler.load_state_dict(state["lr_scheduler"])


def put_back_random(state: Mapping[str, Any], device: torch.device, checkpoint: Path, world: World) -> None:
    """Restores every generator's state; UserError where it is none. A process that the checkpoint's run did not have
    draws numbers of its own."""
    with _putting_back("random", state, checkpoint):
        of_ranks = state.get("random_of_ranks", [state["random"]])
        set_random_state(of_ranks[world.rank] if world.rank < len(of_ranks) else state["random"], device)
        if world.rank >= len(of_ranks):
            draw_apart(state["seed"] + state["global_step"] * world.size, world.rank)


@contextlib.contextmanager
def _putting_back(what: str, state: Mapping[str, Any], checkpoint: Path) -> Iterator[None]:
    """Turns a failure to use what was saved of ``what`` into one line."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # any class's load_state_dict fails in its own way
        raise_shortage(error)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"resume_from_checkpoint: {what} of {checkpoint / STATE_NAME} cannot be used ({reason}): set {what} as it "
            "was in that run, resume from another checkpoint, or start anew from its weights with "
            f"{weights_key(state['config'])}={checkpoint} and another output_dir"
        ) from error


def _problems(state: Mapping[str, Any]) -> Iterator[str]:
    for name in _COUNTS:
        value = state.get(name)
        if type(value) is not int or value < 0:
            yield f"{name} is {_kind(value)}, expected a number from 0"
    for name in ("optimizer", "random", "config"):
        if not isinstance(state.get(name), dict):
            yield f"{name} is {_kind(state.get(name))}, expected a dict"
    if not isinstance(state.get("lr_scheduler", ""), (dict, type(None))):
        yield f"lr_scheduler is {_kind(state.get('lr_scheduler'))}, expected a dict or None"
    best = state.get("best_evaluation")  # not in checkpoints of earlier versions
    if best is not None and not (
        isinstance(best, dict)
        and isinstance(best.get("loss"), float)
        and isinstance(best.get("step", ""), (int, type(None)))
        and isinstance(best.get("num_worse"), int)
    ):
        yield f"best_evaluation is {_kind(best)}, expected a dict of loss, step and num_worse"
    if any(not isinstance(key, str) for key in state["config"]):
        yield "config has a key that is no text"
    optimizer = state["optimizer"]
    states, groups = optimizer.get("state"), optimizer.get("param_groups")
    if isinstance(states, SavedStates):
        pass  # tensors of files that name them
    elif not isinstance(states, dict) or not all(isinstance(one, dict) for one in states.values()):
        yield f"optimizer.state is {_kind(states)}, expected a dict of dicts"
    else:
        yield from _odd_leaves(states, "optimizer.state")
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        yield f"optimizer.param_groups is {_kind(groups)}, expected a list of dicts with params"


def _odd_leaves(value: Any, name: str) -> Iterator[str]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif not isinstance(value, _LEAVES):
        yield f"{name} is {_kind(value)}, expected a tensor or a number"
    for key, item in items:
        yield from _odd_leaves(item, f"{name}.{key}")


def _check_like(saved: Any, own: Any, name: str) -> None:
    """TypeError where ``saved`` has another form than ``own``, an object's state in the form that it writes."""
    if own is None:
        return
    if isinstance(own, (bool, int, float, Tensor)):
        if not isinstance(saved, (bool, int, float, Tensor)):
            raise TypeError(f"{name} is {_kind(saved)}, expected {_kind(own)}")
    elif isinstance(own, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or len(saved) != len(own):
            raise TypeError(f"{name} is {_kind(saved)}, expected {_kind(own)} of {len(own)}")
        for index, (one, other) in enumerate(zip(saved, own, strict=True)):
            _check_like(one, other, f"{name}[{index}]")
    elif isinstance(own, Mapping):
        if not isinstance(saved, Mapping):
            raise TypeError(f"{name} is {_kind(saved)}, expected {_kind(own)}")
        for key in own.keys() & saved.keys():
            _check_like(saved[key], own[key], f"{name}.{key}")


def _kind(value: Any) -> str:
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)[:40]
    return f"a {type(value).__name__}"

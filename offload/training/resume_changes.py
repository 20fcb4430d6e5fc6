"""What a resumed run's configuration changes: refused where no meaning is left, told in one line where it has one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from offload import component as components
from offload.component import resolve
from offload.config.secrets import masked, resolved_and_masked
from offload.errors import UserError

LENGTHS = ("num_training_steps", "total_steps", "T_max")
"""Arguments by which schedulers take the number of optimizer steps of the run."""

# Which samples there are and in which order: the place in an epoch means nothing under other ones.
_ORDER = ("seed", "shuffle", "dataset", "tokenizer")
# The place stays, as a number of batches; what is done with them changes.
_TOLD = ("batch_size", "gradient_accumulation_steps", "collate_fn", "dtype", "loss", "clip_grad_norm", "model")
# An optimizer's groups have them from the checkpoint, and the configuration does not name them.
_OWN_OPTIONS = ("_component_", "optimizer_class", "strategy", "foreach", "fused", "capturable", "differentiable")
_OF_THE_STATE = ("state_dtype", "master", "seed")  # which stay as this run has them

_Change = tuple[str, Any, Any]


def weights_key(config: Mapping[str, Any]) -> str:
    """The key by which a run begins with a checkpoint's weights."""
    return "checkpointer.checkpoint_dir" if config.get("checkpointer") else "model.path"


def check_changes(saved: Mapping[str, Any], cfg: DictConfig, *, checkpoint: Path, step_in_epoch: int) -> None:
    """Refuse to resume where the checkpoint's state would be taken for something that it is not.

    Args:
        saved: configuration of the run that saved the checkpoint.
        cfg: of this run.
        checkpoint: the checkpoint's folder.
        step_in_epoch: steps of the current epoch that this run would take for done.

    Raises:
        UserError: other samples or another order in the middle of an epoch, another schedule, another strength of the
            adapter; names both values and the way out.
    """
    now, saved = resolved_and_masked(cfg), masked(saved)
    way_out = (
        f"or start anew from its weights with {weights_key(cfg)}={checkpoint} and another output_dir, with "
        "resume_from_checkpoint=False"
    )
    if step_in_epoch:
        for key, old, new in _changes(_ORDER, saved, now):
            if not _is_moved(old, new):
                raise UserError(
                    f"{key}: it is {_short(new)} now and was {_short(old)} in the checkpoint's run, so samples or "
                    f"their order differ, and the checkpoint is in the middle of an epoch (after {step_in_epoch} "
                    f"steps): set {key}={_short(old)}, {way_out}"
                )
    for key, old, new in _changes(("model",), saved, now):
        if key == "model.lora_alpha" and None not in (old, new):  # else the other recipe ran: that is told later
            raise UserError(
                f"{key}: it is {_short(new)} now and was {_short(old)} in the checkpoint's run, whose adapter counts "
                f"for that: set {key}={_short(old)}, {way_out}"
            )
    old, new = (section.get("lr_scheduler") for section in (saved, now))
    if new is not None and "lr_scheduler" in saved and _component(old) != _component(new):
        raise UserError(
            f"lr_scheduler: it is {_component(new)} now and was {_component(old)} in the checkpoint's run, and where "
            f"one is in its schedule tells the other nothing: set lr_scheduler={_component(old)}, {way_out}"
        )


def resume_notes(
    saved: Mapping[str, Any],
    cfg: DictConfig,
    state: Mapping[str, Any] | None = None,
    *,
    total_steps: int = 0,
    has_adapter: bool = False,
    processes: int = 1,
) -> Iterator[str]:
    """A line for each setting that differs from the checkpoint's run, and whether it is used.

    Args:
        saved: configuration of the run that saved the checkpoint.
        cfg: of this run.
        state: the checkpoint's recipe state.
        total_steps: of this run.
        has_adapter: the checkpoint goes on from the base model that ``checkpointer`` names.
        processes: that share each batch.
    """
    state = state or {}
    now, saved = resolved_and_masked(cfg), masked(saved)  # what was masked when it was saved differs in nothing else
    keys = (*_ORDER, *_TOLD, "checkpointer") if has_adapter else (*_ORDER, *_TOLD)
    before = state.get("processes", 1)
    for key, old, new in _changes(keys, saved, now):
        if key == "batch_size" and old * before == new * processes:
            continue
        yield f"{key} is {_short(new)} now and was {_short(old)} in the checkpoint's run: the run changes here"
    if before != processes and saved.get("batch_size") == now.get("batch_size"):
        yield (
            f"batch_size={now.get('batch_size')} is that of each of {processes} processes now, of {before} in the "
            f"checkpoint's run: the run changes here; batch_size={now.get('batch_size') * before / processes:g} is as "
            "many samples in all"
        )
    yield from _optimizer_notes(saved.get("optimizer") or {}, now.get("optimizer") or {}, state.get("optimizer") or {})
    yield from _schedule_notes(saved, now, state, total_steps)


def _optimizer_notes(before: Mapping[str, Any], after: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[str]:
    group = (state.get("param_groups") or [{}])[0]  # of what no entry of param_groups takes
    kept = {"lr", "weight_decay", "betas", "momentum", "eps", "param_groups", *group}
    for key in sorted((before.keys() | after.keys()) & kept - {*_OWN_OPTIONS, *_OF_THE_STATE}):
        old = before.get(key, group.get("initial_lr" if key == "lr" else key))
        if key in after and not _same(old, after[key]):
            yield (
                f"optimizer.{key}={_short(after[key])} is not used: a resumed run goes on with the checkpoint's "
                f"{_short(old)}"
            )


def _schedule_notes(
    saved: Mapping[str, Any], now: Mapping[str, Any], state: Mapping[str, Any], total_steps: int
) -> Iterator[str]:
    old, new = saved.get("lr_scheduler"), now.get("lr_scheduler")
    if new is None:
        if old is not None:
            yield "lr_scheduler is null now: the learning rate stays where the checkpoint's schedule left it"
        return
    kept = state.get("lr_scheduler") or {}
    for key, before, after in _changes(("lr_scheduler",), saved, now):
        if key.rpartition(".")[2] in kept:
            yield f"{key}={_short(after)} is not used: a resumed run goes on with the checkpoint's {_short(before)}"
        else:
            yield (
                f"{key} is {_short(after)} now and was {_short(before)} in the checkpoint's run: the learning rate "
                "changes here"
            )
    length = _length_argument(new)
    before_steps = state.get("total_steps", total_steps)
    if length is not None and length not in new and before_steps != total_steps:
        if length in kept:
            yield (
                f"the run has {total_steps} steps now and had {before_steps}: the schedule stays that of {before_steps}"
            )
        else:
            yield (
                f"the run has {total_steps} steps now and had {before_steps}: the learning rate follows the schedule "
                f"of {total_steps} from here"
            )


def warm_up_note(section: DictConfig | None, total_steps: int) -> str | None:
    """What to tell of a warm-up that the run does not outlast.

    Args:
        section: the ``lr_scheduler`` component.
        total_steps: optimizer steps of the whole run.
    """
    for name, steps in [(str(name), steps) for name, steps in (section or {}).items()]:
        if "warmup" in name and isinstance(steps, int) and not isinstance(steps, bool) and steps >= total_steps:
            return (
                f"lr_scheduler.{name} is {steps} and the run has {total_steps} steps: it ends before the warm-up does, "
                f"without reaching optimizer.lr; set lr_scheduler.{name} below {total_steps}, or train for longer "
                "(epochs, max_steps_per_epoch)"
            )
    return None


def _length_argument(section: Mapping[str, Any]) -> str | None:
    builder = resolve(str(section["_component_"]), key="lr_scheduler._component_")
    parameters = components.signature_of(builder, {}).parameters
    return next((name for name in LENGTHS if name in parameters), None)


def _changes(keys: tuple[str, ...], saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[_Change]:
    for key in keys:
        # A seed that was drawn is the checkpoint's where none is given.
        if key in saved and not (key == "seed" and now.get(key) is None):
            yield from _leaves(key, saved[key], now.get(key))


def _leaves(place: str, old: Any, new: Any) -> Iterator[_Change]:
    """Each leaf that differs, with its dotted key."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        # What the base checkpoint's config.json filled in since is no change.
        names = [*old, *(name for name in new if name not in old and not place.startswith("model"))]
        for name in names:
            yield from _leaves(f"{place}.{name}", old.get(name), new.get(name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _leaves(f"{place}.{index}", one, other)
    elif not _same(old, new):
        yield place, old, new


def _is_moved(old: Any, new: Any) -> bool:
    """Whether two values name one file in two places."""
    return all(isinstance(value, str) and "/" in value for value in (old, new)) and Path(old).name == Path(new).name


def _component(section: Any) -> str:
    return "null" if section is None else str(section.get("_component_"))


def _same(old: Any, new: Any) -> bool:
    as_list = [list(value) if isinstance(value, tuple) else value for value in (old, new)]
    return bool(as_list[0] == as_list[1])


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

"""A run's optimizer: what no recipe can train with is refused by name, and so is a state that it cannot go on with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from omegaconf import DictConfig

from offload.base_class import needs_closure, public_path
from offload.component import resolve
from offload.engine.copy_on_write import Snapshot
from offload.errors import UserError
from offload.training.resume_changes import weights_key

INTERCHANGEABLE = {"torch.optim.Adam", "torch.optim.AdamW", "offload.optim.Adam", "offload.optim.AdamW"}
"""Optimizers that take each other's states."""


def paths_of(section: Mapping[str, Any]) -> list[str]:
    """The classes whose arithmetic an ``optimizer`` section asks for, as dotted paths: one for each entry of
    ``param_groups``, after the one for all else."""
    component = section["_component_"]
    is_wrapper = component.startswith("offload.") and component.endswith("OffloadOptimizer")
    if not is_wrapper and "optimizer_class" not in section:
        return [public_path(component)]
    rest = section.get("optimizer_class", "torch.optim.AdamW")
    groups = section.get("param_groups") or []
    return [public_path(path) for path in (rest, *(group.get("optimizer_class", rest) for group in groups))]


def check_optimizer(section: DictConfig) -> None:
    """Refuse optimizers that no recipe can step, before anything is built.

    Raises:
        UserError: names the class and what to use.
    """
    path = section["_component_"]
    if path.startswith("torchao.") and path.endswith(".CPUOffloadOptimizer"):
        raise UserError(
            f"optimizer: {path} trains over clipping and accumulation without a word, runs on CUDA and XPU only, and "
            "takes no dotted path; use optimizer=offload.TorchAOCPUOffloadOptimizer, which is the same with refusals, "
            "or optimizer=offload.OffloadOptimizer"
        )
    for name in dict.fromkeys(paths_of(section)):
        kind = resolve(name, key="optimizer")
        if not isinstance(kind, type):
            continue  # a function that builds one
        if needs_closure(kind):
            raise UserError(
                f"optimizer: {name} needs a closure that computes the loss anew in every step, which recipes do not "
                "give; use torch.optim.AdamW or another class whose step() needs none"
            )
        if issubclass(kind, torch.optim.SparseAdam):
            raise UserError(
                f"optimizer: {name} takes sparse gradients only, and those of these models are dense; use "
                "torch.optim.AdamW"
            )


def check_resumed(saved: Mapping[str, Any], cfg: DictConfig, optimizer: torch.optim.Optimizer) -> None:
    """Refuse to go on with the state of another optimizer, or in a dtype that its states are not in.

    Args:
        saved: configuration of the run that saved the state.
        cfg: of this run.
        optimizer: of this run.

    Raises:
        UserError: names both, and how to go on.
    """
    start_anew = (
        f"or begin a new run from its weights: {weights_key(cfg)}=<the checkpoint's folder>, an output_dir of "
        "its own and resume_from_checkpoint=False"
    )
    if saved.get("optimizer"):
        before, after = paths_of(saved["optimizer"]), paths_of(cfg.optimizer)
        sections = saved["optimizer"], cfg.optimizer
        patterns, wanted = ([group["params"] for group in s.get("param_groups") or []] for s in sections)
        if patterns != wanted:
            raise UserError(
                f"optimizer.param_groups: those of the checkpoint's run are {patterns or 'none'}, here they are "
                f"{wanted or 'none'}; give the same, {start_anew}"
            )
        for old, new in zip(before, after, strict=True):
            if old != new and not {old, new} <= INTERCHANGEABLE:
                raise UserError(
                    f"optimizer: the checkpoint holds the state of {old}, with which {new} cannot go on; resume with "
                    f"{old}, {start_anew}"
                )
    base = getattr(optimizer, "base_optimizer", None)
    converts = getattr(base, "converts_loaded_states", getattr(base, "owns_loaded_states", False))
    if base is not None and not converts and saved.get("dtype", cfg.dtype) != cfg.dtype:
        raise UserError(
            f"dtype: the checkpoint's run was in {saved['dtype']}, and so are its optimizer's states, with which a run "
            f"in {cfg.dtype} cannot go on; set dtype={saved['dtype']}, or "
            f"optimizer.optimizer_class=offload.optim.AdamW where it was an AdamW, which converts them, {start_anew}"
        )


def set_mode(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """Tell an optimizer that keeps other weights for evaluation than for training (schedulefree) which it is.

    Args:
        mode: ``train`` or ``eval``.
    """
    switch = getattr(optimizer, mode, None)
    if switch is not None:
        switch()


def check_async_checkpointing(section: DictConfig) -> None:
    """UserError for an optimizer that overwrites what is still to be written."""
    name = public_path(section["_component_"])
    if name != "offload.OffloadOptimizer":
        raise UserError(
            f"enable_async_checkpointing: {name} changes weights while they are written; use "
            "optimizer=offload.OffloadOptimizer (strategy=resident leaves its states on the device), or set it to False"
        )


def reserve_snapshot(optimizer: Any, gib: float) -> None:
    """Page-lock so many GiB for what :func:`snapshot_of` takes."""
    optimizer.reserve_snapshot(int(gib * 2**30))


def snapshot_of(optimizer: Any) -> Snapshot:
    """An :class:`offload.OffloadOptimizer`'s parameters and states as they are now."""
    snapshot: Snapshot = optimizer.snapshot()
    return snapshot


@contextlib.contextmanager
def evaluation_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, parameters have the values to evaluate and to save."""
    set_mode(optimizer, "eval")
    try:
        yield
    finally:
        set_mode(optimizer, "train")

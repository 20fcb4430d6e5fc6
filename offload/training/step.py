"""One optimizer step, and what surrounds it: accumulation, clipping, evaluation, resume, learning rate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from offload.config.loading import instantiate
from offload.data.batches import Batch
from offload.device import random_state, set_random_state
from offload.distributed.sharding import reshard
from offload.distributed.world import World, current, status_of
from offload.engine.norms import tensor_norms, total_norm
from offload.engine.shards import gradient_of, local, summed_norms
from offload.engine.units import clean_name
from offload.errors import NotFiniteError, UserError
from offload.training.loss import SummedLoss
from offload.training.resume_changes import LENGTHS


def next_micro_batches(
    batches: Iterator[Batch], number: int, device: torch.device, world: World
) -> tuple[list[Batch], int]:
    """A step's micro-batches on the device, and the labels that count in those of all processes.

    Args:
        batches: of this process.
        number: of micro-batches.
        device: trains.
        world: the processes; where one of them gets no data, all stop here, between two steps.

    Raises:
        UserError: as ``batches`` does.
        PeerError: where another process got none.
    """
    failure: Exception | None = None
    loaded: list[Batch] = []
    try:
        loaded = [next(batches) for _ in range(number)]
    except Exception as error:
        failure = error
    status = status_of(failure)
    # All in one exchange: one for each step is enough.
    mended, broken, labels = world.total([status == 2, status == 1, sum(batch.num_labels for batch in loaded)])
    if failure is not None:
        raise failure
    world.check_peers(2 if mended else 1 if broken else 0)
    return [batch.to(device) for batch in loaded], int(labels)


def forward_backward(
    loss: SummedLoss,
    micro_batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    activations: contextlib.AbstractContextManager[Any],
    *,
    measures_norm: bool,
    num_labels: int | None = None,
    prepare: Callable[[bool], None] = lambda is_last: None,
) -> Tensor:
    """Accumulate the gradients of one step's micro-batches; returns the step's loss, 0-dim, on the device.

    The loss is divided by the labels of all micro-batches before the first backward: nothing has to touch
    the gradients afterwards, wherever the optimizer keeps them. Where several processes share the step, that is by the
    labels of all of them, and what is returned is this one's part of the loss.

    Where the device runs out of memory that strategy ``auto`` has taken, it gives that back, and the step begins again;
    not where several processes share it.

    Args:
        loss: model and loss.
        micro_batches: on the model's device.
        optimizer: told which micro-batch is the last, if it wants to know (``accumulate``).
        activations: context for forward and backward's saved activations.
        measures_norm: the gradients' norm will be asked for. An optimizer that updates in backward, and so has to
            measure there, is told (``measure_grad_norm``).
        num_labels: that count, in all processes; None: those of ``micro_batches``.
        prepare: called before each micro-batch, with whether it is the last.
    """
    if hasattr(optimizer, "measure_grad_norm"):
        optimizer.measure_grad_norm = measures_norm
    if num_labels is None:
        num_labels = sum(batch.num_labels for batch in micro_batches)
    attempt = partial(_attempt, loss, micro_batches, optimizer, activations, max(1, num_labels), prepare)
    auto = getattr(optimizer, "auto", None)
    if auto is None or not auto.has_lifted or current().size > 1:  # the others are in the middle of theirs
        return attempt()
    device = micro_batches[0].labels.device
    before = random_state(device)
    try:
        return attempt()
    except torch.OutOfMemoryError:
        if not auto.make_room():
            raise
    # Not in the handler, whose traceback holds on to what the step had allocated.
    optimizer.zero_grad()
    set_random_state(before, device)
    return attempt()


def _attempt(
    loss: SummedLoss,
    micro_batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    activations: contextlib.AbstractContextManager[Any],
    num_labels: int,
    prepare: Callable[[bool], None],
) -> Tensor:
    accumulate = getattr(optimizer, "accumulate", contextlib.nullcontext)
    total: Tensor | None = None
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        prepare(is_last)
        with activations:
            part = loss(batch.inputs, batch.labels, batch.num_labels) / num_labels
        with contextlib.nullcontext() if is_last else accumulate():
            part.backward()
        total = part.detach() if total is None else total + part.detach()
    assert total is not None
    return total


def clip_gradients(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], max_norm: float | None, measure: bool
) -> Tensor | None:
    """Limit the gradients' norm; returns the norm before, None where it was not asked for or is not known.

    Args:
        optimizer: clips itself where it holds the gradients (``clip_grad_norm_``).
        params: what is trained.
        max_norm: the limit, None for none.
        measure: compute the norm although there is no limit.
    """
    if max_norm is None and not measure:
        return None
    if max_norm is not None:
        if hasattr(optimizer, "clip_grad_norm_"):
            return optimizer.clip_grad_norm_(max_norm)
        norm: Any = torch.nn.utils.clip_grad_norm_(params, max_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if hasattr(optimizer, "grad_norm"):
        return optimizer.grad_norm()
    with torch.no_grad():
        gradients = {p: gradient for p in params if (gradient := gradient_of(p)) is not None}
        norms = summed_norms(dict(zip(gradients, tensor_norms(list(gradients.values())), strict=True)), 2.0)
    return total_norm(norms, 2.0) if norms else None


@torch.no_grad()
def evaluate(
    loss: SummedLoss, model: nn.Module, batches: Iterable[Batch], device: torch.device, world: World | None = None
) -> float:
    """Mean loss per label over ``batches``, those of all processes together; nan where no label counts."""
    was_training = model.training
    model.eval()
    total, labels = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        batch = batch.to(device)
        total += loss(batch.inputs, batch.labels, batch.num_labels).double().cpu()
        labels += batch.num_labels
    model.train(was_training)
    reshard(model)
    summed, counted = (World() if world is None else world).total([float(total), labels])
    return summed / counted if counted else math.nan


def check_training(
    optimizer: torch.optim.Optimizer, *, gradient_accumulation_steps: int, clip_grad_norm: float | None
) -> None:
    """Let an optimizer refuse, before the first step, what it would silently train over."""
    check = getattr(optimizer, "check_training", None)
    if check is not None:
        check(gradient_accumulation_steps=gradient_accumulation_steps, clip_grad_norm=clip_grad_norm)


def build_scheduler(section: DictConfig | None, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    """The ``lr_scheduler`` component, told how many steps the run has; None where there is none."""
    return instantiate(section, optimizer, _optional_=dict.fromkeys(LENGTHS, num_steps))


def step_scheduler(scheduler: Any, loss: Tensor) -> None:
    """Advance a scheduler by one optimizer step; ReduceLROnPlateau is shown the loss."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss.item())
    elif scheduler is not None:
        scheduler.step()


def check_finite(
    values: Mapping[str, float | None], first_step: int, step: int, lr: float, last_checkpoint: Path | None
) -> None:
    """Stop a run whose loss or gradients are no numbers any more, before its weights are saved over good ones.

    Args:
        values: by what messages call them: ``the loss``; None for what is not known.
        first_step: where the values cover several steps, the first.
        step: the last.
        lr: what it updated with.
        last_checkpoint: the advice names it.
    """
    where = f"in step {step}" if first_step == step else f"in steps {first_step} to {step}"
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise NotFiniteError(f"{name} became {value} {where} at lr={lr:g}; {_after_divergence(last_checkpoint)}")


def check_weights(model: nn.Module, step: int, last_checkpoint: Path | None, world: World | None = None) -> None:
    """Stop a run before it saves trained weights that are NaN or infinite; one launch for many and one read."""
    parts = [(name, local(p.detach())) for name, p in model.named_parameters() if p.requires_grad]
    trained = [(name, part) for name, part in parts if part.numel()]
    bad: list[str] = []
    if trained:
        largest = torch._foreach_norm([part for _, part in trained], float("inf"))
        if not torch.stack([norm.float().to(largest[0].device) for norm in largest]).isfinite().all():
            bad = [clean_name(name) for (name, _), norm in zip(trained, largest, strict=True) if not norm.isfinite()]
    found = (World() if world is None else world).gathered(bad)
    bad = list(dict.fromkeys(name for each in found for name in each))
    if not bad:
        return
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    raise NotFiniteError(
        f"the weights {bad[0]}{more} are not finite after step {step}; {_after_divergence(last_checkpoint)}"
    )


def _after_divergence(last_checkpoint: Path | None) -> str:
    mend = "Lower optimizer.lr, warm up (lr_scheduler.num_warmup_steps), set clip_grad_norm=1.0, and "
    if last_checkpoint is None:
        return f"nothing was saved. {mend}start again"
    return (
        f"nothing was saved since {last_checkpoint.name}. {mend}resume from that one with "
        f"resume_from_checkpoint={last_checkpoint}"
    )


def count_steps(
    *,
    batches_per_epoch: int,
    num_samples: int,
    batch_size: int,
    accumulation: int,
    max_steps: int | None,
    processes: int = 1,
) -> int:
    """Optimizer steps per epoch; micro-batches that do not fill a last step are left out.

    Raises:
        UserError: where that is none.
    """
    steps = batches_per_epoch // accumulation
    if steps == 0:
        raise UserError(
            f"dataset: its {num_samples} samples (or packs) do not fill one step of batch_size={batch_size} times "
            f"gradient_accumulation_steps={accumulation}{f' in {processes} processes' if processes > 1 else ''}; lower "
            "either, or add data"
        )
    return steps if max_steps is None else min(steps, max_steps)

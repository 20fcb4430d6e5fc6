"""Settings of a run that fit a machine, the fastest first."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import yaml
from omegaconf import DictConfig

from offload.device import DTYPES
from offload.errors import UserError
from offload.plan.prediction import Prediction
from offload.plan.work import Work
from offload.plan.workload import Machine
from offload.training.budgeting import Plan
from offload.training.placement import Room, is_auto, placed
from offload.training.settings import TrainSettings

ALIKE = 0.01
"""Settings whose predicted speeds are closer than this share are told by how little they change."""

WORTH = 0.03
"""A change that makes a run faster by less than this share is not told of; predictions differ from runs by more."""

KEPT = 0.15
"""Of the bytes that a layer's forward reads and writes beside products, what it keeps at least for backward: 0.2 to 0.4
in the shipped models."""

CUT = 256
"""Tokens that a sequence is not cut below."""

Changes = tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """Settings that fit.

    Attributes:
        changes: overrides that make them of the run's.
        plan: their memory.
        prediction: their step; None where nothing is known of the machine but its memory.
    """

    changes: Changes
    plan: Plan
    prediction: Prediction | None = None

    @property
    def rounds_otherwise(self) -> bool:
        """Whether the optimizer keeps its states or weights in another format than the run's."""
        return any(word.startswith(_FORMATS) for word in self.changes)

    @property
    def speed(self) -> float:
        """Predicted tokens per second."""
        assert self.prediction is not None
        return self.prediction.tokens_per_second

    def adds_nothing_to(self, other: Choice) -> bool:
        """Whether it is another choice with more changes, and hardly faster."""
        return _adds_nothing(self, other, self.speed)


def _adds_nothing(one: Choice, other: Choice, speed: float) -> bool:
    return set(other.changes) < set(one.changes) and speed < (1 + WORTH) * other.speed


_FORMATS = ("optimizer=", "optimizer.optimizer_class=", "optimizer.state_dtype=", "optimizer.master=")


@dataclass(frozen=True)
class _Candidate:
    changes: Changes
    settings: Any
    least: Plan
    speed: float


def _kind(candidate: _Candidate) -> Changes:
    """What it changes beside its micro-batch."""
    return tuple(word for word in candidate.changes if not word.startswith("batch_size="))


class OfMemory(Protocol):
    """Tells the memory of settings, as :class:`offload.training.budgeting.Planner` does."""

    def plan(self, settings: Any, device: torch.device, dtype: torch.dtype) -> Plan:
        """With its activations; raises UserError where they do not go together."""

    def least(self, settings: Any, device: torch.device, dtype: torch.dtype) -> Plan:
        """Without them."""


class OfSpeed(Protocol):
    """Tells the speed of settings, as :class:`offload.training.predicting.Predictor` does."""

    def predict(self, settings: Any, plan: Plan, machine: Machine, dtype: torch.dtype, room: Room) -> Prediction:
        """The steady state."""

    def estimate(self, settings: Any, plan: Plan, machine: Machine, dtype: torch.dtype, room: Room) -> float:
        """Tokens per second."""

    def work(self, settings: Any, plan: Plan, dtype: torch.dtype, *, on_gpu: bool) -> Work:
        """Of a micro-batch."""


class Ranking:
    """Searches settings near a run's for those that fit and are fast.

    Args:
        settings: of the run.
        planner: of their memory.
        predictor: of their speed.
        machine: rates.
        device: where they train, an accelerator.
        limits: bytes of the device and of the host; None for what is not known.
        allowed: whether a run would take overrides.
        beside: other overrides, each of which is tried with all else.
    """

    def __init__(
        self,
        settings: TrainSettings,
        planner: OfMemory,
        predictor: OfSpeed,
        machine: Machine,
        device: torch.device,
        limits: tuple[int | None, int | None],
        allowed: Callable[[Changes], bool],
        beside: Sequence[Changes] = ((),),
    ) -> None:
        self._beside = beside
        self._settings, self._planner, self._predictor = settings, planner, predictor
        self._machine, self._device, self._limits, self._allowed = machine, device, limits, allowed
        self._dtype = DTYPES[settings.dtype]
        self._room = Room(*limits)
        self._leasts: dict[Changes, Plan] = {}

    def best(self, number: int) -> list[Choice]:
        """The fastest that fit, with their predictions; one of each kind, with the micro-batch that suits it.

        One that keeps the optimizer's formats is among them, if any fits, and none that makes another one hardly
        faster. Where nothing fits so, less is in flight; where nothing fits at the run's length and chunks of the loss,
        these are cut too, no further than it takes.
        """
        if not self._least((), self._settings).budget.may_fit(self._limits[0]):
            return []
        found: list[Choice] = []
        for shapes, in_flight in (
            (list(self._shapes()), ()),
            (list(self._shapes()), ("0.25",)),
            *(([shape], ("0.25", "0.125")) for shape in self._smaller_shapes()),
        ):
            candidates = self._candidates(shapes, in_flight)
            found = found or self._told(candidates, number)
            if found and all(choice.rounds_otherwise for choice in found):
                same = [each for each in candidates if not Choice(each.changes, each.least).rounds_otherwise]
                exact = list(map(self._predicted, itertools.islice(self._fitting(same), 1)))
                found = [*found[: number - len(exact)], *exact]
            if any(not choice.rounds_otherwise for choice in found):
                break
        return sorted(found, key=lambda choice: (-choice.speed, len(choice.changes)))

    def _told(self, candidates: Sequence[_Candidate], number: int) -> list[Choice]:
        """The fastest that fit, without those that add nothing to another one: by their estimates beside its
        prediction, which may be less than was estimated, and by their predictions."""
        speeds = {candidate.changes: candidate.speed for candidate in candidates}
        found: list[Choice] = []
        for choice in itertools.islice(self._fitting(candidates), 2 * number):
            if not any(_adds_nothing(choice, other, speeds[choice.changes]) for other in found):
                found.append(self._predicted(choice))
                if len(found) == number:
                    break
        return [choice for choice in found if not any(map(choice.adds_nothing_to, found))]

    def _predicted(self, choice: Choice) -> Choice:
        changed = applied(self._settings, choice.changes)
        found = self._predictor.predict(changed, choice.plan, self._machine, self._dtype, self._room)
        plan = placed(choice.plan, found, changed.optimizer, self._dtype.itemsize)
        return Choice(choice.changes, plan, found)

    def _fitting(self, candidates: Sequence[_Candidate]) -> Iterator[Choice]:
        """What fits, in the order of estimated speed.

        A candidate's estimate leaves strategy ``auto`` the memory that activations take: its turn comes when no other
        candidate promises more than it does without that.
        """
        of_kinds: dict[Changes, list[_Candidate]] = {}
        for candidate in candidates:
            of_kinds.setdefault(_kind(candidate), []).append(candidate)
        kinds: set[Changes] = set()
        later: list[tuple[float, Choice]] = []
        for candidate in candidates:
            while later and later[-1][0] >= candidate.speed:
                yield later.pop()[1]
            kind = _kind(candidate)
            if kind in kinds:
                continue  # a larger micro-batch of this kind fits, or was as fast
            found = self._choice(candidate)
            if found is None:
                continue
            kinds.add(kind)
            if is_auto(candidate.settings.optimizer):
                later.append(self._with_room(found, of_kinds[kind]))
                later.sort(key=lambda each: each[0])
            else:
                yield found
        yield from (choice for _, choice in reversed(later))

    def _choice(self, candidate: _Candidate) -> Choice | None:
        """The candidate with its memory, if it fits and is allowed."""
        try:
            found = self._planner.plan(candidate.settings, self._device, self._dtype)
        except UserError:
            return None
        fits = found.budget.fits(*self._limits) and self._allowed(candidate.changes)
        return Choice(candidate.changes, found) if fits else None

    def _with_room(self, found: Choice, kind: Sequence[_Candidate]) -> tuple[float, Choice]:
        """Of strategy ``auto``, which has the memory that activations leave: the fastest micro-batch that is no larger
        than one that fits, and its estimated tokens per second."""
        choices = [found]
        for candidate in kind:
            if candidate.settings.batch_size < found.plan.batch:
                choices += filter(None, [self._choice(candidate)])

        def speed(choice: Choice) -> float:
            changed = applied(self._settings, choice.changes)
            return self._predictor.estimate(changed, choice.plan, self._machine, self._dtype, self._room)

        return max(((speed(choice), choice) for choice in choices), key=lambda each: each[0])

    def _candidates(self, shapes: Sequence[Changes], in_flight: Sequence[str]) -> list[_Candidate]:
        """What may fit, in the order of estimated speed."""
        found: list[_Candidate] = []
        for optimizer in optimizers(self._settings, in_flight):
            with contextlib.suppress(UserError):
                changed = applied(self._settings, optimizer)
                least = self._least(optimizer, changed)
                if not least.budget.fits(*self._limits):
                    continue
                for shape in shapes:
                    settings = applied(changed, shape)
                    length = settings.tokenizer.get("max_seq_len") or least.length
                    sized = dataclasses.replace(least, batch=settings.batch_size, length=int(length))
                    if not self._may_fit(settings, sized):
                        continue
                    speed = self._predictor.estimate(settings, sized, self._machine, self._dtype, self._room)
                    found.append(_Candidate((*shape, *optimizer), settings, sized, speed))
        if not found:
            return []
        fastest = max(candidate.speed for candidate in found)
        # Speeds that are hardly different are one speed: of these the fewest changes come first.
        return sorted(found, key=lambda each: (round((1 - each.speed / fastest) / ALIKE), len(each.changes)))

    def _least(self, optimizer: Changes, changed: TrainSettings) -> Plan:
        """What a run with a changed optimizer takes beside its activations."""
        if optimizer not in self._leasts:
            self._leasts[optimizer] = self._planner.least(changed, self._device, self._dtype)
        return self._leasts[optimizer]

    def _may_fit(self, settings: TrainSettings, least: Plan) -> bool:
        """Whether what a forward without checkpointing keeps at the very least leaves room, which needs no trace."""
        if settings.enable_activation_checkpointing or self._limits[0] is None:
            return True
        work = self._predictor.work(settings, least, self._dtype, on_gpu=True)
        return least.budget.device + KEPT * work.layers * work.layer[0].moved <= self._limits[0]

    def _shapes(self) -> Iterator[Changes]:
        batch = self._settings.batch_size
        batches = sorted({max(1, batch >> shift) for shift in range(5)} | {2 * batch, 4 * batch}, reverse=True)
        recomputes = self._settings.enable_activation_checkpointing
        for size, recompute, beside in itertools.product(batches, (recomputes, not recomputes), self._beside):
            yield (
                *beside,
                *((f"batch_size={size}",) if size != batch else ()),
                *((f"enable_activation_checkpointing={recompute}",) if recompute != recomputes else ()),
            )

    def _smaller_shapes(self) -> Iterator[Changes]:
        """The longest sequences first."""
        settings = self._settings
        length = settings.tokenizer.get("max_seq_len")
        chunks = settings.loss.get("num_output_chunks")
        lengths = [f"tokenizer.max_seq_len={int(length) // cut}" for cut in (2, 4, 8) if int(length) // cut >= CUT] if (
            length
        ) else []  # fmt: skip
        beside = [
            *((f"batch_size={1}",) if settings.batch_size > 1 else ()),
            *(() if settings.enable_activation_checkpointing else ("enable_activation_checkpointing=True",)),
            *((f"loss.num_output_chunks={4 * int(chunks)}",) if chunks else ()),
        ]
        yield tuple(beside)
        for word in lengths:
            yield (word, *beside)


def optimizers(settings: TrainSettings, in_flight: Sequence[str] = ()) -> Iterator[Changes]:
    """Other schedules and states of a run's optimizer, its own first.

    Args:
        settings: of the run.
        in_flight: GiB to try, where they are fewer than the run's.
    """
    section = settings.optimizer
    if str(section["_component_"]).rpartition(".")[2] != "OffloadOptimizer":
        yield ()
        if str(section["_component_"]).startswith(("torch.optim.", "bitsandbytes.optim.")):
            start = ("optimizer=offload.OffloadOptimizer", "optimizer.optimizer_class=offload.optim.AdamW")
            for strategy, late in itertools.product(("stream", "host"), (True, False)):
                if late or settings.gradient_accumulation_steps == 1:
                    yield (*start, f"optimizer.strategy={strategy}", *(() if late else _early(settings)))
        return
    given = {
        "optimizer.strategy": str(section.get("strategy", "host")),
        "optimizer.update_in_backward": str(bool(section.get("update_in_backward"))),
        "optimizer.offload_gradients": str(bool(section.get("offload_gradients"))),
        "optimizer.in_flight_gib": str(float(section.get("in_flight_gib", 1.0))),
        "optimizer.state_dtype": str(section.get("state_dtype", "int8")),
        "optimizer.master": str(section.get("master", "split")),
    }
    is_packed = section.get("optimizer_class") == "offload.optim.AdamW"
    states = [(given["optimizer.state_dtype"], given["optimizer.master"])]
    if is_packed and settings.dtype == "bf16":
        states += [("int8", "split"), ("int8", "split24"), ("int8", "stochastic")]
    elif is_packed:
        states.append(("int8", given["optimizer.master"]))
    own = given["optimizer.in_flight_gib"]
    in_flight = [own, *(gib for gib in in_flight if float(gib) < float(own))]
    strategies = [given["optimizer.strategy"], "stream", "host", "resident", "auto"]
    seen: set[Changes] = set()
    for strategy, early, offloads, gib, (state_dtype, master) in itertools.product(
        strategies, ("True", "False"), ("False", "True"), in_flight, states
    ):
        wanted = dict(zip(given, (strategy, early, offloads, gib, state_dtype, master), strict=True))
        if strategy == "resident" and (offloads == "True" or gib != in_flight[0]):
            continue
        if early == "True" and offloads == "True" and settings.gradient_accumulation_steps == 1:
            continue  # each gradient goes when its unit is updated
        changes = tuple(f"{key}={value}" for key, value in wanted.items() if value != given[key])
        if "optimizer.update_in_backward=True" in changes:
            changes = (*changes, *_early(settings)[1:])
        if changes not in seen:
            seen.add(changes)
            yield changes


def _early(settings: TrainSettings) -> Changes:
    """Updates in backward, and what goes with them."""
    clips = ("clip_grad_norm=null",) if settings.clip_grad_norm is not None else ()
    return ("optimizer.update_in_backward=True", *clips)


def applied(settings: Any, changes: Sequence[str]) -> Any:
    """Settings with overrides of keys that are known to be right; nothing is checked."""
    values: dict[str, Any] = {}
    for word in changes:
        key, _, text = word.lstrip("~").partition("=")
        head, _, rest = key.partition(".")
        value = yaml.safe_load(text)
        current = values.get(head, getattr(settings, head))
        if isinstance(current, DictConfig):
            if head not in values:
                current = current.copy()
            if word.startswith("~"):
                current.pop(rest)
            else:
                current[rest or "_component_"] = value
            value = current
        values[head] = value
    return dataclasses.replace(settings, **values)

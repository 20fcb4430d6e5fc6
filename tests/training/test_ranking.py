"""Settings that fit, fastest first: overrides that do not contradict each other, and an order that prediction gives."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from offload.distributed.world import World
from offload.plan.budget import DEVICE, LOCKED, STATES, Budget, Item
from offload.plan.workload import MACHINES
from offload.training.budgeting import Plan
from offload.training.ranking import Ranking, applied, optimizers
from offload.training.several import exchanges

GIB = 2**30


@dataclass
class Settings:
    """What a ranking reads of a run's."""

    optimizer: DictConfig
    loss: DictConfig = field(default_factory=lambda: OmegaConf.create({"num_output_chunks": 8}))
    tokenizer: DictConfig = field(default_factory=lambda: OmegaConf.create({"max_seq_len": 1024}))
    batch_size: int = 4
    gradient_accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    enable_activation_checkpointing: bool = True
    dtype: str = "bf16"


def packed(**more: Any) -> Any:
    section = {"_component_": "offload.OffloadOptimizer", "optimizer_class": "offload.optim.AdamW", **more}
    return Settings(OmegaConf.create(section))


def test_overrides_change_a_copy() -> None:
    settings = packed(strategy="stream")
    changed = applied(settings, ("batch_size=2", "optimizer.strategy=host", "clip_grad_norm=null",
                                 "enable_activation_checkpointing=False"))  # fmt: skip
    assert (changed.batch_size, changed.optimizer.strategy) == (2, "host")
    assert changed.enable_activation_checkpointing is False and changed.clip_grad_norm is None
    assert (settings.batch_size, settings.optimizer.strategy) == (4, "stream")
    assert changed.loss is settings.loss
    plain = Settings(OmegaConf.create({"_component_": "torch.optim.AdamW"}))
    assert (
        applied(plain, ("optimizer=offload.OffloadOptimizer",)).optimizer["_component_"] == "offload.OffloadOptimizer"
    )


def test_variations_begin_with_the_run_and_contradict_nothing() -> None:
    settings = packed(strategy="stream", update_in_backward=True, master="split")
    found = list(optimizers(settings, ("0.25",)))
    assert found[0] == () and len(set(found)) == len(found)
    for changes in found:
        section = applied(settings, changes).optimizer
        assert not (section.get("update_in_backward") and section.get("offload_gradients")), changes
        assert not (section.strategy == "resident" and section.get("offload_gradients")), changes
        keys = [word.partition("=")[0] for word in changes]
        assert len(set(keys)) == len(keys)
    assert {applied(settings, changes).optimizer.strategy for changes in found} == {
        "stream", "host", "resident", "auto"
    }  # fmt: skip


def test_less_is_in_flight_only_where_that_is_asked_for() -> None:
    settings = packed(strategy="stream")
    assert not any("in_flight" in word for changes in optimizers(settings) for word in changes)
    asked = {word for changes in optimizers(settings, ("0.25", "2.0")) for word in changes if "in_flight" in word}
    assert asked == {"optimizer.in_flight_gib=0.25"}


def test_an_update_in_backward_takes_clipping_along() -> None:
    settings = packed(strategy="stream")
    settings.clip_grad_norm = 1.0
    for changes in optimizers(settings):
        assert ("optimizer.update_in_backward=True" in changes) == ("clip_grad_norm=null" in changes)


class _Planner:
    """Weights of 4 GiB; 1 GiB of activations a sequence, four times as much without checkpointing."""

    def __init__(self) -> None:
        self.planned: list[Any] = []

    def _plan(self, settings: Any, activations: int) -> Plan:
        states = 8 * GIB if settings.optimizer.get("strategy") == "resident" else 0
        items = Item(DEVICE, "weights", 4 * GIB + states), Item(DEVICE, "activations", activations)
        return Plan(Budget(items), 10**9, 10**9, settings.batch_size, 1024, ())

    def least(self, settings: Any, device: torch.device, dtype: torch.dtype) -> Plan:
        return self._plan(settings, 0)

    def plan(self, settings: Any, device: torch.device, dtype: torch.dtype) -> Plan:
        self.planned.append(settings)
        kept = 1 if settings.enable_activation_checkpointing else 4
        cut = 1024 // settings.tokenizer.max_seq_len
        return self._plan(settings, kept * settings.batch_size * GIB // cut)


class _Predictor:
    """Larger micro-batches are faster, recomputation costs a third, and only what is resident hides nothing."""

    def estimate(self, settings: Any, plan: Plan, machine: Any, dtype: torch.dtype, room: Any) -> float:
        slow = {"resident": 1.0, "auto": 0.9, "stream": 0.9, "host": 0.5}[settings.optimizer.get("strategy", "host")]
        early = 1.0 if settings.optimizer.get("update_in_backward") else 0.8
        return plan.batch / (plan.batch + 1) * slow * early * (0.75 if settings.enable_activation_checkpointing else 1)

    def predict(self, settings: Any, plan: Plan, machine: Any, dtype: torch.dtype, room: Any) -> Any:
        speed = self.estimate(settings, plan, machine, dtype, room)
        return type("Predicted", (), {"tokens_per_second": speed, "placed": {}})()

    def work(self, *_: Any, **__: Any) -> Any:
        amount = type("Amount", (), {"moved": 0.0})()
        return type("Work", (), {"layers": 1, "layer": (amount, amount)})()


def ranked(gib: float, *, allowed: Any = lambda changes: True, planner: Any = None, predictor: Any = None) -> list[Any]:
    settings = packed(strategy="stream", update_in_backward=True)
    limits = (int(gib * GIB), None)
    ranking = Ranking(settings, planner or _Planner(), predictor or _Predictor(), MACHINES["rtx4090"],
                      torch.device("cuda"), limits, allowed)  # type: ignore[arg-type]  # fmt: skip
    return ranking.best(4)


def test_the_fastest_that_fits_is_first() -> None:
    best = ranked(40.0)
    assert best[0].changes[-1] == "optimizer.strategy=resident"
    assert "enable_activation_checkpointing=False" in best[0].changes
    speeds = [choice.prediction.tokens_per_second for choice in best]
    assert speeds == sorted(speeds, reverse=True)
    assert all(choice.plan.budget.device <= 40 * GIB for choice in best)


def test_where_less_fits_the_micro_batch_shrinks_and_states_go() -> None:
    best = ranked(8.5)
    assert best[0].plan.budget.device <= 8.5 * GIB
    assert not any("resident" in word for choice in best for word in choice.changes)


def test_where_nothing_fits_sequences_are_cut() -> None:
    best = ranked(4.6)
    assert best and all("tokenizer.max_seq_len=512" in choice.changes for choice in best), (
        "and no further than it takes"
    )
    assert ranked(3.0) == []


def test_what_cannot_fit_is_not_planned_and_what_is_refused_not_told() -> None:
    planner = _Planner()
    ranked(8.5, planner=planner)
    assert not any(settings.optimizer.get("strategy") == "resident" for settings in planner.planned)
    assert all(not choice.changes for choice in ranked(40.0, allowed=lambda changes: not changes))


class _Auto(_Predictor):
    """`auto` is the fastest of what has room, and keeps a quarter of the states on the device."""

    def estimate(self, settings: Any, plan: Plan, machine: Any, dtype: torch.dtype, room: Any) -> float:
        assert (room.device, room.host) == (int(8.5 * GIB), None)
        faster = 1.05 if settings.optimizer.get("strategy") == "auto" else 1.0
        return faster * super().estimate(settings, plan, machine, dtype, room)

    def predict(self, settings: Any, plan: Plan, machine: Any, dtype: torch.dtype, room: Any) -> Any:
        found = super().predict(settings, plan, machine, dtype, room)
        is_auto = settings.optimizer.get("strategy") == "auto"
        found.placed, found.reserved = ({"resident": 0.25, "stream": 0.75} if is_auto else {}), 0.0
        return found


class _Locking(_Planner):
    """8 GiB of states on the host."""

    def _plan(self, settings: Any, activations: int) -> Plan:
        plan = super()._plan(settings, activations)
        return replace(plan, budget=Budget((*plan.budget.items, Item(LOCKED, STATES, 8 * GIB))))


def test_auto_is_among_them_where_it_is_faster_with_the_states_that_it_keeps() -> None:
    best = ranked(8.5, planner=_Locking(), predictor=_Auto())
    assert best[0].changes[-1] == "optimizer.strategy=auto"
    same = next(choice for choice in best if choice.changes == best[0].changes[:-1])
    assert best[0].plan.budget.device == same.plan.budget.device + 2 * GIB
    assert best[0].plan.budget.host == same.plan.budget.host


class _LeftOver(_Predictor):
    """`auto` is the faster the more memory is left."""

    def estimate(self, settings: Any, plan: Plan, machine: Any, dtype: torch.dtype, room: Any) -> float:
        left = (8.5 * GIB - plan.budget.device) / GIB if settings.optimizer.get("strategy") == "auto" else 0.0
        return (1 + left) * super().estimate(settings, plan, machine, dtype, room)


def test_auto_has_the_micro_batch_that_leaves_it_room() -> None:
    """A larger one fits, and before its activations are known it would be faster."""
    best = ranked(8.5, predictor=_LeftOver())[0]
    assert best.changes == ("batch_size=2", "optimizer.strategy=auto"), (
        "2 / 3 * 3.5, beside 1 / 2 * 4.5 and 4 / 5 * 1.5"
    )


class _Exposed(_Predictor):
    """What streams is estimated to be hidden, as what is resident, and is not."""

    def estimate(self, settings: Any, plan: Plan, machine: Any, dtype: torch.dtype, room: Any) -> float:
        section = settings.optimizer
        is_slow = section.strategy not in ("stream", "resident") or "master" in section or "state_dtype" in section
        return (0.5 if is_slow or not section.update_in_backward else 1.0) * plan.batch / (plan.batch + 1)

    def predict(self, settings: Any, plan: Plan, machine: Any, dtype: torch.dtype, room: Any) -> Any:
        share = 1.0 if settings.optimizer.get("strategy") == "resident" else 0.8
        speed = share * self.estimate(settings, plan, machine, dtype, room)
        return type("Predicted", (), {"tokens_per_second": speed, "placed": {}})()


def test_one_that_is_slower_than_its_estimate_hides_no_faster_one() -> None:
    best = ranked(40.0, predictor=_Exposed())
    assert "optimizer.strategy=resident" in best[0].changes


class _Rounding(_Predictor):
    """Every other format is faster, and `auto` by 1 %."""

    def estimate(self, settings: Any, plan: Plan, machine: Any, dtype: torch.dtype, room: Any) -> float:
        faster = 1.01 if settings.optimizer.get("strategy") == "auto" else 1.0
        faster *= 4.0 if settings.optimizer.get("master", "split") != "split" else 1.0
        return faster * super().estimate(settings, plan, machine, dtype, room)


def test_one_that_keeps_the_optimizers_formats_is_among_them() -> None:
    best = ranked(8.5, predictor=_Rounding())
    assert best[0].rounds_otherwise and "optimizer.master=" in " ".join(best[0].changes)
    (same,) = [choice for choice in best if not choice.rounds_otherwise]
    assert same is best[-1] and 1 < len(best) <= 4


class _Crowded(_Rounding):
    """`auto` promises most, until its activations take the memory."""

    def estimate(self, settings: Any, plan: Plan, machine: Any, dtype: torch.dtype, room: Any) -> float:
        faster = 1.0
        if settings.optimizer.get("strategy") == "auto":
            faster = 3.0 if plan.budget.device == 4 * GIB else 0.5
        return faster * super().estimate(settings, plan, machine, dtype, room)


def test_auto_waits_for_what_is_faster_than_it_is_with_its_activations() -> None:
    """Of those with the optimizer's own formats one alone is predicted."""
    (same,) = [choice for choice in ranked(8.5, predictor=_Crowded()) if not choice.rounds_otherwise]
    assert same.changes == ()


def test_what_makes_another_one_hardly_faster_is_not_told() -> None:
    best = ranked(8.5, predictor=_Rounding())
    assert not any("optimizer.strategy=auto" in choice.changes for choice in best)
    for one in best:
        assert not any(one.adds_nothing_to(other) for other in best)


def test_what_processes_exchange_is_tried_with_all_else() -> None:
    settings = packed(strategy="stream")
    settings.reshard_after_forward, settings.reduce_dtype, settings.data_parallel_replicate_dim = True, "fp32", 1
    of_host = World(size=4, local_size=4)
    assert list(exchanges(settings, of_host)) == [
        (), ("reshard_after_forward=False",), ("reduce_dtype=bf16",),
        ("reshard_after_forward=False", "reduce_dtype=bf16"),
    ]  # fmt: skip
    settings.reshard_after_forward, settings.reduce_dtype = "auto", "bf16"
    found = [("reshard_after_forward=False",), ("reshard_after_forward=True",)]
    assert list(exchanges(settings, of_host)) == found
    of_hosts, replicated = World(size=8, local_size=4), ("data_parallel_replicate_dim=2",)
    assert list(exchanges(settings, of_hosts)) == [*found, *((*replicated, *each) for each in found)]
    settings.data_parallel_replicate_dim = "auto"
    alone = ("data_parallel_replicate_dim=1",)
    assert list(exchanges(settings, of_hosts)) == [(*words, *each) for words in (alone, replicated) for each in found]


@pytest.mark.parametrize("kind", ["torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit"])
def test_another_optimizer_may_become_ours(kind: str) -> None:
    settings = Settings(OmegaConf.create({"_component_": kind}))
    found = list(optimizers(settings))  # type: ignore[arg-type]
    assert found[0] == () and all(words[0] == "optimizer=offload.OffloadOptimizer" for words in found[1:])
    assert len(found) == 5


def test_of_settings_that_differ_in_their_micro_batch_alone_one_is_told() -> None:
    best = ranked(400.0)
    kinds = [tuple(word for word in choice.changes if not word.startswith("batch_size=")) for choice in best]
    assert len(kinds) > 1 and len(set(kinds)) == len(kinds)


def test_a_sixteenth_of_the_micro_batch_is_tried_before_sequences_are_cut() -> None:
    settings = replace(packed(strategy="stream", update_in_backward=True), batch_size=16)
    limits = (int(5.5 * GIB), None)
    ranking = Ranking(settings, _Planner(), _Predictor(), MACHINES["rtx4090"], torch.device("cuda"),
                      limits, lambda changes: True)  # type: ignore[arg-type]  # fmt: skip
    best = ranking.best(4)
    assert best and all("batch_size=1" in choice.changes for choice in best)
    cut = ("tokenizer.max_seq_len", "loss.num_output_chunks")
    assert not any(word.startswith(cut) for choice in best for word in choice.changes)


def test_what_a_forward_moves_tells_nothing_of_one_that_is_recomputed() -> None:
    class Moves(_Predictor):
        def work(self, *_: Any, **__: Any) -> Any:
            amount = type("Amount", (), {"moved": 1e12})()
            return type("Work", (), {"layers": 1, "layer": (amount, amount)})()

    best = ranked(40.0, predictor=Moves())
    assert best and not any("enable_activation_checkpointing=False" in choice.changes for choice in best)


@pytest.mark.parametrize(("micro_batches", "early"), [(1, True), (2, False)])
def test_another_optimizer_updates_in_backward_of_a_single_micro_batch_alone(micro_batches: int, early: bool) -> None:
    plain = Settings(OmegaConf.create({"_component_": "torch.optim.AdamW"}), gradient_accumulation_steps=micro_batches)
    found = list(optimizers(plain))  # type: ignore[arg-type]
    assert any("optimizer.update_in_backward=True" in changes for changes in found) is early
    assert any("optimizer.strategy=stream" in changes for changes in found)

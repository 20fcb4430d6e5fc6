"""What is advised of the changes that there are, with budgets that the tests choose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.distributed.world import World
from offload.errors import UserError
from offload.plan.budget import DEVICE, HOST, LOCKED, Budget, Item
from offload.plan.workload import MACHINES
from offload.training import advice
from offload.training.advice import ALONE, Advisor
from offload.training.placement import Room

CPU = torch.device("cpu")
GIB = 1 << 30


class Recipe:
    """Refuses overrides that hold ``wrong``, and accepts no more than ``most``."""

    adapts = False
    most = 9

    @classmethod
    def check(cls, settings: Any, notes: Any) -> None:
        if any("wrong" in word for word in settings.changes) or len(settings.changes) > cls.most:
            raise UserError("it cannot be")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lines about a run of 100 GiB, half of it page-locked where it is the host's, and changes that save so many."""

    def advise(saves: Mapping[str, int], room: int | None, *, of_device: bool = False, both: int = 0) -> list[str]:
        def plans(changes: Sequence[str]) -> Any:
            left = 100 - sum(saves[word] for word in saves if all(each in changes for each in word.split()))
            left += both * (len(changes) > 1 and "b=1" in changes)
            places = [(DEVICE, left)] if of_device else [(LOCKED, 50), (HOST, left - 50), (DEVICE, 500)]
            return SimpleNamespace(budget=Budget(tuple(Item(place, "all", size * GIB) for place, size in places)))

        monkeypatch.setattr(advice, "cheaper", lambda settings: iter([word.split() for word in saves]))
        monkeypatch.setattr(Advisor, "_plans", lambda self, device, used: plans)
        monkeypatch.setattr(Advisor, "_times", lambda self, device, plans: lambda changes: None)
        advisor = Advisor(Recipe, lambda changes: SimpleNamespace(dtype="fp32", changes=changes))  # type: ignore[arg-type, return-value]
        found = advisor.lines(CPU, of_device=of_device, used=0, room=None if room is None else room * GIB)
        return found[next(index for index, line in enumerate(found) if line.startswith(("what saves", "no setting"))) :]

    return advise


def test_what_saves_most_is_told_first_once_for_each_key(told: Any) -> None:
    lines = told({"a=1": 5, "b=1": 30, "wrong=1": 60, "b=2": 20, "c=1": 1, "d=1": 10, "e=1": 7}, None)
    assert [line.split() for line in lines[1:]] == [
        ["30.00", "GiB", "b=1"],
        ["10.00", "GiB", "d=1"],
        ["7.00", "GiB", "e=1"],
    ]
    assert told({"c=1": 1, "wrong=1": 50}, 90) == [
        "no setting saves any of it: take a smaller model, or more memory"
    ], "a hundredth is worth no override"


@pytest.mark.parametrize(
    ("of_device", "room", "enough"), [(False, 100, 90), (True, 100, 95), (False, 80, 72), (True, 200, 95)]
)
def test_enough_leaves_a_margin_of_the_room_or_of_what_did_not_fit(
    of_device: bool, room: int, enough: int, told: Any
) -> None:
    for left in (enough, enough + 1):
        last = told({"a=1": 100 - left}, room, of_device=of_device)[-1]
        if left == enough:
            assert last == f"enough, with {left}.00 GiB: a=1"
        else:
            assert last == "no combination of them is enough: take a smaller model, or more memory"


def test_enough_is_what_saves_no_more_than_it_must(told: Any) -> None:
    assert told({"a=1": 60, "b=1": 20, "wrong=1": 15, "c=1": 5}, 100)[-1] == "enough, with 80.00 GiB: b=1"


def test_several_are_enough_where_one_is_not(told: Any) -> None:
    saves = {"a=1": 20, "b=1": 15, "a=2 c=1": 12, "d=1": 5}
    assert told(saves, 70)[-1] == "enough, with 60.00 GiB: a=1 b=1 d=1", "not two values of one key"


def test_several_that_leave_just_the_room_are_enough(told: Any) -> None:
    assert told({"a=1": 20, "b=1": 17}, 70)[-1] == "enough, with 63.00 GiB: a=1 b=1"


@pytest.mark.parametrize(
    ("room", "expected"),
    [(60, (("b=1",), 60)), (45, (("a=1", "b=1"), 10)), (20, (("a=1", "b=1"), 10)), (5, (("a=1",), 50))],
)
def test_less_to_lock_is_enough_or_what_saves_most(
    room: int, expected: tuple[tuple[str, ...], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plans(changes: Sequence[str]) -> Any:
        left = 100 - 50 * ("a=1" in changes) - 40 * ("b=1" in changes)
        return SimpleNamespace(budget=Budget((Item(LOCKED, "all", left * GIB), Item(HOST, "all", 7 * GIB))))

    monkeypatch.setattr(advice, "cheaper", lambda settings: iter([["a=1"], ["b=1"]]))
    monkeypatch.setattr(Advisor, "_plans", lambda self, device, used: plans)
    advisor = Advisor(Recipe, lambda changes: SimpleNamespace(dtype="fp32", changes=changes))  # type: ignore[arg-type, return-value]
    found = advisor.less_to_lock(CPU, used=0, room=room * GIB)
    assert found is not None and (found.changes, found.locked // GIB) == expected


def test_what_takes_more_beside_others_is_left_out(told: Any) -> None:
    saves = {"a=1": 20, "b=1": 15, "c=1": 14}
    assert told(saves, 78, both=25)[-1] == "enough, with 66.00 GiB: a=1 c=1"


def test_several_that_a_run_refuses_together_are_not_advised(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recipe, "most", 1)
    assert told({"a=1": 20, "b=1": 15}, 75)[-1].startswith("no combination")


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (80.0, "+500 ms a step (+25%)"),
        (125.0, "-400 ms a step (-20%)"),
        (97.0, "+62 ms a step (+3%)"),
        (100.2, "no time"),
        (None, None),
    ],
)
def test_time_is_that_of_as_many_tokens(
    after: float | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = []

    class Known:
        def __init__(self, planner: Any) -> None:
            pass

        def predict_here(self, settings: Any, *_: Any, **__: Any) -> Any:
            speed = after if settings.changes else 100.0
            seconds = 3.0 if settings.changes else 2.0  # of other numbers of tokens
            return speed and (SimpleNamespace(tokens_per_second=speed, step_seconds=seconds), "measured")

        def predict_ranks_here(self, settings: Any, *_: Any, **kwargs: Any) -> Any:
            hosts.append(kwargs["hosts"])
            return self.predict_here(settings)

    monkeypatch.setattr(advice, "Predictor", Known)
    monkeypatch.setattr(Advisor, "_sharding", lambda self, changed: None)
    for world in (ALONE, World(0, 2, 0, 2), World(0, 4, 0, 2)):
        advisor = Advisor(Recipe, lambda changes: SimpleNamespace(dtype="fp32", changes=changes), world=world)  # type: ignore[arg-type, return-value]
        advisor._planner = SimpleNamespace()  # type: ignore[assignment]
        time = advisor._times(CPU, lambda changes: SimpleNamespace())  # type: ignore[arg-type, return-value]
        assert time(("a=1",)) == expected
    assert list(dict.fromkeys(hosts)) == [1, 2]


def test_the_room_of_a_run_on_the_cpu_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "total_memory", lambda device: 5)
    monkeypatch.setattr(advice, "allowance", lambda used, *, processes: 48 // processes)
    cuda = torch.device("cuda")
    for world, of_host in ((ALONE, 48), (World(0, 8, 0, 4), 12)):
        rooms = [advice.room(device, world, of_device=of) for device in (CPU, cuda) for of in (True, False)]
        assert rooms == [of_host, of_host, 5, of_host]


@pytest.mark.parametrize(("speed", "network"), [(12.5e9, 0.8 * 12.5e9), (None, math.inf)])
def test_the_step_of_several_hosts_is_that_of_their_network(
    speed: float | None, network: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    class Known:
        def __init__(self, planner: Any) -> None:
            pass

        def predict_ranks(self, *given: Any, **_: Any) -> Any:
            found.append(given[2])
            return SimpleNamespace(step_seconds=2.0)

    monkeypatch.setattr(advice, "Predictor", Known)
    monkeypatch.setattr(Advisor, "_sharding", lambda self, changed: None)
    monkeypatch.setattr(Advisor, "_plans", lambda *_: lambda changes: None)
    monkeypatch.setattr("offload.distributed.network.speed", lambda: speed)
    advisor = Advisor(Recipe, lambda changes: SimpleNamespace(dtype="fp32"), world=World(0, 4, 0, 2))  # type: ignore[arg-type, return-value]
    advisor._planner = SimpleNamespace()  # type: ignore[assignment]
    assert advisor.step_seconds(torch.device("cuda"), MACHINES["rtx4090"], used=0, room=Room()) == 2.0
    (system,) = found
    assert (system.hosts, system.network) == (2, network)

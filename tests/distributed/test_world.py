"""What processes know of each other and tell each other, and which device each takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offload.distributed import network, watch
from offload.distributed.sharding import check_shape
from offload.distributed.world import PeerError, World, current, is_shared, joined, status_of
from offload.errors import UserError
from tests.distributed.ranks import Ranks


class _Odd(Exception):
    """It cannot be pickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def _raise(error: Exception) -> None:
    raise error


def _outcome(function: Any) -> Any:
    try:
        return function()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "status", None)


def _together(failing: int, error: Exception) -> None:
    world = current()
    with world.together():
        if world.rank == failing:
            raise error


def _all_have(function: Any) -> bool:
    """Whether the error is marked as one that all have."""
    try:
        function()
    except Exception as error:
        return is_shared(error)
    raise AssertionError


def _all_fail() -> None:
    with current().together():
        raise KeyError("everywhere")


def _talk() -> dict[str, Any]:
    world = current()
    rank = world.rank
    return {
        "who": (rank, world.size, world.is_main),
        "total": world.total([rank, 2**53 - 3 if rank == 0 else 1]),
        "greatest": world.greatest([rank, -rank]),
        "gathered": world.gathered({"rank": rank}),
        "summed": world.summed(torch.tensor(float(rank))).item(),
        "from main": _outcome(lambda: world.from_main(lambda: f"of {rank}")),
        "mistake of main": _outcome(lambda: world.from_main(lambda: _raise(UserError("x: wrong")))),
        "odd error of main": _outcome(lambda: world.from_main(lambda: _raise(_Odd("a", "b")))),
        "mistake of 1": _outcome(lambda: _together(1, UserError("y: wrong"))),
        "defect of 2": _outcome(lambda: _together(2, KeyError("z"))),
        "nobody's": _outcome(lambda: _together(9, KeyError("z"))),
        "first": world.is_first("word"),
        "by one": [world.gathered_by(1, rank), world.gathered_by(0, -rank)],
        "all have": [
            _all_have(lambda: world.from_main(lambda: _raise(UserError("x: wrong")))),
            _all_have(_all_fail),
            _all_have(lambda: _together(1, UserError("y: wrong"))),
        ],
    }


def test_what_three_processes_tell_each_other(ranks: Ranks) -> None:
    said = ranks.run(3, _talk)
    for rank, mine in enumerate(said):
        assert mine["who"] == (rank, 3, rank == 0)
        assert mine["total"] == [3, 2**53 - 1]
        assert mine["greatest"] == [2, 0]
        assert mine["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert mine["summed"] == 3
        assert mine["from main"] == "of 0"
        assert mine["mistake of main"] == ("UserError", "x: wrong", None)
        assert mine["odd error of main"][:2] == (("_Odd", "a") if rank == 0 else ("RuntimeError", "_Odd: a"))
        own, defect = ("UserError", "y: wrong", None), ("KeyError", "'z'", None)
        assert mine["mistake of 1"] == (own if rank == 1 else ("PeerError", "another process failed", 2))
        assert mine["defect of 2"] == (defect if rank == 2 else ("PeerError", "another process failed", 1))
        assert mine["nobody's"] is None
        assert mine["by one"] == [[0, 1, 2] if rank == 1 else [], [0, -1, -2] if rank == 0 else []]
        assert mine["all have"] == [True, True, False]
    assert sorted(mine["first"] for mine in said) == [False, False, True]


def test_one_process_tells_itself_and_waits_for_nobody() -> None:
    world = current()
    assert world == World() and world.is_main and world.is_first("word")
    assert world.total([2.5]) == [2.5] and world.greatest([3]) == [3] and world.gathered("x") == ["x"]
    assert world.from_main(lambda: 7) == 7
    with pytest.raises(KeyError), world.together():
        raise KeyError
    with world.together():
        world.barrier()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("all_reduce", lambda world: world.total([1.0])),
        ("all_gather_object", lambda world: world.gathered(1)),
        ("broadcast_object_list", lambda world: world.from_main(lambda: 1)),
        ("gather_object", lambda world: world.gathered_by(0, 1)),
    ],
)
def test_processes_talk_by_the_group_of_their_world(name: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread beside training would meet the collectives of training otherwise."""
    used: list[Any] = []
    monkeypatch.setattr(torch.distributed, name, lambda *args, **options: used.append([*args, *options.values()]))
    call(World(0, 2, group="a group of its own"))
    assert "a group of its own" in used[0]


def test_the_watch_knows_who_is_waited_for_before_pytorch_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Watched:
        limit = given.append
        stillness = 7200.0

    monkeypatch.setattr(watch, "active", Watched)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_set_pg_timeout", given.append)
    monkeypatch.setattr(torch.distributed, "new_group", lambda *, backend, timeout: given.append(timeout))
    World().limit_waiting(90.0)
    World(0, 2).apart()
    assert given[0] == 90.0 and all(
        least < each.total_seconds() < least + 600 for each, least in zip(given[1:], (90, 7200), strict=True)
    )


def test_status_of_errors() -> None:
    assert [status_of(error) for error in (None, UserError("x"), KeyError("x"))] == [0, 2, 1]
    World().check_peers(0)
    with pytest.raises(PeerError) as caught:
        World().check_peers(2)
    assert caught.value.status == 2


def test_each_process_takes_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert World(5, 8, 1, 2).device(cuda) == torch.device("cuda", 1) and taken == [1]
    assert World(5, 8, 1, 2).device(cpu) == cpu
    assert World().device(torch.device("cuda", 1)) == torch.device("cuda", 1) and taken == [1]
    with pytest.raises(UserError, match="use --nproc_per_node 2, or device=cpu"):
        World(3, 4, 3, 4).device(cuda)
    with pytest.raises(UserError, match="use --nproc_per_node 2"):
        World(2, 3, 2, 3).device(cuda)
    with pytest.raises(UserError, match="device: got cuda:1, and each of 4 processes takes a device of its own"):
        World(1, 4, 1, 4).device(torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("size", "replicate", "resharding", "said"),
    [
        (4, 2, True, None), (4, 4, False, None), (8, 1, 4, None), (1, 3, 5, None),
        (4, 3, True, "data_parallel_replicate_dim: got 3, expected a divisor of the 4 processes: 1, 2, 4"),
        (8, 2, 4, "reshard_after_forward: got 4, expected True, False, or a number that divides the 4 processes"),
        (8, 1, 3, "reshard_after_forward: got 3"), (8, 1, 1, "reshard_after_forward: got 1"),
    ],
)  # fmt: skip
def test_shapes_that_processes_can_have(size: int, replicate: int, resharding: bool | int, said: str | None) -> None:
    world = World(0, size, 0, size)
    if said is None:
        check_shape(world, replicate=replicate, reshard_after_forward=resharding)
        return
    with pytest.raises(UserError, match=said):
        check_shape(world, replicate=replicate, reshard_after_forward=resharding)


def test_where_a_process_is_among_those_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert current() == World(5, 8, 1, 2)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert current() == World(5, 8, 5, 8), "all on one host, where nobody tells"


def test_a_life_meets_nothing_of_the_one_before_but_its_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun keeps its store when it starts the processes again."""
    kept = torch.distributed.TCPStore("localhost", 0, is_master=True)
    given: list[Any] = []

    @contextlib.contextmanager
    def watching(one: watch.Watch) -> Iterator[None]:
        given.append(one._store)
        yield

    monkeypatch.setattr("offload.distributed.world.is_launched", lambda: True)
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *_, **__: iter([(kept, 0, 1)]))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, store, **__: given.append(store))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(network, "choose", given.append)
    monkeypatch.setattr(watch, "watching", watching)
    for life in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(life))
        assert World.noted("where") is None
        World.note("where", "nowhere")
        with joined():
            assert World.noted("where") == (None if life == 0 else "step 7")
            World.note("where", "step 7")
    before, after = given[:3], given[3:]
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        old.set(f"word {number}", "of old")
        assert old.check([f"word {number}"]) and not new.check([f"word {number}"])

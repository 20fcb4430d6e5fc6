"""Strategy ``auto``: where each unit's states rest and who updates them is found out in the first steps.

It begins as ``stream`` does, with all states in page-locked host memory. After two steps the device's peak is known,
and states move to the memory that was left over. Where the base optimizer gives the same bits on the CPU and the link
is what a step waits for, the CPU then updates a share of the rest, as much as its speed and the link's let expect; the
steps after are timed, and a share that made none of them faster is taken back. Moving changes no bit. The host memory
of states that were moved stays reserved, so that they can come back whenever the device runs short, without
page-locking anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.base import step_alone
from offload.engine.engine import Engine
from offload.engine.forecast import Form
from offload.engine.host import HostCopies
from offload.engine.memory import carve
from offload.engine.placement import Placement
from offload.engine.runtime import Direction, Runtime
from offload.engine.shards import local
from offload.engine.states import States
from offload.engine.stream import StreamPipeline
from offload.engine.units import Piece, Slice, Unit, Way, components
from offload.host_memory import host_memory
from offload.placing import FIRST_SHARE, Speeds, first, for_cpu, host_share, spread

log = logging.getLogger(__name__)

GIB = 2**30

WARM_UP = 2
"""Steps: the first creates states, the second is the first of the usual kind."""

TIMED = 2
"""Steps that are timed, after one in which what was changed settles."""

FASTER = 0.01
"""Of a step's time, what the CPU's help has to save to be kept."""

AHEAD = 4.0
"""Of the largest piece, how many times gradients may wait on the host for the CPU: on the device, where more of it than
the update takes would be in the way of what streams."""

SPARE = 0.03
"""Of the device's memory, what is left free: longer batches may come."""

GIVEN_BACK = 4
"""One in so many of the bytes on the device leaves it when memory runs short."""

LINK_BOUND = 1.5
"""A step that takes longer than so many times the link's work is not waiting for the link."""

SMALL = 2**26
"""Bytes of states that are not worth measuring anything for."""

HOST_SHARE = 0.5
"""Of the host's free memory, what copies of parameters may take that the CPU's help may turn out to need."""

BUFFER = 2**24
"""Bytes of the copies that tell the link's speed."""

PROBE = 2**21
"""Elements of the parameter whose update tells the CPU's speed."""

Course = Generator[None, None, None]
"""What happens between steps; each ``yield`` is a step."""


class AutoPlacement(Placement):
    """Rules as in ``offload_states``, and for states that none matches a memory that may change.

    Args:
        rules: see :class:`Placement`; ``".*"`` for none.

    Attributes:
        on_device: ``(state, parameter's name)`` of those that rest on the device, and that no rule matches.
    """

    def __init__(self, rules: str | Sequence[object]) -> None:
        super().__init__([] if rules == ".*" else rules)
        self.on_device: set[tuple[str, str]] = set()

    def is_free(self, state: str, name: str) -> bool:
        """Whether no rule says where it rests."""
        return self.rule(state, name) is None

    def memory(self, state: str, name: str) -> str:
        return self.rule(state, name) or ("device" if (state, name) in self.on_device else "pinned_host")


@dataclass(eq=False)
class Portion:
    """What moves as one: a piece's parameters, or all pieces of a parameter that is cut.

    Attributes:
        unit: whose.
        pieces: those.
        slices: its parameters, whole.
    """

    unit: Unit
    pieces: list[Piece]
    slices: list[Slice]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Portion) and self.pieces[0] is other.pieces[0]

    def __hash__(self) -> int:
        return hash(self.pieces[0])

    @property
    def rank(self) -> int:
        return min(piece.rank for piece in self.pieces)

    @property
    def way(self) -> Way:
        return self.pieces[0].way

    @way.setter
    def way(self, way: Way) -> None:
        for piece in self.pieces:
            piece.way = way

    @property
    def params(self) -> list[nn.Parameter]:
        return [part.param for part in self.slices]

    @property
    def elements(self) -> int:
        return sum(part.numel for part in self.slices)

    @property
    def weights(self) -> int:
        """Bytes of its parameters."""
        return sum(local(param).nbytes for param in self.params)


class Auto:
    """Moves portions of an optimizer's states between its steps.

    Args:
        runtime: of the device.
        engine: what it moves things of.
        states: theirs.
        placement: where they rest.
        copies: host copies of parameters that the CPU updates; None where it may not.
        ring: what brings states to the device.
        rekey: tells the base optimizer that other tensors are updated in place of some parameters.
        device: of the parameters.
        in_backward: when updates run.
        speeds: of this machine; None to measure them where they are needed.
        budget: bytes of the device that may be taken, by whatever is on it; None for all that is free.
    """

    def __init__(
        self,
        runtime: Runtime,
        engine: Engine,
        states: States,
        placement: AutoPlacement,
        copies: HostCopies | None,
        ring: StreamPipeline,
        rekey: Callable[[], None],
        *,
        device: torch.device,
        in_backward: bool,
        speeds: Speeds | None,
        budget: int | None,
    ) -> None:
        self._runtime = runtime
        self._engine = engine
        self._states = states
        self._placement = placement
        self._copies = copies
        self._ring = ring
        self._rekey = rekey
        self._device = device
        self._in_backward = in_backward
        self._speeds = speeds
        self._budget = budget
        self._lifted: list[Portion] = []
        self._for_cpu: list[Portion] = []
        self._share = 0.0
        self._ring_sizes: tuple[int, int] | None = None
        self._course = self._steps()

    @property
    def may_use_cpu(self) -> bool:
        """Whether the CPU may come to update something."""
        return bool(self._for_cpu)

    @property
    def has_lifted(self) -> bool:
        """Whether states were moved to the device, and could leave it."""
        return bool(self._lifted)

    # What a step calls

    def begin(
        self,
        forms: Callable[[Slice], Iterable[Form]],
        base_class: type[torch.optim.Optimizer],
        base_kwargs: dict[str, Any],
    ) -> None:
        """Find out, before the first step, what the CPU may update, and reserve what it will need for that.

        Args:
            forms: the states that a parameter will have.
            base_class: what updates.
            base_kwargs: what it is built with.
        """
        portions = self.portions()
        parts = [part for portion in portions for part in portion.slices]
        states = sum(
            each.elements(part) * each.dtype.itemsize
            for part in parts
            for form in forms(part)
            for each in form.components
        )
        if self._copies is None or not states or (self._speeds is None and states < SMALL):
            return
        if self._speeds is None:
            largest = max(parts, key=lambda part: part.numel)
            self._speeds = measured(self._runtime, base_class, base_kwargs, largest.param)
        weights = sum(portion.weights for portion in portions)
        elements = sum(portion.elements for portion in portions)
        self._share = host_share(states / elements, weights / elements, self._speeds)
        chosen = for_cpu(portions, lambda portion: portion.elements, self._share)
        if not chosen or sum(portion.weights for portion in chosen) > HOST_SHARE * host_memory().usable:
            return
        self._for_cpu = chosen
        self._copies.reserve([param for portion in chosen for param in portion.params])
        log.info(
            "strategy=auto: the CPU updates %.2f G parameters/s and the link moves %.1f GB/s each way: up to %.0f %% "
            "of the parameters may be the CPU's, if steps turn out to wait for the link",
            self._speeds.cpu / 1e9,
            self._speeds.link / 1e9,
            100 * self._share,
        )

    def after_step(self) -> None:
        """Do what is due; between steps, when nothing of the next is queued."""
        next(self._course)

    def give_back(self, nbytes: float = float("inf")) -> int:
        """Bring states back to the host that were moved to the device, at least ``nbytes`` if there are as many;
        returns how many bytes. No more are moved to the device afterwards."""
        self._course = self._watch()
        return self._lower(nbytes)

    def make_room(self) -> bool:
        """After a torch.OutOfMemoryError: whether states left the device for it and the step under way may begin again,
        with gradients dropped. Not where some layers were updated in its backward already, and not where other
        processes would wait for this one."""
        has_peers = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._engine.has_updated or (has_peers and torch.distributed.get_world_size() > 1):
            return False
        return self.give_back() > 0

    def placed(self) -> dict[str, dict[str, float]]:
        """By way of updating, ``bytes`` of states and the ``units`` that they are of, of which a share counts."""
        found: dict[str, dict[str, float]] = {}
        for portion in self.portions():
            mine = found.setdefault(portion.way, {"bytes": 0, "units": 0.0})
            mine["bytes"] += self.bytes_of(portion)
            mine["units"] += portion.elements / sum(local(param).numel() for param in portion.unit.params)
        return {way: found[way] for way in ("resident", "stream", "host") if way in found}

    def told(self) -> str:
        """Where states are, and what is left of the device's memory."""
        does = {"resident": "stay on the device", "stream": "stream over the link", "host": "are updated by the CPU"}
        parts = [
            f"{entry['bytes'] / GIB:.2f} GiB of states ({entry['units']:.3g} units) {does[way]}"
            for way, entry in self.placed().items()
        ]
        left = self._left()
        return ", ".join(parts) + ("" if left is None else f"; {left / GIB:.2f} GiB of the device stay free")

    # The course of things

    def _steps(self) -> Course:
        for _ in range(WARM_UP - 1):
            yield
        self._fill()
        yield
        if self._for_cpu:
            yield from self._try_cpu()
        log.info("strategy=auto: %s", self.told())
        yield from self._watch()

    def _watch(self) -> Course:
        """Give back where the allocator had to scrape memory together."""
        retries = self._runtime.retries()
        while True:
            yield
            if self._lifted and self._runtime.retries() > retries:
                freed = self._lower(sum(map(self.bytes_of, self._lifted)) / GIVEN_BACK)
                log.warning("strategy=auto: device memory ran short; %.2f GiB of states left it", freed / GIB)
            retries = self._runtime.retries()

    def _try_cpu(self) -> Course:
        """Let the CPU update a share, then half of it, and keep what makes steps fastest."""
        alone = yield from self._timed()
        assert self._speeds is not None
        streamed = sum(self.bytes_of(portion) for portion in self.portions() if portion.way == "stream")
        if alone > LINK_BOUND * streamed / self._speeds.link:
            return
        best, kept = alone, list[Portion]()
        for share in (self._share, self._share / 2):
            self.let_cpu_update(self._choose_for_cpu(share))
            seconds = yield from self._timed()
            if seconds < (1 - FASTER) * best:
                best, kept = seconds, [portion for portion in self._for_cpu if portion.way == "host"]
            else:
                self.let_cpu_update(kept)
        log.info("strategy=auto: %.3f s a step, %.3f s with the CPU's help", alone, best)

    def _timed(self) -> Generator[None, None, float]:
        """The seconds of a step, between two points at which all is done."""
        yield
        self._engine.settle()
        begin = self._runtime.now()
        for _ in range(TIMED):
            yield
        self._engine.settle()
        return (self._runtime.now() - begin) / TIMED

    # What moves

    def portions(self) -> list[Portion]:
        """All that is trained, in the order in which the next forward needs it."""
        found: dict[object, Portion] = {}
        for piece in self._engine.pieces:
            whole = piece.slices[0].is_whole
            portion = found.setdefault(piece if whole else piece.slices[0].param, Portion(piece.unit, [], []))
            portion.pieces.append(piece)
            if len(portion.pieces) == 1:
                trained = [part for part in piece.slices if part.param.requires_grad]
                portion.slices += [replace(part, start=0, stop=local(part.param).numel()) for part in trained]
        return sorted((portion for portion in found.values() if portion.slices), key=lambda portion: portion.rank)

    def bytes_of(self, portion: Portion) -> int:
        """Of its states, as far as there are any."""
        return sum(part.nbytes for _, _, value in self._states_of(portion) for part in components(value))

    def _states_of(self, portion: Portion) -> list[tuple[Slice, str, Tensor]]:
        return [
            (part, key, value)
            for part in portion.slices
            for key, value in list(self._states.of(part.param).items())  # a worker may be adding to them
            if isinstance(value, Tensor) and value.dim()
        ]

    def _left(self) -> int | None:
        """Bytes of the device that may still be taken."""
        memory = self._runtime.memory_left()
        if memory is None:
            return None
        left, total = memory
        if self._budget is not None:
            left = min(left, self._budget - (total - left))
        return left

    def _fit_ring(self) -> None:
        """Where nothing streams any more, the staging ring's memory is for gradients; else it is there again."""
        streams = any(portion.way == "stream" for portion in self.portions())
        if not streams:
            self._ring_sizes = self._ring.release(to_gradients=True) or self._ring_sizes
        while streams and self._ring_sizes is not None:
            try:
                self._ring.reserve(*self._ring_sizes)
                self._ring_sizes = None
            except torch.OutOfMemoryError:
                if not self._lifted:
                    raise
                self.lower(self._lifted[-1])

    def _fill(self) -> None:
        """Move states to what is left of the device's memory."""
        left, memory = self._left(), self._runtime.memory_left()
        if left is None or memory is None:
            return
        self._engine.settle(readers=True)
        movable = [portion for portion in self.portions() if portion.way == "stream" and self.is_free(portion)]
        room = left - SPARE * memory[1]
        without_ring = room + self._ring.staging_bytes()
        if sum(map(self.bytes_of, movable)) <= without_ring and len(movable) == len(self.portions()):
            self._ring_sizes, room = self._ring.release(to_gradients=False), without_ring
        # Those that the CPU may update come last, since it takes what the link has to carry otherwise.
        late = set(self._for_cpu)
        for portions in ([p for p in movable if p not in late], [p for p in movable if p in late]):
            # In backward, gradients come all the while, and the link is to have as much to do at any time.
            choose = spread if self._in_backward else first
            for portion in choose(portions, self.bytes_of, room):
                if not self.lift(portion):
                    room = 0
                    break
                room -= self.bytes_of(portion)
        self._fit_ring()

    def is_free(self, portion: Portion) -> bool:
        """Whether it has states, and no rule says where any of them rests."""
        states = self._states_of(portion)
        return bool(states) and all(self._placement.is_free(key, part.name) for part, key, _ in states)

    def lift(self, portion: Portion) -> bool:
        """Move a portion's states to the device, while nothing works on them; False where there is no room."""

        def empty(like: Tensor) -> Tensor:
            return carve(self._runtime.empty_device(like.nbytes), [like])[0]

        # Of the memory of the stream that uses it: what is cached for forward and backward stays whole.
        with self._runtime.updating("states move to the device"):
            for part, key, _ in self._states_of(portion):
                try:
                    self._states.lift(part.param, key, empty, self._copier("up"))
                except torch.OutOfMemoryError:
                    self.lower(portion)
                    return False
                self._placement.on_device.add((key, part.name))
        portion.way = "resident"
        self._lifted.append(portion)
        return True

    def _lower(self, nbytes: float) -> int:
        self._engine.settle(readers=True)
        freed = 0
        while self._lifted and freed < nbytes:
            freed += self.bytes_of(self._lifted[-1])
            self.lower(self._lifted[-1])
        self._fit_ring()
        return freed

    def lower(self, portion: Portion) -> None:
        """The opposite."""
        for part, key, _ in self._states_of(portion):
            if (key, part.name) in self._placement.on_device:
                self._placement.on_device.remove((key, part.name))
                self._states.lower(part, key, self._copier("down"))
        portion.way = "stream"
        if portion in self._lifted:
            self._lifted.remove(portion)

    def _copier(self, direction: Direction) -> Callable[[Tensor, Tensor], None]:
        def copy(target: Tensor, source: Tensor) -> None:
            after = (self._runtime.record(),)
            self._runtime.copy(target, source, direction, after, "states move").synchronize()

        return copy

    def _choose_for_cpu(self, share: float) -> list[Portion]:
        """Of what the CPU may update, so much that it has a share of all that does not rest on the device."""
        portions = [portion for portion in self.portions() if portion.way != "resident"]
        may = set(self._for_cpu)
        able = [portion for portion in portions if portion in may and self.is_free(portion)]
        wanted = share * sum(portion.elements for portion in portions)
        return able if share > 1 - FIRST_SHARE else spread(reversed(able), lambda portion: portion.elements, wanted)

    def let_cpu_update(self, chosen: Iterable[Portion]) -> None:
        """Make these the ones that the CPU updates."""
        self._engine.settle(readers=True)
        wanted = set(chosen)
        for portion in self.portions():
            if (portion.way == "host") != (portion in wanted):
                self._change_hands(portion, to_cpu=portion.way != "host")
        self._fit_ring()

    def _change_hands(self, portion: Portion, *, to_cpu: bool) -> None:
        assert self._copies is not None
        before = [self._copies.of(param) for param in portion.params]
        (self._copies.add if to_cpu else self._copies.drop)(portion.params)
        self._rekey()
        for part, key in zip(portion.slices, before, strict=True):
            self._states.hand_over(key, part, torch.device("cpu") if to_cpu else self._device)
        portion.way = "host" if to_cpu else "stream"


def measured(runtime: Runtime, base_class: type[torch.optim.Optimizer], kwargs: dict[str, Any], like: Tensor) -> Speeds:
    """What the link and the CPU can do, in a fraction of a second.

    Args:
        runtime: of the device.
        base_class: what updates.
        kwargs: what it is built with.
        like: a parameter of the dtype that counts.
    """
    host = [runtime.empty_pinned(BUFFER) for _ in range(2)]
    there = [runtime.empty_device(BUFFER) for _ in range(2)]
    made = (runtime.record(),)
    for _ in range(2):  # the first does not count
        begin = runtime.now()
        for _ in range(4):
            ends = runtime.copy(there[0], host[0], "up", made), runtime.copy(host[1], there[1], "down", made)
        for end in ends:
            end.synchronize()
        link = 4 * BUFFER / max(runtime.now() - begin, 1e-9)
    probe = nn.Parameter(torch.zeros(PROBE, dtype=like.dtype, device="cpu"))
    probe.grad = torch.ones_like(probe)
    base = base_class([probe], **kwargs)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        step_alone(base)
        seconds.append(time.perf_counter() - begin)
    return Speeds(up=link, down=link, cpu=PROBE / min(seconds))

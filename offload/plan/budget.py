"""What a run takes of each kind of memory, item by item, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.engine.memory import padded, slab_sizes
from offload.plan.footprint import ACTIVATIONS, GRADIENTS, PARAMETERS, Footprint

GIB = 2**30

DEVICE, LOCKED, HOST, DISK = "GPU", "host, page-locked", "host", "disk"

STATES, IN_FLIGHT, WEIGHTS, CUDA = "optimizer states", "states and gradients in flight", "weights", "CUDA context"
"""Items, which other parts of a plan look for."""

CONTEXT = int(0.45 * GIB)
"""The CUDA context and its modules: what processes on the cards of scripts/peak_memory.py hold beside PyTorch's
memory."""

SLACK, MOST_SLACK = 0.046, int(0.85 * GIB)
"""What the caching allocator holds beyond what is in use, of that and at most: 14.97 GiB for 14.31 and 27.04 for 26.20
are the largest share and the largest difference in scripts/results/peak_memory.json."""

PIECE = 2**24
"""Bytes of a state at most that travel together, for elementwise optimizers: 16 Mi elements of one byte."""

CUDA_LIBRARIES = int(2.5 * GIB)
"""Of the host, beyond what a process without a GPU takes: CUDA's and its libraries' code and tables. An estimate: no
recorded run has checked it."""

KERNELS = 6 << 20
"""Of the host, pages of PyTorch's and MKL's libraries that the first step of a run on the CPU reads: 6.2 MiB in runs of
tiny_llama_offload, by the resident file pages before and after it."""

OS_SHARE = 0.05
"""Of the host's memory, what the system and other programs are left."""


def readable(nbytes: int) -> str:
    """Bytes as tables give them: ``1.50 GiB``, and MiB where that would say nothing."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 200 else f"{nbytes / 2**20:.2f} MiB"


@dataclass(frozen=True)
class Item:
    """A part of what a run takes.

    Attributes:
        place: one of DEVICE, LOCKED, HOST, DISK.
        name: what it is.
        nbytes: how much.
        note: where it comes from, or what changes it.
    """

    place: str
    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class Budget:
    """All parts of what a run takes.

    Attributes:
        items: each in a place.
    """

    items: tuple[Item, ...]

    def of(self, *places: str) -> int:
        """Bytes in places."""
        return sum(item.nbytes for item in self.items if item.place in places)

    @property
    def device(self) -> int:
        return self.of(DEVICE)

    @property
    def host(self) -> int:
        return self.of(LOCKED, HOST)

    def may_fit(self, device: int | None) -> bool:
        """Whether the card has room for the model's weights: no setting of batches and the optimizer changes them."""
        fixed = sum(item.nbytes for item in self.items if item.place == DEVICE and item.name in (WEIGHTS, CUDA))
        return device is None or fixed <= device

    def lines(self) -> list[str]:
        """A table: place, name, amount and note of each item."""
        width = max((len(item.name) for item in self.items), default=0)
        lines = []
        for place in (DEVICE, LOCKED, HOST, DISK):
            start = place
            for item in self.items:
                if item.place == place:
                    lines.append(f"{start:<18}{item.name:<{width}} {readable(item.nbytes):>12}  {item.note}".rstrip())
                    start = ""
        return lines

    def fits(self, device: int | None, host: int | None) -> bool:
        """Whether there is room in so many bytes of a card and of the host; None for what is not asked."""
        return (device is None or self.device <= device) and (host is None or self.host <= host)


@dataclass(frozen=True)
class Optimizer:
    """What a run's optimizer keeps, and where.

    Attributes:
        device: bytes of states that rest on the device.
        locked: bytes of each tensor in page-locked memory, by purpose, laid side by side in slabs.
        pageable: bytes in pageable host memory, by purpose.
        in_flight: bytes of the device for states and gradients on their way, at most.
        keeps_gradients: they stay on the device until all are there.
        in_slabs: locked tensors share slabs; otherwise PyTorch's allocator rounds each up to a power of two.
    """

    device: int
    locked: dict[str, list[int]]
    pageable: dict[str, int]
    in_flight: int
    keeps_gradients: bool
    in_slabs: bool = True


def locked_bytes(sizes: Iterable[int], *, in_slabs: bool) -> int:
    """Page-locked memory for tensors of so many bytes each."""
    if in_slabs:  # large tensors are cut
        parts = (min(PIECE, size - start) for size in sizes for start in range(0, size, PIECE))
        return sum(slab_sizes([padded(part) for part in parts]))
    return sum(1 << max(size - 1, 0).bit_length() for size in sizes)


class Group(NamedTuple):
    """Parameters that are gathered together.

    Attributes:
        nbytes: of all.
        trained: bytes of those that train: frozen ones have no gradients for ranks to sum.
    """

    nbytes: int
    trained: int


@dataclass(frozen=True)
class Sharding:
    """Parameters, gradients and states in equal parts on several ranks, gathered unit by unit (FSDP2).

    Attributes:
        ranks: number of them.
        resharding: what was gathered for forward is let go of before backward gathers it again; a number: what is not
            this rank's part of it among so many ranks.
        reduce_itemsize: bytes of a number that ranks sum.
        itemsize: bytes of a number of a parameter.
    """

    ranks: int
    resharding: bool | int = True
    reduce_itemsize: int = 2
    itemsize: int = 2

    def part(self, nbytes: int) -> int:
        """A rank's part of a tensor."""
        return -(-nbytes // self.ranks)

    def gathered(
        self, root: Group, layers: Sequence[Group], *, embedding: Group, activations: int = 0
    ) -> list[tuple[str, int]]:
        """What a rank holds at most beside its part, by name; tests/plan/test_per_rank.py measures it.

        Args:
            root: parameters that are gathered with the model, once a step, for forward and backward.
            layers: each layer's.
            embedding: those of an embedding that is gathered by itself.
            activations: bytes that layers have, and an embedding does not.
        """
        if self.ranks == 1:
            return []
        largest = max((layer.nbytes for layer in layers), default=0)
        trained = max((layer.trained for layer in layers), default=0)
        input = self.reduce_itemsize / self.itemsize  # of a reduce-scatter: the gradients in another dtype
        blocks = sum(layer.nbytes for layer in layers) + embedding.nbytes
        if self.resharding is False:
            # When forward ends all, and two buffers that the last were copied out of; in backward a layer's gradients
            # take the place of its weights.
            weights, gradients = blocks, max(WAITING * largest, input * trained)
        else:
            weights = WAITING * largest + (0 if self.resharding is True else blocks // self.resharding)
            gradients = (1 + input) * trained
            # The embedding's backward is the last: what the layers kept is gone then.
            more = WAITING * embedding.nbytes + (1 + input) * embedding.trained - activations
            gradients = max(gradients, more - weights)
        return [
            ("weights, gathered", root.nbytes + int(weights)),
            ("gradients, to be reduced", root.trained + int(gradients)),
        ]


WAITING = 2
"""Layers whose weights FSDP2 has whole at once: the one in use, and the next one's all-gather."""


def on_accelerator(
    counted: Footprint,
    optimizer: Optimizer,
    *,
    weights: int,
    base: int,
    moved: int,
    beside: Iterable[tuple[str, int]] = (),
) -> list[Item]:
    """The items of a run on an accelerator, but for its disk.

    Args:
        counted: forward and backward of one micro-batch.
        optimizer: what it keeps.
        weights: bytes of parameters and buffers, where 4 bits make them fewer than were counted; else as counted.
        base: bytes of the host that a process takes before its model.
        moved: bytes of activations that are in host memory between forward and backward.
        beside: names and bytes of what else is on the device at its fullest moment.
    """
    early = counted.before.total >= counted.after.total + optimizer.in_flight
    moment = counted.before if early else counted.after
    in_flight = 0 if early else optimizer.in_flight
    items = [
        Item(DEVICE, WEIGHTS, weights),
        Item(DEVICE, "gradients", moment.parts.get(GRADIENTS, 0), _kept(optimizer)),
        Item(DEVICE, IN_FLIGHT, in_flight, "optimizer.in_flight_gib"),
        Item(DEVICE, STATES, optimizer.device),
        Item(DEVICE, "activations", max(0, moment.parts.get(ACTIVATIONS, 0) - moved), _when(moment.at)),
        *(Item(DEVICE, name, nbytes) for name, nbytes in beside),
    ]
    used = sum(item.nbytes for item in items)
    items += [
        Item(DEVICE, "slack of PyTorch's allocator", min(int(SLACK * used), MOST_SLACK), "at most"),
        Item(DEVICE, CUDA, CONTEXT),
    ]
    items += [
        Item(LOCKED, name, locked_bytes(sizes, in_slabs=optimizer.in_slabs)) for name, sizes in optimizer.locked.items()
    ]
    items += [Item(LOCKED, "activations", moved, "between forward and backward")]
    items += [Item(HOST, name, nbytes) for name, nbytes in optimizer.pageable.items()]
    items.append(Item(HOST, "Python, PyTorch and CUDA", base + CUDA_LIBRARIES, "an estimate"))
    return [item for item in items if item.nbytes]


def on_cpu(
    counted: Footprint,
    optimizer: Optimizer,
    *,
    weights: int,
    base: int,
    beside: Iterable[tuple[str, int]] = (),
) -> list[Item]:
    """The items of a run on the CPU, where all is in pageable memory; arguments as above."""
    moment = counted.before if counted.before.total >= counted.after.total else counted.after
    states = optimizer.device + sum(map(sum, optimizer.locked.values())) + sum(optimizer.pageable.values())
    items = [
        Item(HOST, WEIGHTS, weights),
        Item(HOST, "gradients", moment.parts.get(GRADIENTS, 0), _kept(optimizer)),
        Item(HOST, STATES, states),
        Item(HOST, "activations", moment.parts.get(ACTIVATIONS, 0), _when(moment.at)),
        *(Item(HOST, name, nbytes) for name, nbytes in beside),
        Item(HOST, "the C library's heap", counted.heap.beyond_use, "holes that nothing fits into"),
        Item(HOST, "kernels' code", KERNELS, "read in the first step"),
        Item(HOST, "Python, libraries, data", base),
    ]
    return [item for item in items if item.nbytes]


def weights_of(counted: Footprint) -> int:
    """Bytes of parameters and buffers."""
    return counted.before.parts[PARAMETERS]


def _kept(optimizer: Optimizer) -> str:
    return "kept until the update" if optimizer.keeps_gradients else ""


def _when(at: str) -> str:
    return f"at most, in {at}" if at and at != "backward" else "at most, in backward" if at else "at most"

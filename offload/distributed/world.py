"""The processes of a run, one for each device: who they are, and what they tell each other.

A run of one process has a world too, of size 1, in which nobody waits for anybody, so that code is the same for both.
What processes tell each other is small and goes from host to host (gloo): no device is waited for. Every process of the
world has to make the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from offload.distributed import network, watch
from offload.errors import UserError

T = TypeVar("T")

TIMEOUT = datetime.timedelta(seconds=watch.STILLNESS)
"""How long a process waits for the others before it gives up: while one of them saves a large checkpoint."""

_LATER = datetime.timedelta(minutes=1)
"""PyTorch's own limit comes so much later than the watch, which knows who is waited for."""


class PeerError(Exception):
    """Another process of the world failed, and tells of what.

    Attributes:
        status: with which it ends.
    """

    def __init__(self, status: int) -> None:
        super().__init__("another process failed")
        self.status = status


@dataclass(frozen=True)
class World:
    """The processes of a run.

    Attributes:
        rank: of this one, from 0.
        size: how many there are.
        local_rank: of this one among those of its host, from 0.
        local_size: how many its host has.
        group: of torch.distributed, by which they talk; None for the default one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    group: Any = None

    @property
    def hosts(self) -> int:
        """How many there are, of as many processes each."""
        return max(1, self.size // max(1, self.local_size))

    @property
    def is_main(self) -> bool:
        """Whether this is the one that speaks, logs and saves."""
        return self.rank == 0

    def device(self, chosen: torch.device) -> torch.device:
        """This process's own of the devices of a kind, made the current one.

        Args:
            chosen: as the configuration names it.

        Raises:
            UserError: its host has fewer than processes, or ``chosen`` is one of several.
        """
        if self.size == 1 or chosen.type == "cpu":
            return chosen
        if chosen.index:
            raise UserError(
                f"device: got {chosen}, and each of {self.size} processes takes a device of its own: set "
                f"device={chosen.type}, and choose among the devices with CUDA_VISIBLE_DEVICES"
            )
        count = torch.accelerator.device_count()
        if self.local_rank >= count:  # it sees one of its own, and is 0, where torchrun was told --virtual-local-rank
            raise UserError(
                f"--nproc_per_node {self.local_size}: {count} devices ({chosen.type}) are seen here, and each "
                f"process takes one: use --nproc_per_node {count}, or device=cpu"
            )
        torch.accelerator.set_device_index(self.local_rank)
        return torch.device(chosen.type, self.local_rank)

    # ---- what they tell each other

    def total(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the processes; numbers up to 2**53 exactly."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def greatest(self, values: Sequence[float]) -> list[float]:
        """The greatest of each value over the processes."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], how: Any) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, how, self.group)
        reduced: list[float] = tensor.tolist()
        return reduced

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor summed over the processes, in place, where it lies; the host does not wait for its device."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gathered(self, value: T) -> list[T]:
        """Every process's value, by rank; anything that can be pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self.group)
        return values

    def from_main(self, function: Callable[[], T]) -> T:
        """What ``function`` gives on the main process, on all of them; the others do not call it.

        Raises:
            Exception: what it raises there, on all of them.
        """
        if self.size == 1:
            return function()
        answer: list[Any] = [None, None]
        if self.is_main:
            try:
                answer[0] = function()
            except Exception as error:
                self._broadcast([None, _portable(error)])
                shared(error)
                raise
        answer = self._broadcast(answer)
        if answer[1] is not None:
            raise shared(answer[1])
        result: T = answer[0]
        return result

    def _broadcast(self, value: list[Any]) -> list[Any]:
        dist.broadcast_object_list(value, src=0, group=self.group, device=torch.device("cpu"))
        return value

    def gathered_by(self, rank: int, value: T) -> list[T]:
        """Every process's value, by rank, on one of them; an empty list on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.rank == rank else []
        dist.gather_object(value, values or None, dst=rank, group=self.group)
        return values

    def apart(self) -> World:
        """The same processes, which tell each other things on another thread than the one that trains."""
        if self.size == 1:
            return self
        watched = watch.active()
        limit = TIMEOUT if watched is None else datetime.timedelta(seconds=watched.stillness)
        return dataclasses.replace(self, group=dist.new_group(backend="gloo", timeout=limit + _LATER))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what may fail on some processes and not on others: then all leave it with an error.

        Inside, processes tell each other nothing.

        Raises:
            PeerError: where this process did not fail and another one did.
        """
        try:
            yield
        except Exception as error:
            status = status_of(error)
            count = self.total([1, status == 2])[0]
            if count == self.size:
                shared(error)
            raise
        count, mendable = self.total([0, 0])
        self.check_peers(0 if not count else 2 if mendable else 1)

    @staticmethod
    def check_peers(status: float) -> None:
        """What the processes that did not fail make of the greatest :func:`status_of`; 0 if none did.

        Raises:
            PeerError: where one did.
        """
        if status:
            raise PeerError(int(status))

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.greatest([0.0])

    def is_first(self, name: str) -> bool:
        """Whether no other process has asked this before; needs no other process to ask. For what is to be said once,
        by any."""
        if self.size == 1:
            return True
        store: Any = dist.distributed_c10d._get_default_store()
        try:
            return int(store.add(f"offload/{name}", 1)) == 1
        except RuntimeError:  # whoever keeps it is gone
            return True

    # ---- when one of them fails

    @property
    def name(self) -> str:
        """How messages call this process."""
        return watch.name_of(self.rank, self.size, socket.gethostname())

    @staticmethod
    def is_broken() -> bool:
        """Whether one of them is known to have failed; looks now."""
        watched = watch.active()
        return watched is not None and watched.is_broken()

    def limit_waiting(self, seconds: float) -> None:
        """How long processes may wait for one that does not move, before the run ends."""
        watched = watch.active()
        if watched is None:
            return
        watched.limit(seconds)
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds) + _LATER)

    @staticmethod
    def note(name: str, value: str) -> None:
        """Leave word for the processes that torchrun starts in this one's place, should this one die."""
        if _notes is not None:
            _notes.set(name, value)

    @staticmethod
    def noted(name: str) -> str | None:
        """What :meth:`note` left, in this process's life or before; None where there is nothing."""
        if _notes is None or not _notes.check([name]):
            return None
        value: bytes = _notes.get(name)
        return value.decode()


E = TypeVar("E", bound=Exception)


def shared(error: E) -> E:
    """Mark an error that all processes have: it is nothing of one of them."""
    error.is_shared = True  # type: ignore[attr-defined]
    return error


def is_shared(error: BaseException) -> bool:
    """Whether all processes have this error."""
    return getattr(error, "is_shared", False)


def status_of(error: BaseException | None) -> int:
    """With which status a process ends after an error: 2 for one that the user can mend; 0 for none."""
    if error is None:
        return 0
    return 2 if isinstance(error, UserError) else 1


def _portable(error: Exception) -> Exception:
    """An error that another process can have: as it is, or where it cannot be pickled, its text."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


_notes: Any = None


def current() -> World:
    """The world of this process; one of size 1 where it joined none."""
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def is_launched() -> bool:
    """Whether torchrun, or what sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


@contextlib.contextmanager
def joined(timeout: datetime.timedelta = TIMEOUT) -> Iterator[World]:
    """Inside, this process is in the world that torchrun started it for, if it did.

    Tensors of an accelerator go by its own backend (nccl, xccl), those of the host by gloo. A device's backend connects
    when it is first used, so that the world is there before anything is known of devices.

    Args:
        timeout: how long to wait for other processes, in any collective.
    """
    global _notes
    if not is_launched() or dist.is_initialized():
        yield current()
        return
    found = torch.accelerator.current_accelerator(check_available=True)
    backend = "gloo"
    if found is not None:
        backend = f"cpu:gloo,{found.type}:{dist.get_default_backend_for_device(found.type)}"
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    life = f"life {watch.restarts()[0]}"  # torchrun keeps its store when it starts the processes again
    _notes = dist.PrefixStore("offload", store.clone())
    network.choose(dist.PrefixStore(f"offload/{life}", store))
    with watch.watching(watch.Watch(rank, size, dist.PrefixStore(f"offload/{life}", store.clone()))):
        dist.init_process_group(
            backend, store=dist.PrefixStore(life, store), rank=rank, world_size=size, timeout=timeout + _LATER
        )
        try:
            yield current()
        finally:
            dist.destroy_process_group()
            _notes = None

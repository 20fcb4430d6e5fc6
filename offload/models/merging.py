"""A model's weights with an adapter merged in, each made when it is asked for: there is never a second model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from offload.distributed.world import World
from offload.engine.shards import is_distributed, local, whole_state
from offload.models.tensors import whole, whole_on


class MergedWeights(Mapping[str, Tensor]):
    """Weights under the model's names; the live model is not touched.

    Where processes share the model, all of them ask for the same weights in the same order. Item access gives each of
    them all of a weight; :meth:`gathered` and :meth:`made` make it on one of them alone.
    """

    def __getitem__(self, name: str) -> Tensor:
        return whole(self.made(name, {param: whole(param) for param in self.merged_from(name)}))

    def gathered(self, name: str, rank: int, world: World) -> dict[Tensor, Tensor] | None:
        """What :meth:`made` takes, each whole; None where another process makes the weight.

        Args:
            name: of a weight.
            rank: of the process that makes it, if it has to be made of others.
            world: the processes. By a group of its own (:meth:`World.apart`) they talk from host to host, beside what
                training tells.
        """
        params = self.merged_from(name)
        wholes = {param: whole_on(rank, param, world, self.read) for param in params}
        if params and rank != world.rank:
            return None
        return {param: tensor for param, tensor in wholes.items() if tensor is not None}

    def read(self, part: Tensor) -> Tensor:
        """This process's part of a tensor on the host, as the others need it."""
        return part.detach().cpu()

    @abstractmethod
    def merged_from(self, name: str) -> Sequence[Tensor]:
        """Tensors that a weight is computed from; none where it is one of the model's own."""

    @abstractmethod
    def made(self, name: str, wholes: Mapping[Tensor, Tensor]) -> Tensor:
        """A weight of :meth:`merged_from`, of which ``wholes`` has all; one of the model's own as it is there, of which
        each process may have a part.

        Raises:
            KeyError: there is no weight of that name.
        """

    @property
    @abstractmethod
    def empty(self) -> dict[str, Tensor]:
        """All of them on the meta device, without making one."""

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(tensor.nbytes for tensor in self.empty.values())

    def made_on(self, device: torch.device) -> tuple[torch.device, int]:
        """Where a model on ``device`` has its weights merged, and the bytes that there are at most while one of them is
        made and written, beside what it is made of."""
        merged = [tensor for name, tensor in self.empty.items() if self.merged_from(name)]
        largest = max(merged, key=lambda each: each.nbytes, default=torch.empty(0))
        place, copies = self.copies(device, largest.dtype)
        return place, copies * largest.nbytes

    @abstractmethod
    def copies(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.device, int]:
        """Where a weight of a model on ``device`` is merged, and how often it is there meanwhile."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.empty)

    def __len__(self) -> int:
        return len(self.empty)


def kept(param: Tensor) -> Tensor:
    """A parameter's values as they are now, on the host: of one that is divided, this process's part."""
    copy = local(param.detach()).to("cpu", copy=True)
    return whole_state(copy, param) if is_distributed(param) else copy

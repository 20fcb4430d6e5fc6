"""Values of a step, brought to the host without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.engine.runtime import DONE, Event, runtime_for

_SLOT_BYTES = 1024
_VALUE_BYTES = 8  # the largest dtype's


class LateReader:
    """Copies 0-dim tensors to page-locked host memory behind the work that computes them.

    The copies have a stream of their own: they wait for nothing but the values, and neither the compute stream nor
    the optimizer's copies wait for them.

    Attributes:
        is_immediate: the device is the CPU, where every value is there at once.

    Args:
        device: where the values are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = runtime_for(device)
        self.is_immediate = self._runtime.shares_memory
        # One for the values that are read, one for those that are queued meanwhile.
        self._free = [self._runtime.empty_pinned(_SLOT_BYTES) for _ in range(2)]

    def fetch(self, values: Mapping[str, Any]) -> LateValues:
        """Queue the copies of what is on the device.

        Args:
            values: by name; tensors of one element, numbers, None.
        """
        numbers, tensors = dict(values), {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.device.type == self._device.type:
                    tensors[name] = value.detach()
                else:  # a tensor lr, the norm of gradients that rest on the host
                    numbers[name] = value.item()
        slot = self._free.pop() if self._free else self._runtime.empty_pinned(_SLOT_BYTES)
        if slot.numel() < len(tensors) * _VALUE_BYTES:
            slot = self._runtime.empty_pinned(len(tensors) * _VALUE_BYTES)
        places: dict[str, Tensor] = {}
        computed: Event = self._runtime.record()
        copied: Event = DONE
        for name, tensor in tensors.items():
            start = len(places) * _VALUE_BYTES
            places[name] = slot[start : start + tensor.itemsize].view(tensor.dtype)
            copied = self._runtime.copy(places[name], tensor.reshape(1), "down", (computed,), f"value {name}")
        return LateValues(self, numbers, places, slot, copied)

    def take_back(self, slot: Tensor) -> None:
        """Memory whose values were read."""
        self._free.append(slot)


@dataclass
class LateValues:
    """Values on their way to the host.

    Attributes:
        reader: who brings them.
        values: all of them; tensors for those that are under way.
        places: the latter's host memory, one element each.
        slot: what that is part of.
        copied: the last copy's end.
    """

    reader: LateReader
    values: Mapping[str, Any]
    places: dict[str, Tensor]
    slot: Tensor
    copied: Event

    def read(self) -> dict[str, Any]:
        """The values as numbers (or None), by name, in the order that they were given in; once. Waits for the device
        to have computed them."""
        self.copied.synchronize()
        numbers = {name: self.places[name].item() if name in self.places else v for name, v in self.values.items()}
        self.reader.take_back(self.slot)
        return numbers

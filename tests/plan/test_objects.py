"""What a step on the CPU asks the C library for beside tensors, against what the C library was asked for."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload.plan.footprint import footprint
from offload.plan.heap import Event, Held
from offload.plan.objects import NODES


class Information(ctypes.Structure):
    """``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
        + ("keepcost",)
    ]


def in_use() -> int:
    """Bytes of chunks of this process."""
    tell = ctypes.CDLL(None).mallinfo2
    tell.restype = Information
    return int(tell().uordblks)


def chunk(nbytes: int) -> int:
    return max(32, (nbytes + 23) & ~15)


class Operation(nn.Module):
    """One operation on [4, 8], and its sum."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))
        self.operation = operation

    def forward(self) -> Tensor:
        return self.operation(self.one, self.other)


OPERATIONS = {
    "mul": lambda x, y: x * y,
    "a number": lambda x, y: x * 2.0,
    "a sum with a number": lambda x, y: x + 2.0,
    "add": lambda x, y: x + y,
    "mm": lambda x, y: torch.mm(x, y),
    "silu": lambda x, y: F.silu(x),
    "pow": lambda x, y: x.pow(2),
    "neg": lambda x, y: -x,
    "clone": lambda x, y: x.clone(),
    "_to_copy": lambda x, y: x.to(torch.bfloat16),
    "gelu": lambda x, y: F.gelu(x),
    "view": lambda x, y: x.view(4, 16),
    "transpose": lambda x, y: x.transpose(0, 1),
    "unsqueeze": lambda x, y: x.unsqueeze(0),
}
MANY = 2000


def counted(module: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch, loss: Callable[[Tensor], Tensor]):
    found: list[Event] = []
    monkeypatch.setattr("offload.plan.footprint.held", lambda step: found.extend(step.first) or Held(0, 0))
    with torch.device("meta"):
        empty = module()
    footprint(empty, lambda: loss(empty()), keeps_gradients=True, host_states=[])
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc what is in use")
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operations_node_and_result_are_as_large_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that one operation leaves, of many, within two of the least chunks."""
    module = Operation(OPERATIONS[name])
    kept = [module() for _ in range(10)]  # libraries and the parameters' own nodes
    before = in_use()
    kept += [module() for _ in range(MANY)]
    measured = (in_use() - before - 8 * MANY) / MANY  # less the list's own
    events = counted(lambda: Operation(OPERATIONS[name]), monkeypatch, lambda out: out.sum())
    of_sum = next(index for index, (_, nbytes, _) in enumerate(events) if nbytes == NODES["sum"][0])
    gone = {key for key, nbytes, _ in events[:of_sum] if nbytes is None}
    told = sum(chunk(nbytes) for key, nbytes, _ in events[:of_sum] if nbytes is not None and key not in gone)
    assert told == pytest.approx(measured, abs=64)
    assert len(kept) == MANY + 10


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.linear(x)) * x


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self) -> Tensor:
        x = self.layers[0](torch.zeros(8, 256, device=self.layers[0].linear.weight.device))
        return checkpoint(self.layers[1], x, use_reentrant=False)


def nodes_of(loss: Tensor) -> int:
    found, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found and "AccumulateGrad" not in node.name():
            found.add(node)
            left += [before for before, _ in node.next_functions]
    return len(found)


def test_nodes_stay_until_backward_is_over_and_those_of_a_second_forward_until_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = counted(Checkpointed, monkeypatch, lambda out: out.sum())
    sizes = {key: nbytes for key, nbytes, is_tensor in events if nbytes is not None and not is_tensor}
    nodes = [key for key, nbytes in sizes.items() if nbytes >= 464]
    gone = {key for key, nbytes, _ in events if nbytes is None}
    # Before PyTorch 2.13 a node that the loss does not lead to keeps a checkpointed layer's inputs.
    expected = nodes_of(Checkpointed()().sum()) + hasattr(torch.utils.checkpoint, "_NoopSaveInputs")
    assert len([key for key in nodes if key not in gone]) == expected
    # The weight transposed, its product, SiLU; the last product ends a second forward before it begins.
    assert len([key for key in nodes if key in gone]) == nodes_of(Layer()(torch.zeros(8, 256, requires_grad=True))) - 1

"""What PyTorch asks the C library for in a step on the CPU: tensors, and the small objects beside them.

Small objects decide which holes tensors leave. Sizes are those of PyTorch for 64-bit Linux, seen by recording every
``malloc`` of a step with 2.13, and with 2.11 by asking the C library what is in use; others' may differ by a few bytes.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from offload.plan.heap import Event

STORAGE, VERSION, TENSOR = 96, 24, 176
"""A tensor with memory of its own has a ``c10::StorageImpl`` before it, then a ``c10::TensorImpl`` and a counter of
versions; a view has a ``c10::TensorImpl``."""

SHARED = torch.__version__ < "2.13"
"""Whether autograd holds its nodes by ``std::shared_ptr`` and not, as since
https://github.com/pytorch/pytorch/pull/181782, by ``c10::intrusive_ptr``, which is half as large and counts in the
node."""

POINTER = 16 if SHARED else 8
COUNTS = (32,) if SHARED else ()
"""What counts a node's owners, where that is not in the node."""

OF_AUTOGRAD, OF_VIEW = 168 + 2 * POINTER, 296 + 2 * POINTER
"""``AutogradMeta`` of a tensor that autograd made a node for, and ``DifferentiableViewMeta`` of a view."""

EDGE, DIMENSION, HOOKED = POINTER + 8, 8, 32
"""A node of autograd's graph has a list of its edges, one for each tensor that it has a gradient for; some have sizes.
Where hooks look after saved tensors, as in a checkpointed layer, each has an object more."""

TASK = (24, 16)
"""Backward has two tables of the nodes."""

_RECORDED = {
    "mul": (640, 2), "div": (632, 2), "add": (512, 0), "sub": (512, 0), "neg": (464, 0), "pow": (576, 1),
    "mm": (736, 2), "addmm": (800, 2), "bmm": (624, 2), "silu": (544, 1), "gelu": (576, 1), "mean": (536, 0),
    "sum": (528, 0), "rsqrt": (544, 1), "sigmoid": (544, 1), "tanh": (544, 1), "exp": (544, 1), "cos": (544, 1),
    "sin": (544, 1), "embedding": (568, 1), "index_select": (576, 1), "cat": (528, 0), "stack": (504, 0),
    "_to_copy": (472, 0), "clone": (464, 0), "t": (464, 0), "alias": (464, 0), "transpose": (480, 0),
    "unsqueeze": (472, 0), "squeeze": (496, 0), "select": (504, 0), "slice": (536, 0), "split": (512, 0),
    "_log_softmax": (560, 1), "nll_loss_forward": (800, 3),
}  # fmt: skip
"""Bytes of an operation's node with PyTorch 2.13, and how many tensors it saves."""


def _here(nbytes: int, saved: int) -> tuple[int, int]:
    """With this PyTorch: a node has a pointer to itself, and three to nodes for each tensor that it saves."""
    return nbytes + (POINTER - 8) * (1 + 3 * saved), saved


NODES = {name: _here(*recorded) for name, recorded in _RECORDED.items()}
OTHER_NODE = _here(488, 0)
"""Views, for the most part."""

NUMBER, IN_FP32 = 8, 4
"""A number beside a tensor becomes a tensor of these bytes, and another to compute with."""

KEEPS_NUMBER = {torch.ops.aten.mul.Tensor: True, torch.ops.aten.div.Tensor: True, torch.ops.aten.add.Tensor: False,
                torch.ops.aten.sub.Tensor: False}  # fmt: skip
"""Whether an operation's node keeps it until it runs in backward; otherwise it goes when the operation ends."""

KEEP_SIZES = {"view", "_unsafe_view", "_reshape_alias", "expand", "sum", "mean", "select", "slice", "as_strided"}
"""Operations whose nodes keep their input's sizes (tools/autograd/derivatives.yaml)."""


class Objects:
    """Follows a step's tensors and nodes.

    Attributes:
        events: in the order in which memory comes and goes. A storage's key is its address; others are negative.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._keys = itertools.count(-3, -3)
        self._nodes = self._first_node = torch._C._autograd._get_sequence_nr()
        self._made_node = False
        self._of_recomputation: list[int] = []
        self._tensors: set[int] = set()
        self._passing: list[int] = []  # keys of what the last operation alone needs
        self._numbers: list[tuple[int, list[int]]] = []  # nodes and the keys of what goes when they run

    def _take(self, nbytes: int, *, is_tensor: bool = False) -> int:
        key = next(self._keys)
        self.events.append((key, nbytes, is_tensor))
        return key

    def _small_tensor(self, nbytes: int) -> list[int]:
        return [
            self._take(STORAGE), self._take(nbytes, is_tensor=True), self._take(TENSOR), self._take(VERSION)
        ]  # fmt: skip

    def _free(self, keys: list[int]) -> None:
        self.events += [(key, None, False) for key in reversed(keys)]
        keys.clear()

    def operation(self, func: Any = None, args: Any = ()) -> None:
        """One begins, and autograd has made its node, whose number is the latest.

        The loss holds on to the nodes of forward until backward is over; a checkpointed layer's second forward to its
        own.
        """
        self._free(self._passing)
        running = torch._C._current_autograd_node()
        is_backward = running is not None
        if is_backward and func is torch.ops.aten.detach.default and not torch.is_grad_enabled():
            self._made_node = False  # the hooks of a second forward, whose operation begins after them
            return
        number = torch._C._autograd._get_sequence_nr()
        made = number - self._nodes
        self._nodes = number
        if is_backward and not torch.is_grad_enabled():
            self._free(self._of_recomputation)
            while self._numbers and self._numbers[-1][0] > running._sequence_nr():
                self._free(self._numbers.pop()[1])
            self._made_node = False
            return
        self._made_node = made > 0
        if not made:
            return
        is_number = func in KEEPS_NUMBER and not isinstance(args[1], Tensor)
        of_number = self._small_tensor(NUMBER) if is_number else []
        sizes = (*(OTHER_NODE[0], *COUNTS, EDGE) * (made - 1), *_of_node(func, args, is_number))
        keys = [self._take(nbytes) for nbytes in sizes]
        if is_backward:
            self._of_recomputation += keys
        if not is_number:
            return
        self._passing += self._small_tensor(IN_FP32)
        if not KEEPS_NUMBER[func]:
            self._passing += of_number
        elif is_backward:
            self._of_recomputation += of_number
        else:
            self._numbers.append((number - 1, of_number))

    def storage(self, key: int, nbytes: int) -> None:
        """A tensor's memory, before the tensor."""
        self.events.append((key + 1, STORAGE, False))
        self.events.append((key, nbytes, True))

    def gone(self, key: int) -> None:
        """The memory of that storage."""
        self.events += [(key + place, None, place == 0) for place in range(2)]

    def tensor(self, tensor: Tensor, *, is_view: bool) -> None:
        """An operation's result; whether the memory is another's."""
        if id(tensor) in self._tensors:  # which it changed in place
            return
        self._tensors.add(id(tensor))
        key = self._take(TENSOR)
        weakref.finalize(tensor, self._let_go, id(tensor), key)
        if not is_view:
            self.events.append((key - 2, VERSION, False))
        if self._made_node:
            self.events.append((key - 1, OF_VIEW if is_view else OF_AUTOGRAD, False))

    def _let_go(self, identity: int, key: int) -> None:
        self._tensors.discard(identity)
        self.events += [(key - place, None, False) for place in (2, 1, 0)]

    def begin_backward(self) -> None:
        """Which has a table of all nodes until it is over."""
        self.operation()
        for _ in range(self._nodes - self._first_node):
            for nbytes in TASK:
                self._take(nbytes)


def _of_node(func: Any, args: Any, is_with_number: bool) -> tuple[int, ...]:
    """Bytes of an operation's node and of what it has, in the order in which PyTorch makes them."""
    given = [each for each in tree_leaves(args) if isinstance(each, Tensor) and each.is_floating_point()]
    if not given:
        return OTHER_NODE[0], *COUNTS, EDGE
    name = func.overloadpacket.__name__
    node, saved = NODES.get(name, OTHER_NODE)
    hooked = (HOOKED,) * saved if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None else ()
    found = node, *COUNTS, EDGE * (len(given) + is_with_number), *hooked
    if name in KEEP_SIZES:
        return *found, DIMENSION * max(1, given[0].dim())
    if name == "mm":  # of both, and their strides
        return *found, *4 * (2 * DIMENSION,)
    return found

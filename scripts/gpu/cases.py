"""Every way to train the Llama, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu.model import Llama

LR = 1e-4
"""Large enough that bf16 weights change in most steps, so that losses tell an update from none."""


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        name: what ``--only`` matches.
        build: ``build(model)`` gives the optimizer.
        needs_gpu: does not run on the CPU.
        managed: bytes per parameter that the driver pages in and out (CUDA's managed memory). Asking for more of it
            than the card has free can hang the card, so such a case has the whole card or does not run.
        equals: the case with the same arithmetic, whose losses have to be the same to the last bit.
        simulated: the schedule of ``scripts/results/timelines.json`` with the same traffic.
    """

    name: str
    build: Callable[[Llama], Any]
    needs_gpu: bool = False
    managed: float = 0.0
    equals: str | None = None
    simulated: str | None = None


class DroppedGradients:
    """No optimizer: gradients are freed as they come.

    Attributes:
        sums: of each gradient since :meth:`count`, the sum over its bits (0-dim, int64); None while nobody asked.
    """

    def __init__(self, model: Llama) -> None:
        self.sums: list[Tensor] | None = None
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self._drop)

    def _drop(self, param: Tensor) -> None:
        assert param.grad is not None
        if self.sums is not None:
            bits = param.grad.view({2: torch.int16, 4: torch.int32}[param.grad.element_size()])
            self.sums.append(bits.sum(dtype=torch.int64))
        param.grad = None

    def count(self) -> None:
        """Sum up what comes from here on."""
        self.sums = []

    def step(self) -> None:
        return None

    def zero_grad(self) -> None:
        return None


def named(path: str, **kwargs: Any) -> Callable[[Llama], Any]:
    """A plain optimizer by its dotted path."""

    def build(model: Llama) -> Any:
        module, _, attribute = path.rpartition(".")
        return getattr(importlib.import_module(module), attribute)(model.parameters(), lr=LR, **kwargs)

    return build


def ours(base: str = "torch.optim.AdamW", *, waits: bool = False, **kwargs: Any) -> Callable[[Llama], Any]:
    """OffloadOptimizer. ``waits``: it knows the model, whose forward waits unit by unit instead of step()."""

    def build(model: Llama) -> Any:
        from offload import OffloadOptimizer

        importlib.import_module(base.rpartition(".")[0])  # a missing package is an ImportError, not a UserError
        options = {**kwargs, "model": model} if waits else kwargs
        return OffloadOptimizer(model.named_parameters(), base, lr=LR, **options)

    return build


def torchao_offload(offload_gradients: bool) -> Callable[[Llama], Any]:
    """torchao's own offloading optimizer."""

    def build(model: Llama) -> Any:
        from torchao.optim import CPUOffloadOptimizer

        adamw = torch.optim.AdamW
        return CPUOffloadOptimizer(model.parameters(), adamw, offload_gradients=offload_gradients, lr=LR)

    return build


def cases() -> list[Case]:
    """In the order of what is most worth knowing."""
    backward: dict[str, Any] = {"update_in_backward": True}
    gradients: dict[str, Any] = {"offload_gradients": True}
    stream: dict[str, Any] = {"strategy": "stream"}
    host: dict[str, Any] = {"strategy": "host"}
    light: dict[str, Any] = {"master": "stochastic"}
    bnb, ao, packed = "bitsandbytes.optim", "torchao.optim", "offload.optim.AdamW"
    streamed, hosted = "`stream`, in backward", "`host`, in backward, waits per unit"

    def packed_case(name: str, *, waits: bool = True, simulated: str | None = None, **options: Any) -> Case:
        build = ours(packed, waits=waits, **options)
        return Case(f"packed-{name}", build, equals="packed", simulated=simulated)

    def torch_case(name: str, *, waits: bool = False, simulated: str | None = None, **options: Any) -> Case:
        """Kernels of the CPU round otherwise than those of the device."""
        equals = None if options["strategy"] == "host" else "adamw"
        return Case(name, ours(waits=waits, **options), equals=equals, simulated=simulated)

    return [
        Case("none", DroppedGradients),
        Case("adamw", named("torch.optim.AdamW", fused=True)),
        packed_case("stream-in-backward+model", simulated=streamed, **stream, **backward),
        packed_case(
            "stream-in-backward-8-gib-in-flight+model",
            simulated=f"{streamed}, 8 GiB in flight",
            **stream,
            **backward,
            in_flight_gib=8.0,
        ),
        packed_case("stream-in-backward-128-mib-in-flight+model", **stream, **backward, in_flight_gib=0.125),
        Case("packed", named(packed)),
        packed_case("host-in-backward+model", simulated=hosted, **host, **backward),
        packed_case("stream-offload-gradients+model", **stream, **gradients),
        Case("packed-light-stream-in-backward+model", ours(packed, waits=True, **stream, **backward, **light)),
        torch_case("stream-in-backward+model", waits=True, simulated=streamed, **stream, **backward),
        torch_case("host+model", waits=True, simulated="`host`, at step", **host),
        torch_case("host-in-backward-offload-gradients+model", waits=True, **host, **backward, **gradients),
        Case("torchao-offload", torchao_offload(False), needs_gpu=True),
        Case("torchao-offload-gradients", torchao_offload(True), needs_gpu=True, simulated="torchao's schedule"),
        Case("bnb-paged-adamw8bit", named(f"{bnb}.PagedAdamW8bit"), needs_gpu=True, managed=2.1),
        Case("bnb-paged-adamw32bit", named(f"{bnb}.PagedAdamW32bit"), needs_gpu=True, managed=8.1),
        torch_case("stream+model", waits=True, simulated="`stream`, at step", **stream),
        packed_case("stream+model", simulated="`stream`, at step", **stream),
        torch_case("host-offload-gradients+model", waits=True, **host, **gradients),
        torch_case("host-in-backward+model", waits=True, simulated=hosted, **host, **backward),
        torch_case("resident-in-backward", strategy="resident", fused=True, **backward),
        Case("stream-torchao-adamw8bit-in-backward+model", ours(f"{ao}.AdamW8bit", waits=True, **stream, **backward)),
        Case("stream-bnb-adamw8bit-in-backward+model", ours(f"{bnb}.AdamW8bit", waits=True, **stream, **backward)),
        Case("bnb-adamw8bit", named(f"{bnb}.AdamW8bit")),
        Case("torchao-adamw8bit", named(f"{ao}.AdamW8bit")),
        torch_case("stream-in-backward", **stream, **backward),
        torch_case("stream", **stream),
        torch_case("host-in-backward", simulated="`host`, in backward, `step()` waits", **host, **backward),
        torch_case("host", **host),
        torch_case("host-offload-gradients", **host, **gradients),
        torch_case("host-in-backward-offload-gradients", **host, **backward, **gradients),
        torch_case("stream-offload-gradients+model", waits=True, **stream, **gradients),
        Case("none-again", DroppedGradients),
    ]


def case_of(name: str) -> Case:
    """The case of that name."""
    return next(case for case in cases() if case.name == name)


def is_compute_alone(name: str) -> bool:
    """Whether a case has no optimizer: what exposed time is measured against."""
    return name in ("none", "none-again")

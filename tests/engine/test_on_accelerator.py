"""The host strategy on a real accelerator, against the plain optimizer on the CPU and on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator, and there is none here"),
]

HOST = [{"strategy": "host"}, {"strategy": "host", "offload_gradients": True}]


def make_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8)]
    return nn.Sequential(*layers).to(device)


def gradients(step: int) -> torch.Tensor:
    return torch.randn(64, 512, generator=torch.Generator().manual_seed(step))


def device() -> str:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return accelerator.type


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("strategy", HOST, ids=lambda s: "-".join(map(str, s.values())))
def test_equals_a_cpu_optimizer_fed_the_same_gradients(strategy: dict[str, Any], accumulation: int) -> None:
    """Same kernel, same device (the CPU): bit for bit, though every tensor crosses the link twice."""
    model, twin = make_model(device()), make_model("cpu")
    optimizer = OffloadOptimizer(model.parameters(), lr=1e-3, **strategy)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)
    for step in range(10):
        witness: list[torch.Tensor] = []
        for part in range(accumulation):
            loss = model(gradients(step * accumulation + part).to(device())).square().mean()
            parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            witness = [a + b for a, b in zip(witness, parts, strict=True)] if witness else list(parts)
            loss.backward()
        for p, gradient in zip(twin.parameters(), witness, strict=True):
            p.grad = gradient.cpu()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    optimizer.synchronize()
    for actual, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("strategy", HOST, ids=lambda s: "-".join(map(str, s.values())))
def test_clipping_and_the_next_forward_see_the_update(strategy: dict[str, Any]) -> None:
    model, plain = make_model(device()), make_model(device())
    optimizer = OffloadOptimizer(model.parameters(), "torch.optim.SGD", lr=0.5, **strategy)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(10):
        for m in (model, plain):
            m(gradients(step).to(device())).square().mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(optimizer.clip_grad_norm_(0.1), expected)
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    for actual, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def test_page_locked_memory_is_counted() -> None:
    model = make_model(device())
    optimizer = OffloadOptimizer(model.parameters(), lr=1e-3, offload_gradients=True)
    nbytes = sum(p.nbytes for p in model.parameters())
    pinned = optimizer.memory_report()["pinned_host"]
    assert nbytes <= pinned["parameters"] < 2 * nbytes and nbytes <= pinned["gradients"] < 2 * nbytes

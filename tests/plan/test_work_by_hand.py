"""Amounts of work that can be counted by hand, and models that keep what they are on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.plan.without_memory import without_memory
from offload.plan.work import CAUSAL, Amount, Work, count

TOKENS, WIDTH = 8, 16


def counted(module: nn.Module, step: Callable[[], Tensor]) -> Work:
    return count(module, [module], step, batch=1, length=TOKENS, fused_norms=True)


def test_a_product_reads_its_weights_and_backward_writes_their_gradients() -> None:
    layer = nn.Linear(WIDTH, 2 * WIDTH, bias=False, device="meta")
    x = torch.zeros(TOKENS, WIDTH, device="meta", requires_grad=True)
    forward, backward = counted(layer, lambda: layer(x).sum()).layer
    assert forward.weights == layer.weight.nbytes and backward.weights == 2 * layer.weight.nbytes
    frozen = nn.Linear(WIDTH, 2 * WIDTH, bias=False, device="meta").requires_grad_(False)
    forward, backward = counted(frozen, lambda: frozen(x).sum()).layer
    assert forward.weights == frozen.weight.nbytes == backward.weights


class Applied(nn.Module):
    def __init__(self, function: Callable[..., Any], *params: nn.Parameter) -> None:
        super().__init__()
        self.function = function
        self.params = nn.ParameterList(params)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.params)


def test_another_micro_batch_launches_as_many_kernels() -> None:
    amount = Amount(1.0, 2.0, 3.0, 4.0, 5.0, 1.0).for_tokens(10.0, 7.0)
    assert amount == Amount(products=10.0, attention=140.0, weights=3.0, moved=31.0, launches=5.0, still=1.0)


def test_what_is_only_written_and_what_is_expanded() -> None:
    x = torch.zeros(TOKENS, WIDTH, device="meta", requires_grad=True)
    plain = counted(fill := Applied(lambda x: x * 2.0), lambda: fill(x).sum()).layer[0]
    assert plain.moved == 2 * x.nbytes and plain.launches == 1
    filled = counted(fill := Applied(lambda x: x * 2.0 + torch.ones_like(x)), lambda: fill(x).sum()).layer[0]
    assert filled.moved == plain.moved + x.nbytes + 3 * x.nbytes and filled.launches == 3
    row = nn.Parameter(torch.zeros(1, WIDTH, device="meta"))
    wide = counted(fill := Applied(lambda x, row: x * row.expand_as(x), row), lambda: fill(x).sum()).layer[0]
    assert wide.moved == 2 * x.nbytes + row.nbytes


def test_attention_over_more_keys_than_queries() -> None:
    query = torch.zeros(1, 2, TOKENS, 4, device="meta", requires_grad=True)
    key = torch.zeros(1, 2, 3 * TOKENS, 4, device="meta")
    attends = Applied(lambda query: F.scaled_dot_product_attention(query, key, key))
    forward, backward = counted(attends, lambda: attends(query).sum()).layer
    assert forward.attention == CAUSAL * 2 * (2 * TOKENS * 3 * TOKENS) * (4 + 4)
    assert backward.attention == 2.5 * forward.attention and forward.moved == 0


def test_a_norms_backward_reads_twice_and_writes_once_in_two_kernels() -> None:
    norm = nn.RMSNorm(WIDTH, device="meta")
    x = torch.zeros(TOKENS, WIDTH, device="meta", requires_grad=True)
    forward, backward = counted(norm, lambda: norm(x).sum()).layer
    assert (forward.moved, forward.launches) == (2 * x.nbytes, 1)
    assert (backward.moved, backward.launches) == (3 * x.nbytes, 2)


def test_experts_compute_what_their_tokens_need() -> None:
    experts = nn.Parameter(torch.zeros(4, WIDTH, 2 * WIDTH, device="meta", dtype=torch.bfloat16))
    routed = Applied(lambda x, experts: torch._grouped_mm(x, experts, torch.zeros(4, device=x.device).int()), experts)

    def step() -> Tensor:
        x = torch.zeros(TOKENS, WIDTH, device=routed.params[0].device, dtype=torch.bfloat16, requires_grad=True)
        return routed(x).square().sum()

    forward, _ = counted(routed, step).layer
    assert forward.products == 2 * TOKENS * WIDTH * 2 * WIDTH and forward.weights == experts.nbytes


def test_tied_and_frozen_weights_stay_so_on_fake_tensors() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    runs: list[str] = []

    def run() -> None:
        runs.append(model[0].weight.device.type)
        if len(runs) == 1:
            raise RuntimeError("a meta tensor has no value")
        assert model[0].weight is model[1].weight
        assert [layer.weight.requires_grad for layer in model] == [True, True, False]

    without_memory(model, run)
    assert runs == ["meta", "cpu"]


@pytest.mark.parametrize("on_fakes", [False, True])
def test_no_gradient_is_left(on_fakes: bool) -> None:
    model = nn.Linear(4, 4, device="meta")
    runs: list[int] = []

    def run() -> None:
        runs.append(1)
        assert model.weight.grad is None
        model(torch.zeros(2, 4, device=model.weight.device)).sum().backward()
        if on_fakes and len(runs) == 1:
            raise RuntimeError("a meta tensor has no value")

    without_memory(model, run)
    assert model.weight.grad is None and len(runs) == 1 + on_fakes

"""The work that is counted, against torch's own count of the same model where it computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from offload.plan.work import CAUSAL, Work, count

LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY = 3, 32, 48, 4, 64


class Layer(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def compute(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(F.silu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            # All of it: what stops early skips the last product.
            return checkpoint(self.compute, x, use_reentrant=False, early_stop=False)
        return self.compute(x)


class Model(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(recompute) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: Model, batch: int, length: int) -> Tensor:
    tokens = torch.zeros(batch, length, dtype=torch.long)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def counted(batch: int, length: int, *, recompute: bool = False, frozen: bool = False) -> Work:
    with torch.device("meta"):
        model = Model(recompute)
    if frozen:
        for each in (model.embedding.weight, *model.layers.parameters()):
            each.requires_grad_(False)
        model.layers[1].up.weight.requires_grad_(True)
    return count(
        model, list(model.layers), lambda: loss_of(model, batch, length), batch=batch, length=length, fused_norms=True
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_products_are_those_that_torch_counts(recompute: bool) -> None:
    work = counted(2, 16, recompute=recompute)
    torch.manual_seed(0)
    model = Model(recompute)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_of(model, 2, 16).backward()
    by_name = {str(function): flops for function, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for name, flops in by_name.items() if "bmm" in name)
    assert work.total.products == sum(by_name.values()) - attention
    # A fused kernel's backward computes the scores again: five products where the plain one has four.
    passes = (1 + 1 + 2, 1 + 1 + 2.5) if recompute else (1 + 2, 1 + 2.5)
    assert work.total.attention == CAUSAL * attention * passes[1] / passes[0] > 0
    weights = 3 * WIDTH**2 + WIDTH**2 + 2 * WIDTH * HIDDEN
    forward, backward = work.layer
    assert forward.products == 2 * 32 * weights
    assert backward.products == (3 if recompute else 2) * forward.products
    assert work.edge[0].products == 2 * 32 * WIDTH * VOCABULARY and work.edge[1].products == 2 * work.edge[0].products
    assert backward.attention == (3.5 if recompute else 2.5) * forward.attention


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    whole, adapted = counted(2, 16), counted(2, 16, frozen=True)
    assert adapted.layer[0].products == whole.layer[0].products
    # Of three layers the first has no backward at all, the second the gradient of one weight.
    assert 0 < adapted.layer[1].products < whole.layer[1].products / 2


def test_another_micro_batch_follows_from_one_that_was_counted() -> None:
    one, other = counted(1, 16).with_batch(4, 32), counted(4, 32)
    assert one.tokens == other.tokens == 128
    assert one.total.products == other.total.products and one.total.attention == other.total.attention
    assert one.total.weights == other.total.weights
    assert one.total.moved == pytest.approx(other.total.moved, rel=0.01)  # 128 tokens pick of 64 rows
    assert one.total.still == other.total.still > 0


class Picks(nn.Module):
    """Rows of a matrix, in three ways, and the loss of four rows of another."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(1000, WIDTH))
        self.logits = nn.Parameter(torch.zeros(4, 1000))

    def loss(self) -> Tensor:
        indices = self.indices()
        picked = (F.embedding(indices, self.rows), self.rows.index_select(0, indices), self.rows[indices])
        return self.loss_of_rows() + sum(each.sum() for each in picked)

    def loss_of_rows(self) -> Tensor:
        return F.nll_loss(self.logits, self.indices())

    def indices(self) -> Tensor:
        return torch.empty(4, dtype=torch.long, device="meta")


def test_what_is_picked_of_a_tensor_is_read_and_no_more() -> None:
    with torch.device("meta"):
        model = Picks()
    work = count(model, [], model.loss, batch=1, length=4, fused_norms=False)
    picks = 3 * (2 * 4 * 4 * WIDTH + 4 * 8)
    sums = 3 * (4 * 4 * WIDTH + 4) + 3 * 3 * 4 + 2 * 4  # Python's begins with 0
    loss = 4 * 8 + 2 * 2 * 4  # the labels; the loss and the weight of all, read no more than written
    assert work.edge[0].moved == picks + sums + loss
    only_loss = count(model, [], model.loss_of_rows, batch=1, length=4, fused_norms=False)
    assert only_loss.edge[0].moved == loss
    assert only_loss.edge[1].moved == 4 * 4 * 1000 + 4  # the gradient, and that of the loss


def test_a_norm_is_one_kernel_on_a_gpu_and_several_on_the_cpu() -> None:
    x = torch.empty(2, 8, WIDTH, device="meta")
    for fused in (True, False):
        norm = nn.RMSNorm(WIDTH, device="meta")
        work = count(norm, [norm], lambda norm=norm: norm(torch.zeros(x.shape)).sum(), batch=2, length=8,
                     fused_norms=fused)  # fmt: skip
        assert (work.layer[0].launches == 1) is fused
        assert work.layer[0].moved == 2 * x.nbytes or not fused

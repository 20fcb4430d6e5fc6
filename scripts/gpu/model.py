"""The Llama that the suite trains: random bf16 weights, checkpointed layers, the loss in chunks; and its batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SEQUENCE = 4096
LOSS_CHUNK = 1024


@dataclass(frozen=True)
class Shape:
    """Of a Llama. ``tied``: the output layer is the embedding."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    tied: bool = False


SHAPES = {
    # One layer with heads as wide as the large models', so that the same kernels are loaded.
    "warm-up": Shape(dim=256, layers=1, heads=2, kv_heads=2, hidden=512, vocabulary=512),
    "tiny": Shape(dim=64, layers=2, heads=4, kv_heads=2, hidden=128, vocabulary=256, tied=True),
    # As the tiny default of the recipes, whose tokenizer has that vocabulary.
    "tiny-recipe": Shape(dim=128, layers=2, heads=4, kv_heads=4, hidden=352, vocabulary=2048),
    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
    "1b": Shape(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, vocabulary=128256, tied=True),
    # https://huggingface.co/meta-llama/Llama-2-7b-hf/blob/main/config.json
    "7b": Shape(dim=4096, layers=32, heads=32, kv_heads=32, hidden=11008, vocabulary=32000),
}


class Layer(nn.Module):
    """One transformer layer on ``[batch, sequence, dim]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(shape.dim, shape.dim, bias=False)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        h = self.attn_norm(x)
        q, k, v = (
            linear(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )  # each [batch, heads, sequence, head_dim]
        q, k = rotate(q, rotation), rotate(k, rotation)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of ``[batch, heads, sequence, head_dim]``."""
    cos, sin = (part[: x.shape[2]] for part in rotation)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Llama(nn.Module):
    """Token ids and targets, both ``[batch, sequence]``, to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.dim)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.output = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        if shape.tied:
            self.output.weight = self.tok_embeddings.weight
        nn.init.normal_(self.tok_embeddings.weight, std=0.02)
        head_dim = shape.dim // shape.heads
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(SEQUENCE, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.get_default_dtype()), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, (self.cos, self.sin), use_reentrant=False)
        parts = zip(self.norm(x).flatten(0, 1).split(LOSS_CHUNK), targets.flatten().split(LOSS_CHUNK), strict=True)
        losses = [checkpoint(self._loss, h, t, use_reentrant=False) for h, t in parts]
        return torch.stack(losses).sum() / targets.numel()

    def _loss(self, h: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.output(h).float(), targets, reduction="sum")


def make_model(shape: Shape, device: str) -> Llama:
    """Random bf16 weights, made on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Llama(shape)
    finally:
        torch.set_default_dtype(before)


def batch_of(tokens: int, vocabulary: int, device: str) -> tuple[Tensor, Tensor]:
    """Random ids and targets, ``[batch, sequence]`` each."""
    sequence = min(tokens, SEQUENCE)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(vocabulary, (2, tokens // sequence, sequence), generator=generator).to(device)
    return ids[0], ids[1]

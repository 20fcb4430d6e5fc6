"""FLOPs per token against torch's own count of a real model, the table of peaks, MFU."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from offload.metrics import flops
from offload.metrics.flops import flops_per_token, mfu, peak_flops
from offload.models.size import matmul_parameters
from offload.models.torchtune import TorchtuneModel
from offload.plan.peaks import PEAKS, find_card

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCABULARY, TOKENS = 3, 4, 2, 8, 48, 64, 16
WIDTH = HEADS * HEAD_DIM


class Layer(nn.Module):
    """Llama's shape: grouped-query attention and a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        h = self.norm(x)
        q = self.q(h).view(batch, tokens, HEADS, HEAD_DIM).transpose(1, 2)
        k, v = self.kv(h).view(batch, tokens, 2, KV_HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        weights = (q @ k.transpose(-1, -2)).softmax(-1)  # plain products: torch counts each of them
        x = x + self.o((weights @ v).transpose(1, 2).reshape(batch, tokens, -1))
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def counted(model: nn.Module, batch: int = 2) -> float:
    """FLOPs per token of a forward and backward, as torch counts them."""
    tokens = torch.randint(VOCABULARY, (batch, TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    return counter.get_total_flops() / (batch * TOKENS)


def stated(model: nn.Module) -> float:
    frozen, trainable = matmul_parameters(model)
    return flops_per_token(trainable, frozen, num_layers=LAYERS, num_heads=HEADS, head_dim=HEAD_DIM, seq_len=TOKENS)


@pytest.mark.parametrize("tied", [False, True])
def test_a_training_step_needs_the_flops_that_the_formula_says(tied: bool) -> None:
    model = Model(tied)
    assert stated(model) == counted(model)


def test_frozen_weights_need_no_gradient_of_their_own() -> None:
    """As under LoRA: the layers' weights are frozen, the gradient still has to pass through them."""
    model = Model()
    for layer in model.layers:
        for linear in (layer.kv, layer.o, layer.up, layer.down):
            linear.weight.requires_grad_(False)
    frozen, trainable = matmul_parameters(model)
    assert frozen > trainable > 0
    assert stated(model) == counted(model)


def test_only_matrices_that_tokens_are_multiplied_with_count() -> None:
    def head(tied: bool) -> int:
        return sum(matmul_parameters(Model(tied)))

    layer = WIDTH * (HEADS + 2 * KV_HEADS + HEADS) * HEAD_DIM + WIDTH * 2 * FFN + FFN * WIDTH
    assert head(tied=False) == head(tied=True) == LAYERS * layer + WIDTH * VOCABULARY


def test_torchtunes_models_are_counted_with_their_hidden_ties_and_adapters() -> None:
    from offload import torchao_shim

    torchao_shim.install()
    from torchtune.models.llama2 import lora_llama2
    from torchtune.models.qwen2 import qwen2

    shape = {
        "vocab_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": 32,
        "max_seq_len": 16,
    }
    attention = 32 * (32 + 2 * 16) + 32 * 32
    per_layer = attention + 3 * 32 * 64
    tied = qwen2(**shape, intermediate_dim=64, tie_word_embeddings=True)
    size = TorchtuneModel(tied).size()
    assert (size.frozen, size.trainable) == (0, 2 * per_layer + 128 * 32)
    assert (size.layers, size.heads, size.head_dim) == (2, 4, 8)

    lora = lora_llama2(["q_proj", "v_proj"], **shape, intermediate_dim=64, lora_rank=4, lora_alpha=8)
    for name, parameter in lora.named_parameters():
        parameter.requires_grad_("lora" in name)
    adapters = 2 * (4 * (32 + 32) + 4 * (32 + 16))
    assert matmul_parameters(lora) == (2 * per_layer + 128 * 32, adapters)


def test_causal_halves_the_attention_only() -> None:
    shape = {"num_layers": 32, "num_heads": 32, "head_dim": 128, "seq_len": 4096}
    weights = flops_per_token(6_600_000_000, num_layers=0, num_heads=0, head_dim=0, seq_len=0)
    assert weights == 6 * 6.6e9
    full, causal = (
        flops_per_token(6_600_000_000, **shape),
        flops_per_token(6_600_000_000, **shape, causal=True),
    )
    assert full - weights == 12 * 32 * 32 * 128 * 4096
    assert causal - weights == (full - weights) / 2


def test_mfu() -> None:
    assert mfu(1000.0, 40e9, 160e12) == 0.25
    assert mfu(1000.0, 40e9, None) is None


@pytest.mark.parametrize(
    ("device_name", "card"),
    [
        ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "GeForce RTX 3090 Ti"),
        ("NVIDIA GeForce RTX 3060 Ti", None),
        ("NVIDIA GeForce RTX 4060 Ti", "GeForce RTX 4060 Ti"),
        ("NVIDIA GeForce RTX 4070", "GeForce RTX 4070"),
        ("NVIDIA GeForce RTX 4070 Ti", "GeForce RTX 4070 Ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "GeForce RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 4080", "GeForce RTX 4080"),
        ("NVIDIA GeForce RTX 4080 SUPER", "GeForce RTX 4080 SUPER"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", "GeForce RTX 5090"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA B200", "B200"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("AMD Instinct MI210", "Instinct MI210"),
        ("AMD Instinct MI250X", "Instinct MI250X"),
        ("AMD Instinct MI250X / MI250", None),
        ("AMD Instinct MI300X", "Instinct MI300X"),
        ("Intel(R) Data Center GPU Max 1550", None),
        ("AMD EPYC 7763", None),
    ],
)
def test_a_device_name_finds_its_own_card_or_none(device_name: str, card: str | None) -> None:
    found = find_card(device_name)
    assert (found and found.name) == card


def test_every_row_has_a_source_and_dense_numbers() -> None:
    assert len({card.name for card in PEAKS}) == len(PEAKS)
    for card in PEAKS:
        assert re.match(r"https://\S+$", card.source), card
        assert 20 < card.bf16_tflops < 2500, card
        assert find_card(f"NVIDIA {card.name}") is card, f"{card.name} is hidden by an earlier row"
    rates = {card.name: card.bf16_tflops for card in PEAKS}
    # A GeForce does 4 bf16 FLOPs per core and clock: a sparse or fp16-accumulate number is out by a factor.
    cores_times_ghz = {
        "GeForce RTX 3060": 3584 * 1.78,
        "GeForce RTX 3080": 8704 * 1.71,
        "GeForce RTX 3080 Ti": 10240 * 1.665,
        "GeForce RTX 3090 Ti": 10752 * 1.86,
        "GeForce RTX 4060": 3072 * 2.46,
        "GeForce RTX 4070": 5888 * 2.475,
        "GeForce RTX 4070 SUPER": 7168 * 2.475,
        "GeForce RTX 4070 Ti": 7680 * 2.61,
        "GeForce RTX 5060 Ti": 4608 * 2.57,
        "GeForce RTX 5070": 6144 * 2.51,
        "GeForce RTX 5070 Ti": 8960 * 2.45,
        "GeForce RTX 4060 Ti": 4352 * 2.535,
        "GeForce RTX 4070 Ti SUPER": 8448 * 2.61,
        "GeForce RTX 4080": 9728 * 2.505,
        "GeForce RTX 4080 SUPER": 10240 * 2.55,
        "GeForce RTX 4090": 16384 * 2.52,
        "GeForce RTX 5090": 21760 * 2.407,
        "GeForce RTX 5080": 10752 * 2.617,
        "GeForce RTX 3090": 10496 * 1.695,
    }
    for name, speed in cores_times_ghz.items():
        assert rates[name] == pytest.approx(4 * speed / 1000, rel=0.02), name


def test_the_peak_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {0: "NVIDIA GeForce RTX 4090", 1: "Some new card"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    assert peak_flops("cuda:0") == 165.2e12
    assert peak_flops("cuda:1") is None
    assert peak_flops("cpu") is None
    assert flops.TERA == 1e12

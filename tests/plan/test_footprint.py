"""The memory of a step counted before there is any, against PyTorch's own tracker and against sums by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload import torchao_shim
from offload.models.torchtune import TorchtuneModel
from offload.plan.footprint import footprint
from offload.training.loss import LinearCrossEntropyLoss, SummedLoss

TOKENS = 128


def llama() -> nn.Module:
    torchao_shim.install()
    from torchtune.models.llama2 import llama2

    return llama2(vocab_size=1000, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=128, intermediate_dim=256,
                  max_seq_len=TOKENS)  # fmt: skip


def step_of(model: TorchtuneModel, loss: nn.Module) -> Callable[[], Tensor]:
    def step() -> Tensor:
        tokens = torch.zeros(2, TOKENS, dtype=torch.long)
        return SummedLoss(model, loss)({"tokens": tokens}, tokens, 2 * TOKENS)

    return step


def tracked(checkpointing: bool, keeps_gradients: bool) -> int:
    """The same by ``torch.distributed._tools.mem_tracker``."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = llama()
        model = TorchtuneModel(module)
        if checkpointing:
            model.checkpoint_activations()
        if not keeps_gradients:
            for param in module.parameters():
                param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        tracker = MemTracker()
        tracker.track_external(module)
        with tracker:
            step_of(model, nn.CrossEntropyLoss())().backward()
        (device,) = tracker.get_tracker_snapshot("peak").values()
    return device["Total"]


@pytest.mark.parametrize(
    ("checkpointing", "keeps_gradients"),
    [
        (False, False),
        (True, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, True), (True, False))),
    ],
)
def test_it_counts_what_pytorchs_tracker_counts(checkpointing: bool, keeps_gradients: bool) -> None:
    with torch.device("meta"):
        module = llama()
    model = TorchtuneModel(module)
    if checkpointing:
        model.checkpoint_activations()
    counted = footprint(module, step_of(model, nn.CrossEntropyLoss()), keeps_gradients=keeps_gradients)
    # Blocks of 512 bytes are all that differs.
    assert counted.peak() == pytest.approx(tracked(checkpointing, keeps_gradients), rel=1e-3)


class Layers(nn.Module):
    """Three linear layers, whose memory can be told by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


WEIGHT = 256 * 256 * 4
BATCH = 64
OUT = BATCH * 256 * 4


def count(keeps_gradients: bool, dtype: torch.dtype | None = None):
    with torch.device("meta"):
        module = Layers()
    return footprint(
        module, lambda: module(torch.zeros(BATCH, 256)).sum(), keeps_gradients=keeps_gradients, gradient_dtype=dtype
    )


def test_sums_by_hand() -> None:
    streamed, kept = count(False), count(True)
    # Input and the results of the first two layers; the third's is gone, and the sum is one block.
    assert streamed.kept == 3 * OUT + 512
    assert streamed.before.parts["parameters"] == 3 * WEIGHT and streamed.before.parts.get("gradients", 0) == 0
    # The last gradient comes when all others are there; what is alive beside them is one layer's.
    assert kept.after.parts["gradients"] >= 2 * WEIGHT > streamed.after.parts.get("gradients", 0)
    assert kept.peak() > streamed.peak()
    assert streamed.peak(in_flight=10 * OUT) == streamed.after.total + 10 * OUT


def test_gradients_may_be_kept_in_another_dtype() -> None:
    assert count(True, torch.float32) == count(True)
    assert count(True, torch.bfloat16).after.total < count(True).after.total


def test_attention_does_not_write_its_matrix_down() -> None:
    """Queries and values of different sizes, for which the CPU's fused kernel does not work."""
    with torch.device("meta"):
        module = nn.Linear(64, 64, bias=False)

    def step() -> Tensor:
        query = module(torch.zeros(1, 4, 2048, 64))
        return F.scaled_dot_product_attention(query, query, query[..., :32], is_causal=True).sum()

    assert footprint(module, step, keeps_gradients=False).peak() < 4 * 2048 * 2048 * 4


def test_the_fused_loss_holds_one_gradient_of_the_head() -> None:
    vocabulary, dim, tokens = 8192, 64, 256
    with torch.device("meta"):
        head = nn.Linear(dim, vocabulary, bias=False)
    weight = vocabulary * dim * 4

    def step() -> Tensor:
        hidden = torch.zeros(1, tokens, dim).requires_grad_()
        labels = torch.zeros(1, tokens, dtype=torch.long)
        return LinearCrossEntropyLoss(64)(hidden, labels, tokens, head, list(head.parameters()))

    counted = footprint(head, step, keeps_gradients=True)
    logits = tokens // 64 * vocabulary * 4
    assert counted.peak() < 2 * weight + 5 * logits  # the weight, its gradient, a chunk's logits and their gradients

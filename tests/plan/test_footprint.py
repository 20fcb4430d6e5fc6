"""The memory of a step counted before there is any, against PyTorch's own tracker and against sums by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import torchao_shim
from offload.models.torchtune import TorchtuneModel
from offload.plan.footprint import footprint
from offload.plan.heap import Event, Held, Step
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


class Shared(nn.Module):
    """Results that several operations take, which autograd sums the gradients of, in a layer that is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.checkpointed = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = x + x.sin() * x.cos()
        return x.view(2, -1, 256).transpose(0, 1) * checkpoint(self._branches, x, use_reentrant=False).view(-1, 2, 256)

    def _branches(self, x: Tensor) -> Tensor:
        x = self.checkpointed(x)
        return x.tanh() + x.sigmoid()


def events_of(module: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Of a step on the host."""
    found: list[Event] = []
    monkeypatch.setattr(
        "offload.plan.footprint.held", lambda step: found.extend([*step.inputs, *step.first]) or Held(0, 0)
    )
    with torch.device("meta"):
        empty = module()
    footprint(empty, lambda: empty(torch.zeros(BATCH, 256)).sum(), keeps_gradients=True, host_states=[])
    return found


def test_the_hosts_heap_is_asked_for_as_many_tensors_as_pytorch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [nbytes for _, nbytes, is_tensor in events_of(Shared, monkeypatch) if is_tensor and nbytes]
    module = Shared()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        module(torch.zeros(BATCH, 256)).sum().backward()
    allocated = [each.nbytes() for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    for nbytes in (OUT, WEIGHT):
        assert counted.count(nbytes) == allocated.count(nbytes) > 1


class Masked(nn.Module):
    """Attention with a mask of truth values, which a kernel takes as numbers, of some of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256, bias=False)
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(4, 1, BATCH // 4, BATCH // 4, dtype=torch.bool, device=x.device)
        if self.checkpointed:
            return checkpoint(self._attention, x, mask, use_reentrant=False)
        return self._attention(x, mask)

    def _attention(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.linear(x).view(4, BATCH // 4, 4, 64).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2)
        return out.reshape(BATCH, 256).index_select(0, torch.zeros(BATCH // 2, dtype=torch.long, device=x.device))


class MaskedTwice(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.checkpointed = True


@pytest.mark.parametrize("module", [Masked, MaskedTwice])
def test_a_mask_is_made_numbers_and_what_was_selected_gets_one_gradient(
    module: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = [nbytes for _, nbytes, is_tensor in events_of(module, monkeypatch) if is_tensor and nbytes]
    real = module()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        real(torch.zeros(BATCH, 256)).sum().backward()
    allocated = [each.nbytes() for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    for nbytes in (BATCH * BATCH, OUT, OUT // 2, WEIGHT):
        assert counted.count(nbytes) == allocated.count(nbytes) > 0, nbytes


@pytest.mark.parametrize("keeps", [True, False])
def test_states_come_with_their_gradients_where_updates_are_in_backward(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Step] = []
    monkeypatch.setattr("offload.plan.footprint.held", lambda step: steps.append(step) or Held(0, 0))
    with torch.device("meta"):
        module = Layers()
    states = [(f"layers.{index}.weight", 100 + index) for index in range(3)]
    footprint(module, lambda: module(torch.zeros(BATCH, 256)).sum(), keeps_gradients=keeps, host_states=states)
    (step,) = steps
    in_time = [nbytes for _, found in sorted(step.early.items()) for nbytes in found]
    assert (in_time, list(step.states)) == (([], [100, 101, 102]) if keeps else ([102, 101, 100], []))
    assert all(0 < index <= len(step.first) for index in step.early)


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

"""The fused loss against torch's cross-entropy, values and gradients elementwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.data.labels import IGNORE_INDEX, shift_labels
from offload.models.torchtune import TorchtuneModel
from offload.training.loss import LinearCrossEntropyLoss, SummedLoss

VOCABULARY, DIM = 37, 16


class Decoder(nn.Module):
    """The parts of torchtune's TransformerDecoder that a loss touches."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.norm = nn.LayerNorm(DIM)
        if tied:
            from offload import torchao_shim

            torchao_shim.install()
            from torchtune.modules import TiedLinear

            self.output: Any = TiedLinear(self.tok_embeddings)
        else:
            self.output = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.unembed(self.tok_embeddings(tokens))

    def unembed(self, hidden: Tensor) -> Tensor:
        return self.output(self.norm(hidden)).float()


def batch() -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (3, 11), generator=generator)
    labels = tokens.clone()
    labels[:, :4] = IGNORE_INDEX
    labels[1] = IGNORE_INDEX
    labels = shift_labels(labels)
    return tokens, labels, int((labels != IGNORE_INDEX).sum())


def reference(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), reduction="sum")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunks", [1, 3, 8, 1000])
def test_fused_loss_and_gradients_equal_cross_entropy(chunks: int, tied: bool) -> None:
    tokens, labels, count = batch()
    expected_model, model = Decoder(tied), Decoder(tied)
    expected = reference(expected_model, tokens, labels)
    (expected / 7).backward()
    loss = SummedLoss(TorchtuneModel(model), LinearCrossEntropyLoss(chunks))({"tokens": tokens}, labels, count)
    (loss / 7).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for (name, actual), (_, wanted) in zip(model.named_parameters(), expected_model.named_parameters(), strict=True):
        assert wanted.grad is not None and wanted.grad.abs().max() > 0, name
        torch.testing.assert_close(actual.grad, wanted.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_without_gradients_it_is_the_same_value() -> None:
    tokens, labels, count = batch()
    model = Decoder()
    expected = reference(Decoder(), tokens, labels)
    loss = SummedLoss(TorchtuneModel(model), LinearCrossEntropyLoss(4))
    with torch.no_grad():
        value = loss({"tokens": tokens}, labels, count)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("frozen", ["head", "everything below the head"])
def test_frozen_parts_get_no_gradient_and_the_rest_its_own(frozen: str) -> None:
    tokens, labels, count = batch()
    model, expected = Decoder(), Decoder()
    for m in (model, expected):
        parts = [m.output] if frozen == "head" else [m.tok_embeddings, m.norm]
        for part in parts:
            part.requires_grad_(False)
    reference(expected, tokens, labels).backward()
    SummedLoss(TorchtuneModel(model), LinearCrossEntropyLoss(3))({"tokens": tokens}, labels, count).backward()
    for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        if wanted.grad is None:
            assert actual.grad is None
        else:
            torch.testing.assert_close(actual.grad, wanted.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "loss", [LinearCrossEntropyLoss(), nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")]
)
def test_a_micro_batch_without_labels_adds_nothing(loss: nn.Module) -> None:
    tokens, labels, _ = batch()
    model = Decoder()
    value = SummedLoss(TorchtuneModel(model), loss)({"tokens": tokens}, torch.full_like(labels, IGNORE_INDEX), 0)
    value.backward()
    assert value.item() == 0.0
    assert all(p.grad is None or not p.grad.abs().any() for p in model.parameters())


def test_the_head_is_registered_once() -> None:
    model = Decoder()
    names = set(model.state_dict())
    SummedLoss(TorchtuneModel(model), LinearCrossEntropyLoss())
    assert set(model.state_dict()) == names


def test_labels_move_one_to_the_left() -> None:
    assert shift_labels(torch.tensor([[5, 6, 7], [1, -100, 3]])).tolist() == [[6, 7, -100], [-100, 3, -100]]


def test_a_second_backward_is_refused_by_name() -> None:
    hidden, labels = torch.randn(1, 4, 8).requires_grad_(), torch.zeros(1, 4, dtype=torch.long)
    head = nn.Linear(8, 16, bias=False)
    loss = LinearCrossEntropyLoss(2)(hidden, labels, 4, head, list(head.parameters()))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="given out once"):
        loss.backward()


def test_no_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_output_chunks"):
        LinearCrossEntropyLoss(0)

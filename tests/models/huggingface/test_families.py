"""Every family of transformers: the head apart, training under the engine, checkpoints under the original names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from offload import OffloadOptimizer
from offload.component import resolve
from offload.data.labels import shift_labels
from offload.metrics.flops import flops_per_token
from offload.models.huggingface import HuggingFaceModel, from_pretrained
from offload.training.loss import LinearCrossEntropyLoss, SummedLoss
from tests.conftest import ThreadedRuntime  # type: ignore[import-not-found]
from tests.models.huggingface import families  # type: ignore[import-not-found]

CPU = torch.device("cpu")
STEPS = 3


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and shifted labels, some of which do not count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, families.VOCABULARY, (2, 12), generator=generator)
    labels = tokens.clone()
    labels[:, :4] = -100
    return tokens, shift_labels(labels)


def fused_loss(model: HuggingFaceModel, tokens: Tensor, labels: Tensor) -> Tensor:
    hidden = model.hidden({"tokens": tokens})
    count = int((labels != -100).sum())
    return LinearCrossEntropyLoss(3)(hidden, labels, count, model.head, model.head_parameters())


@pytest.mark.parametrize(
    "loss",
    [
        LinearCrossEntropyLoss(3),
        torch.nn.CrossEntropyLoss(),
        torch.nn.CrossEntropyLoss(reduction="sum"),
        pytest.param("torchtune.modules.loss.CEWithChunkedOutputLoss", id="chunked"),
    ],
)
@pytest.mark.parametrize("separate", [True, False], ids=["head apart", "head inside"])
def test_every_kind_of_loss_gives_the_sum(loss: Any, separate: bool, tmp_path: Path) -> None:
    """Also where a model's head cannot be taken apart."""
    families.save("gemma2", tmp_path)
    model = from_pretrained(tmp_path, device=CPU, dtype=torch.float32)
    model.has_separate_head = separate
    tokens, labels = batch(0)
    count = int((labels != -100).sum())
    expected = plain_loss(model.module, tokens, labels)
    value = SummedLoss(model, resolve(loss, key="loss")() if isinstance(loss, str) else loss)
    torch.testing.assert_close(value({"tokens": tokens}, labels, count), expected, rtol=1e-5, atol=0)
    nothing = value({"tokens": tokens}, torch.full_like(labels, -100), 0)
    nothing.backward()
    assert nothing.item() == 0.0


def plain_loss(module: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """The sum over labels from the whole model's own logits."""
    logits = module(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")


@pytest.fixture(scope="module", params=families.FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    families.save(request.param, folder)
    return request.param, folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
    return found


def trained(module: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, param) for name, param in module.named_parameters() if param.requires_grad]


def test_the_fused_loss_is_that_of_the_whole_model(family: tuple[str, Path]) -> None:
    model = from_pretrained(family[1], device=CPU, dtype=torch.float32)
    assert model.has_separate_head
    tokens, labels = batch(0)
    model.module.eval()
    expected = plain_loss(model.module, tokens, labels)
    expected.backward()
    wanted = {name: param.grad for name, param in trained(model.module)}
    model.module.zero_grad(set_to_none=True)
    loss = fused_loss(model, tokens, labels)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name, param in trained(model.module):
        scale = 0.0 if wanted[name] is None else float(wanted[name].abs().max())
        torch.testing.assert_close(param.grad, wanted[name], rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize("family_of_dense", ["llama", "qwen3", "mixtral", "gemma3"])
def test_a_step_needs_the_flops_that_its_size_says(family_of_dense: str, tmp_path: Path) -> None:
    """As torch counts them; of experts, which torch's counter does not know fused, those that a token is sent to."""
    families.save(family_of_dense, tmp_path)
    model = from_pretrained(tmp_path, device=CPU, dtype=torch.float32, attn_implementation="eager")
    size = model.size()
    tokens, _ = batch(0)
    if family_of_dense == "mixtral":
        experts = 2 * 4 * 3 * 32 * 48
        dense = sum(p.numel() for n, p in model.module.named_parameters() if p.dim() > 1 and "experts" not in n)
        embedding = families.VOCABULARY * 32
        assert size.trainable == dense - embedding + experts * 2 / 4
        return
    with FlopCounterMode(display=False) as counter:
        model.logits({"tokens": tokens}).sum().backward()
    stated = flops_per_token(
        size.trainable, num_layers=size.layers, num_heads=size.heads, head_dim=size.head_dim, seq_len=tokens.shape[1]
    )
    assert counter.get_total_flops() / tokens.numel() == pytest.approx(stated, rel=0.02)


@pytest.mark.parametrize("strategy", ["stream", "host"])
def test_training_equals_plain_adamw(family: tuple[str, Path], strategy: str, threaded: ThreadedRuntime) -> None:
    """Three steps, ``stream`` in backward and ``host`` with two micro-batches, under activation checkpointing."""
    model = from_pretrained(family[1], device=CPU, dtype=torch.float32)
    checkpointed = model.module.supports_gradient_checkpointing
    if checkpointed:
        model.checkpoint_activations()
    model.module.train()
    before = {name: param.detach().clone() for name, param in trained(model.module)}
    other = copy.deepcopy(model.module)
    plain = HuggingFaceModel(other)
    other.train()
    if strategy == "stream":
        optimizer = OffloadOptimizer(
            trained(model.module),
            "torch.optim.AdamW",
            model=model.module,
            strategy="stream",
            update_in_backward=True,
            lr=1e-2,
            fused=True,
        )
        micro_batches = 1
    else:
        optimizer = OffloadOptimizer(
            trained(model.module), "torch.optim.AdamW", model=model.module, strategy="host", lr=1e-2, fused=True
        )
        micro_batches = 2
    reference = torch.optim.AdamW([param for _, param in trained(other)], lr=1e-2, fused=True)
    for step in range(STEPS):
        for index in range(micro_batches):
            tokens, labels = batch(step * micro_batches + index)
            torch.manual_seed(step)  # for families with dropout
            fused_loss(plain, tokens, labels).backward()
            torch.manual_seed(step)
            loss = fused_loss(model, tokens, labels)
            if index < micro_batches - 1:
                with optimizer.accumulate():
                    loss.backward()
            else:
                loss.backward()
        reference.step()
        reference.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    changed = 0
    for (name, param), (_, expected) in zip(trained(model.module), trained(other), strict=True):
        assert torch.equal(param, expected), name
        changed += not torch.equal(param, before[name])
    assert changed == len(before), "a parameter was not trained"


def test_a_saved_model_has_the_original_names_and_gives_the_same_logits(
    family: tuple[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = from_pretrained(family[1], device=CPU, dtype=torch.float32)
    with torch.no_grad():
        for param in model.module.parameters():
            param.mul_(1.25)
    model.save(tmp_path, model.module.state_dict(), max_shard_bytes=2**30)
    original, saved = tensors_of(family[1]), tensors_of(tmp_path)
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in original.items()}
    for name, param in model.module.named_parameters():
        if name in saved:
            assert torch.equal(saved[name], param), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model.module.eval()
    tokens, _ = batch(0)
    with torch.no_grad():
        expected = model.logits({"tokens": tokens})
        assert torch.equal(again(input_ids=tokens, use_cache=False).logits, expected)

"""Every family of transformers: the head apart, training under the engine, checkpoints under the original names."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from offload import OffloadOptimizer
from offload.checkpoints.manager import CheckpointManager
from offload.component import resolve
from offload.data.labels import shift_labels
from offload.errors import UserError
from offload.metrics.flops import flops_per_token
from offload.models.huggingface import HuggingFaceModel, from_pretrained
from offload.models.huggingface.checkpoint import HuggingFaceFormat
from offload.simulation.accelerator import SimulatedAccelerator
from offload.training.loss import LinearCrossEntropyLoss, SummedLoss
from tests.conftest import ThreadedRuntime  # type: ignore[import-not-found]
from tests.models.huggingface import families  # type: ignore[import-not-found]

CPU = torch.device("cpu")
STEPS = 3
HEAD_INSIDE = ("prophetnet",)
TRAINS_ALONE = ("reformer",)
"""Has a backward in training mode alone; without dropout it computes the same."""


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


def loss_of(model: HuggingFaceModel, tokens: Tensor, labels: Tensor) -> Tensor:
    """As the recipes compute it: fused with the head where it can be taken apart."""
    count = int((labels != -100).sum())
    return SummedLoss(model, LinearCrossEntropyLoss(3))({"tokens": tokens}, labels, count)


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


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in families.IN_SUITE else pytest.mark.slow) for name in families.FAMILIES
    ],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp(request.param)
    families.save(request.param, folder)
    yield request.param, folder
    shutil.rmtree(folder)


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
    if family[0] in HEAD_INSIDE:
        assert not model.has_separate_head
        pytest.skip("its head cannot be taken apart")
    assert model.has_separate_head
    tokens, labels = batch(0)
    model.module.train(family[0] in TRAINS_ALONE)
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
    train_beside_plain_adamw(family[1], strategy)


@pytest.mark.parametrize("strategy", ["stream", "host"])
def test_training_on_the_simulated_accelerator_equals_plain_adamw(
    family: tuple[str, Path], strategy: str, simulated: SimulatedAccelerator
) -> None:
    train_beside_plain_adamw(family[1], strategy)


def opened_for_training(folder: Path) -> HuggingFaceModel:
    model = from_pretrained(folder, device=CPU, dtype=torch.float32)
    if model.module.supports_gradient_checkpointing:
        model.checkpoint_activations()
    model.module.train()
    return model


def offloaded(model: HuggingFaceModel, strategy: str) -> OffloadOptimizer:
    return OffloadOptimizer(
        trained(model.module),
        "torch.optim.AdamW",
        model=model.module,
        strategy=strategy,
        update_in_backward=strategy == "stream",
        lr=1e-2,
        fused=True,
    )


def train_beside_plain_adamw(folder: Path, strategy: str) -> None:
    model = opened_for_training(folder)
    before = {name: param.detach().clone() for name, param in trained(model.module)}
    plain = HuggingFaceModel(copy.deepcopy(model.module))
    optimizer = offloaded(model, strategy)
    micro_batches = 1 if strategy == "stream" else 2
    reference = torch.optim.AdamW([param for _, param in trained(plain.module)], lr=1e-2, fused=True)
    with_gradient: set[str] = set()
    for step in range(STEPS):
        for index in range(micro_batches):
            tokens, labels = batch(step * micro_batches + index)
            torch.manual_seed(step)  # for families with dropout
            loss_of(plain, tokens, labels).backward()
            torch.manual_seed(step)
            loss = loss_of(model, tokens, labels)
            with optimizer.accumulate() if index < micro_batches - 1 else contextlib.nullcontext():
                loss.backward()
        with_gradient |= {n for n, param in trained(plain.module) if param.grad is not None and param.grad.any()}
        reference.step()
        reference.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    changed = set()
    for (name, param), (_, expected) in zip(trained(model.module), trained(plain.module), strict=True):
        assert torch.equal(param, expected), name
        if not torch.equal(param, before[name]):
            changed.add(name)
    assert changed >= with_gradient
    assert len(with_gradient) > len(before) / 2, "most parameters have no gradient"


def test_a_resumed_run_ends_bit_for_bit_as_an_unbroken_one(
    family: tuple[str, Path], tmp_path: Path, threaded: ThreadedRuntime
) -> None:
    """Four steps under ``stream`` in backward, and the same through a checkpoint after two: weights and states."""

    def train(model: HuggingFaceModel, optimizer: OffloadOptimizer, steps: Iterable[int]) -> None:
        for step in steps:
            torch.manual_seed(step)
            loss_of(model, *batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()

    whole = opened_for_training(family[1])
    whole_optimizer = offloaded(whole, "stream")
    train(whole, whole_optimizer, range(4))

    first = opened_for_training(family[1])
    first_optimizer = offloaded(first, "stream")
    train(first, first_optimizer, range(2))
    format = HuggingFaceFormat(family[1])
    format.model = first
    manager = CheckpointManager(format, tmp_path)
    manager.save(2, model=first.module.state_dict(), recipe_state={"optimizer": first_optimizer.state_dict()})

    found = manager.load_newest()
    assert found is not None
    path, loaded = found
    resumed = opened_for_training(path)
    resumed_optimizer = offloaded(resumed, "stream")
    resumed_optimizer.load_state_dict(loaded.recipe_state["optimizer"])
    train(resumed, resumed_optimizer, range(2, 4))

    for (name, param), (_, expected) in zip(
        resumed.module.named_parameters(), whole.module.named_parameters(), strict=True
    ):
        assert torch.equal(param, expected), name
    states, expected_states = resumed_optimizer.state_dict()["state"], whole_optimizer.state_dict()["state"]
    assert states.keys() == expected_states.keys() and states
    for index, state in states.items():
        assert state.keys() == expected_states[index].keys()
        for key, value in state.items():
            assert torch.equal(value, expected_states[index][key]), (index, key)


def test_a_saved_model_has_the_original_names_and_gives_the_same_logits(
    family: tuple[str, Path], tmp_path: Path
) -> None:
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
    again = type(model.module).from_pretrained(tmp_path, dtype=torch.float32).eval()
    model.module.eval()
    tokens, _ = batch(0)
    with torch.no_grad():
        expected = model.logits({"tokens": tokens})
        assert torch.equal(again(input_ids=tokens, use_cache=False).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("refused", families.REFUSED)
def test_what_cannot_be_trained_is_one_line(
    refused: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    try:
        families.save(refused, tmp_path)
    except Exception:  # no such model is made here: its folder has a configuration, and weights of nothing
        (tmp_path / "config.json").write_text(json.dumps({"model_type": refused}))
        save_file({"nothing": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as caught:
        from_pretrained(tmp_path, device=CPU, dtype=torch.float32)
    text = str(caught.value)
    assert text.startswith("model.path: ") and "\n" not in text and families.REFUSED[refused] in text
    record_property("says", text.removeprefix("model.path: ").replace(str(tmp_path), "the folder"))


@pytest.mark.slow
def test_every_causal_language_model_of_transformers_was_tried() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    untried = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - families.FAMILIES.keys() - families.REFUSED.keys()
    assert untried <= {"dots3_note"}, "a wrapper of dots3_note_text of which no small one could be made"

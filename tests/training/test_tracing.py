"""What follows from traces against traces: of all layers, and of each batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload import torchao_shim
from offload.cli import registry
from offload.cli.validate import load_recipe
from offload.config.loading import load_and_check
from offload.models.protocol import CausalLM
from offload.models.source import describe
from offload.tiny import register_resolvers
from offload.training import tracing
from offload.training.settings import TrainSettings
from offload.training.tracing import Packs, Tracer

CASES = {
    "torchtune": ("tiny_llama_offload", ["model.num_layers=12", "batch_size=4"], False),
    "checkpointed": ("tiny_llama_offload", ["model.num_layers=12", "enable_activation_checkpointing=True"], False),
    "logits": ("tiny_llama_offload", ["model.num_layers=12", "loss=torch.nn.CrossEntropyLoss"], False),
    "transformers": ("qwen3_0_6b_offload", ["tokenizer.max_seq_len=256", "batch_size=4"], False),
    "adapter": ("qwen3_8b_lora", ["tokenizer.max_seq_len=256", "batch_size=2"], True),
}
SLOW = pytest.mark.slow


def described(name: str, overrides: list[str], adapts: bool) -> tuple[CausalLM, TrainSettings, torch.dtype]:
    torchao_shim.install()
    register_resolvers()
    recipe = registry.find_recipe(registry.recipe_of_config(name))
    schema: Any = load_recipe(recipe.path).Settings
    _, settings = load_and_check(registry.our_configs()[name], overrides, schema, [])
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    found = describe(settings.model, getattr(settings, "adapter", None), dtype, adapts=adapts)
    assert found is not None
    return found[0], settings, dtype


@pytest.mark.parametrize(
    ("case", "keeps"),
    [
        *((case, keeps) for case in ("torchtune", "checkpointed", "logits") for keeps in (True, False)),
        *(("transformers", keeps) for keeps in (True, False)),
        *(pytest.param("adapter", keeps, marks=SLOW) for keeps in (True, False)),
    ],
)
def test_layers_follow_from_three_and_five(case: str, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings, dtype = described(*CASES[case])
    few = Tracer().count(model, settings, dtype, 256, keeps=keeps)
    monkeypatch.setattr(tracing, "TRACED", (2, 100))
    whole = Tracer().count(model, settings, dtype, 256, keeps=keeps)
    assert len(whole.stages) > len(few.stages)
    assert few.before.total == pytest.approx(whole.before.total, rel=1e-4)
    assert few.after.total == pytest.approx(whole.after.total, rel=1e-4)
    assert few.kept == pytest.approx(whole.kept, rel=1e-4)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("case", ["torchtune", "checkpointed", pytest.param("transformers", marks=SLOW)])
def test_batches_follow_from_two_others(case: str, keeps: bool) -> None:
    model, settings, dtype = described(*CASES[case])
    tracer = Tracer()

    def count(tracer: Tracer, batch: int) -> int:
        settings.batch_size = batch
        return tracer.count(model, settings, dtype, 256, keeps=keeps).peak()

    count(tracer, 16)
    between = {batch: count(tracer, batch) for batch in (1, 2, 4, 8, 16)}
    assert sorted(tracer.traced) == [1, 16]
    traced = {batch: count(Tracer(), batch) for batch in between}
    assert between == {batch: pytest.approx(peak, rel=0.01) for batch, peak in traced.items()}
    assert all(between[batch] >= 0.9999 * traced[batch] for batch in between)  # never too little


def test_layers_beside_a_larger_tower() -> None:
    """Of a model for images too, whose tower has more parameters than the first layers of the text have."""
    parts, settings, _ = described("tiny_llama_offload", ["model.num_layers=12"], adapts=False)
    whole = parts.module.layers
    of_a_layer = sum(param.numel() for param in whole[0].parameters())
    parts.module.tower = torch.nn.ModuleList(torch.nn.Linear(1, of_a_layer, device="meta") for _ in range(4))
    _, layers, _ = tracing.shortened(parts, settings, 1, 8, number=2)
    assert [type(layer) for layer in layers] == [type(layer) for layer in whole[:2]]


@pytest.mark.parametrize(
    ("name", "overrides", "on_host", "told"),
    [
        ("tiny_llama_offload", [], True, Packs.MASK),
        ("tiny_llama_offload", [], False, Packs.POSITIONS),
        ("tiny_llama_offload", ["dataset.packed=False"], True, Packs.NOTHING),
        ("qwen3_0_6b_offload", ["dataset.packed=True"], True, Packs.POSITIONS),
        ("qwen3_0_6b_offload", ["dataset.packed=True"], False, Packs.POSITIONS),
        ("qwen3_0_6b_offload", ["dataset.packed=False"], True, Packs.NOTHING),
    ],
)
def test_a_model_is_told_of_packs_as_in_a_run(name: str, overrides: list[str], on_host: bool, told: Packs) -> None:
    recipe = registry.find_recipe(registry.recipe_of_config(name))
    register_resolvers()
    _, settings = load_and_check(registry.our_configs()[name], overrides, load_recipe(recipe.path).Settings, [])
    assert Packs.of(settings, on_host=on_host) is told
    settings.dataset = [settings.dataset, settings.dataset]
    assert Packs.of(settings, on_host=on_host) is told


def test_masks_of_packs_are_counted_on_the_host() -> None:
    """A layer that is not checkpointed keeps its own, in fp32; the batch has one of a byte a number, which stays."""
    batch, length, layers = 4, 256, 2

    def kept(packed: bool) -> int:
        model, settings, dtype = described(
            "tiny_llama_offload", [f"dataset.packed={packed}", f"batch_size={batch}"], False
        )
        return Tracer().count(model, settings, dtype, length, keeps=True, host_states=[]).kept

    positions_and_rope = 8 * batch * length + layers * 2 * (batch * length * 32 * 4)
    masks = (1 + 4 * layers) * batch * length**2
    assert kept(True) - kept(False) == pytest.approx(masks + positions_and_rope, rel=1e-3)

"""What configs say of memory, against their models on the meta device; the page and the headers against the script."""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path

import config_memory
import pytest
import torch
from config_memory import CARDS, GIB, Memory, compute, configs, header, recorded, table, with_header
from omegaconf import OmegaConf
from torch import nn

from offload.models.huggingface import published
from offload.plan.footprint import PARAMETERS, footprint
from offload.training.loss import LinearCrossEntropyLoss

CONFIGS = configs()
every_config = pytest.mark.parametrize("name", CONFIGS)
written_configs = pytest.mark.parametrize(
    "name", [name for name, path in CONFIGS.items() if config_memory.is_written(path)]
)
COUNTED_AGAIN = {"qwen3_0_6b_offload", "llama3_2_1b_lora"}
"""A tied head's gradients, and an adapter; the others are slow."""


@pytest.fixture(scope="module")
def record() -> dict[str, Memory]:
    return recorded()


# ---- the models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", published.MODELS)
def test_dimensions_give_the_published_number_of_parameters(model: str) -> None:
    from transformers import AutoModelForCausalLM

    stated = published.MODELS[model]
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(published.config_of(stated.config))
    assert sum(param.numel() for param in module.parameters()) == stated.parameters
    if stated.besides:
        assert stated.parameters - sum(param.numel() for param in module.get_decoder().parameters()) == stated.besides


@written_configs
def test_it_names_the_model_of_its_dimensions(name: str) -> None:
    config = OmegaConf.load(CONFIGS[name])
    repository = published.MODELS[name.rpartition("_")[0]].repository
    assert config.model.path == f"~/models/{repository.split('/')[1]}"
    assert f"tune download {repository} " in CONFIGS[name].read_text(encoding="utf-8")


# ---- the numbers -------------------------------------------------------------------------------------------


@every_config
def test_weights_and_states_are_as_recorded(name: str, record: dict[str, Memory]) -> None:
    assert compute(name, CONFIGS[name], working=record[name].working) == record[name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in COUNTED_AGAIN else pytest.mark.slow) for name in CONFIGS]
)
def test_what_is_at_work_is_as_recorded(name: str, record: dict[str, Memory]) -> None:
    assert compute(name, CONFIGS[name]).working == pytest.approx(record[name].working, abs=0.05 * GIB)


def test_two_counts_of_llama_2_agree(record: dict[str, Memory]) -> None:
    """The engine's replay on a simulated allocator, with activations from formulas, knows nothing of this count."""
    import json

    import peak_memory

    replayed = {
        row["tokens"]: row["first"]["allocated_gib"]
        for row in json.loads(peak_memory.RECORD.read_text())["rows"]
        if row["card"] is None and row["schedule"] == "`stream`, in backward"
    }
    ours = record["llama2_7b_offload"]
    per_token = (replayed[4096] - replayed[1024]) / 3072
    assert ours.device / GIB == pytest.approx(replayed[4096] + per_token * (ours.tokens - 4096), abs=0.3)


class _TwoLayers(nn.Module):
    """A model in parts, of two products, without checkpointing."""

    def __init__(self, words: int, dim: int) -> None:
        super().__init__()
        self.module = self
        self.embedding, self.layer, self.output = nn.Embedding(words, dim), nn.Linear(dim, dim), nn.Linear(dim, words)

    def hidden(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden: torch.Tensor = torch.sin(self.layer(self.embedding(inputs["tokens"])))
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output(hidden)  # type: ignore[no-any-return]

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.output.parameters())


def test_tensors_count_while_they_live_and_weights_do_not() -> None:
    """By hand, where one gradient is much larger than everything else."""
    words, dim = 50_000, 512
    with torch.device("meta"):
        model = _TwoLayers(words, dim)

    def step() -> torch.Tensor:
        ids = torch.zeros(1, 4, dtype=torch.long)
        loss: torch.Tensor = LinearCrossEntropyLoss(1)(
            model.hidden({"tokens": ids}), ids, 4, model.head, model.head_parameters()
        )
        return loss

    counted = footprint(model, step, keeps_gradients=False)
    peak = counted.peak() - counted.before.parts[PARAMETERS]
    # In the loss: of the head, one gradient, beside four tokens' logits and theirs.
    assert peak == pytest.approx(4 * words * (dim + 1), rel=0.05)


@pytest.mark.parametrize("gib", [*CARDS.values()])
def test_the_smallest_card_with_room(gib: float) -> None:
    memory = Memory(
        1, 1, 1, 0, weights=int((gib - config_memory.FRAGMENTED) * GIB), adapter=0, in_flight=0, working=0, host=0
    )
    size = next(card for card, room in CARDS.items() if room == gib)
    assert memory.card == size
    if size != max(CARDS):
        assert dataclasses.replace(memory, working=2**20).card > size


# ---- what is written ---------------------------------------------------------------------------------------


@written_configs
def test_the_header_is_the_scripts(name: str, record: dict[str, Memory]) -> None:
    text = CONFIGS[name].read_text(encoding="utf-8")
    assert with_header(text, header(record[name])) == text


def test_the_page_has_the_scripts_table(record: dict[str, Memory]) -> None:
    page = config_memory.MODELS.read_text(encoding="utf-8")
    assert config_memory.BEGIN + table(record) + config_memory.END in page
    assert record.keys() == CONFIGS.keys()


FREE = re.compile(r"^(output_dir|  path|  num_output_chunks): ")


@written_configs
def test_it_differs_from_the_config_for_any_model_in_its_model_alone(name: str) -> None:
    """So that what holds of `hf_offload` and `hf_lora`, comments included, holds of it."""

    def body(path: Path) -> list[str]:
        return path.read_text(encoding="utf-8").partition("\n\n")[2].splitlines()

    anything = CONFIGS[name].with_name(f"hf_{name.rpartition('_')[2]}.yaml")
    changes = [line for line in difflib.ndiff(body(anything), body(CONFIGS[name])) if line[:2] in ("- ", "+ ")]
    assert changes and all(FREE.match(line[2:]) for line in changes), changes
    changed = {line[2:].partition(":")[0].strip() for line in changes}
    assert changed == {"output_dir", "path"} | ({"num_output_chunks"} if name.startswith("gemma3") else set())

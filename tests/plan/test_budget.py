"""A run's budget, against the engine's replay on a simulated allocator, published numbers and sums by hand."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offload import torchao_shim
from offload.cli import registry
from offload.cli.validate import load_recipe
from offload.config.loading import load_and_check
from offload.errors import UserError
from offload.models.protocol import AdaptedLM
from offload.plan.budget import DEVICE, DISK, HOST, LOCKED, Budget, Item, Sharding, locked_bytes
from offload.plan.cards import CARDS, SHARE, find_card
from offload.tiny import register_resolvers
from offload.training.budgeting import Plan, Planner

GIB = 2**30


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(0, adapts=False)


def settings_of(name: str, *overrides: str) -> Any:
    torchao_shim.install()
    register_resolvers()
    config = registry.find_config(name)
    recipe = registry.find_recipe(registry.recipe_of_config(config.name))
    schema: Any = load_recipe(recipe.path).Settings
    return load_and_check(config.path, overrides, schema, [])[1]


def planned(
    planner: Planner, name: str, *overrides: str, device: str = "cuda", sharding: Sharding | None = None
) -> Plan:
    settings = settings_of(name, *overrides)
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    return planner.plan(settings, torch.device(device), dtype, sharding=sharding)


def gib(plan: Plan, *names: str) -> float:
    return sum(item.nbytes for item in plan.budget.items if item.name in names) / GIB


USED = (
    "weights",
    "gradients",
    "gradients of all micro-batches",
    "states and gradients in flight",
    "optimizer states",
    "activations",
)


def used(plan: Plan) -> float:
    """What torch.cuda.max_memory_allocated would tell."""
    return sum(i.nbytes for i in plan.budget.items if i.place == DEVICE and i.name in USED) / GIB


STEP, BACKWARD = "update_in_backward=False", "update_in_backward=True"

SCHEDULES = {
    "`stream`, in backward": ("strategy=stream", BACKWARD),
    "`stream`, at step": ("strategy=stream", STEP),
    "`stream`, at step, gradients on the host": ("strategy=stream", STEP, "offload_gradients=True"),
    "`host`, in backward": ("strategy=host", BACKWARD),
    "`host`, at step": ("strategy=host", STEP),
    "`host`, at step, gradients on the host": ("strategy=host", STEP, "offload_gradients=True"),
    "`stream`, in backward, `in_flight_gib=0.125`": ("strategy=stream", BACKWARD, "in_flight_gib=0.125"),
}  # fmt: skip


@pytest.mark.parametrize("tokens", [pytest.param(1024, marks=pytest.mark.slow), 4096])
def test_schedules_of_llama_2_take_what_the_replayed_engine_takes(planner: Planner, tokens: int) -> None:
    """The replay knows activations from formulas and runs the engine; the plan traces the model and runs nothing."""
    import peak_memory

    rows = {
        row["schedule"]: row["steady"]["allocated_gib"]
        for row in json.loads(peak_memory.RECORD.read_text())["rows"]
        if row["card"] is None and row["tokens"] == tokens
    }
    common = ("optimizer.optimizer_class=torch.optim.AdamW", "batch_size=1", f"tokenizer.max_seq_len={tokens}")
    found = {
        name: used(planned(planner, "llama2_7b_offload", *common, *(f"optimizer.{word}" for word in words)))
        for name, words in SCHEDULES.items()
    }
    assert found == {name: pytest.approx(rows[name], abs=0.1) for name in SCHEDULES}


def test_the_traced_model_may_have_fewer_layers(planner: Planner) -> None:
    """What is extrapolated from two small models is what the whole one takes."""
    from offload.training import tracing

    overrides = ("model.num_layers=12", "enable_activation_checkpointing=True", "optimizer.update_in_backward=True",
                 "clip_grad_norm=null", "checkpointer.checkpoint_dir=/nowhere")  # fmt: skip
    few = planned(planner, "tiny_llama_offload", *overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "TRACED", (2, 12))
        whole = planned(Planner(0, adapts=False), "tiny_llama_offload", *overrides)
    assert few.budget.device == pytest.approx(whole.budget.device, rel=1e-4)


def test_states_are_those_of_docs_strategies(planner: Planner) -> None:
    plan = planned(planner, "llama2_7b_offload")
    assert gib(plan, "optimizer states") == pytest.approx(25.3, abs=0.75)  # the last slab is not full
    less = planned(planner, "llama2_7b_offload", "optimizer.master=split24")
    assert gib(plan, "optimizer states") - gib(less, "optimizer states") == pytest.approx(6.3, abs=0.75)


def test_resident_states_and_those_that_a_pattern_keeps_are_on_the_device(planner: Planner) -> None:
    resident = planned(planner, "llama2_7b_offload", "optimizer.strategy=resident")
    assert resident.budget.of(LOCKED) == 0
    assert gib(resident, "optimizer states") == pytest.approx(25.3, abs=0.1)
    kept = planned(planner, "llama2_7b_offload", "optimizer.offload_states=exp_avg/.*")
    assert any(i.place == DEVICE and i.name == "optimizer states" for i in kept.budget.items)
    assert 0 < kept.budget.of(LOCKED) < planned(planner, "llama2_7b_offload").budget.of(LOCKED)


def test_torchtunes_58_gib_of_host_memory(planner: Planner) -> None:
    """https://github.com/pytorch/torchtune/pull/1278: weights and gradients page-locked one by one, bf16 moments."""
    plan = planned(
        planner,
        "llama2_7b_offload",
        "optimizer=offload.TorchAOCPUOffloadOptimizer",
        "optimizer.optimizer_class=torch.optim.AdamW",
        "optimizer.offload_gradients=True",
    )
    assert gib(plan, "copies of the weights", "gradients", "optimizer states") == pytest.approx(58, abs=0.5)


def test_on_the_cpu_all_of_it_is_the_hosts(planner: Planner) -> None:
    plan = planned(planner, "tiny_llama_offload", "checkpointer.checkpoint_dir=/nowhere", device="cpu")
    assert plan.budget.device == 0
    weights = 4 * plan.parameters
    assert gib(plan, "gradients") <= weights / GIB
    assert gib(plan, "optimizer states") == pytest.approx(2 * weights / GIB, rel=0.01)


def test_accumulated_gradients_are_there_in_the_next_forward(planner: Planner) -> None:
    words = ("optimizer.update_in_backward=False", "batch_size=4", "enable_activation_checkpointing=False")
    one, several = (planned(planner, "llama2_7b_offload", *words, f"gradient_accumulation_steps={n}") for n in (1, 4))
    gradients = gib(several, "gradients of all micro-batches")
    assert gradients == pytest.approx(gib(several, "weights"), rel=1e-3)
    # Activations that take more than gradients: then the fullest moment of the first micro-batch has none of these.
    assert used(several) == pytest.approx(used(one) + gradients, rel=0.01)
    assert used(several) == used(planned(planner, "llama2_7b_offload", *words, "gradient_accumulation_steps=2"))


def test_ranks_share_weights_gradients_and_states(planner: Planner) -> None:
    for strategy in ("stream", "resident"):
        words = ("optimizer.update_in_backward=False", f"optimizer.strategy={strategy}")
        alone, shared = (planned(planner, "llama2_7b_offload", *words, sharding=Sharding(n)) for n in (1, 8))
        for name in ("weights", "optimizer states"):
            assert gib(shared, name) == pytest.approx(gib(alone, name) / 8, rel=0.2, abs=0.01)  # the last slab's rest
        assert gib(shared, "gradients, this rank's part") == pytest.approx(gib(alone, "weights") / 8, rel=0.01)
        assert shared.budget.of(DISK) == alone.budget.of(DISK)  # all ranks write one
    # The head and two layers whole; 4096 * (32000 + 2 * (4 * 4096 + 3 * 11008)) numbers. tests/plan/test_per_rank.py
    # has what FSDP2 itself holds.
    assert gib(shared, "weights, gathered") == pytest.approx(2 * 4096 * (32000 + 2 * 49408) / GIB, rel=0.01)
    assert gib(shared, "gradients, to be reduced") == pytest.approx(2 * 4096 * (32000 + 2 * 49408) / GIB, rel=0.01)
    fp32 = planned(planner, "llama2_7b_offload", sharding=Sharding(8, reduce_itemsize=4))
    assert gib(fp32, "gradients, to be reduced") == pytest.approx(2 * 4096 * (32000 + 3 * 49408) / GIB, rel=0.01)
    whole = planned(planner, "llama2_7b_offload", sharding=Sharding(8, resharding=False))
    assert gib(whole, "weights, gathered") == pytest.approx(gib(alone, "weights"), rel=0.01)
    halves = planned(planner, "llama2_7b_offload", sharding=Sharding(8, resharding=2))
    more = gib(halves, "weights, gathered") - gib(shared, "weights, gathered")
    assert more == pytest.approx((gib(alone, "weights") - 2 * 4096 * 32000 / GIB) / 2, rel=0.01)


def test_page_locked_memory_is_whole_slabs() -> None:
    assert locked_bytes([3 * 2**20], in_slabs=True) == 4 * 2**20
    # PyTorch's own allocator rounds each up: 86 MiB becomes 128.
    assert locked_bytes([86 * 2**20] * 2, in_slabs=False) == 256 * 2**20
    assert locked_bytes([86 * 2**20] * 2, in_slabs=True) == 256 * 2**20
    assert locked_bytes([86 * 2**20] * 20, in_slabs=True) < 20 * 128 * 2**20


def test_it_fits_where_there_is_room_in_each() -> None:
    budget = Budget((Item(DEVICE, "a", 5), Item(LOCKED, "b", 3), Item(HOST, "c", 4)))
    assert budget.fits(5, 7) and budget.fits(None, 7) and budget.fits(None, None)
    assert not budget.fits(4, 7) and not budget.fits(5, 6)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("nvidia geforce rtx 4090", "RTX 4090"),
        ("a100-80gb", "A100 80GB"),
        ("3060", "RTX 3060 12GB"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_a_cards_name_however_it_is_written(written: str, name: str) -> None:
    assert find_card(written).name == name


def test_cards_that_are_not_known_or_come_in_two_sizes() -> None:
    with pytest.raises(UserError, match="did you mean 'RTX 4090'"):
        find_card("RTX 4091")
    with pytest.raises(UserError, match="A100 40GB and A100 80GB"):
        find_card("A100")
    with pytest.raises(UserError, match="--vram 16GiB"):
        find_card("")


def test_what_is_assumed_of_a_card_is_not_above_what_such_cards_were_seen_to_report() -> None:
    """Memory without error correction, which takes more."""
    seen = [card for card in CARDS if card.reported and card.name.startswith("RTX") and "Ada" not in card.name]
    assert len(seen) >= 6
    for card in seen:
        assumed = dataclasses.replace(card, reported=None).memory / GIB
        assert card.reported - 0.7 < assumed < card.reported + 0.02, card.name
    assert find_card("RTX 3090").memory == int(24 * SHARE * GIB) and find_card("RTX 4090").memory == int(23.64 * GIB)


def test_each_card_has_its_memory_and_a_source() -> None:
    assert len({card.name for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert card.source
        assert 0.9 * card.nominal <= card.memory / GIB <= card.nominal


@pytest.mark.parametrize("strategy", ["resident", "stream", "host"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_checkpoints_beside_training_take_their_room(strategy: str, device: str, planner: Planner) -> None:
    overrides = (f"optimizer.strategy={strategy}", "async_checkpoint_gib=1.5")
    at_once, beside = (
        planned(planner, "tiny_llama_offload", *overrides, f"enable_async_checkpointing={is_set}", device=device)
        for is_set in (False, True)
    )
    assert beside.budget.host - at_once.budget.host == 1.5 * GIB
    assert beside.budget.device == at_once.budget.device


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path


class Held(TorchDispatchMode):
    """Bytes of storages that are made inside, as long as anything has them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def know(self, tensors: Iterable[Tensor]) -> None:
        """These were there before."""
        self._known |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def _gone(self, place: int, nbytes: int) -> None:
        self.now -= nbytes
        self._known.discard(place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                continue
            storage, place = tensor.untyped_storage(), tensor.untyped_storage().data_ptr()
            if place not in self._known:
                self._known.add(place)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, place, storage.nbytes())
        return result


@pytest.mark.parametrize(
    ("config", "dora", "dtype"),
    [
        ("tiny_llama_lora", False, "bf16"),
        ("tiny_llama_lora", True, "bf16"),
        ("hf_lora", False, "fp32"),
        ("hf_lora", False, "bf16"),
        ("hf_lora", True, "fp32"),
    ],
)
def test_merged_weights_written_beside_training_are_what_is_held_for_them(
    config: str, dora: bool, dtype: str, llama_folder: Path
) -> None:
    """Of a model with an adapter: the adapter's values of then, and what making a weight takes. Of weights this small
    the matrices of the adapter, which are not counted again, are a few percent."""
    adapting = Planner(0, adapts=True)
    section = "model" if config == "tiny_llama_lora" else "adapter"
    overrides = [f"dtype={dtype}", "save_adapter_weights_only=False", *([f"{section}.use_dora=True"] * dora)]
    if config == "hf_lora":
        overrides += [f"model.path={llama_folder}", "dataset.path=none.jsonl"]
    at_once, beside = (
        planned(adapting, config, *overrides, f"enable_async_checkpointing={is_set}", device="cpu")
        for is_set in (False, True)
    )
    counted = beside.budget.host - at_once.budget.host

    settings = settings_of(config, *overrides)
    parts, _ = adapting.model_of(settings, torch.bfloat16 if dtype == "bf16" else torch.float32)
    model = parts.module.to_empty(device="cpu")
    with Held() as held, torch.no_grad():
        held.know(model.parameters())
        merged = cast(AdaptedLM, parts).merged_weights(goes_on=True)
        adapter, held.most = held.now, held.now
        assert adapter == sum(param.nbytes for param in model.parameters() if param.requires_grad)
        for name in merged:
            if params := merged.merged_from(name):
                merged.made(name, dict(zip(params, params, strict=True)))
    assert 0.74 <= (held.most - adapter) / (counted - adapter) <= 1.05


@pytest.mark.parametrize("config", ["tiny_llama_lora", "hf_lora"])
def test_where_merged_weights_are_made(config: str, llama_folder: Path) -> None:
    """torchtune's on the host, peft's where the model is; none where the adapter alone is saved."""
    overrides = ["dtype=bf16"]
    if config == "hf_lora":
        overrides += [f"model.path={llama_folder}", "dataset.path=none.jsonl"]
    adapting = Planner(0, adapts=True)

    def added(*more: str, **where: Any) -> tuple[int, int]:
        at_once, beside = (
            planned(adapting, config, *overrides, *more, f"enable_async_checkpointing={is_set}", **where).budget
            for is_set in (False, True)
        )
        return beside.device - at_once.device, beside.host - at_once.host

    assert added("save_adapter_weights_only=True") == (0, 0)
    device, host = added("save_adapter_weights_only=False")
    trained = planned(adapting, config, *overrides).trained * 2
    assert (device > 0, host > trained) == ((False, True) if config == "tiny_llama_lora" else (True, False))
    assert host >= trained
    of_two = added("save_adapter_weights_only=False", sharding=Sharding(2))
    assert of_two == (device, host - trained // 2)

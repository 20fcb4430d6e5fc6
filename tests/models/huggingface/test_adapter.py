"""Adapters by peft: they train alone, come back from a checkpoint, and merge into a copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import OffloadOptimizer
from offload.checkpoints.manager import CheckpointManager
from offload.errors import UserError
from offload.models.huggingface import AdaptedModel, from_pretrained
from offload.models.huggingface.checkpoint import HuggingFaceFormat
from tests.conftest import ThreadedRuntime  # type: ignore[import-not-found]
from tests.models.huggingface import families  # type: ignore[import-not-found]
from tests.models.huggingface.test_families import batch, fused_loss, offloaded, trained  # type: ignore[import-not-found]

CPU = torch.device("cpu")

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "target_modules": "all-linear"},
    "dora": {"r": 4, "target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "rslora": {"r": 4, "target_modules": r".*\.(q_proj|down_proj)", "use_rslora": True},
    "ranks": {"r": 4, "target_modules": ["q_proj", "o_proj"], "rank_pattern": {"o_proj": 2}},
    "alphas": {"r": 4, "target_modules": r".*layers\.1\..*_proj", "alpha_pattern": {"o_proj": 32}},
    "head": {"r": 4, "target_modules": ["q_proj", "lm_head"]},
    "saved": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    families.save("llama", path)
    return path


def adapted(folder: Path, kind: str) -> AdaptedModel:
    from peft import LoraConfig

    torch.manual_seed(0)
    model = AdaptedModel(from_pretrained(folder, device=CPU, dtype=torch.float32), LoraConfig(**KINDS[kind]))
    with torch.no_grad():  # LoRA's second factor begins at 0
        for name, param in trained(model.module):
            if "lora_magnitude" not in name:
                param.add_(torch.randn_like(param), alpha=0.1)
    return model


def logits_of(model: Any) -> Tensor:
    tokens, _ = batch(0)
    model.module.eval()
    with torch.no_grad():
        logits: Tensor = model.logits({"tokens": tokens})
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_adapter_trains_and_as_plain_adamw_does(folder: Path, kind: str, threaded: ThreadedRuntime) -> None:
    model, plain = adapted(folder, kind), adapted(folder, kind)
    base = {name: p.detach().clone() for name, p in model.module.named_parameters() if not p.requires_grad}
    names = [name for name, _ in trained(model.module)]
    assert names and all("lora_" in name or "modules_to_save" in name for name in names)
    assert model.has_separate_head
    model.checkpoint_activations()
    model.module.train()
    plain.module.train()
    optimizer = OffloadOptimizer(
        trained(model.module),
        "torch.optim.AdamW",
        model=model.module,
        strategy="stream",
        update_in_backward=True,
        lr=1e-2,
        fused=True,
    )
    reference = torch.optim.AdamW([p for _, p in trained(plain.module)], lr=1e-2, fused=True)
    for step in range(3):
        tokens, labels = batch(step)
        fused_loss(plain, tokens, labels).backward()
        fused_loss(model, tokens, labels).backward()
        reference.step()
        reference.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    for (name, param), (_, expected) in zip(trained(model.module), trained(plain.module), strict=True):
        assert torch.equal(param, expected), name
    for name, param in model.module.named_parameters():
        assert name not in base or torch.equal(param, base[name]), name


def test_patterns_of_rank_and_alpha_reach_the_layers_that_they_name(folder: Path) -> None:
    layers = dict(adapted(folder, "ranks").module.named_modules())
    assert layers["base_model.model.model.layers.0.self_attn.o_proj"].r == {"default": 2}
    assert layers["base_model.model.model.layers.0.self_attn.q_proj"].r == {"default": 4}
    module = adapted(folder, "alphas").module
    scaling = {name: layer.scaling["default"] for name, layer in module.named_modules() if hasattr(layer, "lora_A")}
    assert scaling["base_model.model.model.layers.1.self_attn.o_proj"] == 32 / 4
    assert scaling["base_model.model.model.layers.1.mlp.up_proj"] == 8 / 4
    assert not [name for name in scaling if "layers.0" in name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_adapter_ends_bit_for_bit_as_an_unbroken_one(
    folder: Path, kind: str, tmp_path: Path, threaded: ThreadedRuntime
) -> None:
    """Four steps under ``stream`` in backward, and the same through a checkpoint after two: weights and states."""

    def ready() -> tuple[AdaptedModel, OffloadOptimizer]:
        model = adapted(folder, kind)
        model.module.train()
        return model, offloaded(model, "stream")

    def train(model: AdaptedModel, optimizer: OffloadOptimizer, steps: Sequence[int]) -> None:
        for step in steps:
            fused_loss(model, *batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()

    whole, first = ready(), ready()
    train(*whole, range(4))
    train(*first, range(2))
    model, optimizer = first
    manager = CheckpointManager(HuggingFaceFormat(folder), tmp_path / "run")
    manager.save(
        2,
        model=None,
        adapter=model.adapter_weights(),
        adapter_config=model.adapter_config(),
        recipe_state={"optimizer": optimizer.state_dict()},
    )
    found = manager.load_newest()
    assert found is not None and found[1].adapter is not None
    model = adapted(folder, kind)
    model.load_adapter(found[1].adapter)
    model.module.train()
    optimizer = offloaded(model, "stream")
    optimizer.load_state_dict(found[1].recipe_state["optimizer"])
    train(model, optimizer, range(2, 4))

    for (name, param), (_, expected) in zip(trained(model.module), trained(whole[0].module), strict=True):
        assert torch.equal(param, expected), name
    states, expected_states = optimizer.state_dict()["state"], whole[1].state_dict()["state"]
    assert states and states.keys() == expected_states.keys()
    for index, state in states.items():
        for key, value in state.items():
            assert torch.equal(value, expected_states[index][key]), (index, key)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_comes_back_through_our_state_and_through_peft(folder: Path, kind: str, tmp_path: Path) -> None:
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM

    model = adapted(folder, kind)
    expected = logits_of(model)
    weights = {name: tensor.clone() for name, tensor in model.adapter_weights().items()}
    tmp_path /= "adapter"
    HuggingFaceFormat(folder).write_adapter(tmp_path, model.adapter_weights(), model.adapter_config())
    other = adapted(folder, kind)
    with torch.no_grad():
        for _, param in trained(other.module):
            param.mul_(2)
    other.load_adapter(weights)
    assert torch.equal(logits_of(other), expected)

    assert PeftConfig.from_pretrained(str(tmp_path)).base_model_name_or_path == str(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=batch(0)[0]).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_merging_gives_a_plain_model_and_leaves_the_live_one_alone(folder: Path, kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = adapted(folder, kind)
    expected = logits_of(model)
    before = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    model.save(tmp_path, model.merged_weights(), max_shard_bytes=2**30)
    for name, param in model.module.named_parameters():
        assert torch.equal(param, before[name]), name
    assert torch.equal(logits_of(model), expected)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        got = merged(input_ids=batch(0)[0]).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    base = logits_of(from_pretrained(folder, device=CPU, dtype=torch.float32))
    assert not torch.allclose(got, base, rtol=1e-4, atol=1e-3)


def test_merging_a_model_whose_head_is_its_embedding(tmp_path: Path) -> None:
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    families.save("qwen3", tmp_path / "base")
    base = from_pretrained(tmp_path / "base", device=CPU, dtype=torch.float32)
    model = AdaptedModel(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    expected = logits_of(model)
    model.save(tmp_path / "merged", model.merged_weights(), max_shard_bytes=2**30)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=batch(0)[0]).logits, expected, rtol=1e-4, atol=1e-5)


def test_merging_experts(tmp_path: Path) -> None:
    """peft puts an adapter around each fused parameter, one inside the other."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    families.save("qwen3_moe", tmp_path / "base")
    torch.manual_seed(0)
    base = from_pretrained(tmp_path / "base", device=CPU, dtype=torch.float32)
    model = AdaptedModel(base, LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for _, param in trained(model.module):
            param.add_(torch.randn_like(param), alpha=0.1)
    assert any(".experts." in name for name in model.adapter_weights())
    expected = logits_of(model)
    model.save(tmp_path / "merged", model.merged_weights(), max_shard_bytes=2**30)
    assert torch.equal(logits_of(model), expected)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=batch(0)[0]).logits, expected, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_one_line(folder: Path) -> None:
    from peft import LoraConfig

    base = from_pretrained(folder, device=CPU, dtype=torch.float32)
    with pytest.raises(UserError, match=r"adapter: Target modules .*nothing_like_it.* not found"):
        AdaptedModel(base, LoraConfig(target_modules=["nothing_like_it"]))
    model = adapted(folder, "lora")
    weights = dict(model.adapter_weights())
    name = next(iter(weights))
    with pytest.raises(UserError, match="has no base_model"):
        model.load_adapter({n: w for n, w in weights.items() if n != name})
    with pytest.raises(UserError, match="has other, the model has not"):
        model.load_adapter({**weights, "other": weights[name]})
    with pytest.raises(UserError, match=r"is \[1\] in the checkpoint's adapter"):
        model.load_adapter({**weights, name: torch.zeros(1)})


@pytest.mark.parametrize("adapts", [False, True])
def test_what_projects_images_and_sound_is_frozen_with_their_towers(adapts: bool, tmp_path: Path) -> None:
    """Phi-4 multimodal's configuration is its language model's: what trains has a gradient from text."""
    from peft import LoraConfig

    families.save("phi4_multimodal", tmp_path)
    model = from_pretrained(tmp_path, device=CPU, dtype=torch.float32)
    assert model.frozen == ["embed_tokens_extend"]
    if adapts:
        model = AdaptedModel(model, LoraConfig(r=2, target_modules="all-linear"))
    fused_loss(model, *batch(0)).backward()
    names = [name for name, param in trained(model.module) if param.grad is None]
    assert trained(model.module) and not names


def test_all_linear_means_the_part_that_is_trained(tmp_path: Path) -> None:
    """Gemma 3's image tower is frozen and never run on text: an adapter there would be saved as it began."""
    from peft import LoraConfig

    families.save("gemma3", tmp_path)
    base = from_pretrained(tmp_path, device=CPU, dtype=torch.float32)
    assert base.frozen
    model = AdaptedModel(base, LoraConfig(r=4, target_modules="all-linear"))
    weights = model.adapter_weights()
    assert weights and not [name for name in weights if any(tower in name for tower in base.frozen)]
    trained = {id(param) for param in model.module.parameters() if param.requires_grad}
    assert trained == {id(p) for name, p in model.module.named_parameters() if "lora_" in name}
    with pytest.raises(UserError, match=r"adapter: .*exclude"):
        again = from_pretrained(tmp_path, device=CPU, dtype=torch.float32)
        AdaptedModel(again, LoraConfig(r=4, target_modules=r".*vision_tower.*q_proj"))


@pytest.mark.parametrize("family", ["llama4_text", "phimoe", "deepseek_v4", "falcon"])
def test_all_linear_leaves_out_layers_that_give_more_than_a_product(family: str, tmp_path: Path) -> None:
    """Routers of Llama 4 and Phi MoE are Linear by class, and return a tuple; Falcon's own Linear is one."""
    from peft import LoraConfig

    def routers(model: AdaptedModel) -> list[str]:
        return [name for name in model.adapter_weights() if ".router." in name]

    families.save(family, tmp_path)
    base = from_pretrained(tmp_path, device=CPU, dtype=torch.float32)
    expected = logits_of(base)
    model = AdaptedModel(base, LoraConfig(r=2, target_modules="all-linear"))
    assert model.left_out == {"falcon": [], "deepseek_v4": ["o_a_proj"]}.get(family, ["router"])
    assert model.adapter_weights() and not routers(model)
    torch.testing.assert_close(logits_of(model), expected)
    excludes: list[Any] = [r".*\.q_proj", ["q_proj"]]
    for exclude in excludes if family == "phimoe" else []:
        base = from_pretrained(tmp_path, device=CPU, dtype=torch.float32)
        model = AdaptedModel(base, LoraConfig(r=2, target_modules="all-linear", exclude_modules=exclude))
        assert not routers(model) and not [name for name in model.adapter_weights() if "q_proj" in name]
        torch.testing.assert_close(logits_of(model), expected)


def test_a_router_that_is_asked_for_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig

    families.save("phimoe", tmp_path)
    base = from_pretrained(tmp_path, device=CPU, dtype=torch.float32)
    with pytest.raises(
        UserError, match=r"adapter\.target_modules: model\.layers\.0\.mlp\.router is a PhimoeTopKRouter"
    ):
        AdaptedModel(base, LoraConfig(r=2, target_modules=["q_proj", "router"]))


def test_a_rank_above_every_layer_is_refused(folder: Path) -> None:
    from peft import LoraConfig

    def adapt(rank: int, targets: Any) -> None:
        base = from_pretrained(folder, device=torch.device("meta"), dtype=torch.float32)
        AdaptedModel(base, LoraConfig(r=rank, target_modules=targets))

    with pytest.raises(
        UserError, match=r"adapter\.r: got 100000, expected at most 32: model\.layers\.\d\.self_attn\.q_proj is"
    ):
        adapt(100_000, "all-linear")
    with pytest.raises(UserError, match=r"adapter\.r: got 17, expected at most 16: .*k_proj is 16 x 32"):
        adapt(17, ["k_proj"])
    adapt(17, "all-linear")  # some layers are smaller than others
    adapt(32, "all-linear")


@pytest.mark.parametrize("family", ["emu3", "zamba"])
def test_merging_gives_the_live_model(family: str, tmp_path: Path) -> None:
    """Emu3 is a language model and a codec, which ``AutoModelForCausalLM`` does not open; Zamba repeats one block,
    whose repetitions get adapters of their own and so differ after merging."""
    from peft import LoraConfig

    families.save(family, tmp_path / "base")
    torch.manual_seed(0)
    base = from_pretrained(tmp_path / "base", device=CPU, dtype=torch.float32)
    model = AdaptedModel(base, LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for _, param in trained(model.module):
            param.add_(torch.randn_like(param), alpha=0.1)
    expected = logits_of(model)
    model.save(tmp_path / "merged", model.merged_weights(), max_shard_bytes=2**30)
    merged = from_pretrained(tmp_path / "merged", device=CPU, dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged), expected, rtol=1e-4, atol=1e-5)

"""A frozen base in 4 bits (QLoRA) against peft and bitsandbytes by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from offload import OffloadOptimizer
from offload.errors import UserError
from offload.models.huggingface import AdaptedModel, from_pretrained
from tests.conftest import ThreadedRuntime  # type: ignore[import-not-found]
from tests.models.huggingface import families  # type: ignore[import-not-found]
from tests.models.huggingface.test_families import batch, fused_loss, plain_loss, trained  # type: ignore[import-not-found]

bitsandbytes = pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "target_modules": "all-linear"},
    "dora": {"r": 4, "target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "biased": {"r": 4, "target_modules": ["q_proj", "k_proj"], "lora_bias": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    families.save("qwen2", path)  # with biases in attention
    return path


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, saved in 4 bits."""
    path = tmp_path_factory.mktemp("packed")
    by_hand(folder).save_pretrained(path)
    return path


def by_hand(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=nf4, device_map={"": "cpu"}
    )


def adapted(folder: Path, kind: str, *, load_in_4bit: bool = True) -> AdaptedModel:
    from peft import LoraConfig

    torch.manual_seed(0)
    base = from_pretrained(folder, device=CPU, dtype=torch.float32, load_in_4bit=load_in_4bit)
    model = AdaptedModel(base, LoraConfig(**KINDS[kind]))
    with torch.no_grad():  # LoRA's second factor begins at 0
        for name, param in trained(model.module):
            if "lora_magnitude" not in name:
                param.add_(torch.randn_like(param), alpha=0.1)
    return model


def frozen(model: AdaptedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.module.named_parameters() if not p.requires_grad}


def logits_of(model: Any) -> Tensor:
    model.module.eval()
    with torch.no_grad():
        logits: Tensor = model.logits({"tokens": batch(0)[0]})
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_peft_with_adamw(folder: Path, kind: str, threaded: ThreadedRuntime) -> None:
    """Streamed in backward under activation checkpointing; evaluated before, between and after."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    model = adapted(folder, kind)
    assert model.is_in_4bit and model.has_separate_head
    theirs = get_peft_model(by_hand(folder), LoraConfig(task_type="CAUSAL_LM", **KINDS[kind]))
    set_peft_model_state_dict(theirs, {name: tensor.clone() for name, tensor in model.adapter_weights().items()})
    theirs.train()
    before = frozen(model)
    assert sum(p.dtype == torch.uint8 for p in before.values()) == 14
    model.checkpoint_activations()
    optimizer = OffloadOptimizer(
        trained(model.module),
        "torch.optim.AdamW",
        model=model.module,
        strategy="stream",
        update_in_backward=True,
        lr=1e-2,
        fused=True,
    )
    reference = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, fused=True)
    for step in range(3):
        logits_of(model)
        model.module.train()
        tokens, labels = batch(step)
        loss = fused_loss(model, tokens, labels)
        expected = plain_loss(theirs, tokens, labels)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        loss.backward()
        expected.backward()
        reference.step()
        reference.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    logits_of(model)
    from peft import get_peft_model_state_dict

    wanted = get_peft_model_state_dict(theirs, save_embedding_layers=False)
    found = model.adapter_weights()
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32
        # The fused loss sums in another order, and AdamW's update has the size of its rate whatever a gradient's.
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for name, param in model.module.named_parameters():
        assert name not in before or torch.equal(param, before[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", [False, True], ids=["rounded here", "stored in 4 bits"])
def test_merging_gives_a_plain_model_and_leaves_the_live_one_alone(
    folder: Path, packed: Path, kind: str, stored: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = adapted(packed if stored else folder, kind, load_in_4bit=not stored)
    assert model.is_in_4bit
    expected, before = logits_of(model), frozen(model)
    weights = model.merged_weights()
    model.save(tmp_path, weights, max_shard_bytes=2**30)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == load_file(folder / "model.safetensors").keys()
    assert weights.nbytes == sum(tensor.nbytes for tensor in saved.values())
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    if kind == "lora":
        layer = model.module.base_model.model.model.layers[1].mlp.up_proj
        values = bitsandbytes.functional.dequantize_4bit(layer.base_layer.weight, layer.base_layer.weight.quant_state)
        change = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 8 / 4
        merged = values + change.detach()
        torch.testing.assert_close(saved["model.layers.1.mlp.up_proj.weight"], merged, rtol=1e-6, atol=1e-7)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=batch(0)[0]).logits, expected, rtol=1e-4, atol=1e-5)
    for name, param in model.module.named_parameters():
        assert name not in before or torch.equal(param, before[name]), name
    assert torch.equal(logits_of(model), expected)


def test_merging_experts(tmp_path: Path) -> None:
    """They are not in 4 bits; what is beside them is."""
    families.save("qwen3_moe", tmp_path / "base")
    model = adapted(tmp_path / "base", "lora")
    expected = logits_of(model)
    assert any(".experts." in name for name in model.adapter_weights())
    model.save(tmp_path / "merged", model.merged_weights(), max_shard_bytes=2**30)
    merged = from_pretrained(tmp_path / "merged", device=CPU, dtype=torch.float32)
    assert not merged.is_in_4bit
    torch.testing.assert_close(logits_of(merged), expected, rtol=1e-4, atol=1e-5)


def test_sizes_are_those_of_the_plain_model(folder: Path) -> None:
    sizes = [from_pretrained(folder, device=CPU, dtype=torch.float32, load_in_4bit=x).size() for x in (False, True)]
    whole, rounded = (size.frozen + size.trainable for size in sizes)
    assert whole == rounded
    assert sizes[1].trainable == families.VOCABULARY * 32  # the head


def test_what_cannot_be_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(says: str, where: Path = folder) -> None:
        with pytest.raises(UserError, match=says) as caught:
            from_pretrained(where, device=CPU, dtype=torch.float32, load_in_4bit=True)
        assert "\n" not in str(caught.value)

    for family, says in (("falcon", "FalconForCausalLM has no linear layers"), ("gpt2", "Conv1D. of GPT2LMHeadModel")):
        families.save(family, tmp_path / family)
        refused(rf"model\.load_in_4bit=True: .*{says}.* leave it out, and use the config hf_lora", tmp_path / family)
    tmp_path /= "llama"
    families.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    refused(r"model\.load_in_4bit=True: the weights in .* are fp8 already.*leave load_in_4bit out", tmp_path)

    def broken(self: object, **_: object) -> None:
        raise RuntimeError("None of the available devices `available_devices = None` are supported by bitsandbytes")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.quantizers.quantizer_bnb_4bit.Bnb4BitHfQuantizer.validate_environment", broken)
        refused(r"model\.load_in_4bit=True: bitsandbytes does not work on cpu here \(None of .*\): leave it out")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    refused(r"model\.load_in_4bit: weights in 4 bits need bitsandbytes: pip install bitsandbytes")

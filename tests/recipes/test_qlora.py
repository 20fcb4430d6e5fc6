"""LoRA beside weights in 4 bits, in the recipe: against a loop by hand, resumed, merged, refused where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file

from tests.recipes.conftest import Workspace  # type: ignore[import-not-found]
from tests.recipes.test_huggingface import FULL, LORA, here, losses, saved  # type: ignore[import-not-found]

pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")

assert here  # the fixture
NF4 = "model.load_in_4bit=True"


def test_a_run_equals_a_loop_over_peft_and_bitsandbytes(
    here: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from offload.models.huggingface import AdaptedModel
    from offload.training.loss import SummedLoss

    begin: dict[str, torch.Tensor] = {}
    batches: list[tuple[Any, torch.Tensor]] = []
    init, call = AdaptedModel.__init__, SummedLoss.__call__

    def remember(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        begin.update({name: tensor.clone() for name, tensor in self.adapter_weights().items()})

    def record(self: Any, inputs: Any, labels: torch.Tensor, num_labels: int) -> torch.Tensor:
        batches.append((inputs, labels))
        return call(self, inputs, labels, num_labels)

    monkeypatch.setattr(AdaptedModel, "__init__", remember)
    monkeypatch.setattr(SummedLoss, "__call__", record)
    settings = ("lr_scheduler=null", "enable_activation_checkpointing=True", "clip_grad_norm=1.0")
    result = here.run(tmp_path / "out", NF4, *settings, recipe=LORA)
    found = losses(result)
    assert "4-bit" in result.out + result.err

    section = yaml.safe_load(here.config(LORA).read_text())
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        section["model"]["path"], dtype=torch.float32, quantization_config=nf4, device_map={"": "cpu"}
    )
    options = {key: value for key, value in section["adapter"].items() if key != "_component_"}
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options)).train()
    set_peft_model_state_dict(model, begin)
    params = [p for p in model.parameters() if p.requires_grad]
    kwargs = {k: v for k, v in section["optimizer"].items() if k in ("lr", "betas", "weight_decay", "fused", "eps")}
    optimizer = torch.optim.AdamW(params, **kwargs)
    accumulation = len(batches) // len(found)
    expected = []
    for step in range(len(found)):
        micro_batches = batches[step * accumulation : (step + 1) * accumulation]
        count = sum(int((labels != -100).sum()) for _, labels in micro_batches)
        total = 0.0
        for inputs, labels in micro_batches:
            logits = model(input_ids=inputs["tokens"], position_ids=inputs.get("input_pos"), use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    assert found == pytest.approx(expected, rel=1e-5)
    step_20 = load_file(result.output_dir / "step_20" / "adapter" / "adapter_model.safetensors")
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert step_20.keys() == wanted.keys()
    for name, value in step_20.items():
        assert (value - begin[name]).abs().max() > 1e-3, name
        # The fused loss sums in another order; the first updates have the size of the rate whatever their gradient's.
        # So single elements differ by up to 2e-6 (torch 2.11) after changes above 1e-3.
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=5e-6, msg=lambda m, n=name: f"{n}: {m}")
    # The merged model, of plain weights, gives what the two give together.
    merged = AutoModelForCausalLM.from_pretrained(result.output_dir / "step_20", dtype=torch.float32)
    tokens = batches[0][0]["tokens"]
    with torch.no_grad():
        torch.testing.assert_close(
            merged(input_ids=tokens).logits, model(input_ids=tokens).logits, rtol=1e-2, atol=1e-2
        )


def test_a_resumed_run_ends_bit_for_bit_as_an_unbroken_one(here: Workspace, tmp_path: Path) -> None:
    whole = here.run(tmp_path / "whole", NF4, recipe=LORA)
    here.run(tmp_path / "broken", NF4, "save_every_n_steps=7", recipe=LORA)
    resumed = here.run(tmp_path / "broken", NF4, "resume_from_checkpoint=step_7", recipe=LORA)
    assert losses(resumed)[-13:] == losses(whole)[-13:]
    first, second = saved(whole), saved(resumed)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_training_whole_is_refused(here: Workspace, tmp_path: Path) -> None:
    result = here.run(tmp_path / "out", NF4, recipe=FULL)
    assert result.status == 2
    assert result.errors() == [
        "error: model.load_in_4bit=True: weights in 4 bits cannot be trained: use the recipe "
        "lora_finetune_single_device with an adapter, or leave it out"
    ]
    assert not (tmp_path / "out").exists()


def test_a_folder_in_4_bits_is_read_as_it_is(here: Workspace, tmp_path: Path) -> None:
    """It trains as one that is rounded when it is read; whole it cannot be trained."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    base = yaml.safe_load(here.config(LORA).read_text())["model"]["path"]
    packed = tmp_path / "packed"
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=nf4, device_map={"": "cpu"}
    )
    model.save_pretrained(packed)
    short = ("max_steps_per_epoch=3",)
    expected = losses(here.run(tmp_path / "here", NF4, *short, recipe=LORA))
    result = here.run(tmp_path / "stored", f"model.path={packed}", *short, recipe=LORA)
    assert losses(result) == expected
    assert "of its weights are in 4-bit NF4" in result.out + result.err
    (line,) = here.run(tmp_path / "whole", f"model.path={packed}", *short, recipe=FULL).errors()
    assert "are in 4 bits, which cannot be trained: use the recipe lora_finetune_single_device" in line

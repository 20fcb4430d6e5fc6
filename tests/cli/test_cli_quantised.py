"""Folders whose weights are stored in fewer bits: a plan, a check and a run count them alike and refuse the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from offload.cli.main import main
from offload.models.huggingface import from_pretrained
from offload.models.huggingface.described import describe
from offload.models.huggingface.quantized import is_in_4bit
from tests.models.huggingface import families  # type: ignore[import-not-found]

pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")

CPU, FP32 = torch.device("cpu"), torch.float32
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def stored(folder: Path, section: dict[str, Any], *, weights: bool = True) -> Path:
    """A tiny Llama whose config.json says that its weights are stored so."""
    families.save("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    if not weights:
        (folder / "model.safetensors").unlink()
    return folder


def words(config: str, folder: Path, tmp_path: Path, *more: str) -> list[str]:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    return ["--config", config, f"model.path={folder}", f"dataset.path={data}", "device=cpu",
            f"output_dir={tmp_path / 'run'}", *more]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "section", "more", "says"),
    [
        ("hf_offload", NF4, [],
         "are in 4 bits, which cannot be trained: use the recipe lora_finetune_single_device with an adapter, or give "
         "the folder of the original model"),
        ("hf_lora", {"quant_method": "gptq", "bits": 4}, [],
         "are quantised (gptq) and cannot be trained: give the folder of the original model; of quantised ones only "
         "mxfp4, fp8 (read as plain weights) and bitsandbytes 4-bit (for LoRA) are read"),
        ("hf_qlora", {"quant_method": "fp8"}, [],
         "are fp8 already, which is read as plain weights: leave load_in_4bit out, or give a folder in bf16 or in "
         "bitsandbytes 4-bit"),
    ],
    ids=["4 bits whole", "for inference", "4 bits of 8"],
)  # fmt: skip
@pytest.mark.parametrize("weights", [True, False], ids=["whole", "config.json alone"])
def test_what_cannot_be_trained_is_one_line_the_same_everywhere(
    config: str, section: dict[str, Any], more: list[str], says: str, weights: bool, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = stored(tmp_path / "model", section, weights=weights)
    given = words(config, folder, tmp_path, *more)
    recipe = "full_finetune_single_device" if config == "hf_offload" else "lora_finetune_single_device"
    for command in (["plan"], ["validate"], ["run", recipe]):
        capsys.readouterr()
        try:
            status = main([*command, *(given if command[0] != "validate" else given[1:])])
        except SystemExit as ended:  # a recipe's
            status = int(ended.code or 0)
        assert status == 2, command
        (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
        assert says in line and f"the weights in {folder}" in line, command
    assert not (tmp_path / "run").exists()


def test_a_model_is_described_as_it_will_be_loaded(tmp_path: Path) -> None:
    """In 4 bits where the config says so, and under an adapter where one trains."""
    families.save("llama", tmp_path / "plain")
    section = OmegaConf.create({"path": str(tmp_path / "plain"), "load_in_4bit": True})
    adapter = OmegaConf.create({"_component_": "peft.LoraConfig", "r": 2, "target_modules": ["q_proj"]})
    for adapts in (True, False):
        found = describe(section, adapter, FP32, adapts=adapts)
        assert found is not None
        model, packed = found
        assert packed.elements > 0 and model.module.training
        assert any("lora_A" in name for name, _ in model.module.named_parameters()) is adapts
        assert all(param.is_meta for param in model.module.parameters())


@pytest.mark.parametrize("double", [True, False])
def test_a_plan_counts_the_bytes_that_a_run_holds(double: bool, tmp_path: Path) -> None:
    """Of a folder in 4 bits, but for what it says was left in 16."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    families.save("llama", tmp_path / "plain")
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
                             llm_int8_skip_modules=["lm_head", "model.layers.0.mlp.up_proj"])  # fmt: skip
    by_hand: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=FP32, quantization_config=nf4, device_map={"": "cpu"}
    )
    by_hand.save_pretrained(tmp_path / "packed")
    found = describe(OmegaConf.create({"path": str(tmp_path / "packed")}), None, FP32, adapts=True)
    assert found is not None
    model, packed = found
    loaded = from_pretrained(tmp_path / "packed", device=CPU, dtype=FP32)
    names = {name for name, module in loaded.module.named_modules() if is_in_4bit(module)}
    counted = {id(weight) for weight in packed.weights}
    assert {
        name for name, module in model.module.named_modules() if id(getattr(module, "weight", None)) in counted
    } == names
    assert names and "model.layers.0.mlp.up_proj" not in names
    held = 0
    for name in names:
        state = loaded.module.get_submodule(name).weight.quant_state  # type: ignore[union-attr]
        scales = state.absmax.nbytes + (4 * -(-state.absmax.numel() // 256) if double else 0)
        held += loaded.module.get_submodule(name).weight.nbytes + scales  # type: ignore[operator, union-attr]
    # A matrix of 32 x 32 has an eighth of the blocks that share a scale of scales.
    assert packed.nbytes * packed.elements == pytest.approx(held, rel=0.02 if double else 1e-9)


def test_weights_that_become_plain_ones_are_planned_as_plain_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {}
    for name, section in (("plain", {}), ("fp8", {"quant_method": "fp8"})):
        folder = stored(tmp_path / name, section, weights=False)
        assert main(["plan", *words("hf_offload", folder, tmp_path)]) == 0
        told[name] = capsys.readouterr().out
    weights = [re.search(r"weights +([\d.]+ \w+)", text) for text in told.values()]
    assert weights[0] and weights[1] and weights[0][1] == weights[1][1]
    note = "note: the fp8 weights of the folder are read as bf16, and saved so"
    assert note in told["fp8"] and note not in told["plain"]


@pytest.mark.parametrize(("section", "more"), [(NF4, []), ({}, ["model.load_in_4bit=True"])], ids=["stored", "rounded"])
def test_weights_in_4_bits_are_not_divided(
    section: dict[str, Any],
    more: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither in a plan nor in a run, which says so before it reads a weight."""
    from offload.distributed.world import World
    from offload.training import distributed

    folder = stored(tmp_path / "model", section, weights=False)
    given = words("hf_lora", folder, tmp_path, *more)
    capsys.readouterr()
    assert main(["plan", "--recipe", "lora_finetune_distributed", "--nproc_per_node", "2", *given]) == 2
    told = capsys.readouterr().err
    assert "model: weights in 4 bits of bitsandbytes cannot be divided among processes" in told
    monkeypatch.setattr(distributed, "current", lambda: World(0, 2, 0, 2))
    with pytest.raises(SystemExit) as ended:
        main(["run", "lora_finetune_distributed", *given])
    assert ended.value.code == 2 and capsys.readouterr().err == told

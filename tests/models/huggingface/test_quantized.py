"""Folders whose weights are quantised: read as plain weights, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offload.errors import UserError
from offload.models.huggingface import from_pretrained
from tests.models.huggingface import families  # type: ignore[import-not-found]

CPU = torch.device("cpu")

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Values of FP4, by their code: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf"""


def mxfp4(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """An expert's weight [experts, in, out] as gpt-oss stores it, and the values that it then has."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    codes = (groups / exponent.exp2()).unsqueeze(-1).sub(E2M1).abs().argmin(-1).to(torch.uint8)
    stored = {
        f"{name}_blocks": codes[..., 0::2] | (codes[..., 1::2] << 4),
        f"{name}_scales": (exponent.squeeze(-1) + 127).to(torch.uint8),
    }
    values = E2M1[codes.long()] * exponent.exp2()
    return stored, values.flatten(-2).transpose(1, 2)


def fp8(name: str, weight: Tensor, block: int = 16) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix as DeepSeek stores it, and the values that it then has."""
    blocks = weight.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    stored = {name: codes.flatten(2).flatten(0, 1), f"{name}_scale_inv": scale[:, 0, :, 0]}
    return stored, (codes.float() * scale).flatten(2).flatten(0, 1)


def quantize(
    folder: Path,
    section: dict[str, object],
    pack: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]],
    is_packed: Callable[[str], bool],
) -> dict[str, Tensor]:
    """Quantise the weights in a folder; returns what they are worth, under their original names."""
    file = folder / "model.safetensors"
    stored, values = {}, {}
    for name, weight in load_file(file).items():
        packed, values[name] = pack(name, weight) if is_packed(name) else ({name: weight}, weight)
        stored |= packed
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file, metadata={"format": "pt"})
    edit(folder, quantization_config=section)
    return values


def edit(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def gpt_oss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    monkeypatch.setitem(families.FAMILIES, "gpt_oss", {**families.FAMILIES["gpt_oss"], "intermediate_size": 64})
    families.save("gpt_oss", folder)
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return quantize(folder, section, mxfp4, lambda name: name.endswith(("gate_up_proj", "down_proj")))


def qwen3_moe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    families.save("qwen3_moe", folder)
    section = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    }
    return quantize(folder, section, fp8, lambda name: name.endswith("_proj.weight"))


@pytest.mark.parametrize("make", [gpt_oss, qwen3_moe])
def test_quantised_weights_become_plain_ones(
    make: Callable[[Path, pytest.MonkeyPatch], dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = make(tmp_path / "quantised", monkeypatch)
    model = from_pretrained(tmp_path / "quantised", device=CPU, dtype=torch.float32)
    assert model.dequantized == {gpt_oss: "mxfp4", qwen3_moe: "fp8"}[make]
    assert {(p.dtype, p.requires_grad) for p in model.module.parameters()} == {(torch.float32, True)}
    # Saved is a plain model, under the names that it was published with.
    (tmp_path / "saved").mkdir()
    model.save(tmp_path / "saved", dict(model.module.named_parameters()), max_shard_bytes=2**30)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == values.keys()
    for name, expected in values.items():
        assert torch.equal(saved[name], expected), name
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = from_pretrained(tmp_path / "saved", device=CPU, dtype=torch.float32)
    assert again.dequantized is None
    tokens = torch.arange(3, 15).unsqueeze(0)
    assert torch.equal(again.logits({"tokens": tokens}), model.logits({"tokens": tokens}))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "modelopt"}, "modelopt"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"bits": 4}, "an unnamed method"),
        ("int4", "int4"),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["whole", "language part"])
def test_what_is_for_inference_is_refused(section: object, says: str, inside: bool, tmp_path: Path) -> None:
    families.save("llama", tmp_path)
    where = {"quantization_config": section}
    edit(tmp_path, **({"text_config": where} if inside else where))
    with pytest.raises(UserError) as caught:
        from_pretrained(tmp_path, device=CPU, dtype=torch.float32)
    expected = (
        f"model.path: the weights in {tmp_path} are quantised ({says}) and cannot be trained: give the folder of the "
        "original model; of quantised ones only mxfp4, fp8 (read as plain weights) and bitsandbytes 4-bit (for LoRA) "
        "are read"
    )
    assert str(caught.value) == expected

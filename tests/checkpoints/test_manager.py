"""Checkpoints: conversion, atomicity, resuming, errors, adapters."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from offload import torchao_shim
from offload.checkpoints import folders as checkpoint_folders
from offload.checkpoints import manager as checkpoint
from offload.checkpoints import manifest as checkpoint_manifest
from offload.checkpoints import state as recipe_state
from offload.checkpoints.manager import CheckpointManager
from offload.errors import UserError
from offload.models import tensors
from offload.models.torchtune import base_checkpoint, peft_adapter
from offload.models.torchtune import checkpoint as torchtune_checkpoint
from offload.models.torchtune.checkpoint import TorchtuneFormat

torchao_shim.install()

from torchtune.models import convert_weights  # noqa: E402
from torchtune.models.gemma2 import gemma2  # noqa: E402
from torchtune.models.gemma2._convert_weights import gemma2_tune_to_hf  # noqa: E402
from torchtune.models.llama2 import llama2, lora_llama2  # noqa: E402
from torchtune.models.llama3_2 import llama3_2  # noqa: E402
from torchtune.models.mistral import mistral  # noqa: E402
from torchtune.models.phi3 import phi3  # noqa: E402
from torchtune.models.phi3._convert_weights import phi3_tune_to_hf  # noqa: E402
from torchtune.models.qwen2 import lora_qwen2, qwen2  # noqa: E402
from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf  # noqa: E402
from torchtune.modules.peft import get_adapter_params, get_merged_lora_ckpt  # noqa: E402

DIM, HEADS, KV_HEADS, HIDDEN, VOCAB, LAYERS, CONTEXT = 32, 4, 2, 48, 64, 2, 64
SIZES = {
    "vocab_size": VOCAB,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "embed_dim": DIM,
    "max_seq_len": CONTEXT,
}
HF_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PERMUTED = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "dim": DIM}


def _llama2():
    model = llama2(**SIZES, num_kv_heads=KV_HEADS, intermediate_dim=HIDDEN, norm_eps=1e-6)
    return (
        model,
        lambda w: convert_weights.tune_to_hf(w, **PERMUTED),
        {"model_type": "llama", "rms_norm_eps": 1e-6},
    )


def _llama3_2():
    model = llama3_2(**SIZES, num_kv_heads=KV_HEADS, intermediate_dim=HIDDEN, scale_factor=32)
    config = {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    return model, lambda w: convert_weights.tune_to_hf(w, **PERMUTED), config


def _mistral():
    model = mistral(**SIZES, num_kv_heads=KV_HEADS, intermediate_dim=HIDDEN, norm_eps=1e-6)
    config = {"model_type": "mistral", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": None}
    return model, lambda w: convert_weights.tune_to_hf(w, **PERMUTED), config


def _qwen2(tied: bool = True):
    model = qwen2(**SIZES, num_kv_heads=KV_HEADS, intermediate_dim=HIDDEN, norm_eps=1e-6, tie_word_embeddings=tied)
    config = {
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
    }
    return model, lambda w: qwen2_tune_to_hf(w, **PERMUTED, tie_word_embeddings=tied), config


def _gemma2():
    model = gemma2(
        **SIZES,
        num_kv_heads=KV_HEADS,
        head_dim=16,
        intermediate_dim=HIDDEN,
        norm_eps=1e-6,
        hidden_capping_value=50.0,
        final_capping_value=30.0,
        sliding_window_size=CONTEXT,
        query_pre_attn_scalar=16,
    )
    config = {
        "model_type": "gemma2",
        "rms_norm_eps": 1e-6,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": CONTEXT,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    return model, lambda w: gemma2_tune_to_hf(w, **PERMUTED, head_dim=16), config


def _phi3():
    model = phi3(**SIZES, num_kv_heads=HEADS, intermediate_dim=HIDDEN, norm_eps=1e-5)
    config = {"model_type": "phi3", "rms_norm_eps": 1e-5, "num_key_value_heads": HEADS}
    return model, phi3_tune_to_hf, config


FAMILIES = {
    "LLAMA2": _llama2,
    "LLAMA3_2": _llama3_2,
    "MISTRAL": _mistral,
    "QWEN2": _qwen2,
    "GEMMA2": _gemma2,
    "PHI3_MINI": _phi3,
}


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=generator)
            else:  # norm scales, biases and magnitudes: away from 0 and 1, so that losing one shows
                parameter.copy_(0.7 + 0.3 * torch.rand(parameter.shape, generator=generator))


def write_base(folder: Path, family: str, *, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A tiny Hugging Face checkpoint in ``folder``, with a tokenizer; returns its torchtune model."""
    model, to_hf, config = FAMILIES[family]()
    randomise(model)
    model.to(dtype).eval()
    folder.mkdir(parents=True)
    weights = to_hf(model.state_dict())
    if family == "GEMMA2":  # torchtune's converter exchanges the two norms (its issue 2850)
        weights = {
            k.replace("pre_feed", "?").replace("post_feed", "pre_feed").replace("?", "post_feed"): v
            for k, v in weights.items()
        }
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors")
    dtype_name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**HF_SIZES, "dtype": dtype_name, **config}))
    (folder / "tokenizer.model").write_bytes(b"pieces")
    (folder / "LICENSE.txt").write_text("terms")
    return model


def section(folder: Path, family: str = "LLAMA2", **more: Any) -> dict[str, Any]:
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(folder),
        "model_type": family,
        **more,
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_base(tmp_path / "base", "LLAMA2")
    return tmp_path / "base"


@pytest.fixture
def manager(base: Path, tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out")


def assert_same(left: Any, right: Any, place: str = "") -> None:
    """Equal to the bit, types and dtypes included."""
    assert type(left) is type(right), place
    if isinstance(left, dict):
        assert left.keys() == right.keys(), place
        for key in left:
            assert_same(left[key], right[key], f"{place}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), place
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{place}[{i}]")
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape, place
        assert torch.equal(left, right), place
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and np.array_equal(left, right), place
    else:
        assert left == right, place


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# -------------------------------------------------------------------------------------- model families


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_exact_and_transformers_agrees(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = write_base(tmp_path / "base", family)
    manager = CheckpointManager(TorchtuneFormat(section(tmp_path / "base", family)), tmp_path / "out")
    assert_same(dict(manager.format.load_base()), dict(model.state_dict()))

    randomise(model, seed=1)  # trained weights, different from the base's
    path = manager.save(7, model=model.state_dict(), recipe_state={})
    loaded = manager.load(path)
    assert loaded.model is not None and loaded.step == 7
    assert_same(dict(loaded.model), dict(model.state_dict()))
    model.load_state_dict(loaded.model, strict=True)

    hf = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    if family == "GEMMA2":
        # torchtune caps the last hidden state where Gemma 2 caps the logits, which no conversion can mend.
        model.norm.logit_capping = torch.nn.Identity()
        hf.config.final_logit_softcapping = None
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(hf(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)


def test_the_files_of_a_full_checkpoint(manager: CheckpointManager) -> None:
    path = manager.save(20, model=manager.format.load_base(), recipe_state={"x": 1})
    assert path == manager.output_dir / "step_20"
    assert names(path) == {
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.model",
        "LICENSE.txt",
        "recipe_state.pt",
        "checkpoint.json",
    }
    assert [entry.name for entry in manager.output_dir.iterdir()] == ["step_20"]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    weights = load_file(path / "model-00001-of-00001.safetensors")
    assert set(index["weight_map"]) == set(weights)
    assert index["metadata"]["total_size"] == sum(w.numel() * w.element_size() for w in weights.values())


def test_shards(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(torchtune_checkpoint, "SHARD_BYTES", 31_000)
    manager = CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out")
    model = manager.format.load_base()
    path = manager.save(1, model=model, recipe_state={})
    shards = sorted(path.glob("*.safetensors"))
    assert [s.name for s in shards] == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert all(s.stat().st_size < 40_000 for s in shards)
    loaded = manager.load(path).model
    assert loaded is not None
    assert_same(dict(loaded), dict(model))
    hf = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(hf.model.norm.weight, model["norm.scale"])
    # and such a checkpoint is a base in its turn
    again = CheckpointManager(TorchtuneFormat(section(path)), tmp_path / "out2")
    assert len(again.format.base.files) == 4
    assert_same(dict(again.format.load_base()), dict(model))


def test_the_config_tells_the_dtype_of_the_saved_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_base(tmp_path / "base", "LLAMA2", dtype=torch.bfloat16)
    manager = CheckpointManager(TorchtuneFormat(section(tmp_path / "base")), tmp_path / "out")
    model = {name: tensor.float() + 1e-4 for name, tensor in manager.format.load_base().items()}
    path = manager.save(1, model=model, recipe_state={})
    hf = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert hf.dtype == torch.float32
    assert torch.equal(hf.lm_head.weight, model["output.weight"])


def test_a_repeated_tied_head_is_dropped(tmp_path: Path) -> None:
    model = write_base(tmp_path / "base", "LLAMA3_2")
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    manager = CheckpointManager(TorchtuneFormat(section(tmp_path / "base", "LLAMA3_2")), tmp_path / "out")
    model.load_state_dict(manager.format.load_base(), strict=True)


def test_untied_qwen2_keeps_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "QWEN2", lambda: _qwen2(tied=False))
    model = write_base(tmp_path / "base", "QWEN2")
    manager = CheckpointManager(TorchtuneFormat(section(tmp_path / "base", "QWEN2")), tmp_path / "out")
    path = manager.save(1, model=manager.format.load_base(), recipe_state={})
    loaded = manager.load(path).model
    assert loaded is not None
    assert_same(dict(loaded), dict(model.state_dict()))


def test_saving_shared_strided_and_slab_tensors_leaves_the_model_alone(manager: CheckpointManager) -> None:
    model = manager.format.load_base()
    wanted = {name: tensor.clone() for name, tensor in model.items()}
    shared = model["tok_embeddings.weight"]
    model["output.weight"] = shared  # same memory twice
    wanted["output.weight"] = shared.clone()
    name = "layers.0.mlp.w1.weight"
    model[name] = model[name].t().contiguous().t()
    slab = torch.zeros(100_000)
    for name in ("layers.1.attn.q_proj.weight", "layers.1.mlp.w2.weight"):
        start = 64 if "attn" in name else 50_000
        view = slab[start : start + model[name].numel()].view(model[name].shape)
        view.copy_(model[name])
        model[name] = view
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in model.items()}
    versions = {name: (p._version, p.data_ptr()) for name, p in parameters.items()}
    path = manager.save(1, model=parameters, recipe_state={})
    assert versions == {name: (p._version, p.data_ptr()) for name, p in parameters.items()}
    assert_same({name: p.detach() for name, p in parameters.items()}, wanted)
    loaded = manager.load(path).model
    assert loaded is not None
    assert_same(dict(loaded), wanted)
    assert (path / "model-00001-of-00001.safetensors").stat().st_size < 110_000


def test_an_accelerators_tensors_pass_through_the_host_a_shard_at_a_time(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    sizes: list[int] = []
    original = tensors.host_tensor

    def watch(tensor: torch.Tensor, name: str) -> torch.Tensor:
        result = original(tensor, name)
        moved.append(result.numel() * 4)
        return result

    save = manager.format._torchtune.save_checkpoint

    def save_checkpoint(state: dict, **kwargs: Any) -> None:
        assert all(tensor.device.type == "cpu" for tensor in state["model"].values())
        sizes.append(sum(moved))
        moved.clear()
        save(state, **kwargs)

    monkeypatch.setattr(torchtune_checkpoint, "SHARD_BYTES", 31_000)
    monkeypatch.setattr(tensors, "host_tensor", watch)
    monkeypatch.setattr(manager.format._torchtune, "save_checkpoint", save_checkpoint)
    manager.save(1, model=manager.format.load_base(), recipe_state={})
    assert len(sizes) == 4 and max(sizes) <= 31_000


def test_nothing_is_printed(manager: CheckpointManager, capfd: pytest.CaptureFixture[str]) -> None:
    manager.save(1, model=manager.format.load_base(), recipe_state={})
    assert capfd.readouterr() == ("", "")


def test_what_belongs_to_the_model_is_copied_and_nothing_else(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "tokenizer.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "original/tokenizer.model",
        "USE_POLICY.md",
    ):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text("{}")
    copied = {"tokenizer.model", "LICENSE.txt", *names(base)} - {"model.safetensors", "config.json"}
    blob = base.parent / "blob"
    blob.write_text("merges")
    (base / "merges.txt").symlink_to(blob)  # as in the hub's cache
    for name in (
        "original/consolidated.00.pth",
        "original/params.json",
        "step_10/config.json",
        ".cache/x.json",
        ".gitattributes",
        "adapter_config.json",
        "pytorch_model.bin.index.json",
        "consolidated.safetensors",
        "optimizer.pt",
        "metrics.jsonl",
    ):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text("{}")
    with open(base / "dump.json", "wb") as file:
        file.truncate(101 * 2**20)  # sparse
    manager = CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out")
    copied_by_torchtune: list[Any] = []
    monkeypatch.setattr(shutil, "copy2", lambda *args: copied_by_torchtune.append(args))
    path = manager.save(1, model=manager.format.load_base(), recipe_state={})
    assert copied_by_torchtune == []
    written = {
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "recipe_state.pt",
        "checkpoint.json",
    }
    assert names(path) - written == copied | {"merges.txt"}
    assert (path / "merges.txt").read_text() == "merges" and not (path / "merges.txt").is_symlink()
    assert not [p for p in path.iterdir() if p.is_dir() and p.name != "original"]


def test_saving_outlives_the_base_checkpoint(manager: CheckpointManager, base: Path) -> None:
    model = {name: tensor.clone() for name, tensor in manager.format.load_base().items()}
    shutil.rmtree(base)
    path = manager.save(1, model=model, recipe_state={})
    loaded = manager.load(path).model
    assert loaded is not None
    assert_same(dict(loaded), model)


# ---------------------------------------------------------------------------------------- recipe state


def test_recipe_state_round_trip(manager: CheckpointManager) -> None:
    torch.manual_seed(5)
    parameter = torch.nn.Parameter(torch.randn(8, 4))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": (3, (1, 2), None)},
        "scheduler": {"last_epoch": 3, "base_lrs": [1e-3], "fn": None},
        "step": 12,
        "loss": float("inf"),
        "name": "run",
        "flags": {True, False},
        "dtype": torch.bfloat16,
        "tuple": (1, "a", 2.5),
        7: b"bytes",
        "empty": torch.empty(0),
        "scalar": torch.tensor(3),
        "strided": torch.arange(12.0).view(3, 4).t(),
    }
    path = manager.save(1, model=manager.format.load_base(), recipe_state=state)
    assert_same(manager.load(path).recipe_state, state)


def test_numpy_scalars_and_configs_become_python(manager: CheckpointManager) -> None:
    from omegaconf import OmegaConf

    state = {"a": np.float64(0.1), "b": np.int32(3), "c": OmegaConf.create({"x": [1, "${.y}"]})}
    state["c"]["x"] = [1, 2]
    path = manager.save(1, model=manager.format.load_base(), recipe_state=state)
    assert_same(manager.load(path).recipe_state, {"a": 0.1, "b": 3, "c": {"x": [1, 2]}})


def test_a_value_that_could_not_be_read_back_is_named(manager: CheckpointManager) -> None:
    model = manager.format.load_base()
    with pytest.raises(TypeError, match=r"recipe_state\['a'\]\[1\] is a .*Path"):
        manager.save(1, model=model, recipe_state={"a": [0, Path("x")]})
    with pytest.raises(TypeError, match=r"recipe_state\['signal'\] is .*SIGINT"):
        manager.save(1, model=model, recipe_state={"signal": signal.SIGINT})
    with pytest.raises(TypeError, match="meta device"):
        manager.save(1, model=model, recipe_state={"t": torch.empty(2, device="meta")})
    assert list(manager.output_dir.iterdir()) == []


def test_views_into_a_slab_are_written_without_the_slab_and_without_a_copy(tmp_path: Path) -> None:
    slab = torch.zeros(4_000_000, dtype=torch.uint8)
    moments = slab[256 : 256 + 4096].view(torch.bfloat16).view(32, 64)
    moments.copy_(torch.randn(32, 64))
    state = {"m": moments, "same": moments, "step": slab[8192:8196].view(torch.float32)[0], "fp8": None}
    prepared = recipe_state.Prepared(state)
    assert prepared.value["m"].data_ptr() == moments.data_ptr()
    assert prepared.value["m"] is prepared.value["same"]
    assert prepared.nbytes == 4096 + 4
    recipe_state.write(prepared.value, tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 10_000
    assert_same(recipe_state.read(tmp_path / "state.pt"), state)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.float16, torch.complex64, torch.int64])
def test_views_of_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    view = torch.randn(1000).to(dtype)[10:20]
    recipe_state.write({"x": recipe_state.Prepared(view).value}, tmp_path / "x.pt")
    back = recipe_state.read(tmp_path / "x.pt")["x"]
    assert back.dtype == dtype and back.untyped_storage().nbytes() == 10 * view.element_size()
    assert torch.equal(back.view(torch.uint8), view.clone().view(torch.uint8))


@pytest.mark.parametrize("optimizer_class", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_states_of_torchao_optimizers(optimizer_class: str, manager: CheckpointManager) -> None:
    optim = pytest.importorskip("torchao.optim")
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(64, 128))
    optimizer = getattr(optim, optimizer_class)([parameter], lr=1e-3)
    parameter.grad = torch.randn_like(parameter)
    with torch.compiler.set_stance("force_eager"):  # compiling takes half a minute
        optimizer.step()
    saved = optimizer.state_dict()
    path = manager.save(1, model=manager.format.load_base(), recipe_state={"optimizer": saved})
    other = getattr(optim, optimizer_class)([torch.nn.Parameter(parameter.detach().clone())], lr=1e-3)
    other.load_state_dict(manager.load(path).recipe_state["optimizer"])
    loaded = other.state_dict()["state"][0]
    for key in ("exp_avg", "exp_avg_sq"):
        assert type(loaded[key]).__name__.startswith("OptimState")
        assert torch.equal(loaded[key].dequantize(), saved["state"][0][key].dequantize())
    if optimizer_class != "AdamW8bit":  # one process is slow enough
        return
    # In a process which has not imported torchao.optim, as a resumed run at that point.
    code = (
        "import sys; from pathlib import Path; from offload.checkpoints import state as recipe_state;"
        f"s = recipe_state.read(Path({str(path / 'recipe_state.pt')!r}));"
        "s = s['recipe_state']['optimizer']['state'][0];"
        "print(type(s['exp_avg']).__name__, s['exp_avg'].dequantize().double().sum().item())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    moments = saved["state"][0]["exp_avg"]
    assert out.split()[0] == type(moments).__name__ != "Tensor"
    assert float(out.split()[1]) == moments.dequantize().double().sum().item()


def test_subclass_states_in_slabs(tmp_path: Path) -> None:
    pytest.importorskip("torchao.optim")
    from torchao.optim.subclass_8bit import OptimState8bit

    whole = OptimState8bit.zeros((64, 64))
    slab = torch.zeros(1_000_000, dtype=torch.uint8)
    codes = slab[64 : 64 + 4096].view(whole.codes.shape)
    codes.copy_(torch.arange(4096).remainder(256).to(torch.uint8).view_as(codes))
    state = OptimState8bit(codes, whole.scale, whole.qmap, whole.signed)
    recipe_state.write({"s": recipe_state.Prepared(state).value}, tmp_path / "s.pt")
    assert (tmp_path / "s.pt").stat().st_size < 20_000
    back = recipe_state.read(tmp_path / "s.pt")["s"]
    assert isinstance(back, OptimState8bit) and torch.equal(back.codes, codes)


def test_states_of_bitsandbytes_optimizers(manager: CheckpointManager) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(128, 128))
    optimizer = bnb.optim.AdamW8bit([parameter], lr=1e-3)
    parameter.grad = torch.randn_like(parameter)
    try:
        optimizer.step()
    except Exception as error:  # depends on the build: some have no CPU kernels
        pytest.skip(f"this bitsandbytes does not update on the CPU: {error}")
    saved = optimizer.state_dict()
    path = manager.save(1, model=manager.format.load_base(), recipe_state={"optimizer": saved})
    assert_same(manager.load(path).recipe_state["optimizer"]["state"], saved["state"])


def test_reading_runs_no_code(manager: CheckpointManager) -> None:
    path = manager.save(1, model=manager.format.load_base(), recipe_state={})

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(path / "evil"),)

    torch.save({"format": 1, "adapter": None, "recipe_state": Evil()}, path / "recipe_state.pt")
    _repair_manifest(path)
    with pytest.raises(UserError, match="recipe_state.pt is damaged"):
        manager.load(path)
    assert not (path / "evil").exists()


def _repair_manifest(path: Path) -> None:
    """As if what is there had been written so."""
    before = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").unlink()
    checkpoint_manifest.write(path, step=before["step"], sequence=before["sequence"], sums={})


# ---------------------------------------------------------------------------- newest, kept and deleted


def test_latest_is_the_last_saved_even_after_going_back(manager: CheckpointManager) -> None:
    assert manager.latest() is None
    model = manager.format.load_base()
    for step in (9, 10, 100):
        path = manager.save(step, model=model, recipe_state={})
        assert manager.latest() == path
    path = manager.save(20, model=model, recipe_state={})  # resumed from step 10
    assert manager.latest() == path


def test_saving_a_step_again_replaces_it(manager: CheckpointManager) -> None:
    model = manager.format.load_base()
    manager.save(5, model=model, recipe_state={"x": 1})
    path = manager.save(5, model=model, recipe_state={"x": 2})
    assert manager.load(path).recipe_state == {"x": 2}
    assert [entry.name for entry in manager.output_dir.iterdir()] == ["step_5"]


def test_keep_last_n(base: Path, tmp_path: Path) -> None:
    manager = CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out", keep_last_n=2)
    model = manager.format.load_base()
    (tmp_path / "out" / "step_notes").mkdir()
    (tmp_path / "out" / "step_1").mkdir()  # not a checkpoint of ours
    for step in (2, 30, 4, 5):
        manager.save(step, model=model, recipe_state={})
        assert (tmp_path / "out" / f"step_{step}").is_dir()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "step_1",
        "step_4",
        "step_5",
        "step_notes",
    ]


def test_keep_last_n_1_never_deletes_what_it_just_wrote(base: Path, tmp_path: Path) -> None:
    manager = CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out", keep_last_n=1)
    model = manager.format.load_base()
    for step in (100, 5):
        path = manager.save(step, model=model, recipe_state={})
        assert [p.name for p in (tmp_path / "out").iterdir()] == [path.name]


def test_the_checkpoint_that_a_run_started_from_is_kept(manager: CheckpointManager, tmp_path: Path) -> None:
    start = manager.save(5, model=manager.format.load_base(), recipe_state={})
    again = CheckpointManager(TorchtuneFormat(section(start)), manager.output_dir, keep_last_n=1)
    model = {name: tensor.clone() for name, tensor in again.format.load_base().items()}
    for step in (6, 7):
        again.save(step, model=model, recipe_state={})
    assert sorted(p.name for p in manager.output_dir.iterdir()) == ["step_5", "step_7"]


@pytest.mark.parametrize("value", [0, -1, True])
def test_keep_last_n_is_checked(value: Any, base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keep_last_n: got .* at least 1"):
        CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out", keep_last_n=value)


def test_latest_skips_incomplete_and_removes_leftovers(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = manager.format.load_base()
    good = manager.save(1, model=model, recipe_state={})
    bad = manager.save(2, model=model, recipe_state={})
    with open(bad / "recipe_state.pt", "ab") as file:
        file.truncate(100)
    (manager.output_dir / "step_3").mkdir()
    monkeypatch.setattr(checkpoint_folders.os, "getpid", lambda: 2**22 + 1)  # above any process id
    dead = [checkpoint_folders.sibling(manager.output_dir / "step_4", p) for p in ("tmp", "del")]
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint_folders.os, "getpid", os.getppid)
    alive = checkpoint_folders.sibling(manager.output_dir / "step_4", "tmp")
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint_folders.socket, "gethostname", lambda: "elsewhere")
    foreign = checkpoint_folders.sibling(manager.output_dir / "step_4", "tmp")
    ancient = checkpoint_folders.sibling(manager.output_dir / "step_5", "tmp")
    monkeypatch.undo()
    for path in (*dead, alive, foreign, ancient):
        path.mkdir()
        (path / "file").touch()
    for path in (ancient / "file", ancient):
        os.utime(path, (0, 0))
    assert manager.latest() == good
    assert "step_2 is damaged: recipe_state.pt has 100 bytes" in caplog.text
    assert [path.exists() for path in (*dead, alive, foreign, ancient)] == [False, False, True, True, False]


# --------------------------------------------------------------------------------- whole or not at all

ROOT = Path(__file__).parents[2]

# Forks a child for each trial (an import for each would take minutes). The child saves checkpoints whose
# every value tells how many were saved, over and over: new ones, replaced ones, deleted ones.
KILL_SCRIPT = textwrap.dedent(
    """
    import gc, os, random, shutil, signal, sys, time
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from offload.checkpoints.manager import CheckpointManager
    from offload.models.torchtune.checkpoint import TorchtuneFormat
    from offload import torchao_shim
    torchao_shim.install()
    import torchtune.training  # now, or each child would spend seconds on it
    gc.freeze()  # torchtune collects garbage at each load: not what the imports left

    base, root, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    section = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(base),
        "model_type": "LLAMA2",
    }
    CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "shutil.copyfile"}

    def save_some(out, kill_at):
        manager = CheckpointManager(TorchtuneFormat(section), out, keep_last_n=2)
        shapes = {name: tensor.shape for name, tensor in manager.format.load_base().items()}
        manager.latest()
        if kill_at is not None:
            count = 0
            def hook(event, args):
                nonlocal count
                # what is opened but to be read: files to write, and files and folders to fsync
                if event in CHANGES or event == "open" and args[1] not in ("r", "rb"):
                    count += 1
                    if count == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
            sys.addaudithook(hook)
        for value, step in enumerate((1, 2, 2, 3) if kill_at is not None else (1, 2, 2, 3) * 1000, 1):
            model = {name: torch.full(shape, float(value)) for name, shape in shapes.items()}
            manager.save(step, model=model, recipe_state={"value": value, "big": torch.full((20000,), value)})

    def check(out):
        manager = CheckpointManager(TorchtuneFormat(section), out)
        latest = manager.latest()
        hidden = [p.name for p in out.iterdir() if p.name.startswith(".")]
        assert not hidden, hidden
        for path in out.iterdir():
            loaded = manager.load(path)
            value = loaded.recipe_state["value"]
            assert bool((loaded.recipe_state["big"] == value).all())
            assert all(bool((tensor == value).all()) for tensor in loaded.model.values()), path
        return None if latest is None else manager.load(latest).recipe_state["value"]

    def trial(out, kill_at, delay):
        child = os.fork()
        if child == 0:
            try:
                save_some(out, kill_at)
            except BaseException as error:
                print("child failed:", repr(error), flush=True)
                os._exit(9)
            os._exit(0)
        if delay is not None:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
        return os.WIFSIGNALED(status)

    seen = []
    if mode == "random":
        rng = random.Random(0)
        out = root / "out"  # one folder for all: each trial also recovers from the one before
        for _ in range(25):
            assert trial(out, None, rng.uniform(0.01, 0.25))
            seen.append(check(out))
        assert sum(value is not None for value in seen) >= 20, seen
    else:
        kill_at = 0
        killed = True
        while killed:
            kill_at += 1
            out = root / f"out{kill_at}"
            killed = trial(out, kill_at, None)
            if out.exists():
                seen.append(check(out))
                shutil.rmtree(out)
        assert kill_at > 40, kill_at
        values = [value or 0 for value in seen]
        assert values == sorted(values) and set(values) == {0, 1, 2, 3, 4}, seen
    print("checked", len(seen))
    """
)


@pytest.mark.parametrize("mode", ["random", "every file operation"])
def test_a_kill_at_any_moment_leaves_whole_checkpoints(mode: str, base: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", KILL_SCRIPT, str(base), str(tmp_path / "runs"), mode],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "checked" in result.stdout


@pytest.mark.parametrize("limit", [20_000, 100_000])  # in the weights; in recipe_state.pt
def test_a_failed_write_leaves_nothing_behind(limit: int, manager: CheckpointManager) -> None:
    model = manager.format.load_base()
    before = manager.save(1, model=model, recipe_state={"x": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(UserError) as caught:
            manager.save(2, model=model, recipe_state={"big": torch.zeros(50_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    message = str(caught.value)
    assert "File too large" in message and str(manager.output_dir / "step_2") in message
    assert "it needs" in message and "are free" in message and "\n" not in message
    assert [entry.name for entry in manager.output_dir.iterdir()] == ["step_1"]
    assert manager.load(before).recipe_state == {"x": 1}


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.mark.parametrize("checked_up_front", [True, False])
@pytest.mark.parametrize("which", ["weights", "state"])
def test_a_full_disk(
    checked_up_front: bool, which: str, base: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_SPARE_BYTES", 10_000)
    manager = CheckpointManager(TorchtuneFormat(section(base)), small_disk / "out")
    model = manager.format.load_base()
    before = manager.save(1, model=model, recipe_state={"x": 1})
    if not checked_up_front:
        monkeypatch.setattr(CheckpointManager, "_check_space", lambda *_: None)
    if which == "weights":
        model = {name: tensor.repeat(16, *[1] * (tensor.dim() - 1)) for name, tensor in model.items()}
        # sixteen times the rows is sixteen times the heads
        manager.format._torchtune._config = {
            **manager.format.base.config,
            "num_attention_heads": 64,
            "num_key_value_heads": 32,
        }
        manager.format._torchtune._config["head_dim"] = DIM // HEADS
    state = {"big": torch.zeros(500_000 if which == "state" else 1)}
    with pytest.raises(UserError) as caught:
        manager.save(2, model=model, recipe_state=state)
    reason = "the disk is too full" if checked_up_front else "No space left on device"
    assert reason in str(caught.value) and "MiB are free: free some space" in str(caught.value)
    assert [entry.name for entry in (small_disk / "out").iterdir()] == ["step_1"]
    assert manager.load(before).recipe_state == {"x": 1}


def test_a_bug_while_saving_is_not_dressed_up(manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(manager, "_write_manifest", broken)
    with pytest.raises(ZeroDivisionError):
        manager.save(1, model=manager.format.load_base(), recipe_state={})
    assert list(manager.output_dir.iterdir()) == []


# ---------------------------------------------------------------------------------- messages for users


def error_of(base: Path, out: Path, **more: Any) -> str:
    with pytest.raises(UserError) as caught:
        CheckpointManager(TorchtuneFormat(section(base, **more)), out)
    assert not out.exists()
    return str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    message = error_of(tmp_path / "Llama-2-7b-hf", tmp_path / "out")
    assert "checkpointer.checkpoint_dir: there is no folder" in message
    assert f"`tune download meta-llama/Llama-2-7b-hf --output-dir {tmp_path / 'Llama-2-7b-hf'}`" in message


def test_missing_config_json(base: Path, tmp_path: Path) -> None:
    (base / "config.json").unlink()
    message = error_of(base, tmp_path / "out")
    assert "has no config.json; it holds LICENSE.txt, model.safetensors, tokenizer.model" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "cannot read"), ("{}", "lacks hidden_size, num_attention_heads"), ("[]", "lacks hidden_size")],
)
def test_bad_config_json(text: str, expected: str, base: Path, tmp_path: Path) -> None:
    (base / "config.json").write_text(text)
    assert expected in error_of(base, tmp_path / "out")


def test_missing_weights(base: Path, tmp_path: Path) -> None:
    (base / "model.safetensors").unlink()
    message = error_of(base, tmp_path / "out")
    assert "has no model.safetensors, pytorch_model.bin or index" in message and "tune download" in message


def _split(base: Path, count: int = 3) -> list[str]:
    """Cuts the base checkpoint's weights into ``count`` files with an index."""
    weights = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    weight_map = {name: files[i % count] for i, name in enumerate(sorted(weights))}
    for file in files:
        save_file({k: v for k, v in weights.items() if weight_map[k] == file}, base / file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def test_missing_shards_are_listed(base: Path, tmp_path: Path) -> None:
    files = _split(base)
    (base / files[1]).unlink()
    for message in (
        error_of(base, tmp_path / "out"),
        error_of(base, tmp_path / "out", checkpoint_files=files),
        error_of(
            base,
            tmp_path / "out",
            checkpoint_files={"filename_format": "model-{}-of-{}.safetensors", "max_filename": "00003"},
        ),
    ):
        assert f"1 of 3 weight files are missing in {base}: {files[1]}; there: {files[0]}, {files[2]}" in message
        assert "tune download" in message
    (base / "model.safetensors.index.json").unlink()
    assert f"missing in {base}: {files[1]};" in error_of(base, tmp_path / "out")


def test_ways_to_name_the_files(base: Path, tmp_path: Path) -> None:
    whole = load_file(base / "model.safetensors")
    files = _split(base)
    for given in (
        None,
        list(reversed(files)),
        {"filename_format": "model-{}-of-{}.safetensors", "max_filename": "00003"},
    ):
        manager = CheckpointManager(TorchtuneFormat(section(base, checkpoint_files=given)), tmp_path / "out")
        assert list(manager.format.base.files) == files
        assert torch.equal(manager.format.load_base()["norm.scale"], whole["model.norm.weight"])
    (base / "model.safetensors.index.json").unlink()
    assert list(CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out").format.base.files) == files


def test_bin_files_are_used_where_the_safetensors_were_not_downloaded(base: Path, tmp_path: Path) -> None:
    whole = load_file(base / "model.safetensors")
    for file in _split(base):
        (base / file).unlink()  # its index remains
    torch.save(whole, base / "pytorch_model.bin")
    manager = CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out")
    assert manager.format.base.files == ("pytorch_model.bin",)
    assert torch.equal(manager.format.load_base()["norm.scale"], whole["model.norm.weight"])
    path = manager.save(1, model=manager.format.load_base(), recipe_state={})
    assert "model-00001-of-00001.safetensors" in names(path) and "pytorch_model.bin" not in names(path)


def test_a_damaged_bin_file(base: Path, tmp_path: Path) -> None:
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    with open(base / "pytorch_model.bin", "r+b") as file:
        file.truncate(5000)
    manager = CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out")
    with pytest.raises(UserError, match="cannot read the weights in .*download the files again"):
        manager.format.load_base()


@pytest.mark.parametrize("size", [0, 4, 100, 20_000, -1])
def test_truncated_safetensors(size: int, base: Path, tmp_path: Path) -> None:
    with open(base / "model.safetensors", "r+b") as file:
        file.truncate(size if size >= 0 else (base / "model.safetensors").stat().st_size - 1)
    message = error_of(base, tmp_path / "out")
    assert "model.safetensors is damaged" in message and "tune download" in message


def test_garbage_instead_of_safetensors(base: Path, tmp_path: Path) -> None:
    (base / "model.safetensors").write_bytes(b"<html>not found</html>" * 100)
    assert "is damaged: it does not begin with the header" in error_of(base, tmp_path / "out")
    (base / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"{" * 20)
    assert "is damaged: its header is damaged" in error_of(base, tmp_path / "out")


@pytest.mark.parametrize(("given", "meant"), [("LLAMA_2", "LLAMA2"), ("llama2", "LLAMA2"), ("QUEN2", "QWEN2")])
def test_bad_model_type(given: str, meant: str, base: Path, tmp_path: Path) -> None:
    message = error_of(base, tmp_path / "out", model_type=given)
    assert f"checkpointer.model_type: got {given!r}: did you mean {meant}?" in message


def test_weights_of_another_model(base: Path, tmp_path: Path) -> None:
    message = error_of(base, tmp_path / "out", model_type="PHI3_MINI")
    assert "checkpointer.model_type: got PHI3_MINI" in message and "set checkpointer.model_type=LLAMA2" in message
    config = json.loads((base / "config.json").read_text())
    del config["model_type"]
    (base / "config.json").write_text(json.dumps(config))
    manager = CheckpointManager(TorchtuneFormat(section(base, "PHI3_MINI")), tmp_path / "out")
    with pytest.raises(UserError, match=r"as checkpointer.model_type=PHI3_MINI: .*unexpected key.*_proj.weight"):
        manager.format.load_base()


def test_dimensions_that_do_not_fit(base: Path, tmp_path: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    for change, expected in (
        ({"hidden_size": 48}, "embed_tokens.weight is [64, 32], config.json makes it [64, 48]"),
        ({"num_key_value_heads": 4}, "k_proj.weight is [16, 32], config.json makes it [32, 32]"),
        ({"head_dim": 16}, "k_proj.weight is [16, 32], config.json makes it [32, 32]"),
        ({"intermediate_size": 64}, "down_proj.weight is [32, 48], config.json makes it [32, 64]"),
        ({"num_hidden_layers": 3}, "has num_hidden_layers 3, the weight files hold 2 layers"),
        ({"num_attention_heads": 0}, "num_attention_heads in"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "do not divide one another"),
        ({"hidden_size": "32"}, "expected a whole number above 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings in"),
    ):
        (base / "config.json").write_text(json.dumps({**config, **change}))
        message = error_of(base, tmp_path / "out")
        assert expected in message and len(message.splitlines()) == 1


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_conversion_would_take_for_others(file: str, base: Path, tmp_path: Path) -> None:
    whole = load_file(base / "model.safetensors")
    query, norm = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"
    (base / "model.safetensors").unlink()

    def write(changed: dict[str, torch.Tensor]) -> None:
        weights = {**whole, **changed}
        save_file(weights, base / file) if file.endswith("safetensors") else torch.save(weights, base / file)

    for dtype in (torch.int8, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn):
        write({norm: whole[norm].to(dtype)})
        message = error_of(base, tmp_path / "out")
        assert f"{norm} is " in message and "not quantised" in message and len(message.splitlines()) == 1
    for shape in ([16, 64], [1024], [1, 32, 32]):
        write({query: whole[query].reshape(shape)})
        message = error_of(base, tmp_path / "out")
        assert f"{query} is {shape}, config.json makes it [32, 32]" in message
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        write({name: tensor.to(dtype) for name, tensor in whole.items()})
        assert (
            CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out").format.load_base()["norm.scale"].dtype
            == dtype
        )


def test_other_components_and_unknown_keys(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    message = error_of(base, out, _component_="torchtune.training.FullModelMetaCheckpointer")
    assert "does not read and write Hugging Face's format" in message
    message = error_of(base, out, _component_="torchtune.training.FullModelHFCheckpointr")
    assert "FullModelHFCheckpointer" in message
    message = error_of(base, out, checkpoint_file=["a"], recipe_checkpoint="x", output_dir="y", model_type=None)
    lines = message.splitlines()
    assert len(lines) == 4
    assert "did you mean checkpointer.checkpoint_files?" in lines[0]
    assert "resume_from_checkpoint" in lines[1] and "output_dir" in lines[2] and "missing" in lines[3]


def test_checkpoint_files_are_checked(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "expected a list of file names" in error_of(base, out, checkpoint_files="model.safetensors")
    assert "expected a list of names, or the keys" in error_of(base, out, checkpoint_files={"filename_format": "x"})
    spec = {"filename_format": "model-{}-of-{}.safetensors", "max_filename": 3}
    assert "expected digits in quotes" in error_of(base, out, checkpoint_files=spec)
    spec = {"filename_format": "model-{}.safetensors", "max_filename": "3"}
    assert "expected two {} as in" in error_of(base, out, checkpoint_files=spec)


def test_output_dir_apart_from_the_base(base: Path) -> None:
    for out in (base, base / "runs"):
        with pytest.raises(UserError, match="output_dir: .* is (inside )?checkpointer.checkpoint_dir"):
            CheckpointManager(TorchtuneFormat(section(base)), out)
    assert not (base / "runs").exists()


def test_unwritable_output_dir(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"output_dir: cannot write to .*file/out: Not a directory: choose another"):
        CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "file" / "out")
    with pytest.raises(UserError, match="output_dir: cannot write to /proc/nothing"):
        CheckpointManager(TorchtuneFormat(section(base)), "/proc/nothing")


def test_loading_what_is_not_a_whole_checkpoint(manager: CheckpointManager, base: Path) -> None:
    with pytest.raises(UserError, match="there is no checkpoint"):
        manager.load(manager.output_dir / "step_1")
    with pytest.raises(UserError, match="is not a checkpoint of a run"):
        manager.load(base)
    path = manager.save(1, model=manager.format.load_base(), recipe_state={"x": torch.ones(1000)})
    weights = path / "model-00001-of-00001.safetensors"
    data = weights.read_bytes()
    weights.unlink()
    with pytest.raises(UserError, match="is incomplete: model-00001-of-00001.safetensors is missing"):
        manager.load(path)
    weights.write_bytes(data[:-5])
    with pytest.raises(UserError, match=f"has {len(data) - 5} bytes, {len(data)} were written"):
        manager.load(path)
    weights.write_bytes(data)
    (path / "recipe_state.pt").write_bytes(b"\x00" * (path / "recipe_state.pt").stat().st_size)
    with pytest.raises(UserError, match="is damaged: recipe_state.pt is not what was written"):
        manager.load(path)
    (path / "checkpoint.json").write_text('{"format": 99, "step": 1, "sequence": 1, "files": {}}')
    with pytest.raises(UserError, match="written by another version"):
        manager.load(path)
    (path / "checkpoint.json").write_text("")
    with pytest.raises(UserError, match=r"checkpoint.json is damaged"):
        manager.load(path)


# -------------------------------------------------------------------------------------------- adapters

RANK, ALPHA = 4, 8.0
LORA_MODULES = ["q_proj", "k_proj", "v_proj", "output_proj"]
ADAPTER_CONFIG = {
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": [*LORA_MODULES, "w1", "w2", "w3", "output"],
    "peft_type": "LORA",
}


def lora_model(folder: Path, family: str, dora: bool) -> torch.nn.Module:
    build, more = {
        "LLAMA2": (lora_llama2, {}),
        "QWEN2": (lora_qwen2, {"tie_word_embeddings": False}),
    }[family]
    model = build(
        lora_attn_modules=list(LORA_MODULES),
        apply_lora_to_mlp=True,
        apply_lora_to_output=True,
        **SIZES,
        num_kv_heads=KV_HEADS,
        intermediate_dim=HIDDEN,
        norm_eps=1e-6,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        use_dora=dora,
        **more,
    )
    randomise(model, seed=4)
    manager = CheckpointManager(TorchtuneFormat(section(folder, family)), folder.parent / "scratch")
    model.load_state_dict(manager.format.load_base(), strict=False)
    return model.eval()


@pytest.mark.parametrize("merged_too", [False, True])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", ["LLAMA2", "QWEN2"])
def test_adapters_in_peft_transformers_and_a_resumed_run(
    family: str,
    dora: bool,
    merged_too: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    monkeypatch.setitem(FAMILIES, "QWEN2", lambda: _qwen2(tied=False))
    folder = tmp_path / "base"
    write_base(folder, family)
    if family == "QWEN2" and dora:
        # torchtune's DoRA scales biases, which peft's does not; without biases they must agree.
        weights = load_file(folder / "model.safetensors")
        weights = {k: v * 0 if k.endswith(".bias") else v for k, v in weights.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = lora_model(folder, family, dora)
    adapter = get_adapter_params(model)
    merged = None
    if merged_too:
        copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        merged = get_merged_lora_ckpt(copies, rank=RANK, alpha=ALPHA)
    manager = CheckpointManager(TorchtuneFormat(section(folder, family)), tmp_path / "out")
    config = json.loads(json.dumps(ADAPTER_CONFIG))
    path = manager.save(3, model=merged, adapter=adapter, adapter_config=config, recipe_state={"x": 1})
    assert config == ADAPTER_CONFIG
    assert ("DoRA scales the biases" in caplog.text) == (family == "QWEN2" and dora)

    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = model(tokens)
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert (plain(tokens).logits - wanted).abs().max() > 0.1  # the adapter does something
        adapted = peft.PeftModel.from_pretrained(plain, path / "adapter").eval()
        torch.testing.assert_close(adapted(tokens).logits, wanted, rtol=1e-5, atol=1e-5)
        # the base is found by the name in the adapter's configuration
        adapted = peft.AutoPeftModelForCausalLM.from_pretrained(path / "adapter").eval()
        torch.testing.assert_close(adapted(tokens).logits, wanted, rtol=1e-5, atol=1e-5)
        if merged_too:
            full = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
            assert not hasattr(full, "peft_config")
            torch.testing.assert_close(full(tokens).logits, wanted, rtol=1e-5, atol=1e-5)
        else:
            assert names(path) == {
                "adapter/adapter_config.json",
                "adapter/adapter_model.safetensors",
                "recipe_state.pt",
                "checkpoint.json",
            }
    loaded = manager.load(path)
    assert loaded.model is None and loaded.recipe_state == {"x": 1} and loaded.adapter is not None
    assert_same(loaded.adapter, {name: tensor.detach() for name, tensor in adapter.items()})


def test_the_adapters_configuration(base: Path, tmp_path: Path) -> None:
    adapter = {"layers.0.attn.q_proj.lora_a.weight": torch.ones(2, DIM)}
    given = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "output_proj", "w2"], "lora_dropout": 0.1}
    manager = CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out")
    path = manager.save(1, model=None, adapter=adapter, adapter_config=given, recipe_state={})
    config = json.loads((path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert config["target_modules"] == ["q_proj", "o_proj", "down_proj"]
    assert (config["task_type"], config["peft_type"], config["use_dora"]) == ("CAUSAL_LM", "LORA", False)
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (2, 4, 0.1)
    (base / "original_repo_id.json").write_text('{"repo_id": "meta-llama/Llama-2-7b-hf"}')
    manager = CheckpointManager(TorchtuneFormat(section(base)), tmp_path / "out")
    path = manager.save(2, model=None, adapter=adapter, adapter_config=given, recipe_state={})
    config = json.loads((path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "meta-llama/Llama-2-7b-hf"


def test_what_is_no_adapter_is_refused(manager: CheckpointManager) -> None:
    good = {"layers.0.attn.q_proj.lora_a.weight": torch.ones(2, DIM)}
    config = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    with pytest.raises(ValueError, match="norm.scale is no part"):
        manager.save(1, model=None, adapter={"norm.scale": torch.ones(2)}, adapter_config=config, recipe_state={})
    with pytest.raises(ValueError, match="lacks lora_alpha"):
        manager.save(1, model=None, adapter=good, adapter_config={"r": 1, "target_modules": []}, recipe_state={})
    with pytest.raises(ValueError, match="unknown target_modules: w9"):
        manager.save(1, model=None, adapter=good, adapter_config={**config, "target_modules": ["w9"]}, recipe_state={})
    with pytest.raises(ValueError, match="adapter_config is required"):
        manager.save(1, model=None, adapter=good, recipe_state={})
    with pytest.raises(ValueError, match="a model, an adapter or both"):
        manager.save(1, model=None, recipe_state={})
    assert list(manager.output_dir.iterdir()) == []


def test_row_order_of_a_permuted_projection() -> None:
    # Two heads of four rows in rotary pairs (x0, y0, x1, y1) become (x0, x1, y0, y1).
    rows = torch.arange(8.0)
    expected = torch.tensor([0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0])
    assert torch.equal(peft_adapter._interleaved_to_halves(rows, 2), expected)
    matrix = rows[:, None].expand(8, 3)
    assert torch.equal(peft_adapter._interleaved_to_halves(matrix, 2), expected[:, None].expand(8, 3))


def test_a_phi3_adapter_is_kept_for_resuming(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_base(tmp_path / "base", "PHI3_MINI")
    manager = CheckpointManager(TorchtuneFormat(section(tmp_path / "base", "PHI3_MINI")), tmp_path / "out")
    adapter = {"layers.0.attn.q_proj.lora_a.weight": torch.ones(2, DIM)}
    config = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    path = manager.save(1, model=None, adapter=adapter, adapter_config=config, recipe_state={})
    assert "peft has no counterpart" in caplog.text
    assert names(path) == {"recipe_state.pt", "checkpoint.json"}
    loaded = manager.load(path).adapter
    assert loaded is not None
    assert_same(loaded, adapter)


def test_base_checkpoint_reads_omegaconf(base: Path) -> None:
    from omegaconf import OmegaConf

    config = OmegaConf.create({"root": str(base), "checkpointer": section(Path("${root}"))})
    assert base_checkpoint.read_base(config.checkpointer).directory == base


def test_what_is_no_checkpoint_is_told_once_in_the_order_of_steps(tmp_path: Path, caplog) -> None:
    for step in (6, 10, 2):
        (tmp_path / f"step_{step}").mkdir()
    for _ in range(3):
        assert checkpoint_manifest.whole_checkpoints(tmp_path) == []
    told = [record.getMessage().partition(" is not")[0] for record in caplog.records]
    assert told == [f"skipped: {tmp_path / f'step_{step}'}" for step in (2, 6, 10)]

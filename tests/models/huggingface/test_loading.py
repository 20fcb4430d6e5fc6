"""Folders that hold a model, and folders that do not."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload.errors import UserError
from offload.models.huggingface import attention, from_pretrained
from tests.models.huggingface import families  # type: ignore[import-not-found]

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    families.save("llama", folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def refused(folder: Path, says: str, **options: object) -> None:
    with pytest.raises(UserError) as caught:
        from_pretrained(folder, device=CPU, dtype=torch.float32, **options)  # type: ignore[arg-type]
    text = str(caught.value)
    assert re.search(says, text), text
    assert "\n" not in text and len(text) < 600


def test_weights_are_in_the_dtype_that_was_asked_for_and_in_memory_of_their_own(folder: Path) -> None:
    model = from_pretrained(folder, device=CPU, dtype=torch.bfloat16)
    assert {param.dtype for param in model.module.parameters()} == {torch.bfloat16}
    expected = load_file(folder / "model.safetensors")
    found = dict(model.module.named_parameters())
    assert {name: tensor.to(torch.bfloat16).tolist() for name, tensor in expected.items()} == {
        name: found[name].tolist() for name in expected
    }
    assert {param.data_ptr() % 64 for param in found.values()} == {0}
    # Another file in its place changes nothing in a model that was read before.
    first = next(iter(found.values()))
    before = first.detach().clone()
    with open(folder / "model.safetensors", "r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\0" * size)
    assert torch.equal(first, before)


def shard(folder: Path) -> Path:
    """The model's weights in two files; returns their index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in weights.items() if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return index


def test_several_files(folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    shard(folder)
    found = dict(from_pretrained(folder, device=CPU, dtype=torch.float32).module.named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../model"}}']
)
def test_a_damaged_index(folder: Path, text: str) -> None:
    index = shard(folder)
    index.write_text(text)
    refused(folder, rf"^model\.path: {index} is damaged \(.*\): download it again$")


def test_a_lost_file_of_several(folder: Path) -> None:
    index = shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, r"model-00002-of-00002\.safetensors of the 2 weight files that .* names is missing in .*download")
    index.unlink()
    refused(folder, r"several files and no model\.safetensors\.index\.json.*download it again$")


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", r"model.path: there is no folder .*tune download")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, r"has no config\.json")


def test_a_file_of_the_folder(folder: Path) -> None:
    refused(
        folder / "model.safetensors",
        rf"model\.safetensors is a file: give the folder that it lies in, model\.path={folder}$",
    )


def test_a_folder_whose_name_is_misspelt(folder: Path) -> None:
    refused(folder.with_name("modle"), rf"there is no folder .*modle: did you mean model\.path={folder}\?$")


def test_a_folder_of_folders(folder: Path, tmp_path: Path) -> None:
    """Of models, of a run's checkpoints, of the Hub's cache."""
    refused(tmp_path, rf"{tmp_path} has no config\.json: did you mean model\.path={folder}\?$")
    cache = tmp_path / "cache" / "models--me--mine"
    shutil.copytree(folder, cache / "snapshots" / "abc")
    refused(cache, rf"did you mean model\.path={cache / 'snapshots' / 'abc'}\?$")


def test_an_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    refused(folder, "holds an adapter: give the folder of the model")


def test_a_name_on_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched that nobody asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    refused(
        Path("Qwen/Qwen3-0.6B"),
        r"there is no folder .*: download it with `tune download Qwen/Qwen3-0\.6B`, and give "
        r"model\.path=~/models/Qwen3-0\.6B$",
    )
    shutil.copytree(folder, tmp_path / "home" / "models" / "Qwen3-0.6B")
    refused(Path("Qwen/Qwen3-0.6B"), r"did you mean model\.path=~/models/Qwen3-0\.6B\?$")


@pytest.mark.parametrize("written", ["model", "./model/", "~/model", "~/model/"])
def test_ways_to_write_a_folder(written: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert from_pretrained(written, device=CPU, dtype=torch.float32).name_or_path == str(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"llama"', "\x00"])
def test_a_broken_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refused(folder, r"model\.path: .*config\.json")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "has no safetensors files")


def test_truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused(folder, r"model\.path: .*model\.safetensors is damaged")


def test_weights_that_lack_a_tensor_or_have_another_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    norm = weights.pop("model.norm.weight")
    save_file(weights, path, metadata={"format": "pt"})
    refused(folder, r"do not fit its config\.json: model\.norm\.weight is missing")
    save_file({**weights, "model.norm.weight": norm[:-1].clone()}, path, metadata={"format": "pt"})
    refused(folder, r"model\.norm\.weight is \[31\], the model has \[32\]")


def test_a_folder_of_nearly_no_weights_is_refused_before_memory_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes up what is missing, all of it on the device."""
    from transformers import LlamaForCausalLM

    devices = []
    load = LlamaForCausalLM.from_pretrained.__func__

    def spied(cls: type, *args: object, **options: object) -> object:
        devices.append(options["device_map"][""])  # type: ignore[index]
        return load(cls, *args, **options)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", classmethod(spied))
    path = folder / "model.safetensors"
    save_file({"model.norm.weight": load_file(path)["model.norm.weight"]}, path, metadata={"format": "pt"})
    refused(folder, r"do not fit its config\.json: lm_head\.weight is missing and \d+ more")
    assert devices == [torch.device("meta")]


def test_a_shard_of_an_index_is_missing(original: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(original).save_pretrained(tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()
    refused(tmp_path, rf"{shards[0].name}")


def test_a_model_of_an_unknown_type(folder: Path) -> None:
    edit(folder, model_type="llama9")
    refused(folder, r"does not know the model type 'llama9'.*pip install --upgrade transformers")


def test_a_model_that_is_no_language_model(folder: Path) -> None:
    edit(folder, model_type="vit")
    refused(folder, "holds a vit, which is no causal language model")


def test_a_model_that_looks_ahead(tmp_path: Path) -> None:
    bert = families.make("bert")
    bert.config.is_decoder = False
    with torch.no_grad():
        for param in bert.parameters():
            param.mul_(8)  # attention of random weights as small as those changes next to nothing
    bert.save_pretrained(tmp_path)
    refused(tmp_path, "BertLMHeadModel looks ahead")
    edit(tmp_path, is_decoder=True)
    assert from_pretrained(tmp_path, device=CPU, dtype=torch.float32).has_separate_head


def test_a_change_of_the_logits_that_is_not_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is then used through the whole model."""
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def shifted(self: object, *args: object, **kwargs: object) -> object:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits + torch.linspace(0, 1, output.logits.shape[-1])
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", shifted)
    assert not from_pretrained(folder, device=CPU, dtype=torch.float32).has_separate_head


def test_the_trial_of_the_head_runs_the_layers_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of its time. A class that changes what they gave needs them again."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

    calls = []
    layer, body = LlamaDecoderLayer.forward, LlamaModel.forward

    def counted(self: object, *args: object, **kwargs: object) -> object:
        calls.append(self)
        return layer(self, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counted)
    model = from_pretrained(folder, device=CPU, dtype=torch.float32)
    layers = model.module.config.num_hidden_layers
    assert model.has_separate_head and len(calls) == layers
    assert "forward" not in vars(model.module.model) and not model.module.model._forward_hooks

    def changed(self: object, *args: object, **kwargs: object) -> object:
        hidden = self.model(*args, **kwargs)  # type: ignore[attr-defined]
        hidden.last_hidden_state.mul_(2)
        hidden.logits = self.lm_head(hidden.last_hidden_state)  # type: ignore[attr-defined]
        return hidden

    calls.clear()
    monkeypatch.setattr(LlamaForCausalLM, "forward", changed)
    assert from_pretrained(folder, device=CPU, dtype=torch.float32).has_separate_head
    assert len(calls) == 2 * layers and LlamaModel.forward is body


def test_a_class_that_needs_all_of_the_logits_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training the head's stand-in gives one number per token."""
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def reshaped(self: object, *args: object, **kwargs: object) -> object:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits.view(*output.logits.shape[:-1], families.VOCABULARY)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", reshaped)
    refused(folder, "LlamaForCausalLM cannot be called with tokens alone: RuntimeError: shape")


def test_a_model_that_brings_code(folder: Path, tmp_path: Path) -> None:
    edit(folder, model_type="mine", auto_map={"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Model"})
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    refused(folder, r"brings Python files of its own.*model\.trust_remote_code=True")
    assert not (tmp_path / "ran").exists()


def test_the_known_attentions_are_transformers_own() -> None:
    from transformers import AttentionInterface

    theirs = {name for name in AttentionInterface().valid_keys() if "|" not in name}
    assert set(attention.KNOWN) == theirs | {"eager"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sdpaa", r"there is no 'sdpaa', did you mean sdpa\? Expected one of sdpa, eager, .*; leave it out for sdpa"),
        ("Flash_Attention2", "there is no 'Flash_Attention2', did you mean flash_attention_2"),
        ("xformers", r"there is no 'xformers'\. Expected one of"),
        ("", "there is no ''"),
        ("flex_attention", "flex_attention has no backward on the CPU; leave it out for sdpa"),
        ("flash_attention_2", "flash_attention_2 needs a GPU, and device is cpu; leave it out for sdpa"),
        (
            "kernels-community/flash-attn2",
            "needs kernels, which is not installed: pip install kernels; or leave it out",
        ),
    ],
)
def test_an_attention_that_is_not_there(folder: Path, name: str, says: str) -> None:
    refused(folder, rf"^model\.attn_implementation: .*{says}", attn_implementation=name)


def test_an_attention_that_the_card_or_the_dtype_cannot_have() -> None:
    cuda = torch.device("cuda")
    for name in attention.KNOWN:
        attention.check_attention(name, cuda, torch.bfloat16)
    attention.check_attention("flex_attention", cuda, torch.float32)
    with pytest.raises(UserError, match=r"flash_attention_3 computes in bf16 and fp16 alone; set dtype=bf16, or leave"):
        attention.check_attention("flash_attention_3", cuda, torch.float32)


def test_flash_attention_that_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for the device."""
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed")
    monkeypatch.setattr("offload.models.huggingface.loading.check_attention", lambda *_: None)
    says = (
        "flash_attention_2 needs flash-attn, which is not installed: pip install flash-attn; or leave it out for sdpa"
    )
    refused(folder, says, attn_implementation="flash_attention_2")


def test_an_attention_that_the_model_cannot_use(tmp_path: Path) -> None:
    families.save("bloom", tmp_path)
    refused(tmp_path, r"model\.attn_implementation=sdpa: BloomForCausalLM does not support", attn_implementation="sdpa")


@pytest.mark.parametrize(
    "values", [{"num_attention_heads": 0}, {"hidden_size": -1}, {"num_hidden_layers": "two"}, {"rope_parameters": 3}]
)
def test_a_config_of_odd_values(folder: Path, values: dict[str, object]) -> None:
    edit(folder, **values)
    refused(folder, r"model\.path: ")


def test_parameters_that_are_one_tensor_in_the_file_count_their_changes_apart(tmp_path: Path) -> None:
    """Autograd and the optimizer's copies tell a change by that count; HRM's queries and keys are one tensor."""
    families.save("hrm_text", tmp_path)
    module = from_pretrained(tmp_path, device=CPU, dtype=torch.float32).module
    changed = dict(module.named_parameters())["model.L_module.layers.0.self_attn.q_proj.weight"]
    versions = {name: param._version for name, param in module.named_parameters()}
    with torch.no_grad():
        changed.mul_(2)
    assert [name for name, param in module.named_parameters() if param._version != versions[name]] == [
        "model.L_module.layers.0.self_attn.q_proj.weight"
    ]


def test_a_model_that_changes_its_own_weights(tmp_path: Path) -> None:
    families.save("rwkv", tmp_path)
    assert from_pretrained(tmp_path, device=CPU, dtype=torch.float32).has_separate_head
    edit(tmp_path, rescale_every=6)
    refused(tmp_path, r"RwkvForCausalLM changes rwkv\.blocks\.0.* when it is called in evaluation.*rescale_every to 0")


def test_a_model_that_cannot_be_called_with_tokens_alone(tmp_path: Path) -> None:
    families.save("gptj", tmp_path)
    edit(tmp_path, rotary_dim=64)
    refused(tmp_path, r"GPTJForCausalLM cannot be called with tokens alone: RuntimeError: ")


def test_small_soft_capping_is_seen_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap of 30 changes the logits of a model of random weights by less than bf16 rounds them."""
    families.save("xlstm", tmp_path)
    assert from_pretrained(tmp_path, device=CPU, dtype=torch.float32).has_separate_head
    monkeypatch.setattr("offload.models.huggingface.head._known_changes", lambda config: [])
    assert not from_pretrained(tmp_path, device=CPU, dtype=torch.float32).has_separate_head


@pytest.mark.parametrize("family", ["llama4", "qwen3_5", "mistral3"])
def test_a_folder_with_towers_is_opened_whole(family: str, tmp_path: Path) -> None:
    """Also where ``AutoModelForCausalLM`` opens its language model alone, or does not know it."""
    families.save(family, tmp_path)
    model = from_pretrained(tmp_path, device=CPU, dtype=torch.float32)
    assert type(model.module).__name__.endswith("ForConditionalGeneration")
    assert model.frozen and {name for name, param in model.module.named_parameters() if not param.requires_grad}
    assert model.module.config.model_type == family

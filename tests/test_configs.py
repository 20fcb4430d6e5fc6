"""Every shipped config: its keys, its components, its model, and the commands in its header.

Found by a recursive glob, so that a config in a new folder is tested like the others.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import config_memory
import memory_per_rank
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from offload import tiny, torchao_shim
from offload.cli import registry
from offload.cli.main import split_run
from offload.component import resolve, signature_of
from offload.config.loading import check_config, instantiate, load_and_check, load_config
from offload.models.huggingface import published

torchao_shim.install()

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
METHODS = ("offload", "lora", "qlora", "paged", "generate")
PROMISED_NAMES = """
llama2_7b_offload llama2_7b_lora llama2_7b_qlora llama2_7b_paged llama2_7b_generate llama2_13b_offload
llama3_1_8b_offload llama3_2_1b_offload llama3_2_3b_offload phi3_mini_offload qwen2_5_0_5b_offload
qwen2_5_7b_offload mistral_7b_offload gemma2_2b_offload hf_offload hf_lora hf_generate
qwen3_0_6b_offload qwen3_1_7b_offload qwen3_4b_offload qwen3_4b_lora qwen3_8b_offload qwen3_8b_lora qwen3_14b_offload
qwen3_14b_lora llama3_1_8b_lora llama3_2_1b_lora llama3_2_3b_lora gemma3_1b_offload gemma3_4b_offload gemma3_4b_lora
gemma3_12b_offload gemma3_12b_lora mistral_small_24b_offload mistral_small_24b_lora phi4_offload phi4_lora
smollm3_3b_offload smollm3_3b_lora olmo3_7b_offload olmo3_7b_lora gpt_oss_20b_lora
qwen3_8b_qlora qwen3_14b_qlora llama3_1_8b_qlora gemma3_12b_qlora phi4_qlora mistral_small_24b_qlora
tiny_llama_offload tiny_llama_lora tiny_llama_generate tiny_llama_offload_distributed
llama2_7b_offload_distributed qwen3_8b_offload_distributed qwen3_14b_offload_distributed qwen3_32b_offload_distributed
llama3_1_70b_offload_distributed qwen3_32b_lora_distributed llama3_1_70b_lora_distributed
"""
PROMISED = PROMISED_NAMES.split()

# What they cost or save must stand beside them.
KNOB_NAMES = """
batch_size max_seq_len packed enable_activation_checkpointing enable_activation_offloading compile dtype
gradient_accumulation_steps save_every_n_steps num_output_chunks strategy offload_gradients lora_rank
state_dtype master update_in_backward clip_grad_norm
enable_kv_cache max_new_tokens
"""
KNOBS = KNOB_NAMES.split()


def _is_huggingface(path: Path) -> bool:
    """Whether the model comes from a folder, by transformers."""
    return str(OmegaConf.load(path).model._component_).startswith("offload.models.huggingface.")


every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
torchtune_configs = pytest.mark.parametrize(  # of the others, tests/test_config_memory.py
    "path", [path for path in CONFIGS if not _is_huggingface(path)], ids=lambda path: path.stem
)
distributed_configs = pytest.mark.parametrize(
    "path",
    [path for path in CONFIGS if path.stem.endswith(registry.DISTRIBUTED) and not path.stem.startswith("tiny_")],
    ids=lambda path: path.stem,
)
training_configs = pytest.mark.parametrize(
    "path", [path for path in CONFIGS if not path.stem.endswith("_generate")], ids=lambda path: path.stem
)


def _recipe_name(path: Path) -> str:
    return registry.recipe_of_config(path.stem)


def _recipe(name: str) -> ModuleType:
    module_name = f"recipe_under_test_{name}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, ROOT / "recipes" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses look their module up there
        spec.loader.exec_module(module)
    return sys.modules[module_name]


GIVEN_TASK = {False: "dataset.path=chats.jsonl", True: "prompt.user=What is a mutex?"}


def _given(path: Path) -> list[str]:
    """What a config for any model leaves to the command line."""
    if not path.stem.startswith("hf_"):
        return []
    return ["model.path=~/models/Qwen3-8B", GIVEN_TASK[path.stem.endswith("_generate")]]


def _load(path: Path, *overrides: str) -> DictConfig:
    return load_config(path, [*_given(path), *overrides], notes=[], schema=_recipe(_recipe_name(path)).Settings)


def _components(node: Any, key: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every section with a `_component_`, with its dotted key; values as written."""
    found = []
    if isinstance(node, dict):
        if "_component_" in node:
            found.append((key, node))
        for name, value in node.items():
            found += _components(value, f"{key}.{name}".lstrip("."))
    return found


# ---- the set -----------------------------------------------------------------------------------------------


def test_all_promised_configs_are_there_and_the_glob_is_recursive(tmp_path: Path) -> None:
    assert set(PROMISED) <= {path.stem for path in CONFIGS}
    assert {path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in CONFIGS} == set(
        registry.our_configs()
    )
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "deeper" / "a_lora.yaml").touch()
    assert [path.stem for path in tmp_path.rglob("*.yaml")] == ["a_lora"]


@every_config
def test_flat_and_named_model_method(path: Path) -> None:
    assert path.parent == ROOT / "configs"
    model, _, method = path.stem.removesuffix(registry.DISTRIBUTED).rpartition("_")
    assert method in METHODS
    assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", model)
    assert _recipe_name(path) in registry.our_recipes()


def test_no_two_runs_write_to_the_same_folder() -> None:
    for path in CONFIGS:
        output_dir = OmegaConf.load(path).get("output_dir")
        if path.stem.endswith("_generate"):
            assert output_dir is None  # it writes nothing
        else:
            assert output_dir == f"outputs/{path.stem}"


# ---- against the recipes' schemas and the components' signatures -------------------------------------------


@every_config
def test_well_formed_for_its_recipe(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tiny.HOME_VARIABLE, str(tmp_path / "home"))
    schema = _recipe(_recipe_name(path)).Settings
    notes: list[str] = []
    cfg, _ = load_and_check(path, _given(path), schema, notes)
    check_config(cfg, schema)
    assert notes == []
    assert not (tmp_path / "home").exists()  # checking prepares nothing


@every_config
def test_every_component_takes_its_arguments(path: Path) -> None:
    """The same with inspect alone, so that a mistake in the checker cannot hide one in a config."""
    sections = _components(OmegaConf.to_container(OmegaConf.load(path), resolve=False))
    wanted = {"model", "tokenizer"} if _is_huggingface(path) else {"model", "tokenizer", "checkpointer"}
    assert wanted <= {key for key, _ in sections}
    for key, section in sections:
        arguments = {name: value for name, value in section.items() if name != "_component_"}
        component = resolve(section["_component_"], key=key)
        signature_of(component, arguments).bind_partial(**arguments)
        names = inspect.signature(component).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values()):
            assert arguments.keys() <= names.keys(), key


@training_configs
def test_optimizer_constructs(path: Path) -> None:
    """With its own arguments, over parameters of this machine's CPU."""
    cfg = _load(path)
    optimizer = instantiate(cfg.optimizer, [torch.nn.Parameter(torch.zeros(4))])
    assert isinstance(optimizer, torch.optim.Optimizer)
    (group,) = optimizer.param_groups
    assert group["lr"] == cfg.optimizer.lr and group["weight_decay"] == cfg.optimizer.weight_decay


@training_configs
def test_lr_scheduler_and_loss_construct(path: Path) -> None:
    cfg = _load(path)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = instantiate(cfg.lr_scheduler, optimizer, num_training_steps=1000)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert isinstance(instantiate(cfg.loss), torch.nn.Module)


# ---- the model ---------------------------------------------------------------------------------------------

# Parameters of the published models, in millions, from their model cards or the sum over their weight files.
PUBLISHED = {
    "llama2_7b": 6738.4,
    "llama2_13b": 13015.9,
    "llama3_1_8b": 8030.3,
    "llama3_2_1b": 1235.8,
    "llama3_2_3b": 3212.7,
    "phi3_mini": 3821.1,
    "qwen2_5_0_5b": 494.0,
    "qwen2_5_7b": 7615.6,
    "mistral_7b": 7241.7,
    "gemma2_2b": 2614.3,
    "llama3_1_70b": 70553.7,
}


@torchtune_configs
def test_model_on_the_meta_device(path: Path) -> None:
    """No memory is taken, whatever the size. NF4 weights are built too: torchao quantises meta tensors."""
    cfg = _load(path)
    with torch.device("meta"):
        model = instantiate(cfg.model)
    assert all(parameter.is_meta for parameter in model.parameters())
    adapters = {name for name, _ in model.named_parameters() if ".lora_" in name or name.endswith(".magnitude")}
    assert bool(adapters) == path.stem.endswith("lora")
    count = sum(p.numel() for name, p in model.named_parameters() if name not in adapters)
    name = path.stem.removesuffix(registry.DISTRIBUTED).rpartition("_")[0]
    if name == "tiny_llama":
        assert count == sum(tiny._numel(shape) for _, shape in tiny._weight_shapes())
    else:
        assert count / 1e6 == pytest.approx(PUBLISHED[name], abs=0.1)
    quantised = {type(p.data).__name__ for p in model.parameters()} - {"Tensor", "Parameter"}
    assert quantised == ({"NF4Tensor"} if path.stem.endswith("qlora") else set())


@torchtune_configs
def test_memory_in_the_header_follows_from_the_model(path: Path) -> None:
    """Weights take 2 bytes per parameter, packed states 4.03; torch.optim.AdamW 8 with weights and gradients."""
    if path.stem.endswith(registry.DISTRIBUTED):
        pytest.skip("below, of each process")
    header = path.read_text(encoding="utf-8").partition("\noutput_dir")[0]
    name, _, method = path.stem.rpartition("_")
    if name == "tiny_llama":
        pytest.skip("too small for its memory to be worth a line")
    gib = PUBLISHED[name] * 1e6 / 2**30
    numbers = re.findall(r"(\d+\.\d) GiB", header)
    expected = {"offload": [2, 4 + 8 / 256, 8], "paged": [4, 8], "lora": [2], "generate": [2]}
    for number, factor in zip(numbers, expected.get(method, []), strict=False):
        assert float(number) == pytest.approx(factor * gib, abs=0.06)
    assert len(numbers) >= len(expected.get(method, [0]))


@distributed_configs
def test_memory_of_each_process_follows_from_the_model(path: Path) -> None:
    model, _, method = path.stem.removesuffix(registry.DISTRIBUTED).rpartition("_")
    parameters = PUBLISHED[model] * 1e6 if model in PUBLISHED else published.MODELS[model].parameters
    header = path.read_text(encoding="utf-8").partition("\noutput_dir")[0]
    (processes,) = re.findall(r"Memory of each of (\d+) processes", header)
    assert f"--nproc_per_node {processes} " in header
    assert f"computed from {parameters / 1e9:.2f} B parameters" in header
    weights, *others = (float(number) for number in re.findall(r"(\d+\.\d) GiB  ", header))
    assert weights == pytest.approx(2 * parameters / int(processes) / 2**30, abs=0.06)
    if method == "offload":
        assert others == pytest.approx([(4 + 8 / 256) * parameters / int(processes) / 2**30], abs=0.06)
        return
    rows = json.loads(memory_per_rank.RECORD.read_text(encoding="utf-8"))["rows"]
    (row,) = [row for row in rows if (row["config"], row["ranks"]) == (f"{model}_{method}", int(processes))]
    items = row["items_gib"]
    gathered = items["weights, gathered"] + items["gradients, to be reduced"]
    adapter = items["optimizer states"] + items["gradients, this rank's part"]
    assert others == pytest.approx([gathered, items["activations"], adapter, row["gpu_gib"]], abs=0.06)
    card = re.findall(r"cards of (\d+) GB", header)
    assert card == [str(next(size for size, gib in config_memory.CARDS.items() if row["gpu_gib"] <= gib))]


@distributed_configs
def test_several_processes_train_as_one_does(path: Path) -> None:
    """What differs from the config for one device are the processes' own keys, and what a larger model needs."""
    single = path.with_name(f"{path.stem.removesuffix(registry.DISTRIBUTED)}.yaml")
    if not single.exists():
        method = single.stem.rpartition("_")[2]
        single = path.with_name(f"{'qwen3_14b' if _is_huggingface(path) else 'llama3_1_8b'}_{method}.yaml")
    one, many = (OmegaConf.to_container(OmegaConf.load(each), resolve=False) for each in (single, path))
    own = {"reshard_after_forward", "data_parallel_replicate_dim", "reduce_dtype"}
    assert many.keys() - one.keys() == own and one.keys() <= many.keys()
    paths = {"output_dir", "model", "tokenizer", "checkpointer", "batch_size"}
    assert {key for key in one if one[key] != many[key]} <= paths
    assert one["model"] == many["model"] or single.stem not in path.stem


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS if path.stem.startswith("tiny_llama_")])
def test_tiny_models_have_the_shape_of_the_prepared_checkpoint(name: str) -> None:
    model = OmegaConf.load(ROOT / "configs" / f"{name}.yaml").model
    assert {key: model[key] for key in tiny.MODEL} == tiny.MODEL


def test_paged_differs_from_offload_in_the_optimizer_alone() -> None:
    offload, paged = (
        OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / f"llama2_7b_{method}.yaml"), resolve=False)
        for method in ("offload", "paged")
    )
    assert offload.keys() == paged.keys()
    assert {key for key in offload if offload[key] != paged[key]} == {"output_dir", "optimizer"}
    for key in ("lr", "weight_decay"):
        assert offload["optimizer"][key] == paged["optimizer"][key]


# ---- the header --------------------------------------------------------------------------------------------


def _commands(path: Path) -> list[list[str]]:
    """The commands in the header's comment, split as a shell would; a backslash continues a line."""
    header = path.read_text(encoding="utf-8").partition("\n\n")[0]
    text = "\n".join(line.removeprefix("#").strip() for line in header.splitlines()).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith("tune ")]


def _checkable(overrides: list[str]) -> list[str]:
    return [re.sub(r"<[A-Z]+>", "1", override) for override in overrides]


@every_config
def test_header_commands(path: Path) -> None:
    commands = _commands(path)
    runs = [split_run(command[2:]) for command in commands if command[1] == "run"]
    own = [run for run in runs if run.recipe == _recipe_name(path)]
    assert {run.config for run in own} == {path.stem}
    assert any(run.rest == _given(path) for run in own) or path.stem.endswith("_generate")
    assert any(run.rest for run in own)  # one with overrides
    for run in runs:
        assert bool(run.torchrun) == run.recipe.endswith(registry.DISTRIBUTED)
        assert _recipe_name(registry.find_config(run.config).path) == run.recipe
        settings = _recipe(run.recipe).Settings
        load_and_check(registry.find_config(run.config).path, _checkable(run.rest), settings, [])


@every_config
def test_header_download(path: Path) -> None:
    downloads = [command for command in _commands(path) if command[1] == "download"]
    if path.stem.startswith("tiny_"):
        assert not downloads
        return
    import argparse

    from offload.cli import download

    parser = argparse.ArgumentParser()
    download.add_parser(parser.add_subparsers())
    (command,) = downloads
    arguments = parser.parse_args(command[1:])
    cfg = _load(path)
    # What is downloaded is what is read.
    for value in (cfg.tokenizer.path, cfg.tokenizer.get("merges_file", cfg.tokenizer.path)):
        assert Path(value).is_relative_to(arguments.output_dir)
    if _is_huggingface(path):
        assert str(arguments.output_dir) == cfg.model.path
    elif not path.stem.endswith("_generate"):
        assert str(arguments.output_dir) == cfg.checkpointer.checkpoint_dir
    # The user's, not one that everybody on the machine may write to; and where `tune download` puts it by itself.
    assert arguments.output_dir == Path("~/models") / arguments.repo_id.split("/")[1]
    assert arguments.hf_token is None  # a command line is no place for it
    assert not any(Path("model.safetensors").match(pattern) for pattern in arguments.ignore_patterns or [])


@every_config
def test_every_knob_of_cost_is_explained(path: Path) -> None:
    seen = set()
    for line in path.read_text(encoding="utf-8").partition("\n\n")[2].splitlines():
        key = line.strip().partition(":")[0]
        # Tiny configs take the dtype of their checkpoint. Where a key comes twice, the first one explains it.
        if key in KNOBS and key not in seen and not (key == "dtype" and path.stem.startswith("tiny")):
            assert "  # " in line, line
        seen.add(key)


@every_config
def test_what_trains_models_of_transformers_needs_no_torchtune(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "_component_: offload.models.huggingface." not in text or "torchtune." not in text

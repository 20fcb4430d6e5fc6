"""What names and paths on a command line mean."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from offload.cli import registry
from offload.errors import UserError


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A stand-in for the shipped recipes and configs, and an empty current folder."""
    files = {
        "recipes/full_finetune_single_device.py": "",
        "recipes/lora_finetune_single_device.py": "",
        "recipes/generate.py": "",
        "recipes/_private.py": "",
        "configs/small_offload.yaml": "a: 1\n",
        "configs/small_qlora.yaml": "a: 1\n",
        "configs/small_generate.yaml": "a: 1\n",
        "configs/deeper/other_offload.yaml": "a: 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "shipped" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(registry, "_folder", lambda name: tmp_path / "shipped" / name)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return tmp_path / "shipped"


def test_the_shipped_files_of_this_checkout_are_found():
    root = Path(__file__).parents[2]
    assert registry.recipes_dir() == root / "recipes"
    assert registry.configs_dir() == root / "configs"
    assert set(registry.our_configs().values()) == set((root / "configs").rglob("*.yaml"))


def test_torchtunes_table_is_read_whole_without_importing_torchtune():
    spec = importlib.util.spec_from_file_location("table", _torchtunes_registry_file())
    table = importlib.util.module_from_spec(spec)
    sys.modules["table"] = table  # its dataclasses look their module up
    try:
        spec.loader.exec_module(table)
    finally:
        del sys.modules["table"]
    expected = {
        recipe.name: (recipe.supports_distributed, {config.name for config in recipe.configs})
        for recipe in table.get_all_recipes()
    }
    # Its table names one config that its wheel does not have.
    expected["dev/early_exit_finetune_distributed"][1].remove("llama2/7B_full_early_exit")
    found = registry.torchtune_recipes()
    assert {name: (recipe.distributed, set(recipe.configs)) for name, recipe in found.items()} == expected
    for recipe in found.values():
        assert recipe.path.is_file()
        assert all(path.is_file() for path in recipe.configs.values())


def _torchtunes_registry_file() -> Path:
    for entry in sys.path:
        file = Path(entry, "torchtune", "_recipe_registry.py")
        if file.is_file():
            return file
    raise AssertionError("torchtune is a dependency and is not installed")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("small_offload", "small_offload.yaml"),
        ("small_offload.yaml", "small_offload.yaml"),
        ("deeper/other_offload", "deeper/other_offload.yaml"),
    ],
)
def test_a_shipped_config_by_name(shipped, name, file):
    found = registry.find_config(name)
    assert found.path == shipped / "configs" / file
    assert found.ours and found.shipped


@pytest.mark.parametrize("written", ["mine", "mine.yaml", "./mine", "./mine.yaml", "sub/../mine.yaml", "{}/mine.yaml"])
def test_a_config_file_by_path(shipped, written):
    Path("mine.yaml").write_text("a: 1\n")
    Path("sub").mkdir()
    found = registry.find_config(written.format(Path.cwd()))
    assert found.path.samefile("mine.yaml")
    assert found.path.is_absolute()
    assert not found.shipped


def test_a_file_goes_before_a_shipped_name_only_when_written_as_a_path(shipped):
    Path("small_offload.yaml").write_text("a: 2\n")
    assert registry.find_config("small_offload").shipped
    assert not registry.find_config("small_offload.yaml").shipped
    assert not registry.find_config("./small_offload").shipped


def test_a_home_folder_is_expanded(shipped, monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    Path("mine.yaml").write_text("a: 1\n")
    assert registry.find_config("~/mine.yaml").path.samefile("mine.yaml")


def test_torchtunes_configs_by_name(shipped):
    found = registry.find_config("llama2/7B_full_low_memory")
    assert not found.ours and found.shipped
    assert found.path.parts[-4:] == ("recipes", "configs", "llama2", "7B_full_low_memory.yaml")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("small_offlaod", "small_offload"),
        ("Small_Offload", "small_offload"),
        ("./small_offlod.yaml", "small_offload"),
        ("llama2/7B_ful_low_memory", "llama2/7B_full_low_memory"),
    ],
)
def test_a_misspelt_config_names_the_nearest(shipped, name, near):
    with pytest.raises(UserError) as error:
        registry.find_config(name)
    assert error.value.lines == [str(error.value)]
    assert name in str(error.value)
    assert f"did you mean {near}?" in str(error.value)


def test_a_config_like_no_other_points_to_the_list(shipped):
    with pytest.raises(UserError, match="tune ls"):
        registry.find_config("zzzzzzzz")


def test_a_folder_is_no_config(shipped):
    with pytest.raises(UserError, match="is a folder"):
        registry.find_config("..")


def test_a_recipe_that_both_have_is_ours(shipped):
    found = registry.find_recipe("full_finetune_single_device")
    assert found.ours
    assert found.path == shipped / "recipes" / "full_finetune_single_device.py"


def test_a_recipe_that_both_have_is_torchtunes_with_a_config_of_torchtunes(shipped):
    config = registry.find_config("llama2/7B_full_low_memory")
    found = registry.find_recipe("full_finetune_single_device", config=config)
    assert not found.ours
    assert found.path == registry.torchtune_recipes()["full_finetune_single_device"].path


def test_a_recipe_that_both_have_is_ours_with_a_config_file(shipped):
    Path("mine.yaml").write_text("a: 1\n")
    config = registry.find_config("mine.yaml")
    assert registry.find_recipe("full_finetune_single_device", config=config).ours


def test_torchtunes_recipe_by_its_prefix(shipped):
    found = registry.find_recipe("torchtune/full_finetune_single_device")
    assert not found.ours
    assert found.name == "full_finetune_single_device"
    assert not found.distributed


def test_a_recipe_of_torchtunes_alone(shipped):
    found = registry.find_recipe("full_finetune_distributed")
    assert not found.ours
    assert found.distributed


@pytest.mark.parametrize("written", ["./mine.py", "mine.py", "./mine", "mine", "{}/mine.py"])
def test_a_recipe_file_by_path(shipped, written):
    Path("mine.py").write_text("")
    found = registry.find_recipe(written.format(Path.cwd()))
    assert found.ours
    assert found.path.samefile("mine.py")


def test_a_misspelt_recipe_names_the_nearest(shipped):
    with pytest.raises(UserError, match=r"did you mean full_finetune_single_device\?"):
        registry.find_recipe("full_finetune_singel_device")


def test_private_files_are_no_recipes(shipped):
    assert "_private" not in registry.our_recipes()


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        ("llama2_7b_offload", "full_finetune_single_device"),
        ("llama2_7b_paged", "full_finetune_single_device"),
        ("llama2_7b_lora", "lora_finetune_single_device"),
        ("llama2_7b_qlora", "lora_finetune_single_device"),
        ("tiny_llama_generate", "generate"),
    ],
)
def test_which_recipe_a_config_is_for(config, recipe):
    assert registry.recipe_of_config(config) == recipe


def test_sizes_of_a_model_are_in_order():
    names = list(registry.our_configs())
    sizes = [f"qwen3_{size}_offload" for size in ("0_6b", "1_7b", "4b", "8b", "14b")]
    assert [name for name in names if name in sizes] == sizes
    assert names.index("gemma3_4b_lora") < names.index("gemma3_12b_lora")


def test_every_name_in_the_listing_is_found_again(shipped):
    for recipe, configs in registry.listing():
        assert registry.find_recipe(recipe).path.is_file()
        for config in configs:
            found = registry.find_config(config)
            assert found.name == config
            assert registry.find_recipe(recipe, config=found) == registry.find_recipe(recipe)


def test_anything_by_name(shipped):
    assert registry.find_any("generate") == (shipped / "recipes" / "generate.py", False)
    assert registry.find_any("small_offload") == (shipped / "configs" / "small_offload.yaml", True)
    with pytest.raises(UserError, match="no recipe or config 'generat': did you mean generate"):
        registry.find_any("generat")

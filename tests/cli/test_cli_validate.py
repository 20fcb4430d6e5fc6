"""``tune validate``: which recipe a config is checked against, and what is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offload.cli import handover, registry
from offload.cli.main import main

# `check_config` reads annotations, so the stand-ins declare real dataclasses, as recipes do.
FULL = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Settings:
    output_dir: str
    batch_size: int = 1

if __name__ == "__main__":
    raise AssertionError("validate must not run the recipe")
"""
LORA = FULL.replace("batch_size: int = 1", "batch_size: int = 1\n    adapter_rank: int = 8")


@pytest.fixture(autouse=True)
def shipped(tmp_path, monkeypatch):
    (tmp_path / "shipped/recipes").mkdir(parents=True)
    (tmp_path / "shipped/configs").mkdir()
    (tmp_path / "shipped/recipes/full_finetune_single_device.py").write_text(FULL)
    (tmp_path / "shipped/recipes/lora_finetune_single_device.py").write_text(LORA)
    (tmp_path / "shipped/configs/small_offload.yaml").write_text("output_dir: x\nbatch_size: 2\n")
    (tmp_path / "shipped/configs/small_lora.yaml").write_text("output_dir: x\nadapter_rank: 4\n")
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(registry, "_folder", lambda name: tmp_path / "shipped" / name)
    monkeypatch.chdir(tmp_path / "here")
    yield
    for name in [name for name in sys.modules if name.startswith("offload_recipe_")]:
        del sys.modules[name]


def test_a_shipped_config_is_checked_against_its_own_recipe(capsys):
    assert main(["validate", "small_offload"]) == 0
    assert capsys.readouterr().out == "OK: small_offload is well-formed for full_finetune_single_device\n"
    assert main(["validate", "small_lora", "adapter_rank=16"]) == 0
    assert capsys.readouterr().out == "OK: small_lora is well-formed for lora_finetune_single_device\n"


def test_an_override_may_be_written_as_other_programs_want_it(capsys):
    assert main(["validate", "small_lora", "--adapter_rank=16", "--recipe=lora_finetune_single_device"]) == 0
    assert main(["validate", "small_lora", "--adapter_rank=many"]) == 2
    assert capsys.readouterr().err.startswith("error: adapter_rank: expected int")


@pytest.mark.parametrize(
    ("override", "said"),
    [("batch_sise=8", "batch_size"), ("batch_size=many", "batch_size"), ("+adapter_rank=4", "adapter_rank")],
)
def test_a_mistake_is_a_line_and_status_2(capsys, override, said):
    assert main(["validate", "small_offload", override]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert said in err


def test_a_file_is_checked_against_the_recipe_it_fits_best(capsys):
    Path("mine.yaml").write_text("output_dir: x\nadapter_rank: 4\n")
    assert main(["validate", "mine.yaml"]) == 0
    assert "well-formed for lora_finetune_single_device" in capsys.readouterr().out
    Path("mine.yaml").write_text("output_dir: x\nadapter_rank: 4\nbatch_size: many\n")
    assert main(["validate", "mine.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "batch_size" in lines[0]
    assert "lora_finetune_single_device" in lines[1] and "--recipe" in lines[1]


def test_the_current_folder_is_not_imported(shipped, tmp_path, capsys, monkeypatch):
    """Its modules would run, whoever wrote them: a component of one is named and left unchecked."""
    recipe = tmp_path / "shipped/recipes/full_finetune_single_device.py"
    text = FULL.replace("batch_size: int = 1", "batch_size: int = 1\n    model: Component | None = None")
    recipe.write_text(
        text.replace("import dataclass\n", "import dataclass\nfrom offload.config.loading import Component\n")
    )
    for name in ("mine", "yaml", "omegaconf"):
        Path(f"{name}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    assert main(["validate", "small_offload", "model=mine.Model", "model.depth=3"]) == 0
    out, err = capsys.readouterr()
    assert "mine.Model is of the current folder" in out and out.splitlines()[-1].startswith("OK: ")
    assert main(["validate", "small_offload", "model=os.system", "model.command=id"]) == 2
    assert "standard library" in capsys.readouterr().err


def test_the_recipe_can_be_chosen(capsys):
    Path("mine.yaml").write_text("output_dir: x\nadapter_rank: 4\n")
    assert main(["validate", "mine.yaml", "--recipe", "full_finetune_single_device", "batch_size=2"]) == 2
    assert "adapter_rank" in capsys.readouterr().err
    assert main(["validate", "mine.yaml", "--recipe", "full_finetune_single_device", "~adapter_rank"]) == 0


def test_a_recipe_without_settings_cannot_be_checked_against(capsys):
    Path("mine.yaml").write_text("a: 1\n")
    Path("mine.py").write_text("x = 1\n")
    assert main(["validate", "mine.yaml", "--recipe", "mine.py"]) == 2
    assert "declares no class Settings" in capsys.readouterr().err


def test_torchtunes_configs_go_to_torchtune(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(handover, "torchtune", lambda arguments: calls.append(list(arguments)) or 0)
    config = registry.torchtune_configs()["llama2/7B_full_low_memory"]
    assert main(["validate", "llama2/7B_full_low_memory"]) == 0
    assert calls == [["validate", str(config)]]
    # Its check takes no overrides, and silence about them would pass for a check.
    assert main(["validate", "llama2/7B_full_low_memory", "batch_size=2"]) == 2
    assert "batch_size=2" in capsys.readouterr().err
    assert len(calls) == 1

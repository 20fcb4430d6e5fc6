"""A workspace with a tiny checkpoint, tokenizer and data, and a way to run a recipe as its users do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]

MODEL = {
    "vocab_size": 512,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 64,
    "max_seq_len": 64,
    "norm_eps": 1e-5,
}


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Result:
    """How a recipe ended."""

    status: int
    out: str
    err: str
    output_dir: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()]

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        """The full model saved after ``step``."""
        return load_file(self.output_dir / f"step_{step}" / "model-00001-of-00001.safetensors")

    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


@dataclass
class Workspace:
    """Files below ``path``, and the configs that point at them."""

    path: Path
    recipes: dict[str, ModuleType] = field(default_factory=dict)
    capture: Any = None

    def config(self, recipe: str) -> Path:
        return self.path / f"{recipe}.yaml"

    def run(self, output_dir: Path, *overrides: str, recipe: str = "full_finetune_single_device") -> Result:
        """Run in this process."""
        from offload.training.launch import run_recipe

        if recipe not in self.recipes:
            self.recipes[recipe] = load_module(ROOT / "recipes" / f"{recipe}.py")
        names = {"full_finetune_single_device": "FullFinetune", "lora_finetune_single_device": "LoRAFinetune"}
        recipe_class = getattr(self.recipes[recipe], f"{names[recipe]}RecipeSingleDevice")
        argv = ["--config", str(self.config(recipe)), f"output_dir={output_dir}", *overrides]
        self.capture.readouterr()
        status = run_recipe(recipe_class, argv)
        out, err = self.capture.readouterr()
        return Result(status, out, err, output_dir)

    def command(self, output_dir: Path, *overrides: str, recipe: str = "full_finetune_single_device") -> list[str]:
        """The same as a command line."""
        script = str(ROOT / "recipes" / f"{recipe}.py")
        return [sys.executable, script, "--config", str(self.config(recipe)), f"output_dir={output_dir}", *overrides]

    def spawn(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )


def write_checkpoint(folder: Path) -> None:
    """A Llama-2-architecture checkpoint in Hugging Face's format."""
    from offload import torchao_shim

    torchao_shim.install()
    from torchtune.models.convert_weights import tune_to_hf
    from torchtune.models.llama2 import llama2

    torch.manual_seed(0)
    weights = tune_to_hf(
        llama2(**MODEL).state_dict(), num_heads=MODEL["num_heads"], num_kv_heads=MODEL["num_kv_heads"], dim=32
    )
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": MODEL["vocab_size"],
        "hidden_size": MODEL["embed_dim"],
        "intermediate_size": MODEL["intermediate_dim"],
        "num_hidden_layers": MODEL["num_layers"],
        "num_attention_heads": MODEL["num_heads"],
        "num_key_value_heads": MODEL["num_kv_heads"],
        "max_position_embeddings": MODEL["max_seq_len"],
        "rms_norm_eps": MODEL["norm_eps"],
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_tokenizer(folder: Path, sentences: list[str]) -> None:
    import sentencepiece

    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(sentences))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "tokenizer"), vocab_size=MODEL["vocab_size"],
        model_type="bpe", byte_fallback=True, num_threads=1, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    corpus.unlink()
    (folder / "tokenizer.vocab").unlink()


@pytest.fixture(scope="session")
def _workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    path = tmp_path_factory.mktemp("workspace")
    write_checkpoint(path / "base")
    # Real text of different lengths: the names and first lines of what every Python has.
    pairs = []
    for name in sorted(dir(str) + dir(list) + dir(dict) + dir(int) + dir(set)):
        for owner in (str, list, dict, int, set):
            doc = (getattr(getattr(owner, name, None), "__doc__", None) or "").strip().split("\n")
            if doc[0]:
                pairs.append({"input": f"What does {owner.__name__}.{name} do?", "output": " ".join(doc)[:120]})
    train, held_out = pairs[:320], pairs[320:340]
    for name, rows in (("train", train), ("held_out", held_out)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tokenizer(path / "base", [f"{row['input']} {row['output']}" for row in pairs])

    def dataset(name: str) -> dict[str, Any]:
        return {
            "_component_": "torchtune.datasets.instruct_dataset",
            "source": "json",
            "data_files": str(path / f"{name}.jsonl"),
            "split": "train",
        }

    full = {
        "output_dir": "???",
        "seed": 0,
        "device": "cpu",
        "dtype": "fp32",
        "tokenizer": {
            "_component_": "torchtune.models.llama2.llama2_tokenizer",
            "path": str(path / "base" / "tokenizer.model"),
            "max_seq_len": 48,
        },
        "dataset": dataset("train"),
        "batch_size": 2,
        "model": {"_component_": "torchtune.models.llama2.llama2", **MODEL},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(path / "base"),
            "model_type": "LLAMA2",
        },
        "optimizer": {
            "_component_": "offload.OffloadOptimizer",
            "optimizer_class": "torch.optim.AdamW",
            "strategy": "host",
            "lr": 1e-2,
            "fused": True,
        },
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 2,
        },
        "loss": {"_component_": "offload.training.loss.LinearCrossEntropyLoss", "num_output_chunks": 3},
        "clip_grad_norm": 1.0,
        "max_steps_per_epoch": 20,
    }
    held_out_section = {"dataset": dataset("held_out"), "every_n_steps": 10}
    (path / "full_finetune_single_device.yaml").write_text(yaml.safe_dump(full))
    lora = {
        **full,
        "evaluation": held_out_section,
        "model": {
            "_component_": "torchtune.models.llama2.lora_llama2",
            "lora_attn_modules": ["q_proj", "v_proj"],
            "lora_rank": 4,
            "lora_alpha": 8,
            "apply_lora_to_mlp": True,
            **MODEL,
        },
    }
    (path / "lora_finetune_single_device.yaml").write_text(yaml.safe_dump(lora))
    (path / "evaluation.json").write_text(json.dumps(held_out_section))
    return Workspace(path)


@pytest.fixture
def workspace(
    _workspace: Workspace, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Workspace:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(_workspace.path / "datasets"))
    _workspace.capture = capfd
    return _workspace

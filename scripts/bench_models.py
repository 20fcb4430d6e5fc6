"""A step with a model of transformers: the recipe, beside torchtune's builder in it, SFTTrainer of trl, and Trainer.

    python scripts/bench_models.py                # prints the result
    python scripts/bench_models.py --out          # records it too, and writes the table of docs/models.md

One small Llama checkpoint, the same samples in the same order and padding, one optimizer, fp32, sdpa. Each way is a
process of its own, exactly as its users run it, but that the other trainers log nothing while the recipe writes its
metrics at every step. All processes stand on one core and take turns, one step each: a step is timed from the end of
one backward to the end of the next, all ways' within a second, and their ratios are steady where whole runs differ by
ten per cent. In the end all have the same weights, or there is no result. Every round starts the processes anew, since
where their memory lies makes some of them faster. Three rounds take four minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import yaml
from pages import MODELS, ROOT, write_table
from study import RESULTS, description, rounded

RECORD = RESULTS / "models_cpu.json"
BEGIN = "<!-- scripts/bench_models.py writes this table -->\n"
END = "<!-- end of the table of steps -->"

SHAPE = {"vocab_size": 2048, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 256}
SHAPE |= {"intermediate_dim": 704, "max_seq_len": 256}
BATCH_SIZE = 4
WARM_UP_STEPS = 8
LR = 1e-3

CASES: dict[str, dict[str, Any]] = {
    "`torch.optim.AdamW`": {"optimizer": "torch.optim.AdamW"},
    "… with activation checkpointing": {"optimizer": "torch.optim.AdamW", "checkpointing": True},
    "`OffloadOptimizer`, `stream`": {"optimizer": "offload.OffloadOptimizer"},
}


# ---- what all ways share ---------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from offload import tiny

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=SHAPE["embed_dim"],
        intermediate_size=SHAPE["intermediate_dim"],
        num_hidden_layers=SHAPE["num_layers"],
        num_attention_heads=SHAPE["num_heads"],
        num_key_value_heads=SHAPE["num_kv_heads"],
        max_position_embeddings=SHAPE["max_seq_len"],
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny.prepare() / "checkpoint" / name).read_bytes())


def write_config(path: Path, base: Path, case: dict[str, Any], steps: int, *, transformers_model: bool) -> None:
    """What the recipe is run with."""
    from offload import tiny

    optimizer: dict[str, Any] = {"_component_": case["optimizer"], "lr": LR, "fused": True}
    if case["optimizer"] == "offload.OffloadOptimizer":
        optimizer |= {"optimizer_class": "torch.optim.AdamW", "strategy": "stream"}
    config: dict[str, Any] = {
        "output_dir": str(path.parent / "output"),
        "tokenizer": {
            "_component_": "torchtune.models.llama2.llama2_tokenizer",
            "path": str(base / "tokenizer.model"),
            "max_seq_len": SHAPE["max_seq_len"],
        },
        "dataset": {
            "_component_": "torchtune.datasets.instruct_dataset",
            "source": "json",
            "data_files": str(tiny.prepare() / "data" / "train.jsonl"),
            "split": "train",
        },
        "shuffle": False,
        "seed": 0,
        "batch_size": BATCH_SIZE,
        "optimizer": optimizer,
        "loss": {"_component_": "offload.training.loss.LinearCrossEntropyLoss"},
        "clip_grad_norm": 1.0,
        "epochs": 1,
        "max_steps_per_epoch": steps,
        "device": "cpu",
        "dtype": "fp32",
        "enable_activation_checkpointing": case.get("checkpointing", False),
    }
    if transformers_model:
        config["model"] = {"_component_": "offload.models.huggingface.from_pretrained", "path": str(base)}
    else:
        config["model"] = {"_component_": "torchtune.models.llama2.llama2", **SHAPE}
        config["checkpointer"] = {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(base),
            "model_type": "LLAMA2",
        }
    path.write_text(yaml.safe_dump(config))


def samples(recipe: Any, steps: int) -> list[dict[str, list[int]]]:
    """What the recipe trains on, as rows of transformers' trainers: unpadded, labels beside their tokens."""
    rows = []
    for _, batch in zip(range(steps), recipe.batches.epoch(0), strict=False):
        for tokens, labels in zip(batch.inputs["tokens"], batch.labels, strict=True):
            length = int((labels != -100).nonzero()[-1]) + 2
            shifted = [-100, *labels[: length - 1].tolist()]
            rows.append({"input_ids": tokens[:length].tolist(), "labels": shifted})
    return rows


# ---- the ways: each trains, and calls `hold` once in every step ------------------------------------------------------

Hold = Callable[[], None]


def recipe_of(folder: Path, base: Path, case: dict[str, Any], steps: int, *, transformers_model: bool) -> Any:
    import importlib.util

    from offload.config.loading import load_and_check

    spec = importlib.util.spec_from_file_location("recipe", ROOT / "recipes" / "full_finetune_single_device.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    write_config(folder / "config.yaml", base, case, steps, transformers_model=transformers_model)
    recipe_class = module.FullFinetuneRecipeSingleDevice
    cfg, settings = load_and_check(folder / "config.yaml", [], recipe_class.Settings, [])
    recipe = recipe_class(settings, cfg)
    recipe.setup()
    return recipe


def by_recipe(
    folder: Path, base: Path, case: dict[str, Any], steps: int, hold: Hold, *, transformers_model: bool
) -> torch.nn.Module:
    recipe = recipe_of(folder, base, case, steps, transformers_model=transformers_model)
    count = recipe.reporter.count

    def hold_and_count(*step: Any, **options: Any) -> None:
        hold()
        count(*step, **options)

    recipe.reporter.count = hold_and_count
    recipe.train()
    recipe.cleanup(0)
    model: torch.nn.Module = recipe.model
    return model


def by_trainer(folder: Path, base: Path, case: dict[str, Any], steps: int, hold: Hold, *, sft: bool) -> torch.nn.Module:
    import datasets
    import transformers
    import trl

    from offload import OffloadOptimizer, OffloadTrainerMixin

    class Holder(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            hold()

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    if case["optimizer"] == "offload.OffloadOptimizer":
        optimizer: torch.optim.Optimizer = OffloadOptimizer(
            model.named_parameters(), "torch.optim.AdamW", model=model, strategy="stream", lr=LR, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "output"),
        "per_device_train_batch_size": BATCH_SIZE,
        "max_steps": steps,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": case.get("checkpointing", False),
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }
    data = datasets.Dataset.from_list(json.loads((base / "samples.json").read_text()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, pad_token="</s>")
    common = {"model": model, "train_dataset": data, "optimizers": (optimizer, None), "callbacks": [Holder()]}

    if sft:

        class SFTTrainer(OffloadTrainerMixin, trl.SFTTrainer):
            pass

        config = trl.SFTConfig(**arguments, dataset_kwargs={"skip_prepare_dataset": True})
        trainer: Any = SFTTrainer(args=config, processing_class=tokenizer, **common)
    else:

        class Trainer(OffloadTrainerMixin, transformers.Trainer):
            pass

        collator = transformers.DataCollatorForSeq2Seq(tokenizer)
        trainer = Trainer(args=transformers.TrainingArguments(**arguments), data_collator=collator, **common)
    trainer.train()
    if isinstance(optimizer, OffloadOptimizer):
        optimizer.synchronize()
    trained: torch.nn.Module = model
    return trained


WAYS: dict[str, tuple[Callable[..., torch.nn.Module], dict[str, bool]]] = {
    "recipe, transformers": (by_recipe, {"transformers_model": True}),
    "recipe, torchtune": (by_recipe, {"transformers_model": False}),
    "trl.SFTTrainer": (by_trainer, {"sft": True}),
    "transformers.Trainer": (by_trainer, {"sft": False}),
}
OURS = "recipe, transformers"


# ---- turns -----------------------------------------------------------------------------------------------------------


def work(
    way: str, folder: Path, base: Path, cases: list[dict[str, Any]], steps: int, core: int, link: Connection
) -> None:
    """The life of a process: a step each time that it is told to; after those of a case, its weights."""
    sys.stdout = sys.stderr = open(folder / "said.txt", "w")  # noqa: SIM115
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})

    def hold() -> None:
        link.send(None)
        link.recv()

    train, options = WAYS[way]
    for number, case in enumerate(cases):
        place = folder / str(number)
        place.mkdir()
        names = dict(train(place, base, case, steps, hold, **options).named_parameters())
        head = names["lm_head.weight" if "lm_head.weight" in names else "output.weight"]
        link.send(head.detach().numpy())
        link.recv()


def take_turns(
    cases: dict[str, dict[str, Any]], base: Path, steps: int, core: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each step, by case and way, of processes that take turns on ``core``."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        links, processes = {}, []
        for number, way in enumerate(WAYS):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            links[way], theirs = context.Pipe()
            arguments = (way, folder, base, list(cases.values()), steps, core, theirs)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append((process, folder))
        try:
            return {name: turns_of_one_case(links, steps) for name in cases}
        except (EOFError, ConnectionError):
            for process, _ in processes:
                process.join(10)
            said = [(folder / "said.txt").read_text()[-2000:] for process, folder in processes if process.exitcode]
            raise SystemExit("a process ended early:\n" + "\n".join(said)) from None
        finally:
            for process, _ in processes:
                process.kill()
                process.join()


def turns_of_one_case(links: dict[str, Connection], steps: int) -> dict[str, list[float]]:
    for link in links.values():
        link.recv()  # in its first step, after backward
    seconds: dict[str, list[float]] = {way: [] for way in links}
    for _ in range(steps - 1):
        for way, link in links.items():
            started = time.perf_counter()
            link.send(None)
            link.recv()
            seconds[way].append(time.perf_counter() - started)
    heads = {}
    for way, link in links.items():
        link.send(None)
        heads[way] = torch.from_numpy(link.recv())
    for way, head in heads.items():
        apart = float((head - heads[OURS]).abs().max())
        if not apart < 1e-3:
            raise SystemExit(f"{way} trained something else: its head is {apart:g} apart; there is no result")
    for link in links.values():
        link.send(None)
    return {way: times[WARM_UP_STEPS:] for way, times in seconds.items()}


def summary(rounds: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Of a case: step times and their ratios to ours, medians over the turns of each round, and over rounds."""

    def ratio(seconds: dict[str, list[float]], way: str) -> float:
        return statistics.median(theirs / ours for theirs, ours in zip(seconds[way], seconds[OURS], strict=True))

    ratios = {way: [ratio(seconds, way) for seconds in rounds] for way in WAYS if way != OURS}
    times = {way: statistics.median(statistics.median(seconds[way]) for seconds in rounds) for way in WAYS}
    over_ours = {way: statistics.median(values) for way, values in ratios.items()}
    return {"step_seconds": times, "over_ours": over_ours, "over_ours_by_round": ratios}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row for each case."""
    lines = ["| optimizer | " + " | ".join(WAYS) + " |", "|---|" + "---|" * len(WAYS)]
    for name, result in results.items():
        cells = [f"{result['step_seconds'][OURS] * 1e3:.0f} ms"]
        cells += [f"{ratio:.2f} times as long" for ratio in result["over_ours"].values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this one; records nothing")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--out", action="store_true", help=f"record in {RECORD.name}, and write the table")
    arguments = parser.parse_args()
    chosen = CASES if arguments.case is None else dict([list(CASES.items())[arguments.case]])
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        write_checkpoint(base)
        recipe = recipe_of(Path(scratch), base, CASES["`torch.optim.AdamW`"], arguments.steps, transformers_model=True)
        (base / "samples.json").write_text(json.dumps(samples(recipe, arguments.steps)))
        recipe.cleanup(0)
        rounds = []
        for number in range(arguments.rounds):
            rounds.append(take_turns(chosen, base, arguments.steps, arguments.core))
            for name, seconds in rounds[-1].items():
                ratios = summary([seconds])["over_ours"]
                print(f"round {number + 1}, {name}: " + ", ".join(f"{way} {ratios[way]:.3f}" for way in ratios))
    results = {name: summary([each[name] for each in rounds]) for name in chosen}
    print(table(results))
    if arguments.out and arguments.case is None:
        command = f"python scripts/bench_models.py --rounds {arguments.rounds} --steps {arguments.steps} --out"
        record = description("a step of four trainers in turns", command, "transformers", "torchtune", "trl", "peft")
        record |= {"model": SHAPE, "batch_size": BATCH_SIZE, "dtype": "fp32", "threads": 1, "results": rounded(results)}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        write_table(table(results), BEGIN, END, MODELS)


if __name__ == "__main__":
    main()

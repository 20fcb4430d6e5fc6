"""The tiny Llama trained under AdamW in different formats: held-out loss, from several seeds.

    python scripts/adamw_convergence.py                      # records scripts/results/adamw_convergence.json and .png
    python scripts/adamw_convergence.py --steps 50 --seeds 1 # a quick look, prints only
    python scripts/adamw_convergence.py --only '.*int8'      # keeps what the record has of the others

Model, data, loss, clipping and hyperparameters are those of configs/tiny_llama_offload.yaml, but for half the batch,
half the learning rate and a longer run. Nothing differs between the contenders but the optimizer and the dtype in which
weights are stored: forward and backward are computed in fp32 from the stored weights, and gradients are rounded to the
stored dtype, as a backward pass in bf16 would leave them. A seed decides the initial weights, which bf16 represents
exactly, and the order of the batches, both the same for all contenders.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from study import RESULTS, description, rounded
from torch import Tensor, nn

import offload.optim
from offload import tiny
from offload.config.loading import instantiate, load_and_check
from offload.data.batches import Batch, Batches, build_batches
from offload.models.torchtune import TorchtuneModel
from offload.models.torchtune.building import build_model
from offload.training.loss import SummedLoss
from offload.training.settings import TrainSettings
from offload.training.step import evaluate

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "tiny_llama_offload.yaml"
RECORD, PICTURE = RESULTS / "adamw_convergence.json", RESULTS / "adamw_convergence.png"
SMALLER = 2
"""What batch and learning rate are divided by, to save time."""

EVALUATIONS = 20
"""Of the held-out loss, in a run; the last is after the last step."""

Make = Callable[..., torch.optim.Optimizer]


class Contender(NamedTuple):
    """An optimizer over weights of one dtype."""

    dtype: torch.dtype
    make: Make
    state_bytes: float
    """Per parameter, beside the stored weight."""
    color: str
    dashed: bool = False


def packed(state_dtype: str, master: str) -> Make:
    return functools.partial(offload.optim.AdamW, state_dtype=state_dtype, master=master)


def torchao(params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, **options)


def bitsandbytes(params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, **options)


FP32 = "fp32 AdamW"
CONTENDERS = {
    FP32: Contender(torch.float32, functools.partial(torch.optim.AdamW, fused=True), 8, "black"),
    "split + int8": Contender(torch.bfloat16, packed("int8", "split"), 4.03, "C0"),
    "split24 + int8": Contender(torch.bfloat16, packed("int8", "split24"), 3.03, "C5"),
    "split + bf16": Contender(torch.bfloat16, packed("bf16", "split"), 6, "C2"),
    "stochastic + int8": Contender(torch.bfloat16, packed("int8", "stochastic"), 2.03, "C4"),
    "bf16 AdamW": Contender(torch.bfloat16, functools.partial(torch.optim.AdamW, fused=True), 4, "C7", True),
    "torchao 8-bit": Contender(torch.bfloat16, torchao, 2.03, "C3", True),
    "torchao 8-bit, stochastic": Contender(
        torch.bfloat16, functools.partial(torchao, bf16_stochastic_round=True), 2.03, "C6", True
    ),
    "bitsandbytes 8-bit": Contender(torch.bfloat16, bitsandbytes, 2.03, "C1", True),
}


class Parts(NamedTuple):
    """What the config describes."""

    settings: TrainSettings
    loss: Any
    tokenizer: Any


@functools.cache
def parts() -> Parts:
    _, settings = load_and_check(CONFIG, [], TrainSettings, [])
    return Parts(settings, instantiate(settings.loss), instantiate(settings.tokenizer))


def batches_of(seed: int, *, held_out: bool) -> Batches:
    settings, loss, tokenizer = parts()
    assert settings.evaluation is not None
    return build_batches(
        settings.evaluation.dataset if held_out else settings.dataset,
        tokenizer,
        key="dataset",
        collate_fn=settings.collate_fn,
        ignore_index=loss.ignore_index,
        batch_size=settings.batch_size if held_out else settings.batch_size // SMALLER,
        shuffle=not held_out,
        seed=seed,
        drop_last=not held_out,
    )


@functools.cache
def held_out() -> list[Batch]:
    return list(batches_of(0, held_out=True).epoch(0))


def endless(batches: Batches) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from batches.epoch(epoch)
        epoch += 1


def initialised(seed: int) -> nn.Module:
    """The model in fp32, with weights drawn like those of the checkpoint and rounded to bf16."""
    from safetensors.torch import load_file
    from torchtune.models.convert_weights import hf_to_tune

    model = build_model(parts().settings.model, device=torch.device("cpu"), dtype=torch.float32)
    checkpoint = hf_to_tune(
        load_file(tiny.prepare() / "checkpoint" / "model.safetensors"),
        num_heads=tiny.MODEL["num_heads"],
        num_kv_heads=tiny.MODEL["num_kv_heads"],
        dim=tiny.MODEL["embed_dim"],
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            like = checkpoint[name]
            drawn = like if like.dim() == 1 else torch.randn(like.shape, generator=generator) * like.std()
            param.copy_(drawn.bfloat16())
    return model


def learning_rate(step: int, steps: int) -> float:
    """Factor at a step, counted from 0: linear warm-up, then half a cosine to zero."""
    warm_up = parts().settings.lr_scheduler.num_warmup_steps
    if step < warm_up:
        return step / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def train(job: tuple[str, int, int]) -> list[tuple[int, float]]:
    """``(step, held-out loss in nats per label)`` of a contender, a seed and a number of steps."""
    name, seed, steps = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    contender, settings = CONTENDERS[name], parts().settings
    model = initialised(seed)
    loss_of = SummedLoss(TorchtuneModel(model), parts().loss)
    computed = list(model.parameters())
    stored = [nn.Parameter(param.detach().to(contender.dtype)) for param in computed]
    given = settings.optimizer
    peak = given.lr / SMALLER
    optimizer = contender.make(stored, lr=peak, betas=tuple(given.betas), weight_decay=given.weight_decay)
    curve = []
    batches = endless(batches_of(seed, held_out=False))
    for step in range(steps):
        batch = next(batches)
        (loss_of(batch.inputs, batch.labels, batch.num_labels) / batch.num_labels).backward()
        nn.utils.clip_grad_norm_(computed, settings.clip_grad_norm)
        for ours, theirs in zip(stored, computed, strict=True):
            assert theirs.grad is not None
            ours.grad, theirs.grad = theirs.grad.to(ours.dtype), None
        set_learning_rate(optimizer, peak * learning_rate(step, steps))
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(computed, stored)
        if (steps - step - 1) % max(steps // EVALUATIONS, 1) == 0:
            curve.append((step + 1, evaluate(loss_of, model, held_out(), torch.device("cpu"))))
    return curve


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, compiled into its update
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


Curves = dict[str, list[list[tuple[int, float]]]]
"""Of each contender, one for each seed."""


def summary(curves: Curves) -> dict[str, dict[str, Any]]:
    """Of each contender: final held-out losses, and how far they are from fp32 AdamW's of the same seed."""
    final = {name: [curve[-1][1] for curve in of_seeds] for name, of_seeds in curves.items()}
    spread = max(final[FP32]) - min(final[FP32])
    found = {}
    for name, losses in final.items():
        differences = [ours - theirs for ours, theirs in zip(losses, final[FP32], strict=True)]
        found[name] = {
            "state bytes": CONTENDERS[name].state_bytes,
            "mean": statistics.mean(losses),
            "min": min(losses),
            "max": max(losses),
            "difference to fp32": statistics.mean(differences),
            "differences": differences,
            "within fp32's spread": abs(statistics.mean(differences)) <= spread,
        }
    return found


def show(found: dict[str, dict[str, Any]]) -> None:
    print(f"{'held-out loss, nats per label':30}{'mean':>8}{'min':>8}{'max':>8}{'to fp32':>10}{'bytes':>7}")
    for name, row in found.items():
        losses = "".join(f"{row[key]:8.4f}" for key in ("mean", "min", "max"))
        print(f"{name:30}{losses}{row['difference to fp32']:+10.4f}{row['state bytes']:7.2f}")
    print(f"seeds' spread of {FP32}: {found[FP32]['max'] - found[FP32]['min']:.4f}")


def draw(record: dict[str, Any]) -> None:
    """Left, held-out loss; right, its difference to fp32 AdamW of the same seed. Bands go from seed to seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 6.5), layout="constrained")
    losses = {name: torch.tensor(curves) for name, curves in record["curves"].items()}
    at = record["evaluated at step"]
    for name, values in losses.items():
        contender = CONTENDERS[name]
        for axis, lines in ((left, values), (right, values - losses[FP32])):
            style = "--" if contender.dashed else "-"
            axis.plot(at, lines.mean(dim=0), style, color=contender.color, label=name)
            axis.fill_between(at, lines.amin(dim=0), lines.amax(dim=0), color=contender.color, alpha=0.1, linewidth=0)
    for end in (-1, 1):
        label = "spread of fp32 AdamW's seeds at the end" if end == 1 else None
        right.axhline(end * record["spread of fp32 AdamW"], color="black", linestyle=":", label=label)
    left.set_ylim(bottom=0.97 * min(values.min().item() for values in losses.values()), top=5.5)
    left.set_ylabel("held-out loss (nats per label)")
    right.set_ylabel("held-out loss less fp32 AdamW's of the same seed")
    right.set_ylim(-0.06, 0.17)
    for axis in (left, right):
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
    right.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle("Tiny Llama under formats of AdamW: mean and range of the seeds")
    figure.savefig(PICTURE, dpi=80)
    plt.close(figure)


def recorded(steps: int, seeds: int) -> Curves:
    """Curves that the record has of as many steps and seeds."""
    record = json.loads(RECORD.read_text())
    if (record["steps"], record["seeds"]) != (steps, seeds):
        return {}
    at = record["evaluated at step"]
    return {
        name: [list(zip(at, curve, strict=True)) for curve in curves]
        for name, curves in record["curves"].items()
        if name in CONTENDERS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="nothing is recorded of fewer than 2000")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=".*", help="regular expression: take the others' curves from the record")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    tiny.prepare()
    known = {} if arguments.only == ".*" else recorded(arguments.steps, arguments.seeds)
    known = {name: curves for name, curves in known.items() if not re.fullmatch(arguments.only, name)}
    # torchao's steps are the slowest: first, so that no process waits for one at the end.
    names = sorted(CONTENDERS.keys() - known.keys(), key=lambda name: ("torchao" not in name, name))
    jobs = [(name, seed, arguments.steps) for name in names for seed in range(arguments.seeds)]
    curves: Curves = {name: list(known.get(name, [])) for name in CONTENDERS}
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for (name, seed, _), curve in zip(jobs, pool.imap(train, jobs), strict=True):
            curves[name].append(curve)
            print(f"{time.monotonic() - started:5.0f} s: {name}, seed {seed}: {curve[-1][1]:.4f}", flush=True)
    found = rounded(summary(curves))
    show(found)
    if arguments.steps < 2000:
        return
    given = parts().settings.optimizer
    record = {
        **description(
            "held-out loss of the tiny Llama under formats of AdamW",
            f"python scripts/adamw_convergence.py --steps {arguments.steps} --seeds {arguments.seeds}",
            "torchtune",
        ),
        "config": CONFIG.name,
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "batch_size": parts().settings.batch_size // SMALLER,
        "lr": given.lr / SMALLER,
        "betas": list(given.betas),
        "unit": "held-out loss, nats per label",
        "spread of fp32 AdamW": rounded(found[FP32]["max"] - found[FP32]["min"]),
        "results": found,
        "evaluated at step": [step for step, _ in curves[FP32][0]],
        "curves": {name: [[rounded(loss) for _, loss in one] for one in of] for name, of in curves.items()},
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    # A line per curve.
    text = re.sub(r"\[[^][{}]*\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), json.dumps(record, indent=1))
    RECORD.write_text(text + "\n")
    draw(record)


if __name__ == "__main__":
    main()

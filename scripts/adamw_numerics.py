"""How far each format of offload.optim.AdamW strays from float64, beside torch, torchao, bitsandbytes and FlashOptim.

    python scripts/adamw_numerics.py                 # records scripts/results/adamw_numerics.json and two pictures
    python scripts/adamw_numerics.py --steps 500     # a quick look, prints only
    python scripts/adamw_numerics.py --only-ours     # keeps what the record has of the others

One tensor of weights is driven by the same synthetic gradients under every optimizer, and under AdamW in float64.
Weights are around 0.02, gradients are bf16 numbers, the learning rate is 1e-4 and constant. A format is measured by
the change that it makes to the weights, with all the precision that it keeps of them. torchao runs without
``torch.compile``; FlashOptim is ``flash_adamw.py``. What is finished is kept in a file beside the record until that is
written: a run that was ended goes on.

A format is compared with published ones that take no more bytes (but for 0.1, FlashOptim's scales) and have the same
kind of master: exact (``split``, or fp32 weights), of 24 bits (``split24``), ``stochastic`` (bf16 weights, rounded
stochastically) or ``none`` (bf16 weights, rounded to nearest).
``fp32`` moments are compared with torch.optim.AdamW bit by bit, in a process where torch uses no fused multiply-add: it
rounds less often with it.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from flash_adamw import FlashAdamW
from study import RESULTS, description, gradient_scales, save, significant
from torch import Tensor, nn

import offload.optim
from offload.optim import formats

RECORD, PICTURE = RESULTS / "adamw_numerics.json", RESULTS / "adamw_numerics.png"
TABLE, FINISHED = RESULTS / "adamw_numerics_table.png", RESULTS / "adamw_numerics.unfinished.jsonl"
BLOCK, ROWS = 256, 64
ELEMENTS = ROWS * BLOCK
OPTIONS = {"eps": 1e-8, "weight_decay": 0.1}
SAMPLES = 50
"""Points per curve."""


class Scenario(NamedTuple):
    lr: float
    description: str
    betas: tuple[float, float] = (0.9, 0.999)
    share: float = 1.0
    """Of the steps."""


SCENARIOS = {
    "spectrum": Scenario(1e-4, "log-normal scales per column (sigma 1) and row, Student t noise, drifting mean"),
    "decades": Scenario(1e-4, "the same, scales in a block spread over six decades"),
    "fall": Scenario(1e-4, "spectrum; all gradients fall by 10x at half time"),
    "rise": Scenario(1e-4, "spectrum; all gradients rise by 10x at half time"),
    "lr 1e-6": Scenario(
        1e-6, "spectrum, with a mean that stays: each step is below 1/100 of what bf16 weights resolve"
    ),
    "half falls": Scenario(1e-4, "spectrum; a random half of the gradients falls by 10x at half time", share=0.3),
    "one scale": Scenario(1e-4, "Gaussian noise of one scale", share=0.1),
    "one, mean": Scenario(1e-4, "the same, around a mean of 0.3 sigma", share=0.1),
    "one, beta1 0": Scenario(1e-4, "one scale", (0.0, 0.999), share=0.1),
    "one, beta2 .95": Scenario(1e-4, "one scale", (0.9, 0.95), share=0.1),
    "one, beta2 0": Scenario(1e-4, "one scale", (0.9, 0.0), share=0.1),
}


def gradients(scenario: str, steps: int) -> Iterator[Tensor]:
    """bf16 gradients ``[ELEMENTS]`` of each step; a row of BLOCK elements shares a scale in every 8-bit format."""
    draw = torch.Generator().manual_seed(0)
    shape = (ROWS, BLOCK)
    scale = gradient_scales(*shape, draw, scenario == "decades")
    sign = torch.randn(shape, generator=draw).sign()
    falls = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5
    period = 100 * 10 ** (1.3 * torch.rand(shape, generator=draw))
    phase = 2 * math.pi * torch.rand(shape, generator=draw)
    factor = {"fall": 0.1, "rise": 10.0}.get(scenario, 1.0)
    for step in range(steps):
        normal = torch.randn(shape, generator=draw)
        if scenario.startswith("one"):
            yield (1e-3 * (normal + 0.3 * (scenario == "one, mean"))).bfloat16().view(-1)
            continue
        noise = normal * (5 / torch.randn(5, *shape, generator=draw).square_().sum(dim=0)).sqrt_()
        mean = sign if scenario == "lr 1e-6" else torch.sin(2 * math.pi * step / period + phase)
        gradient = scale * (noise + 0.5 * mean)
        if scenario == "half falls" and step >= steps // 2:
            gradient = torch.where(falls, 0.1, 1.0) * gradient
        yield (gradient * factor if step >= steps // 2 else gradient).bfloat16().view(-1)


def initial_weights() -> Tensor:
    """fp32 ``[ELEMENTS]``, numbers that bf16 has too."""
    return (0.02 * torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1))).bfloat16().float()


# Who is compared

Make = Callable[..., torch.optim.Optimizer]


class Contender(NamedTuple):
    """An optimizer, the dtype of its weights, the group that it is compared in and its bytes per element.

    Bytes are those of weight and state.
    """

    make: Make
    dtype: torch.dtype
    group: str
    nbytes: float
    is_ours: bool
    color: str


def packed(state_dtype: str, master: str) -> Make:
    return functools.partial(offload.optim.AdamW, state_dtype=state_dtype, master=master)


def torchao(params: Sequence[nn.Parameter], name: str, **options: Any) -> torch.optim.Optimizer:
    import torchao.optim

    return getattr(torchao.optim, name)(params, **options)


def bitsandbytes(params: Sequence[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, min_8bit_size=0, **options)


GROUPS = {"split": "exact", "split24": "24 bits", "stochastic": "stochastic", "none": "none"}
STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2 + 8 / 256}
COLORS = {"fp32": "black", "bf16": "C2", "int8": "C0"}
FP32 = "torch fp32"


@functools.cache
def contenders() -> dict[str, Contender]:
    bf16, fp32 = torch.bfloat16, torch.float32
    fused = functools.partial(torch.optim.AdamW, fused=True)
    found = {FP32: Contender(fused, fp32, "exact", 12, False, "C8")}
    for master, group in GROUPS.items():
        for state, nbytes in STATE_BYTES.items():
            weight = {"split": 4, "split24": 3}.get(master, 2)
            found[f"{master} + {state}"] = Contender(
                packed(state, master), bf16, group, weight + nbytes, True, COLORS[state]
            )
    found["torch bf16"] = Contender(fused, bf16, "none", 6, False, "C7")
    for name, group, dtype, options in (
        ("torchao {}, fp32 weights", "exact", fp32, {}),
        ("torchao {}, stochastic", "stochastic", bf16, {"bf16_stochastic_round": True}),
        ("torchao {}, bf16 weights", "none", bf16, {}),
    ):
        for kind, class_name, color in (("8-bit", "AdamW8bit", "C3"), ("fp8", "AdamWFp8", "C6")):
            make = functools.partial(torchao, name=class_name, **options)
            found[name.format(kind)] = Contender(make, dtype, group, dtype.itemsize + 2 + 8 / 256, False, color)
    for group, dtype in (("exact", fp32), ("none", bf16)):
        name = f"bitsandbytes 8-bit, {'fp32' if dtype == fp32 else 'bf16'} weights"
        found[name] = Contender(bitsandbytes, dtype, group, dtype.itemsize + 2 + 8 / 256, False, "C1")
    for bits, group in ((32, "exact"), (24, "24 bits"), (None, "none")):
        make = functools.partial(FlashAdamW, master_weight_bits=bits)
        name = f"FlashOptim, {bits} bits" if bits else "FlashOptim, bf16 weights"
        found[name] = Contender(make, bf16, group, (bits or 16) / 8 + 2 + 4 / 32, False, "C5")
    return found


class Run:
    """A contender in training."""

    def __init__(self, contender: Contender, scenario: Scenario) -> None:
        self.param = nn.Parameter(initial_weights().to(contender.dtype))
        self.optimizer = contender.make([self.param], lr=scenario.lr, betas=scenario.betas, **OPTIONS)

    def step(self, gradient: Tensor) -> None:
        self.param.grad = gradient.to(self.param.dtype, copy=True)
        with torch.compiler.set_stance("force_eager"):
            self.optimizer.step()

    def weights(self) -> Tensor:
        """With all the precision that is kept of them, fp32 ``[ELEMENTS]``."""
        if isinstance(self.optimizer, FlashAdamW):
            return self.optimizer.weights(self.param)
        state = self.optimizer.state[self.param]
        if "remainder" in state:
            return formats.join_master(self.param.detach(), state["remainder"])
        return self.param.detach().float().clone()


class Float64:
    """AdamW in float64 (https://arxiv.org/abs/1711.05101, algorithm 2)."""

    def __init__(self, scenario: Scenario) -> None:
        self.lr, self.betas = scenario.lr, scenario.betas
        self.weights = initial_weights().double()
        self.m = torch.zeros_like(self.weights)
        self.v = torch.zeros_like(self.weights)
        self.count = 0

    def step(self, gradient: Tensor) -> None:
        self.count += 1
        (beta1, beta2), wide = self.betas, gradient.double()
        self.m.mul_(beta1).add_(wide, alpha=1 - beta1)
        self.v.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
        denominator = (self.v / (1 - beta2**self.count)).sqrt_().add_(OPTIONS["eps"])
        self.weights.mul_(1 - self.lr * OPTIONS["weight_decay"])
        self.weights.addcdiv_(self.m, denominator, value=-self.lr / (1 - beta1**self.count))


UNITS = {
    "error": "||change of the weights since the start - float64's|| / ||float64's||",
    "recent": "the same for the change since the sample before",
    "worst": "largest over the elements of |weight - float64's|, over the root mean square of float64's change",
    "progress": "change of the weights projected on float64's, over float64's; 1 is as far, 0 is no move",
}


def measure(weights: Tensor, exact: Tensor, before: Tensor, exact_before: Tensor, start: Tensor) -> dict[str, float]:
    """Values of :data:`UNITS` for fp64 ``[ELEMENTS]`` tensors: now, at the sample before, and at the start."""
    moved = exact - start
    difference = weights - exact
    recent = exact - exact_before
    return {
        "error": (difference.norm() / moved.norm()).item(),
        "recent": ((weights - before - recent).norm() / recent.norm()).item(),
        "worst": (difference.abs().max() / moved.square().mean().sqrt()).item(),
        "progress": ((weights - start) @ moved / (moved @ moved)).item(),
    }


class Job(NamedTuple):
    scenario: str
    steps: int
    names: list[str]


def simulate(job: Job) -> dict[str, dict[str, list[float]]]:
    """Curves of each contender: ``SAMPLES`` values of each of :data:`UNITS`."""
    torch.manual_seed(0)  # torchao's stochastic rounding draws from the global generator
    scenario = SCENARIOS[job.scenario]
    runs = {name: Run(contenders()[name], scenario) for name in job.names}
    exact = Float64(scenario)
    start = exact.weights.clone()
    before = dict.fromkeys(runs, start)
    exact_before = start
    curves: dict[str, dict[str, list[float]]] = {name: {unit: [] for unit in UNITS} for name in runs}
    for step, gradient in enumerate(gradients(job.scenario, job.steps), start=1):
        exact.step(gradient)
        for run in runs.values():
            run.step(gradient)
        if step % max(job.steps // SAMPLES, 1) == 0:
            for name, run in runs.items():
                weights = run.weights().double()
                values = measure(weights, exact.weights, before[name], exact_before, start)
                for unit, value in values.items():
                    curves[name][unit].append(value)
                before[name] = weights
            exact_before = exact.weights.clone()
    return curves


def count_differences(job: Job) -> int:
    """Elements of weights and moments, over all samples, in which ``split`` with fp32 moments is not torch in fp32."""
    scenario = SCENARIOS[job.scenario]
    expected, ours = (Run(contenders()[name], scenario) for name in (FP32, "split + fp32"))
    different = 0
    for step, gradient in enumerate(gradients(job.scenario, job.steps), start=1):
        expected.step(gradient)
        ours.step(gradient)
        if step % max(job.steps // SAMPLES, 1) == 0:
            different += int((expected.weights() != ours.weights()).sum())
            for key in ("exp_avg", "exp_avg_sq"):
                states = (run.optimizer.state[run.param][key] for run in (expected, ours))
                different += int(torch.ne(*states).sum())
    return different


UNFUSED = {"ATEN_CPU_CAPABILITY": "default"}
"""The environment in which torch multiplies and adds in two roundings; read when torch is loaded."""


# What comes out

Results = dict[str, dict[str, dict[str, list[float]]]]
"""Curves by scenario, contender and unit."""

RECORDED = ("error", "recent", "progress")
"""Units of which whole curves are recorded."""


def summary(curves: dict[str, list[float]]) -> dict[str, float]:
    """The end of each curve; of ``recent``, its median and its largest value."""
    recent = sorted(curves["recent"])
    ends = {unit: curves[unit][-1] for unit in ("error", "worst", "progress")}
    return ends | {"recent": recent[len(recent) // 2], "largest recent": recent[-1]}


JUDGED = {"error": 1.02, "recent": 1.02, "largest recent": 1.05, "worst": 1.3}
"""Measures, and the ratio up to which two values count as equal, because two draws of one rounding differ by as much.

The largest of many values varies more than their norm.
"""


def peers_of(ours: Contender) -> list[str]:
    """Published optimizers with the same kind of master that take no more bytes, but for some more scales."""
    return [
        name
        for name, other in contenders().items()
        if not other.is_ours and other.group == ours.group and other.nbytes <= ours.nbytes + 0.1
    ]


def verdicts(results: Results) -> list[dict[str, Any]]:
    """For each of our formats, scenario and measure: the best published value among its peers, and ours over it."""
    found = []
    for scenario, of_all in results.items():
        ends = {name: summary(curves) for name, curves in of_all.items()}
        for name, contender in contenders().items():
            if not contender.is_ours:
                continue
            peers = peers_of(contender)
            for unit, equal in JUDGED.items():
                best = min(peers, key=lambda peer: ends[peer][unit])
                ratio = ends[name][unit] / ends[best][unit]
                found.append(
                    {
                        "format": name,
                        "scenario": scenario,
                        "measure": unit,
                        "value": ends[name][unit],
                        "best published": best,
                        "ratio": ratio,
                        "is_worse": ratio > equal,
                    }
                )
    return found


def show(results: Results, judged: list[dict[str, Any]], differences: dict[str, int]) -> None:
    """The table of final errors in per cent, progress at lr=1e-6, and the verdicts."""
    print(
        f"{'error at the end, %':34}" + "".join(f"{name:>12}" for name in SCENARIOS) + f"{'bytes':>8}{'progress':>10}"
    )
    for group in GROUPS.values():
        for name, contender in contenders().items():
            if contender.group == group:
                errors = "".join(f"{100 * results[s][name]['error'][-1]:12.3g}" for s in SCENARIOS)
                progress = results["lr 1e-6"][name]["progress"][-1]
                print(f"{name:34}{errors}{contender.nbytes:8.2f}{progress:10.3f}")
        print()
    print("progress is that at lr 1e-6: how far the weights went of the way that they go in float64")
    print("elements in which split + fp32 is not torch.optim.AdamW in fp32:", differences)
    for name in (name for name, contender in contenders().items() if contender.is_ours):
        worse = [row for row in judged if row["format"] == name and row["is_worse"]]
        listed = [f"{r['measure']} in {r['scenario']}: {r['ratio']:.2f} times {r['best published']}" for r in worse]
        print(f"{name}: {'no worse than any' if not worse else 'worse in ' + '; '.join(listed)}")


TITLES = {
    "exact": "exact master:\nsplit, or fp32 weights",
    "24 bits": "master of 24 bits",
    "stochastic": "bf16 weights,\nrounded stochastically",
    "none": "bf16 weights,\nrounded to nearest",
}


def draw(record: dict[str, Any]) -> None:
    """A row per kind of master, a column per scenario: errors over steps, and progress at lr=1e-6."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(TITLES), len(SCENARIOS), figsize=(38, 16), sharex="col", layout="constrained")
    for row in record["results"]:
        contender = contenders()[row["optimizer"]]
        axis = axes[list(TITLES).index(contender.group), list(SCENARIOS).index(row["scenario"])]
        curve = row["curves"]["progress" if row["scenario"] == "lr 1e-6" else "error"]
        steps = steps_of(row["scenario"], record["steps"])
        at = [(i + 1) * steps / len(curve) for i in range(len(curve))]
        style = ("-", 2.0, 2) if contender.is_ours else ("--", 1.4, 3)
        axis.plot(
            at, curve, style[0], linewidth=style[1], zorder=style[2], color=contender.color, label=row["optimizer"]
        )
    for (group, title), line in zip(TITLES.items(), axes, strict=True):
        for axis, scenario in zip(line, SCENARIOS, strict=True):
            axis.set_title(f"{scenario}: {'progress' if scenario == 'lr 1e-6' else 'error'}", fontsize=12)
            axis.grid(alpha=0.3)
            if scenario == "lr 1e-6":
                axis.set_ylim(-0.05, 1.2)
            elif group in ("exact", "24 bits"):
                axis.set_yscale("log")
            else:
                axis.set_ylim(0, 1)
                beyond = [curve.get_label() for curve in axis.get_lines() if min(curve.get_ydata()) > 1]
                axis.text(
                    0.03, 0.98, "\n".join(f"above: {name}" for name in beyond), transform=axis.transAxes, va="top"
                )
        line[0].set_ylabel(title, fontsize=14, fontweight="bold")
        line[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=11)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.savefig(PICTURE, dpi=55)
    plt.close(figure)


def draw_table(record: dict[str, Any]) -> None:
    """Every format beside its peers: errors at the end in per cent; green where ours is no worse than the best peer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    errors = {(row["optimizer"], row["scenario"]): row["error"] for row in record["results"]}
    names = [name for group in TITLES for name, one in contenders().items() if one.group == group]
    names.sort(key=lambda name: (list(TITLES).index(contenders()[name].group), -contenders()[name].nbytes))
    figure, axis = plt.subplots(figsize=(16, 0.36 * len(names) + 1), layout="constrained")
    for y, name in enumerate(names):
        ours = contenders()[name]
        for x, scenario in enumerate(SCENARIOS):
            error = errors[name, scenario]
            color = "#eeeeee"
            if ours.is_ours:
                best = min(errors[peer, scenario] for peer in peers_of(ours))
                color = "#a6dba0" if error <= JUDGED["error"] * best else "#f4a582"
            axis.add_patch(plt.Rectangle((x, y), 1, 1, color=color, ec="white"))
            axis.text(x + 0.5, y + 0.5, f"{100 * error:.3g}", ha="center", va="center", fontsize=9)
        if y and contenders()[names[y - 1]].group != ours.group:
            axis.axhline(y, color="black", linewidth=2)
    axis.set_xlim(0, len(SCENARIOS))
    axis.set_ylim(len(names), 0)
    axis.set_xticks([x + 0.5 for x in range(len(SCENARIOS))], SCENARIOS)
    labels = [f"{name} ({contenders()[name].nbytes:.2f} bytes)" for name in names]
    axis.set_yticks([y + 0.5 for y in range(len(names))], labels)
    for label, name in zip(axis.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if contenders()[name].is_ours else "normal")
    axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    title = "error of the weights' change in per cent; green: ours, no worse than the best published of as many bytes"
    axis.set_title(title, fontsize=11)
    figure.savefig(TABLE, dpi=80)
    plt.close(figure)


def steps_of(scenario: str, steps: int) -> int:
    return int(steps * SCENARIOS[scenario].share)


def finished(steps: int, *, only_theirs: bool) -> Results:
    """Curves of a run of as many steps that was ended; or those of published optimizers that the record has."""
    found: Results = {scenario: {} for scenario in SCENARIOS}
    if only_theirs and RECORD.exists():
        record = json.loads(RECORD.read_text())
        for row in record["results"]:
            name, scenario = row["optimizer"], row["scenario"]
            known = name in contenders() and scenario in SCENARIOS and record["steps"] == steps
            if known and not contenders()[name].is_ours:
                found[scenario][name] = row["curves"] | {"worst": [row["worst"]]}
    if FINISHED.exists():
        for line in FINISHED.read_text().splitlines():
            row = json.loads(line)
            if row["steps"] == steps:
                found[row["scenario"]] |= row["curves"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000, help="nothing is recorded of fewer than 10000")
    parser.add_argument("--only-ours", action="store_true", help="take published optimizers' curves from the record")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    steps = arguments.steps
    results = finished(steps, only_theirs=arguments.only_ours)
    jobs = []
    for is_theirs in (True, False):
        for scenario in SCENARIOS:
            names = [n for n in contenders() if n.startswith("torchao") == is_theirs and n not in results[scenario]]
            if names:
                jobs.append(Job(scenario, steps_of(scenario, steps), names))
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(arguments.processes, torch.set_num_threads, (1,)) as pool:
        for job, curves in zip(jobs, pool.imap(simulate, jobs), strict=True):
            results[job.scenario] |= curves
            with FINISHED.open("a", encoding="utf-8") as file:
                row = {"scenario": job.scenario, "steps": steps, "curves": significant(curves)}
                file.write(json.dumps(row) + "\n")
            print("finished:", job.scenario, len(job.names), flush=True)
    os.environ |= UNFUSED
    exact = [Job(scenario, steps_of(scenario, steps), []) for scenario in SCENARIOS]
    with spawn.Pool(arguments.processes, torch.set_num_threads, (1,)) as pool:
        differences = dict(zip(SCENARIOS, pool.map(count_differences, exact, 1), strict=True))
    judged = verdicts(results)
    show(results, judged, differences)
    if steps < 10_000:
        FINISHED.unlink(missing_ok=True)
        return
    record = {
        **description(
            "change of the weights under formats of AdamW against float64", "python scripts/adamw_numerics.py"
        ),
        "steps": steps,
        "elements": ELEMENTS,
        "options": OPTIONS,
        "scenarios": {name: scenario._asdict() for name, scenario in SCENARIOS.items()},
        "units": UNITS | {"recent": f"{UNITS['recent']}; median over {SAMPLES} samples of as many steps each"},
        "bytes": {name: contender.nbytes for name, contender in contenders().items()},
        "elements in which split + fp32 is not torch.optim.AdamW in fp32": differences,
        "equal up to a ratio of": JUDGED,
        "worse than published": [row for row in judged if row["is_worse"]],
        "results": [
            {
                "scenario": scenario,
                "optimizer": name,
                **summary(of_all[name]),
                "curves": {unit: of_all[name][unit] for unit in RECORDED},
            }
            for scenario, of_all in results.items()
            for name in contenders()
        ],
    }
    save(significant(record), RECORD, "scenario")
    FINISHED.unlink(missing_ok=True)
    draw(significant(record))
    draw_table(significant(record))


if __name__ == "__main__":
    main()

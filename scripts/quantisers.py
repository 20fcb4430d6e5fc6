"""How Adam's moments are best stored in 8 bits: error curves of candidate formats, and of torchao and bitsandbytes.

    python scripts/quantisers.py                  # records scripts/results/quantisers.json and .png
    python scripts/quantisers.py --steps 10000    # longer
    python scripts/quantisers.py --add            # what the record lacks alone

Every candidate sees the same gradients as AdamW in float64. A step decodes the moments, updates them in fp32, takes the
update from the unrounded moments and encodes them again, with one scale per block of 256 elements. A format is first
tried on one moment while the other stays in fp32, then in pairs. torchao and bitsandbytes run as published, torchao
without ``torch.compile``. ``int8`` is for the codes of offload.optim themselves, whose updates have in them what the
parameter gets of a rounded ratio: each strays by more for it, and their sum by less.

Formats are written as functions of x, a moment over its block's largest magnitude:

- ``linear``, ``c^2``, ``c^3``, ``c^4``, ``c^8``: x = (code / largest code)^k.
- ``eEmM``: the upper bits of fp32 x, with E bits of exponent and M of mantissa; code 0 is zero. ``gradual``: the upper
  bits of x + 2^-k, less those of 2^-k: equal steps at the bottom.
- ``dynamic``: the map of https://arxiv.org/abs/1511.04561. ``softsign``: code / largest code = 2 x / (1 + x).
- ``root ...``: sqrt(v) is stored, whose block's largest is 1.
- ``ratio ...``: m / (sqrt(v) + eps) is stored, Adam's update but for its step size, and multiplied by the decoded
  sqrt(v) + eps.
- ``>0``: a code of zero is raised to 1, so that no v decodes to zero.

Roundings: ``nearest``; ``stochastic``, an independent random number per element and step; ``dither``, up where the
fraction exceeds a threshold that walks through [0, 1) by the golden ratio each step, from a start of its own for each
position in the block.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from study import RESULTS, description, gradient_scales, save, significant
from torch import Tensor

from offload.optim import codes

RECORD, PICTURE = RESULTS / "quantisers.json", RESULTS / "quantisers.png"
BLOCK, ROWS = 256, 16
EPS = 1e-8
BETAS = ((0.9, 0.999), (0.9, 0.95))
SAMPLES = 100
"""Points per curve, of which every second is recorded."""


class Format(NamedTuple):
    """A code for x in [0, 1]; ``forward`` gives a real number to be rounded, ``inverse`` takes a whole one."""

    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    largest: int
    smallest: int = 0
    root: bool = False
    """v only: sqrt(v) is stored."""
    ratio: bool = False
    """m only: m / (sqrt(v) + eps) is stored."""


def power(k: float, largest: int, **options: Any) -> Format:
    """x = (code / largest)^k."""
    return Format(lambda x: largest * x ** (1 / k), lambda c: (c / largest) ** k, largest, **options)


def shifted(shift: int, largest: int, **options: Any) -> Format:
    """About x = (code / largest)^(2^shift): the fp32 bits of x, less those of 1, are shifted; straight in between."""
    one = 127 << 23

    def forward(x: Tensor) -> Tensor:
        return largest * ((x.view(torch.int32) - one >> shift) + one).view(torch.float32)

    def inverse(code: Tensor) -> Tensor:
        return (((code / largest).view(torch.int32) - one << shift) + one).view(torch.float32)

    return Format(forward, inverse, largest, **options)


def minifloat(exponent: int, mantissa: int, **options: Any) -> Format:
    """Upper bits of fp32; the largest exponent is that of 1.0."""
    shift, bias = 23 - mantissa, (127 - (2**exponent - 1)) << mantissa

    def forward(x: Tensor) -> Tensor:
        return (x.view(torch.int32) - (bias << shift)).clamp_(min=0).float() * 2.0**-shift

    def inverse(code: Tensor) -> Tensor:
        whole = code.to(torch.int32)
        return torch.where(whole == 0, 0, whole + bias << shift).view(torch.float32)

    return Format(forward, inverse, (2**exponent - 1) << mantissa, **options)


def gradual(octaves: int, mantissa: int, largest: int, **options: Any) -> Format:
    """Upper bits of ``x * (top - offset) + offset``, less those of offset.

    Offset is 2^-octaves, and top the number whose code is ``largest``.
    """
    shift, offset = 23 - mantissa, 2.0**-octaves
    bias = (127 - octaves) << mantissa
    top = torch.tensor(largest + bias << shift, dtype=torch.int32).view(torch.float32).item()

    def forward(x: Tensor) -> Tensor:
        return ((x * (top - offset) + offset).view(torch.int32) - (bias << shift)).float() * 2.0**-shift

    def inverse(code: Tensor) -> Tensor:
        return ((code.to(torch.int32) + bias << shift).view(torch.float32) - offset) / (top - offset)

    return Format(forward, inverse, largest, **options)


def dynamic(signed: bool, **options: Any) -> Format:
    """The dynamic map of bitsandbytes and torchao; of the signed one, the half above zero."""
    from torchao.optim.quant_utils import create_dynamic_map

    table = torch.tensor([value for value in create_dynamic_map(signed) if value >= 0])
    last = len(table) - 1

    def forward(x: Tensor) -> Tensor:
        below = (torch.bucketize(x, table, right=True) - 1).clamp_(0, last - 1)
        lower = table[below]
        return below + (x - lower) / (table[below + 1] - lower)

    return Format(forward, lambda c: table[c.long()], last, **options)


def softsign(largest: int) -> Format:
    return Format(lambda x: largest * 2 * x / (1 + x), lambda c: c / (2 * largest - c), largest)


@functools.cache
def formats_of_m() -> dict[str, Format]:
    return {
        "dynamic": dynamic(signed=True),
        "e4m3": minifloat(4, 3),
        "e3m4": minifloat(3, 4),
        "gradual 3m4": gradual(8, 4, 127),
        "linear": power(1, 127),
        "c^2": power(2, 127),
        "c^3": power(3, 127),
        "softsign": softsign(127),
        "ratio linear": power(1, 127, ratio=True),
        "ratio c^2": power(2, 127, ratio=True),
        "ratio e4m3": minifloat(4, 3, ratio=True),
    }


@functools.cache
def formats_of_v() -> dict[str, Format]:
    return {
        "dynamic": dynamic(signed=False),
        "dynamic >0": dynamic(signed=False, smallest=1),
        "linear >0": power(1, 255, smallest=1),
        "e5m3": minifloat(5, 3),
        "e5m3 >0": minifloat(5, 3, smallest=1),
        "e4m4 >0": minifloat(4, 4, smallest=1),
        "root linear": power(1, 255, root=True),
        "root linear >0": power(1, 255, smallest=1, root=True),
        "c^3 >0": power(3, 255, smallest=1),
        "root c^2 >0": power(2, 255, smallest=1, root=True),
        "root c^4 >0": power(4, 255, smallest=1, root=True),
        "root shifted c^2 >0": shifted(1, 255, smallest=1, root=True),
        "root shifted c^4 >0": shifted(2, 255, smallest=1, root=True),
        "root gradual 3m5 >0": gradual(8, 5, 255, smallest=1, root=True),
        "root gradual 4m4 >0": gradual(16, 4, 255, smallest=1, root=True),
    }


class Candidate(NamedTuple):
    """Format and rounding of each moment; a format of ``""`` is fp32."""

    m: str = ""
    m_rounding: str = "nearest"
    v: str = ""
    v_rounding: str = "nearest"

    @property
    def name(self) -> str:
        parts = [f"m {self.m}, {self.m_rounding}"] * bool(self.m) + [f"v {self.v}, {self.v_rounding}"] * bool(self.v)
        return "; ".join(parts)


def candidates() -> list[Candidate]:
    """What is compared: nearest rounding for all, the others where they could matter."""
    m = [Candidate(m=m) for m in formats_of_m()]
    m += [Candidate(m=m, m_rounding=r) for m in ("e4m3", "c^2", "ratio linear") for r in ("stochastic", "dither")]
    v = [Candidate(v=v) for v in formats_of_v()]
    varied = ("dynamic >0", "e5m3 >0", "root c^2 >0", "root gradual 3m5 >0")
    v += [Candidate(v=v, v_rounding=r) for v in varied for r in ("stochastic", "dither")]
    return m + v + PAIRS


PAIRS = [
    Candidate("ratio linear", "nearest", v, rounding)
    for rounding in ("nearest", "dither")
    for v in ("root shifted c^4 >0", "root gradual 3m5 >0", "root gradual 4m4 >0")
] + [
    Candidate("ratio linear", "dither", "root gradual 3m5 >0", "dither"),
    Candidate("e4m3", "nearest", "e5m3 >0", "nearest"),
    Candidate("e4m3", "nearest", "e5m3 >0", "dither"),
    Candidate("e4m3", "nearest", "root gradual 3m5 >0", "dither"),
    Candidate("ratio e4m3", "nearest", "root gradual 3m5 >0", "dither"),
    Candidate("ratio e4m3", "nearest", "root shifted c^4 >0", "dither"),
]


def round_blocks(x: Tensor, code: Format, offset: Tensor | float) -> Tensor:
    """Encode and decode ``[blocks, 256]``; codes are rounded down after ``offset`` is added."""
    magnitude = x.abs()
    scale = magnitude.amax(dim=1, keepdim=True)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    whole = code.forward(magnitude * inverse).add_(offset).floor_().clamp_(code.smallest, code.largest)
    return torch.copysign(code.inverse(whole) * scale, x)


class Adam:
    """A candidate's moments."""

    def __init__(self, candidate: Candidate, betas: tuple[float, float]) -> None:
        self.candidate, self.betas = candidate, betas
        self.m_format, self.v_format = formats_of_m().get(candidate.m), formats_of_v().get(candidate.v)
        self.m = torch.zeros(ROWS, BLOCK)
        self.v = torch.zeros(ROWS, BLOCK)

    def step(self, gradient: Tensor, step: int, offsets: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """One step; returns the update for a learning rate of 1 and sqrt(v) before it is rounded."""
        beta1, beta2 = self.betas
        correction = math.sqrt(1 - beta2**step)
        eps = EPS * correction
        m, v = self.m, self.v
        if self.m_format is not None and self.m_format.ratio:
            m = m * (v.sqrt() + eps)
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient * gradient
        root = v.sqrt()
        ratio = m / (root + eps)
        if self.m_format is not None:
            stored = ratio if self.m_format.ratio else m
            m = round_blocks(stored, self.m_format, offsets[self.candidate.m_rounding][0])
        if self.v_format is not None:
            offset = offsets[self.candidate.v_rounding][1]
            v = round_blocks(root if self.v_format.root else v, self.v_format, offset)
            v = v * v if self.v_format.root else v
        self.m, self.v = m, v
        return ratio * (correction / (1 - beta1**step)), root


class Packed:
    """The codes of offload.optim."""

    def __init__(self, betas: tuple[float, float]) -> None:
        self.betas, self.before = betas, 0.0
        self.stored = (
            torch.zeros(ROWS * BLOCK, dtype=torch.int8),
            torch.zeros(ROWS),
            torch.zeros(ROWS * BLOCK, dtype=torch.uint8),
            torch.zeros(ROWS),
        )

    def step(self, gradient: Tensor, step: int, offsets: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """As :meth:`Adam.step`."""
        (beta1, beta2), flat = self.betas, gradient.reshape(-1)
        correction = math.sqrt(1 - beta2**step)
        m, v = codes.decode(*self.stored, self.before, True)
        self.before = eps = EPS * correction
        root = (beta2 * v + (1 - beta2) * flat * flat).sqrt()
        ratio = (beta1 * m + (1 - beta1) * flat) / (root + eps)
        threshold = codes.thresholds(0, len(flat), codes.GOLDEN_RATIO * step, flat.device)
        codes.encode(ratio, root, threshold, *self.stored, eps, True)
        lost = ratio - codes.decode_ratios(*self.stored[:2])
        update = (ratio / (1 - beta1**step) + codes.ahead(beta1) * lost) * correction
        return update.view(gradient.shape), root.view(gradient.shape)


class Published:
    """An optimizer of torchao or bitsandbytes, its update read off fp32 parameters that are zeroed before each step."""

    def __init__(self, name: str, betas: tuple[float, float]) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(ROWS * BLOCK))
        if name == "torchao":
            from torchao.optim import AdamW8bit

            self.optimizer: Any = AdamW8bit([self.parameter], lr=1.0, betas=betas, eps=EPS, weight_decay=0.0)
        else:
            from bitsandbytes.optim import AdamW8bit as BitsAndBytes

            self.optimizer = BitsAndBytes(
                [self.parameter], lr=1.0, betas=betas, eps=EPS, weight_decay=0.0, min_8bit_size=0
            )

    def step(self, gradient: Tensor, step: int, offsets: dict[str, Any]) -> tuple[Tensor, None]:
        self.parameter.data.zero_()
        self.parameter.grad = gradient.reshape(-1).clone()
        self.optimizer.step()
        return -self.parameter.data.view(ROWS, BLOCK), None


PUBLISHED = ("torchao", "bitsandbytes")

SCENARIOS = {
    "spectrum": "log-normal scales per column (sigma 1) and row, Student t with 5 degrees of freedom, drifting mean",
    "six decades": "scales in a block spread over six decades",
    "fall": "all gradients fall by 10x at half time",
    "rise": "all gradients rise by 10x at half time",
    "half fall": "a random half of the elements falls by 10x at half time",
    "sparse": "90 % zeros: whole rows in half of the blocks, single elements in the others",
    "constant sign": "every element's gradient keeps its sign, with 30 % noise",
}


def gradients(scenario: str, steps: int) -> Iterator[Tensor]:
    """fp32 gradients ``[ROWS, BLOCK]`` of each step; a row is a block."""
    draw = torch.Generator().manual_seed(0)
    shape = (ROWS, BLOCK)
    scale = gradient_scales(*shape, draw, scenario == "six decades")
    sign = torch.randn(shape, generator=draw).sign()
    half = torch.rand(shape, generator=draw) < 0.5
    period = 100 * 10 ** (1.3 * torch.rand(shape, generator=draw))
    phase = 2 * math.pi * torch.rand(shape, generator=draw)
    for step in range(steps):
        normal = torch.randn(shape, generator=draw)
        noise = normal * (5 / torch.randn(5, *shape, generator=draw).square_().sum(dim=0)).sqrt_()
        gradient = scale * (noise + 0.5 * torch.sin(2 * math.pi * step / period + phase))
        if scenario == "constant sign":
            gradient = scale * sign * (1 + 0.3 * noise).abs()
        elif scenario == "sparse":
            rows = torch.rand(ROWS, 1, generator=draw) < 0.1
            single = torch.rand(shape, generator=draw) < 0.1
            gradient = gradient * torch.cat([rows[: ROWS // 2].expand(-1, BLOCK), single[ROWS // 2 :]])
        elif step >= steps // 2 and scenario != "six decades":
            factor = {"fall": 0.1, "rise": 10.0}.get(scenario, 1.0)
            gradient = gradient * (torch.where(half, 0.1, 1.0) if scenario == "half fall" else factor)
        yield gradient


def thresholds(step: int) -> list[Tensor]:
    """Rounding offsets in [0, 1) ``[BLOCK]`` of ``dither``, for m and v: 32-bit arithmetic, as a kernel would do it."""
    position = torch.arange(BLOCK, dtype=torch.int64)
    walked = position * 0x85EBCA6B + step * 0x9E3779B9
    return [((walked + start) % 2**32 // 2**16).float() * 2.0**-16 for start in (0, 0x55555555)]


class Job(NamedTuple):
    scenario: str
    betas: tuple[float, float]
    steps: int
    candidates: list[Candidate]
    others: list[str]
    """Of :data:`PUBLISHED` and :data:`OURS`."""


def simulate(job: Job) -> dict[str, Any]:
    """All candidates and the others on one scenario; returns summary and curves by candidate."""
    scenario, betas, steps, chosen, others = job
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    beta1, beta2 = betas
    runs: dict[str, Adam | Packed | Published] = {candidate.name: Adam(candidate, betas) for candidate in chosen}
    runs |= {name: Packed(betas) if name == OURS else Published(name, betas) for name in others}
    total = {name: torch.zeros(ROWS, BLOCK, dtype=torch.float64) for name in runs}
    blow_up = dict.fromkeys(runs, 0.0)
    curves: dict[str, dict[str, list[float]]] = {name: {"error": [], "drift": [], "bias": []} for name in runs}
    m = torch.zeros(ROWS, BLOCK, dtype=torch.float64)
    v, exact_total = m.clone(), m.clone()
    every = max(steps // SAMPLES, 1)
    noise = torch.Generator().manual_seed(1)
    for step, gradient in enumerate(gradients(scenario, steps), start=1):
        wide = gradient.double()
        m = beta1 * m + (1 - beta1) * wide
        v = beta2 * v + (1 - beta2) * wide * wide
        exact = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + EPS)
        exact_total += exact
        exact32, largest = exact.float(), exact.abs().max().item()
        random = [torch.rand(ROWS, BLOCK, generator=noise) for _ in range(2)]
        offsets = {"nearest": (0.5, 0.5), "stochastic": random, "dither": thresholds(step)}
        for name, run in runs.items():
            update, root = run.step(gradient, step, offsets)
            total[name] += update
            if largest:
                blow_up[name] = max(blow_up[name], update.abs().max().item() / largest)
            if step % every == 0:
                curve = curves[name]
                curve["error"].append(((update - exact32).norm() / exact32.norm().clamp(min=1e-30)).item())
                curve["drift"].append(((total[name] - exact_total).norm() / exact_total.norm()).item())
                if root is not None:
                    seen = v > 0
                    curve["bias"].append((root[seen].double() / v[seen].sqrt()).clamp(min=1e-12).log().mean().item())
    return {
        name: {
            "drift": curve["drift"][-1],
            "blow_up": blow_up[name],
            "error": sorted(curve["error"])[len(curve["error"]) // 2],
            "bias": curve["bias"][-1] if curve["bias"] else None,
            "curves": curve,
        }
        for name, curve in curves.items()
    }


OURS = "int8"
METRICS = ("drift", "blow_up", "error")


def verdict(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where int8 is worse than the better of torchao and bitsandbytes, and by what factor."""
    worse = []
    for row in results:
        for metric in METRICS:
            best = min(row["candidates"][other][metric] for other in PUBLISHED)
            ratio = row["candidates"][OURS][metric] / best
            if ratio > 1:
                where = {"scenario": row["scenario"], "betas": row["betas"], "metric": metric}
                worse.append(where | {"times": significant(ratio)})
    return worse


def draw(record: dict[str, Any]) -> None:
    """Above, drift of int8 and the published optimizers over time; below, all drifts at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    results = record["results"]
    names = list(results[0]["candidates"])
    figure = plt.figure(figsize=(19, 6 + 0.2 * len(names)), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(5, 0.2 * len(names)))
    above, below = parts
    axes = above.subplots(len(BETAS), len(SCENARIOS), sharex=True)
    for axis, row in zip(axes.flat, results, strict=True):
        for name, color in zip((OURS, *PUBLISHED), ("C0", "C3", "C1"), strict=True):
            curve = row["candidates"][name]["curves"]["drift"]
            axis.semilogy([(i + 1) * record["steps"] / len(curve) for i in range(len(curve))], curve, color, label=name)
        axis.set_title(f"{row['scenario']}, beta2 {row['betas'][1]}", fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    above.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9)
    above.supylabel("drift of the summed updates", fontsize=9)
    axis = below.subplots()
    table = [[row["candidates"][name]["drift"] for row in results] for name in names]
    image = axis.imshow(table, norm=LogNorm(0.003, 1), cmap="RdYlGn_r", aspect="auto")
    for y, line in enumerate(table):
        for x, drift in enumerate(line):
            color = "black" if 0.006 < drift < 0.7 else "white"
            text = f"{100 * drift:.0f}" if drift > 1 else f"{100 * drift:.2g}"
            axis.text(x, y, text, color=color, ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(results)), [f"{row['scenario']}\n{row['betas'][1]}" for row in results], fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    for label in axis.get_yticklabels():
        if label.get_text() in (*PUBLISHED, OURS):
            label.set_fontweight("bold")
    axis.set_title(f"drift after {record['steps']} steps, in per cent", fontsize=10)
    below.colorbar(image, ax=axis, pad=0.01)
    figure.savefig(PICTURE, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="nothing is recorded of fewer than 2000")
    parser.add_argument("--add", action="store_true", help="keep what the record has, but for int8")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    known: dict[tuple[str, float], dict[str, Any]] = {}
    if arguments.add and (before := json.loads(RECORD.read_text()))["steps"] == arguments.steps:
        known = {(row["scenario"], row["betas"][1]): row["candidates"] for row in before["results"]}
    jobs = []
    for betas in BETAS:
        for scenario in SCENARIOS:
            there = known.get((scenario, betas[1]), {})
            others = [OURS, *(name for name in PUBLISHED if name not in there)]
            new = [one for one in candidates() if one.name not in there]
            jobs.append(Job(scenario, betas, arguments.steps, new, others))
    results: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for job, outcome in zip(jobs, pool.imap(simulate, jobs), strict=True):
            kept, names = known.get((job.scenario, job.betas[1]), {}), [one.name for one in candidates()]
            merged = {name: outcome.get(name) or kept[name] for name in (*names, OURS, *PUBLISHED)}
            results.append({"scenario": job.scenario, "betas": job.betas, "candidates": merged})
            shown = {name: significant(merged[name]["drift"]) for name in (OURS, *PUBLISHED)}
            print(job.scenario, job.betas, shown, flush=True)
    worse = verdict(results)
    print("int8 is worse than torchao or bitsandbytes in", worse or "nothing")
    if arguments.steps < 2000:
        return
    for row in results:
        for name, outcome in row["candidates"].items():
            curves = outcome.pop("curves", None)
            if name in (OURS, *PUBLISHED):
                halved = {metric: curve[1::2] if len(curve) == SAMPLES else curve for metric, curve in curves.items()}
                outcome["curves"] = halved
    record = {
        **description(
            "8-bit moments of AdamW against float64",
            f"python scripts/quantisers.py --steps {arguments.steps}",
        ),
        "steps": arguments.steps,
        "elements": ROWS * BLOCK,
        "scenarios": SCENARIOS,
        "units": {
            "drift": "||sum of updates - exact|| / ||exact|| at the end",
            "blow_up": "largest over the steps of max |update| / max |exact|",
            "error": "median over the steps of ||update - exact|| / ||exact||",
            "bias": "mean log of sqrt(v) / exact sqrt(v) at the end",
        },
        "worse_than_published": worse,
        "results": significant(results),
    }
    save(record, RECORD, "scenario")
    draw(record)


if __name__ == "__main__":
    main()

"""The result file: runs, what each measured, and what follows from several results together."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu.cases import cases, is_compute_alone
from gpu.machine import ROOT
from gpu.measure import GIB, Job

TIMELINES = ROOT / "scripts" / "results" / "timelines.json"

FINDINGS = ("ok", "out of memory", "needs a GPU", "whole card only")
"""What a case can come to that another attempt would not change."""

Entry = dict[str, Any]


class Record:
    """``runs`` and lists of ``results``, ``tests`` and ``recipes``, whose entries name their run by its position; and
    ``planned``, what the planner said of the recipes when the report was written.

    Args:
        path: the file; what it has is kept.
        fresh: discard that.
        mirror: folder that gets a copy of every version of the file, or None.
    """

    def __init__(self, path: Path, *, fresh: bool = False, mirror: Path | None = None) -> None:
        self.path, self.mirror = path, mirror
        self.content: dict[str, Any] = {"runs": [], "results": [], "tests": {}, "recipes": []}
        if path.exists() and not fresh:
            self.content.update(json.loads(path.read_text()))

    @property
    def runs(self) -> list[Entry]:
        return self.content["runs"]

    def card_of(self, entry: Entry) -> str | None:
        """The card that an entry was measured on."""
        return self.runs[entry["run"]]["environment"].get("card")

    def begin(self, run: Entry) -> Entry:
        """Add a run; what is added from here on belongs to it."""
        self.runs.append(run)
        self.write()
        return run

    # Results of cases

    def has(self, job: Job, tokens: int) -> bool:
        """Whether there is a finding about a case on this run's card; about compute alone, from this run."""
        wanted, this = _key({**vars(job), "tokens": tokens}), len(self.runs) - 1
        card = self.runs[this]["environment"].get("card")
        return any(
            _key(result) == wanted
            and self.card_of(result) == card
            and result["status"] in FINDINGS
            and (result["run"] == this or not is_compute_alone(job.case))
            for result in self.content["results"]
        )

    def add(self, job: Job, result: Entry) -> Entry:
        """Add a result in place of an earlier one about the same; compute alone is kept for each run."""
        same = {key: value for key, value in vars(job).items() if key not in ("tokens", "trace", "steps")}
        result = {**same, "steps": job.steps, "run": len(self.runs) - 1, **result}
        card = self.card_of(result)

        def is_replaced(other: Entry) -> bool:
            is_same = _key(other) == _key(result) and self.card_of(other) == card
            return is_same and (other["run"] == result["run"] or not is_compute_alone(job.case))

        self.content["results"] = [*(r for r in self.content["results"] if not is_replaced(r)), result]
        self.write()
        return result

    def write(self) -> None:
        """Replace the file at once, so that whoever stops this leaves a whole one."""
        derive(self.content)
        text = json.dumps(self.content, indent=1) + "\n"
        for folder in filter(None, (self.path.parent, self.mirror)):
            folder.mkdir(parents=True, exist_ok=True)
            draft = folder / f"{self.path.stem}.part"
            draft.write_text(text)
            draft.replace(folder / self.path.name)


def latest(content: Mapping[str, Any], recipe: str) -> Entry | None:
    """What was recorded last of a recipe on a GPU."""
    runs = content["runs"]
    found = [e for e in content["recipes"] if e["name"] == recipe and runs[e["run"]]["environment"].get("card")]
    return found[-1] if found else None


def _key(entry: Entry) -> tuple[Any, ...]:
    keys = ("case", "device", "model", "layers", "tokens", "memory_gib", "allocator")
    return tuple(entry.get(key) for key in keys)


# What follows from several results


def derive(content: dict[str, Any]) -> None:
    """Write into results what others tell about them; a second time changes nothing."""
    runs = content["runs"]
    results = [result for result in content["results"] if result["status"] == "ok"]
    predictions = list(_predictions())
    for index, run in enumerate(runs):
        if drift := _drift([result for result in results if result["run"] == index]):
            run["drift"] = drift
    for result in results:
        run = runs[result["run"]]
        alone = _compute_alone(result, results, runs)
        if alone:
            compute = statistics.mean(other["step_seconds"] for other in alone)
            result["compute_seconds"], result["compute_from_run"] = compute, alone[0]["run"]
            result["exposed_seconds"] = result["step_seconds"] - compute
        _compare_rates(result, run.get("rates"))
        case = next((case for case in cases() if case.name == result["case"]), None)
        if case is None:
            continue
        if case.equals is not None:
            _compare_losses(result, case.equals, results, runs)
        prediction = _prediction(predictions, run["environment"].get("card"), result, case.simulated)
        if prediction is not None:
            result["simulated_exposed_seconds"] = prediction


def _setting(result: Entry, runs: list[Entry]) -> tuple[Any, ...]:
    card = runs[result["run"]]["environment"].get("card")
    return (card, *(result.get(key) for key in ("device", "model", "layers", "tokens")))


def _compute_alone(result: Entry, results: Iterable[Entry], runs: list[Entry]) -> list[Entry]:
    """What to compare a step with: forward and backward alone, of the same run and held to the same memory where that
    was measured, else on the whole card, else of the latest other run."""
    alike = [
        other
        for other in results
        if is_compute_alone(other["case"]) and _setting(other, runs) == _setting(result, runs)
    ]
    limits = [result["memory_gib"], None]
    for limit in limits:
        if found := [r for r in alike if r["run"] == result["run"] and r["memory_gib"] == limit]:
            return found
    others = [r for r in alike if r["memory_gib"] in limits]
    latest = max((r["run"] for r in others), default=None)
    return [r for r in others if r["run"] == latest]


def _drift(results: list[Entry]) -> dict[str, float]:
    """By tokens: how much longer a step without optimizer took at the end of a run than at its beginning."""
    first = {(r["tokens"], r["memory_gib"]): r["step_seconds"] for r in results if r["case"] == "none"}
    again = {(r["tokens"], r["memory_gib"]): r["step_seconds"] for r in results if r["case"] == "none-again"}
    return {str(key[0]): again[key] / first[key] - 1 for key in first if key in again}


def _compare_rates(result: Entry, rates: Entry | None) -> None:
    """With what the machine gave in the same run: the bound, copies against the link, updates against a device copy."""
    if not rates:
        return
    link = max(result["link_bytes"].values()) / rates["each_of_both"]
    if "compute_seconds" in result:
        result["bound_seconds"] = max(result["compute_seconds"], link)
    copies = result.get("copies", {})
    for direction in ("up", "down"):
        if "bytes_per_second" in copies.get(direction, {}):
            copies[direction]["of_link_alone"] = copies[direction]["bytes_per_second"] / rates[direction]
            copies[direction]["of_link_both"] = copies[direction]["bytes_per_second"] / rates["each_of_both"]
    update = copies.get("update", {})
    if update.get("seconds") and result.get("update_bytes"):
        update["bytes_per_second"] = result["update_bytes"] / update["seconds"]
        update["of_device_copy"] = update["bytes_per_second"] / rates["device_copy"]


def _compare_losses(result: Entry, reference: str, results: Iterable[Entry], runs: list[Entry]) -> None:
    """To the bit, over the steps with deterministic algorithms; the last reference on the whole card counts."""
    mine = result.get("losses")
    theirs = [
        other["losses"]
        for other in results
        if other["case"] == reference and _setting(other, runs) == _setting(result, runs) and "losses" in other
    ]
    if not (mine and theirs):
        return
    unequal = [step for step, (a, b) in enumerate(zip(mine, theirs[-1], strict=False), 1) if a != b]
    compared = {"to": reference, "steps": min(len(mine), len(theirs[-1])), "equal": not unequal}
    result["same_losses"] = {**compared, "first_unequal_step": unequal[0] if unequal else None}


def _predictions() -> Iterator[Entry]:
    if TIMELINES.exists():
        yield from json.loads(TIMELINES.read_text())["rows"]


def _prediction(rows: Iterable[Entry], card: str | None, result: Entry, schedule: str | None) -> float | None:
    """Simulated exposed seconds on this card, of the 7B model."""
    if card is None or schedule is None or result["model"] != "7b" or result["layers"] is not None:
        return None
    for row in rows:
        is_card = row["machine"].lower() in card.lower().replace(" ", "")
        if is_card and row["tokens"] == result["tokens"] and row["schedule"] == schedule:
            return row["exposed_ms"] / 1e3
    return None


# One line about a result


def line(result: Entry) -> str:
    """For the terminal."""
    limit = "whole card" if result["memory_gib"] is None else f"{result['memory_gib']:g} GB"
    start = f"{result['case']:40s} {result['tokens']:6d} tokens  {limit:10s}  "
    if result["status"] != "ok":
        return f"{start}{result['status']}: {' '.join(result.get('error', '').split())[-300:]}"
    exposed = f", exposed {1e3 * result['exposed_seconds']:.0f} ms" if "exposed_seconds" in result else ""
    peaks = [result.get(f"{when}device_peak_reserved_bytes", 0) / GIB for when in ("first_step_", "")]
    parts = [
        f"{result['step_seconds']:.3f} s, {result['tokens_per_second']:.0f} tok/s{exposed}",
        f"{peaks[1]:.1f} GiB (step 1 {peaks[0]:.1f})",
        f"built in {result['construction_seconds']:.1f} s, step 1 {result['first_step_seconds']:.1f} s",
    ]
    if result.get("num_alloc_retries"):
        parts.append(f"{result['num_alloc_retries']} retries of the allocator")
    if (same := result.get("same_losses")) and not same["equal"]:
        parts.append(f"LOSSES DIFFER from {same['to']} in step {same['first_unequal_step']}")
    if result.get("gradients_repeat") is False:
        parts.append("gradients do not repeat to the bit here, so losses need not be equal")
    if result.get("managed_memory"):
        parts.append("managed memory")
    return start + ", ".join(parts)

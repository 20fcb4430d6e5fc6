"""Runs what is not in the record yet, in order, within the time that there is."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpu.cases import is_compute_alone
from gpu.machine import OPTIONAL, Unfit, build_kernel, git_commit, missing_packages
from gpu.measure import Job
from gpu.parts import CaseItem, Item, MachineItem, Size, seconds_expected
from gpu.processes import OUT_OF_TIME, environment, last_words, run_child
from gpu.recipes import RecipeRun, own_cache, run_recipe
from gpu.record import FINDINGS, Record, line
from gpu.testing import Selection, run_tests

LEAST_SECONDS = 5.0
"""With less left, nothing is begun."""

PATIENCE, LEAST_PATIENCE = 4.0, 120.0
"""How many times as long as expected an item may take of a part's time, and seconds that it has in any case: what hangs
leaves time for the rest."""


class Suite:
    """One run.

    Args:
        record: gets the results.
        size: device, model and layers of all cases.
        budget: seconds that all may take; None for no limit.
        layers: of the model, fewer than it has; None for all.
        steps: that are timed.
        commit: of the checkout, where there is no repository to ask.
    """

    def __init__(
        self,
        record: Record,
        size: Size,
        *,
        budget: float | None,
        layers: int | None = None,
        steps: int = 5,
        commit: str | None = None,
    ) -> None:
        self.record, self.size, self.budget = record, size, budget
        self.layers, self.steps, self.commit = layers, steps, commit
        self.started = time.perf_counter()
        self.longest: dict[type, float] = {}
        self.compute_seconds = 0.0
        self.failed = False
        self.patience: float | None = None
        self.run: dict[str, Any] = {}
        self.missing: list[str] = []

    def remaining(self) -> float:
        """Seconds."""
        return float("inf") if self.budget is None else self.budget - (time.perf_counter() - self.started)

    # From an item to its processes

    def run_all(self, items: Sequence[Item], part: str | None = None) -> int:
        """Run what there is no finding about; returns the exit status: 1 if something ended in an error."""
        try:
            built = build_kernel()
            facts = self._describe()
        except Unfit as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        self.missing = missing_packages()
        self.run = self.record.begin(
            {
                "part": part,
                "date": time.strftime("%Y-%m-%d %H:%M:%S"),
                "command": shlex.join(["python", "scripts/gpu_suite.py", *sys.argv[1:]]),
                "commit": self.commit or git_commit(),
                "environment": facts,
                "cpu_kernel": built,
                "not_installed": self.missing,
                "left_out": [],
            }
        )
        say(f"{facts.get('card') or facts['cpu']}, torch {facts['torch']}; {built}")
        if facts.get("same_bits") is False:
            say("THE GPU KERNEL GIVES OTHER BITS THAN THE CPU KERNEL: see the tests of part a")
            self.failed = True
        if self.missing:
            say("not installed: " + "; ".join(f"{name} (left out: {OPTIONAL[name]})" for name in self.missing))
        pending = [item for item in items if self._is_pending(item)]
        if not any(map(is_finding, pending)):
            say("everything of this is measured already; --fresh discards it")
            self.record.runs.pop()
            self.record.write()
            return 0
        for index, item in enumerate(pending):
            self._run_if_there_is_time(item, any(getattr(later, "reserves", False) for later in pending[index + 1 :]))
        self.run["seconds"] = time.perf_counter() - self.started
        self.record.write()
        if self.run["left_out"]:
            say(f"left out for lack of time: {', '.join(self.run['left_out'])}; the same command goes on with them")
        return 1 if self.failed else 0

    def trace(self, job: Job) -> int:
        """Write a trace, outside of the record; returns the exit status."""
        try:
            build_kernel()
        except Unfit as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        results, why, said = self._child(job)
        say(trace_line(results[0]) if results else f"{why}: {said}")
        return 0 if results and "trace" in results[0] else 1

    def _describe(self) -> dict[str, Any]:
        results, why, said = self._child(Job("machine", device=self.size.device))
        if results and "unfit" in results[0]:
            raise Unfit(results[0]["unfit"])
        if not results:
            raise Unfit(f"the machine cannot be described: {why}\n{said}")
        return results[0]["environment"]

    def _is_pending(self, item: Item) -> bool:
        if isinstance(item, CaseItem):
            return bool(self._missing_tokens(item))
        if isinstance(item, RecipeRun):
            return not any(
                entry["name"] == item.name and entry["status"] == "ok" and self._is_here(entry)
                for entry in self.record.content["recipes"]
            )
        here = [run for run in self.record.runs if run["environment"].get("card") == self._card]
        if isinstance(item, MachineItem) and item.name == "doctor":
            return not any("doctor" in run for run in here)
        if isinstance(item, MachineItem) and item.settings:
            return not any({name for name, _ in item.settings} <= run.get("page_locking", {}).keys() for run in here)
        return True  # tests know themselves what passed; rates are each run's own

    def _is_here(self, entry: dict[str, Any]) -> bool:
        return self.record.card_of(entry) == self._card

    @property
    def _card(self) -> str | None:
        return self.run["environment"].get("card")

    def _missing_tokens(self, item: CaseItem) -> list[int]:
        return [tokens for tokens in item.tokens if not self.record.has(self._job(item), tokens)]

    def _run_if_there_is_time(self, item: Item, is_reserved: bool) -> None:
        reserved = 1.3 * self.compute_seconds + LEAST_SECONDS if is_reserved else 0.0
        left = self.remaining() - reserved
        # A result that was there before the time was up is kept: half of what the longest took may do.
        if left < max(LEAST_SECONDS, self.longest.get(type(item), 0.0) / 2):
            self._leave_out(item.name)
            return
        self.patience = None
        if self.budget is not None and (most := max(LEAST_PATIENCE, PATIENCE * seconds_expected(item))) < left:
            left = self.patience = most
        began = time.perf_counter()
        say(f"-- {item.name}, {self.remaining():.0f} s left" if self.budget else f"-- {item.name}")
        run: Callable[[Any, float], None] = {
            CaseItem: self._run_case,
            MachineItem: self._run_machine,
            RecipeRun: self._run_recipe,
            Selection: self._run_tests,
        }[type(item)]
        run(item, left)
        taken = time.perf_counter() - began
        self.longest[type(item)] = max(self.longest.get(type(item), 0.0), taken)
        if isinstance(item, CaseItem) and item.name == "none":
            self.compute_seconds = taken

    def _reason(self, why: str | None) -> str | None:
        """Why an item's process ended: the part's time was up, or it took much longer than it should."""
        if why != OUT_OF_TIME or self.patience is None or self.remaining() <= 0:
            return why
        return f"did not end within {self.patience:.0f} s"

    def _leave_out(self, what: str) -> None:
        self.run["left_out"].append(what)
        self.record.write()

    def _child(
        self, job: Job, seconds: float | None = None, **variables: str
    ) -> tuple[list[dict[str, Any]], str | None, str]:
        left = self.remaining() if seconds is None else seconds
        limit = None if left == float("inf") else left
        return run_child(child_command(job), limit, environment(job.allocator, **variables))

    # Kinds of items

    def _job(self, item: CaseItem, tokens: Sequence[int] = ()) -> Job:
        return Job(
            case=item.name,
            device=self.size.device,
            model=self.size.model,
            layers=self.layers,
            tokens=list(tokens),
            memory_gib=item.memory_gib,
            steps=self.steps,
            allocator=item.allocator,
        )

    def _run_case(self, item: CaseItem, seconds: float) -> None:
        wanted = self._missing_tokens(item)
        job = self._job(item, wanted)
        results, why, said = self._child(job, seconds)
        why = self._reason(why)
        missing = wanted[len(results) :]
        if why == OUT_OF_TIME:
            for tokens in missing:
                self._leave_out(f"{item.name} at {tokens} tokens")
            missing = []
        ended = [
            {"tokens": tokens, "status": why or "said nothing", "error": last_words(said, before=1000)}
            for tokens in missing
        ]
        for result in [*results, *ended]:
            entry = self.record.add(job, result)
            say(line(entry))
            differs = entry.get("same_losses", {}).get("equal") is False
            self.failed |= entry["status"] not in (*FINDINGS, "not installed") or differs

    def _run_machine(self, item: MachineItem, seconds: float) -> None:
        if item.name == "rates":
            results, why, said = self._child(Job("rates", device=self.size.device), seconds)
            if results:
                self.run["rates"] = results[0]
                say(f"GB/s { ({k: round(v / 1e9, 1) for k, v in results[0].items() if isinstance(v, float)}) }")
            else:
                self._could_not("rates", why, said)
        if item.name == "doctor":
            results, why, said = self._child(Job("doctor", device=self.size.device), seconds, **own_cache())
            if results:
                self.run["doctor"] = results[0]
                say(f"tune doctor: {'; '.join(results[0]['problems']) or 'nothing hinders training here'}")
            else:
                self._could_not("doctor", why, said)
        for name, allocator in item.settings:
            job = Job("page-locking", device=self.size.device, allocator=allocator)
            results, why, said = self._child(job, min(seconds, self.remaining()))
            if results:
                self.run.setdefault("page_locking", {})[name] = {"allocator": allocator, **results[0]}
                say(f"page-locking, {name}: {results[0]['seconds_per_gib']:.3f} s per GiB")
            else:
                self._could_not(f"page-locking, {name}", why, said)
        self.record.write()

    def _could_not(self, what: str, why: str | None, said: str) -> None:
        why = self._reason(why)
        if why == OUT_OF_TIME:
            self._leave_out(what)
            return
        say(f"{what}: {why}: {said[-500:]}")
        self.run.setdefault("errors", []).append({"what": what, "error": f"{why}\n{last_words(said, before=1000)}"})
        self.failed = True

    def _run_tests(self, item: Selection, seconds: float) -> None:
        if missing := [name for name in item.needs if name in self.missing]:
            say(f"tests, {item.name}: not installed: {', '.join(missing)}")
            return
        card = self._card or self.size.device
        tests = self.record.content["tests"].setdefault(card, {}).setdefault(item.name, {"known": {}})
        limit = None if seconds == float("inf") else seconds
        result = run_tests(item, tests["known"], limit, self.record.write)
        tests.update(result, run=len(self.record.runs) - 1)
        self.record.write()
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result["outcomes"].items())) or "none ran"
        say(f"tests, {item.name}: {counts}")
        for test, facts in tests["known"].items():
            if facts["outcome"] == "failed":
                say(f"   FAILED {test}: {' '.join(facts.get('error', '').split())[-200:]}")
        for problem in result.get("problems", ()):
            say(f"   tests could not be run: {' '.join(problem.split())[-300:]}")
        if result["left_out"]:
            self._leave_out(f"{result['left_out']} tests of {item.name}")
        self.failed |= bool(result["outcomes"].get("failed") or result.get("problems"))

    def _run_recipe(self, item: RecipeRun, seconds: float) -> None:
        limit = None if seconds == float("inf") else seconds
        card = self.run["environment"].get("device_memory_bytes")
        result = run_recipe(item, self.size.device, limit, self.missing, card)
        if result["status"] == OUT_OF_TIME and (why := self._reason(OUT_OF_TIME)) != OUT_OF_TIME:
            result |= {"status": "error", "error": f"{why}\n{result['error']}"}
        if result["status"] == OUT_OF_TIME:
            self._leave_out(item.name)
            return
        entry = {"name": item.name, "run": len(self.record.runs) - 1, **result}
        kept = [e for e in self.record.content["recipes"] if e["name"] != item.name or not self._is_here(e)]
        self.record.content["recipes"] = [*kept, entry]
        self.record.write()
        speed = f", {result['tokens_per_second']:.0f} tok/s" if "tokens_per_second" in result else ""
        words = " ".join(result.get("error", "").split())
        said = "" if result["status"] == "ok" else f": {words[:100]} … {words[-300:]}"
        say(f"recipe {item.name}: {result['status']}, {result.get('steps', 0)} steps{speed}{said}")
        self.failed |= result["status"] == "error"


def child_command(job: Job) -> list[str]:
    """The program that does a job."""
    return [sys.executable, "-m", "gpu.child", json.dumps(vars(job))]


def trace_line(result: dict[str, Any]) -> str:
    """Where the trace is, or why there is none."""
    return result.get("trace") or f"{result['status']}: {result.get('error', '')}"


def is_finding(item: Item) -> bool:
    """Whether an item is wanted for itself, and not only to compare others with."""
    return item.name != "rates" and not is_compute_alone(item.name)


def say(text: str) -> None:
    print(text, flush=True)

"""Everything that this project claims about a GPU, measured on one: three commands of ten minutes.

    python scripts/gpu_suite.py                     # prints the plan: the commands, and what they have measured already
    python scripts/gpu_suite.py --part a            # is it right?  tests on the accelerator, and the recipes
    python scripts/gpu_suite.py --part b            # what does it cost?  a 7B model on the whole card
    python scripts/gpu_suite.py --part c            # does it fit?  that and the recipes, on cards of 16 and 24 GB
    python scripts/gpu_suite.py --report            # writes the tables of README and docs/planning.md from the record

    python scripts/gpu_suite.py --part b --device cpu --model tiny         # rehearses a command without a GPU
    python scripts/gpu_suite.py --part a --only sanitizer                  # some of a part
    python scripts/gpu_suite.py --only 'packed.*' --tokens 1024 --memory whole 16    # any cases; --list names them
    python scripts/gpu_suite.py --trace packed-stream-in-backward+model --tokens 4096    # Chrome trace of three steps

Each command compiles what it measures, ends within its time, and goes on where it ended when it is given again: what
is in the record is not measured again. It changes nothing on the machine but the record and outputs/gpu_suite. Each
case has a process of its own, and results are in the record as soon as they are there.

step_seconds         median time between the ends of consecutive steps on the compute stream
exposed_seconds      step_seconds beyond those of `none`: forward and backward alone, gradients dropped at once, before
                     and after everything else; `drift` of a run tells how far the two are apart
bound_seconds        the longer of `none` and what the case has to move over the link, at its measured speed with
                     both directions busy
same_losses          with the case of the same arithmetic whose states are resident, to the last bit

Held to N GB, the process gets what a card of that size would leave it beside the CUDA context. What the driver pages
(bitsandbytes) has the whole card or does not run: more managed memory than the card has free can hang it.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT / "scripts", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # a checkout need not be installed

import torch  # noqa: E402
from gpu import parts, planned, report  # noqa: E402
from gpu.cases import cases  # noqa: E402
from gpu.machine import git_commit  # noqa: E402
from gpu.measure import Job  # noqa: E402
from gpu.model import SEQUENCE, SHAPES  # noqa: E402
from gpu.processes import leave_no_cores  # noqa: E402
from gpu.record import Record  # noqa: E402
from gpu.suite import Suite  # noqa: E402

RECORDED = ROOT / "scripts" / "results" / "gpu_suite.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_argument_group("what to do")
    what.add_argument("--part", choices=sorted(parts.PARTS), help="run a part of the plan")
    what.add_argument("--only", help="regular expression over whole names: of a part's items, else of all cases")
    what.add_argument("--trace", metavar="CASE", help="write a Chrome trace of this case instead of measuring")
    what.add_argument("--report", action="store_true", help="write the pages' tables from the record, and print them")
    what.add_argument("--list", action="store_true", help="print the names of all cases")
    how = parser.add_argument_group("how")
    how.add_argument("--tokens", type=int, nargs="+", help="per step; a part has its own")
    how.add_argument("--memory", nargs="+", default=["whole"], help="with --only alone: GB to hold to, or `whole`")
    how.add_argument("--steps", type=int, default=5, help="steps that are timed")
    how.add_argument("--model", choices=sorted(SHAPES), help="default: 7b, on a CPU tiny")
    how.add_argument("--layers", type=int, help="fewer layers than the model has, to save time")
    how.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    how.add_argument("--allocator", default="", help="with --only alone: PYTORCH_CUDA_ALLOC_CONF of each case")
    how.add_argument("--budget-seconds", type=float, help=f"default: {parts.BUDGET_SECONDS:.0f} for a part, else none")
    how.add_argument("--commit", help="of this checkout, where there is no repository to ask")
    where = parser.add_argument_group("where")
    where.add_argument("--output", type=Path, default=RECORDED, help="the record")
    where.add_argument("--mirror", type=Path, help="folder that gets a copy of each version of the record")
    where.add_argument("--fresh", action="store_true", help="discard what the record has")
    options = parser.parse_args(arguments)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As a shell starts what it runs in the background, and as the recipes would inherit it, which it ends.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    leave_no_cores()
    if options.list:
        print("\n".join(case.name for case in cases()))
        return 0
    if options.report:
        return write_report(options.output)
    if not (options.part or options.only or options.trace):
        print(plan(Record(options.output), options.output))
        return 0
    check(parser, options)
    model = options.model or ("tiny" if options.device == "cpu" else "7b")
    size = parts.size_of(options.device, model, options.tokens)
    items = chosen_items(parser, options, size)
    record = Record(options.output, fresh=options.fresh, mirror=options.mirror)
    budget = options.budget_seconds
    if budget is None and options.part:
        budget = parts.BUDGET_SECONDS
    suite = Suite(record, size, budget=budget, layers=options.layers, steps=options.steps, commit=options.commit)
    if options.trace:
        path = options.output.parent / f"trace-{options.trace}-{model}-{size.whole[0]}.json.gz"
        job = Job(options.trace, options.device, model, options.layers, [size.whole[0]], trace=str(path))
        return suite.trace(job)
    return suite.run_all(items, options.part)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what cannot be run."""
    if any(tokens > SEQUENCE and tokens % SEQUENCE for tokens in options.tokens or ()):
        parser.error(f"--tokens: above {SEQUENCE}, give a multiple of it")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --model tiny rehearses a command")
    if options.trace and options.trace not in {case.name for case in cases()}:
        parser.error(f"--trace: no case is called {options.trace!r}; --list prints their names")


def chosen_items(parser: argparse.ArgumentParser, options: argparse.Namespace, size: parts.Size) -> list[parts.Item]:
    """Of a part, or cases."""
    if options.trace:
        return []
    pattern = re.compile(options.only or ".*")
    items: list[parts.Item]
    if options.part:
        # Without what comparisons need, a choice would be worth little.
        items = [
            item
            for item in parts.PARTS[options.part](size)
            if pattern.fullmatch(item.name) or (is_comparison(item) and options.part != "a")
        ]
        if not any(pattern.fullmatch(item.name) for item in items):
            parser.error(f"--only: nothing in part {options.part} matches {pattern.pattern!r}")
        return items
    names = [case.name for case in cases() if pattern.fullmatch(case.name)]
    if not names:
        parser.error(f"--only: no case matches {pattern.pattern!r}; --list prints their names")
    limits = [None if limit == "whole" or options.device == "cpu" else float(limit) for limit in options.memory]
    tokens = size.whole
    return [
        parts.MachineItem("rates"),
        *(parts.CaseItem(name, tokens, limit, options.allocator) for limit in limits for name in names),
    ]


def is_comparison(item: parts.Item) -> bool:
    """Whether other items' results are compared with it."""
    return item.name in ("rates", "none", "none-again")


# The plan and the report


def plan(record: Record, path: Path) -> str:
    """The commands, what each measures, and what the record has of it."""
    size = parts.size_of("cuda", "7b", None)
    commit = git_commit()
    lines = [
        "Three commands, each within ten minutes, in this order; each goes on where it ended if it is repeated.",
        "",
    ]
    for name, part in parts.PARTS.items():
        title = next(line for line in (parts.__doc__ or "").splitlines() if line.startswith(f"{name}  "))
        command = ["python", "scripts/gpu_suite.py", "--part", name]
        if path != RECORDED:
            command += ["--output", str(path)]
        if commit:
            command += ["--commit", commit.split()[0][:12]]
        lines += [f"    {shlex.join(command)}", f"        {title[3:].strip()}"]
        items = part(size)
        for item in items:
            lines.append(f"        {told(item):72s} {state(item, record.content)}")
        lines.append(f"        about {sum(map(parts.seconds_expected, items)):.0f} s")
        lines.append("")
    lines.append(
        "--mirror DIR writes a copy of the record to another folder as well, such as one that is fetched from the"
    )
    lines.append("machine. Rehearse each command with --device cpu --model tiny. The record: " + str(path))
    return "\n".join(lines)


def told(item: parts.Item) -> str:
    """An item in words."""
    if isinstance(item, parts.CaseItem):
        limit = "" if item.memory_gib is None else f", held to {item.memory_gib:g} GB"
        settings = f", {item.allocator}" if item.allocator else ""
        return f"{item.name}, {' and '.join(map(str, item.tokens))} tokens{limit}{settings}"
    if isinstance(item, parts.Selection):
        return f"tests: {item.name}"
    if isinstance(item, parts.RecipeRun):
        limit = "" if item.memory_gib is None else f", held to {item.memory_gib:g} GB"
        return f"recipe: {item.name}, {item.steps} steps{limit}"
    return item.name


def state(item: parts.Item, content: dict[str, Any]) -> str:
    """What the record has about an item on a GPU."""
    runs = content["runs"]
    cards = {index for index, run in enumerate(runs) if run["environment"].get("card")}
    if isinstance(item, parts.CaseItem):
        wanted = (item.name, item.memory_gib, item.allocator)
        found = [
            f"{result['tokens']}: {result['status']}"
            for result in content["results"]
            if result["run"] in cards
            and (result["case"], result["memory_gib"], result.get("allocator", "")) == wanted
            and result["tokens"] in item.tokens
        ]
        return ", ".join(found) or report.NOTHING
    if isinstance(item, parts.Selection):
        tests = [found[item.name] for card, found in content["tests"].items() if card != "cpu" and item.name in found]
        counts = tests[-1].get("outcomes", {}) if tests else {}
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or report.NOTHING
    if isinstance(item, parts.RecipeRun):
        found = [
            entry["status"] for entry in content["recipes"] if entry["name"] == item.name and entry["run"] in cards
        ]
        return ", ".join(found) or report.NOTHING
    key = {"page-locking": "page_locking"}.get(item.name, item.name)
    return "measured" if any(key in runs[index] for index in cards) else report.NOTHING


def write_report(path: Path) -> int:
    """Into README and docs/planning.md, from the record or from nothing."""
    record = Record(path)
    content = record.content
    rows = planned.compare(content)
    if rows:
        content["planned"] = rows
        record.write()
    print(report.report(content))
    print(planned.table(rows))
    try:
        report.write_into_readme(content)
        planned.write_into_page(rows)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which families of transformers are trained, from the tests that show it; writes the record and the table of
docs/models.md.

python scripts/families.py                    # runs the tests (a quarter of an hour on an idle core)
python scripts/families.py --page             # writes the page from the record
python scripts/families.py --report junit.xml # of a run of the tests with -m "slow or not slow"
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages import MODELS, ROOT, write_table
from study import RESULTS, description

BEGIN = "<!-- scripts/families.py writes this table -->\n"
END = "<!-- end of the table -->"
RECORD = RESULTS / "families.json"
TESTS = ROOT / "tests" / "models" / "huggingface" / "test_families.py"
REFUSED = "test_what_cannot_be_trained_is_one_line"
SHOWS = {
    "test_the_fused_loss_is_that_of_the_whole_model": "fused loss",
    "test_training_equals_plain_adamw-stream": "streamed in backward",
    "test_training_equals_plain_adamw-host": "on the host, accumulated",
    "test_training_on_the_simulated_accelerator_equals_plain_adamw-": "on the simulated accelerator",
    "test_a_saved_model_has_the_original_names_and_gives_the_same_logits": "saved and opened again",
    "test_a_resumed_run_ends_bit_for_bit_as_an_unbroken_one": "resumed",
}
SKIPPED = "whole logits"


def read(reports: Sequence[Path]) -> dict[str, Any]:
    """What held by family (``yes``, ``no``, or :data:`SKIPPED`), and what was refused how; later reports count."""
    families: dict[str, dict[str, str]] = {}
    refused: dict[str, str] = {}
    cases = {
        str(case.get("name")): case
        for report in reports
        for case in ElementTree.parse(report).getroot().iter("testcase")
    }
    for name_of_case, case in cases.items():
        test, _, parameters = name_of_case.partition("[")
        family, strategy = parameters.removesuffix("]"), ""
        for ending in ("stream", "host"):
            if family.endswith(f"-{ending}"):
                family, strategy = family.removesuffix(f"-{ending}"), ending
        outcomes = {child.tag for child in case}
        held = SKIPPED if "skipped" in outcomes else "no" if outcomes & {"failure", "error"} else "yes"
        if test == REFUSED and held == "yes":
            refused[family] = str(next(case.iter("property")).get("value"))
        for name, shown in SHOWS.items():
            if name in (test, f"{test}-{strategy}") or (strategy and name == f"{test}-"):
                row = families.setdefault(family, {})
                row[shown] = held if row.get(shown, "yes") == "yes" else row[shown]
    return {"families": dict(sorted(families.items())), "refused": dict(sorted(refused.items()))}


def page(record: dict[str, Any]) -> str:
    """Markdown: families with the same outcomes in one row, and what is refused."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for family, held in record["families"].items():
        rows.setdefault(tuple(held.get(shown, "no") for shown in SHOWS.values()), []).append(family)
    exact = sum(len(names) for held, names in rows.items() if "no" not in held)
    tried = len(record["families"]) + len(record["refused"])
    lines = [
        f"{tried} families tried with transformers {record['versions']['transformers']}: {exact} trained exactly, "
        f"{len(record['refused'])} refused with the reason.\n",
        "| families | " + " | ".join(SHOWS.values()) + " |",
        "|---|" + "---|" * len(SHOWS),
    ]
    for held, names in sorted(rows.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {', '.join(names)} | " + " | ".join(held) + " |")
    lines += ["", "| refused | because |", "|---|---|"]
    lines += [f"| {family} | {says} |" for family, says in record["refused"].items()]
    return "\n".join(lines) + "\n"


def run_tests(report: Path) -> None:
    options = ["-q", "-n", "0", "-m", "slow or not slow", f"--junit-xml={report}"]
    subprocess.run([sys.executable, "-m", "pytest", *options, str(TESTS)], cwd=ROOT, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page from the record alone")
    parser.add_argument("--report", type=Path, nargs="+", help="reports of the tests, instead of running them")
    arguments = parser.parse_args()
    if not arguments.page:
        with tempfile.TemporaryDirectory() as folder:
            reports = arguments.report or [Path(folder) / "report.xml"]
            if arguments.report is None:
                run_tests(*reports)
            found = read(reports)
        about = description("families of transformers", "python scripts/families.py", "transformers", "peft")
        RECORD.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")
    text = page(json.loads(RECORD.read_text(encoding="utf-8")))
    print(text)
    write_table(text, BEGIN, END, MODELS)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which families of transformers are trained, from the tests that show it; writes the table of docs/models.md.

python scripts/families.py            # runs the tests (half a minute) and updates the page
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from pages import MODELS, ROOT, write_table

BEGIN = "<!-- scripts/families.py writes this table -->\n"
END = "<!-- end of the table -->"
TESTS = ROOT / "tests" / "models" / "huggingface" / "test_families.py"
SHOWS = {
    "test_the_fused_loss_is_that_of_the_whole_model": "fused loss",
    "test_training_equals_plain_adamw-stream": "streamed in backward",
    "test_training_equals_plain_adamw-host": "on the host, accumulated",
    "test_a_saved_model_has_the_original_names_and_gives_the_same_logits": "saved and opened again",
}


def outcomes(report: Path) -> dict[str, dict[str, bool]]:
    """By family and by what is shown: whether it held."""
    found: dict[str, dict[str, bool]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        test, _, parameters = str(case.get("name")).partition("[")
        family, _, strategy = parameters.rstrip("]").partition("-")
        name = SHOWS.get(f"{test}-{strategy}" if strategy else test)
        if name is not None:
            found.setdefault(family, {})[name] = len(case) == 0
    return found


def table(found: dict[str, dict[str, bool]]) -> str:
    """Markdown: a row for each family."""
    lines = ["| family | " + " | ".join(SHOWS.values()) + " |", "|---|" + "---|" * len(SHOWS)]
    for family, held in sorted(found.items()):
        lines.append(f"| {family} | " + " | ".join("yes" if held.get(name) else "no" for name in SHOWS.values()) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-m",
            "not slow",
            str(TESTS),
            f"--junit-xml={report}",
        ]
        subprocess.run(command, cwd=ROOT, check=False)
        text = table(outcomes(report))
    print(text)
    write_table(text, BEGIN, END, MODELS)
    return 0


if __name__ == "__main__":
    sys.exit(main())

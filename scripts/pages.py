"""Tables that scripts write into README and the pages of docs/, between a line that names the script and one that ends
the table."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
STRATEGIES = ROOT / "docs" / "strategies.md"
ADAMW = ROOT / "docs" / "adamw.md"
MODELS = ROOT / "docs" / "models.md"
DISTRIBUTED = ROOT / "docs" / "distributed.md"
PLANNING = ROOT / "docs" / "planning.md"


def write_table(text: str, begin: str, end: str, page: Path) -> None:
    """Replace what is between the markers.

    Raises:
        ValueError: the markers are not there.
    """
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(
            f"{page} has no place for the table: put {begin.strip()} and {end.strip()} on lines of their own"
        )
    page.write_text(before + begin + text + end + after, encoding="utf-8")

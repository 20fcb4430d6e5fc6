"""Tables that scripts write into README, between a line that names the script and one that ends the table."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def write_table(text: str, begin: str, end: str, readme: Path = README) -> None:
    """Replace what is between the markers.

    Raises:
        ValueError: the markers are not there.
    """
    before, found, rest = readme.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(
            f"{readme} has no place for the table: put {begin.strip()} and {end.strip()} on lines of their own"
        )
    readme.write_text(before + begin + text + end + after, encoding="utf-8")

"""``tune compare``: runs beside each other, in the terminal, as a page and as a picture; offline."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from offload.errors import UserError
from offload.paths import with_home


def add_parser(commands: Any) -> None:
    """Adds ``compare`` to the sub-commands of an argparse parser."""
    parser = commands.add_parser(
        "compare",
        help="lay runs beside each other",
        description="Compares runs by what they left in their output_dir: speed, where a step's time goes, memory, "
        "loss at equal tokens, what differs in their configurations, and of those that were profiled "
        "(profiler.enabled=True) the time that training waited for each unit. Prints a table and writes a page with "
        "their curves (one HTML file that needs no network) and, where matplotlib is installed, a picture.",
        epilog="example: tune compare outputs/adamw outputs/packed",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's output_dir or its metrics.jsonl")
    parser.add_argument("--out", type=Path, help="where page and picture go, without suffix (default: `compared` "
                        "beside the first run's folder)")  # fmt: skip
    parser.add_argument("--title", help="of page and picture (default: the page's is the runs' folders)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, and write no files")
    parser.set_defaults(execute=_compare)


def _compare(args: argparse.Namespace) -> int:
    from offload.comparison import profiles, table
    from offload.comparison.runs import read_runs

    runs = read_runs(args.runs)
    accounts, notes = profiles.accounts(runs)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    lines = [*table.lines(runs), *profiles.lines(accounts), *table.differences(runs)]
    if args.json:
        print(table.as_json(lines, runs))
        return 0
    out = Path(with_home(args.out, "--out")) if args.out else runs[0].folder.resolve().parent / "compared"
    told: list[str] = []
    failed: UserError | None = None
    try:  # first, as a reader may leave in the middle of the table
        out.parent.mkdir(parents=True, exist_ok=True)
        told = _write(runs, lines, accounts, out, args.title)
    except OSError as error:
        failed = UserError(f"--out: cannot write {out}: {error.strerror or error}")
    width = shutil.get_terminal_size((120, 0)).columns if sys.stdout.isatty() else 10_000
    print(table.render(lines, runs, width))
    print("\n".join(["", *told]))
    if failed is not None:
        raise failed
    return 0


def _write(runs: Any, lines: Any, accounts: Any, out: Path, title: str | None) -> list[str]:
    """Write the page and the picture; returns what to tell of them."""
    from offload.comparison.page import render_page
    from offload.metrics.progress import from_here

    page = _with_suffix(out, ".html")
    names = ", ".join(dict.fromkeys(run.folder.resolve().name for run in runs))
    # A folder's name may be no text in UTF-8.
    page.write_text(render_page(runs, lines, title or names, accounts), encoding="utf-8", errors="replace")
    told = [f"page     {from_here(page)}"]
    try:
        import matplotlib
    except ImportError:
        return [*told, "picture  needs matplotlib: pip install matplotlib"]
    matplotlib.use("Agg")
    from offload.comparison import picture

    target = _with_suffix(out, ".png")
    picture.draw_several(runs, target, title, accounts)
    return [*told, f"picture  {from_here(target)}"]


def _with_suffix(path: Path, suffix: str) -> Path:
    """``compared.html`` for ``compared``, ``compared.html`` and ``compared.png`` alike; ``lr1.5`` keeps its dot."""
    base = path.with_suffix("") if path.suffix in (".html", ".png") else path
    return base.with_name(base.name + suffix)

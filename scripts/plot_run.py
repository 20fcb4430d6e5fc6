"""Draws a run's loss, speed and memory from its metrics.jsonl, or several runs on top of each other.

python scripts/plot_run.py outputs/quickstart                       # writes outputs/quickstart/run.png
python scripts/plot_run.py outputs/quickstart --out docs/run.png
python scripts/plot_run.py outputs/a outputs/b outputs/c            # writes outputs/compared.png

Runs are named by the label in their run.json (the optimizer), and by their folder where two have the same.
`tune compare` says the same in numbers and makes a page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from offload.comparison.runs import read_runs
from offload.errors import UserError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="a run's output_dir or its metrics.jsonl")
    parser.add_argument("--out", type=Path, help="PNG to write; default: run.png in the folder of one run, "
                        "compared.png beside the first of several")  # fmt: skip
    parser.add_argument("--title", help="default: the name of the folder of one run, none for several")
    arguments = parser.parse_args(argv)
    try:
        import matplotlib
    except ImportError:
        print("error: pictures need matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    matplotlib.use("Agg")
    from offload.comparison import picture

    try:
        runs = read_runs(arguments.runs)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    is_one = len(runs) == 1
    first = runs[0].folder
    out = arguments.out or (first / "run.png" if is_one else first.resolve().parent / "compared.png")
    out.parent.mkdir(parents=True, exist_ok=True)
    if is_one:
        picture.draw_one(runs[0], out, arguments.title or first.resolve().name)
    else:
        picture.draw_several(runs, out, arguments.title)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes a wandb workspace with the panels of `tune compare`: a saved view of the project, for everybody who may see it.

python scripts/wandb_workspace.py --entity ME                  # of the project tune-offload; prints its address
python scripts/wandb_workspace.py --entity ME --print          # the view as JSON; asks no server

Needs `pip install wandb-workspaces` and, unless it only prints, a key (`wandb login`). Runs are grouped by their label,
the optimizer, with --group.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from offload.metrics.wandb_logger import PROJECT

TOKENS = "tokens_seen"
# By section: title, what the curve is over, the logged keys.
CURVES: dict[str, list[tuple[str, str, list[str]]]] = {
    "Loss": [
        ("Training loss by tokens", TOKENS, ["loss"]),
        ("Held-out loss by tokens", TOKENS, ["evaluation/loss"]),
        ("Training loss by step", "Step", ["loss"]),
        ("Held-out loss by step", "Step", ["evaluation/loss"]),
        ("Gradient norm", "Step", ["grad_norm"]),
        ("Learning rate", "Step", ["lr"]),
    ],
    "Speed": [
        ("Tokens per second", TOKENS, ["tokens_per_second"]),
        ("Trained tokens per second", TOKENS, ["trained_tokens_per_second"]),
        ("Seconds of a log by phase", "Step", ["time/data", "time/forward_backward", "time/optimizer"]),
        ("Seconds beside training", "Step", ["time/evaluation", "time/checkpoint"]),
    ],
    "Memory (GiB)": [
        ("Device, peak allocated", "Step", ["memory/device_peak_allocated_gib"]),
        ("Device, peak reserved", "Step", ["memory/device_peak_reserved_gib"]),
        ("Host, peak resident", "Step", ["memory/host_rss_peak_gib"]),
        ("Host, page-locked", "Step", ["memory/host_pinned_gib"]),
    ],
}
# What remains of a run at its end, a bar for each run.
BARS = [
    ("Median tokens per second", "summary/tokens_per_second"),
    ("Final held-out loss", "summary/evaluation_loss_final"),
    ("Device, peak reserved (GiB)", "summary/device_peak_reserved_gib"),
    ("Host, peak resident (GiB)", "summary/host_rss_peak_gib"),
]


def workspace(entity: str, project: str, name: str, group: bool) -> Any:
    """The view, not saved yet (``wandb_workspaces.workspaces.Workspace``)."""
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports.v2 import BarPlot, LinePlot, SummaryMetric

    sections = [
        workspaces.Section(
            "Runs", panels=[BarPlot(title=title, metrics=[SummaryMetric(key)]) for title, key in BARS], is_open=True
        )
    ]
    for section, curves in CURVES.items():
        panels = [LinePlot(title=title, x=over, y=list(keys), title_x="tokens" if over == TOKENS else "step")
                  for title, over, keys in curves]  # fmt: skip
        sections.append(workspaces.Section(section, panels=panels, is_open=True))
    runs = workspaces.RunsetSettings(groupby=[workspaces.Config("label")] if group else [])
    return workspaces.Workspace(entity, project, name=name, sections=sections, runset_settings=runs)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entity", required=True, help="user or team that the project belongs to")
    parser.add_argument("--project", default=PROJECT, help="default: %(default)s")
    parser.add_argument("--name", default="Compare optimizers", help="of the view; default: %(default)s")
    parser.add_argument("--group", action="store_true", help="group runs by their label, which tells the optimizer")
    parser.add_argument("--print", action="store_true", help="print the view as JSON and ask no server")
    arguments = parser.parse_args(argv)
    try:
        view = workspace(arguments.entity, arguments.project, arguments.name, arguments.group)
    except ImportError:
        print("error: views need wandb-workspaces: pip install wandb-workspaces", file=sys.stderr)
        return 2
    if arguments.print:
        print(view._to_model().model_dump_json(by_alias=True, indent=2))
        return 0
    try:
        view.save()
    except Exception as error:  # of wandb's client, its HTTP library or the server's answer
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"error: the view was not saved: {text}; is there a key (`wandb login`), and the project "
              f"{arguments.entity}/{arguments.project}?", file=sys.stderr)  # fmt: skip
        return 2
    print(view.url)
    return 0


if __name__ == "__main__":
    sys.exit(main())

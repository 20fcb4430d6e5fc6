"""What a comparison says in numbers: speed with its spread, where a step's time goes, memory, loss at equal tokens, and
only what differs in configuration and machine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.checkpoints.output_lock import is_left
from offload.comparison.runs import Run
from offload.host_memory import kernel_killed, oom_kills
from offload.metrics.progress import duration
from offload.metrics.run_summary import summarise

# Of the tokens that all runs have seen, the share at the end over which the training loss is averaged.
LAST_SHARE = 0.05
# They name a run and do not tell what it did.
NAMES_OF_A_RUN = ("output_dir", "metric_logger.name", "metric_logger.run_id", "resume_from_checkpoint")

# Characters of a value in the text table.
LONGEST = 40

Value = float | str | None

PHASES = {"data": "data", "forward_backward": "forward, backward", "optimizer": "optimizer", "rest": "rest"}
TIME: dict[str, Callable[[float], str]] = {"ms": lambda value: f"{value:.1f}", "s": lambda value: f"{value:.2f}"}
"""How times of a step are written, by their unit."""
PEAKS = {
    "device_peak_active_gib": "device, active",
    "device_peak_allocated_gib": "device, allocated",
    "device_peak_reserved_gib": "device, reserved",
    "host_rss_peak_gib": "host, resident",
    "host_pinned_gib": "host, page-locked",
}


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        section: the heading that it stands under.
        name: what the numbers are.
        values: of each run, None where it is not known or nothing.
        text: how a number is written.
        ratio: whether each run's is also written as a multiple of the first one's.
    """

    section: str
    name: str
    values: list[Value]
    text: Callable[[float], str] = lambda value: f"{value:,.0f}"
    ratio: bool = False

    def cells(self) -> list[str]:
        """The values as the table shows them."""
        cells = []
        first = self.values[0]
        for index, value in enumerate(self.values):
            cell = "–" if value is None else value if isinstance(value, str) else self.text(value)
            if index and self.ratio and isinstance(value, float | int) and isinstance(first, float | int) and first:
                cell += f" ({value / first:.2f}x)"
            cells.append(cell)
        return cells


def lines(runs: Sequence[Run]) -> list[Line]:
    """The table: a value of each line for each run. Lines that no run has a value for are left out."""
    summaries = [summarise(run.rows) for run in runs]
    steps = [step_times(run) for run in runs]
    common = _common_tokens(runs)
    unit, factor = unit_of_time(max((step["whole"] for step in steps if step), default=1.0))
    steps = [{phase: factor * seconds for phase, seconds in step.items()} for step in steps]

    def per_run(name: str) -> list[Value]:
        return [summary.get(name) for summary in summaries]

    found = [
        Line("run", "status", [_status(run) for run in runs]),
        Line("run", "steps", per_run("steps")),
        Line("run", "tokens", per_run("tokens")),
        Line("run", "training time", [run.training_seconds[-1] or None for run in runs], duration),
        Line("speed", "tokens per second", per_run("tokens_per_second"), ratio=True),
        Line("speed", "  half of the lines", [_quartiles(run) for run in runs]),
        Line("speed", "trained tokens per second", per_run("trained_tokens_per_second"), ratio=True),
        Line("speed", "model FLOPS utilisation", per_run("mfu"), lambda value: f"{value:.1%}"),
        Line(f"time of a step ({unit})", "whole", [step.get("whole") for step in steps], TIME[unit], ratio=True),
        *(
            Line(f"time of a step ({unit})", f"  {words}", [step.get(phase) for step in steps], TIME[unit])
            for phase, words in PHASES.items()
        ),
        Line("beside training", "evaluations", per_run("seconds_evaluation"), duration),
        Line("beside training", "checkpoints", per_run("seconds_checkpoint"), duration),
        Line("beside training", "profiler", per_run("seconds_profile"), duration),
        *(
            Line("peak memory (GiB)", words, per_run(key), lambda value: f"{value:.2f}", ratio=True)
            for key, words in PEAKS.items()
        ),
    ]
    if common:
        section = f"loss at {common:,} tokens"
        found += [
            Line(section, "training", [loss_at(run, common) for run in runs], _loss),
            Line(section, "held out", [evaluation_at(run, common) for run in runs], _loss),
        ]
    found += [
        Line("loss of the whole run", "training, last", per_run("loss_final"), _loss),
        Line("loss of the whole run", "held out, last", per_run("evaluation_loss_final"), _loss),
        Line("loss of the whole run", "held out, least", per_run("evaluation_loss_best"), _loss),
    ]
    return [line for line in found if any(value not in (None, 0) for value in line.values)]


def differences(runs: Sequence[Run]) -> list[Line]:
    """What differs in configuration and machine, a line for each key; what a run does not have is ``–``."""
    found = []
    for section, key, leave_out in (("configuration", "config", NAMES_OF_A_RUN), ("machine", "environment", ())):
        flat = [_flat(run.record.get(key) or {}) for run in runs]
        if not all(flat):  # of a run without a record nothing is known, and that is no difference
            continue
        for name in dict.fromkeys(name for each in flat for name in each):
            # What lies in a run's own folder is no difference.
            values = [_under(each.get(name), each.get("output_dir")) for each in flat]
            if name not in leave_out and len(set(values)) > 1:
                found.append(Line(section, name, list(values)))
    return found


def render(table: Sequence[Line], runs: Sequence[Run], width: int) -> str:
    """The table as text, runs as columns A, B, ...; where these do not fit ``width`` characters, in several parts."""
    letters = [letter_of(index) for index in range(len(runs))]
    columns = [[f"  {line.name}" for line in table]]
    columns += [[_shortened(cell) for cell in cells] for cells in zip(*(line.cells() for line in table), strict=True)]
    widths = [max(map(len, [*column, letter])) for column, letter in zip(columns, ["", *letters], strict=True)]
    widths[0] = max(widths[0], *(len(line.section) for line in table))
    parts: list[list[int]] = [[]]
    for index in range(1, len(columns)):
        if parts[-1] and widths[0] + sum(2 + widths[each] for each in [*parts[-1], index]) > width:
            parts.append([])
        parts[-1].append(index)
    out = [f"{letter}  {run.label}  ({run.folder})" for letter, run in zip(letters, runs, strict=True)]
    for part in parts:
        section = None
        for row, line in enumerate(table):
            if line.section != section:
                section = line.section
                heads = [f"{letters[index - 1]:>{widths[index]}}" for index in part]
                out += ["", "  ".join([f"{section:<{widths[0]}}", *heads])]
            cells = [f"{columns[index][row]:>{widths[index]}}" for index in part]
            out.append("  ".join([f"{columns[0][row]:<{widths[0]}}", *cells]))
    return "\n".join(out)


def letter_of(index: int) -> str:
    """A, B, ..., Z, A2, B2, ..."""
    turn, place = divmod(index, 26)
    return chr(ord("A") + place) + (str(turn + 1) if turn else "")


def as_json(table: Sequence[Line], runs: Sequence[Run]) -> str:
    """The table as one JSON object: ``runs``, and by section and name the value of each run."""
    content: dict[str, Any] = {
        "runs": [{"label": run.label, "folder": str(run.folder)} for run in runs],
    }
    for line in table:
        content.setdefault(line.section, {})[line.name.strip()] = line.values
    return json.dumps(content, indent=2)


def loss_at(run: Run, tokens: int) -> float | None:
    """Mean training loss of the lines in the last twentieth before so many tokens, of the last line at least."""
    pairs = list(zip(*run.column("loss", "tokens_seen"), strict=True))
    before = [(seen, loss) for seen, loss in pairs if seen <= tokens]
    late = [loss for seen, loss in before if seen > (1 - LAST_SHARE) * tokens] or [loss for _, loss in before[-1:]]
    return statistics.fmean(late) if late else None


def evaluation_at(run: Run, tokens: int) -> float | None:
    """The last held-out loss at or before so many tokens."""
    pairs = zip(*run.column("evaluation/loss", "tokens_seen"), strict=True)
    return next((loss for seen, loss in reversed(list(pairs)) if seen <= tokens), None)


def step_times(run: Run) -> dict[str, float]:
    """Seconds per step of each of :data:`PHASES` and ``whole``; empty where the lines do not tell.

    The first line, which holds warming up, is left out.
    """
    rows, first = (run.rows[1:], run.rows[0]["step"]) if len(run.rows) > 1 else (run.rows, 0)
    count = run.rows[-1]["step"] - first
    whole = run.training_seconds[-1] - (run.training_seconds[0] if len(run.rows) > 1 else 0.0)
    if count <= 0 or whole <= 0:
        return {}
    times = {phase: sum(row.get(f"time/{phase}") or 0.0 for row in rows) / count for phase in list(PHASES)[:-1]}
    return {**times, "rest": max(0.0, whole / count - sum(times.values())), "whole": whole / count}


def _common_tokens(runs: Iterable[Run]) -> int:
    return int(min(max(run.column("tokens_seen")[1], default=0) for run in runs))


def _quartiles(run: Run) -> str | None:
    rates = run.column("tokens_per_second")[1][1:]
    if len(rates) < 4:
        return None
    low, _, high = statistics.quantiles(rates, n=4)
    return f"{low:,.0f} to {high:,.0f}"


def _status(run: Run) -> str | None:
    status = run.record.get("status")
    resumed = run.record.get("resumed_from_step")
    if status == "running" and is_left(run.folder):
        is_short = kernel_killed(run.record.get("oom_kills"), oom_kills())
        status = "killed, out of host memory" if is_short else "killed"
    return f"{status}, resumed from step {resumed}" if status and resumed else status


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A configuration by dotted keys, values as YAML writes them, text without quotes."""
    found: dict[str, str] = {}
    for key, each in value.items():
        if isinstance(each, Mapping) and each:
            found |= _flat(each, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = each if isinstance(each, str) else json.dumps(each)
    return found


def _under(value: str | None, folder: str | None) -> str | None:
    return value.replace(folder, "<output_dir>") if value and folder else value


def _shortened(cell: str) -> str:
    """A long value by its end: what tells two paths apart."""
    return cell if len(cell) <= LONGEST else f"…{cell[1 - LONGEST :]}"


def _loss(value: float) -> str:
    return f"{value:.4f}"


def unit_of_time(longest: float) -> tuple[str, float]:
    """What times of a step are told in, and how many of it are a second: a step takes fractions of a second on the
    tiny models and minutes on large ones."""
    return ("ms", 1e3) if longest < 1 else ("s", 1.0)

"""What a run shows while it runs and when it ends: a progress bar, plain lines, the summary."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from offload.metrics.log import read_metrics
from offload.metrics.run_summary import summarise


class Progress:
    """Steps done, loss, tokens per second, memory, time left.

    On a terminal this is a bar. Anywhere else (a CI log, a file) it is a plain line every ``plain_every``
    seconds and one for the last step, so that logs stay readable.

    Args:
        total: number of optimizer steps of the whole run.
        initial: steps done before this process (resume).
        stream: where it is shown; default stderr.
        plain_every: seconds between plain lines.
        clock: seconds, monotonic; for tests.
    """

    def __init__(
        self,
        total: int,
        *,
        initial: int = 0,
        stream: TextIO | None = None,
        plain_every: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._initial = self._step = initial
        self._stream = stream or sys.stderr
        self._plain_every = plain_every
        self._clock = clock
        self._started = self._printed = clock()
        self._text = ""
        self._bar: Any = None
        if self._stream.isatty() and _has_lines(self._stream):
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=initial,
                file=self._stream,
                unit="step",
                dynamic_ncols=True,
                smoothing=0.1,
                disable=False,  # the launcher silences every bar that does not say so
            )

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        tokens_per_second: float | None = None,
        memory_gib: float | None = None,
    ) -> None:
        """Shows that ``step`` optimizer steps are done, with what is known; None leaves a value out."""
        parts = []
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        if tokens_per_second is not None:
            parts.append(f"{count(tokens_per_second)} tok/s")
        if memory_gib is not None:
            parts.append(f"{memory_gib:.2f} GiB")
        if parts:
            self._text = ", ".join(parts)
        if self._bar is not None:
            self._bar.set_postfix_str(self._text, refresh=False)
            self._bar.update(step - self._step)
            self._step = step
            return
        self._step = step
        now = self._clock()
        if now - self._printed >= self._plain_every or step >= self._total:
            self._printed = now
            print(self._plain_line(now), file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the bar; its last state stays on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _plain_line(self, now: float) -> str:
        done = self._step - self._initial
        elapsed = now - self._started
        left = (self._total - self._step) * elapsed / done if done else 0.0
        parts = [f"step {self._step}/{self._total}"]
        if self._text:
            parts.append(self._text)
        parts.append(f"{duration(elapsed)} so far")
        if self._step < self._total and done:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)


def _has_lines(terminal: TextIO) -> bool:
    """Whether a terminal has a size: on one of 0 lines, as some containers give, tqdm shows nothing."""
    try:
        return os.get_terminal_size(terminal.fileno()).lines > 0
    except (OSError, ValueError):
        return True


def from_here(path: Path) -> str:
    """A path as one would type it in the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path)


def summary(
    metrics_path: str | Path,
    *,
    times: Mapping[str, float] | None = None,
    wall_seconds: float | None = None,
    checkpoint: str | Path | None = None,
    notes: Sequence[tuple[str, str]] = (),
) -> str:
    """The block of text that ends a run, made from ``metrics.jsonl``.

    Args:
        metrics_path: the file, or the folder that holds it.
        times: seconds per phase (:attr:`StepTimer.totals`); without it the file's times are added up, which
            miss what came after the last log (the final checkpoint).
        wall_seconds: how long the run took, set-up included.
        checkpoint: the last checkpoint, if one was saved.
        notes: more lines, as (label, text), e.g. ``("wandb", "wandb sync out/wandb/offline-run-...")``.
    """
    values = summarise(read_metrics(metrics_path))
    path = Path(metrics_path)
    lines: list[tuple[str, str]] = []
    if "steps" in values:
        lines.append(("steps", str(values["steps"])))
    for label, name in (("loss", "loss"), ("evaluation loss", "evaluation_loss")):
        if f"{name}_final" in values:
            first, final = f"{values[f'{name}_first']:.4f}", f"{values[f'{name}_final']:.4f}"
            lines.append((label, final if first == final else f"{first} -> {final}"))
    if "tokens_per_second" in values:
        text = f"{count(values['tokens_per_second'])} tok/s"
        if "trained_tokens_per_second" in values:
            text += f" ({count(values['trained_tokens_per_second'])} trained), median"
        lines.append(("speed", text))
    if "mfu" in values:
        lines.append(("MFU", f"{100 * values['mfu']:.1f} %, median"))
    if "tokens" in values:
        lines.append(("tokens", f"{values['tokens']:,}"))
    if "device_peak_active_gib" in values:
        reserved = values.get("device_peak_reserved_gib", 0.0)
        lines.append(
            ("device memory", f"{values['device_peak_active_gib']:.2f} GiB peak ({reserved:.2f} GiB reserved)")
        )
    if "host_rss_peak_gib" in values:
        pinned = values.get("host_pinned_gib", 0.0)
        text = f"{values['host_rss_peak_gib']:.2f} GiB peak"
        lines.append(("host memory", text + (f" ({pinned:.2f} GiB pinned)" if pinned >= 0.005 else "")))
    if times is None:
        prefix = "seconds_"
        times = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    spent = [f"{phase.replace('_', '+')} {duration(seconds)}" for phase, seconds in times.items() if seconds >= 0.05]
    if wall_seconds is not None:
        lines.append(("time", duration(wall_seconds) + (f": {', '.join(spent)}" if spent else "")))
    elif spent:
        lines.append(("time", ", ".join(spent)))
    if checkpoint is not None:
        lines.append(("checkpoint", from_here(Path(checkpoint))))
    lines.append(("metrics", from_here(path / "metrics.jsonl" if path.is_dir() else path)))
    lines.extend(notes)
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)


def duration(seconds: float) -> str:
    """``0.4 s``, ``12.3 s``, ``4 min 05 s``, ``2 h 07 min``."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count(number: float) -> str:
    """A rate with as many digits as it deserves: ``3.2``, ``87``, ``12,345``."""
    return f"{number:.1f}" if round(number, 1) < 10 else f"{number:,.0f}"

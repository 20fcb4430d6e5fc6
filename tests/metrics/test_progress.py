"""The bar on a terminal, plain lines elsewhere, and the summary that ends a run."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from offload.metrics.lines import say
from offload.metrics.progress import Progress, count, duration, summary


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_elsewhere_than_on_a_terminal_lines_are_plain_and_few() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, initial=20, stream=stream, plain_every=10, clock=clock)
    for step in range(21, 101):
        clock.now += 1
        progress.update(step, loss=200 / step, tokens_per_second=12345.6, memory_gib=7.891)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 8
    assert lines[0] == "step 30/100, loss 6.6667, 12,346 tok/s, 7.89 GiB, 10.0 s so far, 1 min 10 s left"
    assert lines[-1] == "step 100/100, loss 2.0000, 12,346 tok/s, 7.89 GiB, 1 min 20 s so far"
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_the_last_step_is_always_shown_with_what_was_known_last() -> None:
    stream = io.StringIO()
    progress = Progress(2, stream=stream, clock=Clock())
    progress.update(1, loss=3.0)
    progress.update(2)
    assert stream.getvalue() == "step 2/2, loss 3.0000, 0.0 s so far\n"


def test_on_a_terminal_it_is_a_bar_with_the_values_and_the_time_left() -> None:
    stream = Terminal()
    progress = Progress(4, initial=1, stream=stream)
    progress.update(2, loss=1.25, tokens_per_second=87.4, memory_gib=3.5)
    progress.update(4)
    progress.close()
    progress.close()
    last = stream.getvalue().split("\r")[-1]
    assert "4/4" in last and "100%" in last
    assert "loss 1.2500, 87 tok/s, 3.50 GiB" in last
    assert re.search(r"\d\d:\d\d<\d\d:\d\d", last), "elapsed<left"


def test_on_a_terminal_without_a_size_lines_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(stream, "fileno", lambda: 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((0, 0)))
    progress = Progress(1, stream=stream, clock=Clock())
    progress.update(1, loss=3.0)
    progress.close()
    assert stream.getvalue() == "step 1/1, loss 3.0000, 0.0 s so far\n"


def test_a_line_said_while_a_bar_is_shown_does_not_tear_it() -> None:
    stream = Terminal()
    progress = Progress(4, stream=stream)
    progress.update(1)
    say("checkpoint saved", stream=stream)
    progress.close()
    assert re.search(r"(^|\r|\x1b\[A)checkpoint saved\n", stream.getvalue())


def test_saying_works_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "tqdm", raising=False)
    say("one")
    say("two", stream=sys.stderr)
    assert capsys.readouterr() == ("one\n", "two\n")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_summary_tells_the_run(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "loss": 4.0 / step,
            "tokens_per_second": rate,
            "trained_tokens_per_second": rate / 2,
            "tokens_seen": 1000 * step,
            "mfu": 0.4 + step / 100,
            "memory/device_peak_active_gib": 10.0 + step,
            "memory/device_peak_reserved_gib": 20.0 + step,
            "memory/host_rss_peak_gib": 30.25,
            "memory/host_pinned_gib": 25.0,
        }
        for step, rate in ((1, 10.0), (2, 3000.0), (3, 1000.0), (4, 2000.0))
    ]
    rows[1]["evaluation/loss"] = 5.0
    rows[3]["evaluation/loss"] = 2.5
    write(tmp_path, rows)
    text = summary(
        tmp_path,
        times={"data": 1.0, "forward_backward": 100.0, "optimizer": 20.25, "checkpoint": 0.01},
        wall_seconds=3900.0,
        checkpoint=tmp_path / "step_4",
        notes=[("wandb", "wandb sync out/wandb/run")],
    )
    assert text.splitlines() == [
        "steps            4",
        "loss             4.0000 -> 1.0000",
        "evaluation loss  5.0000 -> 2.5000",
        "speed            2,000 tok/s (1,000 trained), median",
        "MFU              43.0 %, median",
        "tokens           4,000",
        "device memory    14.00 GiB peak (24.00 GiB reserved)",
        "host memory      30.25 GiB peak (25.00 GiB pinned)",
        "time             1 h 05 min: data 1.0 s, forward+backward 1 min 40 s, optimizer 20.2 s",
        f"checkpoint       {tmp_path / 'step_4'}",
        f"metrics          {tmp_path / 'metrics.jsonl'}",
        "wandb            wandb sync out/wandb/run",
    ]


def test_the_summary_of_a_short_cpu_run_leaves_out_what_there_is_not(tmp_path: Path) -> None:
    row = {"step": 1, "loss": None, "nonfinite": {"loss": "nan"}, "time/data": 0.5, "time/optimizer": 2.0}
    write(
        tmp_path,
        [{**row, "memory/device_peak_active_gib": 0.0}, {**row, "step": 2, "loss": 3.0, "mfu": None}],
    )
    assert summary(tmp_path / "metrics.jsonl").splitlines() == [
        "steps    2",
        "loss     3.0000",
        "time     data 1.0 s, optimizer 4.0 s",
        f"metrics  {tmp_path / 'metrics.jsonl'}",
    ]
    write(tmp_path, [])
    assert summary(tmp_path) == f"metrics  {tmp_path / 'metrics.jsonl'}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (245.0, "4 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7620.0, "2 h 07 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(3.21, "3.2"), (9.99, "10"), (87.4, "87"), (12345.6, "12,346")])
def test_rates(number: float, text: str) -> None:
    assert count(number) == text

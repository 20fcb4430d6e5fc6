"""Which trace a run left, and what the table, the page and the picture tell of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.cli.main import main
from offload.comparison import profiles
from offload.comparison.exposed import Account, UnitTime
from offload.comparison.runs import Run, read_runs
from tests.comparison.test_exposed import MAIN, complete, mark, write_trace


@pytest.fixture
def profiled(write: Callable[..., Path]) -> Callable[..., Path]:
    """``profiled(name, milliseconds)``: a run with a trace in which units expose so much."""

    def make(name: str, exposed: dict[str, float], **config: Any) -> Path:
        output_dir = f"/data/{name}"
        section = {"enabled": True, "output_dir": f"{output_dir}/profiles", **config}
        run = write(name, name, [3, 2, 1], config={"output_dir": output_dir, "profiler": section})
        leave(run / "profiles" / "step_11" / "trace.json", exposed)
        return run

    return make


def leave(path: Path, exposed: dict[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    events, now = [complete("user_annotation", "ProfilerStep#9", MAIN, 0, 100_000)], 1.0
    for name, milliseconds in exposed.items():
        events.append(mark(f"update {name}", MAIN, now, now + 1000 * milliseconds))
        now += 1000 * milliseconds + 1
    write_trace(path, events)


def found(run: Path) -> Path | None:
    return profiles.trace_of(read_runs([run])[0])


def rows(accounts: list[Account | None]) -> dict[str, list[Any]]:
    return {line.name.strip(): line.cells() for line in profiles.lines(accounts)}


def test_the_trace_goes_with_the_runs_folder(profiled: Any, tmp_path: Path) -> None:
    assert found(profiled("a", {"layers.0": 1})) == tmp_path / "a" / "profiles" / "step_11" / "trace.json"
    elsewhere = tmp_path / "elsewhere"
    leave(elsewhere / "step_4" / "trace.json.gz", {"head": 1})
    assert found(profiled("b", {}, output_dir=str(elsewhere))) == elsewhere / "step_4" / "trace.json.gz"
    assert found(profiled("c", {"layers.0": 1}, enabled=False)) is None


def test_the_newest_trace_of_the_first_process_is_read(profiled: Any, write: Any) -> None:
    run = profiled("a", {"layers.0": 1})
    for name in ("step_9/trace_rank10.json.gz", "step_9/trace_rank2.json.gz", "step_9/trace_rank0.json.gz"):
        leave(run / "profiles" / name, {"layers.0": 2})
    (run / "profiles" / "step_9" / "operations_rank0.txt").write_text("")
    os.utime(run / "profiles" / "step_11" / "trace.json", (1, 1))
    assert found(run) == run / "profiles" / "step_9" / "trace_rank0.json.gz"
    torchtunes = write("b", None, [1])
    leave(torchtunes / "profiles" / "iteration_10" / "r0-2026-11-22-10-30.1790857.pt.trace.json.gz", {"head": 1})
    assert found(torchtunes) is not None


def test_the_table_has_the_units_that_expose_most(profiled: Any, write: Any) -> None:
    many = {f"layers.{index}": 1 + index for index in range(12)}
    runs = read_runs([profiled("a", many), write("b", "b", [1]), profiled("c", {"layers.11": 24, "head": 6})])
    accounts, notes = profiles.accounts(runs)
    assert not notes and accounts[1] is None
    told = rows(accounts)
    assert told["total"] == ["78.00", "–", "30.00 (0.38x)"]
    assert told["share of the step"] == ["78.0%", "–", "30.0%"]
    assert told["layers.11"] == ["12.00", "–", "24.00"] and told["head"] == ["–", "–", "6.00"]
    assert told["3 other units"] == ["6.00", "–", "0.00"]
    assert told["update"] == ["78.00", "–", "30.00 (0.38x)"] and "copies up" not in told
    assert list(told)[2] == "layers.11" and told["steps in the trace"] == ["1", "–", "1"]


def test_where_no_run_has_a_trace_nothing_is_told(write: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write("a", "a", [1])
    assert main(["compare", "a"]) == 0
    out = capsys.readouterr()
    assert "exposed" not in out.out and out.err == ""
    assert 'class="units"' not in (tmp_path / "compared.html").read_text()


def test_a_trace_that_cannot_be_read_is_a_line_and_the_comparison_goes_on(
    profiled: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, cut = profiled("a", {"layers.0": 5}), profiled("b", {"layers.0": 5})
    path = cut / "profiles" / "step_11" / "trace.json"
    path.write_bytes(path.read_bytes()[:-200])
    assert main(["compare", "a", "b", "--json"]) == 0
    out = capsys.readouterr()
    assert out.err == f"note: {path.relative_to(tmp_path)}: it is damaged or cut short; exposed time is left out\n"
    assert json.loads(out.out)["exposed time per step (ms)"]["layers.0"] == [pytest.approx(5.0), None]
    assert whole.exists()


def test_the_page_has_a_bar_for_each_unit_and_run(
    profiled: Any, write: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    profiled("a", {"layers.0": 5, "<head>": 2})
    write("b", "b", [1])
    profiled("c", {"layers.0": 10})
    assert main(["compare", "a", "b", "c"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"total\s+7.00\s+–\s+10.00 \(1.43x\)", out)
    page = (tmp_path / "compared.html").read_text()
    units = re.findall(r'data-unit="([^"]+)">.*?</span><div>(.*?)</div></div>(?=<div class="unit"|</section>)', page)
    bars = {unit: re.findall(r'data-run="(\w)" data-exposed="([\d.]+)"', inner) for unit, inner in units}
    assert bars == {"layers.0": [("A", "5.00"), ("C", "10.00")], "&lt;head&gt;": [("A", "2.00"), ("C", "0.00")]}
    widths = re.findall(r'class="exposed" style="width:([\d.]+)%"', page)
    assert sorted(widths) == ["0.000", "10.000", "25.000", "50.000"]  # of the longest, exposed and update: 20 ms


def test_the_picture_stacks_a_bar_for_each_unit_and_run(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    from offload.comparison.picture import draw_several

    def made(scale: float) -> Account:
        units = {f"layers.{n}": UnitTime(scale * n / 1e3, 0.001, 0.002, 0.003) for n in range(32)}
        return Account(3, 1.5, units, True)

    row = {"step": 1, "loss": 1.0, "tokens_seen": 10, "tokens_per_second": 10.0}
    runs = [Run(tmp_path, [row], name) for name in ("a", "b", "c")]
    draw_several(runs, tmp_path / "out.png", None, [made(1.0), None, made(0.5)])
    figure = plt.gcf()
    axes = figure.axes[-1]
    assert len(axes.patches) == 32 * 4 * 2
    exposed = [bar.get_height() for bar in axes.patches[:32]]
    assert exposed == pytest.approx([n / 1e3 for n in range(32)])  # a step of 1.5 s is drawn in seconds
    assert [bar.get_y() for bar in axes.patches[32:64]] == pytest.approx(exposed)
    assert "A 0.496 s (33.1% of a step), C 0.248 s" in axes.get_title()
    figure.canvas.draw()
    labels = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(left.x1 <= right.x0 for left, right in zip(labels, labels[1:], strict=False))
    plt.close(figure)


def test_units_are_told_by_what_they_expose_in_any_run_and_times_in_the_unit_of_the_longest() -> None:
    runs = [
        Account(1, 0.5, {"head": UnitTime(exposed=0.05), "embedding": UnitTime(exposed=0.01)}, True),
        Account(1, 2.0, {"head": UnitTime(), "embedding": UnitTime(exposed=0.03)}, True),
    ]
    for known in (runs, runs[::-1]):
        assert profiles.by_exposure(known) == ["head", "embedding"]
        assert profiles.lines(known)[0].section == "exposed time per step (s)"

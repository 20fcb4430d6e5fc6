"""Pictures of runs: what is drawn, and scripts/plot_run.py."""

from __future__ import annotations

import itertools
from pathlib import Path

import plot_run  # scripts/ is on the path
import pytest

PNG = b"\x89PNG"


def test_several_runs_are_laid_over_each_other_under_their_labels(write, tmp_path: Path, monkeypatch, capsys) -> None:
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    runs = [write("a", "AdamW", [3, 2, 1]), write("b", "AdamW", [3, 1]), write("c", None, [2])]
    assert plot_run.main([str(run) for run in runs]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'compared.png'}\n"
    assert (tmp_path / "compared.png").read_bytes().startswith(PNG)
    figure = plt.gcf()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["AdamW (a)", "AdamW (b)", "c"]
    by_step, by_tokens, by_time, speed, steps, memory = figure.axes
    # Beside each faint curve its mean, and the held-out losses.
    assert [list(line.get_xdata()) for line in by_step.lines[:3]] == [[1, 2, 3], [1, 2, 3], [2]]
    assert [list(line.get_xdata()) for line in by_tokens.lines[:3]] == [[100, 200, 300], [100, 200, 300], [200]]
    assert list(by_time.lines[0].get_xdata()) == pytest.approx([2.0, 3.0, 3.0 + 2 / 3])
    assert list(speed.lines[0].get_ydata()) == [50.0, 100.0, 150.0]
    # Runs a, b, c in each phase; the first line of a run with more than one is left out.
    assert [bar.get_width() for bar in steps.patches[:3]] == pytest.approx([10.0, 10.0, 10.0])
    assert [bar.get_width() for bar in steps.patches[3:6]] == pytest.approx([1000 * 0.4 * 5 / 12, 200.0, 400.0])
    assert [bar.get_width() for bar in memory.patches] == [0.5] * 3
    plt.close(figure)


@pytest.mark.parametrize("count", [2, 7, 12])
def test_numbers_beside_the_bars_do_not_touch(count: int, write, tmp_path: Path, monkeypatch) -> None:
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    runs = [write(f"run{index}", f"AdamW {index}", [3, 2, 1]) for index in range(count)]
    assert plot_run.main([str(run) for run in runs]) == 0
    figure = plt.gcf()
    for axes in figure.axes[-2:]:
        boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
        assert len(boxes) >= count
        assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))
    heights = [axes.get_window_extent().height for axes in figure.axes]
    assert min(heights[:3]) > 300, "the curves keep their height"
    plt.close(figure)


def test_one_run_is_drawn_beside_its_metrics(write) -> None:
    run = write("a", "AdamW", [3, 2, 1])
    assert plot_run.main([str(run / "metrics.jsonl")]) == 0
    assert (run / "run.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "there is no run; give its output_dir or metrics.jsonl; did you mean"),
     ("empty", "nothing was logged yet"), ("damaged", "run.json is damaged")],
)  # fmt: skip
def test_what_is_no_run_is_one_line(name: str, message: str, write, tmp_path: Path, capsys) -> None:
    write("empty", "AdamW", [])
    (write("damaged", None, [1]) / "run.json").write_text("{")
    assert plot_run.main([str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line

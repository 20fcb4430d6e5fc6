"""scripts/plot_run.py: one run, several on top of each other, and what is no run."""

from __future__ import annotations

import json
from pathlib import Path

import plot_run  # scripts/ is on the path
import pytest

PNG = b"\x89PNG"


def write(folder: Path, label: str | None, losses: list[float]) -> Path:
    folder.mkdir()
    rows = [
        {
            "step": step, "loss": loss, "tokens_seen": 100 * step, "tokens_per_second": 50.0 * step,
            "memory/host_rss_peak_gib": 0.5, "memory/device_peak_allocated_gib": 0.0,
            **({"evaluation/loss": loss + 0.1} if step % 2 == 0 else {}),
        }
        for step, loss in enumerate(losses, 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if label is not None:
        (folder / "run.json").write_text(json.dumps({"label": label}))
    return folder


def test_several_runs_are_laid_over_each_other_under_their_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    runs = [write(tmp_path / "a", "AdamW", [3, 2, 1]), write(tmp_path / "b", "AdamW", [3, 1])]
    runs.append(write(tmp_path / "c", None, [2]))
    assert plot_run.main([str(run) for run in runs]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'compared.png'}\n"
    assert (tmp_path / "compared.png").read_bytes().startswith(PNG)
    figure = plt.gcf()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["AdamW (a)", "AdamW (b)", "c"]
    by_tokens, by_time, speed, memory = figure.axes
    # Beside each faint curve its mean, and the held-out losses.
    assert [list(line.get_xdata()) for line in by_tokens.lines[:3]] == [[100, 200, 300], [100, 200, 300], [200]]
    assert list(by_time.lines[0].get_xdata()) == pytest.approx([2.0, 3.0, 3.0 + 2 / 3])
    assert list(speed.lines[0].get_ydata()) == [50.0, 100.0, 150.0]
    assert [bar.get_width() for bar in memory.patches] == [0.5] * 3
    plt.close(figure)


def test_one_run_is_drawn_beside_its_metrics(tmp_path: Path) -> None:
    run = write(tmp_path / "a", "AdamW", [3, 2, 1])
    assert plot_run.main([str(run / "metrics.jsonl")]) == 0
    assert (run / "run.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "there is no run; give its output_dir or metrics.jsonl"), ("empty", "nothing was logged yet"),
     ("damaged", "run.json is damaged")],
)  # fmt: skip
def test_what_is_no_run_is_one_line(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "empty", "AdamW", [])
    (write(tmp_path / "damaged", None, [1]) / "run.json").write_text("{")
    assert plot_run.main([str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line

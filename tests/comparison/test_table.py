"""The numbers of a comparison, against numbers written down by hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from offload.comparison import table
from offload.comparison.runs import Run, read_runs


def by_name(lines: list[table.Line]) -> dict[tuple[str, str], list]:
    return {(line.section, line.name.strip()): line.values for line in lines}


def test_speed_leaves_out_the_first_line_and_tells_its_spread(write) -> None:
    runs = read_runs([write("a", "A", [5, 4, 3, 2, 1]), write("b", "B", [5, 4, 3, 2, 1], rate=100.0)])
    found = by_name(table.lines(runs))
    assert found["speed", "tokens per second"] == [175.0, 350.0]  # of 100, 150, 200, 250
    assert found["speed", "half of the lines"] == ["112 to 238", "225 to 475"]
    (speed,) = [line for line in table.lines(runs) if line.name == "tokens per second"]
    assert speed.cells() == ["175", "350 (2.00x)"]


def test_the_time_of_a_step_is_taken_apart(write) -> None:
    (run,) = read_runs([write("a", "A", [3, 2, 1])])
    times = table.step_times(run)
    # 100 tokens at 100 and at 150 per second; 0.4 / 2 and 0.4 / 3 seconds of them forward and backward.
    assert times["whole"] == pytest.approx((1 + 2 / 3) / 2)
    assert times["forward_backward"] == pytest.approx((0.4 / 2 + 0.4 / 3) / 2)
    assert times["rest"] == pytest.approx(times["whole"] - 0.01 - (0.5 / 2 + 0.5 / 3) / 2)


def test_numbers_are_in_the_unit_that_their_heading_names(write) -> None:
    runs = read_runs([write("a", "A", [3, 2, 1], rate=1000.0)])
    found = by_name(table.lines(runs))
    assert found["time of a step (ms)", "whole"] == [pytest.approx(1000 * (100 / 2000 + 100 / 3000) / 2)]
    assert found["time of a step (ms)", "data"] == [pytest.approx(10.0)]


def test_losses_are_compared_at_as_many_tokens_as_every_run_has_seen(write) -> None:
    long, short = write("a", "A", [9, 8, 7, 6, 1, 0.5]), write("b", "B", [9, 7, 5, 3])
    found = by_name(table.lines(read_runs([long, short])))
    assert found["loss at 400 tokens", "training"] == [6, 3]
    assert found["loss at 400 tokens", "held out"] == pytest.approx([6.1, 3.1])
    assert found["loss of the whole run", "training, last"] == [0.5, 3]


def test_the_loss_at_the_end_is_a_mean_over_its_last_twentieth(write) -> None:
    (run,) = read_runs([write("a", "A", [float(step) for step in range(1, 101)])])
    assert table.loss_at(run, 10_000) == pytest.approx((96 + 97 + 98 + 99 + 100) / 5)
    assert table.loss_at(run, 9_950) == pytest.approx((95 + 96 + 97 + 98 + 99) / 5)


def test_only_what_differs_in_the_configurations_is_told(write, tmp_path) -> None:
    def config(name: str, **more: object) -> dict:
        return {"output_dir": f"/data/{name}", "epochs": 1, "optimizer": {"lr": 1e-5, **more},
                "profiler": {"output_dir": f"/data/{name}/profiles"}}  # fmt: skip

    a = write("a", "A", [1], config=config("a", fused=True), environment={"torch": "2.11"})
    b = write("b", "B", [1], config=config("b", momentum=None), environment={"torch": "2.13"})
    found = by_name(table.differences(read_runs([a, b])))
    assert found == {
        ("configuration", "optimizer.fused"): ["true", None],
        ("configuration", "optimizer.momentum"): [None, "null"],
        ("machine", "torch"): ["2.11", "2.13"],
    }


def test_a_run_without_a_record_differs_in_nothing_known(write) -> None:
    a, b = write("a", "A", [1], config={"epochs": 1}), write("b", None, [1])
    assert table.differences(read_runs([a, b])) == []


def test_a_killed_run_and_an_earlier_run_in_the_same_folder_are_read(write) -> None:
    folder = write("a", "new", [3, 2], status="running")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    (folder / "metrics.1.jsonl").write_text((folder / "metrics.jsonl").read_text())
    (folder / "run.1.json").write_text(json.dumps({"label": "old", "status": "done", "resumed_from_step": 4}))
    runs = read_runs([folder, folder / "metrics.1.jsonl"])
    assert [run.label for run in runs] == ["new", "old"]
    assert by_name(table.lines(runs))["run", "status"] == ["running", "done, resumed from step 4"]


def test_a_run_whose_process_is_gone_was_killed(write, monkeypatch) -> None:
    """It says that it runs; the lock of its folder names a process of this host that there is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    monkeypatch.setattr(table, "oom_kills", lambda: 3)
    folders = [write(f"run{kills}", f"{kills}", [3, 2], status="running", oom_kills=kills) for kills in (3, 2)]
    for pid, statuses in ((os.getpid(), ["running"] * 2), (gone.pid, ["killed", "killed, out of host memory"])):
        for folder in folders:
            (folder / ".lock").write_text(f"process {pid} on {socket.gethostname()}, since 2026-01-01 12:00:00\n")
        assert by_name(table.lines(read_runs(folders)))["run", "status"] == statuses


def test_columns_that_do_not_fit_go_below(write) -> None:
    runs = read_runs([write(f"run{index}", f"label {index}", [3, 2, 1]) for index in range(6)])
    text = table.render(table.lines(runs), runs, width=60)
    assert max(map(len, text.splitlines()[6:])) <= 60
    heads = [line.split()[1:] for line in text.splitlines() if line.startswith("speed")]
    assert len(heads) > 1 and sum(heads, []) == list("ABCDEF")


def test_long_values_are_told_by_their_end(write) -> None:
    deep = "/data/" + "x" * 60
    runs = read_runs([write(name, name, [1], config={"path": f"{deep}/{name}"}) for name in "ab"])
    text = table.render(table.differences(runs), runs, width=200)
    assert f"…{'x' * 37}/a" in text and deep not in text


def test_letters_go_on_after_z() -> None:
    assert [table.letter_of(index) for index in (0, 25, 26, 52)] == ["A", "Z", "A2", "A3"]


@pytest.mark.parametrize(("status", "told"), [("running", "killed"), ("done", "done"), (None, None)])
def test_only_a_run_that_had_not_ended_was_killed(
    status: str | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "is_left", lambda folder: True)
    record = {} if status is None else {"status": status}
    assert table._status(Run(Path("run"), [{"step": 1}], "run", record)) == told

"""metrics.jsonl is complete whatever happens; mirrors neither stop nor stall."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.metrics.log import MetricLog, _MirrorThread, read_metrics


class Recorder:
    """A mirror with torchtune's interface that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()

    def log_dict(self, payload: dict[str, float], step: int) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append((step, dict(payload)))

    def log_config(self, config: Any) -> None:
        self.calls.append(("config", config))

    def close(self) -> None:
        self.calls.append(("close",))


def rows(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_line_holds_the_values_the_step_and_the_time(tmp_path: Path) -> None:
    log = MetricLog(tmp_path)
    before = time.time()
    log.log({"loss": torch.tensor(2.5), "lr": 1e-5, "tokens_seen": 2**40, "grad_norm": None}, step=3)
    log.close()
    (row,) = rows(tmp_path)
    assert before - 0.01 <= row.pop("time") <= time.time() + 0.01
    assert row == {"step": 3, "loss": 2.5, "lr": 1e-5, "tokens_seen": 2**40, "grad_norm": None}


def test_values_survive_to_the_last_bit(tmp_path: Path) -> None:
    value = math.pi / 7
    with_float32 = torch.tensor(value)
    log = MetricLog(tmp_path)
    log.log({"double": value, "float32": with_float32}, step=1)
    log.close()
    (row,) = rows(tmp_path)
    assert row["double"] == value
    assert torch.tensor(row["float32"]) == with_float32


def test_non_finite_values_are_null_and_named(tmp_path: Path) -> None:
    mirror = Recorder()
    log = MetricLog(tmp_path, [mirror])
    log.log({"loss": float("nan"), "grad_norm": torch.tensor(float("-inf")), "lr": 0.1}, step=1)
    log.log({"loss": 1.0}, step=2)
    log.close()
    first, second = rows(tmp_path)
    assert first["loss"] is None and first["grad_norm"] is None and first["lr"] == 0.1
    assert first["nonfinite"] == {"loss": "nan", "grad_norm": "-inf"}
    assert "nonfinite" not in second
    assert math.isnan(mirror.calls[0][1]["loss"]), "a mirror gets the number itself"


def test_what_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    log = MetricLog(tmp_path)
    with pytest.raises(TypeError, match="metric 'loss' is 'high'"):
        log.log({"loss": "high"}, step=1)
    log.close()
    assert rows(tmp_path) == []


def test_each_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    """A process killed with SIGKILL right after a log has lost nothing."""
    script = (
        "import os, signal, sys\n"
        "from offload.metrics.log import MetricLog\n"
        "log = MetricLog(sys.argv[1])\n"
        "for step in range(1, 8): log.log({'loss': 1 / step}, step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 8))


def test_a_resumed_run_drops_what_it_will_write_again(tmp_path: Path) -> None:
    log = MetricLog(tmp_path)
    for step in range(1, 6):
        log.log({"loss": float(step)}, step)
    log.close()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 6, "lo')  # torn by a kill

    log = MetricLog(tmp_path, resume_step=3)
    log.log({"loss": 40.0}, 4)
    log.close()
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(b"".join(before.splitlines(keepends=True)[:3]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 6, "lo', b'{"step": 6}', b"\x00\x00", b"6"])
def test_a_resumed_run_never_writes_behind_a_torn_line(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 5, "loss": 1.0}\n' + torn)
    log = MetricLog(tmp_path, resume_step=6)
    log.log({"loss": 2.0}, 6)
    log.close()
    assert [row["step"] for row in rows(tmp_path)] == [5, 6]


def test_a_fresh_run_sets_an_earlier_file_aside(tmp_path: Path) -> None:
    for run in range(3):
        log = MetricLog(tmp_path)
        log.log({"loss": float(run)}, 1)
        log.close()
    names = {path.name: json.loads(path.read_text())["loss"] for path in tmp_path.iterdir()}
    assert names == {"metrics.1.jsonl": 0.0, "metrics.2.jsonl": 1.0, "metrics.jsonl": 2.0}


def test_a_full_disk_costs_one_warning_and_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricLog(tmp_path)
    log.log({"loss": 1.0}, 1)
    file = log._file

    class Short:
        """Takes ten bytes of what it is given, as a disk that fills up does."""

        def write(self, line: bytes) -> int:
            return file.write(line[:10])

        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

    monkeypatch.setattr(log, "_file", Short())
    log.log({"loss": 2.0}, 2)
    log.log({"loss": 2.5}, 3)
    assert [row["step"] for row in rows(tmp_path)] == [1]
    monkeypatch.undo()
    log.log({"loss": 3.0}, 4)
    log.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    (line,) = capsys.readouterr().err.splitlines()
    assert "is the disk full" in line and "training goes on" in line


def test_lines_that_never_found_room_are_counted_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricLog(tmp_path)
    monkeypatch.setattr(log, "_append", lambda line: os.write(os.open("/dev/full", os.O_WRONLY), line))
    for step in (1, 2):
        log.log({"loss": 1.0}, step)
    log.close()
    first, last = capsys.readouterr().err.splitlines()
    assert "No space left on device: training goes on" in first and "lacks the last 2 lines" in last


@pytest.mark.parametrize("how", ["deleted", "moved", "deleted with its folder"])
def test_a_file_that_goes_during_the_run_is_written_again(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricLog(tmp_path / "run")
    for step in (1, 2):
        log.log({"loss": 1.0}, step)
    if how == "deleted":
        log.path.unlink()
    elif how == "moved":
        log.path.rename(tmp_path / "moved.jsonl")
    else:
        shutil.rmtree(log.path.parent)
    log.log({"loss": 1.0}, 3)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    log.path.unlink()
    log.restore()
    log.log({"loss": 1.0}, 4)
    log.close()
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("was deleted during the run") == 2


def test_a_file_that_an_editor_puts_in_its_place_is_written_on(tmp_path: Path) -> None:
    log = MetricLog(tmp_path)
    log.log({"loss": 1.0}, 1)
    (tmp_path / "new").write_bytes(log.path.read_bytes())
    (tmp_path / "new").replace(log.path)
    log.log({"loss": 1.0}, 2)
    log.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_leftovers_of_a_killed_resume_are_removed(tmp_path: Path) -> None:
    log = MetricLog(tmp_path)
    log.log({"loss": 1.0}, 1)
    log.close()
    (tmp_path / ".metrics.jsonl.tmp-12345").write_text("half")
    MetricLog(tmp_path, resume_step=1).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_ctrl_c_stops_waiting_for_a_slow_mirror_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(Recorder):
        def close(self) -> None:
            time.sleep(20)

    log = MetricLog(tmp_path, [Slow(), Slow()])
    log.log({"loss": 1.0}, 1)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    log.close()
    assert time.monotonic() - start < 5
    assert capsys.readouterr().err.count("is left behind; metrics.jsonl is complete") == 2


def test_reading_leaves_out_a_torn_last_line_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    path.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: not a JSON object"):
        read_metrics(path)


def test_mirrors_get_every_value_in_order_on_another_thread(tmp_path: Path) -> None:
    mirror = Recorder()
    log = MetricLog(tmp_path, [mirror])
    log.log_config({"a": 1})
    for step in range(1, 200):
        log.log({"loss": 1 / step, "unknown": None}, step)
    log.close()
    assert mirror.calls == [
        ("config", {"a": 1}),
        *((step, {"loss": 1 / step}) for step in range(1, 200)),
        ("close",),
    ]
    assert mirror.threads and threading.get_ident() not in mirror.threads


def test_close_tells_the_exit_code_to_mirrors_that_take_it_and_works_twice(tmp_path: Path) -> None:
    class WithCode(Recorder):
        def close(self, exit_code: int = 0) -> None:  # type: ignore[override]
            self.calls.append(("close", exit_code))

    mirrors = [WithCode(), Recorder()]
    log = MetricLog(tmp_path, mirrors)
    log.close(exit_code=130)
    log.close()
    assert [mirror.calls for mirror in mirrors] == [[("close", 130)], [("close",)]]


@pytest.mark.parametrize("method", ["log_config", "log_dict", "close"])
def test_a_mirror_that_fails_is_told_once_and_switched_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    class Broken(Recorder):
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise SystemExit("no\n  luck.")  # not even an Exception

    broken, healthy = Broken(), Recorder()
    setattr(broken, method, fail)
    log = MetricLog(tmp_path, [broken, healthy])
    log.log_config({})
    for step in (1, 2, 3):
        log.log({"loss": 1.0}, step)
        time.sleep(0.01)
    log.close()
    assert len(rows(tmp_path)) == 3
    assert [call[0] for call in healthy.calls] == ["config", 1, 2, 3, "close"]
    error = capsys.readouterr().err
    assert error.count("warning:") == 1
    assert f"Broken.{method} failed and is switched off: SystemExit: no luck. metrics.jsonl" in error


def test_a_mirror_that_hangs_stalls_neither_logging_nor_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class Hanging(Recorder):
        abandoned = False

        def log_dict(self, payload: dict[str, float], step: int) -> None:
            release.wait(60)

        def abandon(self) -> None:
            self.abandoned = True

    monkeypatch.setattr(_MirrorThread, "CAPACITY", 5)
    mirror = Hanging()
    log = MetricLog(tmp_path, [mirror], mirror_patience=0.2)
    start = time.perf_counter()
    for step in range(1, 51):
        log.log({"loss": 1.0}, step)
    assert time.perf_counter() - start < 1
    log.close()
    assert time.perf_counter() - start < 3
    release.set()
    assert len(rows(tmp_path)) == 50
    error = capsys.readouterr().err
    assert error.count("does not keep up") == 1
    assert error.count("did not finish within 0.2 s") == 1
    assert mirror.abandoned

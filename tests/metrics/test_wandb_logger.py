"""Real wandb, offline: every value arrives, and no state of key, server or process stops or stalls a run."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from offload.errors import UserError
from offload.metrics import wandb_logger
from offload.metrics.environment import environment
from offload.metrics.log import MetricLog, read_metrics
from offload.metrics.wandb_logger import WandBLogger

READER = Path(__file__).with_name("wandb_file.py")
KEY = "0123456789" * 4


def read_run(path: Path) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("wandb_file", READER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["wandb_file"] = module
    spec.loader.exec_module(module)
    return module.read_run(path)


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable, no login, no settings file of this machine's user has a say."""
    for name in list(os.environ):
        if name.startswith("WANDB"):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / ".netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(home))
    monkeypatch.chdir(tmp_path)  # where wandb keeps runs
    # Nothing in these tests may leave this machine, whatever goes wrong: this port is closed.
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # The code sets it; monkeypatch takes it away again.
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


@contextlib.contextmanager
def server(status: int = 404, delay: float = 0.0) -> Iterator[str]:
    """An HTTP server that answers everything with ``status``, ``delay`` seconds late."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            time.sleep(delay)
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_HEAD = do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
    finally:
        httpd.shutdown()
        httpd.server_close()


def train(out: Path, logger: WandBLogger, *, steps: int = 3, exit_code: int = 0, **config: Any) -> None:
    """What a recipe does with a logger."""
    log = MetricLog(out, [logger], resume_step=0 if config.get("resume_from_checkpoint") else None)
    log.log_config(OmegaConf.create({"output_dir": str(out), "device": "cpu", **config}))
    for step in range(1, steps + 1):
        log.log({"loss": 2.0 / step, "time/data": step / 7, "tokens_seen": 2**40 + step}, step)
    log.close(exit_code)


def test_an_offline_run_holds_what_metrics_jsonl_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    out = tmp_path / "tiny_llama_offload"
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    logger = WandBLogger(tags=["a", "b"], group="pair")
    log = MetricLog(out, [logger])
    config = OmegaConf.create(
        {"output_dir": str(out), "lr": 1e-5, "optimizer": {"_component_": "x.Y", "lr": "${lr}"}, "none": None}
    )
    log.log_config(config)
    steps = 3000  # written faster than wandb takes them: nothing may be dropped
    for step in range(1, steps + 1):
        log.log({"loss": 2 / step, "lr": 1e-5 / step, "tokens_seen": 2**40 + step, "grad_norm": None}, step)
    log.log({"loss": float("nan"), "evaluation/loss": 1 / 3}, steps + 1)
    start = time.perf_counter()
    log.close(exit_code=3)
    assert time.perf_counter() - start < 20
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers

    run = read_run(work)
    rows = read_metrics(out)
    assert len(rows) == len(run.history) == steps + 1
    for row, mirrored in zip(rows[:-1], run.history[:-1], strict=True):
        expected = {name: value for name, value in row.items() if name not in ("step", "time") and value is not None}
        got = {name: value for name, value in mirrored.items() if not name.startswith("_")}
        assert mirrored["_step"] == row["step"] and got == expected
    assert rows[-1]["evaluation/loss"] == run.history[-1]["evaluation/loss"] == 1 / 3
    assert math.isnan(run.history[-1]["loss"]) and rows[-1]["nonfinite"] == {"loss": "nan"}

    assert re.fullmatch(r"tiny_llama_offload-\d{8}-\d{6}-[0-9a-f]{4}", run.run_id)
    assert (out / "wandb_run_id.txt").read_text().strip() == run.run_id
    assert run.project == "tune-offload" and run.tags == ["a", "b"] and run.exit_code == 3
    assert run.config["optimizer"] == {"_component_": "x.Y", "lr": 1e-5} and run.config["none"] is None
    assert run.config["environment"]["torch"] == environment()["torch"]

    assert [path.name for path in work.iterdir()] == ["wandb"], "where `wandb sync` and `wandb leet` look"
    captured = capfd.readouterr()
    assert captured.err == "", "wandb itself says nothing"
    (line,) = captured.out.splitlines()
    assert line.startswith("wandb: offline (no key is configured: `wandb login`), run tiny_llama_offload-")
    assert logger.directory is not None and line.endswith(f": wandb/{logger.directory.name}")
    assert logger.note() == ("wandb", f"wandb sync wandb/{logger.directory.name}")
    assert (logger.directory / f"run-{run.run_id}.wandb").is_file()


def test_a_resumed_run_continues_the_wandb_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    train(out, WandBLogger(name="my run"), steps=1)
    first = (out / "wandb_run_id.txt").read_text()
    time.sleep(1.1)  # wandb names its folders by the second
    train(out, WandBLogger(name="my run"), steps=2, resume_from_checkpoint=True)
    assert (out / "wandb_run_id.txt").read_text() == first
    assert first.startswith("my-run-")
    parts = sorted(tmp_path.rglob("run-*.wandb"))
    assert [read_run(part).run_id for part in parts] == [first.strip()] * 2
    assert f"continuing {first.strip()}" in capsys.readouterr().out
    time.sleep(1.1)
    train(out, WandBLogger(name="my run"), steps=1)
    assert (out / "wandb_run_id.txt").read_text() != first, "a fresh run is a new one"


def test_runs_in_one_folder_of_wandb_keep_their_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "shared"))
    ids = {}
    for name in ("a", "b"):
        train(tmp_path / name, WandBLogger(), steps=1)
        ids[name] = (tmp_path / name / "wandb_run_id.txt").read_text().strip()
    assert ids["a"] != ids["b"]
    time.sleep(1.1)  # wandb names its folders by the second
    train(tmp_path / "a", WandBLogger(), steps=2, resume_from_checkpoint=True)
    parts = [read_run(part).run_id for part in (tmp_path / "shared").rglob("run-*.wandb")]
    assert sorted(parts) == sorted([ids["a"], ids["a"], ids["b"]])


def test_runs_lie_with_their_output_where_the_current_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and real(path, mode))
    train(tmp_path / "out", WandBLogger(), steps=1)
    assert len(read_run(tmp_path / "out" / "wandb").history) == 1


def test_a_run_has_what_to_group_by_and_what_it_came_to(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "out", [WandBLogger()])
    log.log_config({"output_dir": str(tmp_path / "out"), "lr": 1e-5})
    log.log_facts({"label": "torch.optim.AdamW fp32, plain", "label_parts": {"master": None}})
    for step in (1, 2, 3):
        log.log({"loss": (step - 2.25) ** 2}, step)
    log.log_summary({"loss_best": 0.0625, "seconds_data": 0.5, "steps": 3})
    log.close()
    run = read_run(tmp_path)
    assert run.config["label"] == "torch.optim.AdamW fp32, plain" and run.config["lr"] == 1e-5
    assert run.config["label_parts"] == {"master": None}
    assert {name: value for name, value in run.summary.items() if name.startswith("summary/")} == {
        "summary/loss_best": 0.0625, "summary/seconds_data": 0.5, "summary/steps": 3,
    }  # fmt: skip
    assert len(run.history) == 3, "no step is added"


def test_environment_variables_have_their_usual_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_RUN_ID", "chosen-id")
    monkeypatch.setenv("WANDB_TAGS", "x,y")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    train(tmp_path / "out", WandBLogger())
    run = read_run(tmp_path / "elsewhere")
    assert (run.project, run.run_id, run.tags) == ("theirs", "chosen-id", ["x", "y"])
    assert WandBLogger(project="mine")._project == "mine"


@pytest.mark.parametrize("variable", [("WANDB_MODE", "disabled"), ("WANDB_DISABLED", "true")])
def test_switched_off_it_writes_nothing_and_does_not_import_wandb(
    variable: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(*variable)
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger = WandBLogger()
    train(tmp_path / "out", logger)
    assert capsys.readouterr().out.startswith(f"wandb: off ({variable[0]}")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["metrics.jsonl"]
    assert logger.note() is None


def test_without_the_package_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb raises ImportError
    train(tmp_path / "out", WandBLogger(mode="online"))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("wandb: off (") and "pip install wandb" in line
    assert len(read_metrics(tmp_path / "out")) == 3


def test_a_key_without_a_server_means_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    train(tmp_path / "out", WandBLogger())
    assert "wandb: offline (http://127.0.0.1:9 does not answer: " in capsys.readouterr().out
    assert len(read_run(tmp_path).history) == 3


def test_a_key_in_netrc_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    netrc = Path(os.environ["NETRC"])
    netrc.write_text(f"machine 127.0.0.1:9\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    train(tmp_path / "out", WandBLogger())
    assert "wandb: offline (http://127.0.0.1:9 does not answer: " in capsys.readouterr().out


def test_a_server_that_hangs_costs_the_check_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_logger, "_SERVER_CHECK_TIMEOUT", 0.3)
    with socket.socket() as listener:  # takes connections and never says a word
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        start = time.perf_counter()
        train(tmp_path / "out", WandBLogger())
        assert time.perf_counter() - start < 8
    assert "does not answer: timed out" in capsys.readouterr().out
    assert len(read_run(tmp_path).history) == 3


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateway_without_a_server_is_no_server(status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server(status) as url:
        logger = WandBLogger()
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        assert logger._obstacle(url) == f"{url} does not answer: HTTP {status}"


def test_any_answer_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with server(404) as url:
        assert WandBLogger()._obstacle(url) is None


@pytest.mark.parametrize(("mode", "key"), [("auto", KEY), ("online", KEY), ("auto", "too short")])
def test_a_server_that_refuses_means_offline(
    mode: Any, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It answers the check, then wandb's own requests fail: the run goes on offline and loses nothing."""
    monkeypatch.setattr(wandb_logger, "_INIT_TIMEOUT", 1.0)
    monkeypatch.setenv("WANDB_API_KEY", key)
    with server(404) as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        train(tmp_path / "out", WandBLogger(mode=mode))
        captured = capfd.readouterr()
        assert f"wandb: offline ({url} refused: " in captured.out
        assert captured.err == ""
    (part,) = (path for path in tmp_path.rglob("offline-run-*/run-*.wandb") if read_run(path).history)
    assert [row["loss"] for row in read_run(part).history] == [2.0, 1.0, 2 / 3]


@contextlib.contextmanager
def garbled(answer: bytes, *, head: bytes | None = None) -> Iterator[str]:
    """A server that answers every request with these bytes, and HEAD with others where they are given."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                request = self.request.recv(65536)
                self.request.sendall(head if head is not None and request.startswith(b"HEAD") else answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_address[1]}"
        listener.shutdown()


GOOD_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "head"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", None),
        (b"", None),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\n<html>oh!", GOOD_HEAD),
        (b"\x00\xff not HTTP\r\n\r\n", GOOD_HEAD),
    ],
    ids=["another protocol", "nothing", "too many headers", "a page that is no JSON", "noise behind the check"],
)
def test_a_server_that_answers_garbage_means_offline(
    answer: bytes,
    head: bytes | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wandb_logger, "_INIT_TIMEOUT", 1.0)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with garbled(answer, head=head) as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        train(tmp_path / "out", WandBLogger())
    captured = capfd.readouterr()
    assert "wandb: offline (" in captured.out and captured.err == ""
    (part,) = (path for path in tmp_path.rglob("offline-run-*/run-*.wandb") if read_run(path).history)
    assert [row["loss"] for row in read_run(part).history] == [2.0, 1.0, 2 / 3]


def test_online_without_a_key_never_asks_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "out", WandBLogger(mode="online"))
    assert "wandb: offline (no key is configured: `wandb login`)" in capsys.readouterr().out
    assert len(read_run(tmp_path).history) == 3


def test_an_unknown_mode_is_the_users_error() -> None:
    with pytest.raises(UserError, match="metric_logger.mode: 'ofline' is not one of auto, online, offline, disabled"):
        WandBLogger(mode="ofline")  # type: ignore[arg-type]


def test_starting_wandb_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import and init take about a second; the training thread does not wait for them."""
    released, waited = threading.Event(), []
    real = importlib.import_module

    def slow(name: str) -> Any:
        waited.append((threading.get_ident(), released.wait(5)))
        return real(name)

    monkeypatch.setattr(wandb_logger.importlib, "import_module", slow)
    log = MetricLog(tmp_path, [WandBLogger()])
    log.log_config({"output_dir": str(tmp_path)})
    log.log({"loss": 1.0}, 1)
    released.set()
    log.close()
    ((thread, in_time),) = waited
    assert in_time, "logging waited for wandb"
    assert thread != threading.get_ident()
    assert len(read_run(tmp_path).history) == 1


def test_a_wandb_process_that_hangs_delays_the_end_by_the_patience_only(tmp_path: Path) -> None:
    """wandb's exit hook waits for its process for ever; the run must end all the same."""
    script = f"""
import os, signal, time
from offload.metrics.log import MetricLog
from offload.metrics.wandb_logger import WandBLogger
logger = WandBLogger(mode="offline")
log = MetricLog({str(tmp_path / "out")!r}, [logger], mirror_patience=0.5)
log.log_config({{"output_dir": {str(tmp_path / "out")!r}}})
while logger.directory is None:
    time.sleep(0.01)
from wandb.sdk import wandb_setup
os.kill(wandb_setup.singleton()._connection._proc._process.pid, signal.SIGSTOP)
print(time.monotonic(), flush=True)
log.log({{"loss": 1.0}}, 1)
log.close()
print("closed", flush=True)
"""
    done = run_python(script)
    stopped, closed = done.stdout.split()[-2:]
    assert time.monotonic() - float(stopped) < 12  # one clock for all processes of a host
    assert closed == "closed"
    assert "WandBLogger did not finish within 0.5 s" in done.stderr
    assert done.returncode == 0
    assert len(read_metrics(tmp_path / "out")) == 1


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_environment_is_json_and_names_the_versions() -> None:
    facts = environment("cpu")
    assert json.loads(json.dumps(facts)) == facts
    assert {"python", "system", "torch", "torchtune", "torchao", "device"} <= set(facts)
    assert facts["device"].startswith("cpu")
    assert facts["cores"] >= 1 and facts["host_memory_gib"] > 0 and facts["processor"]


@pytest.mark.parametrize("home", [None, "/dev/null"])
def test_without_a_cache_folder_nothing_is_logged_on_the_terminal(home: str | None, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("HOME", "WANDB_CACHE_DIR")}
    env.update({"TMPDIR": str(tmp_path)} if home is None else {"TMPDIR": str(tmp_path), "HOME": home})
    code = "from offload.metrics.wandb_logger import has_key; import wandb; print(has_key(wandb)); wandb.teardown()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_full_disk_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """wandb's own log is beside the run."""

    def full(self: Any) -> None:
        raise OSError(28, "No space left on device")

    logger = WandBLogger(mode="offline")
    monkeypatch.setattr("logging.FileHandler.flush", full, raising=False)
    logger.log_config({"output_dir": str(tmp_path / "run")})
    monkeypatch.undo()
    logger.close()
    assert "Traceback" not in capfd.readouterr().err
